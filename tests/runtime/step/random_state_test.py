"""Random state that is put back: of every default generator, and NumPy's also where it was gotten ahead of time."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from sluice._random import RandomState  # noqa: E402


def drawn() -> list:
    return [torch.rand(2).tolist(), random.random(), numpy.random.rand(3).tolist(), numpy.random.randn()]


def drawn_again(state: RandomState) -> bool:
    """Whether what is drawn after ``save`` comes again after ``restore``."""
    state.save()
    first = drawn()
    state.restore()
    return drawn() == first


@pytest.fixture
def state() -> RandomState:
    return RandomState((), cuda=False)


def test_all_default_generators_are_put_back(state):
    assert drawn_again(state)


def test_a_state_that_was_foreseen_is_put_back(state):
    numpy.random.seed(1)
    state.foresee()
    assert drawn_again(state)


@pytest.mark.parametrize("draw", [numpy.random.rand, numpy.random.randn, lambda: numpy.random.seed(2)])
def test_what_is_drawn_after_it_was_foreseen_counts(state, draw):
    numpy.random.seed(1)
    state.foresee()
    draw()
    assert drawn_again(state)


def test_a_normal_number_that_is_kept_for_the_next_call_counts(state):
    numpy.random.seed(1)
    numpy.random.randn()
    state.foresee()
    numpy.random.randn()  # the kept one: the generator's own state does not change
    assert drawn_again(state)


def test_a_restored_state_was_not_foreseen(state):
    numpy.random.seed(1)
    numpy.random.randn()
    state.save()
    numpy.random.randn()
    state.foresee()
    state.restore()
    state.save()
    kept = numpy.random.randn()
    state.restore()
    assert numpy.random.randn() == kept


def test_another_generator_in_its_place_counts(state):
    before = numpy.random.get_bit_generator()
    numpy.random.seed(1)
    state.foresee()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        assert drawn_again(state)
    finally:
        numpy.random.set_bit_generator(before)
