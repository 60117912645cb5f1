"""The example's engine, FastAPI and transformers as they are, as a tenant of the pool: parked when it is idle, woken by a request."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_example_test import alone
from host_parking_test import may_hold_pages
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import Server, floats

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "engine" / "server.py"
MOUNTED = Path(__file__).with_name("mounted_engine.py")
HOLDER = Path(__file__).with_name("holding_job.py")
SECONDS = 280.0  # torch and transformers are read first
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "6"))
MIB = 1 << 20
POOL = 192  # MiB: one engine fits, two do not
pytestmark = [pytest.mark.deadline(900),
              pytest.mark.skipif(not may_hold_pages(), reason="this user may not hold who touches pages (userfaultfd)")]


def path_of(name: str) -> str:
    return "" if name == "llama" else f"/{name}"


def engine(name: str = "llama", *, idle: str = "mode: fixed, max_idle: 200ms", more: str = "") -> str:
    """A line of `models`."""
    program = f"{sys.executable}, {MOUNTED}, --path, /{name}" if name != "llama" else f"{sys.executable}, {ENGINE}"
    return (f"  - {{name: {name}, slo: {{latency: 5s}}{', warm: {' + idle + '}' if idle else ''}, engine: {{command: [{program}, --port, "
            f"'{{port}}'], ready: {path_of(name)}/health, routes: [{path_of(name)}/v1/*]{more}}}}}")


@pytest.fixture
def serve(world, monkeypatch):
    """Starts a server with these engines and no models of a repository."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(*engines: str, timeout: str = "280s", memory: int = POOL, copies: int = 400, training: str = "", server: str = "") -> Server:
        path = world.folder / "policy.yaml"
        path.write_text("\n".join(["version: 1", f"server: {{request_timeout: {timeout}{', ' + server if server else ''}}}", f"pool: {{backend: host, memory: {memory}MiB}}",
                                   f"host_copies: {{memory: {copies}MiB}}", f"training: {{{training}}}", "scheduler: {tick: 20ms}", "models:",
                                   *engines]) + "\n", encoding="utf-8")
        return world.serve(path)
    return start


