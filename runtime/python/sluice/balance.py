"""Global batches, dealt to the processes of a job by how fast each of them trains."""

from __future__ import annotations

import heapq
import numbers
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Sampler

from sluice._processes import Processes
from sluice.errors import SluiceError

#: One step in so many is measured: the last ones before a decision.
MEASURED_PART = 8
#: Other parts are taken where the slowest process would then need this share of its time at most.
WORTH_A_CHANGE = 0.95
#: Batches of a pass through the samples, at most: which pass, and which batch in it, are sent in one number.
MOST_BATCHES = 1 << 32
#: Of arguments.
MOST = (1 << 62) - 1


class BalancedBatchSampler(Sampler[list[int]]):
    """Deals each global batch to the processes that train a model together, so that none of them waits for a slower one::

        batches = sluice.BalancedBatchSampler(dataset, 256)
        loader = DataLoader(dataset, batch_sampler=batches)
        step = sluice.Step(DistributedDataParallel(model), optimizer, micro_batch=32, balance=batches)
        for epoch in range(10):
            batches.set_epoch(epoch)
            for x, y in loader:
                step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    Every batch has the same samples whatever its parts are, and a step's gradient is that of the whole batch; so training learns
    the same, to rounding. In a pass each sample is in one batch of one process. At first all have equal parts; the step measures
    what its own micro-batches take, and parts become proportional to the samples a second that come of it.

    All processes make one at the same time, with the same arguments, and go through it as often. Their loaders may have different
    numbers of workers.

    Args:
        dataset: What has the samples, or how many there are.
        batch_size: Samples of a global batch, of all processes together.
        shuffle: Whether samples are in an order of their own in each epoch, else in that of the dataset.
        seed: Of that order, with the epoch.
        drop_last: Whether what is left at the end, too little for a batch, is left out. If not, it is a smaller batch, or, having
            less than a sample for each process, part of the one before.
        multiple_of: Parts of whole batches are multiples of it; ``micro_batch`` keeps slices full.
        every: Steps between two decisions. The last eighth of them is measured: gradients are sent after backward then, and on a
            GPU the step waits for the device before and after its micro-batches.
        group: The process group whose processes train together; None: all.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for one of the wrong value, or if there are too few samples for the processes.
        SluiceError: if another process's arguments differ.
    """

    def __init__(self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
                 multiple_of: int = 1, every: int = 16, group: Any = None) -> None:
        self._samples = _whole("dataset", len(dataset) if isinstance(dataset, Sized) else dataset, 1)
        self._batch_size = _whole("batch_size", batch_size, 1)
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._seed = _whole("seed", seed, 0)
        self._unit = _whole("multiple_of", multiple_of, 1)
        self._every = _whole("every", every, 1)
        several = distributed.is_available() and distributed.is_initialized()
        self._group = group if group is not None else distributed.group.WORLD if several else None
        self._rank, self._ranks = (distributed.get_rank(self._group), distributed.get_world_size(self._group)) if several else (0, 1)
        if self._rank < 0:
            raise ValueError("group is a process group that this process does not belong to")
        self._check_sizes()
        self._talk = self._group_on_host()
        self._refuse_others_arguments()
        self._epoch = 0
        self._steps = 0
        self._own = [0, 0]  # samples and nanoseconds of the steps that were measured since the last decision
        self._costs: list[float] = []  # of a sample, by process
        self._pass, self._next = 0, 0  # through the samples, and the batch in it that is dealt next
        self._schedule = [((0, 0), self._even())]  # from which batch of which pass on, parts of a whole batch

    @property
    def parts(self) -> tuple[int, ...]:
        """What each process has of a whole batch that is dealt now, in samples, by rank."""
        return self._parts_at((self._pass, self._next))

    def set_epoch(self, epoch: int) -> None:
        """Which order the next pass has, as in torch's ``DistributedSampler``."""
        self._epoch = _whole("epoch", epoch, 0)

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self._ends())

    def __iter__(self) -> Iterator[list[int]]:
        """Of each batch of a pass, this process's part."""
        self._pass, self._next = self._pass + 1, 0
        mine = self._pass
        order = self._order()
        begin = 0
        for index, end in enumerate(self._ends()):
            if mine != self._pass:
                raise RuntimeError("a later pass through the BalancedBatchSampler has begun: there is one at a time")
            parts = self._dealt(end - begin, (mine, index))
            self._next = index + 1
            first = begin + sum(parts[:self._rank])
            yield order[first:first + parts[self._rank]].tolist()
            begin = end

    # --- what a step calls ---------------------------------------------------------------------------------------------

    def follow(self, processes: Processes | None) -> None:
        """A step of a model that these processes train takes this sampler's batches.

        Raises:
            SluiceError: if they are not those that batches are dealt to, or work together inside of micro-batches.
        """
        if processes is not None and processes.inside:
            raise SluiceError("balance is for replicas, of which each runs its slices by itself: processes that work together inside of "
                              "micro-batches, as those of a model in shards, with tensor parallelism or with SyncBatchNorm do, wait for "
                              "each other in each, and have as many slices")
        trained_by = [] if processes is None else distributed.get_process_group_ranks(processes.group)
        dealt_to = [] if self._group is None else distributed.get_process_group_ranks(self._group)
        if trained_by != dealt_to and max(len(trained_by), len(dealt_to)) > 1:
            raise SluiceError(f"the sampler deals batches to {_named(dealt_to)}, and the model is trained by {_named(trained_by)}: put the "
                              "model into DistributedDataParallel, and give the sampler its process group")

    @property
    def is_measured(self) -> bool:
        """Whether the step that comes is to be measured."""
        return self._ranks > 1 and self._steps % self._every >= self._every - max(1, self._every // MEASURED_PART)

    def stepped(self, samples: int, seconds: float) -> None:
        """All processes have made a step; of so many samples this one's own micro-batches have taken so long, if it was measured."""
        if self.is_measured:
            self._own[0] += samples
            self._own[1] += round(seconds * 1e9)
        self._steps += 1
        if self._ranks > 1 and self._steps % self._every == 0:
            self._decide()

    # --- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """All know the same then, and take new parts from a batch on that none of them has dealt."""
        said = self._from_all([*self._own, self._pass * MOST_BATCHES + self._next])
        self._own = [0, 0]
        dealt = [divmod(position, MOST_BATCHES) for _, _, position in said]
        if len({number for number, _ in dealt}) > 1:
            raise SluiceError("processes have begun different numbers of passes through a BalancedBatchSampler: "
                              f"{', '.join(f'rank {rank} {number}' for rank, (number, _) in enumerate(dealt))}; each must iterate over its "
                              "loader as often as the others")
        if any(samples <= 0 or nanoseconds <= 0 for samples, nanoseconds, _ in said):
            return
        now = [nanoseconds / samples for samples, nanoseconds, _ in said]
        self._costs = [(before + new) / 2 for before, new in zip(self._costs, now, strict=True)] if self._costs else now
        parts = self._parts_for(self._costs)
        if _longest(parts, self._costs) <= WORTH_A_CHANGE * _longest(self._schedule[-1][1], self._costs):
            self._schedule.append((max(dealt), parts))
            oldest = (self._pass, self._next)
            while len(self._schedule) > 1 and self._schedule[1][0] <= oldest:
                self._schedule.pop(0)

    def _parts_for(self, costs: Sequence[float]) -> tuple[int, ...]:
        return tuple(self._unit * part for part in divided(self._batch_size // self._unit, costs))

    def _even(self) -> tuple[int, ...]:
        return self._parts_for([1.0] * self._ranks)

    def _parts_at(self, position: tuple[int, int]) -> tuple[int, ...]:
        return next(parts for since, parts in reversed(self._schedule) if since <= position)

    def _dealt(self, count: int, position: tuple[int, int]) -> tuple[int, ...]:
        """Of a batch of so many samples."""
        parts = self._parts_at(position)
        return parts if count == self._batch_size else tuple(divided(count, [1.0 / part for part in parts]))

    # --- batches -------------------------------------------------------------------------------------------------------

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._samples)
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._seed + self._epoch))

    def _ends(self) -> list[int]:
        """Where batches end in the order of a pass."""
        ends = list(range(self._batch_size, self._samples + 1, self._batch_size))
        rest = self._samples % self._batch_size
        if rest == 0 or self._drop_last:
            return ends
        if rest < self._ranks:
            ends.pop()
        return [*ends, self._samples]

    def _check_sizes(self) -> None:
        if self._batch_size % self._unit != 0:
            raise ValueError(f"batch_size must be a multiple of multiple_of: {self._batch_size} is none of {self._unit}")
        if self._batch_size // self._unit < self._ranks:
            raise ValueError(f"batch_size must be at least {self._ranks * self._unit}, {self._unit} for each of {self._ranks} processes, "
                             f"not {self._batch_size}")
        least = self._batch_size if self._drop_last else self._ranks
        if self._samples < least:
            raise ValueError(f"{self._samples} samples are too few: {least} are needed for "
                             f"{'one batch' if self._drop_last else f'{self._ranks} processes'}")

    # --- other processes -----------------------------------------------------------------------------------------------

    def _group_on_host(self) -> Any:
        """In which numbers are exchanged without a wait for the device. Collective."""
        if self._ranks == 1:
            return None
        if "gloo" in str(distributed.get_backend(self._group)):
            return self._group
        return distributed.new_group(distributed.get_process_group_ranks(self._group), backend="gloo", use_local_synchronization=True)

    def _from_all(self, mine: list[int]) -> list[list[int]]:
        """What each process says, by rank. Collective."""
        others = [torch.empty(len(mine), dtype=torch.int64) for _ in range(self._ranks)]
        distributed.all_gather(others, torch.tensor(mine, dtype=torch.int64), group=self._talk)
        return [each.tolist() for each in others]

    def _refuse_others_arguments(self) -> None:
        if self._ranks == 1:
            return
        names = ("samples", "batch_size", "shuffle", "seed", "drop_last", "multiple_of", "every")
        mine = [self._samples, self._batch_size, int(self._shuffle), self._seed, int(self._drop_last), self._unit, self._every]
        for name, *values in zip(names, *self._from_all(mine), strict=True):
            if len(set(values)) > 1:
                raise SluiceError(f"processes have made a BalancedBatchSampler with different {name}: "
                                  f"{', '.join(f'rank {rank} {value}' for rank, value in enumerate(values))}")


def divided(units: int, costs: Sequence[float]) -> list[int]:
    """Into a part of at least one for each cost, so that the largest product of part and cost is as small as can be."""
    parts = [1] * len(costs)
    next_ends = [(2 * cost, rank) for rank, cost in enumerate(costs)]
    heapq.heapify(next_ends)
    for _ in range(units - len(costs)):
        rank = next_ends[0][1]
        parts[rank] += 1
        heapq.heapreplace(next_ends, ((parts[rank] + 1) * costs[rank], rank))
    return parts


def _longest(parts: Sequence[int], costs: Sequence[float]) -> float:
    return max(part * cost for part, cost in zip(parts, costs, strict=True))


def _named(ranks: list[int]) -> str:
    return f"the processes of rank {', '.join(map(str, ranks))}" if len(ranks) > 1 else "this process"


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        also = " or have a length" if name == "dataset" else ""
        raise TypeError(f"{name} must be a whole number{also}, not {type(value).__name__}")
    if not least <= value <= MOST:
        raise ValueError(f"{name} must be {least} to {MOST}, not {value}")
    return int(value)
