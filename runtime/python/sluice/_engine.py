"""Runs global batches in micro-batches, and adds their gradients up; what comes after is the caller's."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sluice import _agreement, _batches, _checks, _recomputation, _runtime, _torch_compat
from sluice._arena import make_arena
from sluice._buffers import Buffers
from sluice._gradients import Gradients, separate_sums
from sluice._losses import Losses
from sluice._micro_batch import MicroBatch, refuse_survivors
from sluice._modules import Parts, are_same
from sluice._outside import Outside, code_of
from sluice._planning import Planner
from sluice._processes import Processes
from sluice._random import RandomState
from sluice._rehearsal import EagerRehearsal, Rehearsal
from sluice._stopwatch import Stopwatch
from sluice._trained import Trained
from sluice._trouble import TriesInVain, Trouble
from sluice._update import Update
from sluice._watch import Watch
from sluice.errors import SluiceError

#: Samples of the rehearsal before the first step: two, since batch statistics need more than one.
REHEARSAL_SAMPLES = 2

#: Optimizers make their state in the first step and need their most memory by the second; torch keeps that for them.
OPTIMIZER_WARM_UP_STEPS = 2

#: How long what other threads still hold of a discarded micro-batch is waited for.
THREADS_END_MS = 2000


def checked_micro_batch(micro_batch: Any) -> int | None:
    """The most samples in a slice. Raises TypeError or ValueError."""
    if micro_batch is not None and (isinstance(micro_batch, bool) or not isinstance(micro_batch, int)):
        raise TypeError(f"micro_batch must be a whole number of samples, or None, not {type(micro_batch).__name__}")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
    return micro_batch


def _wait_for_threads() -> None:
    time.sleep(0.001)


def _of_one_kind(params: list[nn.Parameter]) -> bool:
    return len({param.is_cuda for param in params}) == 1


class Engine:
    """The micro-batches of one model's training.

    Args:
        model: Module whose buffers forward may change.
        param_groups: Of the optimizer; read again before every batch.
        micro_batch: Most samples in a slice. None: the whole batch.
        adapt: Whether a slice may become smaller when memory is short. None: unless there are batch statistics.
        generators: Random generators that the loss function uses (see ``RandomState``).
        recompute: Switches activation checkpointing (see ``Step``); None: nothing does.
        processes: Those that train the model together, if the caller has their gradients reduced.

    Not thread-safe.
    """

    def __init__(self, model: nn.Module, param_groups: list[dict[str, Any]], micro_batch: int | None,
                 adapt: bool | None, generators: Iterable[Any], recompute: Any, processes: Processes | None = None) -> None:
        self._micro_batch = checked_micro_batch(micro_batch)
        self._model = model
        self._parts = Parts(model)
        self._inside = processes is not None and processes.inside
        if self._inside and adapt:
            raise SluiceError("processes that work together inside of micro-batches, as those of a model in shards, with tensor "
                              "parallelism or with SyncBatchNorm do, must have as many slices each, so that none can become smaller: "
                              "leave adapt out")
        if adapt is None:
            adapt = not self._inside and not _torch_compat.has_batch_statistics(model)
        self._trained = Trained(self._parts, param_groups)
        params = self._trained.look()
        self.cuda = params[0].is_cuda
        self._random = RandomState(generators, self.cuda)
        self.runtime = _runtime.attach(self.cuda)
        self._process = os.getpid()
        self.arena = make_arena(self.runtime, self.cuda) if self.runtime else None
        self.trouble = Trouble(self.runtime) if self.runtime else None
        if self.runtime:
            if processes is not None and processes.several and self.cuda and not _runtime.ranks_agree():
                raise _checks.collectives_are_plain()
            _checks.refuse_parallel(model, processes)
            if self._inside:
                self.runtime.work_together(1)
            if self.cuda:
                self.trouble.watch_cuda()
        self.agreement = None
        if self._inside and not self.cuda:
            self.agreement = _agreement.join(self.runtime, processes.group, processes.groups)
        self._rehearsed = self.runtime is None
        self.recomputation = _recomputation.find(recompute, model, self._inside)
        self._planner = Planner(self.runtime, adapt, processes is not None and processes.several, self.recomputation is not None)
        self.processes = processes
        if processes is not None:
            processes.follow(params)
        self.gradients = Gradients(params, self.runtime is not None, separate_sums if processes is None else processes.room)
        self.may_defer = _of_one_kind(params)  # commits: what is done at once to tensors on the CPU cannot be dropped
        self.buffers = Buffers(self._parts)
        self.outside = Outside(model)
        self._lost_unwatched = False  # the last try, which nobody has looked at
        self.running = False
        self.unresolved: MicroBatch | None = None  # its commit lies in the gate's queue, and nobody waits for it
        self._follow_later = False
        #: Whether a loss function has been seen that runs backward for something else than its loss.
        self.knows_other_backward = False
        self._in_vain = TriesInVain()
        self.stopwatch = Stopwatch(self.cuda)
        self.counts = {"steps": 0, "samples": 0, "commits": 0, "discards": 0, "micro_batch": 0, "recomputed": 0}

    def explained(self) -> contextlib.AbstractContextManager:
        """Extends the messages of exceptions that pass and that the pool has to do with."""
        return self.trouble.explained(lambda: self.counts["discards"]) if self.trouble else contextlib.nullcontext()

    def stats(self) -> dict[str, float]:
        """As ``Step.stats``."""
        discarded = self.runtime.discarded_ns() / 1e9 if self.runtime else 0.0
        return {**self.counts, "wait_seconds": self._planner.wait_seconds, "discarded_seconds": discarded}

    def micro_batches(self, batch: tuple, losses: Losses | None = None, scaler: torch.amp.GradScaler | None = None,
                      add: bool = False, update: Update | None = None, lazily: bool = False,
                      loss_fn: Any = None) -> Iterator[MicroBatch]:
        """Yields tries until every sample has been committed; the first of all is a rehearsal, which counts for nothing.

        Args:
            losses: Adds up the slices' losses.
            scaler: Scales them for backward.
            add: Whether to add to the gradients that are there, instead of starting anew.
            update: What follows, to be run by the last try before it is known to count, where that can be.
            lazily: Whether parameters are looked at only when a micro-batch's ``backward`` is called: then the device has
                the forward pass to do meanwhile.
            loss_fn: What computes the loss, if that is known.
        """
        total = _batches.size_of(batch)
        if total < 1:
            given = ", and ".join(map(_batches.described, batch)) or "nothing"
            raise ValueError(f"a step needs at least one tensor with at least one sample in dimension 0, and was given {given}")
        self.refuse_child()
        if self.running:
            raise RuntimeError("a step cannot begin inside of a micro-batch")
        if self.unresolved is not None:
            self.unresolved.close()
        if losses is not None:
            losses.samples = total
        if self.processes is not None:
            with self.asking(inside=False):
                self.processes.begin_batch(total)
            if self.runtime and self.cuda and self._inside:
                communicator = self.processes.communicator(self.gradients.params[0].device)
                if not self.runtime.end_with(communicator):
                    raise _checks.ranks_do_not_agree()
        self.stopwatch.start()
        if lazily and not self._inside:  # in shards, modules have other parameters while forward runs
            self.gradients.forget()
            self._follow_later = True
        else:
            self._follow_params()
            self.gradients.begin(add)
        largest = min(self._micro_batch or total, total)
        code = code_of(loss_fn)
        try:
            if not self._rehearsed:
                yield from self._rehearse(batch, total, largest, losses, scaler, loss_fn)
            done = 0
            while done < total:
                count = self._planner.next(total - done, largest)
                self.counts["micro_batch"] = count
                self._recompute(self._planner.recomputes)
                last = update if done + count == total else None
                overlaps = done + count == total and losses is not None and self._may_overlap()
                micro = MicroBatch(self, _batches.cut(batch, done, done + count), count, total, losses, scaler, last, overlaps, code)
                yield from self._tried(micro)
                if micro.committed:
                    done += count
                    if self.trouble:
                        self.trouble.forget_rehearsal()
        finally:
            if self.recomputes:  # between steps the model is as its user has it
                self._recompute(False)
        if update is None or not update.has_run:
            self.gradients.finish()
        self.stopwatch.stop()

    def _rehearse(self, batch: tuple, total: int, largest: int, losses: Losses | None, scaler: torch.amp.GradScaler | None,
                  loss_fn: Any) -> Iterator[MicroBatch]:
        """Yields rehearsals; where activations can be computed again, with and without, which must train the same."""
        compiled = _torch_compat.is_anything_compiled() or any(map(_torch_compat.is_compiled, (self._model, loss_fn)))
        traces: list[_recomputation.Trace | None] = []
        for again in (True, False) if self.recomputation else (False,):
            self._recompute(again)
            tried: list[Rehearsal] = []
            for kind, count in self._rehearsals(total, largest, compiled):
                tried.append(kind(self, _batches.cut(batch, 0, count), count, total, losses, scaler, code=code_of(loss_fn)))
                yield from self._tried(tried[-1])
                if kind is Rehearsal and not tried[-1].failed:
                    break
            traces.append(tried[0].trace)
        if self.recomputation:
            self._compare(*traces)
        self._rehearsed = True

    def _recompute(self, again: bool) -> None:
        if self.recomputation is not None:
            self.recomputation.set(again)

    def _compare(self, again: _recomputation.Trace | None, kept: _recomputation.Trace | None) -> None:
        """Raises SluiceError if they are not the same training; where that is not known activations are kept."""
        if again is not None and kept is not None:
            _recomputation.refuse_difference(kept, again, self._model)
            return
        print("sluice: recompute is left out: the loss function has failed for the few samples on which both ways are compared before "
              "the first step", file=sys.stderr, flush=True)
        self.recomputation = None
        self._planner.keep_activations()

    def trace(self) -> _recomputation.Trace | None:
        """What a rehearsal leaves, if there is something to compare it with."""
        return _recomputation.Trace(self._model, self.gradients.params, self._random) if self.recomputation else None

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in backward."""
        return self.recomputation is not None and self.recomputation.on

    def _may_overlap(self) -> bool:
        """Whether the last micro-batch's gradients may go to other processes while its backward runs: then it counts."""
        if self.processes is None or not self.processes.may_overlap or self.counts["steps"] < OPTIMIZER_WARM_UP_STEPS:
            return False
        if self.stopwatch.is_on:  # backward would end when others' gradients have come
            return False
        return not (self.runtime and self.runtime.serving())

    def _rehearsals(self, total: int, largest: int, compiled: bool) -> Iterator[tuple[type[Rehearsal], int]]:
        """The rehearsal, with how many samples, and another one should it fail.

        What torch.compile has seen with two samples it would compile for any number of them from then on, with slower code. So
        it sees a whole slice. That comes after one of two samples that it does not see: what libraries create among the
        tensors of a whole slice would keep the memory below it persistent when those have gone.
        """
        few = min(REHEARSAL_SAMPLES, total)
        if compiled:
            yield EagerRehearsal, few
            yield Rehearsal, self._planner.next(total, largest)
        yield Rehearsal, few

    def begin_gradients(self) -> None:
        """Looks at the parameters, if that was put off."""
        if self._follow_later:
            self._follow_later = False
            self._follow_params()
            self.gradients.start()

    def run(self, body: Callable[[MicroBatch], None], batch: tuple, **how: Any) -> Iterator[Any]:
        """Runs ``body`` as the block of every try. Yields what each committed one has kept."""
        for micro in self.micro_batches(batch, **how):
            micro.run(body)
            if micro.committed:
                yield micro.kept

    def make_room(self) -> None:
        """Before the optimizer runs for the first times: gives it the memory that torch has cached for the arena."""
        if self.arena and self.counts["steps"] < OPTIMIZER_WARM_UP_STEPS:
            self.arena.release()

    def count_step(self, batch: tuple) -> None:
        """A global batch has been trained."""
        self.counts["steps"] += 1
        self.counts["samples"] += _batches.size_of(batch)

    def _tried(self, micro: MicroBatch) -> Iterator[MicroBatch]:
        yield micro
        if not micro.entered:
            raise RuntimeError("every micro-batch must be entered: for micro in step.micro_batches(x): with micro as x: …")
        if self.running:
            raise RuntimeError("a micro-batch's block must end before the next one begins")
        if self.runtime and self.cuda:
            _checks.refuse_recorded_graphs(torch.cuda.current_device())

    def _follow_params(self) -> None:
        """Parameters may be frozen, thawed and added between steps."""
        self._parts.refresh()
        params = self._trained.look()
        if not are_same(params, self.gradients.params):
            if self.processes is not None:
                self.processes.follow(params)
            self.gradients.follow(params)
            self.may_defer = _of_one_kind(params)

    # --- what micro-batches need ---------------------------------------------------------------------------------------

    def asking(self, inside: bool) -> contextlib.AbstractContextManager:
        """In it, this thread asks other processes before it makes a collective; ``inside`` of a micro-batch."""
        return self.agreement.asking(inside) if self.agreement else contextlib.nullcontext()

    def commit_begin(self, may_defer: bool) -> int:
        return self.agreement.commit_begin() if self.agreement else self.runtime.commit_begin(may_defer)

    def refuse_child(self) -> None:
        """Raises SluiceError in a forked child of the process that has made this: it has the memory, but no place in the pool."""
        if self.runtime and os.getpid() != self._process:
            raise SluiceError(
                "this step was made before the process was forked, and a forked child of a training process cannot train in the "
                "pool. Have the child started anew, by multiprocessing's start method spawn, and it is a job of its own; or make the "
                "model and its step in the child, where they train without sharing")

    def storages(self) -> set[int]:
        """Addresses of the storages of parameters and buffers, which lie outside the arena."""
        return _batches.storages_of([*self._model.parameters(), *self._model.buffers(), *self.gradients.params])

    def save(self, batch: tuple = ()) -> None:
        """Remembers what a micro-batch with that slice changes besides gradients: random state, buffers of the model, and what is
        known outside of it."""
        self._random.save()
        self.buffers.save()
        self.outside.save(batch)

    def watch(self, batch: tuple, code: Any, is_eager: bool = False) -> Watch | None:
        """Has the micro-batch that begins looked at, should it change something outside of the model that is not known.

        All that torch.compile has made would be compiled again for the hooks that tell of modules.
        """
        modules = is_eager or not _torch_compat.is_anything_compiled()
        if not self.outside.is_known(code):
            return self.outside.watch(modules, not self._inside, batch)
        return self.outside.watch(True, False) if self._lost_unwatched and modules else None

    def refuse_outside(self, watch: Watch | None) -> None:
        """Raises SluiceError if a micro-batch has changed what cannot be put back, should it be discarded."""
        if watch is not None:
            watch.refuse_gradients(set(map(id, self.gradients.params)))
            if self._lost_unwatched:
                self._lost_unwatched = False
                watch.refuse_changes()

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """What runs in it has never been, but for gradients."""
        self.save()
        try:
            with self.outside.watch(not _torch_compat.is_anything_compiled(), not self._inside):
                yield
        finally:
            self.restore()

    def foresee(self) -> None:
        """To be called where the device has something to do: gets what the next ``save`` would have to wait for."""
        self._random.foresee()

    def abandon(self) -> None:
        """A try has been left where it was."""
        self.gradients.forget()
        if self.processes is not None:
            self.processes.reset()

    def restore(self, rewind: bool = True) -> None:
        """Puts it back; without ``rewind`` all but random state."""
        if rewind:
            self._random.restore()
        self.buffers.restore()
        self.outside.restore()

    def discard(self, size: int, rewind: bool = True) -> None:
        """Ends a micro-batch of so many samples that has lost its memory, and puts everything back; without ``rewind`` all
        but random state, which others have used since.

        Raises:
            Survivors: if some of its tensors are still referenced.
        """
        runtime = self.runtime
        state = runtime.arena_state()
        self.abandon()
        self.counts["discards"] += 1
        self._in_vain.discarded(self.counts["commits"], size)
        self._lost_unwatched = not self.outside.is_watched
        runtime.plan_discarded(size, int(self.recomputes), state)
        runtime.discard()
        self.arena.release_all()
        torch.clear_autocast_cache()
        self.restore(rewind)
        refuse_survivors(self._survivors())

    def _survivors(self) -> int:
        """What still lives in memory that has gone (on CUDA, segments of torch's), after everything that may end it."""
        means = [gc.collect]
        if self.cuda:
            # Blocks that a side stream has used are only freed, and segments of a dropped pool only given back, when
            # torch's cache is emptied. cuBLAS keeps a workspace for a stream that the micro-batch was the first to use.
            means = [lambda: None, *means, _torch_compat.clear_cublas_workspaces]
        if self.agreement:
            means += [_wait_for_threads] * THREADS_END_MS  # gloo's let go of what they have sent a moment later
        for end in means:
            if self.runtime.survivors() == 0:
                break
            end()
            if self.cuda:
                torch.cuda.empty_cache()
        return self.runtime.survivors()
