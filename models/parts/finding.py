"""The anatomy of a module that does not declare one: trace, assemble, prove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy
from ..errors import ModelError
from .assemble import assemble
from .ledger import FIXED, Ledger
from .proof import prove
from .trace import trace


def find(
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    parts: Mapping[str, Sequence[str]] | None = None,
    channels: int | None = None,
    check: bool = True,
) -> Anatomy:
    """The parts of a module, from one example input (a batch of any size; values hardly matter).

    Layers that meet through skips, concatenations, flattening or grouped convolutions share cells.
    A cell is a channel; a hidden unit of LSTM, GRU and RNN; a head of attention. Channels that must
    stay in groups (grouped convolutions, group norm) are one cell per group. Dimensions whose places
    mean something (kernels, positions, vocabularies) carry no cells; a parameter without any cell (a
    temperature) is a part of one cell of its own.

    parts
        Axes to name by hand where the trace fails: `{"tokens": ["mix.weight:0", "mix.bias:0"]}` says
        that these axes, of equal length, stand for the same cells in the same order. Parameter names
        may be globs. Axes under the empty name carry no cells.
    channels
        The dimension of the first input that holds channels: by default the last of inputs [n, f], 1 of
        images, and of [n, a, b] 1 for modules with Conv1d layers, else 2.
    check
        Permute the cells of all parts, on a copy, and compare outputs. Leave it on: it turns a trace
        that went wrong into an error. It costs about two forward passes in float64.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise ModelError("give the example input as a tensor, or as a tuple of tensors")
    if len(inputs[0]) < 1:
        raise ModelError("the example input is an empty batch; give at least one sample")
    dims = [_channel_dim(module, x, channels if i == 0 else None) for i, x in enumerate(inputs)]
    ledger = Ledger()
    _enter_by_hand(module, parts or {}, ledger)
    state = torch.random.get_rng_state()  # stand-ins draw weights: leave no trace
    try:
        leaving = trace(module, inputs, dims, ledger)
    finally:
        torch.random.set_rng_state(state)
    anatomy = assemble(module, ledger, leaving)
    if check:
        prove(module, anatomy, inputs, dims)
    return anatomy


def _channel_dim(module: nn.Module, x: Tensor, given: int | None) -> int | None:
    if given is not None:
        if not -x.ndim < given < x.ndim or given == 0:
            raise ModelError(
                f"channels={given}: the example input has dimensions 1 to {x.ndim - 1}"
            )
        return given % x.ndim
    if not x.is_floating_point() or x.ndim < 2:
        return None
    if x.ndim == 3:
        return 1 if any(isinstance(one, nn.Conv1d) for one in module.modules()) else 2
    return 1


def _enter_by_hand(module: nn.Module, parts: Mapping[str, Sequence[str]], ledger: Ledger) -> None:
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    shapes |= {name: tuple(value.shape) for name, value in module.named_buffers()}
    for part, entries in parts.items():
        found: dict[tuple[str, int], int] = {}
        for entry in [entries] if isinstance(entries, str) else entries:
            pattern, _, axis = entry.rpartition(":")
            matching = [name for name in shapes if fnmatchcase(name, pattern)]
            if not matching or not axis.isdecimal():
                raise ModelError(
                    f"part {part!r}: {entry!r} names no axis; write 'parameter:axis', as in "
                    f"'{next(iter(shapes), 'weight')}:0'"
                )
            for name in matching:
                if int(axis) >= len(shapes[name]):
                    raise ModelError(
                        f"part {part!r}: {name!r} has {len(shapes[name])} axes, so none is {axis}"
                    )
                found[name, int(axis)] = shapes[name][int(axis)]
        if not part:
            for (name, axis), size in found.items():
                ledger.place_by_hand(name, axis, np.full(size, FIXED))
            continue
        if len(set(found.values())) != 1:
            sizes = ", ".join(f"{name}:{axis} has {n}" for (name, axis), n in found.items())
            raise ModelError(f"part {part!r}: its axes must have as many cells each, but {sizes}")
        space = ledger.channels(part, next(iter(found.values())))
        for name, axis in found:
            if (name, axis) in ledger.axes:
                raise ModelError(f"{name}:{axis} was given to part {part!r} and to another one")
            ledger.place_by_hand(name, axis, space.ids)
