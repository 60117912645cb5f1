"""Gradients of a global batch, added up over its micro-batches outside the arena."""

from __future__ import annotations

import sys

import torch
from torch import nn

from sluice.errors import SluiceError


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether other processes have the rest of it."""
    parts = sys.modules.get("torch.distributed.tensor")
    return parts is not None and isinstance(tensor, parts.DTensor)


class Gradients:
    """Sums of gradients, parameter by parameter.

        begin ─► (micro-batch ─► take | forget)… ─► finish ─► divide ─► show ─► clear

    In plain PyTorch gradients add up where autograd puts them, in the same order and so to the same bits. Where a batch is
    one micro-batch, and nobody asks for its memory meanwhile, they may stay there until the optimizer has run.

    Args:
        params: Whose gradients.
        apart: Whether to keep the sums in memory of their own, since the gradients' memory may be taken away.
    """

    def __init__(self, params: list[nn.Parameter], apart: bool) -> None:
        self.params = params
        self._in_parts = any(map(is_shard, params))
        # Made before the first micro-batch, so that they do not settle between memory that is given back.
        self._sums = {param: torch.empty_like(param) for param in params} if apart else None
        self._begun: set[nn.Parameter] = set()
        self._in_place = False
        self._finished: dict[nn.Parameter, torch.Tensor] = {}

    def follow(self, params: list[nn.Parameter]) -> None:
        """From now on it is these parameters' gradients; those of others that there were are forgotten."""
        known = set(map(id, self.params))
        for param in params:
            if id(param) not in known:
                param.grad = None
        self.params = params
        self._in_parts = any(map(is_shard, params))
        if self._sums is not None:
            # What is missing is made by `make_sums`: this may lie in a micro-batch.
            self._sums = {param: self._sums[param] for param in params if param in self._sums}

    def make_sums(self) -> None:
        """Makes the sums that parameters which have come since do not have yet."""
        if self._sums is not None and len(self._sums) < len(self.params):
            self._sums |= {param: torch.empty_like(param) for param in self.params if param not in self._sums}

    def start(self) -> None:
        """Starts a global batch, whose parameters have no gradients but those that have been made in it."""
        self._begun = set()
        self._in_place = False
        self._finished = {}

    @torch.no_grad()
    def begin(self, add: bool = False) -> None:
        """Starts a global batch; `add`: on top of the gradients that are there."""
        self.make_sums()
        self.start()
        for param in self.params:
            grad = param.grad
            if add and grad is not None:
                if self._sums is None:
                    continue
                if grad is not self._sums[param]:
                    self._sums[param].copy_(grad)
                self._begun.add(param)
            param.grad = None

    def forget(self) -> None:
        """Drops the gradients of a micro-batch that does not count."""
        for param in self.params:
            param.grad = None

    def state(self) -> set[nn.Parameter]:
        """What ``take`` changes on the host."""
        return set(self._begun)

    def put_back(self, state: set[nn.Parameter]) -> None:
        """After a ``take`` whose launches have been dropped, and whatever followed it."""
        self._begun = state
        self.forget()

    @torch.no_grad()
    def take(self, in_place: bool = False) -> None:
        """Adds the gradients of a micro-batch to the sums; the first is copied. ``in_place``: it is the batch's only one, and
        ``clear`` comes before its memory goes."""
        self._in_place = in_place
        if self._sums is None or in_place:
            return
        firsts, addends = ([], []), ([], [])
        for param in self.params:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise SluiceError("sparse gradients cannot be added up outside of a micro-batch; make the embedding with "
                                  "sparse=False")
            if param in self._begun:
                into = addends
            else:
                into = firsts
                self._begun.add(param)
            into[0].append(self._sums[param])
            into[1].append(grad)
            param.grad = None
        if firsts[0]:
            torch._foreach_copy_(*map(self._own, firsts))
        if addends[0]:
            torch._foreach_add_(*map(self._own, addends))

    def total_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """With the gradient of a micro-batch that has not been taken; None if there is none."""
        grad = param.grad
        if self._sums is None or param not in self._begun:
            return grad
        return self._sums[param] if grad is None else self._sums[param] + grad

    def put(self, param: nn.Parameter) -> torch.Tensor:
        """Where another sum is to be written, instead of taking the micro-batch's gradient."""
        param.grad = None
        self._begun.add(param)
        return self._sums[param]

    def finish(self) -> None:
        """The last micro-batch has been taken; no parameter has a gradient until ``show``."""
        if self._sums is None or self._in_place:
            self._finished = {param: param.grad for param in self.params if param.grad is not None}
            self.forget()
        else:
            self._finished = {param: self._sums[param] for param in self.params if param in self._begun}

    @property
    def finished(self) -> dict[nn.Parameter, torch.Tensor]:
        """The finished sums, to be changed before they are shown; without parameters that have no gradient."""
        return self._finished

    def zero_of(self, param: nn.Parameter) -> torch.Tensor:
        """A sum for a parameter that no micro-batch had a gradient of."""
        return torch.zeros_like(param) if self._sums is None else self._sums[param].zero_()

    @torch.no_grad()
    def divide(self, by: float | torch.Tensor) -> None:
        """Divides the finished sums."""
        if self._finished:
            torch._foreach_div_(self._own(list(self._finished.values())), by)

    def _own(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this process has of them."""
        return [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors] if self._in_parts else tensors

    def show(self) -> None:
        """Makes the finished sums the parameters' gradients."""
        for param, total in self._finished.items():
            param.grad = total

    def clear(self) -> None:
        """The gradients of the batch have been used: no parameter has one any more."""
        self._finished = {}
        self.forget()
