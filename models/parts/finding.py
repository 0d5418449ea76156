"""The anatomy of a module that does not declare one: trace, assemble, prove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy, ParameterMap, Part
from ..discovery import example_inputs
from ..errors import ModelError
from .proof import prove
from .trace import BY_HAND, FIXED, Channels, Ledger, trace


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
    inputs = example_inputs(example)
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


def assemble(module: nn.Module, ledger: Ledger, leaving: Sequence[Channels]) -> Anatomy:
    """Cells that stand on the same axes equally often are one part, named after what makes them."""
    cell_of = _settled(ledger)
    tensors = dict(module.named_parameters())
    statistics = {
        name: value for name, value in module.named_buffers() if value.is_floating_point()
    }
    order, names, inputs, outputs = _parts(ledger, cell_of, leaving)
    number = {cell: index for index, cell in enumerate(np.concatenate([*order, []]).tolist())}
    table = np.full(int(cell_of.max()) + 1, -1, np.int64)
    table[[int(cell) for cell in number]] = list(number.values())

    def axes(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray | None, ...]:
        found: list[np.ndarray | None] = []
        for axis, size in enumerate(shape):
            ids = ledger.axes.get((name, axis))
            if ids is not None and len(ids) != size:
                raise ModelError(f"axis {axis} of {name!r} has {size} indices, not {len(ids)}")
            moves = ids is not None and (cell_of[ids] != FIXED).all()
            found.append(table[cell_of[ids]] if moves else None)
        return tuple(found)

    parts = [Part(name, len(cells)) for name, cells in zip(names, order, strict=True)]
    maps: list[ParameterMap] = []
    total = sum(part.cells for part in parts)
    loose: list[Part] = []
    for name, value in tensors.items():
        shape = tuple(value.shape)
        found = axes(name, shape)
        cell = None
        if all(axis is None for axis in found):
            # A parameter that no cell touches (a temperature) is a part of one cell of its own.
            cell = total + len(loose)
            loose.append(Part(name, 1))
        maps.append(ParameterMap(name, shape, found, cell))
    buffers = []
    for name, value in statistics.items():
        found = axes(name, tuple(value.shape))
        if any(axis is not None for axis in found):
            buffers.append(ParameterMap(name, tuple(value.shape), found))
    return Anatomy((*parts, *loose), tuple(maps), tuple(buffers), frozenset(inputs + outputs))


def _settled(ledger: Ledger) -> np.ndarray:
    """Cells of channels, after what nothing makes and what stands beside it was fixed."""
    made = np.zeros(1, bool)
    for space in ledger.spaces:
        made = np.concatenate([made, np.full(space.count, space.made)])
    cell_of = ledger.cells()
    has_maker = np.zeros(int(cell_of.max()) + 1, bool)
    has_maker[cell_of[made]] = True
    for space in ledger.spaces:
        reached = has_maker[cell_of[space.ids]]
        if not reached.any() or ledger.dropped(space):
            ledger.tie(space.ids, FIXED)
        elif not reached.all():
            raise ModelError(
                f"only {int(reached.sum())} of the {space.count} channels of {space.name!r} could be "
                f"traced to what makes them; {BY_HAND}"
            )
    # An axis moves as a whole or not at all.
    while True:
        cell_of = ledger.cells()
        mixed = [
            ids
            for ids in ledger.axes.values()
            if (cell_of[ids] == FIXED).any() and (cell_of[ids] != FIXED).any()
        ]
        if not mixed:
            return cell_of
        for ids in mixed:
            ledger.tie(ids, FIXED)


def _parts(
    ledger: Ledger, cell_of: np.ndarray, leaving: Sequence[Channels]
) -> tuple[list[np.ndarray], list[str], list[str], list[str]]:
    """Cells by part, the parts' names, and which parts are inputs and outputs; outputs come last."""
    standing: dict[int, list[tuple[int, int]]] = {}
    for index, ids in enumerate(ledger.axes.values()):
        cells, counts = np.unique(cell_of[ids], return_counts=True)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            standing.setdefault(cell, []).append((index, count))
    standing.pop(FIXED, None)
    maker = np.full(int(cell_of.max()) + 1, -1, np.int64)
    for index in reversed(range(len(ledger.spaces))):
        if ledger.spaces[index].made:
            maker[cell_of[ledger.spaces[index].ids]] = index
    leaves = set(np.concatenate([np.empty(0, int), *(cell_of[one.ids] for one in leaving)]))
    groups: dict[tuple[object, ...], list[int]] = {}
    for cell, places in sorted(standing.items()):
        groups.setdefault((cell in leaves, int(maker[cell]), *places), []).append(cell)
    found: list[np.ndarray] = []
    names: list[str] = []
    inputs, outputs = [], []
    for key, cells in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        name = ledger.spaces[maker[cells[0]]].name
        count = sum(other.split("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count else name)
        found.append(np.array(cells))
        if key[0]:
            outputs.append(names[-1])
        elif ledger.spaces[maker[cells[0]]].given:
            inputs.append(names[-1])
    return found, names, inputs, outputs
