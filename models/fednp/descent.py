"""Adam, plain: f and the NPN have gradients of very different sizes, which one rate would not suit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SLOW, _SLOWER, _TINY = 0.9, 0.999, 1e-8


class Adam:
    """Adam with its usual constants, stepped with gradients that are handed in.

    torch.optim.Adam does the same, but the first torch optimizer of a process loads torch's compiler:
    seconds of start-up for every peer.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float):
        self._parameters, self._rate, self._steps = list(parameters), rate, 0
        self._first = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        self._second = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Descend once; a parameter without a gradient stays."""
        self._steps += 1
        scale = (1 - _SLOWER**self._steps) ** 0.5
        rate = self._rate * scale / (1 - _SLOW**self._steps)
        slots = zip(self._parameters, gradients, self._first, self._second, strict=True)
        for parameter, gradient, first, second in slots:
            if gradient is None:
                continue
            first.lerp_(gradient, 1 - _SLOW)
            second.lerp_(gradient.square(), 1 - _SLOWER)
            parameter.addcdiv_(first, second.sqrt().add_(_TINY * scale), value=-rate)

    def state(self) -> dict[str, Any]:
        """The step's number and both moments."""
        return {
            "steps": self._steps,
            "first": [slot.clone() for slot in self._first],
            "second": [slot.clone() for slot in self._second],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self._steps = int(state["steps"])
        for slots, saved in ((self._first, state["first"]), (self._second, state["second"])):
            for slot, value in zip(slots, saved, strict=True):
                slot.copy_(torch.as_tensor(value))
