"""A Lightning trainer that shares learns what it learns alone: the same bits, whatever is taken away."""

import functools
import logging
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning", reason="lightning is not installed: see tests/requirements.txt")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sluice  # noqa: E402
from sluice.integrations.lightning import SluiceStrategy  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def quiet_and_alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


class Module(lightning.LightningModule):
    """Logs in its step, and returns more than a loss."""

    def __init__(self, dropout: float = 0.2, optimizer=torch.optim.AdamW) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout),
                                       torch.nn.Linear(8, 4))
        self.optimizer = optimizer
        self.seen = []

    def training_step(self, batch, index):
        x, y = batch
        output = self.net(x)
        loss = F.cross_entropy(output, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "accuracy": (output.argmax(1) == y).float().mean(), "outputs": output.detach(), "name": "x"}

    def on_train_batch_end(self, outputs, batch, index):
        assert outputs["outputs"].shape == (len(batch[0]), 4) and outputs["name"] == "x"
        self.seen.append((outputs["loss"].item(), outputs["accuracy"].item()))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.05)


def train(strategy, runtime=None, module=None, **options):
    torch.manual_seed(0)
    module = module() if module else Module()
    data = TensorDataset(torch.randn(29, 6), torch.randint(4, (29,)))
    trainer = lightning.Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", logger=False, barebones=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options)
    with sharing(runtime):
        trainer.fit(module, DataLoader(data, 8, shuffle=True))
    return {"seen": module.seen, "bits": [param.detach().numpy().tobytes() for param in module.parameters()],
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
            "stats": strategy.stats() if isinstance(strategy, SluiceStrategy) else {}}


OPTIONS = [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, {"precision": "bf16-mixed"},
           {"module": lambda: Module(optimizer=functools.partial(torch.optim.LBFGS, max_iter=2))}]
NAMES = ["plain", "accumulation", "bf16", "closure"]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_losing_memory_leaves_no_trace(options):
    undisturbed = train(SluiceStrategy(3), **options)
    for operator in (0, 21, AT_COMMIT):
        runtime = ScriptedRuntime(operator)
        disturbed = train(SluiceStrategy(3), runtime, **options)
        stats = disturbed.pop("stats")
        assert stats["discards"] == stats["commits"] > 0
        assert disturbed == {key: value for key, value in undisturbed.items() if key != "stats"}
        assert set(runtime.left_behind) == {0}


@pytest.mark.parametrize("options", OPTIONS[:3], ids=NAMES[:3])
def test_slices_add_up_to_what_lightning_computes_alone(options):
    options = {**options, "module": lambda: Module(dropout=0.0, optimizer=torch.optim.SGD)}
    alone = train("auto", **options)
    whole = train(SluiceStrategy(), **options)
    sliced = train(SluiceStrategy(3), **options)
    assert {**whole, "stats": {}} == alone
    assert sliced["stats"]["commits"] > whole["stats"]["commits"]
    precise = 2e-2 if "precision" in options else 1e-5
    assert sliced["metrics"] == pytest.approx(alone["metrics"], rel=precise)
    for one, other in zip(sliced["seen"], alone["seen"], strict=True):
        assert one == pytest.approx(other, rel=precise)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Metrics(Module):
    def training_step(self, batch, index):
        self.log("metric", {"nested": object()})


class Lossless(Module):
    def training_step(self, batch, index):
        return "a loss"


@pytest.mark.parametrize("module, told", [
    (Manual, "manual optimization"), (Metrics, "log tensors and numbers"), (Lossless, "scalar tensor"),
])
def test_what_cannot_share_says_so(module, told):
    with pytest.raises(sluice.SluiceError, match=told):
        train(SluiceStrategy(3), module=module)


def test_more_than_one_device_is_refused():
    with pytest.raises(sluice.SluiceError, match="devices=1"):
        train(SluiceStrategy(3), devices=2)
