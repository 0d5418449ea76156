"""From tied channels to an anatomy: cells, parts, and the axes of every parameter and buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from ..anatomy import Anatomy, ParameterMap, Part
from ..errors import ModelError
from .ledger import FIXED, Channels, Ledger


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
                "traced to what makes them; name the axes by hand with parts={'name': "
                "['parameter:axis', …]}, or give the module an anatomy() method"
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
