"""Global batches are dealt whole, by how fast processes train, and training learns the same."""

import contextlib
import copy
import itertools
import pickle
import queue
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import gloo_processes  # noqa: E402
from scripted_runtime import PatientRuntime, ScriptedRuntime, sharing  # noqa: E402

import sluice  # noqa: E402
from sluice import _replicas, _stopwatch  # noqa: E402
from sluice.balance import divided  # noqa: E402

RANKS = 2
SAMPLES = 103
Parallel = nn.parallel.DistributedDataParallel


class Clock:
    """In place of the time: what samples take in this process."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.seconds, self.each = 0.0, 1.0
        patched.setattr(_stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    def trains(self, samples: int) -> None:
        self.seconds += samples * self.each


# --- the parts --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs, parts", [
    ([1.0], [12]), ([1.0, 1.0], [6, 6]), ([1.0, 3.0], [9, 3]), ([1.0, 2.0, 4.0], [8, 3, 1]), ([1.0, 1000.0], [11, 1]),
    ([5.0, 5.0, 5.0, 5.0, 5.0], [3, 3, 2, 2, 2])])
def test_parts_are_by_what_each_takes_for_one(costs, parts):
    assert divided(12, costs) == parts


def test_a_batch_of_all_samples_is_divided_at_once():
    assert divided(1 << 40, [1.0, 3.0]) == [3 << 38, 1 << 38]


def test_no_other_parts_end_sooner():
    chance = random.Random(7)
    for _ in range(300):
        units, costs = chance.randint(3, 9), [chance.choice((0.1, 1.0, 1.7, 30.0)) for _ in range(3)]
        parts = divided(units, costs)
        assert sum(parts) == units and min(parts) >= 1
        others = [(a, b, units - a - b) for a, b in itertools.product(range(1, units), repeat=2) if units - a - b >= 1]
        best = min(max(part * cost for part, cost in zip(each, costs)) for each in others)
        assert max(part * cost for part, cost in zip(parts, costs)) == pytest.approx(best)


# --- one process --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples, size, drop_last, sizes", [
    (10, 5, False, [5, 5]), (12, 5, False, [5, 5, 2]), (12, 5, True, [5, 5]), (3, 5, False, [3])])
def test_a_process_alone_has_whole_batches(samples, size, drop_last, sizes):
    batches = sluice.BalancedBatchSampler(samples, size, drop_last=drop_last)
    assert len(batches) == len(sizes)
    seen = list(batches)
    assert [len(each) for each in seen] == sizes
    joined = [index for each in seen for index in each]
    assert sorted(set(joined)) == sorted(joined) and set(joined) <= set(range(samples))
    assert list(batches) == seen
    batches.set_epoch(1)
    assert list(batches) != seen
    assert [index for each in sluice.BalancedBatchSampler(samples, size, shuffle=False) for index in each] == list(range(samples))
    model = nn.Linear(1, 1)
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), balance=batches)
    step(lambda x: model(x).mean(), torch.ones(5, 1))


@pytest.mark.parametrize("arguments, kind, words", [
    ((10, 0), ValueError, "batch_size must be at least 1, not 0"), ((10, 2.5), TypeError, "batch_size must be a whole number, not float"),
    ((None, 2), TypeError, "dataset must be a whole number or have a length, not NoneType"), (([], 2), ValueError, "dataset has no samples"), (("train", 2), TypeError, "dataset must be a whole number or have a length, not str"),
    ((10, 4, {"multiple_of": 3}), ValueError, "batch_size must be a multiple of multiple_of: 4 is none of 3"),
    ((10, 4, {"every": 0}), ValueError, "every must be at least 1"), ((10, 4, {"seed": 1 << 64}), ValueError, "seed must be at most 4611"),
    ((10, 4, {"shuffle": "False"}), TypeError, "shuffle must be True or False, not 'False'"),
    ((10, 4, {"group": [0, 1]}), TypeError, r"group needs torch.distributed.init_process_group before it"),
    ((10, 40, {"drop_last": True}), ValueError, "10 samples are too few: 40 are needed for one batch")])
def test_what_cannot_be_dealt_is_refused(arguments, kind, words):
    *plain, named = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(kind, match=words):
        sluice.BalancedBatchSampler(*plain, **named)


def test_who_would_deal_it_again_or_copy_it_is_refused():
    batches = sluice.BalancedBatchSampler(10, 2)
    with pytest.raises(sluice.SluiceError, match="do not give a loader that has one to accelerate's prepare"):
        getattr(batches, "batch_size", None)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(sluice.SluiceError, match="belongs to its process, and cannot be copied or pickled"):
            way(batches)


def test_a_step_that_fails_is_not_charged_to_the_next(monkeypatch):
    model = nn.Linear(1, 1)
    batches = sluice.BalancedBatchSampler(10, 2)
    monkeypatch.setattr(sluice.BalancedBatchSampler, "is_measured", True)
    told = []
    monkeypatch.setattr(batches, "stepped", lambda samples, seconds: told.append(seconds))
    clock = Clock(monkeypatch)
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), balance=batches)

    def loss_of(x):
        clock.trains(len(x))
        return model(x).mean(), torch.tensor(float(weight))

    for weight in (0, 0, 1):
        with pytest.raises(ValueError, match="weights") if weight == 0 else contextlib.nullcontext():
            step(loss_of, torch.ones(4, 1))
    assert told == [4.0]


def test_one_pass_at_a_time():
    batches = sluice.BalancedBatchSampler(10, 2)
    first = iter(batches)
    next(first)
    next(iter(batches))
    with pytest.raises(RuntimeError, match="a later pass"):
        next(first)


def test_a_step_takes_a_sampler_and_nothing_else():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"balance must be a sluice.BalancedBatchSampler, not list"):
        sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), balance=[1])


# --- several ------------------------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Training:
    """Of a model, with what a process has had of each batch."""

    def __init__(self, module: nn.Module, batches: sluice.BalancedBatchSampler, workers: int, clock: Clock | None = None) -> None:
        x, y, _ = gloo_processes.samples(SAMPLES)
        self.module, self.batches, self.clock = module, batches, clock
        self.loader = DataLoader(TensorDataset(torch.arange(SAMPLES), x, y), batch_sampler=batches, num_workers=workers)
        self.step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9), 4, balance=batches)
        self.losses: list[float] = []
        self.had: list[list[int]] = []
        self.epoch = 0

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.clock is not None:
            self.clock.trains(len(x))
        return nn.functional.cross_entropy(self.module(x), y)

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            self.batches.set_epoch(self.epoch)
            self.epoch += 1
            for index, x, y in self.loader:
                self.losses.append(float(self.step(self.loss_of, x, y)))
                self.had.append(index.tolist())


def alone_of(samples: int, rank: int, **how) -> sluice.BalancedBatchSampler:
    return sluice.BalancedBatchSampler(samples, 16, group=distributed.new_group([rank], use_local_synchronization=True), **how)


def alone(rank: int, **how) -> sluice.BalancedBatchSampler:
    return alone_of(SAMPLES, rank, **how)


def of_all(mine: list) -> list[list]:
    said = [None] * RANKS
    distributed.all_gather_object(said, mine)
    return said


def same_as_one_whatever_the_parts(rank: int) -> None:
    """The first process is three times as fast as the second, and later half as fast; the second's loader fetches ahead."""
    one = Training(model(), alone(rank), workers=0)
    one.run(6)
    for runtime in (PatientRuntime(serving=True), PatientRuntime(serving=False), ScriptedRuntime(operator=3 * rank, serving=True)):
        with pytest.MonkeyPatch.context() as patched, sharing(runtime):
            batches = sluice.BalancedBatchSampler(SAMPLES, 16, every=4)
            assert batches.parts == (8, 8)
            several = Training(Parallel(model()), batches, (0, 2)[rank], Clock(patched))
            several.clock.each = (1.0, 3.0)[rank]
            several.run(3)
            assert batches.parts == (12, 4)
            several.clock.each = (2.0, 1.0)[rank]
            several.run(3)
            assert batches.parts[0] in (5, 6)
        assert several.losses == pytest.approx(one.losses, rel=1e-9)
        for param, wanted in zip(several.module.parameters(), one.module.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-8, atol=1e-10)
            gloo_processes.expect_same_on_all(param)
        assert [a + b for a, b in zip(*of_all(several.had), strict=True)] == one.had


