"""The models that the lease benchmark serves, written into a repository: `python lease_models.py REPOSITORY NAME…`.

Beside each model's folder lies NAME.json, the body of a request. What is traced is traced on the CPU: so no device stands in
the file, and this process needs none.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from endpoint import Tensors, add_model

TOKENS = 128
IMAGE = 64
TINY_MS = 3.0
TINY_WIDTH = 64


def bert_base() -> tuple[torch.nn.Module, Tensors, Tensors, list]:
    """Half precision, one text of 128 tokens; nothing that depends on shapes is computed when it is asked."""
    from transformers import BertConfig, BertModel

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig()
            self.bert = BertModel(config).half()
            self.register_buffer("places", torch.arange(TOKENS).unsqueeze(0))
            self.register_buffer("kinds", torch.zeros(1, TOKENS, dtype=torch.int64))
            self.vocabulary = config.vocab_size

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.bert(input_ids=ids, token_type_ids=self.kinds, position_ids=self.places).pooler_output.float()

    model = Pooled().eval()
    ids = torch.randint(1000, model.vocabulary, (1, TOKENS))
    traced = torch.jit.trace(model, (ids,), check_trace=False)
    return (traced, {"ids": ("TYPE_INT64", [1, TOKENS])}, {"pooled": ("TYPE_FP32", [1, -1])},
            ids.flatten().tolist())


def resnet50() -> tuple[torch.nn.Module, Tensors, Tensors, list]:
    """Half precision, channels last, one small image that the model enlarges itself: in JSON a whole one takes longer to read
    than to compute. Numbers have one digit, so that the body stays below 64 KiB, from where the server reads it otherwise."""
    import torchvision

    class Enlarged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.resnet = torchvision.models.resnet50().half().to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large = torch.nn.functional.interpolate(x, size=(224, 224), mode="bilinear", align_corners=False)
            return self.resnet(large.half().contiguous(memory_format=torch.channels_last)).float()

    dice = random.Random(0)
    image = [dice.randrange(10) / 10 for _ in range(3 * IMAGE * IMAGE)]
    traced = torch.jit.trace(Enlarged().eval(), (torch.tensor(image).view(1, 3, IMAGE, IMAGE),), check_trace=False)
    return traced, {"x": ("TYPE_FP32", [1, 3, IMAGE, IMAGE])}, {"y": ("TYPE_FP32", [1, 1000])}, image


class Rounds(torch.nn.Module):
    """So many products of a matrix, with or without something after each."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.eye(TINY_WIDTH))
        self.bounded = bounded
        self.rounds = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(self.rounds):
            y = y @ self.matrix
            if self.bounded:
                y = torch.tanh(y)
        return y.sum(1)


def tiny(bounded: bool) -> tuple[torch.nn.Module, Tensors, Tensors, list]:
    """As many rounds as take three milliseconds of this processor."""
    torch.set_num_threads(1)
    x, trial = torch.eye(TINY_WIDTH)[:8], 200
    module = Rounds(bounded).eval()
    module.rounds = trial
    script = torch.jit.script(module)
    times = []
    with torch.inference_mode(), torch.jit.optimized_execution(False):
        for _ in range(20):
            began = time.monotonic()
            script(x)
            times.append(time.monotonic() - began)
    module.rounds = max(1, round(TINY_MS / (1e3 * statistics.median(times)) * trial))
    return (module, {"x": ("TYPE_FP32", [8, TINY_WIDTH])}, {"y": ("TYPE_FP32", [8])}, x.flatten().tolist())


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Tensors, Tensors, list]]] = {
    "bert-base": bert_base, "resnet50": resnet50, "tiny-products": lambda: tiny(False), "tiny-tanh": lambda: tiny(True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("names", nargs="+", choices=MODELS)
    args = parser.parse_args()
    for name in args.names:
        torch.manual_seed(0)
        with torch.no_grad():
            module, inputs, outputs, data = MODELS[name]()
        add_model(args.repository, name, module, inputs, outputs)
        (given, (kind, shape)), = inputs.items()
        body = {"inputs": [{"name": given, "datatype": kind.removeprefix("TYPE_"), "shape": shape, "data": data}]}
        (args.repository / f"{name}.json").write_text(json.dumps(body, separators=(",", ":")), encoding="utf-8")


if __name__ == "__main__":
    main()
