"""Whatever a step is made of: losing memory at any operator leaves no trace in what is learned, bit by bit."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import numpy  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sluice  # noqa: E402
from sluice import _gradients, _update  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
OPERATORS = (0, 1, 5, 13, 27, 41, AT_COMMIT)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 6), torch.randint(4, (samples,))


def same_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same whenever it is asked for; random state stays as it is."""
    state = torch.get_rng_state()
    torch.manual_seed(samples)
    data = batch(samples)
    torch.set_rng_state(state)
    return data


class Training:
    """One way to train. `train` gives the bits of what has been learned."""

    samples = (12, 12, 7)  # of each step; the last batch is a partial one
    micro_batch = 5
    options: dict = {}

    def model(self) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y)

    def begin(self) -> None:
        """Makes what the loss function uses."""

    def step(self, step, model, data) -> torch.Tensor:
        return step(lambda x, y: self.loss(model, x, y), *data)

    def train(self, runtime: ScriptedRuntime | None) -> dict:
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)
        self.begin()
        model = self.model()
        optimizer = self.optimizer(model)
        with sharing(runtime):
            step = sluice.Step(model, optimizer, self.micro_batch, **self.options)
        losses = []
        for samples in self.samples:
            losses.append(self.step(step, model, same_batch(samples)))
        tensors = [*model.parameters(), *model.buffers(), *losses]
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return {"bits": [t.detach().numpy().tobytes() for t in tensors], "random": self.random_bits(),
                "stats": step.stats(), "losses": [loss.item() for loss in losses], "model": model,
                "more": self.more(step)}

    def random_bits(self) -> list:
        return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]

    def more(self, step):
        return None


class Plain(Training):
    pass


class Sums(Training):
    options = {"reduction": "sum"}

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum")


class Weighted(Training):
    """Labels of class 0 do not count; a slice may have nothing else."""

    samples = (12, 12, 8)

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y, ignore_index=0), (y != 0).sum()

    def step(self, step, model, data):
        x, y = data
        y[0] = 1
        y[4:9] = 0
        return super().step(step, model, (x, y))


class Generators(Training):
    def begin(self):
        self.own = [random.Random(1), numpy.random.default_rng(2), numpy.random.RandomState(3),
                    torch.Generator().manual_seed(4)]
        self.options = {"generators": self.own}

    def loss(self, model, x, y):
        ours, modern, legacy, of_torch = self.own
        noise = ours.random() + modern.normal() + legacy.normal() + torch.rand((), generator=of_torch).item()
        noise += random.random() + numpy.random.normal()
        return F.cross_entropy(model(x * (1 + noise)), y)

    def random_bits(self):
        ours, modern, legacy, of_torch = self.own
        return [*super().random_bits(), ours.getstate(), modern.bit_generator.state, legacy.get_state()[1].tolist(),
                of_torch.get_state().tolist()]


class Scaled(Training):
    """The scale is too large at first, so that steps are left out."""

    samples = (12, 12, 7, 9, 12)

    def begin(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1, backoff_factor=2.0**-90)
        self.options = {"scaler": self.scaler, "clip_norm": 0.5}

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y) * 100

    def more(self, step):
        return self.scaler.state_dict(), step.grad_norm.item()


class Clipped(Training):
    options = {"clip_norm": 0.1}

    def more(self, step):
        return step.grad_norm.item()


class Closure(Training):
    samples = (12, 12)
    options = {"clip_norm": 5.0}

    def optimizer(self, model):
        return torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class ByHand(Training):
    def output(self, model, x):
        return model(x)

    def step(self, step, model, data):
        counted = 0
        for micro in step.micro_batches(*data):
            with micro as (x, y):
                output = self.output(model, x)
                outputs = {"output": output, "more": [output * 2]}
                loss = F.cross_entropy(output, y)
                micro.backward(loss)
                counted += len(x)
            if micro.committed:
                assert torch.isfinite(loss) and torch.equal(outputs["more"][0], 2 * output)
        assert counted == len(data[0])
        return step.loss


