"""Ways to train, for tests that train each with and without a runtime that takes memory away."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import numpy  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from scripted_runtime import ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sluice  # noqa: E402


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


def same(left: dict, right: dict) -> None:
    assert left["losses"] == right["losses"]
    assert left["bits"] == right["bits"]
    assert left["random"] == right["random"]
    assert left["more"] == right["more"]
