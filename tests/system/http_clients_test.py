"""HTTP clients that many people have, against a real server on the host backend, each in the way its manual shows."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import httpx
import numpy as np
import pytest
import requests
import torch
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from launching import call
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, SLOW, Affine, Slow
from serving import Server

MANY = 2000  # rows, whose answers are worth compressing
ROUTE = "/v2/models/affine/infer"


@pytest.fixture
def affine(world) -> Affine:
    return world.models.add("affine", Affine(), **AFFINE)


@pytest.fixture
def server(world, affine) -> Server:
    world.models.add("slow", Slow(), **SLOW)
    return world.serve(world.policy("affine", "slow", server="max_body: 8MiB"), "--grpc-port", "0")


def rows(count: int) -> np.ndarray:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3) / 64


def asked(x: np.ndarray) -> dict:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()}]}


def asked_in_binary(x: np.ndarray) -> tuple[bytes, dict[str, str]]:
    given = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [given]}).encode()
    return head + x.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def in_pieces(body: bytes, count: int = 7):
    size = len(body) // count + 1
    return [body[at:at + size] for at in range(0, len(body), size)]


def check(answer: dict, affine: Affine, x: np.ndarray) -> None:
    wanted = affine(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(np.array(answer["outputs"][0]["data"], dtype=np.float32).reshape(wanted.shape), wanted, rtol=1e-5)


def test_requests_asks_on_one_connection_and_understands_compressed_answers(server, affine):
    with requests.Session() as session:
        for count in (1, MANY, 1):
            answer = session.post(server.url + ROUTE, json=asked(rows(count)), timeout=PATIENCE_SECONDS)
            answer.raise_for_status()
            assert ("Content-Encoding" in answer.headers) == (count == MANY)
            check(answer.json(), affine, rows(count))
        refused = session.post(f"{server.url}/v2/models/nobody/infer", json=asked(rows(1)), timeout=PATIENCE_SECONDS)
        with pytest.raises(requests.HTTPError, match="404"):
            refused.raise_for_status()
        assert "nobody" in refused.json()["error"]


def test_requests_uploads_a_file_and_a_generator(server, affine, tmp_path):
    body, headers = asked_in_binary(rows(MANY))
    file = tmp_path / "body"
    file.write_bytes(body)
    with file.open("rb") as opened:
        check(requests.post(server.url + ROUTE, data=opened, headers=headers, timeout=PATIENCE_SECONDS).json(), affine, rows(MANY))
    answer = requests.post(server.url + ROUTE, data=iter(in_pieces(body)), headers=headers, timeout=PATIENCE_SECONDS)
    check(answer.json(), affine, rows(MANY))


def test_httpx_streams_a_body_and_gives_up_in_time(server, affine):
    body, headers = asked_in_binary(rows(MANY))
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
        check(client.post(ROUTE, json=asked(rows(MANY))).json(), affine, rows(MANY))
        check(client.post(ROUTE, content=iter(in_pieces(body)), headers=headers).json(), affine, rows(MANY))
        slow = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [20_000]}]}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v2/models/slow/infer", json=slow, timeout=0.2)
        check(client.post(ROUTE, json=asked(rows(1))).json(), affine, rows(1))
    eventually(lambda: server.status()["requests"]["in_flight"] == 0, "nobody waits for it")


def test_httpx_asks_many_times_at_once(server, affine):
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
            return await asyncio.gather(*(client.post(ROUTE, json=asked(rows(count))) for count in range(1, 40)))

    for count, answer in enumerate(asyncio.run(ask_all()), start=1):
        assert answer.status_code == 200 and answer.http_version == "HTTP/1.1"
        check(answer.json(), affine, rows(count))


def test_aiohttp_compresses_streams_and_waits_to_be_asked_on(server, affine):
    body, headers = asked_in_binary(rows(MANY))

    async def pieces():
        for each in in_pieces(body):
            yield each

    async def ask_all() -> list[dict]:
        answers = []
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(PATIENCE_SECONDS)) as session:
            for how in ({"json": asked(rows(MANY))}, {"json": asked(rows(MANY)), "compress": "gzip"},
                        {"json": asked(rows(MANY)), "compress": "deflate"}, {"data": pieces(), "headers": headers},
                        {"data": body, "headers": headers, "expect100": True}):
                async with session.post(ROUTE, **how) as answer:
                    assert answer.status == 200, await answer.text()
                    answers.append(await answer.json())
            async with session.post(ROUTE, data=bytes(9 << 20), expect100=True) as answer:
                assert answer.status == 413 and "larger" in (await answer.json())["error"]
        return answers

    for answer in asyncio.run(ask_all()):
        check(answer, affine, rows(MANY))


def test_curl_asks_as_its_manual_says(server, affine, tmp_path):
    url = server.url + ROUTE
    body, headers = asked_in_binary(rows(MANY))
    file = tmp_path / "body"
    file.write_bytes(body)
    given = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
    for more in ([], ["--compressed"], ["-H", "Expect: 100-continue"], ["-H", "Transfer-Encoding: chunked"], ["--http1.0"], ["--http2"]):
        done = call("curl", "-sSf", *more, *given, "--data-binary", f"@{file}", url)
        check(json.loads(done.stdout), affine, rows(MANY))
    done = call("curl", "-sSf", "--json", json.dumps(asked(rows(1))), url)
    check(json.loads(done.stdout), affine, rows(1))
    done = call("curl", "-s", "-w", "\n%{http_code}", "-T", str(file), url)  # PUT
    assert done.stdout.endswith("\n405") and "POST" in done.stdout


def test_tritons_asynchronous_clients(server, affine):
    async def over_http() -> np.ndarray:
        async with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
            assert await client.is_server_ready() and await client.is_model_ready("affine")
            given = triton_http.InferInput("x", [MANY, 3], "FP32")
            given.set_data_from_numpy(rows(MANY))
            answer = await client.infer("affine", [given], request_compression_algorithm="gzip", response_compression_algorithm="gzip")
            return answer.as_numpy("y")

    async def over_grpc() -> list[np.ndarray]:
        async def given():
            for count in range(1, 6):
                made = triton_grpc.InferInput("x", [count, 3], "FP32")
                made.set_data_from_numpy(rows(count))
                yield {"model_name": "affine", "inputs": [made], "request_id": str(count)}

        async with triton_grpc.InferenceServerClient(server.status()["server"]["grpc_endpoint"]) as client:
            return [answer.as_numpy("y") async for answer, error in client.stream_infer(given()) if error is None]

    requests.post(server.url + ROUTE, json=asked(rows(1)), timeout=PATIENCE_SECONDS).raise_for_status()  # it is warm
    np.testing.assert_allclose(asyncio.run(over_http()), affine(torch.from_numpy(rows(MANY))).detach().numpy(), rtol=1e-5)
    streamed = asyncio.run(over_grpc())
    assert [len(each) for each in streamed] == [1, 2, 3, 4, 5]
    for each in streamed:
        np.testing.assert_allclose(each, affine(torch.from_numpy(rows(len(each)))).detach().numpy(), rtol=1e-5)


def test_http_2_without_asking_is_refused_in_words(server):
    done = call("curl", "-sS", "--http2-prior-knowledge", f"{server.url}/v2")
    assert done.returncode != 0
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_SECONDS) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        said = b""
        while came := client.recv(65536):
            said += came
    assert said.startswith(b"HTTP/1.1 400 ") and b"HTTP" in json.loads(said.partition(b"\r\n\r\n")[2])["error"].encode(), said
