"""Each page of a block lies in the chunk that the block's id stands for, and no two pages overlap."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
pytest.importorskip("torch")

from sluice.vllm._layout import DoesNotFit, Layout  # noqa: E402

MIB = 1 << 20


def pages_of(layout: Layout, block_id: int) -> list[tuple[int, int]]:
    """Where its pages begin and end in the range, as the kernels of each layer find them."""
    found = []
    for layer in range(layout.layers):
        begin, length = layout.view(layer)
        at = block_id * layout.page_bytes
        assert at + layout.page_bytes <= length
        found.append((begin + at, begin + at + layout.page_bytes))
    return found


def assert_sound(layout: Layout) -> None:
    taken = []
    seen = set()
    for chunk in range(layout.chunks):
        ids = layout.ids_of(chunk)
        assert len(ids) == layout.blocks_per_chunk
        assert not seen & set(ids)
        seen |= set(ids)
        for block_id in ids:
            assert layout.chunk_of(block_id) == chunk
            for begin, end in pages_of(layout, block_id):
                assert chunk * layout.chunk_bytes <= begin
                assert end <= (chunk + 1) * layout.chunk_bytes
                taken.append((begin, end))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in zip(taken, taken[1:]))
    assert len(seen) == layout.blocks
    assert max(seen) + 1 == layout.ids
    assert 0 in seen
    for layer in range(layout.layers):
        begin, length = layout.view(layer)
        assert begin + length <= layout.chunks * layout.chunk_bytes


@pytest.mark.parametrize(("layers", "page", "blocks_per_chunk"), [
    (32, 64 << 10, 32), (36, 64 << 10, 28), (28, 64 << 10, 36), (28, 32 << 10, 73), (80, 64 << 10, 12),
])
def test_models_of_usual_shapes_fill_a_chunk_of_64_mib(layers, page, blocks_per_chunk):
    layout = Layout(64 * MIB, page, layers, 5)
    assert layout.blocks_per_chunk == blocks_per_chunk
    assert_sound(layout)


def test_pages_that_do_not_divide_a_chunk_are_not_laid_across_its_end():
    layout = Layout(2 * MIB, 73728, 4, 9)  # of 64-token pages of latent attention: 28 and a part in a chunk
    assert layout.blocks_per_chunk == 6
    assert_sound(layout)


def test_any_shape_is_sound():
    draw = random.Random(5)
    made = 0
    for _ in range(2000):
        shape = draw.randrange(1, 4000), draw.randrange(1, 300), draw.randrange(1, 12), draw.randrange(1, 12)
        try:
            layout = Layout(*shape)
        except DoesNotFit:
            chunk, page, layers, _ = shape
            assert chunk // page - (chunk % page > 0) < layers
            continue
        made += 1
        assert_sound(layout)
    assert made > 500


def test_a_block_that_fills_more_than_a_chunk_is_refused_with_what_would_help():
    with pytest.raises(DoesNotFit, match=r"32 pages of 131072 bytes.*--block-size"):
        Layout(2 * MIB, 128 << 10, 32, 4)


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (8, 0, 1, 1), (8, 1, 0, 1), (8, 1, 1, 0)])
def test_what_is_no_size_is_refused(shape):
    with pytest.raises(ValueError, match="must be at least 1"):
        Layout(*shape)


@pytest.mark.parametrize(("blocks", "chunks"), [(1, 1), (32, 1), (33, 2), (320, 10)])
def test_as_many_chunks_as_hold_the_blocks(blocks, chunks):
    assert Layout.for_blocks(blocks, 64 * MIB, 64 << 10, 32).chunks == chunks
