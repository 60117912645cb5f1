"""Runs the cases that the steps of both languages pass (tests/runtime/step_cases/README.md) with the one in Python."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from scripted_runtime import ScriptedRuntime, Dropping, sharing  # noqa: E402
from torch import nn  # noqa: E402

import sluice  # noqa: E402
from sluice import _runtime  # noqa: E402

FOLDER = Path(__file__).resolve().parents[1] / "step_cases"


def cases(language: str) -> list[dict]:
    """Those that a step in that language passes."""
    found = [case for file in sorted(FOLDER.glob("*_cases.json")) for case in json.loads(file.read_text())]
    return [case for case in found if case.get("only", language) == language]


class OwnError(Exception):
    """What a loss function raises by itself."""


KINDS = {"argument": (ValueError, TypeError), "step": sluice.SluiceError, "survivors": sluice.Survivors,
         "out of memory": sluice.OutOfMemory, "torch's out of memory": torch.OutOfMemoryError, "torch": RuntimeError,
         "runtime": RuntimeError, "own": OwnError}


def is_of_kind(failure: Exception, kind: str) -> bool:
    subclasses = (sluice.Survivors, sluice.OutOfMemory) if kind == "step" else (sluice.SluiceError,) if kind == "torch" else ()
    return isinstance(failure, KINDS[kind]) and not isinstance(failure, subclasses)


class CaseRuntime(ScriptedRuntime):
    """Answers as the calls of a case say, and remembers what it is called for. ``see`` is called before each call."""

    def __init__(self, case: dict) -> None:
        super().__init__(silently=True, watch=case.get("model") != "sparse")
        self._answers: dict[str, list[list[int]]] = defaultdict(list)
        for call in lines(case.get("calls", [])):
            words, _, answer = call.partition(" = ")
            if answer:
                self._answers[words.split()[0]].append(list(map(int, answer.split())))
        self._pool = case.get("pool", {})
        self._serving = self._pool.get("serving", 1)
        self._drops = False
        self.calls: list[str] = []
        self.see: Callable[[], None] = lambda: None

    def _called(self, words: str, *default: int) -> list[int]:
        self.see()
        answers = self._answers[words.split()[0]]
        answer = answers.pop(0) if answers else list(default)
        self.calls.append(f"{words} = {' '.join(map(str, answer))}" if answer else words)
        return answer

    def lose(self, state: int) -> None:
        self._revoke()
        self._state = state

    def begin(self, samples: int, total: int) -> int:
        self._called(f"begin {samples} {total}")
        return super().begin(samples, total)

    def enter(self, entered: int) -> None:
        self._called(f"enter {entered}")
        super().enter(entered)

    def commit_begin(self, may_defer: bool) -> int:
        start, = self._called(f"commit_begin {int(may_defer)}", 1)
        self._drops = start == _runtime.DEFERRED and self._will_be_dropped()
        if start == _runtime.TAKEN_AWAY or self._drops:
            self._revoke()
        if self._drops:
            self._dropping = Dropping()
            self._dropping.__enter__()
        return start

    def _will_be_dropped(self) -> bool:
        return next((not counts for counts, in self._answers["commit_resolve"] if counts != _runtime.OPEN), False)

    def commit_end(self, samples: int, outlived: int) -> None:
        self._called(f"commit_end {samples} {int(outlived)}")
        super().commit_end(samples, outlived)

    def commit_resolve(self, _timeout_ms: int) -> int:
        counts, = self._called("commit_resolve", 1)
        if self._dropping is not None and counts != _runtime.OPEN:
            self._dropping.__exit__(None, None, None)
            self._dropping = None
        return counts

    def commit_made(self, _timeout_ms: int) -> int:
        return self._called("commit_made", 1)[0]

    def discard(self) -> None:
        self._called("discard")
        super().discard()

    def plan_start(self, largest: int, fixed: int, may_recompute: int) -> int:
        self._called(f"plan_start {largest} {int(fixed)}")
        return super().plan_start(largest, fixed, may_recompute)

    def plan(self, remaining: int) -> tuple[int, int, bool]:
        count, *needed = self._called(f"plan_next {remaining}", min(remaining, self._largest))
        return count, needed[0] if needed else 0, False

    def plan_committed(self, samples: int, _recomputed: int, _bytes: int, _at_first_bytes: int, _seconds: float) -> None:
        self._called(f"plan_committed {samples}")

    def plan_discarded(self, samples: int, _recomputed: int, state: int) -> None:
        self._called(f"plan_discarded {samples} {state}")

    def wait_memory(self, needed: int, _timeout_ms: int) -> int:
        return self._called(f"wait_memory {needed}", 1)[0]

    def reachable_bytes(self) -> int:
        return self._pool["reachable_bytes"]

    def pool_bytes(self) -> int:
        return self._pool["pool_bytes"]

    def shortage(self) -> bytes:
        return b"The script holds it all. Ask the test."


def lines(calls: list[str]) -> list[str]:
    """One call each."""
    found: list[str] = []
    for line in calls:
        times, _, rest = line.rpartition(" times: ")
        found += rest.split(" | ") * int(times or 1)
    return found


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)),
    "sparse": lambda: nn.Embedding(10, 3, sparse=True),
}


class Users(torch.optim.SGD):
    """An optimizer of which nobody knows what its step does on the host."""


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        """Calls no closure."""


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=2),
    "user's": lambda params: Users(params, lr=0.1),
    "idle": lambda params: Idle(params, lr=0.1),
}


class CaseTraining:
    """What a case trains. ``runtime`` None: in plain PyTorch, and as the loss function would be without what it does besides."""

    def __init__(self, case: dict, runtime: CaseRuntime | None) -> None:
        self.case, self.runtime = case, runtime
        self.kind = case.get("model", "linear")
        torch.manual_seed(5)
        self.model = MODELS[self.kind]()
        other = nn.Linear(2, 2)
        params = other.parameters() if case.get("optimizes") == "another model" else self.model.parameters()
        self.optimizer = OPTIMIZERS[case.get("optimizer", "sgd")](params)
        if case.get("optimizes") == "nothing":
            self.model.requires_grad_(False)
        options = dict(case.get("step", {}))
        self.scaler = torch.amp.GradScaler("cpu", **options["scaler"]) if "scaler" in options else None
        options["scaler"] = self.scaler
        with sharing(runtime):
            self.step = sluice.Step(self.model, self.optimizer, **options)
        self.runs = 0  # of the loss function
        self.kept: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self._versions = self._now()
        if runtime is not None:
            runtime.see = self.see

    def _now(self) -> list[int]:
        return [param._version for param in self.model.parameters()]

    def see(self) -> None:
        """The optimizer has run, if weights have been written."""
        if self._now() != self._versions:
            self._versions = self._now()
            self.runtime.calls.append("optimizer")

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        samples = self.case["batches"][number]
        generator = torch.Generator().manual_seed(number + 1)
        x = torch.randn(samples, 4, generator=generator)
        y = torch.randint(3, (samples,), generator=generator)
        if self.kind == "sparse":
            return torch.arange(samples) % 10, y
        return x.to(next(self.model.parameters()).dtype), y

    def train(self, number: int) -> None:
        change = self.case.get("between", {}).get(str(number))
        if change:
            CHANGES[change](self.model)
            self._versions = self._now()
        self.losses.append(self._by_hand(number) if self.case.get("by hand") else self.step(self.loss, *self.batch(number)))
        if self.runtime is not None:
            self.see()

    def _by_hand(self, number: int) -> torch.Tensor:
        for micro in self.step.micro_batches(*self.batch(number)):
            with micro as (x, y):
                micro.backward(self.loss(x, y))
        return self.step.loss

    def loss(self, x: torch.Tensor, y: torch.Tensor):
        does = self.case.get("does", {}).get(str(self.runs), "") if self.runtime is not None else ""
        self.runs += 1
        if does in RAISES:
            raise RAISES[does]()
        if does == "run a step":
            self.step(self.loss, x, y)
        if does == "run the optimizer":
            self.optimizer.step()
        how = self.case.get("loss", "mean")
        if how == "thawing":
            CHANGES["thaw the first layer"](self.model)
        output = self.model(x)
        loss = F.cross_entropy(output, y, reduction="sum" if how == "sum" else "mean",
                               ignore_index=0 if how == "weighted" else -100)
        loss = self._disturbed(does, loss * 100 if how == "huge" else loss, output)
        if how == "by name":
            return {"loss": loss, "right": output.argmax(1) == y}
        if does.startswith("weigh "):
            return loss, float(does.removeprefix("weigh "))
        if how == "weighted":
            return loss, (y != 0).sum()
        return loss

    def _disturbed(self, does: str, loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if does in ("lose memory", "lose memory and raise"):
            self.runtime.lose(_runtime.REVOKED)
        elif does == "starve and raise":
            self.runtime.lose(_runtime.STARVED)
        elif does == "lose memory in backward":
            output.register_hook(lambda _: self.runtime.lose(_runtime.REVOKED))
        elif does == "lose memory and raise in backward":
            output.register_hook(self._lose_and_raise)
        elif does == "keep its output":
            self.kept.append(output)
        elif does == "run backward":
            loss.backward()
        elif does == "run backward and keep the graph":
            loss.backward(retain_graph=True)
        elif does == "run backward for another loss":
            (sum(param.square().sum() for param in self.model.parameters()) * 0).backward()
        elif does == "detach":
            return loss.detach()
        elif does == "return a vector":
            return loss.expand(2)
        if does.endswith("and raise"):
            raise OwnError("mine")
        return loss

    def _lose_and_raise(self, _gradient: torch.Tensor) -> None:
        self.runtime.lose(_runtime.REVOKED)
        raise OwnError("mine")

    def learned(self) -> list[torch.Tensor]:
        """What must be the same however training was disturbed."""
        norm = [] if self.step.grad_norm is None else [self.step.grad_norm]
        scale = [] if self.scaler is None else [torch.tensor([self.scaler.get_scale(), self.scaler._get_growth_tracker()])]
        values = [torch.as_tensor(value) for value in self.step.values.values()]
        return [*(param.detach() for param in self.model.parameters()), *self.model.buffers(), *self.losses, *norm, *scale, *values,
                torch.rand(2)]


def _raises(kind: type, text: str) -> Callable[[], Exception]:
    return lambda: kind(text)


RAISES = {"raise": _raises(OwnError, "mine"), "raise torch's error": _raises(RuntimeError, "torch's own"),
          "raise a fault": _raises(RuntimeError, "CUDA error: an illegal memory access was encountered"),
          "raise another of torch's": _raises(RuntimeError, "another of torch's"),
          "raise torch's out of memory": _raises(torch.OutOfMemoryError, "no more")}

CHANGES = {
    "freeze the first layer": lambda model: next(model.children()).requires_grad_(False),
    "thaw the first layer": lambda model: next(model.children()).requires_grad_(True),
    "make it double": lambda model: model.double(),
}


@contextlib.contextmanager
def failing(expected: dict | None) -> Iterator[None]:
    """What runs in it raises what is expected, if anything is."""
    try:
        yield
    except Exception as failure:
        if expected is None or not is_of_kind(failure, expected["kind"]):
            raise
        for words in expected["says"]:
            assert words in str(failure)
        for words in expected.get("not", []):
            assert words not in str(failure)
    else:
        assert expected is None, f"nothing was raised of the kind {expected['kind']!r}"


def trained(case: dict, runtime: CaseRuntime | None) -> CaseTraining:
    """All batches of a case; in plain PyTorch without the one that fails."""
    error = case.get("error")
    training = CaseTraining(case, runtime)
    for number in range(len(case["batches"])):
        fails = error is not None and number == error.get("batch", 0)
        if fails and runtime is None:
            continue
        with failing(error if fails else None):
            training.train(number)
    return training
