"""vLLM whose KV cache comes out of the pool chunk by chunk, beside vLLM as it is.

    ./benchmarks/run.sh llm [--only answers] [--runner 1 2] [--requests 10000]
    ./benchmarks/run.sh llm --only throughput [--model 8b] [--pairs 8]

Both engines are processes of the same program (llm_engine.py), with seeded weights at the shape of Llama-3.2-1B or Llama-3.1-8B, the same
capacity for their caches, CUDA graphs and prefix caching. On the host the model is tiny, and the engines run eagerly.

`part=answers`: the same requests again and again, each time in another order, while a server takes memory of the pool, and writes all over it. Requests that were preempted are computed in
other batches, and rounding differs then, as it does between the stock engine's own answers in one order and another. So an answer that is none of those that the stock engine gives, token by token, is
scored by the stock engine: in one prefill over prompt and answer, how far each token is from the one that it likes best there. `wrong` counts answers with a token farther away than any of the
stock engine's own answers has, scored alike. `equal_percent` are those that are the stock engine's in the same order. `gap_nats` is the farthest, `own_gap_nats` the
stock engine's own. `grown_ms` is what it takes to get a chunk, and `beyond_ms` how long after the step in flight what somebody demands has gone.

`part=throughput`: both engines answer the same requests, in turns. `throughput_ratio` is the median of the pairs' ratios of tokens a second; its
interval comes from resampling pairs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import sys
import threading
from pathlib import Path

from brokers import clear_up_on_sigterm
from pairs import Worker, bootstrap
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed, Stage, has_cuda

PROGRAM = ROOT / "benchmarks" / "llm_engine.py"
PARKER = ROOT / "build" / "release" / "bin" / "sluice-bench-parker"
MIB, GIB = 1 << 20, 1 << 30
START_S = 600.0
#: By model: a block of 16 tokens in all layers, and of the pool.
BLOCK_BYTES = {"tiny": 64 << 10, "1b": 512 << 10, "8b": 2 << 20}
POOL_BYTES = {"tiny": 128 * MIB, "1b": 4 * GIB, "8b": 24 * GIB}
SLACK_NATS = 1e-6  # of what is the same number twice


class Engine:
    """An `llm_engine.py`."""

    def __init__(self, stage: Stage, name: str, **said: object) -> None:
        self._worker = Worker(stage, name, [sys.executable, PROGRAM, json.dumps({"folder": str(stage.folder / "model"), **said})])

    def ready(self) -> dict:
        """Raises `Failed` unless it starts."""
        return self._worker.run(json.dumps({"do": "started"}), START_S)

    def ask(self, do: str, **of: object) -> dict:
        return self._worker.run(json.dumps({"do": do, **of}), START_S)


class Taker:
    """A server of the pool that takes what is free and up to `most` bytes of the engine's, writes all over it, and gives it back, again and again
    at random instants, as long as it is entered."""

    def __init__(self, stage: Stage, most: int) -> None:
        self._parker = Worker(stage, "taker", [PARKER, "--from-engines", "--asked", "--patience-s", 5])
        self._most = most
        self._over = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.taken = 0  #: times that the engine gave something

    def __enter__(self) -> Taker:
        self._running = self._thread.submit(self._take_until_over)
        return self

    def __exit__(self, *_why: object) -> None:
        self._over.set()
        self._running.result()
        self._thread.shutdown()

    def _take_until_over(self) -> None:
        draw = random.Random(3)
        while not self._over.wait(0.12 * draw.random()):
            self.taken += self._parker.run(draw.randint(1, self._most)).get("reclaimed", 0) > 0
            self._over.wait(0.03 * draw.random())
            self._parker.run(0)


def stage_of(args: argparse.Namespace, model: str) -> Stage:
    paths = [str(ROOT / "runtime" / "python"), os.environ.get("PYTHONPATH", ""), *([str(ROOT / ".cache" / "vllm")] if args.backend == "host" else [])]
    return Stage(args.sluice.absolute(), ROOT / "build" / "llm", {
        "SLUICE_BACKEND": args.backend, "SLUICE_POOL_BYTES": str(POOL_BYTES[model]), "SLUICE_BROKER": str(args.sluice.absolute()),
        "SLUICE_RUNTIME_LIBRARY": str(ROOT / "build" / "release" / "lib" / "libsluice_runtime.so"), "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **({"OMP_NUM_THREADS": "1"} if args.backend == "host" else {})})


def said_of(args: argparse.Namespace, model: str, runner: int) -> dict:
    """What both engines are told."""
    blocks = POOL_BYTES[model] // BLOCK_BYTES[model]
    return {"model": model, "blocks": blocks, "bytes": POOL_BYTES[model], "runner": runner, "attention": args.attention, "sequences": args.sequences}


def described(args: argparse.Namespace, model: str, runner: int) -> dict:
    return {"model": model, "runner": f"V{runner}", "attention": args.attention if args.backend == "cuda" else "CPU", "graphs": args.backend == "cuda",
            "pool_gib": POOL_BYTES[model] / GIB, "sequences": args.sequences}


# --- answers -----------------------------------------------------------------------------------------------------------


def measure_answers(args: argparse.Namespace, model: str, runner: int) -> Cell:
    asked = {"seed": 1, "count": args.distinct, "longest_prompt": 500, "longest_answer": 64}
    with stage_of(args, model) as stage:
        said = said_of(args, model, runner)
        stock = Engine(stage, "stock", kv="own", **said)
        elastic = Engine(stage, "elastic", kv="pool", **said)
        for engine in (stock, elastic):
            engine.ready()
        out = stage.folder / "tokens"

        def answers(engine: Engine, order: int) -> tuple[list[list[int]], dict]:
            said = engine.ask("answer", out=str(out), order=order, **asked)
            return json.loads(out.read_text(encoding="utf-8")), said

        rounds = -(-args.requests // args.distinct)
        expected = [answers(stock, order)[0] for order in range(rounds)]
        words = len({token for answer in expected[0] for token in answer})
        if words < 200:
            raise Failed(f"answers with {words} words would not tell")
        equal, others, last = 0, {}, {}
        with Taker(stage, POOL_BYTES[model] // 4) as taker:
            for order in range(rounds):
                found, last = answers(elastic, order)
                for number, (one, other) in enumerate(zip(expected[order], found, strict=True)):
                    equal += one == other
                    if one != other:
                        others.setdefault(tuple(other), number)
        timed = elastic.ask("watch")
        stocks = {tuple(answer): number for found in expected for number, answer in enumerate(found)}
        own = gaps_of(stock, out, asked, batches_of(stocks))
        apart = gaps_of(stock, out, asked, batches_of({answer: number for answer, number in others.items() if answer not in stocks}))
        served = rounds * args.distinct
    return Cell({"part": "answers", **described(args, model, runner), "distinct": args.distinct},
                {"served": single(served), "wrong": single(sum(gap > max(own) + SLACK_NATS for gap in apart)), "equal_percent": single(100 * equal / served),
                 "gap_nats": single(max(apart, default=0.0), "own_gap_nats"), "own_gap_nats": single(max(own)),
                 "handovers": single(taker.taken), "preempted": single(last["preempted"]),
                 "grown_ms": distribution(timed["grown_ms"]), "given_ms": distribution(timed["given_ms"]), "beyond_ms": distribution(timed["beyond_ms"])},
                {"served.value": f">= {args.requests}", "wrong.value": "<= 0",
                 **({"grown_ms.p99": "<= 1", "beyond_ms.p99": "<= 5"} if args.backend == "cuda" else {})})


def batches_of(others: dict[tuple[int, ...], int]) -> list[dict[int, list[int]]]:
    """Answers by number of their request, as few batches as have each number once."""
    batches: list[dict[int, list[int]]] = []
    for tokens, number in others.items():
        for batch in batches:
            if number not in batch:
                batch[number] = list(tokens)
                break
        else:
            batches.append({number: list(tokens)})
    return batches


def gaps_of(stock: Engine, file: Path, asked: dict, batches: list[dict[int, list[int]]]) -> list[float]:
    """In nats, the largest of each answer."""
    made: list[float] = []
    for batch in batches:
        file.write_text(json.dumps(batch), encoding="utf-8")
        made += stock.ask("rescore", answers=str(file), **asked)["gaps"].values()
    return made


# --- throughput ---------------------------------------------------------------------------------------------------------


def measure_throughput(args: argparse.Namespace, model: str, runner: int) -> Cell:
    with stage_of(args, model) as stage:
        said = said_of(args, model, runner)
        engines = {"stock": Engine(stage, "stock", kv="own", **said), "elastic": Engine(stage, "elastic", kv="pool", **said)}
        for engine in engines.values():
            engine.ready()
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for pair in range(-1, args.pairs):
            for name in engines if pair % 2 else reversed(engines):
                last = engines[name].ask("answer", seed=100 + pair, count=args.batch, longest_prompt=600, longest_answer=300)
                if pair >= 0:  # the first one warms both up
                    rates[name].append(last["tokens"] / last["seconds"])
        timed = engines["elastic"].ask("watch")
    ratios = [elastic / stock for stock, elastic in zip(*rates.values(), strict=True)]
    interval = bootstrap(lambda dice: statistics.median(dice.choices(ratios, k=len(ratios))))
    return Cell({"part": "throughput", **described(args, model, runner), "requests": args.batch},
                {"throughput_ratio": single(statistics.median(ratios), "vLLM as it is, same run", interval),
                 "lower_ratio": single(interval[0]),
                 **{f"{name}_tokens_per_s": distribution(samples) for name, samples in rates.items()}, "grown_ms": distribution(timed["grown_ms"])},
                {"lower_ratio.value": ">= 0.98"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if has_cuda() else "host")
    parser.add_argument("--only", choices=("answers", "throughput"), help="that part alone")
    parser.add_argument("--model", choices=tuple(BLOCK_BYTES), help="default: answers of 1b, throughput of 8b; tiny on the host")
    parser.add_argument("--runner", type=int, nargs="+", choices=(1, 2), help="vLLM's first runner of models, or its second; default: both, on the host the first")
    parser.add_argument("--attention", default="FLASH_ATTN", help="vLLM's name of a backend, on a GPU")
    parser.add_argument("--sequences", type=int, default=64, help="requests that are computed at once")
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many answers are compared")
    parser.add_argument("--distinct", type=int, default=1000, help="requests of which these are repetitions")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=96, help="requests of half a pair")
    parser.add_argument("--sluice", type=Path, default=ROOT / "build" / "release" / "bin" / "sluice")
    args = parser.parse_args()
    clear_up_on_sigterm()
    on_gpu = args.backend == "cuda"
    measures = {"answers": (measure_answers, "1b"), "throughput": (measure_throughput, "8b")}
    for part, (measure, usual) in measures.items():
        if args.only in (None, part):
            for runner in args.runner or ((1, 2) if on_gpu else (1,)):
                try:
                    cell = measure(args, args.model or (usual if on_gpu else "tiny"), runner)
                except Failed as why:
                    raise SystemExit(f"llm: {why}") from why
                write("llm", [cell], gpus=int(on_gpu), accumulate=True)


if __name__ == "__main__":
    main()