def dealt_whole_however_far_ahead(rank: int) -> None:
    """Processes take batches ahead, each as many as it likes, and leave passes early; what they take is random."""
    together, own = random.Random(5), random.Random(rank)
    for unit, drop_last in ((1, False), (4, True), (2, False)):
        batches = sluice.BalancedBatchSampler(SAMPLES, 16, every=3, multiple_of=unit, drop_last=drop_last)
        whole = alone(rank, drop_last=drop_last)
        sizes = set()
        for epoch in range(30):
            batches.set_epoch(epoch)
            whole.set_epoch(epoch)
            dealt, ahead = iter(batches), []
            for expected in itertools.islice(whole, together.choice((2, 5, 99))):
                for _ in range(own.randint(0 if ahead else 1, 3)):
                    ahead.extend([part] if (part := next(dealt, None)) is not None else [])
                mine = ahead.pop(0)
                assert sum(of_all(mine), []) == expected
                assert len(mine) >= unit
                if len(expected) == 16:
                    assert len(mine) % unit == 0
                    sizes.add(len(mine))
                batches.stepped(len(mine), len(mine) * own.choice((0.1, 1.0, 5.0)))
        assert len(sizes) > 2
        assert all(parts == batches.parts for parts in of_all(batches.parts))


def gradients_are_sent_late_where_they_are_measured(rank: int) -> None:
    started = []
    start = _replicas.Replicas.start
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_replicas.Replicas, "start", lambda *args: (started.append(len(several.losses)), start(*args))[1])
        several = Training(Parallel(model()), sluice.BalancedBatchSampler(SAMPLES, 16, every=16), workers=0)
        several.run(6)
    assert started == [step for step in range(2, len(several.losses)) if step % 16 < 14]


