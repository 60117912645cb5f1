"""The thread beside an engine: what is demanded is given also when the engine does not come to take in what its last step made."""

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

    def answer(self, kept):
        assert kept == 1

    def back(self, chunks, patience_ms):
        with self.changed:
            self.backed |= set(chunks)
        return True

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
            self.changed.wait_for(lambda: self.wanted > 0, timeout_ms / 1000)
            return self.wanted

    def refuse_rest(self):
        self.demand(0)

    def show_used(self, used_bytes):
        pass

    def ordered_away(self):
        return False


def test_what_is_demanded_goes_when_the_device_has_done_what_nobody_takes_in():
    space, asked, may_end = Space(), threading.Event(), threading.Event()

    def await_device() -> None:
        asked.set()
        assert may_end.wait(SECONDS)

    cache = ElasticCache(Layout(64, 8, 2, 8), space, Keeping(), Block, lambda block: None, await_device)
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