class Checkpointed(Training):
    reentrant = False

    def loss(self, model, x, y):
        x.requires_grad_()  # reentrant checkpoints want it
        return F.cross_entropy(checkpoint(model, x, use_reentrant=self.reentrant), y)


class CheckpointedByHand(ByHand):
    def output(self, model, x):
        return checkpoint(model, x, use_reentrant=False)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Autocast(Training):
    """Entered around the step, so that its cache of cast weights outlives micro-batches."""

    def step(self, step, model, data):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().step(step, model, data)


class Nested(Training):
    def loss(self, model, inputs, scale):
        return F.cross_entropy(model(inputs["x"][0]) * scale, inputs["labels"])

    def step(self, step, model, data):
        x, y = data
        return step(lambda each, scale: self.loss(model, each, scale), {"x": (x, [x, "name"]), "labels": y},
                    torch.tensor(1.5))


WAYS = [Plain, Sums, Weighted, Generators, Scaled, Clipped, Closure, ByHand, Checkpointed, CheckpointedReentrant,
        CheckpointedByHand, Autocast, Nested]


@pytest.fixture(scope="module")
def undisturbed():
    known = {}

    def of(way: type[Training]) -> dict:
        if way not in known:
            known[way] = way().train(None)
        return known[way]

    return of


def same(left: dict, right: dict) -> None:
    assert left["losses"] == right["losses"]
    assert left["bits"] == right["bits"]
    assert left["random"] == right["random"]
    assert left["more"] == right["more"]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("silently", [False, True], ids=["raises", "silent"])
def test_losing_memory_leaves_no_trace(way, silently, undisturbed):
    for operator in OPERATORS:
        runtime = ScriptedRuntime(operator, silently)
        disturbed = way().train(runtime)
        assert disturbed["stats"]["discards"] == disturbed["stats"]["commits"] > len(way.samples)
        same(disturbed, undisturbed(way))
        assert set(runtime.left_behind) == {0}, "something made in a micro-batch outlives it"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_commit_that_is_dropped_when_its_turn_comes_leaves_no_trace(way, undisturbed):
    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    disturbed = way().train(runtime)
    assert disturbed["stats"]["discards"] == disturbed["stats"]["commits"] > len(way.samples)
    same(disturbed, undisturbed(way))


OPTIMIZERS = {
    "AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9, "nesterov": True}, "Adagrad": {"lr_decay": 0.1}, "NAdam": {},
    "ASGD": {"t0": 2}, "RMSprop": {"centered": True}, "Rprop": {}, "RAdam": {}, "Adadelta": {}, "Adamax": {}, "Adafactor": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def test_an_optimizer_that_ran_for_nothing_is_as_it_was(name, foreach, monkeypatch):
    taken_back = []
    put_back = _update.HostState.put_back
    monkeypatch.setattr(_update.HostState, "put_back", lambda state: (taken_back.append(state), put_back(state)))

    class Way(Plain):
        samples = (12, 12, 7, 12, 12)  # the first two steps do not run it ahead

        def optimizer(self, model):
            made = getattr(torch.optim, name)(model.parameters(), lr=0.05, foreach=foreach, **OPTIMIZERS[name])
            self.scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
            return made

        def step(self, step, model, data):
            loss = super().step(step, model, data)
            self.scheduler.step()
            return loss

    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    disturbed = Way().train(runtime)
    assert runtime.dropped == disturbed["stats"]["discards"] > len(Way.samples)
    assert len(taken_back) == 3
    same(disturbed, Way().train(None))


@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
def test_a_step_that_is_interrupted_while_it_waits_leaves_either_all_or_nothing(defer):
    def train(runtime, interrupted):
        torch.manual_seed(1)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        with sharing(runtime):
            step = sluice.Step(model, optimizer)
        for i in range(6):
            torch.manual_seed(i)
            data = batch(8)
            if i == interrupted and runtime is not None:
                runtime.interrupt = True
                with pytest.raises(KeyboardInterrupt):
                    step(lambda x, y: F.cross_entropy(model(x), y), *data)
            elif i != interrupted:
                step(lambda x, y: F.cross_entropy(model(x), y), *data)
        return [t.tolist() for t in model.parameters()], [v["step"].item() for v in optimizer.state.values()]

    if defer:  # the commit is dropped after all, so that the step has not happened
        runtime = ScriptedRuntime(AT_COMMIT, defer=True)
        assert train(runtime, 3) == train(None, 3)
        assert runtime.dropped >= 4
    else:  # it counts, as if the handler had run a moment later, but for the optimizer, which is not run ahead
        assert train(ScriptedRuntime(), 3) == train(None, 3)


class BackwardOfItsOwn(Training):
    """The loss function runs backward for a part of the loss by itself."""

    def loss(self, model, x, y):
        (model[0].weight.square().sum() * (len(x) * 0.01)).backward()
        return F.cross_entropy(model(x), y)


class Scripted(Training):
    """A part of the model is TorchScript."""

    def model(self):
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))), nn.Dropout(0.3),
                             nn.Linear(8, 4))


