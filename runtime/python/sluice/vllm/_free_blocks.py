"""The free blocks of the chunks that there are, chunk by chunk: what vLLM's queue of free blocks is to its block pool.

A free block is *bare*, or *cached* if its contents may serve a later request with the same prefix. New blocks come out of the
fullest chunk that has bare ones, so that other chunks run empty; when none is left, cached ones of the chunk whose cached blocks
were freed longest ago are used up, one chunk after the other.

What belongs to a block here are its `block_id`, and its `block_hash`, which is None unless it is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from sluice.vllm._layout import Layout


class Block(Protocol):
    block_id: int

    @property
    def block_hash(self) -> Any: ...


class _Chunk:
    """The free blocks of one chunk by id, in the order in which they were freed."""

    __slots__ = ("bare", "cached", "index", "size")

    def __init__(self, index: int, blocks: Iterable[Block]) -> None:
        self.index = index
        self.bare: dict[int, Block] = {block.block_id: block for block in blocks}
        self.cached: dict[int, Block] = {}
        self.size = len(self.bare)

    @property
    def live(self) -> int:
        return self.size - len(self.bare) - len(self.cached)


class FreeBlocks:
    """Has the functions of vLLM's `FreeKVCacheBlockQueue`, and the chunks' own."""

    def __init__(self, layout: Layout) -> None:
        self.num_free_blocks = 0
        self._size = 0  # blocks of all chunks
        self._layout = layout
        self._chunks: dict[int, _Chunk] = {}
        self._open: list[dict[int, _Chunk]] = [{} for _ in range(layout.blocks_per_chunk + 1)]  # with bare blocks, by live ones
        self._idle: dict[int, _Chunk] = {}  # without live ones
        self._with_cached: dict[int, _Chunk] = {}  # whose cached blocks were freed longest ago comes first

    # Chunks

    def add_chunk(self, index: int, blocks: Iterable[Block]) -> None:
        """One that has just come; its blocks are bare."""
        if index in self._chunks:
            raise ValueError(f"chunk {index} is there already")
        chunk = _Chunk(index, blocks)
        self._chunks[index] = chunk
        self.num_free_blocks += chunk.size
        self._size += chunk.size
        self._enter(chunk)

    def drop_chunk(self, index: int) -> list[Block]:
        """Takes an idle chunk out. Returns its blocks that are cached, which the caller forgets."""
        chunk = self._chunks[index]
        if chunk.live:
            raise ValueError(f"chunk {index} has {chunk.live} blocks in use")
        self._leave(chunk)
        del self._chunks[index]
        self._with_cached.pop(index, None)
        self.num_free_blocks -= chunk.size
        self._size -= chunk.size
        return list(chunk.cached.values())

    @property
    def chunks(self) -> Iterable[int]:
        return self._chunks.keys()

    @property
    def live(self) -> int:
        """Blocks in use, of all chunks."""
        return self._size - self.num_free_blocks

    def empty_chunks(self) -> list[int]:
        """Those whose blocks are all bare."""
        return [index for index, chunk in self._idle.items() if not chunk.cached]

    def cached_chunks(self) -> list[int]:
        """Those that have cached blocks and no live ones, from the longest unused on."""
        return [index for index in self._with_cached if index in self._idle]

    def forget_cached(self) -> None:
        """No block is cached any more."""
        for chunk in list(self._with_cached.values()):
            self._leave(chunk)
            chunk.bare.update(chunk.cached)
            chunk.cached.clear()
            self._enter(chunk)
        self._with_cached.clear()

    # Blocks, as vLLM calls for them

    def popleft_n(self, n: int) -> list[Block]:
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are wanted, and {self.num_free_blocks} are free")
        taken: list[Block] = []
        while len(taken) < n and (chunk := self._fullest()) is not None:
            taken += self._take(chunk, chunk.bare, n - len(taken))
        while len(taken) < n:
            chunk = next(iter(self._with_cached.values()))
            taken += self._take(chunk, chunk.cached, n - len(taken))
        return taken

    def popleft(self) -> Block:
        return self.popleft_n(1)[0]

    def append_n(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            chunk = self._chunks[self._layout.chunk_of(block.block_id)]
            self._leave(chunk)
            if block.block_hash is None:
                chunk.bare[block.block_id] = block
            else:
                chunk.cached[block.block_id] = block
                self._with_cached.pop(chunk.index, None)
                self._with_cached[chunk.index] = chunk
            self._enter(chunk)
        self.num_free_blocks += len(blocks)

    def append(self, block: Block) -> None:
        self.append_n([block])

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """vLLM puts those that no request can find at the front: here they are bare."""
        self.append_n(blocks)

    def remove(self, block: Block) -> None:
        """One that is used again for what it has."""
        chunk = self._chunks[self._layout.chunk_of(block.block_id)]
        self._leave(chunk)
        if chunk.cached.pop(block.block_id, None) is None:
            del chunk.bare[block.block_id]
        self._after_taking(chunk)
        self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[Block]:
        return list(self._free())

    def _free(self) -> Iterator[Block]:
        for chunk in self._chunks.values():
            yield from chunk.bare.values()
            yield from chunk.cached.values()

    def _fullest(self) -> _Chunk | None:
        for chunks in reversed(self._open):
            if chunks:
                return next(iter(chunks.values()))
        return None

    def _take(self, chunk: _Chunk, out_of: dict[int, Block], most: int) -> list[Block]:
        self._leave(chunk)
        taken = [out_of.pop(block_id) for block_id in list(out_of)[:most]]
        self._after_taking(chunk)
        self.num_free_blocks -= len(taken)
        return taken

    def _after_taking(self, chunk: _Chunk) -> None:
        if not chunk.cached:
            self._with_cached.pop(chunk.index, None)
        self._enter(chunk)

    def _leave(self, chunk: _Chunk) -> None:
        """The places that depend on what it has."""
        self._open[chunk.live].pop(chunk.index, None)
        self._idle.pop(chunk.index, None)

    def _enter(self, chunk: _Chunk) -> None:
        if chunk.bare:
            self._open[chunk.live][chunk.index] = chunk
        if not chunk.live:
            self._idle[chunk.index] = chunk
