"""What makes a step of the gradients of a batch, and can be taken back as long as its launches have not been made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Update:
    """The rest of a step, once.

    Where launches are left to the gate's submitter, a micro-batch has run in Python long before the device gets to its
    commit, and whether it counts is open until then. If the thread waited for that, the device would run empty; so the
    optimizer's launches are left as well, and dropped together with the commit if its memory has gone. What the optimizer
    has changed on the host, ``take_back`` puts back. While nobody asks for memory, the update may be part of the commit.

    Args:
        optimizer: Whose step is part of it.
        body: Returns the batch's loss.
        take_back: Puts back what else it has changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, body: Callable[[], torch.Tensor], take_back: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._body = body
        self._take_back = take_back
        self._before: HostState | None = None
        self.loss: torch.Tensor | None = None

    @property
    def has_run(self) -> bool:
        return self.loss is not None

    def run(self, may_be_dropped: bool = True) -> None:
        self._before = HostState(self._optimizer) if may_be_dropped else None
        self.loss = self._body()

    def take_back(self) -> None:
        """Nothing that ``run`` has launched has been done."""
        if self._before is not None:
            self._before.put_back()
            self._take_back()
        self._before = self.loss = None


class HostState:
    """What an optimizer of torch's keeps on the host: numbers, tensors on the CPU, and which tensors there are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {param: {name: (value, _copy_of(value)) for name, value in entries.items()}
                       for param, entries in optimizer.state.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        for group, before in zip(self._optimizer.param_groups, self._groups):
            group.clear()
            group.update(before)
        state = self._optimizer.state
        for param in [param for param in state if param not in self._state]:
            del state[param]
        for param, entries in self._state.items():
            state[param].clear()
            for name, (value, copy) in entries.items():
                if copy is not None:
                    value.copy_(copy)
                state[param][name] = value


def _copy_of(value: Any) -> torch.Tensor | None:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_cpu else None
