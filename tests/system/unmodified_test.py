"""Programs that know nothing of Sluice, under `sluice run` with a pool on the host."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import call
from patience import PATIENCE_SECONDS, eventually

JOB = Path(__file__).with_name("unmodified_job.py")
STEPS = 40
MIB = 1 << 20

# A program asks while it runs who has joined, and how many bytes each has.
CLIENTS = """
    import json, os, subprocess, sys

    def clients():
        words = [os.environ["SLUICE_BROKER"], "status", "--json"]
        done = subprocess.run(words, capture_output=True, check=True)
        return {each["pid"]: each["bytes"] for each in json.loads(done.stdout)["clients"]}

    def here():
        return clients().get(os.getpid(), 0)
"""
# 4 MiB, of the pool for whoever shares.
ALLOCATES = CLIENTS + """
    import torch

    held = torch.ones(1 << 20)
"""


def run(sluice, command, options=(), **how):
    """As `launching.run`, with room for several: each asks for 16 MiB first."""
    return call(sluice, "run", "--backend", "host", "--memory", "64MiB", *options, "--", *command, **how)


def program(*parts: str) -> str:
    return "".join(map(textwrap.dedent, parts))


def python(*parts: str, options=()) -> list[str]:
    return [sys.executable, *options, "-c", program(*parts)]


def said_by(sluice, command, options=(), **how):
    """The last line of what it prints, read as JSON, and what it says on standard error."""
    done = run(sluice, command, options, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@contextlib.contextmanager
def training(world):

    until, counted = world.folder / "until", world.folder / "counted"
    job = subprocess.Popen([world.program, "run", "--memory", "64MiB", "--require-pool", "--name", "plain", "--", sys.executable, JOB,
                            str(STEPS), until, counted], stdout=subprocess.PIPE, text=True)
    job.steps = lambda: int(counted.read_text() or 0) if counted.exists() else 0
    try:
        eventually(job.steps, "it trains")
        yield job
        until.touch()
        job.said = json.loads(job.communicate(timeout=PATIENCE_SECONDS)[0])
        assert job.returncode == 0
    finally:
        job.kill()
        job.communicate()


def test_it_is_a_tenant_with_memory_of_the_pool_until_it_ends(world):
    with training(world) as job:
        seen = world.job("plain")
        assert seen["kind"] == "training" and seen["persistent_bytes"] >= 4 * MIB, seen
        shown = call(world.program, "pool", "show")
        assert "plain" in shown.stdout and "persistent" in shown.stdout, shown.stderr
    assert not job.said["knows"]
    done = subprocess.run([sys.executable, JOB, str(STEPS)], capture_output=True, check=True, text=True)
    assert job.said["losses"][:STEPS] == json.loads(done.stdout)["losses"]


def test_it_pauses_while_the_server_computes(world):
    from server_models import Slow
    from serving import load_without_end

    world.models.add("slow", Slow(), {"n": ("TYPE_INT64", [1])}, {"rounds": ("TYPE_INT64", [1])}, batched=False)
    server = world.serve(world.policy("slow", training="min_share: 0%"))
    
    def held() -> float:
        return server.status()["pauses"]["held_s"]

    with training(world) as job:
        alone = job.steps()
        eventually(lambda: job.steps() > alone + 100, "it trains alone")
        with load_without_end(server, 1000):
            eventually(lambda: held() > 0.3, "it is paused")
            paused_at, before = held(), job.steps()
            eventually(lambda: held() > paused_at + 0.7, "it stays paused")
            assert job.steps() <= before + 1, "the step that it was in"
        after = job.steps()
        eventually(lambda: job.steps() > after + 100, "it trains on")
    done = subprocess.run([sys.executable, JOB, str(STEPS)], capture_output=True, check=True, text=True)
    assert job.said["losses"][:STEPS] == json.loads(done.stdout)["losses"]


def test_memory_that_the_pool_has_not_got_is_torchs_own_error_and_names_the_pool(sluice):
    said, _ = said_by(sluice, python(ALLOCATES, """
        try:
            torch.ones(1 << 25)
            why = ""
        except torch.OutOfMemoryError as failure:
            why = str(failure)
        print(json.dumps([why, here(), float(held.sum())]))
    """))
    assert said[0].startswith("sluice: cannot get 128 MiB of persistent memory") and "What would help" in said[0]
    assert said[1] >= 4 * MIB and said[2] == 1 << 20


# --- Python's start


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder that the user has put on PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


SHOW_START = """
    import json, os, sys
    module = sys.modules.get("sitecustomize")
    print(json.dumps([os.environ.get("MARK"), getattr(module, "__file__", None), getattr(module, "mark", None),
                      [folder for folder in sys.path if not folder.endswith("/runtime/python")]]))
