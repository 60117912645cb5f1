"""What a loss function must not change outside of the step's model is refused by name; what it may is looked at no longer than
needed."""

import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from outside_cases import adam, network  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402

import sluice  # noqa: E402


pytestmark = pytest.mark.usefixtures("one_thread", "nothing_is_compiled")


def made(runtime, micro_batch=4):
    torch.manual_seed(1)
    model = network()
    with sharing(runtime):
        return sluice.Step(model, adam(model), micro_batch)


def data(samples=8):
    return torch.randn(samples, 6), torch.randint(4, (samples,))


@pytest.mark.parametrize("runtime", [ScriptedRuntime(), ScriptedRuntime(AT_COMMIT)], ids=["undisturbed", "disturbed"])
def test_gradients_that_nobody_adds_up_are_refused_by_name_and_leave_nothing(runtime):
    step, critic = made(runtime), network(4, 1)

    def judged(x, y):
        return critic(step.model(x)).mean()

    before = [tensor.clone() for tensor in (*step.model.parameters(), *step.model.buffers(), *critic.buffers())]
    with pytest.raises(sluice.SluiceError, match=r"a Sequential.*whose 0.weight requires.*requires_grad_\(False\).*ModuleList"):
        step(judged, *data())
    assert all(param.grad is None for param in (*critic.parameters(), *step.model.parameters()))
    assert all(map(torch.equal, before, (*step.model.parameters(), *step.model.buffers(), *critic.buffers())))
    critic.requires_grad_(False)
    step(judged, *data())
    assert critic[1].num_batches_tracked == 2 and step.stats()["steps"] == 1
    with pytest.raises(sluice.SluiceError, match="whose weight requires"):  # another loss function is looked at as well
        other = nn.Linear(4, 1)
        step(lambda x, y: other(step.model(x)).mean(), *data())


def test_a_module_that_a_discarded_slice_has_run_unseen_is_refused_by_name():
    class Disturbed(ScriptedRuntime):
        def commit_begin(self, may_defer):
            return 0 if self.takes and not (self._tries % 2) else super().commit_begin(may_defer)

        takes = False

    runtime = Disturbed()
    step, critic = made(runtime), network(4, 1).requires_grad_(False)
    judges = False

    def loss_of(x, y):
        output = step.model(x)
        return F.cross_entropy(output, y) + (critic(output).mean() if judges else 0)

    step(loss_of, *data())
    judges = runtime.takes = True
    before = step.model[0].weight.clone()
    with pytest.raises(sluice.SluiceError, match="a Sequential that is not the step's model has changed its buffers.*ModuleList"):
        step(loss_of, *data())
    assert torch.equal(before, step.model[0].weight)
    runtime.takes = False
    seen = critic[1].num_batches_tracked.item()
    step(loss_of, *data())
    assert critic[1].num_batches_tracked == seen + 2


def test_a_module_that_changes_nothing_may_run_unseen():
    runtime = ScriptedRuntime(AT_COMMIT)
    step, teacher = made(runtime), network().requires_grad_(False).eval()
    teaches = False

    def loss_of(x, y):
        return F.cross_entropy(step.model(x), y) + (teacher(x).mean() if teaches else 0)

    for teaches in (False, True, True):
        step(loss_of, *data())
    assert step.stats()["discards"] == 6


def test_what_other_threads_run_meanwhile_is_theirs():
    step, theirs = made(ScriptedRuntime(AT_COMMIT)), network()
    counts = []

    def loss_of(x, y):
        thread = threading.Thread(target=theirs, args=(torch.randn(4, 6),))
        thread.start()
        thread.join()
        counts.append(len(x))
        return F.cross_entropy(step.model(x), y)

    step(loss_of, *data())
    assert theirs[1].num_batches_tracked == len(counts) == 5


def test_what_was_found_is_not_kept_alive():
    runtime = ScriptedRuntime(AT_COMMIT)
    step = made(runtime)
    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)

    def counting(into):
        def loss_of(x, y):
            into.add_(1)
            return F.cross_entropy(step.model(x), y)

        return loss_of

    step(counting(tensor), *data())
    assert tensor.tolist() == [2, 2, 2]
    del tensor
    gc.collect()
    assert seen() is None
    other = torch.zeros(4)
    for steps in (1, 2):  # the same code, with another tensor in the place of one that is no more
        step(counting(other), *data())
        assert other.tolist() == [2.0 * steps] * 4


def test_nothing_is_looked_at_once_it_is_known():
    step = made(ScriptedRuntime())
    watched = []
    watch = step._engine.outside.watch
    step._engine.outside.watch = lambda *how: watched.append(how) or watch(*how)
    for _ in range(3):
        step(lambda x, y: F.cross_entropy(step.model(x), y), *data())
    assert len(watched) == 1, "the rehearsal"
    for _ in range(2):
        step(lambda x, y: 2 * F.cross_entropy(step.model(x), y), *data())
    assert len(watched) == 2, "and the first slice of another loss function"


@pytest.mark.parametrize("what", ["critic", "loss"])
def test_compiled_parts_are_looked_at_as_python_has_them(what):
    """The rehearsal sees modules inside of what is compiled; nothing is compiled for having been looked at."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def train(runtime):
        torch.manual_seed(2)
        step, critic = made(runtime), network(4, 1).requires_grad_(False)

        def judged(x, y):
            return (critic if what == "loss" else compiled)(step.model(x)).mean()

        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(critic if what == "critic" else judged, backend=backend)
        for _ in range(3):
            step(judged if what == "critic" else compiled, *data())
        return [tensor.tolist() for tensor in (*step.model.parameters(), *step.model.buffers(), *critic.buffers())], len(graphs)

    expected = train(None)
    assert train(ScriptedRuntime(AT_COMMIT, watch=False)) == expected
    torch._dynamo.reset()
