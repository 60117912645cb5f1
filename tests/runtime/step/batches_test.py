"""A batch is cut along its samples, whatever it is made of; what cannot be cut is named."""

import collections
import enum
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import numpy  # noqa: E402
from scripted_runtime import ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402

import sluice  # noqa: E402
from sluice import _torch_compat  # noqa: E402

N = 5
X = torch.arange(N * 3.0).reshape(N, 3)


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "image size")


def slices_of(*batch, runtime=None):
    """What the loss function is given, slice by slice of at most two samples."""
    model = nn.Linear(3, 2)
    with sharing(runtime):
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    given = []

    def loss_of(x, *more):
        given.append(more[0] if len(more) == 1 else more)
        return model(x).mean()

    step(loss_of, X, *batch)
    rehearsals = 2 if _torch_compat.is_anything_compiled() else 1
    return given if runtime is None else given[rehearsals:]


@pytest.mark.parametrize("value, slices", [
    (["a", "b", "c", "d", "e"], [["a", "b"], ["c", "d"], ["e"]]),
    ((1, 2, 3, 4, 5), [(1, 2), (3, 4), (5,)]),
    (range(5), [range(0, 2), range(2, 4), range(4, 5)]),
    ([[1], [2, 2], [], [4], [5]], [[[1], [2, 2]], [[], [4]], [[5]]]),
    ([{"id": i} for i in range(5)], [[{"id": 0}, {"id": 1}], [{"id": 2}, {"id": 3}], [{"id": 4}]]),
    ([None] * 5, [[None] * 2, [None] * 2, [None]]),
    ([object] * 5, [[object] * 2, [object] * 2, [object]]),
    ({"names": ["a", "b", "c", "d", "e"], "task": "x"}, [{"names": each, "task": "x"} for each in (["a", "b"], ["c", "d"], ["e"])]),
    ("text", ["text"] * 3), (b"bytes", [b"bytes"] * 3), (3, [3] * 3), (None, [None] * 3), (True, [True] * 3),
    (Colour.RED, [Colour.RED] * 3),
    ((), [()] * 3), ([], [[]] * 3), (numpy.float32(2), [numpy.float32(2)] * 3), (torch.float32, [torch.float32] * 3),
    (torch.Size([5, 3]), [torch.Size([5, 3])] * 3), (Pair("x", 3), [Pair("x", 3)] * 3),
])
@pytest.mark.parametrize("runtime", [None, ScriptedRuntime], ids=["plain", "shared"])
def test_what_has_an_element_for_each_sample_is_cut_and_what_is_one_thing_is_not(value, slices, runtime):
    assert slices_of(value, runtime=runtime and runtime()) == slices


def test_arrays_and_scalar_tensors_are_cut_as_tensors_are():
    array = numpy.arange(N * 2).reshape(N, 2)
    given = slices_of({"array": array, "words": numpy.array(["a", "b", "c", "d", "e"], dtype=object)})
    assert [each["array"].tolist() for each in given] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert all(each["array"].base is not None for each in given), "views"
    assert [each["words"].tolist() for each in given] == [["a", "b"], ["c", "d"], ["e"]]
    labels = [torch.tensor(i) for i in range(N)]
    assert slices_of(labels) == [labels[:2], labels[2:4], labels[4:]]
    assert slices_of(numpy.array(7.0)) == [7.0] * 3
    assert [each[1] for each in slices_of(Pair(X, "x"))] == ["x"] * 3


def test_a_list_that_has_tensors_is_made_of_elements():
    given = slices_of([X, "name", ["a", "b", "c", "d", "e"], torch.tensor(1.5)])
    assert [[len(each[0]), *each[1:]] for each in given] == [
        [2, "name", ["a", "b"], 1.5], [2, "name", ["c", "d"], 1.5], [1, "name", ["e"], 1.5]]


def test_samples_may_be_those_of_arrays_alone():
    model = nn.Linear(3, 2)
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    seen = []
    step(lambda x: (seen.append(len(x)), model(torch.from_numpy(x)).mean())[1], X.numpy())
    assert seen == [2, 2, 1] and step.stats()["samples"] == N


@pytest.mark.parametrize("batch, kind, told", [
    ((["a", "b"],), ValueError, r"batch\[1\] is a list of 2 str, and the batch has 5 samples.*close over it"),
    (((0.9, 0.999),), ValueError, r"batch\[1\] is a tuple of 2 float"),
    (({"sizes": {"of": [1, None, 3]}},), ValueError, r"batch\[1\]\['sizes'\]\['of'\] is a list of 3 int and NoneType"),
    ((X, [X, ["a"]]), ValueError, r"batch\[2\]\[1\] is a list of 1 str"),
    (({1, 2, 3, 4, 5},), TypeError, r"batch\[1\] is a set, which cannot be cut"),
    (({"it": iter("abcde")},), TypeError, r"batch\[1\]\['it'\] is a str_\w*iterator, which cannot be cut"),
    ((nn.Linear(3, 2),), TypeError, r"batch\[1\] is a Linear.*let the loss function close over it"),
    ((Pair(X, object()),), TypeError, r"batch\[1\].size is a object|batch\[1\]\[1\] is a object"),
    ((X.to_sparse(),), TypeError, r"batch\[1\] is a sparse_coo tensor, which cannot be cut"),
    (({"x": [X.to_sparse_csr(), X]},), TypeError, r"batch\[1\]\['x'\]\[0\] is a sparse_csr tensor"),
    ((torch.nested.nested_tensor([X[0], X[1, :2]]),), TypeError, r"batch\[1\] is a nested tensor"),
    ((torch.ones(4, 2),), ValueError, r"agree in dimension 0 but have \[4, 5\] samples.*batch\[0\].*batch\[1\]"),
    ((numpy.ones((4, 2)),), ValueError, r"agree in dimension 0 but have \[4, 5\] samples"),
])
@pytest.mark.parametrize("runtime", [None, ScriptedRuntime], ids=["plain", "shared"])
def test_what_cannot_be_cut_is_named(batch, kind, told, runtime):
    with pytest.raises(kind, match=told):
        slices_of(*batch, runtime=runtime and runtime())


@pytest.mark.parametrize("batch, told", [
    ((), "and was given nothing"), ((["a", "b"], 3), "and was given a list of 2 str, and an int"),
    (({},), "and was given an empty dict"), ((torch.ones(0, 3),), r"and was given a tensor of shape \[0, 3\]"),
    ((torch.ones(()),), r"and was given a tensor of shape \[\]"), (({"x": "a"},), "and was given a dict of 1 str"),
])
def test_a_batch_without_samples_is_told_what_it_is(batch, told):
    model = nn.Linear(3, 2)
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=f"at least one tensor with at least one sample in dimension 0, {told}"):
        step(lambda *_: None, *batch)


def test_a_single_element_is_the_batch():
    model = nn.Linear(3, 2)
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"^batch\['names'\] is a list of 1 str"):
        step(lambda batch: None, {"x": X, "names": ["a"]})
