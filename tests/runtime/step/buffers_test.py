"""What a discarded micro-batch changed in a model's buffers is put back, also what torch does not count as a change."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
torch = pytest.importorskip("torch")

from sluice._buffers import Buffers  # noqa: E402
from sluice._modules import Parts  # noqa: E402


def values(model) -> list:
    return [buffer.clone() for buffer in model.buffers()]


def same(left: list, right: list) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_batch_statistics_are_put_back():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    buffers = Buffers(Parts(model))
    before = values(model)
    buffers.save()
    model(torch.randn(2, 1, 8, 8))
    assert not same(values(model), before)
    buffers.restore()
    assert same(values(model), before)


class Replacing(torch.nn.Module):
    """Binds a new tensor to its buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + x.mean(0)
        return x


def test_a_replaced_buffer_is_the_old_tensor_again():
    model = Replacing()
    original = model.mean
    buffers = Buffers(Parts(model))
    buffers.save()
    model(torch.ones(2, 3))
    assert model.mean is not original
    buffers.restore()
    assert model.mean is original
    assert torch.equal(model.mean, torch.zeros(3))


def test_a_replaced_buffer_that_stays_is_a_copy():
    model = Replacing()
    buffers = Buffers(Parts(model))
    buffers.save()
    model(torch.ones(2, 3))
    made = model.mean
    buffers.keep()
    assert model.mean.data_ptr() != made.data_ptr()
    assert torch.equal(model.mean, torch.ones(3))
    buffers.save()
    buffers.restore()
    assert torch.equal(model.mean, torch.ones(3))


def test_a_buffer_that_changes_its_shape_is_followed():
    model = torch.nn.Module()
    model.register_buffer("seen", torch.zeros(2))
    buffers = Buffers(Parts(model))
    buffers.save()
    model.seen = torch.ones(5)
    buffers.keep()
    buffers.save()
    model.seen.zero_()
    buffers.restore()
    assert torch.equal(model.seen, torch.ones(5))


def test_a_buffer_that_is_given_other_contents_is_followed():
    model = torch.nn.Module()
    model.register_buffer("seen", torch.zeros(2))
    buffers = Buffers(Parts(model))
    buffers.save()
    model.seen.data = torch.ones(5, dtype=torch.float64)
    buffers.save()
    model.seen.zero_()
    buffers.restore()
    assert torch.equal(model.seen, torch.ones(5, dtype=torch.float64))


def test_a_buffer_that_has_no_address_is_put_back():
    model = torch.nn.Module()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    buffers = Buffers(Parts(model))
    for _ in range(2):
        buffers.save()
        model.edges.mul_(2)
        buffers.restore()
        assert torch.equal(model.edges.to_dense(), torch.eye(3))


def test_a_module_that_comes_later_is_followed():
    model = torch.nn.Sequential(torch.nn.ReLU())
    buffers = Buffers(Parts(model))
    buffers.save()
    model[0].late = torch.nn.BatchNorm1d(3)
    buffers.save()
    model[0].late(torch.randn(4, 3))
    buffers.restore()
    assert torch.equal(model[0].late.running_mean, torch.zeros(3)) and model[0].late.num_batches_tracked == 0
