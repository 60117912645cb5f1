"""Gradients of a global batch, added up over its micro-batches outside the arena."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn

from sluice import _torch_compat
from sluice._buckets import Bucket
from sluice.errors import SluiceError


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether other processes have the rest of it."""
    parts = sys.modules.get("torch.distributed.tensor")
    return parts is not None and isinstance(tensor, parts.DTensor)


def separate_sums(params: Iterable[nn.Parameter]) -> dict[int, torch.Tensor]:
    """Room for the sum of each parameter's gradients, by ``id``."""
    return {id(param): torch.empty_like(param) for param in params}


class Gradients:
    """Sums of gradients, parameter by parameter.

        begin ─► (micro-batch ─► take | forget)… ─► finish ─► divide ─► show ─► clear

    In plain PyTorch gradients add up where autograd puts them, in the same order and so to the same bits. Where a batch is
    one micro-batch, and nobody asks for its memory meanwhile, they may stay there until the optimizer has run.

    Args:
        params: Whose gradients. What is kept of each is found by its ``id``: hashing a tensor is a call of a Python function.
        apart: Whether to keep the sums in memory of their own, since the gradients' memory may be taken away.
        room: Makes that memory, for all of them.
    """

    def __init__(self, params: list[nn.Parameter], apart: bool,
                 room: Callable[[list[nn.Parameter]], dict[int, torch.Tensor]] = separate_sums) -> None:
        self.params = params
        self._room = room
        self._in_parts = any(map(is_shard, params))
        # Made before the first micro-batch, so that they do not settle between memory that is given back.
        self._sums = room(params) if apart else None
        self._begun: set[int] = set()
        self._in_place = False
        self._none_is_there = False  # no parameter has a gradient, unless backward has run since
        self._finished: dict[int, torch.Tensor] = {}
        self._are_shown = False  # the finished sums are the parameters' gradients

    def follow(self, params: list[nn.Parameter]) -> None:
        """From now on it is these parameters' gradients; those of others that there were are forgotten."""
        known = set(map(id, self.params))
        for param in params:
            if id(param) not in known:
                param.grad = None
        self.params = params
        self._in_parts = any(map(is_shard, params))
        if self._sums is not None:
            self._sums = {}  # made by `make_sums`: this may lie in a micro-batch

    def make_sums(self) -> None:
        """Makes the sums anew if there are other parameters now, or they have become of another type."""
        sums = self._sums
        if sums is not None and (len(sums) < len(self.params) or any(sums[id(param)].dtype != param.dtype for param in self.params)):
            self._sums = self._room(self.params)

    def start(self) -> None:
        """Starts a global batch, whose parameters have no gradients but those that have been made in it."""
        self._begun = set()
        self._in_place = self._are_shown = False
        self._finished = {}

    @torch.no_grad()
    def begin(self, add: bool = False) -> None:
        """Starts a global batch; `add`: on top of the gradients that are there."""
        self.make_sums()
        self.start()
        self._none_is_there = not (add and self._sums is None)
        for param in self.params:
            grad = param.grad
            if add and grad is not None:
                if self._sums is None:
                    continue
                if grad is not self._sums[id(param)]:
                    self._sums[id(param)].copy_(grad)
                self._begun.add(id(param))
            param.grad = None

    def forget(self) -> None:
        """Drops the gradients of a micro-batch that does not count."""
        for param in self.params:
            param.grad = None
        self._none_is_there = True

    def earlier(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Copies of gradients that are known to have been made since the micro-batch began; more may follow from here on. Where they
        add up in their own places, only the first micro-batch of a batch tells."""
        was_none_there, self._none_is_there = self._none_is_there, False
        return [(param, grad.clone()) for param in self.params if (grad := param.grad) is not None] if was_none_there else []

    def state(self) -> set[int]:
        """What ``take`` changes on the host."""
        return set(self._begun)

    def put_back(self, state: set[int]) -> None:
        """After a ``take`` whose launches have been dropped, and whatever followed it."""
        self._begun = state
        self.forget()

    def take(self, in_place: bool = False) -> None:
        """Adds the gradients of a micro-batch to the sums; the first is copied. ``in_place``: it is the batch's only one, and
        ``clear`` comes before its memory goes."""
        self._in_place = in_place
        if self._sums is not None and not in_place:
            self._take(self.params)
            self._none_is_there = True

    @torch.no_grad()
    def _take(self, params: list[nn.Parameter]) -> None:
        sums, begun = self._sums, self._begun
        firsts, addends = ([], []), ([], [])
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise SluiceError("sparse gradients cannot be added up outside of a micro-batch; make the embedding with "
                                  "sparse=False")
            key = id(param)
            if key in begun:
                into = addends
            else:
                into = firsts
                begun.add(key)
            into[0].append(sums[key])
            into[1].append(grad)
            param.grad = None
        if firsts[0]:
            _torch_compat.copy_all(*map(self._own, firsts))
        if addends[0]:
            _torch_compat.add_all(*map(self._own, addends))

    @torch.no_grad()
    def bring_to(self, bucket: Bucket) -> set[int]:
        """Has the totals of its parameters there, with the gradients of a micro-batch that has not been taken. Returns those
        that have none, by ``id``."""
        if self._sums is not None:  # the bucket has given room for them
            self._take(bucket.params)
            totals = [self._sums[id(param)] if id(param) in self._begun else None for param in bucket.params]
        else:
            totals = [param.grad for param in bucket.params]
            for param, total, place in zip(bucket.params, totals, bucket.sums, strict=True):
                param.grad = None if total is None else place
        return bucket.bring(totals)

    def finish(self, show_follows: bool = False) -> None:
        """The last micro-batch has been taken; no parameter has a gradient until ``show``. ``show_follows``: nobody looks at
        them before that, so that what they have need not be taken away and given back."""
        are_params_own = self._sums is None or self._in_place
        self._are_shown = are_params_own and show_follows
        if are_params_own:
            self._finished = {id(param): grad for param in self.params if (grad := param.grad) is not None}
            if not show_follows:
                self.forget()
        else:
            self._finished = {key: total for key, total in self._sums.items() if key in self._begun}

    @torch.no_grad()
    def bring_finished_to(self, bucket: Bucket) -> set[int]:
        """Like ``bring_to``, the finished sums, which lie there from now on."""
        return bucket.bring([self._finished.get(id(param)) for param in bucket.params])

    def replace_finished(self, by: dict[int, torch.Tensor]) -> None:
        """There are other sums of some parameters, by ``id``, also of those that had none."""
        if self._are_shown:
            self._are_shown = False
            self.forget()
        self._finished.update(by)

    def leave_out(self, param: nn.Parameter) -> None:
        """It has no gradient in this batch."""
        self._finished.pop(id(param), None)
        param.grad = None

    @torch.no_grad()
    def divide(self, by: float | torch.Tensor) -> None:
        """Divides the finished sums."""
        if self._finished:
            _torch_compat.divide_all(self._own(list(self._finished.values())), by)

    @torch.no_grad()
    def add_to_finished(self, others: dict[int, torch.Tensor]) -> None:
        """Adds these to the finished sums, by ``id`` of their parameters."""
        for key, other in others.items():
            if key in self._finished:
                self._finished[key].add_(other)
            else:
                self._finished[key] = other

    def _own(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this process has of them."""
        return [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors] if self._in_parts else tensors

    def show(self) -> None:
        """Makes the finished sums the parameters' gradients."""
        if self._are_shown:
            return
        for param in self.params:
            if (total := self._finished.get(id(param))) is not None:
                param.grad = total

    def clear(self) -> None:
        """The gradients of the batch have been used: no parameter has one any more."""
        self._finished = {}
        self.forget()
