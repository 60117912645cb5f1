"""What processes on the host ask each other before a collective of a micro-batch, so that all keep it or all run it again.

Gloo's collectives do not end before all processes have made theirs. So each asks the others first, and waits where its memory
can be taken away; what is granted is made by all of them, to its end (docs/collectives.md, "On the host").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from sluice import _runtime, _torch_compat
from sluice._micro_batch import Discarded
from sluice._planning import FIRST_NOTICE_SECONDS, NOTICE_SECONDS
from sluice._runtime import Collective, Runtime
from sluice._torch_compat import FakeTensor, TorchDispatchMode, tree_leaves
from sluice.errors import SluiceError

#: How long one wait lasts before Python looks at its signals again.
SLICE_MS = 50

#: What all processes make together, and which of its arguments all have alike.
_COLLECTIVES: dict[str, str | None] = {
    "c10d::allreduce_": "tensors", "c10d::allreduce_coalesced_": "tensors", "c10d::broadcast_": "tensors", "c10d::reduce_": "tensors",
    "c10d::allgather_": "output_tensors", "c10d::_allgather_base_": "output_tensor", "c10d::allgather_coalesced_": "output_lists",
    "c10d::allgather_into_tensor_coalesced_": "outputs", "c10d::reduce_scatter_": "input_tensors",
    "c10d::_reduce_scatter_base_": "input_tensor", "c10d::reduce_scatter_tensor_coalesced_": "inputs",
    "c10d::gather_": "input_tensors", "c10d::scatter_": "output_tensors", "c10d::alltoall_": None, "c10d::alltoall_base_": None,
    "c10d::barrier": None,
    "_c10d_functional::all_reduce": "input", "_c10d_functional::all_reduce_": "input", "_c10d_functional::broadcast": "input",
    "_c10d_functional::broadcast_": "input", "_c10d_functional::all_reduce_coalesced": "inputs",
    "_c10d_functional::all_reduce_coalesced_": "inputs", "_c10d_functional::all_gather_into_tensor": "input",
    "_c10d_functional::all_gather_into_tensor_out": "input", "_c10d_functional::all_gather_into_tensor_coalesced": "inputs",
    "_c10d_functional::reduce_scatter_tensor": "input", "_c10d_functional::reduce_scatter_tensor_out": "input",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "inputs", "_c10d_functional::all_to_all_single": None,
}
_END = "the end of a micro-batch"
_NAMES = [_END, *_COLLECTIVES]
_TYPES = ["nothing", *sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})]

_agreed: Agreement | None = None


def join(runtime: Runtime | None, group: Any, groups: tuple[Any, ...] = ()) -> Agreement | None:
    """To be called by all processes of ``group``; None if they do not share. ``groups``: of some of them, in which this one
    works together with those, too.

    Raises:
        SluiceError: in all of them, if some cannot agree with the others.
    """
    global _agreed
    _torch_compat.need("agreement")
    # Processes know each other by their numbers, and meet in the pool's folder.
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        place = (boot.read(), os.readlink("/proc/self/ns/pid"), os.path.realpath(os.environ.get("SLUICE_RUNTIME_DIR", "")))
    plain = os.environ.get("SLUICE_COLLECTIVES") == "plain"
    everybody = _ranks_of(group)
    members = [everybody, *dict.fromkeys(each for each in map(_ranks_of, groups) if each != everybody and len(each) > 1)]
    all_of_them = _gathered((runtime is not None, plain, place, secrets.token_hex(8), (os.getpid(), members)), group)
    shares, plains, places, nonces, who = zip(*all_of_them, strict=True)
    if not any(shares):
        return None
    if not all(shares) or len(set(places)) > 1 or any(plains):
        raise SluiceError("processes that work together inside of micro-batches keep them together, and agree on that on one host, "
                          "all under one `sluice run`, with SLUICE_COLLECTIVES unset; start them so, or train without `sluice run`")
    if _agreed is None or _agreed.who != who:
        nonce_of = dict(zip(everybody, nonces, strict=True))
        keys = ["-".join([nonce_of[each[0]], *map(str, each)]) for each in members]
        joined = runtime.join_groups(keys)
        if not all(_gathered(joined, group)) or not runtime.complete_groups(_places_in(members)):
            raise SluiceError("processes that work together inside of micro-batches cannot agree on what they keep: "
                              f"{'others cannot join' if joined and runtime.error() == '' else runtime.error()}")
        _agreed = Agreement(runtime, group, who, members)
    return _agreed


def _gathered(mine: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group=group)
    return found


def _ranks_of(group: Any) -> tuple[int, ...]:
    """In their order in the group, as the job counts them."""
    return tuple(distributed.get_process_group_ranks(group))


def _places_in(members: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """This process's rank in each, and how many there are."""
    return [(each.index(distributed.get_rank()), len(each)) for each in members]


