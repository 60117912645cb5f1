"""Small TorchScript models in a model repository of Triton's layout, for tests of the server.

    repository = ModelRepository(tmp_path / "models")
    repository.add("affine", Affine(), inputs={"x": ("TYPE_FP32", [3])}, outputs={"y": ("TYPE_FP32", [2])})
"""

from __future__ import annotations

from pathlib import Path

import torch

Spec = dict[str, tuple[str, list[int]]]


class Affine(torch.nn.Module):
    """A matrix and a vector; `padding_mib` of weights besides, one of which is added, so that size can be chosen."""

    def __init__(self, seed: int = 0, padding_mib: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(3, 2, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(2, generator=generator))
        elements = max(1, int(padding_mib * 2**20) // 4)
        self.padding = torch.nn.Parameter(torch.randn(elements, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias + self.padding[-1]


class TinyNet(torch.nn.Module):
    """Convolution, batch normalisation, attention-like products: what real models are made of, small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 64, 10),
        )

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.body(image)
        return logits, logits.argmax(1)


class Raising(torch.nn.Module):
    """Refuses negative numbers, as a model with input checks of its own does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative numbers are not taken")
        return x


class RaisingLines(torch.nn.Module):
    """Says why in several lines, one of which looks like the end of a traceback."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative numbers are not taken:\n  the first was at\nIndexError: 0")
        return x


class Counting(torch.nn.Module):
    """Changes itself, so that each request has to find it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return x + self.count


class Slow(torch.nn.Module):
    """Multiplies matrices `n` times, to be busy for a while; answers the number of rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.eye(256))

    def forward(self, n: int) -> torch.Tensor:
        total = torch.zeros(1, dtype=torch.int64)
        product = self.matrix
        for _ in range(n):
            product = product @ self.matrix
            total += int(product[0, 0])
        return total


class Filling(torch.nn.Module):
    """Fills so many MiB with ones, looks at each, and says how many they are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(1))

    def forward(self, mib: int) -> torch.Tensor:
        ones = self.one.expand(mib * 262144).clone()
        return (ones.min().to(torch.int64) * ones.numel()).reshape(1)


class ModelRepository:
    """Writes models and their configuration into a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, module: torch.nn.Module, inputs: Spec, outputs: Spec, *, batched: bool = True,
            max_batch_size: int = 2**20, more: str = "", version: str = "1") -> torch.nn.Module:
        """Scripts `module`, saves it, and returns it in evaluation mode, as the reference for answers."""
        folder = self.root / name / version
        folder.mkdir(parents=True)
        module.eval()
        torch.jit.script(module).save(str(folder / "model.pt"))
        self.configure(name, inputs, outputs, batched=batched, max_batch_size=max_batch_size, more=more)
        return module

    def configure(self, name: str, inputs: Spec, outputs: Spec, *, batched: bool = True, max_batch_size: int = 2**20,
                  more: str = "") -> None:
        """`more` is of config.pbtxt, behind the rest."""
        (self.root / name).mkdir(parents=True, exist_ok=True)
        lines = [f'name: "{name}"', 'platform: "pytorch_libtorch"', f"max_batch_size: {max_batch_size if batched else 0}"]
        for key, specs in (("input", inputs), ("output", outputs)):
            for tensor, (data_type, dims) in specs.items():
                shape = ", ".join(map(str, dims))
                lines.append(f'{key} {{ name: "{tensor}" data_type: {data_type} dims: [ {shape} ] }}')
        (self.root / name / "config.pbtxt").write_text("\n".join([*lines, more]) + "\n", encoding="utf-8")


AFFINE: dict[str, Spec] = {"inputs": {"x": ("TYPE_FP32", [3])}, "outputs": {"y": ("TYPE_FP32", [2])}}
SLOW = {"inputs": {"n": ("TYPE_INT64", [1])}, "outputs": {"rounds": ("TYPE_INT64", [1])}, "batched": False}
FILLING = {"inputs": {"mib": ("TYPE_INT64", [1])}, "outputs": {"count": ("TYPE_INT64", [1])}, "batched": False}
