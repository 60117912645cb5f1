"""Entering the step arena, so that a micro-batch's allocations land in memory that can be taken away as a whole."""

from __future__ import annotations

import sys

import torch

from sluice._runtime import Runtime


class HostArena:
    """On the host the runtime's own allocator answers, for the thread that has entered."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def enter(self, samples: int) -> None:
        """Before a micro-batch of so many samples."""
        self._runtime.enter(1)

    def leave(self) -> None:
        self._runtime.enter(0)

    def outlived(self) -> bool:
        """The runtime sees it itself."""
        return False

    def let_go(self) -> None:
        """Nothing to do: what no tensor uses is free."""


class CudaArena:
    """On CUDA torch's own caching allocator, over segments from the runtime.

    The pool is entered for the thread that runs the step alone, which runs backward too (see ``Step``): what other
    threads allocate meanwhile is never taken away. It is entered only while a micro-batch runs: an entered pool keeps the
    out-of-memory path from emptying the cache, and blocks of side streams from being reused.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._device = torch.cuda.current_device()
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            runtime.path, "sluice_arena_alloc", "sluice_arena_free"
        )
        self._pool: torch.cuda.MemPool | None = None
        self._samples = 0
        self._generation = 0
        self._entered = False
        self._kept = False  # whether an arena was kept for something that outlived its micro-batch

    def enter(self, samples: int) -> None:
        # Segments of another size of micro-batch would lie beside those that this one needs: torch cannot free them
        # while the pool is entered.
        if samples != self._samples or self._generation != self._runtime.generation():
            self.let_go()
        self._samples = samples
        if self._pool is None:
            self._pool = torch.cuda.MemPool(self._allocator.allocator())
            self._generation = self._runtime.generation()
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self._pool.id)
        self._entered = True

    def leave(self) -> None:
        if self._entered:
            # Every end is paired with a release, else a dropped pool goes on counting in reserved_bytes.
            torch._C._cuda_endAllocateToPool(self._device, self._pool.id)
            torch._C._cuda_releasePool(self._device, self._pool.id)
            self._entered = False

    def outlived(self) -> bool:
        """Whether anything made in the committed micro-batch lives on."""
        if not self._lives():
            return False
        torch.clear_autocast_cache()  # of an autocast that the user has entered around the step
        if not self._lives():
            return False
        if not self._kept:
            self._kept = True
            print(
                "sluice: tensors or library workspaces made in a micro-batch live on after it. They stay as they are, in "
                "memory that is not handed over any more; better copy what you need: .item(), or .cpu()",
                file=sys.stderr,
            )
        return True

    def _lives(self) -> bool:
        return self._pool is not None and not torch._C._cuda_checkPoolLiveAllocations(
            self._device, self._pool.id, set()
        )

    def let_go(self) -> None:
        """Forgets the pool and what torch has cached of it; its segments go back to the runtime, which may have given
        their memory away."""
        if self._pool is not None:
            torch.cuda.synchronize(self._device)  # nothing may read them any more
            self._pool = None
            if self._kept:
                torch.cuda.empty_cache()  # what lived on in an earlier pool may have gone; only this frees its segments


def make_arena(runtime: Runtime, cuda: bool) -> HostArena | CudaArena:
    return CudaArena(runtime) if cuda else HostArena(runtime)
