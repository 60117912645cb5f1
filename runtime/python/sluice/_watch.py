"""Looks at what one micro-batch runs and writes, to find what it changes outside of its model."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook

from sluice import _torch_compat
from sluice._agreement import are_fake, has_others
from sluice._torch_compat import TorchDispatchMode, buffers_of, key_of, tree_leaves
from sluice.errors import SluiceError

#: What operators call the statistics that they change without saying so, and by what they tell whether they do.
_STATISTICS, _TRAINS = ("running_mean", "running_var"), ("training", "use_input_stats", "train")

_HOOKED = "Using `torch.compile"  # how torch begins to warn of hooks on all modules


class Watch:
    """A micro-batch that is looked at: other modules as they begin to run, and operators as they write in place.

        enter ─► (first touch: kept as it is) … ─► exit ─► keep | put_back

    What was touched is kept in memory of Python's: torch's may be taken away. Operators that torch.compile has made are not
    seen, nor modules inside of what it has compiled.

    Args:
        modules: Those whose buffers are kept anyway; None: modules are not looked at.
        storages: Those that are kept anyway; None: writes are not looked at.
        given: Storages of the slice.
    """

    def __init__(self, modules: set[nn.Module] | None, storages: set[int] | None, given: set[int]) -> None:
        self._modules = modules
        self._storages = storages
        self._given = given
        self._stack = contextlib.ExitStack()
        self._thread = 0
        self._busy = False
        self._before: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}
        self._writes: set[int] = set()
        self._entered: list[_Entered] = []
        self.gives_written = False  #: whether the slice was written in place

    def __enter__(self) -> Watch:
        self._thread = threading.get_ident()
        if self._modules is not None:
            self._stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=_HOOKED)
            self._stack.callback(register_module_forward_pre_hook(self._enters).remove)
        if self._storages is not None:
            self._stack.enter_context(_Writes(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
        self._modules = None

    @torch.no_grad()
    def keep(self) -> None:
        """The micro-batch is to count: tensors by which it has replaced buffers are copied out of its memory."""
        self._release()
        for each in self._entered:
            each.copy_out()

    @torch.no_grad()
    def put_back(self) -> None:
        """Everything is as it was when it was first touched."""
        self._release()
        for storage, before in self._before.values():
            now = whole(storage)
            if now is not None and now.numel() == before.numel():
                now.copy_(before)
        for each in self._entered:
            each.bind()

    def _release(self) -> None:
        """Of what modules that are no more have had."""
        self._entered = [each for each in self._entered if each.module() is not None]

    # --- what was found ------------------------------------------------------------------------------------------------

    def roots(self) -> list[nn.Module]:
        """Modules that have run, and still are."""
        return [module for each in self._entered if (module := each.module()) is not None]

    def written(self) -> list[StorageWeakRef]:
        """What was written in place, and still is."""
        buffers = {key_of(storage) for root in self.roots() for storage in map(storage_of, root.buffers()) if storage is not None}
        return [storage for key, (storage, _) in self._before.items()
                if key in self._writes - buffers and not storage.expired()]

    def refuse_gradients(self, trained: set[int]) -> None:
        """Raises SluiceError if a module has got gradients that nobody adds up; ``trained``: whose gradients are, by ``id``."""
        for each in self._entered:
            module = each.module()
            for name, param in module.named_parameters() if module is not None else ():
                if id(param) not in trained and param.grad is not each.gradients.get(id(param)):
                    raise SluiceError(
                        f"the loss runs through a {type(module).__name__} that is not the step's model, and whose {name} requires "
                        "a gradient. Freeze it meanwhile (requires_grad_(False)), or, if its gradients are of use, make it part "
                        "of the model: sluice.Step(torch.nn.ModuleList([model, other]), optimizer)")

    def refuse_changes(self) -> None:
        """Raises SluiceError if a module has run that has changed its buffers."""
        for each in self._entered:
            module = each.module()
            if module is not None and (each.is_bound_otherwise() or any(map(self._has_changed, module.buffers()))):
                raise SluiceError(
                    f"a {type(module).__name__} that is not the step's model has changed its buffers in a slice that runs again, "
                    "and had not run in the slices that were looked at for that: what the discarded run has changed cannot be put "
                    "back. Make it part of the model: sluice.Step(torch.nn.ModuleList([model, other]), optimizer)")

    def _has_changed(self, buffer: torch.Tensor) -> bool:
        storage = storage_of(buffer)
        if storage is None or key_of(storage) not in self._before:
            return False
        now, before = whole(StorageWeakRef(storage)), self._before[key_of(storage)][1]
        return now is not None and not torch.equal(now.cpu(), before)

    # --- while the micro-batch runs ------------------------------------------------------------------------------------

    def _enters(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread or module in self._modules:
            return
        self._busy = True
        try:
            inner = [each for each in module.modules() if each not in self._modules]
            self._modules.update(inner)
            self._entered.append(_Entered(module, inner))
            for each in inner:
                for buffer in buffers_of(each).values():
                    if buffer is not None and (storage := storage_of(buffer)) is not None:
                        self._keep(storage)
        finally:
            self._busy = False

    def touches(self, tensor: torch.Tensor, made: set[int]) -> None:
        """An operator is about to write there."""
        storage = storage_of(tensor)
        if self._busy or storage is None or key_of(storage) in made or key_of(storage) in self._storages:
            return
        self._keep(storage)
        if storage.data_ptr() in self._given:
            self.gives_written = True
        else:
            self._writes.add(key_of(storage))

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if key_of(storage) in self._before:
            return
        reference = StorageWeakRef(storage)
        now = whole(reference)
        if now is not None:
            before = torch.frombuffer(bytearray(now.numel()), dtype=torch.uint8)
            with torch.no_grad():
                before.copy_(now)
            self._before[key_of(storage)] = reference, before


class _Entered:
    """A module that has begun to run, with those in it: what tensors they had."""

    def __init__(self, module: nn.Module, inner: list[nn.Module]) -> None:
        self.module = weakref.ref(module)
        self._places = [(weakref.ref(each), name, buffer) for each in inner for name, buffer in buffers_of(each).items()]
        self.gradients = {id(param): param.grad for param in module.parameters()}

    def _moved(self) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
        places = [(module(), name, buffer) for module, name, buffer in self._places]
        return [(module, name, buffer) for module, name, buffer in places
                if module is not None and name in buffers_of(module) and buffers_of(module)[name] is not buffer]

    def is_bound_otherwise(self) -> bool:
        return len(self._moved()) > 0

    def copy_out(self) -> None:
        for module, name, _ in self._moved():
            if (now := buffers_of(module)[name]) is not None:
                buffers_of(module)[name] = now.detach().clone()

    def bind(self) -> None:
        """Gives the modules the tensors that they had."""
        for module, name, buffer in self._moved():
            buffers_of(module)[name] = buffer
        module = self.module()
        for param in module.parameters() if module is not None else ():
            if id(param) in self.gradients and param.grad is not self.gradients[id(param)]:
                param.grad = self.gradients[id(param)]


class _Writes(TorchDispatchMode):
    """Tells a watch of every write in place to what the micro-batch has not made itself."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._made: set[int] = set()

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile makes is compiled as outside of it

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if are_fake(types):
            return func(*args, **kwargs)
        if has_others(types):
            return NotImplemented
        for tensor in _written_by(func, args, kwargs):
            self._watch.touches(tensor, self._made)
        result = func(*args, **kwargs)
        given = set() if func is torch.ops.aten.lift_fresh.default else _storages(args, kwargs)
        self._made |= _storages(result) - given
        return result


