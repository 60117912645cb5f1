"""Trainers in several processes learn with sluice what they learn in DistributedDataParallel alone, whatever is taken away."""

import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning", reason="lightning is not installed: see tests/requirements.txt")
transformers = pytest.importorskip("transformers")

from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import accelerate_test  # noqa: E402
import gloo_processes  # noqa: E402
import lightning_test  # noqa: E402
import transformers_test  # noqa: E402
from scripted_runtime import AT_COMMIT, PatientRuntime, sharing  # noqa: E402

from sluice.integrations.lightning import SluiceDDPStrategy  # noqa: E402
from sluice.integrations import accelerate as accelerate_integration  # noqa: E402
from sluice.integrations.transformers import share  # noqa: E402

RANKS = 2


def as_torchrun_starts(rank: int) -> None:
    """What trainers read of the environment. The processes have met already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(RANKS),
                   "LOCAL_WORLD_SIZE": str(RANKS), "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "1"}
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()


def weights_of_all(model: torch.nn.Module) -> torch.Tensor:
    """The weights, which must be the same on all ranks."""
    whole = torch.cat([param.detach().flatten() for param in model.parameters()])
    gloo_processes.expect_same_on_all(whole)
    return whole


def losing(operator: int, rank: int) -> PatientRuntime:
    """The first rank's memory goes again and again, the other's stays."""
    return PatientRuntime(operator if rank == 0 else None)


# --- Hugging Face -----------------------------------------------------------------------------------------------------------


def transformers_trained(folder: Path, model_of, micro_batch: int | None, runtime=None, shares=True, **arguments):
    torch.manual_seed(0)
    model = model_of(0.0)
    trainer = transformers.Trainer(
        model=model, train_dataset=transformers_test.Samples(model_of is transformers_test.classifier),
        args=transformers.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, use_cpu=True,
            ddp_backend="gloo", save_strategy="no", report_to=[], disable_tqdm=True, seed=1, optim="sgd", learning_rate=0.1,
            **arguments))
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.accelerator.num_processes == RANKS
    shared = share(trainer, micro_batch) if shares else None
    with sharing(runtime):
        loss = trainer.train().training_loss
    return weights_of_all(model), loss, shared.stats() if shared else {}


def with_transformers(rank: int) -> None:
    as_torchrun_starts(rank)
    folder = Path(os.environ["TEST_FOLDER"])
    for model_of in (transformers_test.language_model, transformers_test.classifier):
        for arguments in ({}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}):
            alone, loss, _ = transformers_trained(folder, model_of, None, shares=False, **arguments)
            sliced, its_loss, stats = transformers_trained(folder, model_of, 3, **arguments)
            torch.testing.assert_close(sliced, alone, rtol=1e-5, atol=1e-6)
            assert its_loss == pytest.approx(loss, rel=1e-5)
            assert stats["commits"] > stats["steps"]  # slices of three and one
            for operator in (60, AT_COMMIT):
                runtime = losing(operator, rank)
                disturbed, *_, lost = transformers_trained(folder, model_of, 3, runtime, **arguments)
                assert torch.equal(disturbed, sliced)
                assert lost["discards"] == (lost["commits"] if rank == 0 else 0)
                assert set(runtime.left_behind) == {0}


# --- Lightning --------------------------------------------------------------------------------------------------------------


class Module(lightning_test.Module):
    def __init__(self) -> None:
        super().__init__(dropout=0.0, optimizer=torch.optim.SGD)


def lightning_trained(strategy, runtime=None, **options):
    torch.manual_seed(0)
    module = Module()
    data = TensorDataset(torch.randn(29, 6), torch.randint(4, (29,)))
    trainer = lightning.Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", devices=RANKS, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options)
    assert trainer.world_size == RANKS
    with sharing(runtime):
        trainer.fit(module, DataLoader(data, 8, shuffle=False))
    return weights_of_all(module), module.seen


def with_lightning(rank: int) -> None:
    as_torchrun_starts(rank)
    for options in ({}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}):
        alone, seen = lightning_trained(DDPStrategy(process_group_backend="gloo"), **options)
        sliced, its = lightning_trained(SluiceDDPStrategy(3, process_group_backend="gloo"), **options)
        torch.testing.assert_close(sliced, alone, rtol=1e-5, atol=1e-6)
        for one, other in zip(its, seen, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for operator in (0, 21, AT_COMMIT):
            runtime, strategy = losing(operator, rank), SluiceDDPStrategy(3, process_group_backend="gloo")
            disturbed, again = lightning_trained(strategy, runtime, **options)
            assert torch.equal(disturbed, sliced) and again == its
            stats = strategy.stats()
            assert stats["discards"] == (stats["commits"] if rank == 0 else 0)
            assert set(runtime.left_behind) == {0}


# --- accelerate -------------------------------------------------------------------------------------------------------------


def accelerate_trained(micro_batch: int | None, runtime=None, shares=True, accumulate=1, loss_of=accelerate_test.mean):
    accelerator = accelerate_test.accelerator_with("no", accumulate)
    assert accelerator.num_processes == RANKS
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(TensorDataset(torch.randn(29, 6), torch.randint(4, (29,))), 4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with sharing(runtime):
        shared = accelerate_integration.share(accelerator, model, optimizer, micro_batch) if shares else None
    forward_backward = shared or accelerate_test.alone(accelerator, model, optimizer, loss_of)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                losses.append(forward_backward(lambda x, y: loss_of(model, x, y), x, y).item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights_of_all(model), losses, shared.stats() if shared else {}


def with_accelerate(rank: int) -> None:
    as_torchrun_starts(rank)
    for how in ({}, {"accumulate": 2}, {"accumulate": 3, "loss_of": accelerate_test.weighted}):
        alone, loss, _ = accelerate_trained(None, shares=False, **how)
        whole, same_loss, _ = accelerate_trained(None, **how)
        sliced, its_loss, stats = accelerate_trained(3, **how)
        assert same_loss == loss
        for one in (whole, sliced):
            torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-6)
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert stats["commits"] > stats["steps"]
        for operator in (0, 21, AT_COMMIT):
            runtime = losing(operator, rank)
            disturbed, again, lost = accelerate_trained(3, runtime, **how)
            assert torch.equal(disturbed, sliced) and again == its_loss
            assert lost["discards"] == (lost["commits"] if rank == 0 else 0)
            assert set(runtime.left_behind) == {0}


# --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [with_transformers, with_lightning, with_accelerate], ids=lambda body: body.__name__)
def test_in_processes_that_train_together(tmp_path, body, monkeypatch):
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    gloo_processes.run(tmp_path, (body,), RANKS)
