"""Where the pages of a KV cache lie in a range of chunks, so that each chunk holds whole blocks of all layers.

A *page* is one block of one layer, a *block* the pages with one id in all layers. Each layer sees a dense view of the range whose
stride is one page, shifted by `blocks_per_chunk` pages from one layer to the next. Of a chunk the first ids are handed out, and no
others::

    chunk 0                              chunk 1
    | layer 0 | layer 1 | …  | waste |   | layer 0 | layer 1 | …
    ids 0 … blocks_per_chunk − 1         ids first_id(1) … first_id(1) + blocks_per_chunk − 1

So kernels, slot mappings and the prefix cache see an ordinary cache with gaps in its ids, and any chunk can come or go by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


class DoesNotFit(ValueError):
    """The model's blocks cannot lie in chunks of this size."""


@dataclass(frozen=True)
class Layout:
    """Of `chunks` chunks of `chunk_bytes`, for `layers` tensors with pages of `page_bytes`.

    Raises:
        DoesNotFit: Not even one block of all layers lies in a chunk.
    """

    chunk_bytes: int
    page_bytes: int
    layers: int
    chunks: int

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "page_bytes", "layers", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.blocks_per_chunk < 1:
            raise DoesNotFit(f"a block takes {self.layers} pages of {self.page_bytes} bytes, which do not lie in one chunk of "
                             f"{self.chunk_bytes} bytes; smaller blocks (--block-size) or larger chunks of the pool would do")

    @property
    def blocks_per_chunk(self) -> int:
        """The same for every chunk, also where pages lie across the ends of chunks: those are left out."""
        whole_pages = self.chunk_bytes // self.page_bytes
        if self.chunk_bytes % self.page_bytes:
            whole_pages -= 1  # of a chunk that begins within a page
        return whole_pages // self.layers

    @property
    def blocks(self) -> int:
        """That there are if all chunks are."""
        return self.chunks * self.blocks_per_chunk

    @property
    def ids(self) -> int:
        """One more than the largest id."""
        return self.first_id(self.chunks - 1) + self.blocks_per_chunk

    def first_id(self, chunk: int) -> int:
        return -(-chunk * self.chunk_bytes // self.page_bytes)

    def ids_of(self, chunk: int) -> range:
        first = self.first_id(chunk)
        return range(first, first + self.blocks_per_chunk)

    def chunk_of(self, block_id: int) -> int:
        return block_id * self.page_bytes // self.chunk_bytes

    def view(self, layer: int) -> tuple[int, int]:
        """Where in the range the view of that layer begins, and its length, both in bytes."""
        return layer * self.blocks_per_chunk * self.page_bytes, self.ids * self.page_bytes

    @classmethod
    def for_blocks(cls, blocks: int, chunk_bytes: int, page_bytes: int, layers: int) -> Layout:
        """With as many chunks as hold so many blocks."""
        one = cls(chunk_bytes, page_bytes, layers, 1)
        return cls(chunk_bytes, page_bytes, layers, max(1, -(-blocks // one.blocks_per_chunk)))
