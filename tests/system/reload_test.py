"""Models that come and go while a server runs: `sluice policy reload`, SIGHUP, and clients that load and unload."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import Server, World, floats

X = torch.tensor([[0.5, -1.0, 2.0]])
EXPLICIT = "model_control: explicit"


@pytest.fixture
def world(sluice, tmp_path):
    made = World(sluice, tmp_path)
    yield made
    made.end()


def add(world: World, name: str, seed: int = 0) -> Affine:
    return world.models.add(name, Affine(seed=seed), **AFFINE)


def check(server: Server, name: str, model: Affine) -> None:
    torch.testing.assert_close(server.outputs(name, [floats("x", X)])[0], model(X), rtol=1e-5, atol=1e-5)


def reload(world: World) -> subprocess.CompletedProcess:
    return subprocess.run([world.program, "policy", "reload"], capture_output=True, text=True, check=False)


def post(server: Server, what: str, body: bytes = b"{}") -> tuple[int, dict]:
    return server.request(f"/v2/repository/models/{what}", body)


def index(server: Server) -> dict[str, tuple[str, str]]:
    rows = server.request("/v2/repository/index", b"")[1]
    return {each["name"]: (each["state"], each["reason"]) for each in rows}


class Load:
    """A client that asks one model again and again, and keeps what was no right answer."""

    def __init__(self, server: Server, name: str, model: Affine) -> None:
        self._server, self._name, self._wanted = server, name, model(X)
        self._ends = threading.Event()
        self.wrong: list[object] = []
        self.answers = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        eventually(lambda: self.answers > 3, "answers come")
        return self

    def __exit__(self, *_why: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            status, answer = self._server.infer(self._name, [floats("x", X)])
            got = torch.tensor(answer["outputs"][0]["data"]) if status == 200 else None
            if got is None or not torch.allclose(got, self._wanted.flatten(), rtol=1e-5, atol=1e-5):
                self.wrong.append(answer)
            self.answers += 1


def test_a_policy_that_is_read_again_brings_models_and_takes_them_away(world):
    first, second = add(world, "first"), add(world, "second", 1)
    server = world.serve(world.policy("first"))
    with Load(server, "first", first) as load:
        world.policy("first", "second")
        done = reload(world)
        assert (done.returncode, done.stdout) == (0, "added second\n"), done.stderr
        check(server, "second", second)
        world.policy("first")
        done = reload(world)
        assert (done.returncode, done.stdout) == (0, "removed second\n"), done.stderr
        status, answer = server.infer("second", [floats("x", X)])
        assert status == 404 and "no model 'second'" in answer["error"], answer
        assert reload(world).stdout == "no model has come or gone\n"
        before = load.answers
        eventually(lambda: load.answers > before + 3, "answers come")
    assert not load.wrong
    assert server.status()["executor"]["started"] == 1
    assert [each["name"] for each in server.status()["models"]] == ["first"]
    eventually(lambda: "model released model=second" in server.log(), "its memory has gone back")


def test_a_hang_up_has_the_policy_read_again(world):
    add(world, "first")
    second = add(world, "second", 1)
    server = world.serve(world.policy("first"))
    world.policy("first", "second")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.request("/v2/models/second")[0] == 200, "it is offered")
    check(server, "second", second)
    world.policy("first", "third")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: "nothing changed" in server.log(), "it is logged")
    assert "third" in server.log()
    check(server, "second", second)


def test_promises_change_and_the_model_stays_warm(world):
    first = add(world, "first")
    policy = world.policy("first")
    server = world.serve(policy)
    check(server, "first", first)
    policy.write_text(policy.read_text(encoding="utf-8").replace("latency: 500ms", "latency: 250ms"), encoding="utf-8")
    assert reload(world).returncode == 0
    model = server.model("first")
    assert model["slo"]["latency_ms"] == 250 and model["cold_starts"] == 1 and model["state"] == "warm"
    check(server, "first", first)


@pytest.mark.parametrize(("change", "says"), [
    (lambda text: text + "nonsense: 3\n", "nonsense"),
    (lambda text: text.replace("backend: host", "backend: host, chunk: 4MiB"), "pool.chunk cannot be changed"),
    (lambda text: text.replace("scheduler: {tick: 20ms}", "scheduler: {tick: 30ms}"), "scheduler.tick cannot be changed"),
    (lambda text: text.replace("name: first", "name: nobody"), "nobody"),
    (lambda _text: "", "policy.yaml"),
])
def test_a_policy_that_is_wrong_changes_nothing(world, change, says):
    first = add(world, "first")
    policy = world.policy("first")
    server = world.serve(policy)
    policy.write_text(change(policy.read_text(encoding="utf-8")), encoding="utf-8")
    done = reload(world)
    assert done.returncode != 0 and says in done.stderr and done.stdout == "", done
    check(server, "first", first)
    assert server.request("/v2/health/ready")[0] == 200


def test_a_model_whose_files_change_is_exchanged_without_a_gap(world):
    add(world, "first")
    server = world.serve(world.policy("first"))
    other = Affine(seed=3)
    old = world.models.root / "first" / "1" / "model.pt"
    torch.jit.script(other).save(world.folder / "fresh.pt")
    os.replace(world.folder / "fresh.pt", old)
    refused: list[object] = []
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            status, answer = server.infer("first", [floats("x", X)])
            if status != 200:
                refused.append(answer)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for each in asking:
        each.start()
    done = reload(world)
    assert (done.returncode, done.stdout) == (0, "changed first\n"), done.stderr
    check(server, "first", other)
    ends.set()
    for each in asking:
        each.join()
    assert not refused


def test_a_model_that_becomes_wrong_is_served_as_it_was(world):
    first = add(world, "first")
    add(world, "second", 1)
    server = world.serve(world.policy("first", "second"))
    (world.models.root / "first" / "config.pbtxt").write_text("nonsense {", encoding="utf-8")
    done = reload(world)
    assert done.returncode == 1 and "model 'first' cannot be served" in done.stderr, done
    check(server, "first", first)
    assert server.request("/v2/health/ready")[0] == 200


def test_a_model_that_ends_its_process_when_it_is_read_disturbs_nobody(world):
    first = add(world, "first")
    add(world, "second", 1)
    file = world.models.root / "second" / "1" / "model.pt"
    file.write_bytes(b"this is no model")
    server = world.serve(world.policy("first"))
    with Load(server, "first", first) as load:
        world.policy("first", "second")
        done = reload(world)
        assert done.returncode == 1 and "model 'second' cannot be served" in done.stderr, done
        before = load.answers
        eventually(lambda: load.answers > before + 3, "answers come")
    assert not load.wrong
    status, answer = server.request("/v2/health/ready")
    assert status == 503 and "second" in answer["error"]


def test_clients_load_and_unload(world):
    first, second = add(world, "first"), add(world, "second", 1)
    server = world.serve(world.policy("first", "second", server=EXPLICIT))
    check(server, "second", second)
    with Load(server, "first", first) as load:
        assert post(server, "second/unload") == (200, {})
        status, answer = server.infer("second", [floats("x", X)])
        assert status == 503 and "it has been unloaded" in answer["error"], answer
        assert index(server)["second"] == ("UNAVAILABLE", "it has been unloaded; load it again")
        assert server.request("/v2/health/ready")[0] == 200
        eventually(lambda: "model released model=second" in server.log(), "its memory has gone back")
        assert post(server, "second/load") == (200, {})
        check(server, "second", second)
        assert post(server, "second/load") == (200, {}), "it is there already"
        assert server.model("second")["cold_starts"] == 1
    assert not load.wrong
    assert server.status()["executor"]["started"] == 1


def test_a_new_version_is_loaded(world):
    add(world, "first")
    server = world.serve(world.policy("first", server=EXPLICIT))
    folder = world.models.root / "first"
    newer = Affine(seed=5)
    (folder / "2").mkdir()
    torch.jit.script(newer).save(folder / "2" / "model.pt")
    assert server.request("/v2/models/first")[1]["versions"] == ["1"]
    assert post(server, "first/load") == (200, {})
    assert server.request("/v2/models/first")[1]["versions"] == ["2"]
    check(server, "first", newer)


@pytest.mark.parametrize(("what", "body", "status", "says"), [
    ("nobody/load", b"{}", 404, "does not name model 'nobody'"),
    ("nobody/unload", b"{}", 404, "no model 'nobody'"),
    ("first/load", b"[]", 400, "parameters"),
    ("first/load", b'{"parameters": {"config": "{}"}}', 501, "'config'"),
    ("gone/load", b"{}", 404, "gone"),
])
def test_what_cannot_be_loaded_says_why(world, what, body, status, says):
    first = add(world, "first")
    add(world, "gone", 1)
    server = world.serve(world.policy("first", "gone", server=EXPLICIT))
    shutil.rmtree(world.models.root / "gone")
    got, answer = post(server, what, body)
    assert got == status and says in answer["error"], answer
    check(server, "first", first)


def test_models_are_loaded_on_request_only_where_the_policy_says_so(world):
    add(world, "first")
    server = world.serve(world.policy("first"))
    for what in ("load", "unload"):
        status, answer = post(server, f"first/{what}")
        assert status == 501 and "policy" in answer["error"]


def test_a_server_that_is_changed_a_hundred_times_has_as_much_as_before(world):
    first, second = add(world, "first"), add(world, "second", 1)
    server = world.serve(world.policy("first", "second", server=EXPLICIT))
    pids = (server.process.pid, server.executor())

    def files() -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

    before = None
    for number in range(100):
        assert post(server, "second/unload") == (200, {})
        assert post(server, "second/load") == (200, {})
        if number % 20 == 0:
            check(server, "second", second)
        if number == 10:
            before = files()
    check(server, "first", first)
    eventually(lambda: files() <= before + 2, "no files are left open")
    assert server.executor() == pids[1]


def test_who_changes_models_while_the_server_ends_hears_so(world):
    add(world, "first")
    server = world.serve(world.policy("first", server=EXPLICIT))
    assert server.end() == 0
    done = reload(world)
    assert done.returncode != 0 and "no server" in done.stderr, done


@pytest.mark.parametrize("by", ["signal", "command", "client"])
def test_a_change_that_waits_keeps_no_server_from_its_end(world, by):
    add(world, "first")
    add(world, "second", 1)
    policy = world.policy("first", server=EXPLICIT + ", request_timeout: 10m")
    server = world.serve(policy)
    policy.write_text(policy.read_text(encoding="utf-8").replace("name: first", "name: second"), encoding="utf-8")
    os.kill(server.executor(), signal.SIGSTOP)
    waiting = None
    if by == "signal":
        server.process.send_signal(signal.SIGHUP)
    elif by == "command":
        waiting = subprocess.Popen([world.program, "policy", "reload"], stderr=subprocess.PIPE, text=True)
    else:
        (world.models.root / "first" / "config.pbtxt").touch()
        (world.models.root / "first" / "1" / "model.pt").touch()
        waiting = subprocess.Popen(["curl", "-s", "-d", "{}", f"{server.url}/v2/repository/models/first/load"],
                                   stdout=subprocess.PIPE, text=True)
    eventually(lambda: "what is served changes" in server.log(), "the change waits")
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(PATIENCE_SECONDS)
    if waiting is not None:
        said = "".join(waiting.communicate(timeout=PATIENCE_SECONDS)[0 if by == "client" else 1])
        assert "shutting down" in said or "did not answer" in said, said


def test_a_policy_is_read_again_while_the_executor_is_replaced(world):
    model = add(world, "one")
    server = world.serve(world.policy("one", server="spare_executor: false"))
    check(server, "one", model)
    for _ in range(3):
        os.kill(server.executor(), signal.SIGKILL)
        done = reload(world)
        assert done.returncode == 0, done.stderr
        eventually(lambda: server.status()["executor"]["state"] == "ready", "another executor serves")
    check(server, "one", model)