class WeightsMadeInForward(Training):
    """What the norms that are older than parametrizations make of the weight is an attribute of the module."""

    def model(self):
        spectral, weight = torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm
        return nn.Sequential(spectral(nn.Linear(6, 8)), nn.ReLU(), weight(nn.Linear(8, 8)), nn.Dropout(0.3), nn.Linear(8, 4))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("way", [BackwardOfItsOwn, Scripted, WeightsMadeInForward], ids=lambda way: way.__name__)
@pytest.mark.parametrize("operator", [None, 5, AT_COMMIT])
def test_unusual_losses_and_models_are_trained_as_without_sharing(way, operator):
    def by_hand():
        torch.manual_seed(3)
        model = way().model()
        optimizer = sgd(model)
        losses = []
        for samples in way.samples:
            optimizer.zero_grad()
            loss = way().loss(model, *same_batch(samples))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    whole = type("Whole", (way,), {"micro_batch": None})
    plain = whole().train(None)
    assert plain["losses"] == pytest.approx(by_hand(), rel=1e-6)
    same(whole().train(ScriptedRuntime(operator)), plain)
    same(whole().train(ScriptedRuntime(operator, defer=True)), plain)


def test_a_buffer_that_gets_another_name_is_put_back_under_it():
    model = network()
    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    with sharing(runtime):
        step = sluice.Step(model, sgd(model))
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    model.register_buffer("first", torch.zeros(2))
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    buffer = model._buffers.pop("first")
    model._buffers["second"] = buffer
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    assert "first" not in model._buffers and model._buffers["second"] is buffer


