"""vLLM as an engine of a policy, its KV cache out of the pool: it is counted, goes when the engine rests or others need it, and the answers
that OpenAI's client gets are those of vLLM alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
import torch
from engine_parking_test import assert_ledger_is_exact
from host_parking_test import may_hold_pages
from patience import eventually
from server_models import AFFINE, Affine
from serving import Server, floats
from vllm_requests import SHAPE, requests
from vllm_test import HOLDER, VLLM, entry_points
from vllm_test import JOB as EXACT_JOB

PROGRAM = Path(__file__).with_name("engine_server.py")
SECONDS = 600.0  # of a start beside other tests
PARKS = 3
POOL = 64  # MiB
MIB = 1 << 20
CHUNK = 2 * MIB
FLAGS = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", "16", "--max-num-batched-tokens",
         "512", "--max-num-seqs", "16", "--num-gpu-blocks-override", "512", "--kv-cache-memory-bytes", str(32 * MIB), "--enable-prompt-tokens-details"]
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
         "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
with_vllm = pytest.mark.skipif(not (VLLM / "vllm").is_dir(), reason="vLLM is not installed: ./scripts/setup.sh --tests, with torch 2.11")
pytestmark = pytest.mark.deadline(2400)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Seeded weights in a folder, as a model hub has them; those that vLLM makes up are nearly zero, and answer with one word."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{key: value for key, value in SHAPE.items() if key not in ("architectures", "model_type")}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    """The package sluice as an environment has it in which it is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    facts = folder / "sluice-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice\nVersion: 0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text(entry_points(), encoding="utf-8")
    return folder


def command(model: Path, name: str, port: str) -> list[str]:
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port",
            port, *FLAGS]