def what_does_not_fit_is_refused(rank: int) -> None:
    for arguments, words in (((SAMPLES + rank, 16), f"different samples: rank 0 {SAMPLES}, rank 1 {SAMPLES + 1}"),
                             ((SAMPLES, 16 + rank), "different batch_size: rank 0 16, rank 1 17")):
        with pytest.raises(sluice.SluiceError, match=words):
            sluice.BalancedBatchSampler(*arguments)
    with pytest.raises(ValueError, match="batch_size must be at least 16, 8 for each of 2 processes, not 8"):
        sluice.BalancedBatchSampler(SAMPLES, 8, multiple_of=8)
    with pytest.raises(ValueError, match="1 samples are too few: 2 are needed for 2 processes"):
        sluice.BalancedBatchSampler(1, 8)
    batches = sluice.BalancedBatchSampler(SAMPLES, 16, every=1)
    for module, given, words in (
            (model(), batches, "deals batches to the processes of rank 0, 1, and the model is trained by this process: put"),
            (Parallel(model()), alone(rank), "deals batches to this process, and the model is trained by the processes of rank 0, 1"),
            (fully_shard(model(), mesh=init_device_mesh("cpu", (RANKS,))), batches, "balance is for replicas")):
        with pytest.raises(sluice.SluiceError, match=words):
            sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1), balance=given)
    with pytest.raises(ValueError if rank == 0 else sluice.SluiceError,
                       match="batch_size must be at least 1" if rank == 0 else "are wrong in the processes of rank 0; what they raise"):
        sluice.BalancedBatchSampler(SAMPLES, 16 * rank)
    batches.set_epoch(rank)
    next(iter(batches))
    with pytest.raises(sluice.SluiceError, match="in the order of different epochs: rank 0 0, rank 1 1; call set_epoch in all of them"):
        batches.stepped(8, 1.0)
    batches.set_epoch(0)
    for _ in range(1 + rank):
        next(iter(batches))
    with pytest.raises(sluice.SluiceError, match="different numbers of passes .*: rank 0 2, rank 1 3; each must"):
        batches.stepped(8, 1.0)


def dealt_whole_to_threads_that_fetch_ahead(rank: int) -> None:
    """They deal while processes agree on new parts."""
    batches = sluice.BalancedBatchSampler(20_000, 16, every=1)
    whole = list(alone_of(20_000, rank))
    fetched: queue.Queue = queue.Queue(maxsize=(3, 40)[rank])
    thread = threading.Thread(target=lambda: [fetched.put(part) for part in batches])
    thread.start()
    had = []
    for number in range(len(whole)):
        had.append(fetched.get())
        batches.stepped(len(had[-1]), len(had[-1]) * (1.0 if (number // 7 + rank) % 2 else 9.0))
    thread.join()
    assert [a + b for a, b in zip(*of_all(had), strict=True)] == whole
    assert len({len(part) for part in had}) > 3


@pytest.mark.parametrize("body", [same_as_one_whatever_the_parts, dealt_whole_however_far_ahead, dealt_whole_to_threads_that_fetch_ahead,
                                  gradients_are_sent_late_where_they_are_measured, what_does_not_fit_is_refused], ids=lambda body: body.__name__)
def test_in_several_processes(body, tmp_path):
    gloo_processes.run(tmp_path, (body,), RANKS)
