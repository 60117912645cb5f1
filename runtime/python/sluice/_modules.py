"""What a model is made of, walked through in every step, while the device waits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """As ``model.modules()``, in its order. That resumes a generator at every level for every module, which takes several
    times as long."""
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            if children := module._modules:
                left += [child for child in reversed(children.values()) if child is not None]
    return list(found)


def parameters_of(modules: Iterable[nn.Module]) -> Iterable[nn.Parameter]:
    """The parameters that modules have themselves; those that several have come several times."""
    return (param for module in modules if (own := module._parameters) for param in own.values() if param is not None)


def buffers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The buffers that modules have themselves: whose, under which name, and which."""
    return [(module, name, buffer) for module in modules if (own := module._buffers)
            for name, buffer in own.items() if buffer is not None]