def test_an_optimizer_that_cannot_be_known_runs_once():
    class Counting(torch.optim.SGD):
        runs = 0

        def step(self, closure=None):
            self.runs += 1
            return super().step(closure)

    def hooked(model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.runs = 0
        made.register_step_post_hook(lambda of, *_: setattr(of, "runs", of.runs + 1))
        return made

    for make in (lambda model: Counting(model.parameters(), lr=0.1), hooked):
        torch.manual_seed(1)
        model = network()
        optimizer = make(model)
        runtime = ScriptedRuntime(AT_COMMIT, defer=True)
        with sharing(runtime):
            step = sluice.Step(model, optimizer)
        for _ in range(5):
            step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
        assert runtime.dropped == 5 and optimizer.runs == 5


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sharing_alone_changes_nothing(way, undisturbed):
    same(way().train(ScriptedRuntime()), undisturbed(way))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("operator", [None, 5])
def test_gradients_that_are_used_where_they_lie_leave_no_trace(way, operator, monkeypatch):
    used = []
    take = _gradients.Gradients.take
    monkeypatch.setattr(_gradients.Gradients, "take",
                        lambda of, in_place=False: (used.append(in_place), take(of, in_place)))
    whole = type("Whole", (way,), {"micro_batch": None, "samples": (12, 12, 7, 12)})
    runtime = ScriptedRuntime(operator, serving=False)
    disturbed = whole().train(runtime)
    copies = issubclass(way, (ByHand, Closure, Scaled))  # what cannot be known to run once, and at once
    assert used == [False] * len(used) if copies else used == [False, False, True, True]
    assert set(runtime.left_behind) == {0}
    assert all(param.grad is None for param in disturbed["model"].parameters())
    same(disturbed, whole().train(None))


def test_an_optimizer_that_fails_on_gradients_where_they_lie_leaves_none():
    model = network()
    optimizer = sgd(model)
    runtime = ScriptedRuntime(serving=False)
    with sharing(runtime):
        step = sluice.Step(model, optimizer)
    for _ in range(3):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises((TypeError, RuntimeError)):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    assert all(param.grad is None for param in model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    assert runtime.left_behind[-1] == 0 and step.stats()["steps"] == 4


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


# --- against arithmetic that is written down here -----------------------------------------------------------------------


def gradient_of(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


class Watching(torch.optim.SGD):
    """Remembers the gradients that it was given."""

    def step(self, closure=None):
        self.seen = [param.grad.clone() for param in self.param_groups[0]["params"]]


@pytest.mark.parametrize("runtime", [None, ScriptedRuntime(7)], ids=["plain", "disturbed"])
@pytest.mark.parametrize("kind", ["mean", "sum", "tokens", "tokens as numbers"])
def test_the_gradient_is_that_of_the_whole_batch(kind, runtime):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = torch.randn(11, 6).double(), torch.randint(4, (11,))
    y[:4] = torch.tensor([0, 0, 0, 1])

    def loss_fn(x, y):
        if kind == "mean":
            return F.cross_entropy(model(x), y)
        if kind == "sum":
            return F.cross_entropy(model(x), y, reduction="sum")
        weight = (y != 0).sum()
        return F.cross_entropy(model(x), y, ignore_index=0), weight if kind == "tokens" else weight.item()

    whole = loss_fn(x, y)
    whole = whole[0] if isinstance(whole, tuple) else whole
    expected = gradient_of(whole, model)
    optimizer = Watching(model.parameters(), lr=0.1)
    with sharing(runtime):
        step = sluice.Step(model, optimizer, 3, reduction="sum" if kind == "sum" else "mean")
    loss = step(loss_fn, x, y)
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(optimizer.seen, expected)


def test_the_norm_is_taken_of_the_whole_gradient_once():
    torch.manual_seed(1)
    model = nn.Linear(6, 4).double()
    x, y = torch.randn(8, 6).double(), torch.randint(4, (8,))
    expected = gradient_of(F.cross_entropy(model(x), y), model)
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in expected]))
    optimizer = Watching(model.parameters(), lr=0.1)
    step = sluice.Step(model, optimizer, 3, clip_norm=norm.item() / 2)
    step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    torch.testing.assert_close(step.grad_norm, norm)
    torch.testing.assert_close(optimizer.seen, [each / 2 for each in expected], rtol=1e-5, atol=1e-8)


def test_a_scale_that_is_too_large_leaves_the_step_out_and_backs_off():
    model = nn.Linear(6, 4)
    before = [param.clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    with sharing(ScriptedRuntime(4)):
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, scaler=scaler)
    x, y = batch(8)
    loss = step(lambda x, y: F.cross_entropy(model(x), y) * 1e4, x, y)
    assert all(map(torch.equal, before, model.parameters())) and torch.isfinite(loss)
    assert scaler.get_scale() == 2.0**27
    step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert not any(map(torch.equal, before, model.parameters()))
