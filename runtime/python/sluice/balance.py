"""Global batches, dealt to the processes of a job by how fast each of them trains."""

from __future__ import annotations

import heapq
import numbers
import threading
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
#: Of arguments.
MOST = (1 << 62) - 1
#: After so many an interval of numbers is as small as one can be.
HALVINGS = 60


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

    All processes make one at the same time, with the same arguments, call ``set_epoch`` alike, and go through it as often. Their
    loaders may have different numbers of workers, and fetch batches of a pass ahead, also in threads of their own.

    Args:
        dataset: What has the samples, or how many there are.
        batch_size: Samples of a global batch, of all processes together.
        shuffle: Whether samples are in an order of their own in each epoch, else in that of the dataset.
        seed: Of that order, with the epoch.
        drop_last: Whether what is left at the end, too little for a batch, is left out. If not, it is a smaller batch, or, having
            less than ``multiple_of`` samples for each process, part of the one before.
        multiple_of: Parts are multiples of it, but for one process's at the end of a pass; ``micro_batch`` keeps slices full.
        every: Steps between two decisions. The last eighth of them is measured: gradients are sent after backward then, and on a
            GPU the step waits for the device before and after its micro-batches.
        group: The process group whose processes train together; None: all.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for one of the wrong value, or if there are too few samples for the processes.
        SluiceError: if another process's arguments differ, or are wrong.
    """

    def __init__(self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
                 multiple_of: int = 1, every: int = 16, group: Any = None) -> None:
        self._join(group)
        try:
            self._samples = _samples_of(dataset)
            self._batch_size = _whole("batch_size", batch_size, 1)
            self._shuffle, self._drop_last = _flag("shuffle", shuffle), _flag("drop_last", drop_last)
            self._seed = _whole("seed", seed, 0)
            self._unit = _whole("multiple_of", multiple_of, 1)
            self._every = _whole("every", every, 1)
            self._check_sizes()
        except (TypeError, ValueError):
            self._refuse_others_arguments(None)  # they wait for these
            raise
        self._refuse_others_arguments(
            [self._samples, self._batch_size, int(self._shuffle), self._seed, int(self._drop_last), self._unit, self._every])
        self._dealing = threading.Lock()  # held from where batches are compared until new parts are known, and while one is dealt
        self._epoch = 0
        self._epoch_of_pass = 0
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
        """Of each batch of a pass, this process's part. The pass is of the epoch that is set now, and begins with its first batch:
        a loader with workers calls this twice."""
        return self._parts_of_pass(self._epoch)

    def _parts_of_pass(self, epoch: int) -> Iterator[list[int]]:
        order = self._order(epoch)
        with self._dealing:
            mine = self._pass = self._pass + 1
            self._next, self._epoch_of_pass = 0, epoch
        begin = 0
        for index, end in enumerate(self._ends()):
            with self._dealing:
                if mine != self._pass:
                    raise RuntimeError("a later pass through the BalancedBatchSampler has begun: there is one at a time")
                parts = self._dealt(end - begin, (mine, index))
                self._next = index + 1
            first = begin + sum(parts[:self._rank])
            yield order[first:first + parts[self._rank]].tolist()
            begin = end

    @property
    def batch_size(self) -> int:
        """Raises SluiceError: whoever asks would cut batches anew, which are dealt to processes already."""
        raise SluiceError("the batches of a BalancedBatchSampler are dealt to processes already: do not give a loader that has one to "
                          "accelerate's prepare, or to another that deals batches; what the step needs is balance=")

    def __reduce__(self) -> Any:
        raise SluiceError("a BalancedBatchSampler belongs to its process, and cannot be copied or pickled: make one in each process; "
                          "to go on with a later epoch, call set_epoch")

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
        if len(trained_by) > 1 and not dealt_to:
            raise SluiceError("the sampler was made before torch.distributed.init_process_group, and deals whole batches to this process: "
                              "make it afterwards, in all processes")
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
        with self._dealing:
            said = self._from_all([*self._own, self._pass, self._next, self._epoch_of_pass])
            self._own = [0, 0]
            samples, nanoseconds, passes, batches, epochs = zip(*said, strict=True)
            _refuse_different(passes, "have begun different numbers of passes through a BalancedBatchSampler", "each must iterate over its "
                              "loader as often as the others, and begin no other pass before the steps of one are over")
            _refuse_different(epochs, "go through a BalancedBatchSampler in the order of different epochs",
                              "call set_epoch in all of them, before each pass")
            if min(samples) > 0 and min(nanoseconds) > 0:
                self._choose([each / count for each, count in zip(nanoseconds, samples, strict=True)], (passes[0], max(batches)))

    def _choose(self, now: list[float], since: tuple[int, int]) -> None:
        """New parts, if they are worth it, from that batch of that pass on; a sample takes each process so long."""
        self._costs = [(before + new) / 2 for before, new in zip(self._costs, now, strict=True)] if self._costs else now
        parts = self._parts_for(self._costs)
        if _longest(parts, self._costs) <= WORTH_A_CHANGE * _longest(self._schedule[-1][1], self._costs):
            self._schedule.append((since, parts))
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
        if count == self._batch_size:
            return parts
        rest = [self._unit * part for part in divided(count // self._unit, [1.0 / part for part in parts])]
        rest[rest.index(max(rest))] += count % self._unit
        return tuple(rest)

    # --- batches -------------------------------------------------------------------------------------------------------

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._samples, device="cpu")
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._seed + epoch), device="cpu")

    def _ends(self) -> list[int]:
        """Where batches end in the order of a pass."""
        ends = list(range(self._batch_size, self._samples + 1, self._batch_size))
        rest = self._samples % self._batch_size
        if rest == 0 or self._drop_last:
            return ends
        if rest < self._ranks * self._unit:
            ends.pop()
        return [*ends, self._samples]

    def _check_sizes(self) -> None:
        if self._batch_size % self._unit != 0:
            raise ValueError(f"batch_size must be a multiple of multiple_of: {self._batch_size} is none of {self._unit}")
        if self._batch_size // self._unit < self._ranks:
            raise ValueError(f"batch_size must be at least {self._ranks * self._unit}, {self._unit} for each of {self._ranks} processes, "
                             f"not {self._batch_size}")
        least = self._batch_size if self._drop_last else self._ranks * self._unit
        if self._samples < least:
            raise ValueError(f"{self._samples} samples are too few: {least} are needed for "
                             f"{'one batch' if self._drop_last else f'{self._ranks} processes'}")

    # --- other processes -----------------------------------------------------------------------------------------------

    def _join(self, group: Any) -> None:
        """The group, and one in which numbers are exchanged without a wait for the device. Collective."""
        several = distributed.is_available() and distributed.is_initialized()
        if group is not None and not (several and (isinstance(group, distributed.ProcessGroup)
                                                   or group is distributed.GroupMember.NON_GROUP_MEMBER)):
            raise TypeError(f"group must be a process group of torch.distributed, not {type(group).__name__}; a device mesh has one, "
                            "mesh.get_group()" if several else "group needs torch.distributed.init_process_group before it")
        self._group = group if group is not None else distributed.group.WORLD if several else None
        self._rank, self._ranks = (distributed.get_rank(self._group), distributed.get_world_size(self._group)) if several else (0, 1)
        if self._rank < 0:
            raise ValueError("group is a process group that this process does not belong to")
        self._talk = self._group
        if self._ranks > 1 and "gloo" not in str(distributed.get_backend(self._group)):
            self._talk = distributed.new_group(distributed.get_process_group_ranks(self._group), backend="gloo",
                                               use_local_synchronization=True)

    def _from_all(self, mine: list[int]) -> list[list[int]]:
        """What each process says, by rank. Collective."""
        others = [torch.empty(len(mine), dtype=torch.int64, device="cpu") for _ in range(self._ranks)]
        distributed.all_gather(others, torch.tensor(mine, dtype=torch.int64, device="cpu"), group=self._talk)
        return [each.tolist() for each in others]

    def _refuse_others_arguments(self, mine: list[int] | None) -> None:
        """Raises SluiceError if another process's are wrong, or differ. None: this one's are wrong."""
        if self._ranks == 1:
            return
        names = ("samples", "batch_size", "shuffle", "seed", "drop_last", "multiple_of", "every")
        said = self._from_all([0, *mine] if mine is not None else [1] * (1 + len(names)))
        if mine is None:
            return
        if wrong := [rank for rank, (is_wrong, *_) in enumerate(said) if is_wrong]:
            raise SluiceError(f"the arguments of a BalancedBatchSampler are wrong in the processes of rank {', '.join(map(str, wrong))}; "
                              "what they raise says why")
        for name, values in zip(names, list(zip(*said, strict=True))[1:], strict=True):
            _refuse_different(values, f"have made a BalancedBatchSampler with different {name}", "they must be the same in all")


def divided(units: int, costs: Sequence[float]) -> list[int]:
    """Into a part of at least one for each cost, so that the largest product of part and cost is as small as can be."""
    def ended_by(end: float) -> list[int]:
        return [max(1, int(end / cost)) for cost in costs]

    early, late = 0.0, units * max(costs)
    for _ in range(HALVINGS):  # then few are left
        middle = (early + late) / 2
        early, late = (middle, late) if sum(ended_by(middle)) <= units else (early, middle)
    parts = ended_by(early)
    next_ends = [((part + 1) * cost, rank) for rank, (part, cost) in enumerate(zip(parts, costs, strict=True))]
    heapq.heapify(next_ends)
    for _ in range(units - sum(parts)):
        rank = next_ends[0][1]
        parts[rank] += 1
        heapq.heapreplace(next_ends, ((parts[rank] + 1) * costs[rank], rank))
    return parts


def _longest(parts: Sequence[int], costs: Sequence[float]) -> float:
    return max(part * cost for part, cost in zip(parts, costs, strict=True))


def _refuse_different(values: Sequence[int], what: str, instead: str) -> None:
    """Raises SluiceError if processes have different ones."""
    if len(set(values)) > 1:
        raise SluiceError(f"processes {what}: {', '.join(f'rank {rank} {value}' for rank, value in enumerate(values))}; {instead}")


def _samples_of(dataset: Any) -> int:
    if isinstance(dataset, (str, bytes)):
        raise TypeError(f"dataset must be a whole number or have a length, not {type(dataset).__name__}")
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ValueError("dataset has no samples")
    return _whole("dataset", len(dataset) if isinstance(dataset, Sized) else dataset, 1)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def _named(ranks: list[int]) -> str:
    return f"the processes of rank {', '.join(map(str, ranks))}" if len(ranks) > 1 else "this process"


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        also = " or have a length" if name == "dataset" else ""
        raise TypeError(f"{name} must be a whole number{also}, not {type(value).__name__}")
    if not least <= value <= MOST:
        raise ValueError(f"{name} must be at {f'least {least}' if value < least else f'most {MOST}'}, not {value}")
    return int(value)
