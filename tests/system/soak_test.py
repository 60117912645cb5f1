"""Requests of all kinds to a real server, in rounds, each of which kills its executor, takes a model away and brings it back, and has the
policy read again: every answer is right, and what server and executor hold does not grow."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc

#: Rounds, and requests in all.
LENGTHS = [pytest.param(4, 4000, id="short"), pytest.param(10, 1_000_000, id="long", marks=[pytest.mark.long, pytest.mark.deadline(7200)])]
CLIENTS = 4
LARGE_ROWS = 87_382  # of three numbers: 1 MiB
#: What may come on top between the first round and the last: of resident memory, what malloc keeps by chance.
SLACK_MIB = {"server": 16, "executor": 48}
#: gRPC adds some of its own when many calls come at once.
LAZY_THREADS = 4
INFER = "/v2/models/affine/infer"


@dataclass
class Held:
    """What a process holds."""

    resident_mib: float
    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        return cls(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


class Connection:
    """A client's, which is opened again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._read = b""

    def close(self) -> None:
        if self._socket:
            self._socket.close()
        self._socket, self._read = None, b""

    def send(self, data: bytes) -> None:
        if not self._socket:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(data)

    def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and body; interim answers are passed over."""
        while b"\r\n\r\n" not in self._read:
            self._receive()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        status = int(first.split()[1])
        if status < 200:
            return self.answer()
        length = int(headers[b"Content-Length"])
        while len(self._read) < length:
            self._receive()
        body, self._read = self._read[:length], self._read[length:]
        if headers.get(b"Connection") == b"close":
            self.close()
        return status, headers, body

    def _receive(self) -> None:
        came = self._socket.recv(1 << 20)
        assert came, "the server ended the connection before it had answered"
        self._read += came


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Asking:
    """One client's requests, each by a method, with what is known of their answers."""

    def __init__(self, server: Server, model: Affine, seed: int) -> None:
        self._port = int(server.url.rpartition(":")[2])
        self._connection = Connection(self._port)
        self._model = model
        self._chance = random.Random(seed)
        self._channel = grpc.insecure_channel(server.status()["server"]["grpc_endpoint"])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._cases = [self._case(row) for row in torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))]
        large = torch.randn(LARGE_ROWS, 3, generator=torch.Generator().manual_seed(seed))
        self._large = self._binary(large), self._wanted(large)
        self._kinds = [self.json, self.binary, self.zipped, self.grpc, self.wrong, self.unknown, self.too_large, self.not_served, self.large,
                       self.slow, self.broken_off, self.gone]
        self._weights = [600, 250, 50, 20, 20, 20, 10, 10, 2, 10, 5, 3]

    def close(self) -> None:
        self._connection.close()
        self._channel.close()

    def ask(self) -> None:
        self._chance.choices(self._kinds, self._weights)[0]()

    def _wanted(self, x: torch.Tensor) -> bytes:
        return self._model(x).detach().numpy().tobytes()

    def _binary(self, x: torch.Tensor) -> bytes:
        given = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.numel() * 4}}
        head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
        return post(INFER, head + x.numpy().tobytes(), f"Inference-Header-Content-Length: {len(head)}")

    def _case(self, row: torch.Tensor) -> dict:
        x = row.reshape(1, 3)
        text = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": row.tolist()}]}).encode()
        asked = service_pb2.ModelInferRequest(model_name="affine", raw_input_contents=[x.numpy().tobytes()])
        asked.inputs.add(name="x", datatype="FP32", shape=[1, 3])
        return {"text": text, "json": post(INFER, text), "binary": self._binary(x), "grpc": asked, "wanted": self._wanted(x),
                "zipped": post(INFER, gzip.compress(text), "Content-Encoding: gzip", "Accept-Encoding: gzip")}

    def _some(self) -> dict:
        return self._chance.choice(self._cases)

    def _expect_json(self, wanted: bytes) -> None:
        status, _, body = self._connection.answer()
        assert status == 200, (status, body)
        data = json.loads(body)["outputs"][0]["data"]
        assert struct.pack(f"<{len(data)}f", *data) == wanted, body

    def _expect_binary(self, wanted: bytes) -> None:
        status, headers, body = self._connection.answer()
        assert status == 200, (status, body[:500])
        assert body[int(headers[b"Inference-Header-Content-Length"]):] == wanted

    def _expect_refusal(self, request: bytes, wanted: int, words: str) -> None:
        self._connection.send(request)
        status, _, body = self._connection.answer()
        assert (status, words in json.loads(body)["error"]) == (wanted, True), (status, body)

    def json(self) -> None:
        case = self._some()
        self._connection.send(case["json"])
        self._expect_json(case["wanted"])

    def binary(self) -> None:
        case = self._some()
        self._connection.send(case["binary"])
        self._expect_binary(case["wanted"])

    def zipped(self) -> None:
        case = self._some()
        self._connection.send(case["zipped"])
        self._expect_json(case["wanted"])

    def grpc(self) -> None:
        case = self._some()
        assert self._stub.ModelInfer(case["grpc"], timeout=PATIENCE_SECONDS).raw_output_contents[0] == case["wanted"]

    def large(self) -> None:
        self._connection.send(self._large[0])
        status, headers, body = self._connection.answer()
        assert status == 200, (status, body[:500])
        got = torch.frombuffer(bytearray(body[int(headers[b"Inference-Header-Content-Length"]):]), dtype=torch.float32)
        torch.testing.assert_close(got, torch.frombuffer(bytearray(self._large[1]), dtype=torch.float32))

    def wrong(self) -> None:
        self._expect_refusal(post(INFER, b'{"inputs": [{"name": "z"}]}'), 400, "z")

    def unknown(self) -> None:
        self._expect_refusal(post("/v2/models/nobody/infer", self._some()["text"]), 404, "nobody")

    def too_large(self) -> None:
        self._expect_refusal(post(INFER, b"", length=5 << 20), 413, "4194304 bytes")

    def not_served(self) -> None:
        self._expect_refusal(post("/v2/models/broken/infer", self._some()["text"]), 503, "broken")

    def slow(self) -> None:
        """Sends its request in pieces, and asks on another connection between them."""
        case, slow = self._some(), Connection(self._port)
        cuts = sorted(self._chance.sample(range(1, len(case["json"])), 3))
        for begin, end in zip([0, *cuts], [*cuts, len(case["json"])], strict=True):
            self.binary()
            slow.send(case["json"][begin:end])
        self._connection, slow = slow, self._connection
        slow.close()
        self._expect_json(case["wanted"])

    def broken_off(self) -> None:
        """Leaves in the middle of its request."""
        request = self._some()["json"]
        leaving = Connection(self._port)
        leaving.send(request[:self._chance.randrange(1, len(request))])
        leaving.close()

    def gone(self) -> None:
        """Leaves without waiting for its answer."""
        leaving = Connection(self._port)
        leaving.send(self._some()["binary"])
        leaving.close()