"""


def started(sluice, command) -> tuple:
    """What it prints and complains of, plainly and under `sluice run`."""
    plain = call(*command)
    shared = run(sluice, command)
    return (plain.returncode, plain.stdout, plain.stderr), (shared.returncode, shared.stdout, shared.stderr)


@pytest.mark.parametrize("code", [
    "import os; mark = 7; os.environ['MARK'] = __name__ + str(mark)",
    "import sitecustomize; mark = sitecustomize.__file__",
    "raise ValueError('of my own')",
    "import no_such_module",
    "import sys; sys.exit(3)",
    None,
])
def test_the_users_own_sitecustomize_is_run_as_without_us(sluice, own, code):
    if code is not None:
        (own / "sitecustomize.py").write_text(code)
    plain, shared = started(sluice, python(SHOW_START))
    assert plain[:2] == shared[:2]
    assert plain[2].splitlines()[-1:] == shared[2].splitlines()[-1:]  # before it, tracebacks may name us
    if code and "mark" in code:
        assert str(own / "sitecustomize.py") in plain[1]


def test_the_program_shares_whatever_the_users_own_does(sluice, own):
    (own / "sitecustomize.py").write_text("raise ValueError('of my own')")
    said, errors = said_by(sluice, python(ALLOCATES, "print(here() >= 4 << 20 and 1 or 0)"))
    assert said == 1 and "ValueError: of my own" in errors


def test_torch_that_a_users_own_sitecustomize_imports_shares(sluice, own):
    (own / "sitecustomize.py").write_text("import torch")
    assert said_by(sluice, python(ALLOCATES, "print(here())"))[0] >= 4 * MIB


def test_a_program_without_torch_is_let_alone(sluice):
    said, errors = said_by(sluice, python(CLIENTS, """
        import importlib.util
        loaded = open("/proc/self/maps").read()
        print(json.dumps([clients(), "libsluice" in loaded, "ctypes" in sys.modules, "multiprocessing" in sys.modules,
                          importlib.util.find_spec("torch") is not None, "torch" in sys.modules]))
    """))
    assert said == [{}, False, False, False, True, False] and errors == ""


def test_torch_is_the_module_that_it_is_without_us(sluice):
    command = python("""
        import sys, torch
        import importlib.resources, inspect
        loader = torch.__spec__.loader
        print(loader is torch.__loader__, type(loader), torch.__spec__.origin, inspect.getsourcefile(torch),
              importlib.resources.files("torch").joinpath("version.py").is_file(), [type(each) for each in sys.meta_path])
    """)
    plain, shared = started(sluice, command)
    assert plain == shared and plain[0] == 0


def test_a_torch_that_cannot_be_imported_is_tried_again(sluice, own):
    (own / "torch.py").write_text("import os, sys\nif 'MARK' not in os.environ:\n    raise RuntimeError('of its own')\n")
    plain, shared = started(sluice, python("""
        import os
        try:
            import torch
        except RuntimeError as why:
            print(why)
        os.environ["MARK"] = "1"
        import torch
        print(torch.__file__)
    """))
    assert plain[:2] == shared[:2] and plain[0] == 0 and "of its own" in plain[1]
    assert "sluice: this process cannot share: " in shared[2]  # it has no version


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_a_python_that_reads_no_environment_or_site_runs_plainly(sluice, option):
    packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    said, errors = said_by(sluice, python(f"import sys; sys.path += {packages!r}", ALLOCATES, "print(json.dumps(clients()))",
                                          options=[option]))
    assert said == {} and errors == ""


# --- what is missing


@pytest.mark.parametrize("change, reason", [
    ({"SLUICE_RUNTIME_LIBRARY": "/none/libsluice_runtime.so"}, "cannot open /none/libsluice_runtime.so"),
    ({"SLUICE_RUNTIME_DIR": "/proc/none"}, "/proc/none"),
])
@pytest.mark.parametrize("required", [False, True])
def test_what_cannot_share_says_so_in_a_line_and_trains_or_ends(sluice, change, reason, required):
    command = ["env", *(f"{name}={value}" for name, value in change.items()), *python("""
        import torch
        layer = torch.nn.Linear(512, 512)
        layer(torch.ones(64, 512)).sum().backward()
        print(float(layer.bias.grad.sum()))
    """)]
    done = run(sluice, command, ["--require-pool"] if required else [])
    lines = done.stderr.splitlines()
    if required:
        assert (done.returncode, done.stdout) == (125, "")
        assert lines[-1].startswith("sluice: this process cannot train without sharing, since --require-pool forbids it: ")
    else:
        assert (done.returncode, done.stdout) == (0, "32768.0\n")
        assert lines[-1].startswith("sluice: this process trains without sharing: ")
    assert len([line for line in lines if line.startswith("sluice:")]) == 1 and reason in lines[-1]


def test_a_torch_that_there_is_no_part_for_is_named_once_also_where_a_step_is_made(sluice, build, tmp_path):
    library = tmp_path / "lib" / "libsluice_runtime.so"
    library.parent.mkdir()
    library.symlink_to((build / "lib" / "libsluice_runtime.so").resolve())
    command = ["env", f"SLUICE_RUNTIME_LIBRARY={library}", *python("""
        import torch, sluice
        model = torch.nn.Linear(4, 4)
        print("true" if sluice.Step(model, torch.optim.SGD(model.parameters(), 0.1)).shared else "false")
    """)]
    said, errors = said_by(sluice, command)
    assert said is False
    assert errors.count("sluice: ") == 1 and "Sluice was built for none" in errors


# --- several processes, and steps


def test_a_step_joins_what_has_joined(sluice):
    said, errors = said_by(sluice, python(ALLOCATES, """
        before = clients()
        import sluice
        model = torch.nn.Linear(16, 16)
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), 0.1))
        step(lambda x: model(x).sum(), torch.ones(8, 16))
        print(json.dumps([list(before) == [os.getpid()], list(clients()) == [os.getpid()], step.shared]))
    """))
    assert said == [True, True, True] and errors == ""


DATA = """
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, row):
            return torch.full((1 << 16,), float(row)).square()  # 256 KiB
