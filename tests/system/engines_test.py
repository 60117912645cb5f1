"""Engines behind `sluice serve`: processes that it starts and ends, and requests that pass through it (engine_server.py)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS, eventually
from serving import Server

PROGRAM = Path(__file__).with_name("engine_server.py")


def engine(name: str = "chat", *, arguments: str = "--port, '{port}'", routes: str = "/v1/*", ready: str = "/health", more: str = "",
           beside: str = "") -> str:
    """A line of `models`."""
    return (f"  - {{name: {name}, slo: {{latency: 2s}}{beside}, engine: {{command: [{sys.executable}, {PROGRAM}, {arguments}], "
            f"routes: [{routes}]{', ready: ' + ready if ready else ''}{more}}}}}")


@pytest.fixture
def serve(world):
    """Starts a server with these engines and no models of a repository."""
    def start(*engines: str, server: str = "request_timeout: 30s", expect: bool = True) -> Server:
        path = world.folder / "policy.yaml"
        path.write_text("\n".join(["version: 1", f"server: {{{server}}}", "pool: {backend: host, memory: 64MiB}", "models:", *engines]) + "\n",
                        encoding="utf-8")
        return world.serve(path) if expect else path
    return start


def connection(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE_SECONDS)


def raw(server: Server, request: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), PATIENCE_SECONDS)
    made.sendall(request)
    return made


def all_of(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def ask(server: Server, target: str, method: str = "GET", body=None, headers=None, **more) -> tuple[int, http.client.HTTPMessage, bytes]:
    client = connection(server)
    with contextlib.closing(client):
        client.request(method, target, body, headers or {}, **more)
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read()


def state(server: Server, name: str = "chat") -> dict:
    return next(each for each in server.status()["engines"] if each["name"] == name)


def echo(server: Server, **more) -> dict:
    status, _, body = ask(server, "/v1/echo", **more)
    assert status == 200, body
    return json.loads(body)


def fields(told: dict, name: str) -> list[str]:
    return [value for key, value in told["headers"] if key.lower() == name.lower()]


# ---- their life

def test_the_first_request_starts_an_engine_and_the_second_finds_it(serve):
    server = serve(engine())
    assert state(server)["state"] == "cold"
    assert server.request("/v2/health/ready")[0] == 200
    first, second = echo(server), echo(server)
    assert first["pid"] == second["pid"] == state(server)["pid"]
    seen = state(server)
    assert (seen["state"], seen["starts"], seen["answered"], seen["in_flight"]) == ("ready", 1, 2, 0)
    assert seen["observed_attainment"] is not None
    assert "engine listens" in Path(seen["log"]).read_text()


def test_an_engine_of_at_boot_starts_with_the_server_which_is_not_ready_before(serve, tmp_path):
    unready = tmp_path / "unready"
    unready.touch()
    server = serve(engine(arguments=f"--port, '{{port}}', --unready, {unready}", more=", start: at_boot"))
    status, answer = server.request("/v2/health/ready")
    assert status == 503
    assert "engine 'chat' is" in answer["error"]
    unready.unlink()
    eventually(lambda: server.request("/v2/health/ready")[0] == 200, "the server is ready")
    assert state(server)["starts"] == 1


def test_a_port_comes_by_the_environment_too_and_the_engine_has_its_own_variables(serve):
    told = echo(serve(engine(arguments="", more=", env: {GREETING: 'at {port}'}")))
    assert told["environment"]["GREETING"] == f"at {told['environment']['PORT']}"
    assert "LD_PRELOAD" not in told["environment"]


def test_an_engine_may_listen_on_a_socket_that_only_the_server_reaches(serve, runtime_folder):
    server = serve(engine(arguments="--socket, '{socket}'"))
    assert echo(server)["method"] == "GET"
    address = Path(state(server)["address"])
    assert address.is_relative_to(runtime_folder)
    assert server.end() == 0
    assert not address.parent.exists()


def test_engines_start_one_at_a_time(serve, tmp_path):
    unready = tmp_path / "unready"
    unready.touch()
    server = serve(engine("one", arguments=f"--port, '{{port}}', --unready, {unready}", routes="/one", more=", start: at_boot"),
                   engine("two", routes="/two", more=", start: at_boot"))
    eventually(lambda: state(server, "one")["state"] == "starting", "the first starts")
    assert (state(server, "two")["state"], state(server, "two")["starts"]) == ("queued", 0)
    unready.unlink()
    eventually(lambda: state(server, "two")["state"] == "ready", "the second is ready")


def test_who_waits_for_an_engine_that_cannot_start_hears_why_with_the_last_lines_of_its_log(serve):
    server = serve(engine(arguments="--fail, 'no weights in /srv'"))
    status, headers, body = ask(server, "/v1/echo")
    assert status == 503
    said = json.loads(body)["error"]
    assert "engine 'chat' cannot be started: it ended with exit code 3" in said
    assert "no weights in /srv" in said
    assert int(headers["Retry-After"]) >= 1
    assert state(server)["state"] == "failed"
    assert "no weights in /srv" in state(server)["reason"]
    assert server.request("/v2/health/ready")[0] == 503


def test_a_command_that_there_is_not_is_named(serve):
    server = serve("  - {name: chat, slo: {latency: 1s}, engine: {command: [no-such-program-here], routes: [/v1/*]}}")
    status, _, body = ask(server, "/v1/echo")
    assert (status, "no-such-program-here" in json.loads(body)["error"]) == (503, True)


def test_an_engine_that_is_not_ready_in_its_time_is_ended(serve, tmp_path):
    unready, mark = tmp_path / "unready", tmp_path / "mark"
    unready.touch()
    server = serve(engine(arguments=f"--port, '{{port}}', --unready, {unready}, --mark, {mark}", more=", start_timeout: 6s"))
    status, _, body = ask(server, "/v1/echo")
    assert status == 503
    assert "was not ready within 6s (start_timeout)" in json.loads(body)["error"]
    for pid in mark.read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_an_engine_that_is_killed_is_started_again_and_serves_the_next_request(serve):
    server = serve(engine())
    client = connection(server)
    client.request("GET", "/v1/die?after=0")
    answer = client.getresponse()
    assert answer.status == 503
    assert "before it answered" in json.loads(answer.read())["error"]
    assert echo(server)["method"] == "GET"
    seen = state(server)
    assert (seen["state"], seen["starts"], seen["ends"], seen["failed"]) == ("ready", 2, 1, 1)
    assert "ended by signal 9" in server.log()


def test_an_answer_that_is_broken_off_ends_without_its_last_chunk(serve):
    server = serve(engine())
    client = connection(server)
    client.request("GET", "/v1/die?after=5")
    answer = client.getresponse()
    assert answer.read(5) == b"xxxxx"
    ask(server, "/v1/go", "POST")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    assert echo(server)["method"] == "GET"
    assert (state(server)["failed"], state(server)["broken_off"]) == (1, 1)
    assert 'sluice_engine_broken_answers_total{engine="chat"} 1' in ask(server, "/metrics")[2].decode()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_its_server(serve, how):
    server = serve(engine())
    pid = echo(server)["pid"]
    server.process.send_signal(how)
    server.process.wait(PATIENCE_SECONDS)
    eventually(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text(), "the engine has ended")


def test_what_an_engine_started_ends_with_it(serve, tmp_path):
    mark = tmp_path / "worker"
    script = tmp_path / "engine.sh"
    script.write_text(f"#!/bin/sh\nsetsid sleep 1000 & echo $! > {mark}\nexec {sys.executable} {PROGRAM} --port $1\n")
    script.chmod(0o700)
    server = serve(f"  - {{name: chat, slo: {{latency: 1s}}, engine: {{command: [./engine.sh, '{{port}}'], routes: [/v1/*], ready: /health}}}}")
    pid = echo(server)["pid"]
    worker = Path("/proc") / mark.read_text().strip()
    assert worker.exists()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: state(server)["ends"] == 1, "its end is seen")
    assert not worker.exists()
    assert echo(server)["method"] == "GET"


# ---- what is listed

def test_engines_stand_in_the_lists_of_models_and_in_metrics(serve):
    server = serve(engine())
    index = json.loads(ask(server, "/v2/repository/index", "POST")[2])
    assert index == [{"name": "chat", "version": "1", "state": "UNAVAILABLE", "reason": "cold; a request to one of its routes starts it"}]
    status, answer = server.request("/v2/models/chat/ready")
    assert status == 503
    assert "starts it" in answer["error"]
    echo(server)
    assert server.request("/v2/models/chat/ready") == (200, {"name": "chat", "ready": True})
    assert server.request("/v2/models/chat")[1]["platform"] == "engine"
    status, answer = server.infer("chat", [])
    assert status == 400
    assert "its own routes" in answer["error"]
    told = ask(server, "/metrics")[2].decode()
    assert 'sluice_engine_state{engine="chat",state="ready"} 1' in told
    assert 'sluice_engine_requests_total{engine="chat",outcome="answered"} 1' in told


def test_watching_does_not_start_an_engine(serve):
    server = serve(engine())
    for path in ("/v2", "/v2/health/ready", "/v2/models/chat", "/v2/models/chat/ready", "/v2/sluice/status", "/metrics"):
        ask(server, path)
    assert state(server)["starts"] == 0


def test_engines_do_not_change_while_the_server_runs(serve, world):
    server = serve(engine())
    path = world.folder / "policy.yaml"
    path.write_text(path.read_text().replace("/v1/*", "/v3/*"))
    answer = world.program
    import subprocess
    done = subprocess.run([answer, "policy", "reload"], capture_output=True, text=True, check=False)
    assert done.returncode == 8
    assert "engines cannot come, go or change while the server runs, but for `warm`" in done.stderr
    assert echo(server)["method"] == "GET"


# ---- what passes

def test_head_and_body_pass_and_what_is_of_one_connection_does_not(serve):
    server = serve(engine())
    told = echo(server, method="POST", body=b"\x00\xff tail", headers={
        "Connection": "keep-alive, X-Mine", "X-Mine": "1", "X-Stays": "2", "Keep-Alive": "5", "TE": "trailers", "Proxy-Authorization": "x",
        "X-Forwarded-For": "10.0.0.1", "X-Forwarded-Proto": "gopher", "Forwarded": "for=evil", "Authorization": "Bearer mine"})
    assert (told["method"], told["target"], told["body"]) == ("POST", "/v1/echo", "\x00\xff tail")
    for gone in ("X-Mine", "Keep-Alive", "TE", "Proxy-Authorization", "Forwarded"):
        assert fields(told, gone) == [], gone
    assert fields(told, "X-Stays") == ["2"]
    assert fields(told, "X-Forwarded-For") == ["10.0.0.1, 127.0.0.1"]
    assert fields(told, "X-Forwarded-Proto") == ["http"]
    assert fields(told, "Authorization") == ["Bearer mine"]
    assert fields(told, "Host") == [server.url.removeprefix("http://")]
    _, headers, _ = ask(server, "/v1/echo")
    assert "X-Hop" not in headers
    assert headers["X-End"] == "2"
    assert headers.get_all("Set-Cookie") == ["a=1", "b=2"]


def test_a_body_in_chunks_and_the_fields_behind_it_pass_both_ways(serve):
    server = serve(engine())
    ask(server, "/v1/echo")
    client = raw(server, b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
                         b"3;ext=1\r\nabc\r\n4\r\ndefg\r\n0\r\nX-Sum: 9\r\nAuthorization: no\r\n\r\n")
    told = json.loads(all_of(client).partition(b"\r\n\r\n")[2])
    assert (told["body"], told["trailers"]) == ("abcdefg", [["X-Sum", "9"]])
    said = all_of(raw(server, b"GET /v1/trailers HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert said.endswith(b"4\r\nbody\r\n0\r\nX-Sum: 7\r\n\r\n")


def test_answers_of_every_form_pass(serve):
    server = serve(engine())
    client = connection(server)  # one connection for all
    for method, target, expected in (("GET", "/v1/length?n=100000", b"x" * 100000), ("GET", "/v1/close", b"to the end"),
                                     ("GET", "/v1/interim", b"final"), ("HEAD", "/v1/echo", b""), ("GET", "/v1/bytes?n=300000", bytes(300000)),
                                     ("DELETE", "/v1/nothing", b"nothing here")):
        client.request(method, target)
        answer = client.getresponse()
        assert answer.read() == expected, target
        assert answer.status == (404 if "nothing" in target else 200)
    port = client.sock.getsockname()
    assert port
    old = all_of(raw(server, b"GET /v1/bytes?n=10 HTTP/1.0\r\n\r\n"))
    assert old.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"chunked" not in old
    assert old.endswith(b"\r\n\r\n" + bytes(10))


def test_requests_that_are_sent_ahead_are_answered_in_turn(serve):
    server = serve(engine())
    said = all_of(raw(server, b"GET /v1/length?n=1 HTTP/1.1\r\nHost: x\r\n\r\nGET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
                              b"GET /v1/length?n=2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert [part.partition(b"\r\n\r\n")[2] for part in said.split(b"HTTP/1.1 ")[1:]][::2] == [b"x", b"xx"]
    assert said.count(b" 200 OK\r\n") == 3


def test_an_event_is_passed_when_it_comes(serve):
    server = serve(engine())
    client = connection(server)
    client.request("GET", "/v1/events?n=3&hold=1")
    answer = client.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.readline() == b"data: 0\n"  # while the engine waits to be let go on
    ask(server, "/v1/go", "POST")
    assert answer.read() == b"\ndata: 1\n\ndata: 2\n\n"


def test_a_websocket_passes_both_ways(serve):
    server = serve(engine())
    echo(server)
    client = raw(server, b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: k\r\n\r\nfirst")
    said = b""
    while not said.endswith(b"first"):
        said += client.recv(1 << 16)
    assert said.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert b"Sec-WebSocket-Accept: x\r\n" in said
    for piece in (b"\x81\x05hello", bytes(200_000)):
        client.sendall(piece)
        came = b""
        while len(came) < len(piece):
            came += client.recv(1 << 16)
        assert came == piece
    client.close()
    eventually(lambda: state(server)["in_flight"] == 0, "it has been closed")


def test_who_waits_to_send_a_body_is_asked_for_it_by_an_engine_that_is_there(serve):
    server = serve(engine())
    client = raw(server, b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n")
    assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b"ab")
    told = json.loads(all_of(client).partition(b"\r\n\r\n")[2])
    assert told["body"] == "ab"
    assert fields(told, "Expect") == []


def test_an_answer_before_the_body_has_come_passes_and_ends_the_connection(serve):
    server = serve(engine())
    echo(server)
    client = raw(server, b"POST /v1/early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
    said = b""
    while not said.endswith(b"too large"):
        came = client.recv(1 << 16)
        assert came, said
        said += came
    assert said.startswith(b"HTTP/1.1 413 ")
    client.close()


def test_connections_to_an_engine_serve_one_request_after_the_other(serve):
    server = serve(engine())
    for number in range(5):  # of a client each
        assert echo(server, method="POST", body=b"x" * number)["body"] == "x" * number
    asked = json.loads(ask(server, "/v1/seen")[2])
    looks = 1  # each is a connection, and at least one has found it ready
    assert looks + 1 <= asked["connections"] < 5
    told = echo(server)
    assert fields(told, "Connection") == []


def test_each_request_has_a_connection_of_its_own_where_none_are_kept(serve):
    server = serve(engine(more=", kept_connections: 0"))
    for _ in range(5):
        assert fields(echo(server), "Connection") == ["close"]
    assert json.loads(ask(server, "/v1/seen")[2])["connections"] >= 6


@pytest.mark.parametrize("where", ["--port, '{port}'", "--socket, '{socket}'"])
def test_an_engine_that_closes_its_connections_without_a_word_loses_no_request(serve, where):
    server = serve(engine(arguments=f"{where}, --closes"))
    echo(server)
    with ThreadPoolExecutor(4) as clients:
        assert all(clients.map(lambda n: ask(server, f"/v1/length?n={n}")[2] == b"x" * n, range(1, 200)))
    assert state(server)["failed"] == 0


def test_connections_of_an_engine_that_has_ended_are_not_used_for_the_next_one(serve):
    server = serve(engine(arguments="--socket, '{socket}'"))  # whose address stays the same
    pids = []
    for number in range(1, 4):
        pids.append(echo(server, method="POST", body=b"x")["pid"])
        os.kill(pids[-1], signal.SIGKILL)
        eventually(lambda number=number: state(server)["ends"] == number, "its end is seen")
    assert len(set(pids)) == 3
    assert state(server)["failed"] == 0


# ---- what does not

@pytest.mark.parametrize("head", [
    b"Content-Length: 3\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    b"Content-Length: 3\r\nContent-Length: 4",
    b"Content-Length: +3",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Content-Length : 3",
])
def test_a_head_that_two_servers_might_read_differently_does_not_pass(serve, head):
    server = serve(engine())
    said = all_of(raw(server, b"POST /v1/echo HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\nabc0\r\n\r\n"))
    assert said.split(b" ", 2)[1] in (b"400", b"501"), said
    assert said.count(b"HTTP/1.1 ") == 1
    assert state(server)["starts"] == 0


def test_a_field_that_is_folded_is_one_line_to_the_engine(serve):
    server = serve(engine())
    said = all_of(raw(server, b"GET /v1/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Folded: a\r\n b: c\r\n\r\n"))
    head, body = said.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 "), said
    told = json.loads(body)
    assert [" ".join(each.split()) for each in fields(told, "X-Folded")] == ["a b: c"]
    assert not fields(told, "b")


def test_a_path_that_an_engine_might_take_for_another_does_not_pass(serve):
    server = serve(engine())
    for path in ("/v1/../admin", "/v1/%2e%2e/admin", "/v1/..%2fadmin"):
        assert ask(server, path)[0] == 400
    assert ask(server, "/v3/x")[0] == 404
    assert ask(server, "/v1/echo", "TRACE")[0] == 501
    assert state(server)["starts"] == 0


def test_what_is_not_http_is_a_bad_gateway(serve):
    status, _, body = ask(serve(engine()), "/v1/odd")
    assert status == 502
    assert "engine 'chat'" in json.loads(body)["error"]


def test_a_body_beyond_the_limit_is_refused_however_it_is_said(serve):
    server = serve(engine(), server="max_body: 1MiB")
    assert ask(server, "/v1/echo", "POST", bytes((1 << 20) + 1))[0] == 413
    assert ask(server, "/v1/echo", "POST", iter([bytes(1 << 20), b"x"]), encode_chunked=True)[0] == 413
    assert len(echo(server, method="POST", body=b"x" * (1 << 20))["body"]) == 1 << 20


def test_the_server_s_own_token_stays_with_it(serve, tmp_path):
    (tmp_path / "tokens").write_text("secret-token-of-this-server-0123456789\n")
    (tmp_path / "tokens").chmod(0o600)
    server = serve(engine(), server=f"token_file: {tmp_path / 'tokens'}")
    assert ask(server, "/v1/echo")[0] == 401
    told = echo(server, headers={"Authorization": "Bearer secret-token-of-this-server-0123456789"})
    assert fields(told, "Authorization") == []


# ---- bounds

def test_a_client_that_leaves_ends_its_request_at_the_engine(serve):
    server = serve(engine())
    client = raw(server, b"GET /v1/events?n=2&hold=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    while b"data: 0" not in client.recv(1 << 16):
        pass
    client.close()
    eventually(lambda: json.loads(ask(server, "/v1/seen")[2])["left"] == 1, "the engine's client has left")
    assert state(server)["client_left"] == 1


def test_a_client_that_leaves_while_it_waits_leaves_the_queue(serve, tmp_path):
    unready = tmp_path / "unready"
    unready.touch()
    server = serve(engine(arguments=f"--port, '{{port}}', --unready, {unready}"))
    client = raw(server, b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
    eventually(lambda: state(server)["waiting"] == 1, "it waits")
    client.close()
    eventually(lambda: state(server)["waiting"] == 0, "it waits no longer")


def test_a_client_that_reads_slowly_holds_the_engine_back(serve):
    server = serve(engine())
    echo(server)
    size = 256 << 20
    client = raw(server, b"GET /v1/bytes?n=%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % size)
    sent = [0]

    def stands() -> bool:
        before, sent[0] = sent[0], json.loads(ask(server, "/v1/seen")[2])["sent"]
        return 0 < before == sent[0]

    eventually(stands, "the engine has to wait")
    assert sent[0] < size // 4  # what the kernel's buffers take, at most
    rss = int(next(line.split()[1] for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines() if line.startswith("VmHWM")))
    assert rss < 128 << 10
    received = len(all_of(client))
    assert received > size


def test_requests_beyond_the_places_wait_and_those_beyond_the_queue_are_refused(serve):
    server = serve(engine(beside=", max_queue: 1", more=", max_requests: 1"))
    echo(server)
    with ThreadPoolExecutor(2) as clients:
        inside = clients.submit(ask, server, "/v1/hold")
        eventually(lambda: state(server)["in_flight"] == 1, "it is inside")
        waiting = clients.submit(ask, server, "/v1/length?n=3")
        eventually(lambda: state(server)["waiting"] == 1, "it waits")
        status, headers, body = ask(server, "/v1/length?n=3")
        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "max_queue" in json.loads(body)["error"]
        os.kill(state(server)["pid"], signal.SIGKILL)
        assert inside.result()[0] == 503
        assert waiting.result()[2] == b"xxx"  # of the next one


def test_a_request_is_held_no_longer_than_its_time(serve, tmp_path):
    unready = tmp_path / "unready"
    unready.touch()
    server = serve(engine(arguments=f"--port, '{{port}}', --unready, {unready}", beside=""), server="request_timeout: 2s")
    status, _, body = ask(server, "/v1/echo")
    assert (status, "could not take the request within 2s" in json.loads(body)["error"]) == (504, True)
    unready.unlink()
    eventually(lambda: state(server)["state"] == "ready", "the engine is ready all the same")
    status, _, body = ask(server, "/v1/hold")
    assert (status, "did not begin to answer within 2s" in json.loads(body)["error"]) == (504, True)


def test_an_engine_that_falls_silent_within_an_answer_is_cut_off(serve):
    server = serve(engine(more=", max_silence: 1s"))
    client = connection(server)
    client.request("GET", "/v1/events?n=2&hold=1")
    answer = client.getresponse()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    assert state(server)["failed"] == 1


@pytest.mark.deadline(900)
def test_a_thousand_streams_at_once_are_answered_in_full(serve):
    server = serve(engine(more=", max_requests: 1000", beside=", max_queue: 1000"))
    echo(server)
    clients = [raw(server, b"GET /v1/events?n=3&hold=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") for _ in range(1000)]
    eventually(lambda: state(server)["in_flight"] == 1000, "all are inside")
    release = threading.Thread(target=ask, args=(server, "/v1/go", "POST"))
    release.start()  # which waits for a place, until one has left
    clients.pop().close()
    assert all(all_of(client).endswith(b"data: 2\n\n\r\n0\r\n\r\n") for client in clients)
    release.join()
    eventually(lambda: state(server)["in_flight"] == 0, "all have left")
