"""What cuDNN draws the dropout of recurrent layers from. Torch makes it at a layer's first run, and again after a generator has got
another state, and keeps it where nobody can ask for it; each run of a layer changes it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sluice import _torch_compat
from sluice._watch import storage_of, whole


class DropoutStates:
    """Those of this process, seen as they are made, and made outside of a micro-batch's memory, since torch keeps them."""

    def __init__(self) -> None:
        self.made = 0
        self._storages: list[StorageWeakRef] = []
        self._library: Any = None

    def look(self) -> None:
        """From now on they are seen."""
        if self._library is None:
            _torch_compat.need("recurrent dropout")
            # Above what makes it, and of no other use to an operator without tensors among its arguments.
            self._library = torch.library.Library("aten", "IMPL", "ADInplaceOrView")
            self._library.impl(_torch_compat.DROPOUT_OPERATOR, self._make)

    @torch.no_grad()
    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of each, and a copy of them."""
        if not self._storages:
            return []
        self._storages = [each for each in self._storages if not each.expired()]
        found = [each for each in map(whole, self._storages) if each is not None]
        return [(state, state.clone()) for state in found]

    def _make(self, *args: Any, **named: Any) -> torch.Tensor:
        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream()
        made: list[torch.Tensor | Exception] = []

        def make() -> None:
            try:
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    made.append(_torch_compat.make_dropout_state(*args, **named))
            except Exception as why:
                made.append(why)

        # Only what the step's own thread allocates lies in its micro-batch's memory.
        thread = threading.Thread(target=make, name="sluice-dropout")
        thread.start()
        thread.join()
        if isinstance(made[0], Exception):
            raise made[0]
        self.made += 1
        if (storage := storage_of(made[0])) is not None:
            self._storages.append(StorageWeakRef(storage))
        return made[0]


dropout_states = DropoutStates()
