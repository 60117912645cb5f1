"""What computes for a server ends, hangs, stops, or is killed, and the server goes on: real processes on the host backend."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, SLOW, Affine, Slow
from server_test import X, taken_over
from serving import Server, floats, integer

FOR_EVER = 10**15
OFFENCE = json.dumps({"inputs": [integer("n", FOR_EVER)]}).encode()
#: Of tests that wait for it to be over.
LIMIT = "10s"


@pytest.fixture
def affine(world):
    return world.models.add("affine", Affine(padding_mib=1), **AFFINE)


def serve(world, *models: str, request_timeout: str = "2m"):
    policy = world.policy(*models)
    policy.write_text(policy.read_text().replace("server: {", f"server: {{request_timeout: {request_timeout}, "))
    return world.serve(policy)


def check(server, model: Affine) -> None:
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], model(X), rtol=0, atol=0)


def published(server) -> bool:
    return all(each["outlives_server"] for each in server.status()["models"] if each["state"] == "warm")


def replaced(server, former: int) -> bool:
    seen = server.status()["executor"]
    return seen["state"] == "ready" and seen["pid"] != former


def kill_executor(server) -> int:
    former = server.executor()
    os.kill(former, signal.SIGKILL)
    eventually(lambda: replaced(server, former), "another executor serves")
    return former


def test_warm_models_of_an_executor_that_was_killed_are_warm_in_the_next_without_a_copy(world, affine):
    server = serve(world, "affine")
    check(server, affine)
    eventually(lambda: published(server), "it is published")
    held = world.pool()["serving_bytes"]
    kill_executor(server)
    assert server.request("/v2/models/affine/ready")[0] == 200
    check(server, affine)
    (_, copied), = taken_over(server).values()
    assert copied == 0 and server.model("affine")["cold_starts"] == 0
    assert world.pool()["serving_bytes"] == held
    seen = server.status()
    assert seen["executor"]["started"] == 2 and "signal 9" in seen["executor"]["last_end"]
    assert seen["requests"] == {"total": 2, "failed": 0, "in_flight": 0}
    assert server.end() == 0
    assert world.pool()["serving_bytes"] == 0


def test_requests_that_waited_when_the_executor_was_killed_are_answered_by_the_next(world):
    world.models.add("slow", Slow(), **SLOW)
    server = serve(world, "slow", request_timeout="60s")
    with ThreadPoolExecutor(8) as pool:
        running = pool.submit(server.infer, "slow", [integer("n", 3000)])
        eventually(lambda: server.model("slow")["state"] == "warm", "it is being computed")
        waiting = [pool.submit(server.outputs, "slow", [integer("n", number)]) for number in range(6)]
        eventually(lambda: server.status()["requests"]["in_flight"] == 7, "seven requests are in flight")
        os.kill(server.executor(), signal.SIGKILL)
        assert [int(each.result()[0]) for each in waiting] == list(range(6))
        status, answer = running.result()
        assert status == 200, answer  # it was killed from outside, which is nobody's fault


def test_a_computation_that_never_ends_ends_its_executor_and_harms_no_other_model(world, affine):
    world.models.add("slow", Slow(), **SLOW)
    server = serve(world, "affine", "slow", request_timeout=LIMIT)
    check(server, affine)
    former = server.executor()
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(server.infer, "slow", [integer("n", FOR_EVER)])
        eventually(lambda: server.status()["requests"]["in_flight"] == 1, "it is being computed")
        check(server, affine)
        status, answer = hanging.result()
        assert status == 504, answer
        eventually(lambda: replaced(server, former), "another executor serves")
    check(server, affine)
    assert int(server.outputs("slow", [integer("n", 3)])[0]) == 3
    seen = server.status()["executor"]
    assert "took longer than 10000 ms while it computed model 'slow'" in seen["last_end"], seen
    assert server.model("slow")["ended_executors"] == 1 and server.model("affine")["ended_executors"] == 0
    assert server.end() == 0


def test_a_model_that_ends_its_executor_again_and_again_is_refused_for_a_time(world, affine):
    world.models.add("slow", Slow(), **SLOW)
    server = serve(world, "affine", "slow", request_timeout="500ms")

    def has_ended_three() -> bool:
        assert server.infer("slow", [integer("n", FOR_EVER)])[0] in (503, 504)  # it may have been loading all the time
        return server.model("slow")["ended_executors"] >= 3

    eventually(has_ended_three, "three executors were ended")

    def is_told() -> bool:
        """Whether all was asked before it was to be tried again; if not, it has failed once more, for twice as long."""
        status, headers, answer = server.request_with_headers("/v2/models/slow/infer", OFFENCE)
        if status != 503 or "has failed" not in answer["error"]:
            return False
        assert int(headers["Retry-After"]) >= 1
        assert "model 'slow' has failed: its process has been ended" in answer["error"] and answer["error"].count("'slow'") == 1, answer
        status, headers, ready = server.request_with_headers("/v2/models/slow/ready")
        listed = next(each for each in server.request("/v2/repository/index", b"")[1] if each["name"] == "slow")
        if server.model("slow")["state"] != "failed":
            return False
        assert status == 503 and int(headers["Retry-After"]) >= 1
        assert "failed: its process has been ended" in ready["error"] and "cold" not in ready["error"], ready
        assert listed["state"] == "UNAVAILABLE" and listed["reason"].startswith("failed: "), listed
        return True

    eventually(is_told, "it is refused for a time")

    def answers() -> bool:
        status, answer = server.infer("affine", [floats("x", X)])
        assert status in (200, 503, 504), answer
        return status == 200

    eventually(answers, "the other model is served")
    eventually(lambda: server.infer("slow", [integer("n", 1)])[0] == 200, "it is tried again")
    assert server.model("slow")["state"] == "warm"


def test_what_could_not_be_answered_in_time_is_refused_at_once(world):
    world.models.add("slow", Slow(), **SLOW)
    server = serve(world, "slow", request_timeout="60s")
    for _ in range(5):
        assert int(server.outputs("slow", [integer("n", 400)])[0]) == 400
    too_short = {"parameters": {"timeout": 50_000}}  # a fraction of what these took
    assert server.infer("slow", [integer("n", 400)], **too_short)[0] == 504, "nobody was before it"
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(server.infer, "slow", [integer("n", FOR_EVER)])
        eventually(lambda: server.status()["requests"]["in_flight"] == 1, "it is being computed")
        body = json.dumps({"inputs": [integer("n", 1)], **too_short}).encode()
        status, headers, answer = server.request_with_headers("/v2/models/slow/infer", body)
        assert status == 503 and "could not answer in time" in answer["error"], answer
        assert int(headers["Retry-After"]) >= 1
        seen = server.model("slow")
        assert (seen["refused"], seen["failed"], seen["queue"]) == (1, 2, 1)
        os.kill(server.process.pid, signal.SIGKILL)  # which nobody has to wait for
        with pytest.raises((OSError, http.client.HTTPException)):
            hanging.result()


def test_requests_to_an_executor_that_is_stopped_end_at_their_time_and_another_takes_its_place(world, affine):
    server = serve(world, "affine", request_timeout=LIMIT)
    check(server, affine)
    former = server.executor()
    os.kill(former, signal.SIGSTOP)
    eventually(lambda: is_stopped(former), "no thread of it runs any more")
    status, answer = server.infer("affine", [floats("x", X)], parameters={"timeout": 200_000})
    assert status == 504 and "does not answer" in answer["error"], answer
    assert server.request("/v2/health/live")[0] == 200

    def served() -> bool:
        server.infer("affine", [floats("x", X)])
        return replaced(server, former)

    eventually(served, "another executor serves")
    check(server, affine)


def test_connections_leave_room_for_executors_and_large_tensors(world, affine):
    policy = world.policy("affine")
    server = Server(world.program, policy, world.folder / "few.log", wrapper=["prlimit", "--nofile=64:64"])
    world.servers.append(server.wait_until_listening())
    held = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(70)]
    x = torch.randn(30_000, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        torch.testing.assert_close(server.outputs("affine", [floats("x", x)])[0], affine(x))
        kill_executor(server)
    for each in held:
        each.close()


def sockets_of(pid: int) -> set[str]:
    links = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {link for link in links if link.startswith("socket:")}


def test_an_executor_holds_no_connection_of_a_client(world, affine):
    server = serve(world, "affine")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        check(server, affine)
        kill_executor(server)  # the next one starts while connections are open
        check(server, affine)
        assert not sockets_of(server.executor()) & sockets_of(server.process.pid)


def test_an_executor_ends_with_its_server(world, affine):
    server = serve(world, "affine")
    check(server, affine)
    eventually(lambda: published(server), "it is published")
    executor = server.executor()
    server.process.kill()
    server.process.wait()
    eventually(lambda: not os.path.exists(f"/proc/{executor}") or is_zombie(executor), "it has ended")
    eventually(lambda: not any(each["kind"] == "server" for each in world.status()["clients"]), "the broker has noticed")
    second = serve(world, "affine")
    check(second, affine)
    assert second.model("affine")["cold_starts"] == 0


def test_a_server_that_is_replaced_leaves_its_warm_models_to_the_next(world, affine):
    server = serve(world, "affine")
    check(server, affine)
    eventually(lambda: published(server), "it is published")
    server.process.send_signal(signal.SIGUSR2)
    assert server.process.wait(PATIENCE_SECONDS) == 0, server.log()
    eventually(lambda: not any(each["kind"] == "server" for each in world.status()["clients"]), "the broker has noticed")
    assert world.pool()["left_bytes"] > 0
    second = serve(world, "affine")
    check(second, affine)
    (_, copied), = taken_over(second).values()
    assert copied == 0 and second.model("affine")["cold_starts"] == 0
    assert second.end() == 0
    assert world.pool()["serving_bytes"] == 0


def state_in(stat: Path) -> str:
    return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def is_zombie(pid: int) -> bool:
    return state_in(Path(f"/proc/{pid}/stat")) == "Z"


def is_stopped(pid: int) -> bool:
    return all(state_in(thread / "stat") == "T" for thread in Path(f"/proc/{pid}/task").iterdir())


def test_a_server_whose_executor_cannot_come_back_says_why_and_ends_in_order(world, affine):
    server = serve(world, "affine", request_timeout=LIMIT)
    check(server, affine)
    file = world.models.root / "affine" / "1" / "model.pt"
    whole = file.read_bytes()
    file.write_bytes(b"this is no model")
    os.kill(server.executor(), signal.SIGKILL)
    eventually(lambda: str(file) in server.status()["executor"]["last_end"], "the status says why")
    eventually(lambda: server.executor() is None, "there is no process")
    eventually(lambda: not world.status()["clients"], "the pool has no server")
    shown = world.status()
    assert shown["server"]["answers"] and shown["server"]["pid"] == server.process.pid, shown
    status, answer = server.request("/v2/health/ready")
    assert status == 503 and answer["ready"] is False and str(file) in answer["error"], answer
    assert server.request("/v2/health/live")[0] == 200
    assert server.infer("affine", [floats("x", X)])[0] == 504
    file.write_bytes(whole)
    eventually(lambda: server.request("/v2/health/ready")[0] == 200, "it is ready again")
    check(server, affine)
    assert server.end() == 0


def spare_of(server) -> int:
    """Its process id, once it is ready."""
    def ready() -> dict | None:
        seen = server.status()["executor"]
        return seen if seen["spare"] == "ready" else None

    return eventually(ready, "a spare is ready")["spare_pid"]


def ended(pid: int) -> bool:
    try:
        return is_zombie(pid)
    except FileNotFoundError:
        return True


def test_a_spare_takes_the_place_of_an_executor_and_is_no_member_of_the_pool_before(world, affine):
    server = serve(world, "affine")
    check(server, affine)
    eventually(lambda: published(server), "it is published")
    spare = spare_of(server)
    servers = [each["pid"] for each in world.status()["clients"]]
    assert servers == [server.executor()] and spare not in servers
    assert "ready to take an executor's place" in server.log()
    kill_executor(server)
    assert server.executor() == spare
    check(server, affine)
    assert server.model("affine")["cold_starts"] == 0
    assert [each["pid"] for each in world.status()["clients"]] == [spare]
    second = spare_of(server)
    assert second != spare
    assert server.end() == 0
    assert ended(second)


def test_a_spare_that_dies_disturbs_nobody_and_ends_with_its_server(world, affine):
    server = serve(world, "affine")
    executor, spare = server.executor(), spare_of(server)
    os.kill(spare, signal.SIGKILL)
    check(server, affine)
    following = eventually(lambda: (pid := spare_of(server)) != spare and pid, "there is another")
    assert server.executor() == executor
    assert server.log().count("no spare executor is ready") == 1, server.log()
    server.process.kill()
    server.process.wait()
    eventually(lambda: ended(following) and ended(executor), "both have ended with it")


def test_a_policy_without_a_spare_has_none(world, affine):
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("server: {", "server: {spare_executor: false, "))
    server = world.serve(policy)
    check(server, affine)
    kill_executor(server)
    check(server, affine)
    assert server.status()["executor"]["spare"] == "none" and server.status()["executor"]["spare_pid"] is None
    assert "ready to take" not in server.log()
