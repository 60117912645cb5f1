"""What a loss function changes outside of the step's model is put back, or refused by name; weights and all state are the bits
of plain PyTorch."""

import copy
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
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import sluice  # noqa: E402

OPERATORS = (None, 0, 3, 9, 17, 30, 55, AT_COMMIT)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Where something is, modules are looked at in the rehearsal alone."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


def network(inputs: int = 6, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Case:
    """One loop. `make` gives the state that it changes, `step` trains once."""

    micro_batch = 5

    def make(self) -> None:
        self.model = network()
        self.optimizer = adam(self.model)
        self.shared = sluice.Step(self.model, self.optimizer, self.micro_batch)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def step(self, x, y) -> None:
        self.shared(self.loss, x, y)

    def state(self) -> list:
        """Of everything, in plain values."""
        found = []
        for value in vars(self).values():
            if isinstance(value, nn.Module):
                found += [*value.parameters(), *value.buffers()]
            elif isinstance(value, torch.optim.Optimizer):
                found += [each for state in value.state.values() for each in state.values()]
            elif isinstance(value, torch.Tensor):
                found.append(value)
        tensors = [each for each in found if isinstance(each, torch.Tensor)]
        return [*(each.detach().flatten().tolist() for each in tensors), torch.get_rng_state().tolist()]


class Gan(Case):
    """Two steps, each of which runs the other's model."""

    def make(self):
        self.generator, self.critic = network(3, 6), network(6, 1)
        self.of_generator, self.of_critic = adam(self.generator), adam(self.critic)
        self.learns_to_make = sluice.Step(self.generator, self.of_generator, self.micro_batch)
        self.learns_to_judge = sluice.Step(self.critic, self.of_critic, self.micro_batch)

    def judged(self, x, real):
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), float(real)))

    def step(self, x, y):
        noise = torch.randn(len(x), 3)
        with torch.no_grad():
            made = self.generator(noise)
        self.learns_to_judge(lambda real, made: self.judged(real, True) + self.judged(made, False), x, made)
        self.critic.requires_grad_(False)
        self.learns_to_make(lambda noise: self.judged(self.generator(noise), True), noise)
        self.critic.requires_grad_(True)


class GanByHand(Gan):
    def step(self, x, y):
        noise = torch.randn(len(x), 3)
        for micro in self.learns_to_judge.micro_batches(x, noise):
            with micro as (real, noise_of_slice):
                with torch.no_grad():
                    made = self.generator(noise_of_slice)
                micro.backward(self.judged(real, True) + self.judged(made, False))
        self.critic.requires_grad_(False)
        for micro in self.learns_to_make.micro_batches(noise):
            with micro as noise_of_slice:
                micro.backward(self.judged(self.generator(noise_of_slice), True))
        self.critic.requires_grad_(True)


class GanThatStartsLater(Gan):
    """The loss function of the later steps is another one."""

    def make(self):
        super().make()
        self.steps = 0

    def step(self, x, y):
        self.steps += 1
        if self.steps > 2:
            return super().step(x, y)
        self.learns_to_make(lambda noise: self.generator(noise).square().mean(), torch.randn(len(x), 3))


class SpectralGan(Gan):
    """Norms of weights, taken by iteration."""

    def make(self):
        super().make()
        norm = nn.utils.parametrizations.spectral_norm
        self.critic = nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))
        self.of_critic = adam(self.critic)
        self.learns_to_judge = sluice.Step(self.critic, self.of_critic, self.micro_batch)


class Distillation(Case):
    """From a teacher that trains: batch statistics and dropout."""

    def make(self):
        self.teacher = network().requires_grad_(False)
        super().make()

    def loss(self, x, y):
        return F.kl_div(self.model(x).log_softmax(1), self.teacher(x).softmax(1), reduction="batchmean")


class AverageInside(Case):
    """An average of the weights that the loss function updates."""

    def make(self):
        super().make()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)

    def loss(self, x, y):
        self.average.update_parameters(self.model)
        return super().loss(x, y)


class AverageByHand(Case):
    def make(self):
        super().make()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, x, y):
        with torch.no_grad():
            for mine, its in zip(self.average.parameters(), self.model.parameters()):
                mine.lerp_(its, 0.1)
        return super().loss(x, y) + (self.average(x) - self.model(x)).square().mean()


class SharedTrunk(Case):
    """Two models with one trunk, which both steps train, in turns."""

    def make(self):
        self.trunk = network(6, 8)
        self.first, self.second = nn.Sequential(self.trunk, nn.Linear(8, 4)), nn.Sequential(self.trunk, nn.Linear(8, 4))
        self.of_first, self.of_second = adam(self.first), adam(self.second)
        self.steps = [sluice.Step(self.first, self.of_first, 5), sluice.Step(self.second, self.of_second, 5)]

    def step(self, x, y):
        self.steps[0](lambda x, y: F.cross_entropy(self.first(x), y), x, y)
        self.steps[1](lambda x, y: F.cross_entropy(self.second(x), y), x, y)


