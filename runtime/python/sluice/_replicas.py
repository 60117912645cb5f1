"""Data-parallel training: replicas of a model in several processes, whose gradients are added up once a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.hooks import RemovableHandle

from sluice import _torch_compat
from sluice._buckets import Bucket, in_buckets
from sluice._gradients import Gradients, separate_sums
from sluice._losses import Losses
from sluice._processes import Processes, has_common_statistics
from sluice.errors import SluiceError


class Replicas(Processes):
    """The processes of a model in ``DistributedDataParallel``.

    Each process runs its slices for itself, as often as it has to; none of them waits for another inside of a micro-batch,
    but where batch statistics are those of all (``SyncBatchNorm``). After the last one their gradients are added up, as if one
    process had had all the samples.

    A last micro-batch that cannot be taken away any more, because there is no server, has its gradients sent while its
    backward still runs: ``start`` before it, ``take`` after it. It is the same collectives in the same order, so that
    processes may do one or the other.

    Raises:
        SluiceError: for wrappers in different process groups, and for settings that change what is reduced.
    """

    def __init__(self, wrappers: list[nn.parallel.DistributedDataParallel]) -> None:
        self._wrappers = wrappers
        self.group = wrappers[0].process_group
        self._stack = contextlib.ExitStack()
        self._params: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks)
        self._tries = 0  # of micro-batches
        self._fires_again = False
        self._under_way: _Reduction | None = None
        for each in wrappers:
            if each.process_group != self.group:
                raise SluiceError("the DistributedDataParallel modules of one model must have the same process group")
            _torch_compat.need_of("replicas", wrapper=each)
            if _torch_compat.has_communication_hook(each):
                raise SluiceError("a communication hook of DistributedDataParallel would not be called: gradients are reduced "
                                  "once a step, after the last micro-batch; leave register_comm_hook out")
            if each.mixed_precision is not None or _torch_compat.delays_reductions(each):
                raise SluiceError("DistributedDataParallel's mixed_precision and delay_all_reduce_named_params reduce "
                                  "gradients inside of backward; leave them out, and use torch.autocast")

    @classmethod
    def find(cls, model: nn.Module) -> Replicas | None:
        """Those of a model; None if it trains in one process."""
        if not distributed.is_available() or not distributed.is_initialized():
            return None
        wrappers = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
        several = any(distributed.get_world_size(each.process_group) > 1 for each in wrappers)
        if not several:
            return None
        replicas = cls(wrappers)
        replicas.inside = has_common_statistics(model, replicas.group)
        return replicas

    def follow(self, params: list[nn.Parameter]) -> None:
        """From now on it is these parameters' gradients, as far as they are the wrappers'."""
        mine = {id(param) for each in self._wrappers for name, param in each.module.named_parameters()
                if name not in each.parameters_to_ignore}
        self._params = [param for param in params if id(param) in mine]
        self._buckets = list(in_buckets(self._params[::-1]))  # about in the order in which backward comes to them
        _remove(self._hooks)
        self._hooks += [param.register_post_accumulate_grad_hook(self._hook_of(place))
                        for place, bucket in enumerate(self._buckets) for param in bucket.params]

    def room(self, params: list[nn.Parameter]) -> dict[int, torch.Tensor]:
        """Side by side, as they are reduced."""
        sums = self._made_sums()
        return separate_sums(param for param in params if id(param) not in sums) | sums

    def _made_sums(self) -> dict[int, torch.Tensor]:
        for bucket in self._buckets:
            bucket.make()
        return {id(param): total for bucket in self._buckets for param, total in zip(bucket.params, bucket.sums, strict=True)}

    @property
    def may_overlap(self) -> bool:
        """Whether a parameter's gradient is complete when backward has first come to it. Where layers run again in a backward
        of their own (reentrant checkpoints) it comes several times."""
        return not self._fires_again and not self.inside

    def _hook_of(self, place: int) -> Callable[[nn.Parameter], None]:
        """What a parameter of the bucket at that place calls when backward has come to it.

        It does not keep the replicas: the wrapper's reducer has the parameters with their hooks, and what leads from there back
        to the wrapper is nothing that Python's collector finds.
        """
        last = -1  # no try yet
        replicas = weakref.ref(self)

        def has_gradient(_param: nn.Parameter) -> None:
            nonlocal last
            if (mine := replicas()) is not None:
                mine._came_to(place, again=last == mine._tries)
                last = mine._tries

        return has_gradient

    def _came_to(self, place: int, again: bool) -> None:
        self._fires_again |= again
        if self._under_way is not None:
            if self._fires_again:
                raise SluiceError("backward came to a parameter twice, which it had not done in the steps before; its "
                                  "gradient is on its way to the other processes already. Let the first step do it, too")
            self._under_way.ready(place)

    def begin_batch(self, samples: int) -> None:
        """Gives every process the buffers of the first, if that was asked for."""
        if self._under_way is not None:  # of a step that failed; what is sent lies where sums do
            self._under_way.wait()
            self._under_way = None
        for each in self._wrappers:
            if _torch_compat.joins(each):
                raise SluiceError("join (join_uneven_inputs) has processes that are done take part in what the others' forward and "
                                  "backward send, and that is sent once a step here; leave it out, and give all processes as many "
                                  "batches")
            _torch_compat.send_buffers(each)

    def begin_micro_batch(self) -> None:
        """Until ``end_micro_batch`` the wrappers leave buffers and gradients to themselves."""
        self._tries += 1
        for each in self._wrappers:
            self._stack.enter_context(each.no_sync())
            each.require_forward_param_sync = False
            if each.static_graph:
                self._stack.callback(_torch_compat.leave_first_reduction(each))

    def end_micro_batch(self) -> None:
        self._stack.close()
        for each in self._wrappers:
            each.require_forward_param_sync = True  # whoever evaluates next does it with equal buffers

    def start(self, gradients: Gradients, losses: Losses, weight: float | torch.Tensor | None) -> None:
        """Before the last micro-batch's backward, which brings that weight, and which nothing can take away: from here
        gradients are sent as they come."""
        if all(bucket.flat is not None for bucket in self._buckets):  # else parameters have come since, and there is no room yet
            self._under_way = _Reduction(self.group, self._buckets, gradients.bring_to, *losses.amount(weight))

    def send_rest(self) -> None:
        """After that backward: sends what it has not come to. There was no backward if the slice weighs nothing."""
        if self._under_way is not None:
            self._under_way.send_rest()

    def take(self, gradients: Gradients) -> None:
        """And waits for the sums. To be called outside of the arena."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way.amount = self._under_way.amount.clone()

    @torch.no_grad()
    def reduce(self, gradients: Gradients, losses: Losses) -> torch.Tensor:
        """A parameter that some process has no gradient of counts as zero there; one that none has gets none."""
        reduction = self._under_way
        if reduction is None:
            reduction = self._begun(gradients, *losses.amount())
        self._under_way = None
        total = self._share(gradients, reduction, reduction.factor * losses.contribution)
        amount = reduction.amount
        if not losses.is_sum and amount.is_cpu and amount == 0.0:
            raise ValueError("the weights of a batch's slices must not all be zero, in all processes")
        loss = total if losses.is_sum else total / amount
        return loss.to(losses.contribution.dtype)

    @torch.no_grad()
    def average(self, gradients: Gradients) -> None:
        """Makes the finished sums their mean over all processes, as DistributedDataParallel does in backward."""
        self._share(gradients, self._begun(gradients, 1.0, 1.0), 0.0)

    def _begun(self, gradients: Gradients, factor: float, amount: float | torch.Tensor | None) -> _Reduction:
        """The reduction of the finished sums."""
        for bucket in self._buckets:
            bucket.make()
        return _Reduction(self.group, self._buckets, gradients.bring_finished_to, factor, amount)

    def _share(self, gradients: Gradients, reduction: _Reduction, contribution: float | torch.Tensor) -> torch.Tensor:
        """Makes the finished sums those of all processes. Returns the sum of what each contributes."""
        reduction.send_rest()
        reduction.wait()
        gradients.replace_finished(self._made_sums())
        header = torch.ones(1 + len(self._params), dtype=torch.float64, device=reduction.amount.device)
        header[0] = contribution
        if reduction.unused:  # from the host it takes a wait for the device
            header[1:] = torch.tensor([id(param) not in reduction.unused for param in self._params], dtype=torch.float64)
        distributed.all_reduce(header, group=self.group)
        if reduction.unused:  # others may have what is missing here
            for param, count in zip(self._params, header[1:].tolist(), strict=True):
                if count == 0.0:
                    gradients.leave_out(param)
        return header[0]


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _Reduction:
    """One batch's gradients on their way: in pieces, whose order is the same in all processes.

    Args:
        bring: Has a bucket's totals there, and returns the parameters that have none here, by ``id``.
        factor: By what to multiply gradients before they are added to others'.
        amount: What this process's part counts in the mean of all; None if it is no mean.
    """

    def __init__(self, group: Any, buckets: list[Bucket], bring: Callable[[Bucket], set[int]], factor: float,
                 amount: float | torch.Tensor | None) -> None:
        self._group = group
        self._buckets = buckets
        self._bring = bring
        self._missing = [len(bucket.params) for bucket in buckets]
        self._sent = 0
        self._pending: list[distributed.Work] = []
        self._scale: torch.Tensor | None = None
        self._is_mean = amount is not None
        self.factor = factor
        self.unused: set[int] = set()
        self.amount = torch.zeros((), dtype=torch.float64, device=buckets[0].params[0].device)
        self.amount += 1.0 if amount is None else amount
        self._amount_known = distributed.all_reduce(self.amount, group=group, async_op=True)

    def ready(self, place: int) -> None:
        """A gradient of the bucket at that place is complete."""
        self._missing[place] -= 1
        while self._sent < len(self._buckets) and self._missing[self._sent] == 0:
            self._send()

    def send_rest(self) -> None:
        """Sends what has not been."""
        while self._sent < len(self._buckets):
            self._send()

    def wait(self) -> None:
        """Has the current stream, or the host, wait for what was sent."""
        self._await_amount()
        for each in self._pending:
            each.wait()
        self._pending.clear()
        self._scale = None

    def _await_amount(self) -> None:
        if self._amount_known is not None:
            self._amount_known.wait()
            self._amount_known = None
            self._scale = self.factor / self.amount if self._is_mean else None

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1
        self.unused |= self._bring(bucket)
        self._await_amount()
        if self._scale is not None:
            bucket.flat.mul_(self._scale)
        self._pending.append(distributed.all_reduce(bucket.flat, group=self._group, async_op=True))
