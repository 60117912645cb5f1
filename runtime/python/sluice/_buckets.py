"""Gradients that lie side by side, so that one collective reduces many of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sluice import _torch_compat

#: Gradients are reduced in pieces of so many bytes, as DistributedDataParallel does.
BUCKET_BYTES = 25 << 20
#: As torch lays tensors that it allocates: kernels take the same way through them, and so come to the same bits.
_ALIGNMENT_BYTES = 512


class Bucket:
    """Parameters of one type and device, and room for their gradients' sums."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.flat: torch.Tensor | None = None  #: all sums; None until there is room
        self.sums: list[torch.Tensor] = []  #: one for each parameter, shaped and laid out like it: parts of ``flat``

    @torch.no_grad()
    def make(self) -> None:
        """Makes room, if there is none. Not to be called in a micro-batch: it lasts."""
        if self.flat is not None:
            return
        first = self.params[0]
        grain = max(1, _ALIGNMENT_BYTES // first.element_size())
        starts, end = [], 0
        for param in self.params:
            starts.append(end)
            end += -(-param.numel() // grain) * grain
        self.flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.sums = [self.flat.as_strided(param.size(), torch.empty_like(param, device="meta").stride(), start)
                     for param, start in zip(self.params, starts, strict=True)]

    def bring(self, totals: list[torch.Tensor | None]) -> set[int]:
        """Has these gradients where the sums lie, and zeros where there is none. Returns the parameters without, by ``id``."""
        places, others = [], []
        for place, total in zip(self.sums, totals, strict=True):
            if total is None:
                place.zero_()
            elif total is not place:
                places.append(place)
                others.append(total)
        if places:
            _torch_compat.copy_all(places, others)
        return {id(param) for param, total in zip(self.params, totals, strict=True) if total is None}


def in_buckets(params: list[nn.Parameter]) -> Iterator[Bucket]:
    """Parameters of one type and device together, in their order."""
    open_ones: dict[tuple, list[nn.Parameter]] = {}
    filled: dict[tuple, int] = {}
    for each in params:
        kind = (each.dtype, each.device)
        open_ones.setdefault(kind, []).append(each)
        filled[kind] = filled.get(kind, 0) + each.nbytes
        if filled[kind] >= BUCKET_BYTES:
            del filled[kind]
            yield Bucket(open_ones.pop(kind))
    yield from map(Bucket, open_ones.values())