def ask(url: str, name: str, asked: list[tuple[list[int], int]]) -> tuple[list[list[int]], int]:
    """The tokens of each answer, all asked for at once, and how many of the prompts' tokens had been computed before."""
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=SECONDS) as client, concurrent.futures.ThreadPoolExecutor(24) as threads:
        def one(request: tuple[list[int], int]):
            return client.completions.create(model=name, prompt=request[0], max_tokens=request[1], temperature=0,
                                             extra_body={"ignore_eos": True, "return_token_ids": True})
        answers = list(threads.map(one, asked))
    return ([answer.choices[0].model_extra["token_ids"] for answer in answers],
            sum(answer.usage.prompt_tokens_details.cached_tokens or 0 for answer in answers if answer.usage.prompt_tokens_details))


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """What vLLM answers that knows nothing of Sluice."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}, **QUIET, "PYTHONPATH": str(VLLM)}
    alone = subprocess.Popen(command(model, "chat", str(port)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             start_new_session=True)
    try:
        until = time.monotonic() + SECONDS
        while True:
            assert alone.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=10):
                break
            assert time.monotonic() < until
            time.sleep(0.2)
        answers, _ = ask(url, "chat", requests())
    finally:
        os.killpg(alone.pid, signal.SIGKILL)  # its engine is a process of its own
        alone.wait()
    assert len({word for answer in answers for word in answer}) > 200, "answers that all say the same would not tell"
    return answers


@pytest.fixture
def serve(world, model, plugin):
    def start(*, idle: str, memory: str = "pool", pool: int = 160, more: tuple[str, ...] = (), server: str = "", training: str = "", variables: dict | None = None) -> Server:
        words = json.dumps(command(model, "chat", "{port}"))
        env = json.dumps({**QUIET, "PYTHONPATH": f"{plugin}:{VLLM}", **(variables or {})})
        path = world.folder / "policy.yaml"
        path.write_text("\n".join(
            ["version: 1", f"server: {{request_timeout: 20m{', ' + server if server else ''}}}", f"pool: {{backend: host, memory: {pool}MiB}}",
             "host_copies: {memory: 400MiB}", f"training: {{{training}}}", "scheduler: {tick: 20ms}", "models:",
             f"  - {{name: chat, slo: {{latency: 5s}}, warm: {{{idle}}}, engine: {{command: {words}, ready: /health, api: openai, memory: {memory}, "
             f"kv: pool, start_timeout: 15m, env: {env}}}}}", *more]) + "\n", encoding="utf-8")
        return world.serve(path)
    return start


def state(server: Server, name: str = "chat") -> dict:
    return next(each for each in server.status()["engines"] if each["name"] == name)


def await_state(server: Server, *wanted: str) -> dict:
    until = time.monotonic() + SECONDS
    while (seen := state(server))["state"] not in wanted:
        assert time.monotonic() < until, seen
        time.sleep(0.02)
    return seen


def cache(world) -> dict:
    """What the pool says of the KV cache."""
    return next((each for each in world.status()["clients"] if each.get("elastic")), {"bytes": 0, "elastic": {"used_bytes": 0}})


@contextlib.contextmanager
def asking_all_the_time(server: Server, expected: list[list[int]]):
    """Until it ends the same requests again and again, whose answers must be right."""
    over = threading.Event()

    def rounds() -> int:
        made = 0
        while not over.is_set():
            assert ask(server.url, "chat", requests())[0] == expected
            made += 1
        return made

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        running = thread.submit(rounds)
        try:
            yield running
        finally:
            over.set()
        assert running.result(SECONDS) > 0


@with_vllm
@pytest.mark.skipif(not may_hold_pages(), reason="this user may not hold who touches pages (userfaultfd)")
def test_its_whole_memory_goes_when_it_rests_and_answers_stay_those_of_vllm_alone(serve, world, expected):
    server = serve(idle="mode: fixed, max_idle: 300ms")
    answers, known = ask(server.url, "chat", requests())
    assert answers == expected
    assert known > 0, "what every third prompt begins with"
    for park in range(1, PARKS + 1):
        eventually(lambda park=park: state(server)["state"] == "parked" and state(server)["parks"] >= 2 * park, "both parts of its memory have gone")
        eventually(lambda: world.pool()["engine_bytes"] == state(server)["resident_bytes"], "both count alike")
        seen = state(server)
        assert (seen["kv"], seen["kv_bytes"], seen["kv_used_bytes"], seen["why_not_parked"]) == ("elastic", 0, 0, "")
        assert seen["parked_bytes"] > CHUNK, "its weights, beside a chunk for the cache"
        parking = cache(world)["parking"]
        assert (parking["parked_bytes"], parking["dirty_bytes"], parking["operator"]["done"]) == (CHUNK, 0, True)
        _, known = ask(server.url, "chat", requests()[:1])
        assert known == 0, "the prefix cache is cold"
        assert ask(server.url, "chat", requests())[0] == expected
    assert (state(server)["starts"], state(server)["failed"], state(server)["refused"]) == (1, 0, 0)
    assert_ledger_is_exact(world)


@with_vllm
def test_a_cold_model_takes_its_cache_while_it_answers(serve, world, expected):
    large = world.models.add("large", Affine(padding_mib=48), **AFFINE)
    server = serve(idle="mode: fixed, max_idle: 1h", memory="own", pool=POOL, server=f"model_repository: {world.models.root}",
                   more=("  - {name: large, slo: {latency: 5s}, warm: {mode: fixed, max_idle: 0s}}",),
                   variables={"SLUICE_VLLM_CACHED_CHUNKS": "16", "SLUICE_VLLM_LINGER_MS": "600000"})
    assert ask(server.url, "chat", requests())[0] == expected
    eventually(lambda: (state(server)["kv_bytes"] or 0) > 5 * CHUNK, "it has grown, and keeps what it has")
    assert state(server)["memory"] == "own"
    with urllib.request.urlopen(server.url + "/metrics", timeout=SECONDS) as answer:
        assert 'sluice_engine_kv_bytes{engine="chat"}' in answer.read().decode()

    # What no request uses goes for a model that is cold.
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(server.outputs("large", [floats("x", x)])[0], large(x))
    assert cache(world)["bytes"] <= (POOL - 48) * MIB

    # And what they use, too; whose requests are computed anew.
    with asking_all_the_time(server, expected) as running:
        for _ in range(8):
            eventually(lambda: cache(world)["elastic"]["used_bytes"] > 0 or running.done(), "requests use it")
            eventually(lambda: server.infer("large", [floats("x", x)])[0] == 200, "the model answers")
            eventually(lambda: server.model("large")["state"] == "cold", "it has given its memory back")
    assert ask(server.url, "chat", requests())[0] == expected
    assert (state(server)["starts"], state(server)["failed"]) == (1, 0)
    assert_ledger_is_exact(world)


def test_one_that_was_to_have_its_cache_in_the_pool_and_has_not_is_said_to(world):
    path = world.folder / "policy.yaml"
    path.write_text("\n".join(
        ["version: 1", "server: {request_timeout: 60s}", "pool: {backend: host, memory: 64MiB}", "models:",
         f"  - {{name: chat, slo: {{latency: 2s}}, engine: {{command: [{sys.executable}, {PROGRAM}, --port, '{{port}}', --models, chat], ready: /health, "
         "api: openai, memory: own, kv: pool}}"]) + "\n", encoding="utf-8")
    server = world.serve(path)
    assert state(server)["kv"] is None
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        assert client.completions.create(model="chat", prompt="once upon").choices[0].text
    eventually(lambda: state(server)["kv"] == "fixed", "the pool has been looked at")
    assert "its policy says kv: pool, and it has started without" in state(server)["why_kv_fixed"]
    assert "engine keeps its KV cache beside the pool engine=chat" in server.log()
    shown = subprocess.run([world.program, "status"], capture_output=True, text=True, check=True).stdout
    assert "chat: its policy says kv: pool" in shown


#: Of the long form: what the engine keeps, what a job leaves of the pool (MiB), whether cold models take what it has, and how many requests at once.
SETTINGS = [pytest.param({}, 0, False, (1, 8, 16), id="growth"), pytest.param({"SLUICE_VLLM_CACHED_CHUNKS": "0"}, 4, False, (4, 16), id="two-chunks"),
            pytest.param({"SLUICE_VLLM_CACHED_CHUNKS": "16"}, 0, False, (16,), id="cached"),
            pytest.param({"SLUICE_VLLM_CACHED_CHUNKS": "16"}, 8, False, (16,), id="four-chunks-cached"),
            pytest.param({"SLUICE_VLLM_CACHED_CHUNKS": "2"}, 0, True, (4, 16), id="forced")]
KILLS = 5


def bench(server: Server, folder: Path, at_once: int) -> dict:
    """What `vllm bench serve` says of forty requests."""
    arguments = [48, "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", "chat", "--dataset-name", "custom", "--skip-tokenizer-init",
                 "--num-prompts", 40, "--max-concurrency", at_once, "--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "bench.json",
                 "--ignore-eos", "--temperature", 0, "--percentile-metrics", "e2el"]
    done = subprocess.run([sys.executable, PROGRAM.with_name("vllm_bench_serve.py"), *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**os.environ, **QUIET, "PYTHONPATH": str(VLLM)}, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "bench.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def beside(world, folder: Path, left: int, forced: bool, server: Server):
    """A job that trains, or one that leaves so much of the pool; and cold models that take what the engine has. Tells how many did."""
    over, until = threading.Event(), folder / "until"
    program = [EXACT_JOB, "--device", "cpu", "--until", until, "--out", folder / "learned"] if left == 0 else [HOLDER, str(POOL - left)]
    options = ["--require-pool"] if left == 0 else ["--require-pool", "--park", "never"]
    job = subprocess.Popen([world.program, "run", *options, "--", sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    x = floats("x", torch.tensor([[1.0, 2.0, 3.0]]))

    def take() -> int:
        taken = 0
        while forced and not over.is_set():
            taken += server.infer("large", [x])[0] == 200
        return taken

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        if left:
            assert job.stdout.readline() == b"holds\n"
        else:
            eventually(lambda: world.pool()["training_bytes"] > 0, "it trains")
        taking = thread.submit(take)
        try:
            yield taking
        finally:
            over.set()
            until.touch()
            job.stdin.close()
            job.stdout.close()
            job.wait(SECONDS)
    assert not forced or taking.result() > 0
    assert left or json.loads((folder / "learned").read_text(encoding="utf-8"))["stats"]["commits"] > 0


@with_vllm
@pytest.mark.long
@pytest.mark.deadline(7200)
@pytest.mark.parametrize(("variables", "left", "forced", "concurrencies"), SETTINGS)
def test_vllms_own_client_is_served_beside_jobs_in_the_long_form(serve, world, expected, tmp_path, variables, left, forced, concurrencies):
    world.models.add("large", Affine(padding_mib=48), **AFFINE)
    server = serve(idle="mode: fixed, max_idle: 1h", memory="own", pool=POOL, server=f"model_repository: {world.models.root}",
                   more=("  - {name: large, slo: {latency: 5s}, warm: {mode: fixed, max_idle: 0s}}",), variables={"SLUICE_VLLM_LINGER_MS": "200", **variables})
    first = requests()[:1] if left else requests()  # what it keeps of more would leave less to the job
    assert ask(server.url, "chat", first)[0] == expected[:len(first)]
    eventually(lambda: cache(world)["bytes"] <= (left or 40) * MIB, "it has given back what it does not keep")
    with beside(world, tmp_path, left, forced, server):
        for at_once in concurrencies:
            said = bench(server, tmp_path, at_once)
            assert (said["completed"], said["failed"], said["total_output_tokens"]) == (40, 0, 40 * 48)
            print(f"at once {at_once}: {said['duration']:.1f} s, {said['output_throughput']:.0f} tokens/s, cache {cache(world)['bytes'] // CHUNK} chunks, ms:",
                  {name: round(value, 1) for name, value in said.items() if name.endswith("_ms") and name.startswith(("median", "p99"))})
        assert ask(server.url, "chat", requests())[0] == expected
    assert ask(server.url, "chat", requests())[0] == expected
    assert (state(server)["starts"], state(server)["failed"]) == (1, 0)
    assert_ledger_is_exact(world)


@with_vllm
@pytest.mark.long
@pytest.mark.deadline(7200)
def test_an_engine_killed_while_its_cache_is_taken_leaves_all_of_it_and_the_next_serves_right_in_the_long_form(serve, world, expected, tmp_path):
    world.models.add("large", Affine(padding_mib=48), **AFFINE)
    server = serve(idle="mode: fixed, max_idle: 1h", memory="own", pool=POOL, server=f"model_repository: {world.models.root}",
                   more=("  - {name: large, slo: {latency: 5s}, warm: {mode: fixed, max_idle: 0s}}",), variables={"SLUICE_VLLM_LINGER_MS": "200"})
    assert ask(server.url, "chat", requests())[0] == expected
    draw = random.Random(7)

    def until_it_is_killed() -> None:
        with contextlib.suppress(openai.APIError):
            while True:
                assert ask(server.url, "chat", requests())[0] == expected

    for kill in range(1, KILLS + 1):
        folder = tmp_path / str(kill)
        folder.mkdir()
        with beside(world, folder, 0, True, server), concurrent.futures.ThreadPoolExecutor(1) as thread:
            asking = thread.submit(until_it_is_killed)
            eventually(lambda: cache(world)["elastic"]["used_bytes"] > 0, "requests use its cache")
            time.sleep(draw.random())  # an instant of its life; nothing is waited for
            os.kill(state(server)["pid"], signal.SIGKILL)
            asking.result(SECONDS)
            eventually(lambda kill=kill: state(server)["ends"] >= kill, "its end is seen")
            eventually(lambda: world.pool()["engine_bytes"] == 0 or state(server)["starts"] > state(server)["ends"], "what it held is the pool's again")
        assert ask(server.url, "chat", requests())[0] == expected
    assert_ledger_is_exact(world)
