"""An optimizer's memory follows the cells that an alignment moves."""

from __future__ import annotations

import torch
from torch import Tensor

from ..network import SlicedNetwork
from .aligning import Alignment


def permute_optimizer(
    optimizer: torch.optim.Optimizer, network: SlicedNetwork, found: Alignment
) -> None:
    """Bring momentum, Adam's moments and the like, in place, into the order that `found` gives.

    Everything that an optimizer remembers in the shape of a parameter is moved with it; numbers that
    it keeps per parameter stay. Call it together with `found.apply(network)`, before the next step.
    """
    offset = 0
    for parameter in network.module.parameters():
        size = parameter.numel()
        # Cells change places inside a parameter, never between two of them.
        order = torch.from_numpy(found.order[offset : offset + size] - offset).to(parameter.device)
        offset += size
        for slot in optimizer.state.get(parameter, {}).values():
            if isinstance(slot, Tensor) and slot.shape == parameter.shape:
                slot.copy_(slot.reshape(-1)[order].view(slot.shape))
