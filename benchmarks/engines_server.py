"""An engine that does next to nothing, so that what stands before it shows.

`POST /echo` gives the body back; `GET /events?count=50&gap_ms=5` sends so many events, each with the time at which it was sent (monotonic
clock, ns). Writes its port to --port-file, so that it can be asked past the server, too.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from aiohttp import web


async def health(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def events(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for _ in range(int(request.query["count"])):
        await answer.write(f"data: {time.monotonic_ns()}\n\n".encode())
        await asyncio.sleep(float(request.query["gap_ms"]) / 1000)
    await answer.write_eof()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    args = parser.parse_args()
    args.port_file.write_text(str(args.port), encoding="utf-8")
    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/echo", echo), web.get("/events", events)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
