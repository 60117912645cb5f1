"""Which parameters are trained."""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch import nn

from sluice._modules import Parts, are_same

_requires_grad = operator.attrgetter("requires_grad")


class Trained:
    """The parameters that require a gradient: the optimizer's, then the model's others.

    Looked for in every step, while the device waits; to see that nothing has changed takes less than half of that.
    """

    def __init__(self, parts: Parts, param_groups: list[dict[str, Any]]) -> None:
        self._parts = parts
        self._param_groups = param_groups
        self._candidates: list[nn.Parameter] = []
        self._each: list[nn.Parameter] = []  # of them, once
        self._answers: list[bool] | None = None
        self._found: list[nn.Parameter] = []

    def look(self) -> list[nn.Parameter]:
        """Raises ValueError if the optimizer has none."""
        of_optimizer = [param for group in self._param_groups for param in group["params"]]
        candidates = of_optimizer + self._parts.parameters
        if not are_same(candidates, self._candidates):
            # By identity: hashing a tensor is a call of a Python function.
            self._each = list({id(param): param for param in candidates}.values())
            self._candidates, self._answers = candidates, None
        answers = list(map(_requires_grad, self._each))
        if answers != self._answers:
            if not any(map(_requires_grad, of_optimizer)):
                raise ValueError("the optimizer has no parameter that requires a gradient")
            self._found = list(itertools.compress(self._each, answers))
            self._answers = answers
        return self._found
