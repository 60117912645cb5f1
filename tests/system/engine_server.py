"""An inference server as tests need one: small, quick to start, and able to do what no client should be spared.

    python engine_server.py [--port N | --socket PATH] [--fail TEXT] [--unready FILE] [--mark FILE] [--closes] [--models NAME,NAME]
                            [--oip NAME,NAME]

GET  /health              200; 503 while the file of --unready is there
*    /v1/echo             what came, as JSON: method, target, headers (a list of pairs), body, trailers, pid
GET  /v1/events?n=&hold=  n server-sent events; after the first of them waits for POST /v1/go where hold=1
GET  /v1/bytes?n=         n bytes in chunks, as fast as they are taken
GET  /v1/trailers         a body in chunks, with fields behind it
GET  /v1/length?n=        n bytes whose length is said
GET  /v1/close            a body that ends with the connection (HTTP/1.0)
GET  /v1/hold             answers when somebody has posted to /v1/go
GET  /v1/die?after=       ends itself by SIGKILL, after as many bytes of a longer answer
GET  /v1/odd              an answer that is not HTTP
GET  /v1/early            answers 413 without reading the body
GET  /v1/interim          answers 103 first
GET  /v1/models           the names of --models, as OpenAI's API lists them; 404 without
POST /v1/chat/completions, /v1/completions, /v1/embeddings  as OpenAI's API has them, of these models: the last message or the prompt, word by
                          word, with "stream" an event for each, where "hold" in the body waits for POST /v1/go behind the first
GET  /v2/models/NAME      the names of --oip, as the Open Inference Protocol has it, of two versions; /config, /versions/V and that of these, too
POST /v2/models/NAME/infer  and of a version: "y", which is "x" as it came, in JSON
--fail: says so and ends with 3; --mark: each start writes its pid there; --closes: each connection after one answer, without a word
POST /v1/go               lets everything go on that is held
GET  /v1/seen             counts: requests, connections, how many of them are open, clients that left, bytes of /v1/bytes that were taken
GET  /v1/ws               a websocket, by its handshake alone: echoes what comes

A connection serves one request after the other, unless a request or an answer says otherwise, by --closes or by /v1/close, /v1/early and
/v1/odd.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

seen = {"requests": 0, "open": 0, "left": 0, "sent": 0, "connections": 0, "lists": 0}
gate = asyncio.Event()


async def read_head(reader: asyncio.StreamReader, first: bytes) -> tuple[str, str, list[list[str]]]:
    head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    return method, target, [line.split(": ", 1) for line in lines]


Head = tuple[str, str, list[list[str]]]


def value_of(headers: list[list[str]], name: str) -> str:
    return next((value for key, value in headers if key.lower() == name), "")


async def read_body(reader: asyncio.StreamReader, headers: list[list[str]]) -> tuple[bytes, list[list[str]]]:
    if value_of(headers, "transfer-encoding") != "chunked":
        return await reader.readexactly(int(value_of(headers, "content-length") or 0)), []
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    trailers = []
    while (line := await reader.readline()) != b"\r\n":
        trailers.append(line.decode().rstrip("\r\n").split(": ", 1))
    return body, trailers


def head(status: str, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode()


def whole(body: bytes, status: str = "200 OK", *fields: str) -> bytes:
    return head(status, f"Content-Length: {len(body)}", *fields) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = "Transfer-Encoding: chunked"


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def answer_oip(writer: asyncio.StreamWriter, path: list[str], body: bytes) -> None:
    name, *rest = path
    if name not in options.oip.split(","):
        return await send(writer, whole(b'{"error": "unknown model"}', "404 Not Found"))
    version = rest[1] if rest[:1] == ["versions"] else ""
    if rest[-1:] == ["infer"]:
        seen["requests"] += 1
        given = json.loads(body)["inputs"][0]
        made = {"model_name": name, "model_version": version or "2", "outputs": [given | {"name": "y", "parameters": {}}]}
    elif rest[-1:] == ["config"]:
        seen["lists"] += 1
        made = {"name": name, "platform": "tests", "max_batch_size": 8, "version": version}
    else:
        seen["lists"] += 1
        made = {"name": name, "versions": ["1", "2"], "platform": "tests" + version,
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}], "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}]}
    return await send(writer, whole(json.dumps(made).encode(), "200 OK", "Content-Type: application/json"))


async def answer_openai(writer: asyncio.StreamWriter, what: str, asked: dict) -> None:
    if asked["model"] not in (options.models or "").split(","):
        refusal = {"error": {"message": f"the engine has no {asked['model']}", "type": "NotFoundError", "param": "model", "code": 404}}
        return await send(writer, whole(json.dumps(refusal).encode(), "404 Not Found"))
    base = {"id": f"{what}-{os.getpid()}", "created": 1, "model": asked["model"]}
    if what == "embeddings":
        made = base | {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, float(len(asked["input"]))]}],
                       "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        return await send(writer, whole(json.dumps(made).encode(), "200 OK", "Content-Type: application/json"))
    is_chat = what == "chat/completions"
    text = asked["messages"][-1]["content"] if is_chat else asked["prompt"]
    if not isinstance(text, str):  # parts
        text = text[0]["text"]
    if not asked.get("stream"):
        choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        made = base | {"object": "chat.completion" if is_chat else "text_completion", "choices": [{"index": 0, "finish_reason": "stop"} | choice],
                       "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        return await send(writer, whole(json.dumps(made).encode(), "200 OK", "Content-Type: application/json"))
    await send(writer, head("200 OK", "Content-Type: text/event-stream; charset=utf-8", CHUNKED))

    async def event(choices: list[dict]) -> None:
        made = base | {"object": "chat.completion.chunk" if is_chat else "text_completion", "choices": choices}
        await send(writer, chunk(b"data: " + json.dumps(made).encode() + b"\n\n"))

    if is_chat:
        await event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    for number, word in enumerate(text.split()):
        if number == 1 and asked.get("hold"):
            await gate.wait()
        await event([{"index": 0, "finish_reason": None} | ({"delta": {"content": word}} if is_chat else {"text": word})])
    await event([{"index": 0, "finish_reason": "stop"} | ({"delta": {}} if is_chat else {"text": ""})])
    return await send(writer, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head_read: Head, has_body: asyncio.Event) -> None:
    method, target, headers = head_read
    url = urlsplit(target)
    ask = {key: values[0] for key, values in parse_qs(url.query).items()}
    if url.path == "/v1/early":
        return await send(writer, whole(b"too large", "413 Content Too Large"))
    if url.path == "/v1/ws":
        await send(writer, head("101 Switching Protocols", "Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Accept: x"))
        while data := await reader.read(65536):
            await send(writer, data)
        return None
    body, trailers = await read_body(reader, headers)
    has_body.set()
    if url.path == "/health":
        return await send(writer, whole(b"", "503 Not Yet" if options.unready and Path(options.unready).exists() else "200 OK"))
    if url.path == "/v1/seen":
        return await send(writer, whole(json.dumps(seen).encode()))
    if url.path == "/v1/models" and options.models:
        seen["lists"] += 1
        listed = [{"id": name, "object": "model", "created": 1, "owned_by": "tests", "root": "/srv/weights"} for name in options.models.split(",")]
        return await send(writer, whole(json.dumps({"object": "list", "data": listed}).encode()))
    if url.path.startswith("/v2/models/") and options.oip:
        return await answer_oip(writer, url.path.split("/")[3:], body)
    seen["requests"] += 1
    if url.path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings") and method == "POST":
        return await answer_openai(writer, url.path.removeprefix("/v1/"), json.loads(body))
    if url.path == "/v1/go":
        gate.set()
        return await send(writer, whole(b""))
    if url.path == "/v1/echo":
        told = {"method": method, "target": target, "headers": headers, "body": body.decode("latin-1"), "trailers": trailers, "pid": os.getpid(),
                "environment": {key: os.environ[key] for key in os.environ if key in ("PORT", "GREETING", "LD_PRELOAD")}}
        made = json.dumps(told).encode()
        return await send(writer, head("200 OK", f"Content-Length: {len(made)}", "Connection: X-Hop", "X-Hop: 1", "X-End: 2", "Set-Cookie: a=1",
                                       "Set-Cookie: b=2") + (b"" if method == "HEAD" else made))
    if url.path == "/v1/events":
        await send(writer, head("200 OK", "Content-Type: text/event-stream", CHUNKED))
        for number in range(int(ask["n"])):
            await send(writer, chunk(b"data: %d\n\n" % number))
            if ask.get("hold"):
                await gate.wait()
        return await send(writer, b"0\r\n\r\n")
    if url.path == "/v1/bytes":
        await send(writer, head("200 OK", CHUNKED))
        left = int(ask["n"])
        while left > 0:
            data = bytes(min(left, 65536))
            await send(writer, chunk(data))
            left -= len(data)
            seen["sent"] += len(data)
        return await send(writer, b"0\r\n\r\n")
    if url.path == "/v1/trailers":
        return await send(writer, head("200 OK", CHUNKED, "Trailer: X-Sum") + chunk(b"body") + b"0\r\nX-Sum: 7\r\nSet-Cookie: c=1\r\n\r\n")
    if url.path == "/v1/length":
        return await send(writer, whole(b"x" * int(ask["n"])))
    if url.path == "/v1/close":
        return await send(writer, b"HTTP/1.0 200 OK\r\n\r\nto the end")
    if url.path == "/v1/hold":
        await gate.wait()
        return await send(writer, whole(b"held"))
    if url.path == "/v1/die":
        if after := int(ask["after"]):
            await send(writer, head("200 OK", CHUNKED) + chunk(b"x" * after))
            await gate.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if url.path == "/v1/odd":
        return await send(writer, b"HELLO\r\n\r\n")
    if url.path == "/v1/interim":
        return await send(writer, head("103 Early Hints", "Link: </x>") + whole(b"final"))
    return await send(writer, whole(b"nothing here", "404 Not Found"))


async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> bytes:
    """The first byte of the next request; nothing: there is none."""
    asked = await read_head(reader, first)
    has_body = asyncio.Event()

    async def first_of_next() -> bytes:
        await has_body.wait()
        return await reader.read(1)  # before the answer: the client leaves, as it asks for one thing at a time

    answering = asyncio.ensure_future(answer(reader, writer, asked, has_body))
    leaving = asyncio.ensure_future(first_of_next())
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() or isinstance(answering.exception(), ConnectionError):
            seen["left"] += 1
            return b""
        answering.result()
        ends = options.closes or not has_body.is_set() or urlsplit(asked[1]).path in ("/v1/close", "/v1/odd")
        return b"" if ends or value_of(asked[2], "connection") == "close" else await leaving
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    seen["open"] += 1
    seen["connections"] += 1
    try:
        first = await reader.read(1)
        while first:
            first = await serve_one(reader, writer, first)
    except ConnectionError:
        pass  # it has left between two requests
    finally:
        seen["open"] -= 1
        writer.close()


async def main() -> None:
    if options.mark:
        with open(options.mark, "a", encoding="utf-8") as marks:
            marks.write(f"{os.getpid()}\n")
    if options.fail:
        print(options.fail, file=sys.stderr, flush=True)
        sys.exit(3)
    if options.socket:
        server = await asyncio.start_unix_server(serve, options.socket, backlog=2048)
    else:
        server = await asyncio.start_server(serve, "127.0.0.1", options.port or int(os.environ["PORT"]), backlog=2048)
    print("engine listens", flush=True)
    await server.serve_forever()


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--socket")
parser.add_argument("--fail")
parser.add_argument("--unready")
parser.add_argument("--mark")
parser.add_argument("--closes", action="store_true")
parser.add_argument("--models")
parser.add_argument("--oip")
options = parser.parse_args()
asyncio.run(main())
