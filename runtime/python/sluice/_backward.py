"""Running backward for a slice, and ending what it leaves when it is left in its middle."""

from __future__ import annotations

import traceback

import torch
from torch import nn

from sluice.errors import SluiceError


def run_backward(loss: torch.Tensor) -> None:
    """Raises SluiceError if the loss function has left nothing to do."""
    if not loss.requires_grad:
        raise SluiceError("the loss of a slice has no gradient: nothing that requires one has gone into it, or it was detached. The step "
                          "runs backward itself; return the loss as it is, without .backward() and .detach(), and compute it where "
                          "gradients are on")
    try:
        loss.backward()
    except RuntimeError as why:
        if "backward through the graph a second time" not in str(why):
            raise
        raise has_run_before() from why


def has_run_before() -> SluiceError:
    return SluiceError("backward had run through the graph of this loss before: the step runs backward itself, so leave .backward() "
                       "out of the loss function; and a tensor that it takes over from an earlier call wants .detach()")


@torch.no_grad()
def has_doubled(earlier: list[tuple[nn.Parameter, torch.Tensor]], params: list[nn.Parameter], loss: torch.Tensor,
                root: torch.Tensor) -> bool:
    """Whether a backward from ``root``, a multiple of ``loss``, has added to gradients what had come from that loss ``earlier``, as
    when it has run with ``retain_graph=True``. Waits for the device. Gradients of another part of a loss are others; shards and
    sparse ones are not looked at."""
    if [id(param) for param, _ in earlier] != [id(param) for param in params if param.grad is not None]:
        return False
    if any(type(before) is not torch.Tensor or before.layout != torch.strided for _, before in earlier):
        return False
    apart = whole = 0.0
    ratio = float(root / loss)
    for param, before in earlier:
        expected = before * ratio
        apart += float((param.grad - before - expected).float().square().sum())
        whole += float(expected.float().square().sum())
    return apart <= 1e-4 * whole and whole > 0


def empty_backward_queue() -> None:
    """Autograd leaves nodes that were ready when another one raised in the thread's queue, with their gradients and saved
    tensors, until the thread's next backward."""
    torch.ones((), requires_grad=True).backward()


def release_frames_of(failure: BaseException) -> None:
    """Ends what an exception keeps alive of the discarded tensors: frames, and what backward had still to do."""
    empty_backward_queue()
    chain: list[BaseException | None] = [failure]
    while chain:
        why = chain.pop()
        if why is not None:
            where = why.__traceback__
            traceback.clear_frames(where)
            if where is not None:
                where.tb_next = None  # `with` holds the head, and a cleared frame still holds its function's closure
            why.__traceback__ = None
            chain += [why.__cause__, why.__context__]
