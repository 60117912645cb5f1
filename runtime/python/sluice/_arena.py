"""Entering the step arena, so that a micro-batch's allocations land in memory that can be taken away as a whole."""

from __future__ import annotations

import contextlib
import sys
import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch

from sluice import _torch_compat
from sluice._runtime import Runtime

# Of what lives at once: if torch's segments come to more than that beyond it, one large segment does better.
FRAGMENTATION = 1 / 16


class HostArena:
    """On the host the runtime's own allocator answers, for the thread that has entered."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def enter(self, samples: int, recomputes: bool) -> None:
        """Before a micro-batch of so many samples."""
        self._runtime.enter(1)

    def leave(self) -> None:
        self._runtime.enter(0)

    def outlived(self) -> bool:
        """The runtime sees it itself."""
        return False

    def needed_bytes(self) -> tuple[int, int]:
        """What the micro-batch that ends has needed, twice (see ``CudaArena``)."""
        return self._runtime.arena_peak(), self._runtime.arena_peak()

    def release(self) -> None:
        """Nothing to do: what no tensor uses is free."""

    def release_all(self) -> None:
        """Neither here."""


@dataclass
class Layout:
    """How the segments of a micro-batch lie, for one kind."""

    most_bytes: int = 0  # of all segments, so far
    whole_bytes: int = 0  # of the one that all the rest is to fit into; 0: as torch asks for them
    final: bool = False


class CudaArena:
    """On CUDA torch's own caching allocator, over segments from the runtime.

    Torch asks for a segment where no block that is cached is large enough, and never joins blocks of two: with tensors of
    many sizes, as in convolutional networks, much of the memory is then of no use. So a micro-batch that has shown
    how many bytes live at once, in segments that come to much more, gets one segment of that size from the next time on.
    Where that does not help, since tensors are made on several streams or the allocator's settings keep large blocks from
    being split, it is left to torch again.

    The pool is entered for the thread that runs the step alone, which runs backward too (see ``Step``): what other
    threads allocate meanwhile is never taken away. It is entered only while a micro-batch runs: an entered pool keeps the
    out-of-memory path from emptying the cache, and blocks of side streams from being reused.
    """

    _all: ClassVar[weakref.WeakSet[CudaArena]] = weakref.WeakSet()

    def __init__(self, runtime: Runtime) -> None:
        _torch_compat.need("gpu")
        self._all.add(self)
        self._runtime = runtime
        self._device = torch.cuda.current_device()
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            runtime.path, "sluice_arena_alloc", "sluice_arena_free"
        )
        self._pool: torch.cuda.MemPool | None = None
        self._kind = 0, False  # of micro-batch: its samples, and whether activations are computed again in backward
        self._layouts: dict[tuple[int, bool], Layout] = {}  # by kind
        self._lies_otherwise = False  # than the layout of this kind now says
        self._outside_bytes = 0  # allocated when this pool was made
        self._generation = 0
        self._entered = False
        self._kept = False  # whether an arena was kept for something that outlived its micro-batch

    def enter(self, samples: int, recomputes: bool) -> None:
        # Segments of another size of micro-batch would lie beside those that this one needs: torch cannot free them
        # while the pool is entered.
        kind = samples, recomputes
        if kind != self._kind or self._lies_otherwise or self._generation != self._runtime.generation():
            self.release()
        self._kind = kind
        fresh = self._pool is None
        if fresh:
            self._pool = torch.cuda.MemPool(self._allocator.allocator())
            self._generation = self._runtime.generation()
            self._outside_bytes = self._allocated_bytes()["current"]
        _torch_compat.begin_allocating(self._device, self._pool)
        self._entered = True
        if fresh:
            self._make_whole(self._layout().whole_bytes)

    def leave(self) -> None:
        if self._entered:
            _torch_compat.end_allocating(self._device, self._pool)
            self._entered = False

    def outlived(self) -> bool:
        """Whether anything made in the committed micro-batch lives on."""
        if self._lives():
            torch.clear_autocast_cache()  # of an autocast that the user has entered around the step
        if not self._lives():
            self._choose_layout()
            return False
        if not self._kept:
            self._kept = True
            print(
                "sluice: tensors or library workspaces made in a micro-batch live on after it. They stay as they are, in "
                "memory that is not handed over any more; better copy what you need: .item(), or .cpu()",
                file=sys.stderr,
            )
        return True

    def needed_bytes(self) -> tuple[int, int]:
        """What the micro-batch that ends has needed; and what one of so many samples needs at first, from which one foresees
        what others need."""
        return self._runtime.arena_peak(), max(self._runtime.arena_peak(), self._layout().most_bytes)

    def _allocated_bytes(self) -> dict[str, int]:
        return torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]

    def _layout(self) -> Layout:
        return self._layouts.setdefault(self._kind, Layout())

    def _make_whole(self, size: int) -> None:
        """Has torch cache one segment of so many bytes."""
        if size > 0:
            with contextlib.suppress(torch.OutOfMemoryError):  # then torch asks for smaller ones, and says so if it gets none
                torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(size, self._device))

    def _choose_layout(self) -> None:
        """After a micro-batch of which nothing lives on."""
        layout, segments = self._layout(), self._runtime.arena_peak()
        if layout.final or segments <= layout.most_bytes:
            return
        layout.most_bytes = segments
        # If the peak was somebody else's, it is larger than this micro-batch's, and so is what is kept for it.
        lived = self._allocated_bytes()["peak"] - self._outside_bytes
        if lived * (1 + FRAGMENTATION) >= segments:
            return
        layout.final = layout.whole_bytes >= lived  # it has been tried
        layout.whole_bytes = 0 if layout.final else lived
        self._lies_otherwise = True

    def _lives(self) -> bool:
        return self._pool is not None and not _torch_compat.is_empty(self._device, self._pool)

    def release(self) -> None:
        """Forgets the pool and what torch has cached of it; its segments go back to the runtime, which may have given
        their memory away."""
        self._lies_otherwise = False
        if self._pool is not None:
            torch.cuda.synchronize(self._device)  # nothing may read them any more
            self._pool = None
            if self._kept:
                torch.cuda.empty_cache()  # what lived on in an earlier pool may have gone; only this frees its segments

    def release_all(self) -> None:
        """The same of each step of this process: memory that has gone is gone for what any of them has cached."""
        for arena in list(self._all):
            if arena._device == self._device and not arena._entered:
                arena.release()


def make_arena(runtime: Runtime, cuda: bool) -> HostArena | CudaArena:
    return CudaArena(runtime) if cuda else HostArena(runtime)
