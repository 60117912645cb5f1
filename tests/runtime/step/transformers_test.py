"""A Hugging Face Trainer that shares learns what it learns alone: the same bits, whatever is taken away."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: see tests/requirements.txt")

from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402

import sluice  # noqa: E402
from sluice.integrations.transformers import share  # noqa: E402

SAMPLES, LENGTH, WORDS = 18, 8, 20


@pytest.fixture(autouse=True, scope="module")
def quiet_and_alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)


class Samples(torch.utils.data.Dataset):
    """Random words; as labels the same, partly masked, or a class."""

    def __init__(self, classes: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
        self.labels = self.words.clone()
        self.labels[::3, 3:] = -100  # slices count different numbers of tokens
        if classes:
            self.labels = self.words[:, 0] % 3

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def language_model(dropout: float):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0))


def classifier(dropout: float):
    """A model that takes the number of items in a batch and does nothing with it."""
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))


class Recorded(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append((logs.get("loss"), logs.get("grad_norm")))


def train(folder, model_of, runtime=None, micro_batch=3, dropout=0.1, shares=True, optimizer="adamw_torch", batch=8,
          recompute=None, **arguments):
    torch.manual_seed(0)
    model, recorded = model_of(dropout), Recorded()
    trainer = transformers.Trainer(
        model=model, train_dataset=Samples(model_of is classifier), callbacks=[recorded],
        args=transformers.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=batch, num_train_epochs=2, logging_steps=1, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, seed=1, optim=optimizer, **arguments))
    trainer.remove_callback(transformers.PrinterCallback)
    shared = share(trainer, micro_batch, recompute=recompute) if shares else None
    with sharing(runtime):
        trainer.train()
    bits = [param.detach().numpy().tobytes() for param in model.parameters()]
    return {"logs": recorded.logs[:-1], "bits": bits, "stats": shared.stats() if shared else {}}


ARGUMENTS = [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {"bf16": True}]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "accumulation", "bf16"])
@pytest.mark.parametrize("model_of", [language_model, classifier])
def test_losing_memory_leaves_no_trace(model_of, arguments, tmp_path):
    undisturbed = train(tmp_path, model_of, **arguments)
    for operator in (60, AT_COMMIT):
        runtime = ScriptedRuntime(operator)
        disturbed = train(tmp_path, model_of, runtime, **arguments)
        assert disturbed["stats"]["discards"] == disturbed["stats"]["commits"] > 0
        assert disturbed["logs"] == undisturbed["logs"] and disturbed["bits"] == undisturbed["bits"]
        assert set(runtime.left_behind) == {0}


@pytest.mark.parametrize("model_of", [language_model, classifier])
def test_activations_that_are_computed_again_in_some_slices_leave_no_trace(model_of, tmp_path):
    kept = train(tmp_path, model_of)
    for operator in (None, 60, AT_COMMIT):
        again = train(tmp_path, model_of, ScriptedRuntime(operator), recompute=True)
        assert 0 < again["stats"]["recomputed"] < again["stats"]["commits"]
        assert again["logs"] == kept["logs"] and again["bits"] == kept["bits"]


def test_recomputation_is_the_trainers_or_the_steps(tmp_path):
    with pytest.raises(ValueError, match="activation_checkpointing=True .*; give one of both"):
        train(tmp_path, language_model, recompute=True, gradient_checkpointing=True)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "accumulation", "bf16"])
@pytest.mark.parametrize("model_of", [language_model, classifier])
def test_slices_add_up_to_what_the_trainer_computes_alone(model_of, arguments, tmp_path):
    alone = train(tmp_path, model_of, shares=False, dropout=0.0, optimizer="sgd", **arguments)
    whole = train(tmp_path, model_of, micro_batch=None, dropout=0.0, optimizer="sgd", **arguments)
    sliced = train(tmp_path, model_of, micro_batch=3, dropout=0.0, optimizer="sgd", **arguments)
    assert whole["logs"] == alone["logs"] and whole["bits"] == alone["bits"]
    assert sliced["stats"]["commits"] > whole["stats"]["commits"]
    for one, other in zip(sliced["logs"], alone["logs"], strict=True):
        assert one == pytest.approx(other, rel=2e-2 if "bf16" in arguments else 1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_slices_are_the_trainers_own_accumulation_to_the_bit(bf16, tmp_path):
    """In bf16 they differ from the whole batch as much as that does from float32: gradients are rounded once a slice."""
    how = {"optimizer": "adamw_torch", "dropout": 0.1, "bf16": bf16, "learning_rate": 1e-2}
    accumulated = train(tmp_path, language_model, shares=False, batch=4, gradient_accumulation_steps=2, **how)
    for runtime in (None, ScriptedRuntime(None), ScriptedRuntime(60)):
        sliced = train(tmp_path, language_model, runtime, micro_batch=4, batch=8, **how)
        assert sliced["bits"] == accumulated["bits"]


def test_an_overridden_loss_is_a_mean_over_samples(tmp_path):
    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"])
            loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    losses = {}
    for micro_batch in (None, 3):
        torch.manual_seed(0)
        trainer = Own(model=classifier(0.0), train_dataset=Samples(True), args=transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, max_steps=3, use_cpu=True, save_strategy="no",
            report_to=[], disable_tqdm=True))
        trainer.remove_callback(transformers.PrinterCallback)
        share(trainer, micro_batch)
        losses[micro_batch] = trainer.train().training_loss
    assert losses[3] == pytest.approx(losses[None], rel=1e-5)


def test_what_cannot_share_says_so(tmp_path):
    with pytest.raises(TypeError, match="takes a transformers.Trainer, not str"):
        share("trainer")
    with pytest.raises(ValueError, match="micro_batch must be at least 1"):
        train(tmp_path, classifier, micro_batch=0)
    with pytest.raises(sluice.SluiceError, match="updates parameters inside of backward"):
        trainer = transformers.Trainer(model=classifier(0.0), args=transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[]))
        trainer.args.optim = transformers.training_args.OptimizerNames.LOMO
        share(trainer)
        trainer.training_step(trainer.model, {})
