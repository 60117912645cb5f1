"""Inference whose latency beside a training job is measured: ResNet-50, batch 8, half precision, one CUDA graph.

Requests arrive by a Poisson process. Each is copied to the GPU, computed and copied back; its latency counts from its
arrival, so that one that waits for another is seen to. With --claimer the device is claimed from the pool of --runtime-dir
while requests wait or run. It writes `ready` to standard output, begins when a line comes on standard input, and writes
one JSON object: {"latency_us": [...], "began_ns": …, "ended_ns": …} (monotonic clock).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import time

import torch

BATCH = 8
RUN_AHEAD_NS = 150_000
MOST_CLAIM_NS = 1_000_000_000
#: Before an arrival the thread stays awake for so long: a sleep may end late.
AWAKE_S = 0.0005


class Model:
    """The graph, and its input and output on both sides."""

    def __init__(self) -> None:
        import torchvision

        torch.manual_seed(0)
        model = torchvision.models.resnet50().cuda().half().eval().to(memory_format=torch.channels_last)
        self._on_host = torch.rand(BATCH, 3, 224, 224).half().to(memory_format=torch.channels_last).pin_memory()
        self._input = self._on_host.cuda()
        self._stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for _ in range(3):
                model(self._input)
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._output = model(self._input)
        self._answer = torch.empty_like(self._output, device="cpu").pin_memory()
        self.expected = self.run().clone()

    def run(self) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            self._input.copy_(self._on_host, non_blocking=True)
            self._graph.replay()
            self._answer.copy_(self._output, non_blocking=True)
        self._stream.synchronize()
        return self._answer


class Claimer:
    """The device, claimed for a request; nothing without a library."""

    def __init__(self, library: str | None, runtime_dir: str) -> None:
        self._library = ctypes.CDLL(library) if library else None
        if self._library:
            self._library.sluice_bench_join.restype = ctypes.c_void_p
            self._library.sluice_bench_join.argtypes = [ctypes.c_char_p, ctypes.c_int64]
            self._library.sluice_bench_claim.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            for name in ("release", "leave"):
                getattr(self._library, f"sluice_bench_{name}").argtypes = [ctypes.c_void_p]
            self._here = self._library.sluice_bench_join(runtime_dir.encode(), RUN_AHEAD_NS)
            if not self._here:
                raise SystemExit(1)

    def claim(self) -> None:
        if self._library:
            self._library.sluice_bench_claim(self._here, MOST_CLAIM_NS)

    def release(self) -> None:
        if self._library:
            self._library.sluice_bench_release(self._here)

    def leave(self) -> None:
        if self._library:
            self._library.sluice_bench_leave(self._here)


def await_until(instant: float) -> None:
    if (left := instant - time.monotonic() - AWAKE_S) > 0:
        time.sleep(left)
    while time.monotonic() < instant:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--claimer")
    parser.add_argument("--runtime-dir", default="")
    args = parser.parse_args()
    model = Model()
    claimer = Claimer(args.claimer, args.runtime_dir)
    print("ready", flush=True)
    sys.stdin.readline()
    dice = random.Random(args.seed)
    latencies = []
    began = time.monotonic()
    due = began + dice.expovariate(args.rate)
    claimed = False
    while due < began + args.seconds:
        if due > time.monotonic() and claimed:
            claimer.release()
            claimed = False
        await_until(due)
        if not claimed:
            claimer.claim()
            claimed = True
        answer = model.run()
        latencies.append(1e6 * (time.monotonic() - due))
        if not torch.equal(answer, model.expected):
            raise SystemExit("an answer is not the one that the model gave alone")
        due += dice.expovariate(args.rate)
    claimer.release()
    print(json.dumps({"latency_us": latencies, "began_ns": int(1e9 * began), "ended_ns": time.monotonic_ns()}), flush=True)
    sys.stdin.readline()
    claimer.leave()


if __name__ == "__main__":
    main()
