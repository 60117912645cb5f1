"""Cutting a batch into slices along its samples: tensors, arrays and lists, and tuples, lists and mappings of them."""

from __future__ import annotations

import copy
import enum
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: What goes to every slice, being one thing.
_WHOLE = (type(None), str, bytes, numbers.Number, enum.Enum, torch.Tensor, torch.Size, torch.dtype, torch.device, torch.layout,
          torch.memory_format)


def size_of(batch: Any) -> int:
    """Number of samples of a batch, which its tensors and arrays tell by their dimension 0; -1 if it has none.

    Raises:
        TypeError: if something in it is nothing that is known to be cut, or to be one thing.
        ValueError: if its tensors, arrays and lists disagree.
    """
    first: dict[int, str] = {}  # what has so many
    lists = []
    for place, value in _elements(batch, "batch"):
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise TypeError(f"{place} is a {kind} tensor, which cannot be cut into slices: give a dense one, or a list with an element for "
                            "each sample, or let the loss function close over it")
        if _is_list(value):
            lists.append((place, value))
        elif _has_rows(value):
            first.setdefault(len(value), place)
        elif not isinstance(value, _WHOLE) and not _is_array(value) and not isinstance(value, _numpy("generic")):
            raise TypeError(f"{place} is a {type(value).__name__}, which cannot be cut into slices: a batch is made of tensors, "
                            "NumPy arrays and lists with an element for each sample, and of tuples, lists and mappings of those; "
                            "numbers and strings go to every slice. Give its tensors, or let the loss function close over it")
    if len(first) > 1:
        raise ValueError(f"the tensors of a batch must agree in dimension 0 but have {sorted(first)} samples ("
                         f"{', '.join(f'{place}: {size}' for size, place in first.items())}); what is no sample does not belong "
                         "into the batch: let the loss function close over it")
    size = next(iter(first), -1)
    for place, value in lists if size >= 0 else ():
        if len(value) != size:
            raise ValueError(f"{place} is {described(value)}, and the batch has {size} samples: a list without tensors has an "
                             "element for each, and is cut as they are. What has not, let the loss function close over it")
    return size


def described(value: Any) -> str:
    """What it is, for errors."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        return f"{'a tensor' if isinstance(value, torch.Tensor) else 'an array'} of shape {list(value.shape)}"
    name = type(value).__name__
    if not isinstance(value, (list, tuple, range, Mapping)):
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    if len(value) == 0:
        return f"an empty {name}"
    kinds = dict.fromkeys(type(each).__name__ for each in (value.values() if isinstance(value, Mapping) else value))
    return f"a {name} of {len(value)} {' and '.join(kinds)}"


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


def mapped(value: Any, change: Callable[[Any], Any],
           is_leaf: Callable[[Any], bool] = lambda value: isinstance(value, torch.Tensor)) -> Any:
    """The same structure with every leaf, a tensor if nothing else is said, changed; what else there is is passed on whole."""
    if is_leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: mapped(each, change, is_leaf) for key, each in value.items()}
        if type(value) is dict or not hasattr(value, "__setitem__"):
            return changed
        result = copy.copy(value)  # constructors of mappings differ
        for key, each in changed.items():
            result[key] = each
        return result
    if _is_named(value):
        return type(value)(*(mapped(each, change, is_leaf) for each in value))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(mapped(each, change, is_leaf) for each in value)
    return value


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a batch, whose tensors and arrays are views."""
    return mapped(batch, lambda value: value[start:stop], lambda value: _has_rows(value) or _is_list(value))


def copied(value: Any) -> Any:
    """The same structure with a copy of every tensor, detached."""
    return mapped(value, lambda tensor: tensor.detach().clone())


# --- what it is made of -----------------------------------------------------------------------------------------------------


def _elements(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What makes up a batch, each with its place; the outermost tuple is that of a call's arguments."""
    if place == "batch" and isinstance(value, tuple) and not _is_named(value):
        for index, each in enumerate(value):
            yield from _inside(each, place if len(value) == 1 else f"batch[{index}]")
    else:
        yield from _inside(value, place)


def _inside(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _inside(each, f"{place}[{key!r}]")
    elif _is_named(value) or isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and not _is_list(value):
        for index, each in enumerate(value):
            yield from _inside(each, f"{place}[{index}]")
    else:
        yield place, value


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 or _is_array(value) and value.ndim > 0


def _is_list(value: Any) -> bool:
    """Whether its elements are samples: it has no tensors that would be cut themselves."""
    if isinstance(value, range):
        return True
    return (isinstance(value, (list, tuple)) and len(value) > 0 and not isinstance(value, torch.Size) and not _is_named(value)
            and not _holds_rows(value))


def _holds_rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_rows, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_rows, value))
    return _has_rows(value)


def _is_named(value: Any) -> bool:
    """Whether it is a tuple whose elements have names, and are no samples."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_array(value: Any) -> bool:
    return isinstance(value, _numpy("ndarray"))


def _numpy(name: str) -> Any:
    """A type of NumPy's; none, as long as nobody has imported it."""
    return getattr(sys.modules.get("numpy"), name, ())
