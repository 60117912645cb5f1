"""One try at a slice of a global batch: forward, backward, and then commit or discard."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sluice import _batches, _checks, _losses, _runtime
from sluice._backward import empty_backward_queue, has_doubled, has_run_before, release_frames_of, run_backward
from sluice._names import BoundNames
from sluice.errors import SluiceError, Survivors

if TYPE_CHECKING:
    from sluice._engine import Engine
    from sluice._update import Update
    from sluice._watch import Watch


#: How long one wait for a commit lasts before Python looks at its signals again.
RESOLVE_SLICE_MS = 50


class MicroBatch:
    """A try at a slice. ``Step.micro_batches`` makes them; each is entered with ``with`` once.

    States:  made → running → committed | discarded | failed

    An exception in the block of a micro-batch whose memory was taken away comes from that, and ends in the block: the
    slice is tried again. Local variables that such a block has bound get back what they were, or None. Those that a
    committed block has bound to tensors (also in lists, tuples and mappings) are bound to detached copies.

    Not thread-safe.
    """

    #: Whether it is one that other processes keep or run again as well.
    is_kept = True
    #: Whether torch.compile leaves everything as it is in it.
    is_eager = False

    def __init__(self, engine: Engine, batch: tuple, size: int, total: int, losses: _losses.Losses | None,
                 scaler: torch.amp.GradScaler | None, update: Update | None = None, overlaps: bool = False,
                 code: Any = None) -> None:
        self._engine = engine
        self._batch = batch
        self._losses = losses
        self._scaler = scaler
        self._update = update
        self._overlaps = overlaps  # its gradients are sent while backward runs; nothing takes it away then
        self._code = code  # of what runs in it
        self._watch: Watch | None = None
        self._names: BoundNames | None = None
        self._given: set[int] = set()
        self._threading: Any = None
        self._asking: Any = None
        self._part: torch.Tensor | None = None
        self._weight: float | torch.Tensor | None = None
        self._started = 0.0
        self._kept: Any = None
        self.entered = False
        self.committed = False
        self.size = size
        self.share = size / total
        self.total = total
        self.thread = 0

    @property
    def params(self) -> list[nn.Parameter]:
        return self._engine.gradients.params

    @property
    def slices(self) -> tuple:
        """The slice, of each object that makes up the batch; empty when the block has ended."""
        return self._batch

    # --- what the block does -------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Runs backward for the slice's loss, scaled by what it counts in its batch. Once in a block.

        Args:
            loss: Scalar, the slice's mean loss (or sum, with ``reduction="sum"``).
            weight: What the slice counts, a number or a scalar tensor, not negative, if its loss is a mean over something
                else than samples: a number of tokens.
        """
        if not self.entered or self.thread == 0:
            raise RuntimeError("backward belongs into the micro-batch's block: with micro: micro.backward(loss)")
        if self._part is not None:
            raise RuntimeError("backward has run for this micro-batch; add its losses up, and call backward once")
        runtime = self._engine.runtime
        if runtime and runtime.arena_state() != _runtime.SOUND:
            raise Discarded
        gradients = self._engine.gradients
        earlier = [] if self._engine.knows_other_backward else gradients.earlier()
        self._engine.begin_gradients()
        weight = _losses.checked_weight(weight)
        part = self._losses.part(_losses.checked_loss(loss), weight, self.share)
        if isinstance(weight, float) and weight == 0.0:
            part = torch.zeros_like(part)  # a mean over nothing is not a number
        else:
            if self._overlaps:
                self._engine.processes.start(gradients, self._losses, weight)
            scaled = part if self._engine.processes is None else self._engine.processes.scaled(part, self._losses)
            root = scaled if self._scaler is None else self._scaler.scale(scaled)
            run_backward(root)
            if earlier and not self._overlaps:
                self._refuse_doubled(earlier, loss, root)
        self.ran(part, weight)

    def _refuse_doubled(self, earlier: list[tuple[nn.Parameter, torch.Tensor]], loss: torch.Tensor, root: torch.Tensor) -> None:
        """The block has run a backward of its own; the first that does is looked at."""
        engine = self._engine
        doubled = has_doubled(earlier, engine.gradients.params, loss.detach(), root.detach())
        if engine.runtime and engine.runtime.arena_state() != _runtime.SOUND:
            raise Discarded
        if doubled:
            raise has_run_before()
        engine.knows_other_backward = True

    def ran(self, part: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backward has run, on what the slice adds to the batch's loss."""
        self._part, self._weight = part.detach(), weight

    def keep(self, value: Any) -> None:
        """Has a value copied out of the arena at the commit, for ``kept``."""
        self._kept = value

    @property
    def kept(self) -> Any:
        return self._kept if self.committed else None

    # --- its course ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        """Begins. Returns the slice: one object if the batch is one, else a tuple."""
        frame = sys._getframe(1)
        self._code = frame.f_code, frame.f_lineno
        self.begin()
        if self._engine.runtime:
            self._names = BoundNames(frame)
            self._given = _batches.storages_of(self._batch)
        return self._batch[0] if len(self._batch) == 1 else self._batch

    def __exit__(self, _kind: type | None, failure: BaseException | None, _where: Any) -> bool:
        return self.end(failure)

    def run(self, body: Callable[[MicroBatch], None]) -> None:
        """Runs ``body`` as the block."""
        self.begin()
        try:
            body(self)
        except BaseException as why:
            if not self.end(why):
                raise
        else:
            self.end(None)

    def begin(self) -> None:
        """Remembers what the slice will change, and enters the arena."""
        engine = self._engine
        if self.entered:
            raise RuntimeError("a micro-batch is one try; the next one comes out of micro_batches")
        if engine.running:
            raise RuntimeError("a micro-batch cannot begin inside of another; end its block first")
        engine.refuse_child()
        self.entered = True
        if engine.runtime:
            engine.save(self._batch)
            self._enter()
            # From here it is like a commit; if its memory has gone already, it is like any other.
            self._overlaps = self._overlaps and engine.runtime.commit_begin(False) != _runtime.TAKEN_AWAY
        self.thread = threading.get_ident()
        if engine.processes:
            engine.processes.begin_micro_batch()
        self._asking = engine.asking(self.is_kept)
        self._asking.__enter__()
        if engine.runtime and not self._overlaps:
            self._watch = engine.watch(self._batch, self._code, self.is_eager)
        if self._watch is not None:
            self._watch.__enter__()
        engine.running = True
        _checks.running.append(self)

    def _enter(self) -> None:
        engine = self._engine
        while not engine.runtime.commit_made(RESOLVE_SLICE_MS):
            pass  # the last one's; Python looks at its signals
        engine.runtime.begin(self.size, self.total)
        self._started = time.perf_counter()
        if engine.cuda:
            # Autograd's thread of the device serves every backward of the process. In this thread, the arena and the
            # gate know what belongs to the micro-batch, and leave what other threads train alone.
            self._threading = torch.autograd.set_multithreading_enabled(False)
        try:
            engine.arena.enter(self.size, engine.recomputes)
        except BaseException:
            self._leave()
            engine.runtime.discard()
            raise

    def _leave(self) -> None:
        self._engine.arena.leave()
        if self._threading is not None:
            self._threading.__exit__(None, None, None)
            self._threading = None

    def end(self, failure: BaseException | None) -> bool:
        """Commits or discards. True if the exception that ended the block comes from memory that was taken away."""
        engine = self._engine
        _checks.running.remove(self)
        engine.running = False
        if self._watch is not None:
            self._watch.__exit__()
        self._asking.__exit__(None, None, None)
        if engine.processes:
            engine.processes.end_micro_batch()
        self.thread = 0
        self._batch = ()  # and with it the gradients of inputs that have asked for one
        try:
            if not engine.runtime:
                return self._end_plainly(failure)
            self._leave()
            return self._end(failure)
        finally:
            self._names = self._watch = None

    def _end_plainly(self, failure: BaseException | None) -> bool:
        if failure is not None or self._part is None:
            self._engine.gradients.forget()
            if failure is None:
                raise _no_backward()
            return False
        if self._overlaps:
            self._engine.processes.send_rest()
        self._kept = _batches.copied(self._kept)
        self._add_loss()
        self._count()
        return False

    def _end(self, failure: BaseException | None) -> bool:
        engine = self._engine
        sound = engine.runtime.arena_state() == _runtime.SOUND
        if failure is not None and (sound or not isinstance(failure, Exception)):
            self._give_up()
            engine.trouble.explain(failure, engine.counts["discards"])
            return False
        if failure is None and self._part is None and sound:
            self._give_up()
            raise _no_backward()
        if failure is None and sound:
            self._refuse_outside()
            engine.gradients.make_sums()
        # Names of the caller's that get copies cannot be given back what they had once other code has run.
        may_defer = engine.may_defer and self._names is None
        if failure is None and self._commit_apart(may_defer):
            return False
        if failure is not None:
            release_frames_of(failure)
        self._part = self._weight = self._kept = None
        if self._names is not None:
            self._names.take_back()
        engine.discard(self.size)
        return True

    def _refuse_outside(self) -> None:
        try:
            self._engine.refuse_outside(self._watch)
        except SluiceError:
            self._engine.outside.restore()
            self._give_up()
            raise

    def _commit_apart(self, may_defer: bool) -> bool:
        """Makes the slice count. False: nothing has changed, because the memory had gone when its turn came."""
        engine, runtime = self._engine, self._engine.runtime
        gradients = engine.gradients.state()
        losses = self._losses.state() if self._losses is not None else None
        failure: BaseException | None = None
        needed = (0, 0)
        engine.unresolved = self
        try:
            start = _runtime.BEGUN if self._overlaps else engine.commit_begin(may_defer)
        except BaseException:  # other processes had to be asked, and cannot be
            engine.unresolved = None
            self._give_up()
            raise
        if start == _runtime.TAKEN_AWAY:
            engine.unresolved = None
            return False
        deferred = start == _runtime.DEFERRED
        # The optimizer belongs to the commit, then, and its gradients need not be copied.
        in_place = not deferred and self._update is not None and self.size == self.total and not runtime.serving()
        try:
            outlived = True
            try:
                self._copy_out(in_place)
                if in_place:
                    self._add_loss()
                    self._update.run(may_be_dropped=False)
                outlived = engine.arena.outlived()
            finally:
                needed = engine.arena.needed_bytes()
                runtime.commit_end(self.size, outlived)
            if not in_place:
                self._add_loss()
            if deferred and self._update is not None:
                self._update.run()
            if deferred:
                engine.foresee()
        except BaseException as why:
            failure = why
        if not self._resolved():
            engine.gradients.put_back(gradients)
            if self._losses is not None:
                self._losses.put_back(losses)
            if self._update is not None:
                self._update.take_back()
            if failure is None:
                return False
            if isinstance(failure, Exception):
                release_frames_of(failure)
                return False
            with contextlib.suppress(Survivors):  # what has interrupted it holds them
                engine.discard(self.size)
        if failure is not None:
            engine.gradients.clear()
            try:
                raise failure
            finally:
                del failure  # a frame and an exception that hold each other would keep the slice's tensors
        runtime.plan_committed(self.size, int(engine.recomputes), *needed, time.perf_counter() - self._started)
        self._count()
        return True

    def _resolved(self) -> bool:
        """Whether the commit counts. Python looks at its signals while it waits; if a handler raises, ``close`` asks again."""
        while (counts := self._engine.runtime.commit_resolve(RESOLVE_SLICE_MS)) == _runtime.OPEN:
            pass
        self._engine.unresolved = None
        return counts == 1

    def close(self) -> None:
        """Ends a commit whose step was left by an interrupt."""
        if self._resolved():
            self._count()
            return
        if self._update is not None:
            self._update.take_back()
        self._engine.discard(self.size, rewind=False)

    def _copy_out(self, in_place: bool) -> None:
        """What the slice leaves, out of the arena; ``in_place``: all but its gradients."""
        engine = self._engine
        self._part = self._part.clone()
        if isinstance(self._weight, torch.Tensor):
            self._weight = self._weight.clone()
        self._kept = _batches.copied(self._kept)
        if self._names is not None:
            outside = engine.storages() | self._given
            self._names.rebind(lambda value: _promoted(value, outside))
        if self._overlaps:
            engine.processes.send_rest()
            engine.processes.take(engine.gradients)
        engine.gradients.take(in_place)
        engine.buffers.keep()
        engine.outside.keep()
        if not engine.cuda:
            torch.clear_autocast_cache()  # of an autocast that the user has entered around the step

    def _add_loss(self) -> None:
        if self._losses is not None:
            self._losses.add(self._part, self._weight)

    def _count(self) -> None:
        self.committed = True
        self._engine.outside.resolve(self._code)
        self._engine.counts["commits"] += 1
        self._engine.counts["recomputed"] += self._engine.recomputes

    def _give_up(self) -> None:
        """The block failed by itself: nothing of this slice counts, and the caller hears of it."""
        engine = self._engine
        empty_backward_queue()
        engine.abandon()
        engine.buffers.keep()
        engine.outside.keep()
        if engine.cuda:
            torch.cuda.synchronize()  # what lies in the gate's queue when the micro-batch ends is dropped
        sound = engine.runtime.arena_state() == _runtime.SOUND
        if self._overlaps:
            engine.runtime.commit_end(self.size, True)
        engine.runtime.discard()
        if sound:
            engine.arena.release()
            engine.outside.resolve()
        else:
            engine.arena.release_all()
            engine.buffers.restore()
            engine.outside.restore()


class Discarded(Exception):
    """The slice's memory has gone, so that backward would be for nothing."""


def _no_backward() -> SluiceError:
    return SluiceError("a micro-batch has ended without backward; call micro.backward(loss) in its block, and to leave a "
                       "slice out, give it weight 0")


def _promoted(value: Any, outside: set[int]) -> Any:
    return _batches.mapped(value, lambda tensor: tensor if _lies_in(tensor, outside) else tensor.detach().clone())


def _lies_in(tensor: torch.Tensor, storages: set[int]) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in storages


def refuse_survivors(left: int) -> None:
    """Raises Survivors if something still lives in memory that has gone."""
    if left > 0:
        raise Survivors(
            f"{left} tensors of a discarded micro-batch are still referenced; the loss function, or the block, must not "
            "keep tensors beyond its run (copy them out with .detach().clone(), or keep numbers from .item())"
        )
