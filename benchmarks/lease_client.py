"""Requests for `lease`: open-loop arrivals of a Poisson process, or as many as some connections can have answered.

Reads the body of all requests from standard input and writes one line of JSON. A request's latency counts from its arrival,
whether or not a connection was free then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

#: Timers of the event loop count in milliseconds: so much before an arrival the client stays awake for it.
AWAKE_S = 0.002


async def answered(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
    text = await reader.readexactly(length)
    if " 200 " not in lines[0] + " ":
        sys.exit(f"lease_client.py: a request was answered {lines[0]!r}: {text[:300]!r}")


def arrivals_of(rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds from the start."""
    chance, at, found = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        found.append(at)
    return found


async def run(args: argparse.Namespace, body: bytes) -> dict:
    request = (f"POST {args.path} HTTP/1.1\r\nHost: {args.host}\r\nContent-Type: application/json\r\n"
               f"Content-Length: {len(body)}\r\n\r\n").encode() + body
    connections = [await asyncio.open_connection(args.host, args.port) for _ in range(args.connections)]
    for reader, writer in connections:  # not counted: the connection is new
        writer.write(request)
        await answered(reader)
    latencies: list[float] = []
    began = time.monotonic() + 0.02
    began_ns = time.monotonic_ns() + 20_000_000
    arrivals = iter(arrivals_of(args.rate, args.seconds, args.seed) if args.rate else [])

    async def as_they_arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for arrival in arrivals:
            if (early := began + arrival - AWAKE_S - time.monotonic()) > 0:
                await asyncio.sleep(early)
            while time.monotonic() < began + arrival:
                await asyncio.sleep(0)
            writer.write(request)
            await answered(reader)
            latencies.append(time.monotonic() - began - arrival)

    async def one_after_the_other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (sent := time.monotonic()) < began + args.seconds:
            writer.write(request)
            await answered(reader)
            latencies.append(time.monotonic() - sent)

    way = as_they_arrive if args.rate else one_after_the_other
    await asyncio.gather(*(way(*each) for each in connections))
    return {"latency_us": [1e6 * each for each in latencies], "began_ns": began_ns, "ended_ns": time.monotonic_ns()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: one after the other")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args, sys.stdin.buffer.read()))))


if __name__ == "__main__":
    main()