"""


@pytest.mark.parametrize("method, first", [("fork", "held = torch.ones(1 << 20)"), ("fork", "held = None"), ("spawn", "held = None"),
                                           ("forkserver", "held = None")])
def test_workers_of_a_data_loader_do_not_join(sluice, tmp_path, method, first):
    script = tmp_path / "loads.py"
    script.write_text(program(CLIENTS, "import torch", DATA, f"""
        if __name__ == "__main__":
            {first}
            rows = DataLoader(Rows(), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="{method}")
            total = sum(float(batch.sum()) for batch in rows)
            held = torch.ones(1 << 20)
            print(json.dumps([total, list(clients()) == [os.getpid()], here() >= 4 << 20]))
    """))
    said, errors = said_by(sluice, [sys.executable, script])
    assert said == [float(sum(row * row for row in range(8)) << 16), True, True] and errors == ""


def test_children_are_jobs_of_their_own(sluice, tmp_path):
    script = tmp_path / "starts.py"
    script.write_text(program(ALLOCATES.replace("held =", "if __name__ == '__main__': held ="), """
        def child(answers):
            held = torch.ones(1 << 20)
            answers.put(here())

        if __name__ == "__main__":
            import multiprocessing
            context = multiprocessing.get_context("spawn")
            answers = context.SimpleQueue()
            process = context.Process(target=child, args=(answers,))
            process.start()
            spawned = answers.get()
            process.join()
            started = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, check=True, text=True).stdout
            print(json.dumps([spawned >= 4 << 20, int(started) >= 4 << 20]))
    """))
    said, errors = said_by(sluice, [sys.executable, script, program(ALLOCATES, "print(here())")])
    assert said == [True, True] and errors == ""


def test_a_child_that_is_forked_from_what_shares_goes_on_without_a_word(sluice):
    said, errors = said_by(sluice, python(ALLOCATES, """
        import multiprocessing

        torch.set_num_threads(1)  # whose threads a child would wait for, in a pool or not

        def child(answers):
            more = torch.ones(1 << 20)
            answers.put([float(held.sum() + more.sum()), here()])

        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        process = context.Process(target=child, args=(answers,))
        process.start()
        print(json.dumps([answers.get(), here() >= 4 << 20]))
        process.join()
    """), ["--require-pool"])
    assert said == [[float(2 << 20), 0], True] and errors == ""


def test_of_torchrun_its_workers_join_alone(sluice, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(program(CLIENTS, """
        import gc
        import torch
        from torch import distributed, nn

        distributed.init_process_group("gloo")
        rank = distributed.get_rank()
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((64, 512), float(rank))).square().mean().backward()
            optimizer.step()
        pids = [None, None]
        distributed.all_gather_object(pids, os.getpid())
        if rank == 0:
            print(json.dumps([sorted(pids) == sorted(clients()), float(sum(p.abs().sum() for p in model.parameters()))]), flush=True)
        distributed.barrier()
        distributed.destroy_process_group()
        # The group ends its threads, which would end the process if they came to the interpreter when it is gone.
        del model, optimizer
        gc.collect()
    """))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    said, _ = said_by(sluice, [sys.executable, *words], env=environment)
    assert said[0] and said[1] > 0
