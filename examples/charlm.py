"""A character-level language model, and the text it learns: the source of the Python standard library.

The model is a deep and narrow decoder-only transformer that sees characters and hashed groups of three. As in most
training, its activations dwarf what stays (8 MiB a sample at the CPU's size, 90 MiB at the GPU's), and a micro-batch
costs something however small it is: a launch for each operator of many layers, and a gradient of the whole table.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 128  # ASCII; what is beyond becomes 0


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    context: int
    groups: int  # rows of the table of hashed groups
    batch: int  # samples of an optimizer step
    micro_batch: int  # most samples that run at once


SIZES = {
    "cpu": Size(width=64, layers=16, heads=2, context=128, groups=1 << 17, batch=32, micro_batch=32),
    "cuda": Size(width=192, layers=24, heads=6, context=512, groups=1 << 16, batch=128, micro_batch=32),
}


def standard_library_text(most_bytes: int = 4 << 20) -> torch.Tensor:
    """The sources of the standard library's top folder, in order of their names, as uint8 below VOCABULARY."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= most_bytes:
            break
    codes = torch.frombuffer(text[:most_bytes], dtype=torch.uint8)
    return torch.where(codes < VOCABULARY, codes, 0)


class Excerpts:
    """Batches of excerpts at random places; the target is one character on. The same seed, the same batches."""

    def __init__(self, text: torch.Tensor, context: int, seed: int) -> None:
        if len(text) <= context + 1:
            raise ValueError(f"a text of {len(text)} characters is too short for a context of {context}")
        self._text = text
        self._span = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 of shape [count, context], on the CPU."""
        starts = torch.randint(len(self._text) - len(self._span), (count, 1), generator=self._generator)
        excerpts = self._text[starts + self._span].long()
        return excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_in = nn.LayerNorm(size.width)
        self.attention_in = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        split = self.attention_in(self.norm_in(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.norm_mlp(x))


class CharLM(nn.Module):
    """Logits, float of shape [samples, length, VOCABULARY], for characters of shape [samples, length]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, size.width)
        self.groups = nn.Embedding(size.groups, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        before = F.pad(x, (2, 0))
        group = (before[:, :-2] * VOCABULARY + before[:, 1:-1]) * VOCABULARY + x
        row = group * 2654435761 % (1 << 32) % self.groups.num_embeddings  # Knuth's multiplicative hash
        return self.head(self.norm(self.blocks(self.characters(x) + self.groups(row) + self.places(places))))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy; in bfloat16 where the model is on a GPU."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), y.view(-1))
