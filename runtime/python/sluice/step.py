"""The training step: one optimizer step over a global batch, in micro-batches that may be taken away and run again."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sluice import _batches, _runtime
from sluice._arena import make_arena
from sluice._buffers import Buffers
from sluice._trouble import Trouble, shortage
from sluice.errors import OutOfMemory, Survivors

#: Samples of the rehearsal before the first step: two, since batch statistics need more than one.
REHEARSAL_SAMPLES = 2

#: Optimizers make their state in the first step and need their most memory by the second; torch keeps that for them.
OPTIMIZER_WARM_UP_STEPS = 2

#: How long one wait for memory lasts before Python looks at its signals again.
WAIT_SLICE_MS = 100


class Step:
    """Owns the body of a training loop.

    Every call slices the global batch along dimension 0, runs forward and backward for each slice with the loss scaled
    by its share, adds the gradients to accumulators outside the arena in one protected commit, and runs the optimizer
    once. A slice whose memory was taken by the inference server counts for nothing and runs again: random state and
    changed buffers are restored first, so with the same slicing and deterministic kernels training is bit-equal to a
    run that was never disturbed. The loss function may therefore run more than once.

    The loss must be a mean over samples. Not under ``sluice run``, the same arithmetic runs in plain PyTorch.

    Args:
        model: Module whose parameters are trained.
        optimizer: Any optimizer over parameters of ``model`` that needs no closure.
        micro_batch: Most samples in a slice. None: the whole batch.
        adapt: Whether a slice may become smaller when memory is short. None: unless the model has batch statistics,
            whose result depends on the slicing. If not, training waits until a whole slice fits.

    Not thread-safe: one step at a time, from one thread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batch: int | None = None,
        *,
        adapt: bool | None = None,
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
        self.model = model
        self.optimizer = optimizer
        self._micro_batch = micro_batch
        batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        self._adapt = adapt if adapt is not None else not batch_norm
        self._params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not self._params:
            raise ValueError("the optimizer has no parameter that requires a gradient")
        self._cuda = self._params[0].is_cuda
        self._runtime = _runtime.attach(self._cuda)
        self._arena = make_arena(self._runtime, self._cuda) if self._runtime else None
        self._trouble = Trouble(self._runtime) if self._runtime else None
        if self._runtime and self._cuda:
            self._trouble.watch_cuda()
        self._rehearsed = self._runtime is None
        self._planned_for: int | None = None
        # Made before the first micro-batch, so that they do not settle between memory that is given back.
        self._sums = {p: torch.zeros_like(p) for p in self._params} if self._runtime else {}
        self._buffers = Buffers(model)
        self._counts = {"steps": 0, "samples": 0, "commits": 0, "discards": 0, "micro_batch": 0, "wait_seconds": 0.0}

    @property
    def shared(self) -> bool:
        """Whether this process shares the pool."""
        return self._runtime is not None

    def stats(self) -> dict[str, float]:
        """Counts since the start: steps, samples, commits, discards, the last micro_batch, and wait_seconds for memory."""
        return dict(self._counts)

    def __call__(self, loss_fn: Callable[..., torch.Tensor], *batch: Any) -> torch.Tensor:
        """Trains on one global batch.

        Args:
            loss_fn: Called with one slice of each element of ``batch``; returns the slice's mean loss, a scalar.
            *batch: Tensors, or tuples, lists and dicts of them, with the samples in dimension 0.

        Returns:
            The mean loss over the global batch, detached.

        Raises:
            OutOfMemory: if the smallest permitted slice can never fit.
            Survivors: if ``loss_fn`` keeps tensors beyond its run and they were taken away.
            torch.OutOfMemoryError: from ``loss_fn`` or the optimizer, outside the arena; the message says who holds the
                pool's memory.
            Exception: whatever ``loss_fn`` itself raises; the step has then not happened.
        """
        with self._trouble.explained(lambda: self._counts["discards"]) if self._trouble else contextlib.nullcontext():
            return self._step(loss_fn, batch)

    def _step(self, loss_fn: Callable[..., torch.Tensor], batch: tuple) -> torch.Tensor:
        total = _batches.size_of(batch)
        if total < 1:
            raise ValueError("a step needs at least one tensor with at least one sample")
        largest = min(self._micro_batch or total, total)
        if not self._rehearsed:
            self._rehearse(loss_fn, _batches.cut(batch, 0, min(REHEARSAL_SAMPLES, total)))
        run = self._run_plain if self._runtime is None else self._run
        fresh: set[nn.Parameter] = set()
        loss_sum: torch.Tensor | None = None
        for param in self._params:
            param.grad = None
        done = 0
        while done < total:
            count = self._next_slice(total - done, largest)
            self._counts["micro_batch"] = count
            slice_loss = run(loss_fn, _batches.cut(batch, done, done + count), count, total, fresh)
            if slice_loss is None:
                continue
            loss_sum = slice_loss if loss_sum is None else loss_sum + slice_loss
            done += count
            self._counts["commits"] += 1
        for param in fresh:
            param.grad = self._sums[param]
        if self._arena and self._counts["steps"] < OPTIMIZER_WARM_UP_STEPS:
            self._arena.let_go()
        self.optimizer.step()
        self._counts["steps"] += 1
        self._counts["samples"] += total
        return loss_sum

    # --- one micro-batch ---------------------------------------------------------------------------------------------

    def _run_plain(
        self, loss_fn: Callable[..., torch.Tensor], slices: tuple, count: int, total: int, fresh: set[nn.Parameter]
    ) -> torch.Tensor:
        """Plain PyTorch: gradients accumulate where autograd puts them."""
        return self._forward_backward(loss_fn, slices, count / total)

    def _run(
        self, loss_fn: Callable[..., torch.Tensor], slices: tuple, count: int, total: int, fresh: set[nn.Parameter]
    ) -> torch.Tensor | None:
        """Forward, backward and commit of one slice; None if it was discarded and must run again."""
        runtime = self._runtime
        saved = self._save()
        runtime.begin(count, total)
        started = time.perf_counter()
        loss, failure = None, None
        try:
            self._arena.enter(count)
            try:
                loss = self._forward_backward(loss_fn, slices, count / total)
            finally:
                self._arena.leave()
        except Exception as why:  # whose fault it is, the arena's state decides
            if runtime.arena_state() == _runtime.SOUND:
                self._give_up()
                raise
            failure = _without_frames(why)
        if failure is None and runtime.commit_begin():
            try:
                loss = loss.clone()
                self._add_gradients(fresh)
                self._buffers.keep()
            finally:
                peak = runtime.arena_peak()
                runtime.commit_end(count, self._arena.outlived())
            runtime.plan_committed(count, peak, time.perf_counter() - started)
            return loss
        loss = None
        self._discard(count, saved)
        return None

    def _forward_backward(self, loss_fn: Callable[..., torch.Tensor], slices: tuple, share: float) -> torch.Tensor:
        if self._runtime is None or not self._cuda:
            return self._loss_and_gradients(loss_fn, slices, share)
        # Autograd's thread of the device serves every backward of the process. In this thread, the arena and the gate
        # know what belongs to the micro-batch, and leave what other threads train alone.
        with torch.autograd.set_multithreading_enabled(False):
            return self._loss_and_gradients(loss_fn, slices, share)

    def _loss_and_gradients(self, loss_fn: Callable[..., torch.Tensor], slices: tuple, share: float) -> torch.Tensor:
        loss = loss_fn(*slices)
        if self._runtime and self._runtime.arena_state() != _runtime.SOUND:
            raise _Discarded
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise TypeError("the loss function must return a scalar tensor, the mean loss of its slice")
        if share != 1.0:
            loss = loss * share
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _add_gradients(self, fresh: set[nn.Parameter]) -> None:
        """Adds the slice's gradients to the accumulators; the first of a step is copied."""
        firsts, addends = ([], []), ([], [])
        for param in self._params:
            grad = param.grad
            if grad is None:
                continue
            if param in fresh:
                into = addends
            else:
                into = firsts
                fresh.add(param)
            into[0].append(self._sums[param])
            into[1].append(grad)
            param.grad = None
        if firsts[0]:
            torch._foreach_copy_(*firsts)
        if addends[0]:
            torch._foreach_add_(*addends)

    def _rehearse(self, loss_fn: Callable[..., torch.Tensor], few: tuple) -> None:
        """Runs forward and backward once outside the arena and forgets the result.

        What libraries and modules create once (workspaces, handles, cached masks) is then not born in memory that is
        taken away, and lies close together.
        """
        saved = self._save()
        try:
            self._forward_backward(loss_fn, few, 1.0)
        except Exception as why:  # if it is not the small size that it minds, the first slice says so again
            _without_frames(why)
        finally:
            for param in self._params:
                param.grad = None
            self._restore(saved)
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._rehearsed = True

    # --- discarding --------------------------------------------------------------------------------------------------

    def _save(self) -> tuple:
        """What a micro-batch changes besides gradients: random state, and buffers of the model."""
        rng = torch.get_rng_state()
        cuda_rng = torch.cuda.get_rng_state() if self._cuda else None
        self._buffers.save()
        return rng, cuda_rng

    def _restore(self, saved: tuple) -> None:
        rng, cuda_rng = saved
        torch.set_rng_state(rng)
        if cuda_rng is not None:
            torch.cuda.set_rng_state(cuda_rng)
        self._buffers.restore()

    def _give_up(self) -> None:
        """The loss function failed by itself: nothing of this slice counts, and the caller hears of it."""
        for param in self._params:
            param.grad = None
        self._buffers.keep()
        self._runtime.discard()
        self._arena.let_go()

    def _discard(self, count: int, saved: tuple) -> None:
        runtime = self._runtime
        state = runtime.arena_state()
        for param in self._params:
            param.grad = None
        self._counts["discards"] += 1
        runtime.plan_discarded(count, state)
        runtime.discard()
        self._arena.let_go()
        if self._cuda:
            torch.clear_autocast_cache()
        self._restore(saved)
        if (left := self._survivors()) > 0:
            raise Survivors(
                f"{left} tensors of a discarded micro-batch are still referenced; the loss function must not keep "
                "tensors beyond its run (copy them out with .detach().clone(), or keep numbers from .item())"
            )

    def _survivors(self) -> int:
        """What still lives in memory that has gone (on CUDA, segments of torch's), after everything that may end it."""
        means = [gc.collect]
        if self._cuda:
            # Blocks that a side stream has used are only freed, and segments of a dropped pool only given back, when
            # torch's cache is emptied. cuBLAS keeps a workspace for a stream that the micro-batch was the first to use.
            means = [lambda: None, *means, torch._C._cuda_clearCublasWorkspaces]
        for end in means:
            if self._runtime.survivors() == 0:
                break
            end()
            if self._cuda:
                torch.cuda.empty_cache()
        return self._runtime.survivors()

    # --- planning ----------------------------------------------------------------------------------------------------

    def _next_slice(self, remaining: int, largest: int) -> int:
        """Samples of the next slice; waits for memory if not even the smallest permitted one fits."""
        if self._runtime is None:
            slices = -(-remaining // largest)
            return -(-remaining // slices)
        if self._planned_for != largest:
            self._runtime.plan_start(largest, 0 if self._adapt else 1)
            self._planned_for = largest
        while True:
            count, needed = self._runtime.plan(remaining)
            if count > 0:
                return count
            self._wait(needed, 1 if self._adapt else largest)

    def _wait(self, needed: int, count: int) -> None:
        """Waits until the arena could have ``needed`` bytes; an interrupt ends it."""
        runtime = self._runtime
        started = time.perf_counter()
        while not runtime.wait_memory(needed, WAIT_SLICE_MS):
            # Not the sum of what each holds now: a chunk on its way from one to another would be missing.
            within_reach = runtime.reachable_bytes()
            if needed > within_reach:
                raise OutOfMemory(
                    f"a micro-batch of {count} samples needs more than the {within_reach} bytes that this job could "
                    f"have of the pool's {runtime.pool_bytes()}; lower micro_batch, or give the pool more memory\n"
                    f"{shortage(runtime)}"
                )
        self._counts["wait_seconds"] += time.perf_counter() - started


class _Discarded(Exception):
    """The slice's memory has gone, so that backward would be for nothing."""


def _without_frames(failure: BaseException) -> BaseException:
    """The exception without its traceback, whose frames would keep the discarded tensors alive."""
    seen = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return failure