class Statistics(Case):
    """Batch statistics that belong to no module."""

    def make(self):
        super().make()
        self.mean, self.variance = torch.zeros(6), torch.ones(6)

    def loss(self, x, y):
        return super().loss(F.batch_norm(x, self.mean, self.variance, training=True), y)


class Norm(Case):
    """A module that is no part of the model."""

    def make(self):
        super().make()
        self.norm = nn.BatchNorm1d(6, affine=False)

    def loss(self, x, y):
        return super().loss(self.norm(x), y)


class InstanceNorm(Norm):
    def make(self):
        super().make()
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def loss(self, x, y):
        return Case.loss(self, self.norm(x[..., None].expand(-1, -1, 3)).mean(2), y)


class Counter(Case):
    def make(self):
        super().make()
        self.count, self.places = torch.zeros((), dtype=torch.int64), torch.zeros(3, 6)

    def loss(self, x, y):
        self.count += len(x)
        self.places[1].add_(x.detach().mean(0))
        torch.add(self.places[2], x.detach().sum(0), out=self.places[2])
        return super().loss(x, y)


class Queue(Case):
    """A queue of past outputs, as contrastive learning keeps."""

    def make(self):
        super().make()
        self.queue, self.place = torch.zeros(16, 4), torch.zeros((), dtype=torch.int64)

    def loss(self, x, y):
        output = self.model(x)
        self.queue.index_copy_(0, (self.place + torch.arange(len(x))) % 16, output.detach())
        self.place.add_(len(x)).remainder_(16)
        return F.cross_entropy(output, y) + (output @ self.queue.T.clone()).square().mean()


class Replacing(nn.Module):
    """Binds its buffer anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Replaced(Norm):
    def make(self):
        super().make()
        self.norm = Replacing()


class Masked(Case):
    """The loss function writes into its slice."""

    def loss(self, x, y):
        x[torch.rand(x.shape) < 0.3] *= 0.5
        x.add_(1)
        return super().loss(x, y)

    def step(self, x, y):
        super().step(x, y)
        self.seen = x  # as the loss function has left it


class Renormalised(Case):
    """Forward writes into the model's own weights."""

    def make(self):
        super().make()
        self.model = nn.Sequential(nn.Embedding(6, 8, max_norm=0.1, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(48, 4))
        self.optimizer = adam(self.model)
        self.shared = sluice.Step(self.model, self.optimizer, self.micro_batch)

    def step(self, x, y):
        super().step(x.abs().mul(10).long() % 6, y)


class Closure(Distillation):
    def make(self):
        super().make()
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=2, history_size=2)
        self.shared = sluice.Step(self.model, self.optimizer, self.micro_batch)


class AnotherEachTime(Case):
    """A module that the loss function makes, buffers and all."""

    def loss(self, x, y):
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return weighted(self.model(nn.BatchNorm1d(6)(x).detach()), y) + torch.tensor([1.0]).add_(1).sum()


class KeptGradients(Case):
    """A module with gradients of its own, to which backward adds."""

    def make(self):
        super().make()
        self.other = nn.Linear(6, 6)
        self.other(torch.ones(1, 6)).sum().backward()

    def loss(self, x, y):
        return super().loss(self.other(x), y)

    def state(self):
        return [*super().state(), *(param.grad.tolist() for param in self.other.parameters())]


CASES = [Case, Gan, GanByHand, GanThatStartsLater, SpectralGan, Distillation, AverageInside, AverageByHand, SharedTrunk,
         Statistics, Norm, InstanceNorm, Counter, Queue, Replaced, Masked, Renormalised,
         AnotherEachTime, KeptGradients, Closure]


def train(case: type[Case], runtime: ScriptedRuntime | None) -> list:
    torch.manual_seed(3)
    with sharing(runtime):
        made = case()
        made.make()
    for samples in (12, 12, 7, 12):
        made.step(torch.randn(samples, 6), torch.randint(4, (samples,)))
    return made.state()


@pytest.fixture(scope="module")
def plain():
    known = {}

    def of(case: type[Case]) -> list:
        if case not in known:
            known[case] = train(case, None)
        return known[case]

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_losing_memory_leaves_no_trace_outside_of_the_model(case, plain):
    for operator in OPERATORS:
        for silently in (False, True):
            runtime = ScriptedRuntime(operator, silently)
            assert train(case, runtime) == plain(case), f"at {operator}, silently {silently}"
            assert set(runtime.left_behind) == {0}, "something made in a micro-batch outlives it"
            assert operator is None or runtime.discards > 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_commit_that_is_dropped_when_its_turn_comes_leaves_none_either(case, plain):
    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    assert train(case, runtime) == plain(case)
    assert runtime.discards > 4


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
