"""Moving cells: a permutation of a part's cells, applied to every tensor that they stand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .anatomy import Anatomy
from .errors import ModelError

if TYPE_CHECKING:  # networks find their parts, and finding parts permutes cells
    from .network import SlicedNetwork


def permute(network: SlicedNetwork, part: str, order: Sequence[int] | np.ndarray) -> None:
    """Permute the cells of a part in place: the k-th cell becomes what cell `order[k]` was.

    Parameters and batch statistics move together, so the network computes what it did before; inputs
    and outputs, if their part is permuted, are expected in the new order. What the cells are averaged
    with does not move: permuting across slices changes who owns which values.
    """
    anatomy = network.slicing.anatomy
    names = [one.name for one in anatomy.parts]
    if part not in names:
        raise ModelError(f"the network has no part {part!r}; parts are {', '.join(names)}")
    cells = anatomy.cells(names.index(part))
    chosen = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(chosen), np.arange(len(cells))):
        raise ModelError(
            f"part {part!r} has {len(cells)} cells: its order must hold 0 to {len(cells) - 1}, each once"
        )
    take = np.arange(anatomy.firsts[-1])
    take[cells] = cells[chosen]
    tensors: dict[str, Tensor] = dict(network.module.named_parameters())
    permute_tensors(anatomy, tensors | dict(network.module.named_buffers()), take)


@torch.no_grad()
def permute_tensors(anatomy: Anatomy, tensors: Mapping[str, Tensor], take: np.ndarray) -> None:
    """Permute named tensors in place; the cell of number c becomes what cell `take[c]` was."""
    moved = take != np.arange(len(take))
    for one in {map.name: map for map in (*anatomy.parameters, *anatomy.buffers)}.values():
        tensor = tensors[one.name]
        for index, axis in enumerate(one.axes):
            if axis is not None and moved[axis].any():
                order = torch.from_numpy(axis_order(axis, take)).to(tensor.device)
                tensor.copy_(tensor.index_select(index, order))


def axis_order(axis: np.ndarray, take: np.ndarray) -> np.ndarray:
    """Where each index of an axis comes from: a cell's k-th standing from the k-th of the other's."""
    by_cell = np.argsort(axis, kind="stable")
    grouped = axis[by_cell]
    rank = np.empty(len(axis), np.int64)
    rank[by_cell] = np.arange(len(axis)) - np.searchsorted(grouped, grouped)
    return by_cell[np.searchsorted(grouped, take[axis]) + rank]
