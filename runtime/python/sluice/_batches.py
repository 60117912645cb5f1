"""Cutting a batch into slices: tensors, tuples, lists and mappings of them, along dimension 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def size_of(batch: Any) -> int:
    """Number of samples of a batch; -1 if it has no tensor. Raises ValueError if its tensors disagree."""
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0}
    if len(sizes) > 1:
        raise ValueError(f"the tensors of a batch must agree in dimension 0 but have {sorted(sizes)} samples; what is no "
                         "sample does not belong into the batch: let the loss function close over it")
    return sizes.pop() if sizes else -1


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tensors, mappings, lists and tuples, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


def storages_of(value: Any) -> set[int]:
    """Addresses of the storages that the tensors of a structure lie in."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value) if tensor.layout == torch.strided}


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed; what is no tensor is passed on whole."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: mapped(each, change) for key, each in value.items()}
        if type(value) is dict or not hasattr(value, "__setitem__"):
            return changed
        result = copy.copy(value)  # constructors of mappings differ
        for key, each in changed.items():
            result[key] = each
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, change) for each in value)
    return value


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a batch, as views."""
    return mapped(batch, lambda tensor: tensor[start:stop] if tensor.dim() > 0 else tensor)


def copied(value: Any) -> Any:
    """The same structure with a copy of every tensor, detached."""
    return mapped(value, lambda tensor: tensor.detach().clone())
