"""Chunks of a KV cache come when requests need blocks, and go when nobody does, or others want them; not a block before its time."""

import itertools
import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
pytest.importorskip("torch")

from sluice.vllm._elastic import ElasticBlocks, Keeping, requests_to_preempt  # noqa: E402
from sluice.vllm._layout import Layout  # noqa: E402

OPERATIONS = int(os.environ.get("SLUICE_TEST_OPERATIONS", "50000"))
NOTHING = Keeping(spare=0, cached=0, linger_s=0)


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash = None


class Pool:
    """A space whose pool has so many chunks to grant."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.backed = {0}
        self.wanted = 0
        self.refusals = 0
        self.used_bytes = 0
        self.ordered = self.parked = False
        self.before_going = lambda chunk: None

    def back(self, chunks, patience_ms):
        if len(chunks) > self.room or self.ordered and self.parked:
            return False
        self.parked = False
        assert not self.backed & set(chunks)
        self.room -= len(chunks)
        self.backed |= set(chunks)
        return True

    def give_back(self, chunks):
        for chunk in chunks:
            self.before_going(chunk)
            self.backed.remove(chunk)
        given = min(len(chunks), self.wanted)
        self.wanted -= given
        self.room += len(chunks) - given

    def demanded(self):
        return self.wanted

    def refuse_rest(self):
        self.refusals += 1
        self.wanted = 0

    def show_used(self, used_bytes):
        self.used_bytes = used_bytes

    def ordered_away(self):
        return self.ordered and not self.parked

    def rest(self, needed):
        assert needed == 1
        assert not self.backed
        assert not self.parked
        self.parked = True


class World:
    """A cache of 4 blocks a chunk, and the time."""

    def __init__(self, chunks: int = 8, room: int = 100, keeping: Keeping = NOTHING) -> None:
        self.now = 0.0
        self.pool = Pool(room)
        self.forgotten = []
        self.cache = ElasticBlocks(Layout(64, 8, 2, chunks), self.pool, keeping, Block, self.forget, lambda: self.now)

    def forget(self, block):
        self.forgotten.append(block.block_id)
        block.block_hash = None

    def take(self, n: int) -> list[Block]:
        while self.cache.free.num_free_blocks < n and self.cache.grow():
            pass
        taken = self.cache.free.popleft_n(n)
        for block in taken:
            block.block_hash = None  # what it had is found no more
        return taken

    def drop(self, blocks, cached: bool = False) -> None:
        for block in blocks:
            block.block_hash = f"of {block.block_id}" if cached else None
        self.cache.free.append_n(blocks)

    def chunks(self, blocks) -> set[int]:
        return self.cache.chunks_of(block.block_id for block in blocks)


def test_at_first_one_chunk_is_there_without_the_block_that_stands_for_none():
    world = World()
    assert world.cache.null_block.block_id == 0
    assert world.cache.free.num_free_blocks == 3
    assert world.cache.owned == 1
    world.cache.attend()
    assert world.cache.owned == 1


def test_it_grows_by_as_many_chunks_as_are_needed_and_gives_them_back():
    world = World()
    held = world.take(12)
    assert world.pool.backed == {0, 1, 2, 3}
    world.drop(held)
    world.cache.attend()
    assert world.pool.backed == {0}
    assert (world.cache.counts.grown, world.cache.counts.returned, world.cache.counts.most) == (3, 3, 4)


def test_what_the_pool_does_not_grant_is_refused_and_asked_for_again():
    world = World(room=1)
    held = world.take(7)
    assert not world.cache.grow()
    world.pool.room = 1
    assert world.cache.grow()
    assert len(held) == 7
    assert world.cache.counts.refused == 1


def test_it_never_has_more_chunks_than_its_range():
    world = World(chunks=3)
    assert world.cache.grow()
    assert world.cache.grow()
    assert not world.cache.grow()


def test_new_blocks_come_out_of_the_fullest_chunk():
    world = World()
    held = world.take(15)  # chunks 0 to 3 are full
    by_chunk = {chunk: [block for block in held if world.chunks([block]) == {chunk}] for chunk in range(4)}
    world.drop(by_chunk[1][:3] + by_chunk[2][:1] + by_chunk[3][:2])
    assert [world.chunks(world.take(1)) for _ in range(6)] == [{2}, {3}, {3}, {1}, {1}, {1}]


def test_cached_blocks_are_used_up_chunk_by_chunk_and_before_it_grows():
    world = World(keeping=Keeping(0, 9, 0))
    held = world.take(11)
    by_chunk = {chunk: [block for block in held if world.chunks([block]) == {chunk}] for chunk in range(3)}
    world.drop(by_chunk[2], cached=True)
    world.drop(by_chunk[1], cached=True)
    taken = world.take(6)
    assert world.chunks(taken[:4]) == {2}
    assert world.chunks(taken[4:]) == {1}
    assert world.cache.owned == 3


def test_a_cached_block_that_is_used_again_is_not_handed_out():
    world = World()
    held = world.take(3)
    world.drop(held, cached=True)
    world.cache.free.remove(held[1])
    assert held[1] not in world.take(2)
    assert world.cache.free.num_free_blocks == 0


def test_a_chunk_stays_until_the_steps_that_may_read_it_have_ended():
    world = World()
    held = world.take(7)
    world.cache.launched()
    world.cache.launched()
    world.drop(held)
    world.cache.attend()
    assert world.pool.backed == {0, 1}
    assert world.cache.owned == 1
    world.cache.launched()  # which cannot know of it
    world.cache.ended()
    world.cache.attend()
    assert world.pool.backed == {0, 1}
    world.cache.ended()
    world.cache.attend()
    assert world.pool.backed == {0}


def test_a_chunk_on_its_way_is_kept_if_blocks_are_needed():
    world = World()
    held = world.take(7)
    world.cache.launched()
    world.drop(held)
    world.cache.attend()
    assert world.take(7)
    assert (world.cache.counts.grown, world.cache.counts.kept_on_the_way) == (1, 1)
    world.cache.ended()
    world.cache.attend()
    assert world.pool.backed == {0, 1}


def test_empty_and_cached_chunks_are_kept_up_to_a_number():
    world = World(keeping=Keeping(spare=1, cached=2, linger_s=0))
    held = world.take(27)  # seven chunks
    by_chunk = {chunk: [block for block in held if world.chunks([block]) == {chunk}] for chunk in range(7)}
    for chunk in (4, 5, 6):
        world.drop(by_chunk[chunk], cached=True)
    world.drop(by_chunk[1] + by_chunk[2] + by_chunk[3])
    world.cache.attend()
    assert sorted(world.pool.backed) == [0, 1, 5, 6]
    assert sorted(world.forgotten) == [block.block_id for block in by_chunk[4]]


def test_nothing_is_given_back_unasked_so_soon_after_growth():
    world = World(keeping=Keeping(0, 0, linger_s=2))
    world.drop(world.take(7))
    world.now = 0.5
    assert world.cache.attend() == pytest.approx(1.5)
    assert world.pool.backed == {0, 1}
    world.now = 2
    assert world.cache.attend() is None
    assert world.pool.backed == {0}


def test_what_is_demanded_goes_at_once_empty_chunks_first():
    world = World(keeping=Keeping(9, 9, 99))
    held = world.take(19)
    by_chunk = {chunk: [block for block in held if world.chunks([block]) == {chunk}] for chunk in range(5)}
    world.drop(by_chunk[1] + by_chunk[2], cached=True)
    world.drop(by_chunk[3])
    world.pool.wanted = 2
    world.cache.attend()
    assert world.pool.backed == {0, 2, 4}
    assert world.pool.wanted == 0
    assert world.cache.counts.demanded == 2


def test_nothing_grows_while_others_wait_for_what_it_has():
    world = World()
    held = world.take(7)
    world.pool.wanted = 1
    assert not world.cache.grow()
    world.drop(held)
    world.cache.attend()
    assert world.pool.wanted == 0
    assert world.cache.grow()


def test_requests_are_ended_for_what_is_demanded_when_that_is_possible():
    world = World()
    held = world.take(7)
    asked = []

    def preempt(chunks):
        asked.append(chunks)
        world.drop(held)
        return 3

    world.pool.wanted = 1
    world.cache.attend()
    assert (asked, world.pool.wanted, world.pool.refusals) == ([], 1, 0)
    world.cache.attend(preempt)
    assert (asked, world.pool.wanted, world.pool.refusals) == ([1], 0, 0)
    assert world.cache.counts.preempted == 3


def test_a_demand_that_comes_when_another_has_been_met_is_looked_at_before_it_is_refused():
    world = World(keeping=Keeping(9, 9, 99))
    world.drop(world.take(11))
    assert world.pool.backed == {0, 1, 2}
    give_back = world.pool.give_back

    def met_and_demanded_anew(chunks):
        give_back(chunks)
        world.pool.give_back = give_back
        world.pool.wanted = 1

    world.pool.give_back = met_and_demanded_anew
    world.pool.wanted = 1
    world.cache.attend(lambda chunks: 0)
    assert (world.pool.wanted, world.pool.refusals, world.pool.backed) == (0, 0, {0})


def test_what_cannot_be_given_is_refused_once_the_rest_has_gone():
    world = World()
    held = world.take(7)
    world.pool.wanted = 5
    world.cache.launched()
    world.drop(held)
    world.cache.attend(lambda chunks: 0)
    assert (world.pool.wanted, world.pool.refusals) == (5, 0), "the step in flight may read it"
    world.cache.ended()
    world.cache.attend(lambda chunks: 0)
    assert (world.pool.backed, world.pool.refusals) == ({0}, 1)


def test_an_order_takes_all_once_no_step_can_read_it_and_the_first_chunk_comes_back_afterwards():
    world = World(keeping=Keeping(9, 9, 99))
    held = world.take(11)
    null = world.cache.null_block
    world.drop(held[:4], cached=True)
    world.cache.launched()
    world.pool.ordered = True
    asked = []

    def preempt(chunks):
        asked.append(chunks)
        world.drop(held[4:], cached=True)
        return 2

    world.cache.attend()
    assert (asked, world.cache.resting) == ([], False)
    assert not world.cache.grow()
    world.cache.attend(preempt)
    assert (asked, world.pool.backed, world.cache.resting) == ([None], {0, 1, 2}, False), "the step in flight may read it"
    assert sorted(world.forgotten) == sorted(block.block_id for block in held), "no prefix is found any more"
    world.cache.ended()
    world.cache.attend()
    assert (world.pool.backed, world.cache.resting, world.cache.owned) == (set(), True, 0)
    assert not world.cache.grow()
    world.cache.attend()
    assert world.cache.resting
    assert set(world.cache.blocks) == {0}
    world.pool.ordered = False
    world.cache.attend()
    assert (world.pool.backed, world.cache.resting, world.cache.owned) == ({0}, False, 1)
    assert world.cache.null_block is world.cache.blocks[0] is null
    assert sorted(block.block_id for block in world.take(7)) == sorted(block_id for chunk in (0, 1) for block_id in world.cache.layout.ids_of(chunk) if block_id)


def test_an_order_that_ends_too_soon_is_carried_out_before_it_comes_back():
    world = World()
    world.cache.launched()
    world.pool.ordered = True
    world.cache.attend()
    world.pool.ordered = False
    assert not world.cache.grow(), "chunk 0 is on its way"
    world.cache.ended()
    world.cache.attend()
    assert (world.pool.backed, world.cache.counts.rested) == ({0}, 1)
    assert world.cache.grow()


def test_who_rests_and_is_woken_has_memory_as_soon_as_a_request_wants_blocks():
    world = World(room=0)
    world.pool.ordered = True
    world.cache.attend()
    world.pool.room = 0  # somebody has it
    world.pool.ordered = False
    world.cache.attend()
    assert world.cache.resting
    world.pool.room = 1
    assert world.cache.grow()
    assert (world.pool.backed, world.cache.free.num_free_blocks) == ({0}, 3)


def test_what_requests_use_is_told():
    world = World()
    held = world.take(5)
    world.cache.attend()
    assert world.pool.used_bytes == 5 * 2 * 8
    world.drop(held, cached=True)
    world.cache.attend()
    assert world.pool.used_bytes == 0


def test_a_step_that_was_not_launched_does_not_end():
    with pytest.raises(RuntimeError, match="not launched"):
        World().cache.ended()


def test_what_a_step_used_goes_when_it_is_over_though_it_has_not_ended():
    world = World()
    held = world.take(5)
    step = world.cache.launched()
    world.drop(held)
    world.cache.attend()
    assert world.pool.backed == {0, 1}
    world.cache.is_over(step)
    assert not world.cache.computing
    world.cache.attend()
    assert world.pool.backed == {0}
    world.cache.ended()
    assert not world.cache.computing
    assert world.cache.launched() == step + 1
    assert world.cache.computing
    with pytest.raises(RuntimeError, match="over that was not launched"):
        world.cache.is_over(step + 2)


def test_the_next_chunk_is_wanted_ahead_once_after_each_that_has_come():
    world = World(keeping=Keeping(1, 0, 5))
    cache = world.cache
    assert not cache.wants_ahead(), "nothing has grown"
    held = world.take(4)
    assert cache.wants_ahead()
    chunk = cache.begin_ahead()
    assert (chunk, cache.owned, cache.asks_ahead, cache.wants_ahead()) == (2, 2, True, False)
    cache.end_ahead(granted=False)
    assert not cache.wants_ahead(), "the pool had none"
    held += world.take(4)
    assert cache.wants_ahead()
    cache.begin_ahead()
    world.pool.back([3], 0)
    cache.end_ahead(granted=True)
    assert (cache.owned, cache.counts.ahead, cache.wants_ahead()) == (4, 1, False)
    held += world.take(4)
    assert (world.pool.backed, cache.counts.grown) == ({0, 1, 2, 3}, 2), "nobody has waited for the last one"
    assert cache.wants_ahead()
    for wanted, ordered, now in ((1, False, 0), (0, True, 0), (0, False, 5)):
        world.pool.wanted, world.pool.ordered, world.now = wanted, ordered, now
        assert not cache.wants_ahead()
        assert cache.begin_ahead() is None
    with pytest.raises(RuntimeError, match="ahead"):
        cache.end_ahead(granted=True)


def test_a_chunk_that_comes_ahead_while_all_is_to_go_goes_at_once():
    world = World(keeping=Keeping(1, 0, 5))
    held = world.take(4)
    chunk = world.cache.begin_ahead()
    world.pool.back([chunk], 0)
    world.cache.launched()
    world.pool.ordered = True
    world.drop(held)
    world.cache.attend(lambda chunks: 0)
    world.pool.ordered = False
    world.cache.end_ahead(granted=True)
    assert (world.pool.backed, world.cache.free.num_free_blocks) == ({0, 1}, 0), "what stands for no block is on its way"
    world.cache.ended()
    world.cache.attend()
    assert (world.cache.counts.rested, world.pool.backed) == (1, {0})


def test_without_spare_chunks_none_is_wanted_ahead():
    world = World(keeping=Keeping(0, 0, 5))
    world.take(4)
    assert not world.cache.wants_ahead()


def test_chunks_in_use_cannot_be_dropped():
    world = World()
    world.take(1)
    with pytest.raises(ValueError, match="in use"):
        world.cache.free.drop_chunk(0)


@pytest.mark.parametrize(("held", "wanted", "ended"), [
    ([("a", {1}), ("b", {2})], 1, ["b"]),  # as few on each: who comes last
    ([("a", {1}), ("b", {2, 3}), ("c", {2, 3})], 1, ["a"]),  # one is less than two
    ([("a", {1, 2, 3}), ("b", {3})], 2, ["a"]),
    ([("a", {1}), ("b", {2})], 5, ["a", "b"]),
    ([("a", {1}), ("b", set())], 1, ["a"]),
    ([("a", {1})], 0, []),
    ([], 1, []),
])
def test_as_few_requests_end_as_chunks_need(held, wanted, ended):
    assert requests_to_preempt(held, wanted) == ended


class Model:
    """The same, kept in the plainest way: what each block of the range is, and which chunks may be read by a step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.live = {}  # request → blocks
        self.steps = []  # the chunks that each step in flight may read
        self.found = {}  # cached blocks by id: a later request may find them
        world.pool.before_going = self.check_going

    def check_going(self, chunk):
        assert chunk != 0 or self.world.pool.ordered or 0 not in self.world.cache.free.chunks
        assert all(chunk not in read for read in self.steps), "a step in flight may read it"
        assert all(chunk not in self.world.chunks(blocks) for blocks in self.live.values())
        assert not {i for i in self.found if self.world.cache.layout.chunk_of(i) == chunk} - set(self.world.forgotten)

    def check(self):
        cache = self.world.cache
        used = [block.block_id for blocks in self.live.values() for block in blocks]
        assert len(set(used)) == len(used)
        free = [block.block_id for block in cache.free.get_all_free_blocks()]
        assert not set(used) & set(free)
        assert len(free) == len(set(free)) == cache.free.num_free_blocks
        assert set(cache.blocks) == {0, *used, *free}
        assert cache.free.live == len(used)
        assert cache.chunks_of(cache.blocks) - {0} == set(cache.free.chunks) - {0} <= self.world.pool.backed
        assert len(cache.blocks) == cache.owned * cache.layout.blocks_per_chunk + (0 not in cache.free.chunks)
        assert cache.resting == self.world.pool.parked

    def fullness(self) -> dict[int, int]:
        """Blocks in use of each chunk that has bare ones."""
        bare = [block.block_id for block in self.world.cache.free.get_all_free_blocks() if block.block_hash is None]
        used = [block.block_id for blocks in self.live.values() for block in blocks]
        chunk_of = self.world.cache.layout.chunk_of
        return {chunk: sum(chunk_of(i) == chunk for i in used) for chunk in {chunk_of(i) for i in bare}}


