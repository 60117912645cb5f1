"""What the training examples share: their command line, when they end, and the log that they write.

A log holds one JSON object a line:

    {"step": 12, "seconds": 7.4, "loss": 2.91, "samples": 768, "samples_per_s": 103.5,
     "micro_batch": 64, "commits": 12, "discards": 1, "wait_seconds": 0.0}

`seconds` counts from the first step's start; `samples_per_s` is the rate since the line before. The last line has
`"final": true` and the rate of the whole run.
"""

import argparse
import atexit
import gc
import json
import os
import sys
import time
from pathlib import Path

# Not under `sluice run`, and not installed either: take the package out of this checkout.
sys.path.append(str(Path(__file__).resolve().parent.parent / "runtime" / "python"))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every training example has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--steps", type=positive, help="end after so many optimizer steps")
    result.add_argument("--seconds", type=float, help="end after so many seconds")
    result.add_argument("--until", type=Path, metavar="FILE", help="end after the step in which this file appears")
    result.add_argument("--min-steps", type=positive, default=1, help="--seconds does not end it before (default 1)")
    result.add_argument("--batch", type=positive, help="samples of an optimizer step")
    result.add_argument("--micro-batch", type=positive, help="most samples that run at once")
    result.add_argument("--seed", type=int, default=0, help="of weights and order of samples (default 0)")
    result.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    result.add_argument("--deterministic", action="store_true", help="kernels that give the same bits every time")
    result.add_argument("--log", type=Path, help="write progress there, a JSON object a line")
    result.add_argument("--log-interval", type=float, default=1.0, metavar="SECONDS",
                        help="least time between two lines of the log; 0 logs every step (default 1)")
    return result


def prepare(options: argparse.Namespace):
    """Seeds torch, makes it deterministic if that is asked for, and returns the device to train on. Under torchrun, joins the
    other processes."""
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; use --device cpu")
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(options.deterministic)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        atexit.register(leave)
    return torch.device(device)


def leave() -> None:
    """Leaves the other processes. Models that only the collector frees go first: each keeps the process group alive, and gloo's
    threads of one that outlives Python may abort the process (pytorch#190489)."""
    import torch

    gc.collect()
    torch.distributed.destroy_process_group()


def in_several_processes() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    import torch

    return torch.distributed.get_rank() if in_several_processes() else 0


def processes() -> int:
    import torch

    return torch.distributed.get_world_size() if in_several_processes() else 1


def replica(model):
    """The model, whose gradients are added to those of the other processes', if there are any."""
    import torch

    return torch.nn.parallel.DistributedDataParallel(model) if in_several_processes() else model


def agreed(answer: bool) -> bool:
    """The first process's answer."""
    import torch

    if not in_several_processes():
        return answer
    box = [answer]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


class Progress:
    """Counts steps, says when training is over, and writes the log.

        progress = Progress(options)
        while not progress.over:
            loss = step(…)
            progress.stepped(loss, step.stats())
        progress.finish()
    """

    def __init__(self, options: argparse.Namespace) -> None:
        if options.steps is None and options.seconds is None and options.until is None:
            raise SystemExit("say when to end: --steps, --seconds or --until")
        self._options = options
        self._file = options.log.open("w", encoding="utf-8") if options.log and rank() == 0 else None
        self._started = time.perf_counter()
        self._steps = 0
        self._written = (0.0, 0)  # seconds and samples of the line before
        self._last = None

    @property
    def over(self) -> bool:
        return agreed(self._is_over())

    def _is_over(self) -> bool:
        if self._options.steps is not None and self._steps >= self._options.steps:
            return True
        if self._options.until is not None and self._options.until.exists():
            return True
        return (self._options.seconds is not None and self._steps >= self._options.min_steps
                and time.perf_counter() - self._started >= self._options.seconds)

    def stepped(self, loss, stats: dict) -> None:
        """A step is done. `loss` is read only where a line is due, for reading waits for the device."""
        self._steps += 1
        self._last = loss, stats
        seconds = time.perf_counter() - self._started
        if self._steps == 1 or seconds - self._written[0] >= self._options.log_interval:
            self._write(*self._last)

    def finish(self) -> None:
        """Writes the last line, also to standard output, and closes the log."""
        if self._last is not None and rank() == 0:
            line = self._write(*self._last, final=True)
            print(f"trained {line['step']} steps, {line['samples']} samples in {line['seconds']:.1f} s; "
                  f"loss {line['loss']:.4f}, {line['discards']} micro-batches discarded")
        if self._file:
            self._file.close()

    def _write(self, loss, stats: dict, **more: bool) -> dict:
        value = float(loss)
        seconds = time.perf_counter() - self._started
        since = (0.0, 0) if more else self._written
        passed, samples = seconds - since[0], stats["samples"] - since[1]
        line = {"step": self._steps, "seconds": round(seconds, 4), "loss": value, "samples": stats["samples"],
                "samples_per_s": round(samples / passed, 3),
                "micro_batch": stats["micro_batch"], "commits": stats["commits"], "discards": stats["discards"],
                "wait_seconds": round(stats["wait_seconds"], 4), **more}
        self._written = seconds, stats["samples"]
        if self._file:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return line
