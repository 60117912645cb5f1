"""What micro-batches change beside their model: buffers of other modules, and tensors that are written in place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sluice import _batches
from sluice._buffers import Buffers
from sluice._modules import Parts
from sluice._torch_compat import buffers_of, key_of
from sluice._watch import Watch, storage_of, whole


class Outside:
    """State that a loss function changes outside of the model that it trains: a discriminator's batch statistics, an average
    of weights, a counter that is a tensor.

    Nobody tells of it, so it is looked for where micro-batches run for the first time (``Watch``), and kept as it was when it
    was first touched. From then on it is kept before every micro-batch, like the model's buffers.

        (save ─► watch? ─► micro-batch ─► (keep ─► resolve) | restore)…

    What is found is held weakly, but for modules, whose buffers may be other tensors at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._roots: list[nn.Module] = []
        self._buffers: Buffers | None = None
        self._written: list[StorageWeakRef] = []
        self._saved: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gives_written = False  # whether slices are written in place
        self._watch: Watch | None = None
        self._seen: set[Any] = set()

    # --- before a micro-batch ------------------------------------------------------------------------------------------

    def save(self, batch: Any = ()) -> None:
        """Remembers what is known to change; ``batch``: the slice."""
        self._watch = None
        if self._buffers is not None:
            self._buffers.save()
        if self._written or self._gives_written:
            self._save_tensors(batch)

    @torch.no_grad()
    def _save_tensors(self, batch: Any) -> None:
        if self._written:
            alive = [each for each in self._written if not each.expired()]
            if len(alive) < len(self._written):
                self._seen.clear()  # others may have taken their places
            self._written = alive
            bytes_now = [each for each in map(whole, self._written) if each is not None]
            self._saved = (bytes_now, [each.clone() for each in bytes_now])
        if self._gives_written:
            self._given = [(tensor, tensor.detach().clone()) for tensor in _batches.tensors_of(batch)]

    def watch(self, modules: bool, writes: bool, batch: Any = ()) -> Watch:
        """Has the micro-batch that begins with that slice looked at. To be entered by the caller."""
        known = set(self._model.modules()).union(*(root.modules() for root in self._roots))
        buffers = (buffer for module in known for buffer in buffers_of(module).values() if buffer is not None)
        storages = {key_of(storage) for storage in map(storage_of, buffers) if storage is not None}
        storages |= {each.cdata for each in self._written if not each.expired()}
        given = _batches.storages_of(batch)
        self._watch = Watch(known if modules else None, storages if writes else None, given)
        return self._watch

    @property
    def is_watched(self) -> bool:
        return self._watch is not None

    def is_known(self, code: Any) -> bool:
        """Whether a micro-batch of a loss function of that code (``code_of``) has been watched to its end."""
        return code in self._seen

    # --- after it ------------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """It is to count: nothing of it is held any more, and tensors by which buffers were replaced are copied."""
        if self._watch is not None:
            self._watch.keep()
        if self._buffers is not None:
            self._buffers.keep()

    def resolve(self, code: Any = None) -> None:
        """It counts; ``code``: what it has run to its end."""
        if self._watch is not None and code is not None:
            self.has_seen(code)
        self._learn()

    def has_seen(self, code: Any) -> None:
        """A micro-batch of that code has been watched to its end."""
        self._seen.add(code)

    @torch.no_grad()
    def restore(self) -> None:
        """It has never been."""
        if self._watch is not None:
            self._watch.put_back()
        if self._buffers is not None:
            self._buffers.restore()
        for tensor, before in zip(*self._saved, strict=True):
            if tensor.untyped_storage().nbytes() == before.numel():
                tensor.copy_(before)
        for tensor, before in self._given:
            tensor.detach().copy_(before)
        self._learn()

    def _learn(self) -> None:
        """Takes over what the watch has found and what still lives."""
        self._saved, self._given = ([], []), []
        watch, self._watch = self._watch, None
        if watch is None:
            return
        roots = [root for root in watch.roots() if any(map(buffers_of, root.modules())) or Parts(root).attributes]
        if roots:
            self._roots += roots
            self._buffers = Buffers(Parts(*self._roots, apart_from=self._model))
        self._written += watch.written()
        self._gives_written |= watch.gives_written


def code_of(function: Any) -> Any:
    """What tells a loss function from others, though it be made anew for every step."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))
