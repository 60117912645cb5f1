"""The clients of the lease benchmark, in a process of their own: raw HTTP/1.1 over connections that stay open.

Each line of standard input is an object: `address`, `path`, `body` (a file), `connections`, and either `arrivals` (seconds
from the beginning, in order) with `seconds` and `grace_s`, or `closed_s` (so long each connection asks again at once). A line
of standard output answers: `latency_us` in the order of arrivals, counted from them, `unsent` (how many were left when the
grace was over: they count with the time that they had waited), `began_ns` and `ended_ns` (monotonic clock); or `error`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path

PATIENCE_S = 60.0
#: Before an arrival the process stays awake for so long: a sleep may end late.
AWAKE_S = 0.0003
PR_SET_TIMERSLACK = 29  # linux/prctl.h


class Refused(Exception):
    """An answer that is none."""


class Connection:
    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._got = b""
        self.due = 0.0
        self.number = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def ask(self, request: bytes, number: int, due: float) -> None:
        self.number, self.due, self._got = number, due, b""
        self.socket.sendall(request)

    def has_answer(self) -> bool:
        """Reads what has come. Raises Refused for anything but 200."""
        more = self.socket.recv(1 << 20)
        if not more:
            raise Refused("the server has closed a connection that waited for an answer")
        self._got += more
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *fields = head.split(b"\r\n")
        length = next(int(each.split(b":")[1]) for each in fields if each.lower().startswith(b"content-length:"))
        if len(body) < length:
            return False
        if first.split(b" ")[1] != b"200":
            raise Refused(f"a request was answered {first.decode()}: {body[:300].decode(errors='replace')}")
        return True


def request_of(given: dict) -> bytes:
    body = Path(given["body"]).read_bytes()
    host, port = given["address"]
    return (f"POST {given['path']} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def ask_at(given: dict, connections: list[Connection], request: bytes) -> dict:
    """Requests at their instants, whatever becomes of those before them."""
    began = time.monotonic() + 0.005
    until, offsets = began + given["seconds"], given["arrivals"]
    last = until + given["grace_s"]
    latency = [0.0] * len(offsets)
    idle, busy, late = deque(connections), {}, deque()
    following = 0
    while following < len(offsets) or busy or late:
        now = time.monotonic()
        while following < len(offsets) and began + offsets[following] <= now:
            late.append(following)
            following += 1
        while late and idle and now < last:
            connection = idle.popleft()
            number = late.popleft()
            connection.ask(request, number, began + offsets[number])
            busy[connection.fileno()] = connection
        if now >= last and not busy:
            break
        wait = PATIENCE_S
        if following < len(offsets):
            wait = max(0.0, began + offsets[following] - time.monotonic() - AWAKE_S)
        ready = select.select(list(busy), [], [], wait)[0]
        if not ready and wait == PATIENCE_S:
            raise Refused(f"no answer has come for {PATIENCE_S:.0f} s")
        for handle in ready:
            connection = busy[handle]
            if connection.has_answer():
                latency[connection.number] = 1e6 * (time.monotonic() - connection.due)
                idle.append(busy.pop(handle))
    ended = time.monotonic()
    for number in late:
        latency[number] = 1e6 * (ended - began - offsets[number])
    if (left := until - ended) > 0:
        time.sleep(left)
    return {"latency_us": latency, "unsent": len(late), "began_ns": int(1e9 * began),
            "ended_ns": int(1e9 * max(ended, until))}


def ask_again(given: dict, connections: list[Connection], request: bytes) -> dict:
    """Each connection's next request follows its answer at once."""
    began = time.monotonic()
    until = began + given["closed_s"]
    latency = []
    busy = {each.fileno(): each for each in connections}
    for each in connections:
        each.ask(request, 0, time.monotonic())
    while busy:
        ready = select.select(list(busy), [], [], PATIENCE_S)[0]
        if not ready:
            raise Refused(f"no answer has come for {PATIENCE_S:.0f} s")
        for handle in ready:
            connection = busy[handle]
            if connection.has_answer():
                now = time.monotonic()
                latency.append(1e6 * (now - connection.due))
                if now < until:
                    connection.ask(request, 0, now)
                else:
                    busy.pop(handle)
    return {"latency_us": latency, "unsent": 0, "began_ns": int(1e9 * began), "ended_ns": time.monotonic_ns()}


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    for line in sys.stdin:
        given = json.loads(line)
        gc.collect()
        gc.disable()
        connections: list[Connection] = []
        try:
            request = request_of(given)
            for _ in range(given["connections"]):
                connections.append(Connection(tuple(given["address"])))
            said = (ask_at if "arrivals" in given else ask_again)(given, connections, request)
        except (Refused, OSError) as failure:
            said = {"error": str(failure)}
        finally:
            for each in connections:
                each.socket.close()
            gc.enable()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
