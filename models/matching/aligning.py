"""Alignment: permute a peer's cells to agree best with a reference; the function stays the same.

This is what runs before averaging: coordinates may be averaged only when cell k of a slice means the
same on both sides. Cells move only inside their part and their partial model, with everything that
stands for them: coupled channels of several layers move together, batch statistics along with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelError
from ..network import SlicedNetwork
from ..permuting import permute_tensors
from ..slicing import Slicing
from .activations import by_activations
from .ascent import by_weights
from .rows import flat_order

Values = Tensor | np.ndarray
Reference = SlicedNetwork | Mapping[str, Values]


@dataclass(frozen=True, eq=False)
class Alignment:
    """A permutation of cells, ready to be applied to any vector of the network's shape.

    moves
        Model → part → for every place in the slice, the place whose cell goes there.
    order
        The same as indices: `flat[order]` is the aligned flat vector.
    agreement
        How well known coordinates agreed before and after every pass (a sum of products; for
        activations, of correlations). It never falls.
    """

    moves: Mapping[str, Mapping[str, np.ndarray]]
    order: np.ndarray
    agreement: tuple[float, ...]
    take: np.ndarray
    """The same by numbers of cells: cell c becomes what cell `take[c]` was."""

    @property
    def moved(self) -> int:
        """How many cells change their place."""
        return sum(
            int((move != np.arange(len(move))).sum())
            for parts in self.moves.values()
            for move in parts.values()
        )

    def apply(self, network: SlicedNetwork) -> None:
        """Permute the network in place, statistics that it keeps to itself included.

        Permute the optimizer's state with `permute` as well.
        """
        network.flat.copy_(self.permute(network.flat))
        own = replace(network.slicing.anatomy, parameters=())
        permute_tensors(own, network.own_buffers(), self.take)

    def permute(self, flat: Tensor) -> Tensor:
        """A flat vector of the network (weights, momentum, a gradient) in the new order: a copy."""
        if flat.shape != self.order.shape:
            raise ModelError(
                f"align: the network has {len(self.order)} values, {tuple(flat.shape)} were given"
            )
        return flat[torch.from_numpy(self.order).to(flat.device)]


def align(
    network: SlicedNetwork,
    reference: Reference,
    *,
    by: Literal["weights", "activations"] = "weights",
    inputs: Tensor | None = None,
    models: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    passes: int = 30,
) -> Alignment:
    """Find the permutation of `network`'s cells that agrees best with `reference`; apply it yourself.

        align(network, {"global": estimate}).apply(network)

    Any network whose parts are known can be aligned, with one of the same widths.

    reference
        Another sliced network, or values per owner in the swarm's common order, as a neighbour sends
        them. Coordinates that it does not give are not compared.
    by, inputs
        Compare weights, or what cells answer to the peer's own `inputs`: the outputs of dense layers and
        convolutions that parts are named after, so parts of other kinds need `parts` or weights.
    models, parts
        Only these; by default all models that the reference gives, and all parts but inputs and outputs,
        whose cells mean something by their place.
    passes
        An upper bound; a pass that changes nothing is the last.
    """
    slicing = network.slicing
    values, known = _reference(network, reference)
    chosen_models = _chosen_models(slicing, reference, models)
    chosen_parts = _chosen_parts(slicing, parts)
    if by == "activations":
        found = by_activations(network, values, known, chosen_models, chosen_parts, inputs)
    elif by == "weights":
        known &= ~_statistics(network)  # their scale says nothing about how weights agree
        found = by_weights(network, values, known, chosen_models, chosen_parts, passes)
    else:
        raise ModelError(f"align: by {by!r} is unknown; there are weights, activations")
    take, agreement = found
    anatomy = slicing.anatomy
    moves = {
        model: {
            anatomy.parts[part].name: _ranks(take, slicing.cells[model][part], anatomy.firsts[part])
            for part in chosen_parts
            if len(slicing.cells[model][part])
        }
        for model in chosen_models
    }
    return Alignment(moves, flat_order(anatomy, take), tuple(agreement), take)


def _reference(network: SlicedNetwork, reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """A flat vector in this network's coordinates, and which of them the reference gives."""
    slicing = network.slicing
    if isinstance(reference, SlicedNetwork):
        reference = {
            owner: reference.read(owner) for owner in reference.owners if owner in network.owners
        }
    values = network.flat.double().cpu().numpy().copy()
    known = np.zeros(len(values), dtype=bool)
    for owner, given in reference.items():
        where = slicing.coordinates(owner)
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given, np.float64)
        if array.shape != where.shape:
            raise ModelError(
                f"align: {owner!r} has {len(where)} coordinates on peer {network.peer!r}, the reference "
                f"gives {array.shape}; peers of other widths need a common width"
            )
        if not np.isfinite(array).all():
            raise ModelError(f"align: the reference of {owner!r} has values that are not finite")
        values[where] = array
        known[where] = True
    if not known.any():
        raise ModelError(
            f"align: the reference shares nothing with peer {network.peer!r}, whose models are "
            f"{', '.join(network.models)}"
        )
    return values, known


def _chosen_models(
    slicing: Slicing, reference: Reference, models: Sequence[str] | None
) -> list[str]:
    """The models to permute, those that others depend on first."""
    given = set(reference.owners if isinstance(reference, SlicedNetwork) else reference)
    wanted = [model for model in slicing.models if model in given] if models is None else models
    if unknown := [model for model in wanted if model not in slicing.models]:
        raise ModelError(
            f"align: no model {unknown[0]!r} here; models are {', '.join(slicing.models)}"
        )
    return sorted(wanted, key=lambda model: (len(slicing.graph.dependencies(model)), model))


def _chosen_parts(slicing: Slicing, parts: Sequence[str] | None) -> list[int]:
    names = [part.name for part in slicing.anatomy.parts]
    if parts is None:
        ends = slicing.anatomy.ends or ()
        return [index for index, name in enumerate(names) if name not in ends]
    if unknown := [part for part in parts if part not in names]:
        raise ModelError(f"align: no part {unknown[0]!r} here; parts are {', '.join(names)}")
    return sorted(names.index(part) for part in parts)


def _statistics(network: SlicedNetwork) -> np.ndarray:
    """Which coordinates of the flat vector are batch statistics."""
    anatomy = network.slicing.anatomy
    found = np.zeros(anatomy.size, dtype=bool)
    buffers = {name for name, _ in network.module.named_buffers()}
    for one in anatomy.parameters:
        if one.name in buffers:
            first = anatomy.offsets[one.name]
            found[first : first + one.size] = True
    return found


def _ranks(take: np.ndarray, cells: np.ndarray, first: int) -> np.ndarray:
    """A slice's permutation by places in the slice, from cell numbers."""
    place = {int(cell): rank for rank, cell in enumerate(cells)}
    return np.array([place[int(cell)] for cell in take[first + cells] - first], dtype=np.int64)
