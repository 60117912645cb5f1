"""Engines whose server is replaced (SIGUSR2): they go on, and the next server has them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from pathlib import Path

import pytest
from engines_test import ask, connection, echo, engine, state
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import Server

EVENTS = 3


@pytest.fixture
def serve(world):
    """Starts a server with these engines, beside or after those that there are."""
    def start(*engines: str, listening: bool = True) -> Server:
        path = world.folder / f"policy-{len(world.servers)}.yaml"
        path.write_text("\n".join(["version: 1", "server: {request_timeout: 60s}", "pool: {backend: host, memory: 64MiB}", "models:", *engines])
                        + "\n", encoding="utf-8")
        return world.serve(path) if listening else world.start(path)
    return start


def leave(server: Server) -> None:
    server.process.send_signal(signal.SIGUSR2)


def ends(server: Server) -> None:
    assert server.process.wait(PATIENCE_SECONDS) == 0, server.log()


@contextlib.contextmanager
def stream(server: Server):
    """An answer of which one event has come, and the rest when somebody says go."""
    client = connection(server)
    with contextlib.closing(client):
        client.request("GET", f"/v1/events?n={EVENTS}&hold=1")
        answer = client.getresponse()
        assert answer.read(9) == b"data: 0\n\n"
        yield answer


def rest_of(answer: http.client.HTTPResponse) -> bytes:
    return answer.read()


REST = b"".join(b"data: %d\n\n" % number for number in range(1, EVENTS))


def go_past(address: str) -> None:
    """The same, past the server."""
    host, _, port = address.partition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_SECONDS)
    with contextlib.closing(client):
        client.request("POST", "/v1/go")
        assert client.getresponse().status == 200


def go(server: Server) -> None:
    assert ask(server, "/v1/go", "POST")[0] == 200


def lives(pid: int) -> bool:
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def ended(pid: int) -> None:
    eventually(lambda: not lives(pid), f"the engine {pid} has ended")


def is_adopted(server: Server, pid: int, name: str = "chat") -> None:
    eventually(lambda: state(server, name)["state"] == "ready", "it is ready")
    seen = state(server, name)
    assert (seen["pid"], seen.get("adopted"), seen["starts"], seen["ends"]) == (pid, True, 0, 0)


def test_a_stream_goes_on_while_the_next_server_already_has_the_engine(serve):
    first = serve(engine())
    pid = echo(first)["pid"]
    with stream(first) as answer:
        leave(first)
        second = serve(engine())
        assert echo(second)["pid"] == pid
        is_adopted(second, pid)
        assert first.process.poll() is None
        go(second)
        assert rest_of(answer) == REST
    ends(first)
    assert echo(second)["pid"] == pid
    assert second.end() == 0
    ended(pid)


def test_an_engine_waits_for_the_next_server_where_the_first_has_ended(serve, runtime_folder):
    first = serve(engine(arguments="--socket, '{socket}'"))
    pid = echo(first)["pid"]
    leave(first)
    ends(first)
    assert lives(pid)
    second = serve(engine(arguments="--socket, '{socket}'"))
    assert echo(second)["pid"] == pid
    is_adopted(second, pid)
    folder = Path(state(second)["address"]).parent
    assert folder.is_relative_to(runtime_folder)
    assert second.end() == 0
    ended(pid)
    eventually(lambda: not folder.exists(), "its socket is cleared away")
    eventually(lambda: not list(runtime_folder.glob("k0-*")), "nobody is met there any more")


def test_an_engine_that_is_wanted_otherwise_ends_with_its_last_request_and_is_started_anew(serve):
    first = serve(engine(), engine("gone", routes="/gone"))
    pid = echo(first)["pid"]
    address = state(first)["address"]
    ask(first, "/gone")
    gone = state(first, "gone")["pid"]
    with stream(first) as answer:
        leave(first)
        second = serve(engine(more=", env: {GREETING: hello}"))
        ended(gone)
        asking = connection(second)
        with contextlib.closing(asking):
            asking.request("GET", "/v1/echo")
            eventually(lambda: state(second)["waiting"] == 1, "the request waits")
            assert lives(pid)
            go_past(address)
            assert rest_of(answer) == REST
            told = json.loads(asking.getresponse().read())
    assert (told["environment"]["GREETING"], told["pid"] == pid) == ("hello", False)
    ended(pid)
    ends(first)
    seen = state(second)
    assert (seen.get("adopted"), seen["starts"], seen["ends"]) == (False, 1, 0)


def test_a_server_that_wants_no_engines_ends_those_that_were_left(serve, world):
    world.models.add("affine", Affine(padding_mib=1), **AFFINE)
    first = serve(engine())
    pid = echo(first)["pid"]
    leave(first)
    ends(first)
    second = world.serve(world.policy("affine"))
    ended(pid)
    assert second.end() == 0


def test_a_server_killed_while_it_leaves_takes_no_engine_with_it(serve):
    first = serve(engine())
    pid = echo(first)["pid"]
    with stream(first):
        leave(first)
        second = serve(engine())
        is_adopted(second, pid)
        first.process.kill()
        first.process.wait()
        assert echo(second)["pid"] == pid
    is_adopted(second, pid)
    second.process.kill()
    second.process.wait()
    ended(pid)  # nobody has left it


def test_an_engine_of_a_server_that_is_killed_goes_on_for_who_uses_it_and_for_the_next(serve):
    first = serve(engine())
    pid = echo(first)["pid"]
    with stream(first) as answer:
        leave(first)
        second = serve(engine())
        is_adopted(second, pid)
        second.process.kill()
        second.process.wait()
        third = serve(engine())
        is_adopted(third, pid)
        go(third)
        assert rest_of(answer) == REST
    ends(first)
    assert echo(third)["pid"] == pid


def test_two_servers_in_a_row_leave_an_engine_with_requests_of_both(serve):
    first = serve(engine())
    pid = echo(first)["pid"]
    with stream(first) as one:
        leave(first)
        second = serve(engine())
        with stream(second) as other:
            leave(second)
            third = serve(engine())
            is_adopted(third, pid)
            go(third)
            assert rest_of(one) == rest_of(other) == REST
    ends(first)
    ends(second)
    assert echo(third)["pid"] == pid


def test_an_engine_that_dies_while_it_is_left_is_started_by_the_next_server_and_by_it_alone(serve, tmp_path):
    mark = tmp_path / "marks"
    entry = engine(arguments=f"--port, '{{port}}', --mark, {mark}", more=", start: at_boot")
    first = serve(entry)
    pid = echo(first)["pid"]
    with stream(first) as answer:
        leave(first)
        second = serve(entry)
        is_adopted(second, pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            rest_of(answer)
    ends(first)
    eventually(lambda: state(second)["state"] == "ready" and state(second)["starts"] == 1, "it is started again")
    seen = state(second)
    assert (seen.get("adopted"), seen["ends"]) == (False, 1)
    assert "ended by signal 9" in second.log()
    assert mark.read_text().split() == [str(pid), str(seen["pid"])]


def test_an_engine_that_starts_goes_on_starting(serve, tmp_path):
    unready, mark = tmp_path / "unready", tmp_path / "marks"
    unready.touch()
    entry = engine(arguments=f"--port, '{{port}}', --unready, {unready}, --mark, {mark}", more=", start: at_boot")
    first = serve(entry)
    eventually(lambda: mark.exists() and state(first)["pid"] > 0, "it has started")
    pid = state(first)["pid"]
    leave(first)
    second = serve(entry)
    eventually(lambda: state(second)["state"] == "starting", "the next server looks whether it is ready")
    assert second.request("/v2/health/ready")[0] == 503
    unready.unlink()
    is_adopted(second, pid)
    assert mark.read_text().split() == [str(pid)]
    ends(first)
