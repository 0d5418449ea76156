"""Moving cells: a permutation of a part's cells, applied to everything that they stand in.

A permutation is an array `take`: cell c becomes what cell `take[c]` was. It must stay inside parts; then the
network computes the same function, because every axis that a part spans moves together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .anatomy import Anatomy, repeats
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
    cells = anatomy.cells(anatomy.find(part))
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
    """Permute named tensors in place."""
    moved = take != np.arange(len(take))
    for one in {map.name: map for map in (*anatomy.parameters, *anatomy.buffers)}.values():
        tensor = tensors[one.name]
        for index, axis in enumerate(one.axes):
            if axis is not None and moved[axis].any():
                order = torch.from_numpy(_axis_order(axis, take)).to(tensor.device)
                tensor.copy_(tensor.index_select(index, order))


def flat_order(anatomy: Anatomy, take: np.ndarray) -> np.ndarray:
    """For every coordinate of the flat parameter vector the one to take its value from."""
    order = np.empty(anatomy.size, dtype=np.int64)
    for parameter in anatomy.parameters:
        span = anatomy.spans[parameter.name]
        grid = np.arange(span.start, span.stop, dtype=np.int64).reshape(parameter.shape)
        for index, axis in enumerate(parameter.axes):
            if axis is not None:
                grid = np.take(grid, _axis_order(axis, take), axis=index)
        order[span] = grid.ravel()
    return order


def _axis_order(axis: np.ndarray, take: np.ndarray) -> np.ndarray:
    """Where each index of an axis comes from: a cell's k-th position from the k-th of the other's."""
    by_cell = np.argsort(axis, kind="stable")
    return by_cell[np.searchsorted(axis[by_cell], take[axis]) + repeats(axis)]
