"""Which chunks a KV cache has: it grows when requests would wait for blocks, and gives chunks back when they are idle, or demanded.

    absent ──grow──► owned ──idle, or demanded──► leaving ──the steps in flight have ended──► absent
                       ▲                             │
                       └─────────────grow────────────┘

Where it is ordered that all goes, chunk 0 and what requests have go, too; then it *rests*, and comes back with chunk 0 when the order has
ended.

Nothing here knows vLLM, torch or the pool: blocks are made and forgotten, and requests preempted, by what the caller passes, and the
memory is a `Space`.

Thread-safety: none; the owner locks.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.vllm._free_blocks import Block, FreeBlocks
from sluice.vllm._layout import Layout


class Space(Protocol):
    """A range of addresses, behind whose chunks memory comes and goes."""

    def back(self, chunks: Sequence[int], patience_ms: int) -> bool:
        """All of these get memory, zeroed, or none."""

    def give_back(self, chunks: Sequence[int]) -> None:
        """Nothing reaches these any more."""

    def demanded(self) -> int:
        """How many chunks somebody else wants, and has not got."""

    def refuse_rest(self) -> None:
        """No more can be given for what is demanded now."""

    def show_used(self, used_bytes: int) -> None:
        """So much of it is in use by requests."""

    def ordered_away(self) -> bool:
        """Whether all is to go, and has not."""

    def rest(self, needed: int) -> None:
        """All has gone. Until the order has ended nothing gets memory; then so many chunks are needed first."""


@dataclass(frozen=True)
class Keeping:
    """What is kept though no request uses it."""

    spare: int = 1  #: empty chunks
    cached: int = 8  #: chunks for the cached blocks that they have
    linger_s: float = 1.0  #: so long after the last growth nothing is given back that nobody demands


@dataclass
class Counts:
    """Of all chunks since the beginning; `demanded` and `preempted` of what was given to others. `grown` while somebody waited, and `ahead`."""

    grown: int = 0
    refused: int = 0
    returned: int = 0
    kept_on_the_way: int = 0
    ahead: int = 0
    demanded: int = 0
    preempted: int = 0
    rested: int = 0
    most: int = 0


def requests_to_preempt(held: Sequence[tuple[Any, Collection[int]]], wanted: int) -> list[Any]:
    """Those whose end leaves at least `wanted` chunks without a request, or all.

    Chunk after chunk, from the one that the fewest requests hold on: of those with as few the one whose requests come last.

    Args:
        held: Each request, in the order in which they are served, and the chunks that it has blocks in.
        wanted: Number of chunks.
    """
    holders: dict[int, set[int]] = {}
    for place, (_, chunks) in enumerate(held):
        for chunk in chunks:
            holders.setdefault(chunk, set()).add(place)
    chosen: set[int] = set()
    while wanted > 0 and holders:
        cheapest = min(holders, key=lambda chunk: (len(holders[chunk]), -min(holders[chunk]), chunk))
        gone = set(holders[cheapest])
        chosen |= gone
        for chunk in list(holders):
            holders[chunk] -= gone
            if not holders[chunk]:
                del holders[chunk]
                wanted -= 1
    return [request for place, (request, _) in enumerate(held) if place in chosen]


class ElasticBlocks:
    """The blocks of the chunks that there are, and what becomes of chunks. Chunk 0 is there from the beginning, and stays unless all
    goes: its first block stands for none.

    Args:
        layout: Where blocks lie.
        space: Where chunk 0 has memory already.
        keeping: What is kept without use.
        make_block: Of an id.
        forget: Has a cached block found no more.
        clock: Seconds.
    """

    def __init__(self, layout: Layout, space: Space, keeping: Keeping, make_block: Callable[[int], Any],
                 forget: Callable[[Any], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.layout = layout
        self.free = FreeBlocks(layout)
        self.counts = Counts(most=1)
        self.blocks: dict[int, Any] = {}  # by id, of the chunks that there are
        self._space = space
        self._keeping = keeping
        self._make_block = make_block
        self._forget = forget
        self._clock = clock
        self._grown_at = clock()
        self._absent = list(range(1, layout.chunks))  # a heap
        self._leaving: deque[tuple[int, int]] = deque()  # the last step that may use it, and the chunk; in this order
        self.resting = False
        self._shown = 0  # live blocks that others have been told of
        self._ahead: int | None = None  # the chunk that is being asked for before it is needed
        self._may_ask_ahead = False  # once for each that has come
        self._launched = self._ended = self._over = 0  # steps; `_over` of them use nothing any more, whether or not they have ended
        self.null_block = make_block(0)
        self.blocks[0] = self.null_block
        self._add(0)

    @property
    def owned(self) -> int:
        """Chunks that blocks may be taken from."""
        return self.layout.chunks - len(self._absent) - len(self._leaving) - (self._ahead is not None)

    @property
    def computing(self) -> bool:
        """Whether a step is in flight."""
        return self._launched != self._finished

    @property
    def _finished(self) -> int:
        return max(self._ended, self._over)

    def chunks_of(self, block_ids: Iterable[int]) -> set[int]:
        return {self.layout.chunk_of(block_id) for block_id in block_ids}

    def launched(self) -> int:
        """A step that may use all that is live is in flight from now on; which one it is."""
        self._launched += 1
        return self._launched

    def ended(self) -> int:
        """The one that was launched first among those in flight has ended; which one it is."""
        if self._ended == self._launched:
            raise RuntimeError("a step has ended that was not launched")
        self._ended += 1
        return self._ended

    def is_over(self, step: int) -> None:
        """This one, and those before it, use nothing any more, though nobody may have taken in what they made."""
        if step > self._launched:
            raise RuntimeError("a step is over that was not launched")
        self._over = max(self._over, step)

    def grow(self, patience_ms: int = 0) -> bool:
        """One more chunk. Not while others demand some, or all, and not beyond what the pool grants."""
        if self.resting and self._come_back(patience_ms):
            return True
        if self.resting or self._is_going() or self._space.demanded():
            self.counts.refused += 1
            return False
        if self._leaving:
            _, chunk = self._leaving.pop()
            self.counts.kept_on_the_way += 1
        elif self._absent and self._space.back(self._absent[:1], patience_ms):
            chunk = heapq.heappop(self._absent)
            self.counts.grown += 1
        else:
            self.counts.refused += 1
            return False
        self._add(chunk)
        self._may_ask_ahead = True
        return True

    def wants_ahead(self) -> bool:
        """Whether it has grown of late, and less is free than a chunk has, so that the next one may be asked for before somebody waits for it."""
        return (self._may_ask_ahead and self.free.num_free_blocks < self.layout.blocks_per_chunk and self._ahead is None and self._keeping.spare > 0
                and bool(self._absent) and not self._leaving and not self.resting and self._clock() < self._grown_at + self._keeping.linger_s
                and not self._space.demanded() and not self._is_going())

    def begin_ahead(self) -> int | None:
        """The chunk that is wanted ahead, if one is. Until `end_ahead` it is nobody's."""
        if not self.wants_ahead():
            return None
        self._may_ask_ahead = False
        self._ahead = heapq.heappop(self._absent)
        return self._ahead

    @property
    def asks_ahead(self) -> bool:
        """Whether one is nobody's."""
        return self._ahead is not None

    def end_ahead(self, granted: bool) -> None:
        """Whether it has memory now. If all is to go by then it does, too: no request may begin."""
        if self._ahead is None:
            raise RuntimeError("no chunk is being asked for ahead")
        chunk, self._ahead = self._ahead, None
        if granted and not self._is_going():
            self.counts.ahead += 1
            self._add(chunk)
            self._may_ask_ahead = True
            return
        if granted:
            self._space.give_back([chunk])
        heapq.heappush(self._absent, chunk)

    def attend(self, preempt: Callable[[int | None], int] | None = None, patience_ms: int = 0) -> float | None:
        """Gives back what has left, what nobody uses for long enough, and what is demanded. Comes back where it rests for no longer.

        To be called while no block is being allocated.

        Args:
            preempt: Ends requests so that so many chunks have no live blocks, None: all requests, and returns how many it has ended. None
                where that is not possible now: then what is demanded waits until it is.
            patience_ms: For what it needs to come back.

        Returns:
            Seconds until there is something to give back that nobody demands; None: never, as things are.
        """
        self._reap()
        if self._is_going():
            self._go_away(preempt)
        if self.resting:
            self._come_back(patience_ms)
        wait = self._leave_idle()
        if self._space.demanded():
            self._answer_demand(preempt)
        self.show_used()
        return wait

    def show_used(self) -> None:
        if (live := self.free.live) != self._shown:
            self._space.show_used(live * self.layout.layers * self.layout.page_bytes)
            self._shown = live

    def _is_going(self) -> bool:
        """Also where the order has ended meanwhile, if chunk 0 has left."""
        return not self.resting and (self._space.ordered_away() or 0 not in self.free.chunks)

    def _go_away(self, preempt: Callable[[int | None], int] | None) -> None:
        self._leave_all()
        if self.free.live and preempt is not None:
            self.counts.preempted += preempt(None)
            self._leave_all()
        self._reap()
        if len(self._absent) == self.layout.chunks:
            self._space.rest(needed=1)
            self.resting = True
            self.counts.rested += 1

    def _leave_all(self) -> None:
        """That no request has a block in. A step of any request may read the block that stands for none, so chunk 0 goes last."""
        for chunk in (*self.free.empty_chunks(), *self.free.cached_chunks()):
            if chunk != 0 or not self.free.live:
                self._leave(chunk)

    def _come_back(self, patience_ms: int) -> bool:
        if not self._space.back([0], patience_ms):
            return False
        self._absent.remove(0)
        heapq.heapify(self._absent)
        self.resting = False
        self._add(0)
        return True

    def _answer_demand(self, preempt: Callable[[int], int] | None) -> None:
        """What is demanded may be another demand at each look, so nothing is refused after one that something has been given at."""
        while self._space.demanded():
            gone = self._leave_for_demand()
            missing = self._missing()
            if missing > 0 and preempt is not None:
                self.counts.preempted += preempt(missing)
                gone += self._leave_for_demand()
            self._reap()
            if preempt is None or self._leaving:
                return
            if gone == 0 and self._space.demanded():
                self._space.refuse_rest()

    def _missing(self) -> int:
        return self._space.demanded() - len(self._leaving)

    def _leave_for_demand(self) -> int:
        gone = [chunk for chunk in (*self.free.empty_chunks(), *self.free.cached_chunks()) if chunk != 0][:max(0, self._missing())]
        self.counts.demanded += len(gone)
        for chunk in gone:
            self._leave(chunk)
        return len(gone)

    def _leave_idle(self) -> float | None:
        """What is beyond what is kept."""
        empty = [chunk for chunk in self.free.empty_chunks() if chunk != 0]
        cached = [chunk for chunk in self.free.cached_chunks() if chunk != 0]
        surplus = [*empty[self._keeping.spare:], *cached[:max(0, len(cached) - self._keeping.cached)]]
        if not surplus:
            return None
        wait = self._grown_at + self._keeping.linger_s - self._clock()
        if wait > 0:
            return wait
        for chunk in surplus:
            self._leave(chunk)
        self._reap()
        return None

    def _leave(self, chunk: int) -> None:
        for block in self.free.drop_chunk(chunk):
            self._forget(block)
        for block_id in self._ids_of(chunk):
            del self.blocks[block_id]
        self._leaving.append((self._launched, chunk))

    def _reap(self) -> None:
        gone = []
        while self._leaving and self._leaving[0][0] <= self._finished:
            gone.append(self._leaving.popleft()[1])
        if gone:
            self._space.give_back(gone)
            self.counts.returned += len(gone)
            for chunk in gone:
                heapq.heappush(self._absent, chunk)

    def _add(self, chunk: int) -> None:
        made = {block_id: self._make_block(block_id) for block_id in self._ids_of(chunk)}
        self.blocks.update(made)
        self.free.add_chunk(chunk, made.values())
        self.counts.most = max(self.counts.most, self.owned)
        self._grown_at = self._clock()

    def _ids_of(self, chunk: int) -> range:
        """Without the one that stands for none, which is there as long as this is."""
        ids = self.layout.ids_of(chunk)
        return ids[1:] if chunk == 0 else ids