def test_any_order_of_events_agrees_with_a_plain_model():
    seed = int(os.environ.get("SLUICE_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print("seed", seed)
    draw = random.Random(seed)
    totals = {}
    for life in itertools.count():
        if life * 250 >= OPERATIONS:
            break
        keeping = Keeping(draw.randrange(3), draw.randrange(4), draw.choice((0, 5)))
        world = World(chunks=draw.randrange(2, 12), room=draw.randrange(0, 12), keeping=keeping)
        model, cache, names = Model(world), world.cache, itertools.count()
        ahead, granted, ended = None, False, 0

        def preempt(chunks, model=model, world=world):
            held = [(name, world.chunks(blocks) - {0}) for name, blocks in model.live.items()]
            ended = list(model.live) if chunks is None else requests_to_preempt(held, chunks)
            for name in ended:
                world.drop(model.live.pop(name), cached=draw.random() < 0.5)
            if chunks is None:
                return len(ended)
            left = set().union(*(world.chunks(blocks) for blocks in model.live.values())) - {0}
            assert len(set().union(*(has for _, has in held)) - left) >= min(chunks, len(set().union(*(has for _, has in held))))
            return len(ended)

        for _ in range(250):
            world.now += draw.random()
            match draw.randrange(12):
                case 0 | 1:
                    n = draw.randrange(1, 10)
                    while cache.free.num_free_blocks < n and cache.grow():
                        pass
                    if cache.free.num_free_blocks >= n:
                        fullness = model.fullness()
                        taken = world.take(n)
                        if fullness:
                            assert fullness[cache.layout.chunk_of(taken[0].block_id)] == max(fullness.values())
                        for block in taken:
                            model.found.pop(block.block_id, None)
                        model.live[next(names)] = taken
                case 2 if model.live:
                    blocks = model.live.pop(draw.choice(list(model.live)))
                    cached = draw.random() < 0.5
                    world.drop(blocks, cached)
                    if cached:
                        model.found.update((block.block_id, block) for block in blocks)
                case 3 if model.found:
                    block = draw.choice(list(model.found.values()))
                    if block.block_hash is not None and block.block_id not in {b.block_id for bs in model.live.values() for b in bs}:
                        cache.free.remove(block)
                        block.block_hash = None
                        del model.found[block.block_id]
                        model.live[next(names)] = [block]
                case 4:
                    cache.launched()
                    model.steps.append(set().union({0} if model.live else (), *(world.chunks(blocks) for blocks in model.live.values())))
                case 5 if model.steps:
                    cache.ended()
                    ended += 1
                    model.steps.pop(0)
                case 10 if model.steps:
                    over = draw.randrange(len(model.steps)) + 1
                    model.steps[:over] = [set()] * over
                    cache.is_over(ended + over)
                case 11:
                    if ahead is not None:
                        cache.end_ahead(granted)
                        ahead = None
                    elif (ahead := cache.begin_ahead()) is not None:
                        granted = draw.random() < 0.8 and world.pool.back([ahead], 0)
                case 6:
                    world.pool.wanted += draw.randrange(4)
                case 7:
                    world.pool.room += 1
                case 9:
                    world.pool.ordered = draw.random() < 0.3
                case 8:
                    cache.attend(preempt if draw.random() < 0.5 else None)
                    for i in world.forgotten:
                        model.found.pop(i, None)
                    world.forgotten.clear()
            model.check()
        while model.steps:
            model.steps.pop(0)
            cache.ended()
        if ahead is not None:
            cache.end_ahead(granted)
        world.pool.wanted = 100
        world.pool.ordered = False
        world.pool.room += 1
        cache.attend(preempt)
        cache.attend(preempt)
        assert world.pool.backed == {0}
        assert world.pool.wanted == 0
        for name, count in vars(cache.counts).items():
            totals[name] = totals.get(name, 0) + count
    assert all(totals.values()), totals