def _storages(*values: Any) -> set[int]:
    found = (storage_of(each) for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return {key_of(storage) for storage in found if storage is not None}


def _written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator is about to write to."""
    names, trains = _writing(func)
    if not names:
        return []
    given = {**dict(zip((argument.name for argument in _torch_compat.schema_of(func).arguments), args)), **kwargs}
    if trains is not None and not given.get(trains):
        names = [name for name in names if name not in _STATISTICS]
    return [each for each in tree_leaves([given.get(name) for name in names]) if isinstance(each, torch.Tensor)]


@functools.cache
def _writing(func: Any) -> tuple[list[str], str | None]:
    """Its arguments that are written to, and the one that says whether statistics are."""
    schema = _torch_compat.schema_of(func)
    if schema is None:
        return [], None
    names = [each.name for each in schema.arguments
             if each.alias_info is not None and each.alias_info.is_write or each.name in _STATISTICS]
    return names, next((each.name for each in schema.arguments if each.name in _TRAINS), None)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Where its values lie; None if they have no one place."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def whole(reference: StorageWeakRef) -> torch.Tensor | None:
    """All bytes of a storage that still is, and is not empty. The tensor has a version of its own: to write to it is no change
    that autograd minds."""
    storage = _torch_compat.storage_behind(reference)
    if storage is None or storage.nbytes() == 0:
        return None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