def ask(server: Server, prompt: str = "Once upon a time", name: str = "llama") -> tuple[int, dict, http.client.HTTPMessage]:
    client = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=SECONDS)
    with contextlib.closing(client):
        client.request("POST", f"{path_of(name)}/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 8}), {"Content-Type": "application/json"})
        answer = client.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers


def tokens(server: Server, prompt: str = "Once upon a time", name: str = "llama") -> list[int]:
    status, answer, _ = ask(server, prompt, name)
    assert status == 200, (answer, state(server, name))
    return answer["choices"][0]["tokens"]


def state(server: Server, name: str = "llama") -> dict:
    return next(each for each in server.status()["engines"] if each["name"] == name)


def await_state(server: Server, *wanted: str, name: str = "llama") -> dict:
    """As long as a start may take."""
    until = time.monotonic() + SECONDS
    while (seen := state(server, name))["state"] not in wanted:
        assert time.monotonic() < until, seen
        time.sleep(0.01)
    return seen


def metrics(server: Server) -> str:
    with urllib.request.urlopen(server.url + "/metrics", timeout=SECONDS) as answer:
        return answer.read().decode()


def assert_ledger_is_exact(world) -> dict:
    """Who holds what is what each is said to hold."""
    seen = world.status()
    pool = seen["pool"]
    assert sum(pool[f"{owner}_bytes"] for owner in ("free", "dirty", "training", "serving", "engine", "left")) == pool["bytes"]
    for kind in ("engine", "training"):
        assert sum(each["bytes"] for each in seen["clients"] if each["kind"] == kind) == pool[f"{kind}_bytes"]
    return pool


def test_an_idle_engine_is_parked_and_a_request_wakes_it(serve, world):
    server = serve(engine())
    first = tokens(server)
    assert first == alone("Once upon a time")
    parked = await_state(server, "parked")
    assert parked["parked_bytes"] > 64 * MIB
    assert parked["resident_bytes"] <= (parked["parked_bytes"] + parked["resident_bytes"]) // 10
    eventually(lambda: world.pool()["engine_bytes"] == state(server)["resident_bytes"], "both count alike")
    client = next(each for each in world.status()["clients"] if each["name"] == "llama")
    assert (client["kind"], client["parking"]["parked_bytes"]) == ("engine", parked["parked_bytes"])
    assert (parked["parks"], parked["why_not_parked"]) == (1, "")
    # Who looks does not wake it.
    assert server.request("/v2/models/llama/ready")[0] == 200
    assert server.request("/v2/health/ready")[0] == 200
    assert f'sluice_engine_parked_bytes{{engine="llama"}} {parked["parked_bytes"]}' in metrics(server)
    assert state(server)["state"] == "parked"
    assert tokens(server) == first
    back = state(server)
    assert (back["starts"], back["pid"]) == (1, parked["pid"])
    assert back["last_wake_ms"] > 0
    assert_ledger_is_exact(world)


def test_answers_are_the_same_before_and_after_many_parks(serve, world):
    server = serve(engine(idle="mode: fixed, max_idle: 0s"))
    first = tokens(server)
    for park in range(1, PARKS + 1):
        eventually(lambda: state(server)["state"] == "parked" and state(server)["parks"] >= park, "it is parked again")
        assert tokens(server) == first
    assert state(server)["starts"] == 1
    assert_ledger_is_exact(world)


def test_a_request_that_meets_an_engine_on_its_way_out_is_served(serve, world):
    server = serve(engine(idle="mode: fixed, max_idle: 0s"))
    first = tokens(server)
    for _ in range(PARKS):
        await_state(server, "parking", "parked")
        assert tokens(server) == first
    assert state(server)["failed"] == state(server)["refused"] == 0
    assert_ledger_is_exact(world)


def test_one_that_is_always_warm_is_not_parked_and_one_with_memory_of_its_own_is_not_counted(serve, world):
    server = serve(engine("warm", idle="mode: always"), engine("apart", idle="", more=", memory: own"))
    tokens(server, name="warm")
    tokens(server, name="apart")
    eventually(lambda: (state(server, "warm")["resident_bytes"] or 0) > 64 * MIB, "the one is counted")
    assert {each["name"] for each in world.status()["clients"] if each["kind"] == "engine"} == {"warm"}
    assert state(server, "apart")["resident_bytes"] is None
    assert state(server, "warm")["idle_timeout_s"] is None
    assert (state(server, "warm")["state"], state(server, "warm")["parks"]) == ("ready", 0)


def test_an_engine_killed_while_it_is_parked_is_started_again_by_the_next_request(serve, world):
    server = serve(engine())
    first = tokens(server)
    parked = await_state(server, "parked")
    os.kill(parked["pid"], signal.SIGKILL)
    eventually(lambda: state(server)["ends"] == 1, "its end is seen")
    eventually(lambda: world.pool()["engine_bytes"] == 0, "what it held is free")
    assert tokens(server) == first
    assert state(server)["starts"] == 2
    assert_ledger_is_exact(world)


def replaced(server: Server) -> None:
    server.process.send_signal(signal.SIGUSR2)
    assert server.process.wait(SECONDS) == 0, server.log()


def test_a_parked_engine_stays_so_when_its_server_is_replaced_and_the_next_one_wakes_it(serve, world):
    first = serve(engine())
    said = tokens(first)
    parked = await_state(first, "parked")
    replaced(first)
    second = serve(engine())
    seen = await_state(second, "parked")
    assert (seen["pid"], seen["adopted"], seen["parked_bytes"]) == (parked["pid"], True, parked["parked_bytes"])
    assert tokens(second) == said
    assert (state(second)["pid"], state(second)["starts"]) == (parked["pid"], 0)
    assert_ledger_is_exact(world)


def test_an_engine_on_its_way_out_goes_on_when_its_server_is_replaced(serve, world):
    first = serve(engine())
    said = tokens(first)
    pid = state(first)["pid"]
    os.kill(pid, signal.SIGSTOP)
    await_state(first, "parking")
    replaced(first)
    second = serve(engine())
    await_state(second, "parking")
    os.kill(pid, signal.SIGCONT)
    await_state(second, "parked")
    assert tokens(second) == said
    assert (state(second)["pid"], state(second)["starts"]) == (pid, 0)
    assert_ledger_is_exact(world)


def test_one_parked_by_hand_stays_so_when_its_server_is_replaced(serve, world):
    first = serve(engine(idle="mode: fixed, max_idle: 1h"))
    said = tokens(first)
    pid = state(first)["pid"]
    subprocess.run([world.program, "park", "llama"], check=True, capture_output=True)
    await_state(first, "parked")
    replaced(first)
    second = serve(engine(idle="mode: fixed, max_idle: 1h"))
    await_state(second, "parked")
    assert ask(second)[0] == 503
    subprocess.run([world.program, "wake", "llama"], check=True, capture_output=True)
    await_state(second, "ready")
    assert tokens(second) == said
    assert (state(second)["pid"], state(second)["starts"]) == (pid, 0)


def test_a_request_is_announced_to_training_when_its_engine_is_there_and_when_it_comes_back(serve):
    def announced() -> int:
        return server.status()["pauses"]["announced"]

    def announces_one() -> bool:
        """Whether a request was announced, once. One that comes before the server has let go of the one before it is not."""
        before = announced()
        assert tokens(server) == first
        return announced() == before + 1

    server = serve(engine(idle="mode: fixed, max_idle: 1h"))
    first = tokens(server)  # has it started
    eventually(announces_one, "one request is announced")
    server.end()
    server = serve(engine())
    assert tokens(server) == first

    def announces_one_that_wakes() -> bool:
        await_state(server, "parked")
        return announces_one()

    eventually(announces_one_that_wakes, "one request is announced when its engine is back")


def test_one_parked_by_hand_is_not_woken_by_requests(serve, world):
    server = serve(engine(idle="mode: fixed, max_idle: 1h"))
    first = tokens(server)
    subprocess.run([world.program, "park", "llama"], check=True, capture_output=True)
    await_state(server, "parked")
    status, answer, _ = ask(server)
    assert (status, "parked by an operator" in answer["error"]) == (503, True)
    subprocess.run([world.program, "wake", "llama"], check=True, capture_output=True)
    await_state(server, "ready")
    assert tokens(server) == first


@contextlib.contextmanager
def asking(server: Server, name: str):
    """A request that the engine has, and whose body does not come to its end."""
    head = f"POST {path_of(name)}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{"
    before = state(server, name)["in_flight"]
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), SECONDS) as client:
        client.sendall(head.encode())
        eventually(lambda: state(server, name)["in_flight"] == before + 1, "it has come to the engine")
        yield


