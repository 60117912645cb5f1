"""Models that torch.compile has made run again after a discard, and are compiled for the sizes that they have."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from training_ways import Training, batch, network, same, sgd  # noqa: E402

import sluice  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Compiled(Training):
    backend = "aot_eager"

    def model(self):
        return torch.compile(network(), backend=self.backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_run_again(backend):
    way = type("Compiled", (Compiled,), {"backend": backend})
    disturbed = way().train(ScriptedRuntime(AT_COMMIT, watch=False))
    assert disturbed["stats"]["discards"] > 0
    same(disturbed, way().train(None))


class Eager(nn.Module):
    """Remembers the sizes of batches that it is run on as Python has it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.sizes.append(len(x))
        return x


class Around(nn.Module):
    """A module of one's own: torch's are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = Eager()
        self.inner = nn.Sequential(self.eager, network())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("what", ["module", "in place", "inside", "loss"])
def test_a_compiled_model_is_compiled_for_the_sizes_of_its_slices_alone(what):
    sizes = []

    def backend(graph, inputs):
        shapes = [tuple(each.shape) for each in inputs if isinstance(each, torch.Tensor)]
        sizes.extend(shape[0] for shape in shapes if shape[1:] == (6,) and shape[0] != 8)  # not the weight
        return graph.forward

    torch._dynamo.reset()
    model = Around()
    eager = model.eager

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    if what == "module":
        model = torch.compile(model, backend=backend)
    elif what == "in place":
        model.compile(backend=backend)
    elif what == "inside":
        model.inner = torch.compile(model.inner, backend=backend)
    else:
        loss = torch.compile(loss, backend=backend)
    with sharing(ScriptedRuntime(watch=False)):
        step = sluice.Step(model, sgd(model))
    for _ in range(2):
        step(loss, *batch(12))
    assert sizes == [12]
    assert eager.sizes == [2], "before that, for what libraries create once"
