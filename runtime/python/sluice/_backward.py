"""Running backward for a slice, and ending what it leaves when it is left in its middle."""

from __future__ import annotations

import traceback

import torch

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
        raise SluiceError("backward had run through the graph of this loss before: the step runs backward itself, so leave .backward() "
                          "out of the loss function; and a tensor that it takes over from an earlier call wants .detach()") from why


def empty_backward_queue() -> None:
    """Autograd leaves nodes that were ready when another one raised in the thread's queue, with their gradients and saved
    tensors, until the thread's next backward."""
    torch.ones((), requires_grad=True).backward()


def let_go_of(failure: BaseException) -> None:
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