@contextlib.contextmanager
def holding(world, megabytes: int, *options: str):
    """A job that keeps so much of the pool."""
    job = subprocess.Popen([world.program, "run", "--require-pool", *options, "--", sys.executable, HOLDER, str(megabytes)],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert job.stdout.readline() == b"holds\n"
        yield job
    finally:
        job.stdin.close()
        job.stdout.close()
        job.wait(PATIENCE_SECONDS)


def test_a_request_for_which_there_is_no_memory_hears_why_and_the_next_is_served(serve, world):
    server = serve(engine(more=", start: at_boot"), timeout="20s")
    await_state(server, "parked")
    with holding(world, POOL - 32, "--park", "never"):
        status, answer, headers = ask(server)
        assert status == 503, answer
        assert "has had no" in answer["error"] and f"of the pool's {POOL} MiB training holds" in answer["error"]
        assert int(headers["Retry-After"]) >= 1
        await_state(server, "parked")
    assert len(tokens(server)) == 8
    assert state(server)["starts"] == 1
    assert_ledger_is_exact(world)


def test_one_killed_while_it_waits_for_memory_is_started_again_when_there_is_some(serve, world):
    server = serve(engine())
    first = tokens(server)
    await_state(server, "parked")
    with ThreadPoolExecutor(1) as client, holding(world, POOL - 32, "--park", "never"):
        waits = client.submit(ask, server)
        os.kill(await_state(server, "waking")["pid"], signal.SIGKILL)
        eventually(lambda: state(server)["ends"] == 1, "its end is seen")
    status, answer, _ = waits.result(SECONDS)
    assert status == 503 and "cannot be started" in answer["error"] or answer["choices"][0]["tokens"] == first
    assert tokens(server) == first
    assert_ledger_is_exact(world)


def test_a_job_is_parked_for_an_engine_that_is_woken_and_comes_back(serve, world):
    server = serve(engine(idle="mode: fixed, max_idle: 1s"), training="stay: 1")
    first = tokens(server)
    await_state(server, "parked")
    with holding(world, POOL - 32) as job:
        eventually(lambda: world.job("training")["parking"]["parkable_bytes"] > 64 * MIB, "the job can be parked")
        assert tokens(server) == first
        assert world.job("training")["parking"]["parks"] == 1
        await_state(server, "parked")
        job.stdin.write(b"look\n")
        job.stdin.flush()
        assert job.stdout.readline() == b"as it was\n"
    assert_ledger_is_exact(world)


def test_training_is_held_while_an_engine_computes_and_no_longer(serve, world):
    server = serve(engine(idle="mode: fixed, max_idle: 1h"), training="min_share: 0%")

    def seen() -> dict:
        return next(each for each in world.status()["clients"] if each["kind"] == "engine")

    def held() -> float:
        return server.status()["pauses"]["held_s"]

    first = tokens(server)
    eventually(lambda: not seen()["works"], "it rests")

    def is_held_for_nearly_all() -> bool:
        before, held_before = seen()["worked_us"], held()
        assert [tokens(server) for _ in range(20)] == [first] * 20
        eventually(lambda: not seen()["works"], "it rests again")
        worked_s = (seen()["worked_us"] - before) / 1e6
        assert worked_s > 0
        return held() - held_before >= 0.9 * worked_s

    eventually(is_held_for_nearly_all, "training is held for all of that, where nobody keeps who watches from it")
    rests = held()
    assert tokens(server) == first
    assert held() > rests
    eventually(lambda: state(server)["busy_ms_of_request"] is not None, "it is known what a request takes")
    assert state(server)["busy_ms"] >= state(server)["busy_ms_of_request"]
    assert "sluice_engine_busy_seconds_total" in metrics(server)


def test_a_cold_model_takes_an_engines_memory_and_gives_way_when_the_engine_is_asked(serve, world):
    model = world.models.add("large", Affine(padding_mib=POOL - 64), **AFFINE)
    server = serve(engine(idle="mode: fixed, max_idle: 1h"),
                   "  - {name: large, slo: {latency: 5s}, warm: {mode: fixed, max_idle: 1h}}",
                   server=f"model_repository: {world.models.root}", training="stay: 1")
    first = tokens(server)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    for turn in range(1, 4):
        # An engine that has just come back stays for a moment, for which the model is refused.
        eventually(lambda: server.infer("large", [floats("x", x)])[0] == 200, "the model answers")
        assert torch.equal(server.outputs("large", [floats("x", x)])[0], model(x))
        eventually(lambda turn=turn: state(server)["parks"] >= turn, "the engine's memory has been taken")
        eventually(lambda: state(server)["state"] == "parked", "which is seen")
        assert tokens(server) == first
        eventually(lambda: server.model("large")["state"] == "cold", "the model has given way")
    assert (state(server)["starts"], state(server)["failed"], state(server)["refused"]) == (1, 0, 0)
    assert_ledger_is_exact(world)


def test_a_cold_model_takes_the_memory_of_the_engine_that_rests_and_not_of_the_one_that_answers(serve, world):
    model = world.models.add("large", Affine(padding_mib=160), **AFFINE)
    server = serve(engine("one", idle="mode: fixed, max_idle: 1h"), engine("two", idle="mode: fixed, max_idle: 1h"),
                   "  - {name: large, slo: {latency: 5s}, warm: {mode: fixed, max_idle: 0s}}",
                   server=f"model_repository: {world.models.root}", training="stay: 1", memory=320)

    def in_use(name: str) -> bool:
        return next(each["in_use"] for each in world.status()["clients"] if each["name"] == name)

    first = [tokens(server, name=name) for name in ("one", "two")]
    x = torch.tensor([[1.0, 2.0, 3.0]])
    for busy, rests in (("one", "two"), ("two", "one")):
        eventually(lambda: not (in_use("one") or in_use("two")), "both rest")
        parks = state(server, busy)["parks"]
        with asking(server, busy):
            eventually(lambda busy=busy: in_use(busy), "the pool is told")
            eventually(lambda: server.infer("large", [floats("x", x)])[0] == 200, "the model answers")
            eventually(lambda rests=rests: state(server, rests)["state"] == "parked", "who rests has given way")
            assert state(server, busy)["parks"] == parks
            eventually(lambda: server.model("large")["state"] == "cold", "the model is released")
        assert torch.equal(server.outputs("large", [floats("x", x)])[0], model(x))
        assert [tokens(server, name=name) for name in ("one", "two")] == first
    assert_ledger_is_exact(world)


def test_how_long_an_engine_stays_warm_changes_by_a_reload(serve, world):
    server = serve(engine(idle="mode: fixed, max_idle: 1h"))
    first = tokens(server)
    path = world.folder / "policy.yaml"
    reload = [world.program, "policy", "reload"]
    text = path.read_text()
    path.write_text(text.replace("mode: fixed, max_idle: 1h", "mode: always"))
    refused = subprocess.run(reload, capture_output=True, text=True, check=False)
    assert (refused.returncode, "not that to or from `mode: always`" in refused.stderr) == (8, True), refused.stderr
    path.write_text(text.replace("max_idle: 1h", "max_idle: 100ms"))
    subprocess.run(reload, check=True, capture_output=True)
    await_state(server, "parked")  # the next time that somebody looks
    assert state(server)["idle_timeout_s"] == 0.1
    assert tokens(server) == first
    assert state(server)["starts"] == 1


def test_two_engines_that_do_not_fit_together_take_turns(serve, world):
    server = serve(engine("one", idle="mode: fixed, max_idle: 10m"), engine("two", idle="mode: fixed, max_idle: 10m"))
    first = tokens(server, name="one")
    for _ in range(3):
        assert tokens(server, name="two") == first
        assert_ledger_is_exact(world)
        assert tokens(server, name="one") == first
    for name in ("one", "two"):
        seen = state(server, name)
        assert (seen["failed"], seen["refused"], seen["ends"], seen["starts"]) == (0, 0, 0, 1), seen
        eventually(lambda name=name: state(server, name)["parks"] >= 2, "it has given way twice")
    assert_ledger_is_exact(world)