def serving(server: Server) -> int | None:
    executor = server.status()["executor"]
    return executor["pid"] if executor["state"] == "ready" and executor["spare_pid"] else None


def change_all(server: Server, done: list[Server]) -> None:
    """What an operator does, and what an executor suffers, while it is asked."""
    former = eventually(lambda: serving(server), "an executor serves, and has a spare")
    assert server.request("/v2/repository/models/guest/unload", b"")[0] == 200
    assert server.request("/v2/models/guest/infer", b"{}")[0] == 503
    assert server.request("/v2/repository/models/guest/load", b"")[0] == 200
    assert server.request("/v2/models/guest")[0] == 200
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.log().count("the policy has been read again") > len(done), "the policy is read again")
    os.kill(former, signal.SIGKILL)
    eventually(lambda: (now := serving(server)) and now != former, "another executor serves")
    done.append(server)


@pytest.mark.parametrize("rounds, requests", LENGTHS)
def test_requests_of_all_kinds_are_answered_rightly_and_leave_nothing_behind(world, rounds, requests):
    affine = world.models.add("affine", Affine(), **AFFINE)
    world.models.add("guest", Affine(seed=1), **AFFINE)
    world.models.configure("broken", **AFFINE)
    policy = world.policy("affine", "guest", server="model_control: explicit, max_body: 4MiB")
    server = world.serve(policy, "--grpc-port", "0")
    seed = random.randrange(2**32)
    print("seed", seed)
    changed: list[Server] = []
    first: dict[str, Held] = {}

    def ask(number: int) -> None:
        asking = Asking(server, affine, seed + number)
        try:
            for _ in range(requests // rounds // CLIENTS):
                asking.ask()
        finally:
            asking.close()

    def held(connections_of: int | None) -> dict[str, Held]:
        """Of both, once the server holds no more than that many descriptors."""
        pids = {"server": server.process.pid, "executor": eventually(lambda: serving(server), "an executor serves")}
        if connections_of is not None:
            eventually(lambda: Held.by(pids["server"]).descriptors <= connections_of, "the connections are closed")
        return {name: Held.by(pid) for name, pid in pids.items()}

    for round_number in range(rounds):
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            asked = [pool.submit(ask, round_number * CLIENTS + number) for number in range(CLIENTS)]
            asked.append(pool.submit(change_all, server, changed))
            for each in asked:
                each.result()
        eventually(lambda: server.status()["requests"]["in_flight"] == 0, "nothing is in flight")
        now = held(first["server"].descriptors if first else None)
        first = first or now
        print(round_number, now)
    for name, at_first in first.items():
        assert now[name].threads <= at_first.threads + LAZY_THREADS and now[name].descriptors <= at_first.descriptors, (name, at_first, now)
        assert now[name].resident_mib <= at_first.resident_mib + SLACK_MIB[name], (name, at_first, now)
    assert server.status()["executor"]["started"] == rounds + 1
    assert threading.active_count() < 20
    assert server.end() == 0
