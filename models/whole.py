"""Networks that are shared whole, or not at all: nobody needs to know their parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from .anatomy import Anatomy, ParameterMap, Part
from .discovery import discover, refuse_lazy, try_example
from .errors import ModelError
from .shares import is_share

_STATISTICS = ("running_mean", "running_var")


def is_whole(spec: object) -> bool:
    """Whether one model's slice is the whole network."""
    return is_share(spec) and (spec == 1 or spec == {"*": 1})


def discover_for(
    slices: Iterable[object],
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...] | None = None,
    **search: Any,
) -> Anatomy:
    """What `discover` finds. Where it fails and no slice is a part of the network, that is one cell."""
    refuse_lazy(module)
    try:
        return discover(module, example, **search)
    except ModelError:
        by_hand = search.get("parts") or search.get("channels") is not None
        if by_hand or callable(getattr(module, "anatomy", None)) or not all(map(is_whole, slices)):
            raise
        if example is not None:
            try_example(module, example)  # an input that does not fit is a mistake all the same
        return _one_cell(module)


def _one_cell(module: nn.Module) -> Anatomy:
    """A part of a single cell, which all parameters and batch statistics belong to."""
    parameters = [_map(name, tuple(value.shape)) for name, value in module.named_parameters()]
    if not parameters:
        raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing to share")
    statistics = [
        _map(name, tuple(value.shape))
        for name, value in module.named_buffers()
        if name.rpartition(".")[2] in _STATISTICS and value.ndim
    ]
    return Anatomy((Part("whole", 1),), tuple(parameters), tuple(statistics))


def _map(name: str, shape: tuple[int, ...]) -> ParameterMap:
    if not shape:
        return ParameterMap(name, shape, (), cell=0)
    # The first axis leads to the cell, so that starting weights are drawn by their fan-in.
    return ParameterMap(name, shape, (np.zeros(shape[0], np.int64), *[None] * (len(shape) - 1)))