class Agreement:
    """With the processes of one group, and of groups of some of them. One at a time in a process; of its thread that trains."""

    def __init__(self, runtime: Runtime, group: Any, who: tuple, members: list[tuple[int, ...]]) -> None:
        self.who = who  # all processes, and what groups each is in
        self.members = members  # of each group, as the job counts them
        self._runtime = runtime
        self._number_of = {frozenset(each): number for number, each in enumerate(members)}
        self._patience = _torch_compat.patience_of(group)

    def asking(self, inside: bool) -> contextlib.AbstractContextManager:
        """In it, collectives of this thread are asked about; ``inside`` of a micro-batch that may be dropped."""
        return _Asking(self, inside)

    def commit_begin(self) -> int:
        """Begins the commit of the micro-batch if all keep it."""
        try:
            return self._granted(0, Collective(_NAMES.index(_END)), True, self._begin, self._keep_and_leave)
        except Discarded:
            return _runtime.TAKEN_AWAY

    def _begin(self) -> int:
        start = self._runtime.commit_begin(0)
        if start != _runtime.BEGUN:
            raise SluiceError("a micro-batch that all processes keep has lost its memory")
        return start

    def _keep_and_leave(self) -> None:
        self._begin()
        self._runtime.commit_end(0, 0)

    def make(self, func: Any, args: tuple, kwargs: dict[str, Any], inside: bool) -> Any:
        asked = self._numbered(func, args, kwargs)
        if asked is None:
            return func(*args, **kwargs)

        def made() -> Any:
            result = func(*args, **kwargs)
            for each in tree_leaves(result):  # gloo's threads write into its memory until then
                if isinstance(each, torch.ScriptObject):
                    distributed.Work.unbox(each).wait()
                elif func.namespace != "c10d":
                    _torch_compat.wait_for_functional(each)
            return result

        return self._granted(*asked, inside, made, made)

    def _granted(self, group: int, what: Collective, inside: bool, make: Callable[[], Any], interrupted: Callable[[], Any]) -> Any:
        """Makes it when all of the group have come to it. What has been granted as an exception arrives, all others make: then
        ``interrupted`` does."""
        why: BaseException | None = None
        try:
            self._ask(group, what, inside)
        except BaseException as failure:
            if self._runtime.agree_withdraw() != _runtime.GRANTED:
                raise
            why = failure
        try:
            result = make() if why is None else interrupted()
        finally:
            self._runtime.agree_made()
        if why is not None:
            raise why
        return result

    def _ask(self, group: int, what: Collective, inside: bool) -> None:
        runtime, members = self._runtime, self.members[group]
        began = time.monotonic()
        reports_at = began + min(FIRST_NOTICE_SECONDS, self._patience / 2)
        while (answer := runtime.agree(group, ctypes.byref(what), int(inside), SLICE_MS)) == _runtime.LATER:
            now = time.monotonic()
            waits = f"collective {runtime.ranks_number()}, {_text(what)}, "
            if now >= began + self._patience:
                raise SluiceError(f"{waits}has waited for {_ranks(members, runtime.missing())} as long as its process group does, "
                                  f"{self._patience:g} s")
            if now >= reports_at:
                reports_at = now + NOTICE_SECONDS
                print(f"sluice: {waits}waits for {_ranks(members, runtime.missing())}", file=sys.stderr, flush=True)
        if answer == _runtime.DROPPED:
            raise Discarded
        if answer == _runtime.LOST:
            raise SluiceError(f"{runtime.ranks_loss().decode()}; collective {runtime.ranks_number()}, {_text(what)}, will not be made")
        if answer == _runtime.DIFFERS:
            number, ranks, calls = runtime.difference()
            raise SluiceError(f"ranks differ in collective {number}: " + ", ".join(
                f"rank {members[rank]} calls {_text(call)}" for rank, call in zip(ranks, calls, strict=True)))

    def _numbered(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[int, Collective] | None:
        """Which group is asked, and what; None if it is nobody else's business."""
        schema = _torch_compat.schema_of(func)
        given = {argument.name: value for argument, value in zip(schema.arguments, args)} | kwargs
        if "process_group" in given:
            group = distributed.ProcessGroup.unbox(given["process_group"])
        elif "group_name" in given:
            group = _torch_compat.group_named(given["group_name"])
        else:
            return None
        ranks = frozenset(_ranks_of(group))
        if len(ranks) == 1:
            return None
        name = schema.name
        number = self._number_of.get(ranks)
        if name not in _COLLECTIVES or number is None:
            raise SluiceError(f"{name} was called inside of a micro-batch: only collectives of the process groups that the model is "
                              "laid out over can be run again; call it between micro-batches")
        alike = _COLLECTIVES[name]
        tensors = [each for each in tree_leaves(given[alike]) if isinstance(each, torch.Tensor)] if alike else []
        return number, Collective(_NAMES.index(name), _TYPES.index(str(tensors[0].dtype)) if tensors else 0,
                          sum(each.numel() for each in tensors), given.get("root_rank", given.get("src", 0)))


def are_fake(types: Any) -> bool:
    """Whether nothing is computed: DTensor finds out about shapes."""
    return any(issubclass(kind, FakeTensor) for kind in types)


def has_others(types: Any) -> bool:
    """Whether there are tensors of other kinds, DTensor say, whose turn it is first: what they do themselves is seen then."""
    return any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types)


class _Asking(TorchDispatchMode):
    """Sees what the thread gives to process groups, in backward, too: on the host that runs in the thread that called it."""

    def __init__(self, agreement: Agreement, inside: bool) -> None:
        super().__init__()
        self._agreement = agreement
        self._inside = inside

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile makes is compiled as outside of it

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if are_fake(types):
            return func(*args, **(kwargs or {}))
        if has_others(types):
            return NotImplemented
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            return self._agreement.make(func, args, kwargs or {}, self._inside)
        return func(*args, **(kwargs or {}))


def _text(what: Collective) -> str:
    name = _NAMES[what.operation].rpartition("::")[2].strip("_")
    if what.type == 0:
        return name
    return f"{name} of {what.count} {_TYPES[what.type].removeprefix('torch.')}" + (f", root {what.root}" if what.root else "")


def _ranks(members: tuple[int, ...], ranks: list[int]) -> str:
    """Of a group, as the job counts them."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(str(members[rank]) for rank in ranks)}"
