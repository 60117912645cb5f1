"""Cutting a batch into slices: tensors, tuples, lists and dicts of them, along dimension 0."""

from __future__ import annotations

from typing import Any

import torch


def size_of(batch: Any) -> int:
    """Number of samples of a batch; -1 if it has no tensor. Raises ValueError if its tensors disagree."""
    sizes = set(_sizes(batch))
    if len(sizes) > 1:
        raise ValueError(f"the tensors of a batch must agree in dimension 0 but have {sorted(sizes)} samples")
    return sizes.pop() if sizes else -1


def _sizes(batch: Any):
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield batch.shape[0]
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _sizes(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _sizes(value)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a batch; what is no tensor is passed on whole."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 else batch
    if isinstance(batch, dict):
        return type(batch)((key, cut(value, start, stop)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value, start, stop) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(cut(value, start, stop) for value in batch)
    return batch
