"""The thread beside an engine: a chunk comes before it is needed, and what is demanded is given also when the engine does not come to take in what its
last step made."""

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
pytest.importorskip("torch")

from sluice.vllm._cache import ElasticCache  # noqa: E402
from sluice.vllm._elastic import Keeping  # noqa: E402
from sluice.vllm._layout import Layout  # noqa: E402

SECONDS = 120.0


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash = None


class Space:
    """Of a pool that grants all that is asked for; somebody may demand."""

    def __init__(self) -> None:
        self.backed = {0}
        self.wanted = 0
        self.changed = threading.Condition()
        self.roused = False
        self.asked = threading.Event()
        self.may_grant = threading.Event()
        self.may_grant.set()
        self.closed = threading.Event()

    def close(self):
        self.closed.set()

    def answer(self, kept):
        assert kept == 1

    def back(self, chunks, patience_ms):
        if threading.current_thread().name == "sluice-kv":
            self.asked.set()
            assert self.may_grant.wait(SECONDS)
        with self.changed:
            self.backed |= set(chunks)
            self.changed.notify_all()
        return True

    def rouse(self):
        with self.changed:
            self.roused = True
            self.changed.notify_all()

    def give_back(self, chunks):
        with self.changed:
            self.backed -= set(chunks)
            self.wanted = max(0, self.wanted - len(chunks))
            self.changed.notify_all()

    def demand(self, chunks):
        with self.changed:
            self.wanted = chunks
            self.changed.notify_all()

    def demanded(self):
        with self.changed:
            return self.wanted

    def await_demand(self, timeout_ms):
        with self.changed:
            self.changed.wait_for(lambda: self.wanted > 0 or self.roused, timeout_ms / 1000)
            self.roused = False
            return self.wanted

    def refuse_rest(self):
        self.demand(0)

    def show_used(self, used_bytes):
        pass

    def ordered_away(self):
        return False


class Device:
    """It computes until `await_device` returns."""

    def __init__(self, await_device=lambda: None) -> None:
        self.finish = await_device

    def mark(self):
        return self.finish


def cache_in(space: Space, await_device=lambda: None, keeping: Keeping = Keeping(spare=0)) -> ElasticCache:
    """Of 4 blocks a chunk."""
    return ElasticCache(Layout(64, 8, 2, 8), space, keeping, Block, lambda block: None, Device(await_device))


def test_a_chunk_comes_before_the_engine_needs_it():
    space = Space()
    cache = cache_in(space, keeping=Keeping(spare=1, linger_s=SECONDS))
    with cache.lock:
        assert cache.grow()
        cache.blocks.free.popleft_n(4)
        cache.launched()
    with space.changed:
        assert space.changed.wait_for(lambda: space.backed == {0, 1, 2}, SECONDS)


def test_a_cache_that_is_gone_leaves_the_pool_when_the_device_is_done():
    space, marks = Space(), []
    cache = ElasticCache(Layout(64, 8, 2, 8), space, Keeping(), Block, lambda block: None, Device(lambda: marks.append(space.closed.is_set())))
    space.rouse()
    assert not space.closed.is_set()
    del cache
    space.rouse()
    assert space.closed.wait(SECONDS)
    assert marks == [False]


def test_an_engine_takes_the_chunk_that_is_on_its_way():
    space = Space()
    space.may_grant.clear()
    cache = cache_in(space, keeping=Keeping(spare=1, linger_s=SECONDS))
    with cache.lock:
        assert cache.grow()
        cache.blocks.free.popleft_n(7)
        cache.launched()
    assert space.asked.wait(SECONDS)
    with cache.lock:
        threading.Timer(0.01, space.may_grant.set).start()
        assert cache.grow()
        assert (cache.blocks.counts.grown, cache.blocks.counts.ahead, space.backed) == (1, 1, {0, 1, 2})
        cache.blocks.free.popleft_n(4)


def test_what_is_demanded_goes_when_the_device_has_done_what_nobody_takes_in():
    space, asked, may_end = Space(), threading.Event(), threading.Event()

    def await_device() -> None:
        asked.set()
        assert may_end.wait(SECONDS)

    cache = cache_in(space, await_device)
    with cache.lock:
        while cache.blocks.free.num_free_blocks < 7:
            assert cache.grow()
        held = cache.blocks.free.popleft_n(7)
        cache.submitted(cache.launched())
        cache.blocks.free.append_n(held)  # their requests have all that they want, and nobody comes for what the step has made
    assert space.backed == {0, 1}
    space.demand(1)
    assert asked.wait(SECONDS), "the device is asked"
    assert space.backed == {0, 1}, "which may still use it"
    may_end.set()
    with space.changed:
        assert space.changed.wait_for(lambda: space.backed == {0}, SECONDS)
    cache.after_step()
    assert not cache.blocks.computing
