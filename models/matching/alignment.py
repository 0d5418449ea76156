"""Alignment: permute a peer's cells to agree best with a reference; the function stays the same.

This is what runs before averaging: coordinates may be averaged only when cell k of a slice means the
same on both sides. Cells move only inside their part and their partial model, with everything that
stands for them: coupled channels of several layers move together, batch statistics along with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..anatomy import Anatomy, ParameterMap, Part
from ..discovery import BATCH_NORMS
from ..errors import ModelError
from ..network import SlicedNetwork
from ..permuting import permute_tensors
from ..slicing import Slicing

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


def by_weights(
    network: SlicedNetwork,
    values: np.ndarray,
    known: np.ndarray,
    models: Sequence[str],
    parts: Sequence[int],
    passes: int,
) -> tuple[np.ndarray, list[float]]:
    """Raise Σ own · reference over known coordinates until no slice can be permuted to more.

    Returns for every cell the one that takes its place, and the sum before and after every pass.
    """
    slicing = network.slicing
    anatomy = slicing.anatomy
    flat = network.flat.double().cpu().numpy()
    target = np.where(known, values, 0.0)
    slices = [
        anatomy.firsts[part] + slicing.cells[model][part]
        for part in parts
        for model in models
        if len(slicing.cells[model][part])
    ]
    stay = np.arange(int(anatomy.firsts[-1]))
    agreement = [float(flat @ target)]
    take = _first_pass(anatomy, flat, target, slices, stay)
    mine = flat[flat_order(anatomy, take)]
    if mine @ target <= agreement[0]:  # it looked at few columns, and they led astray
        take, mine = stay, flat
    agreement.append(float(mine @ target))
    everything = np.ones(len(stay), dtype=bool)
    for _ in range(passes):
        for cells in slices:
            trial = _best(anatomy, take, cells, mine, target, everything)
            moved = flat[flat_order(anatomy, trial)]
            if moved @ target > mine @ target:
                take, mine = trial, moved
        agreement.append(float(mine @ target))
        if agreement[-1] == agreement[-2]:
            break
    return take, agreement


def _first_pass(
    anatomy: Anatomy,
    flat: np.ndarray,
    target: np.ndarray,
    slices: Sequence[np.ndarray],
    stay: np.ndarray,
) -> np.ndarray:
    """Slice after slice, comparing only columns whose other end is in its place already."""
    settled = np.ones(len(stay), dtype=bool)
    settled[np.concatenate([stay[:0], *slices])] = False
    take, mine = stay, flat
    for cells in slices:
        take = _best(anatomy, take, cells, mine, target, settled)
        mine = flat[flat_order(anatomy, take)]
        settled[cells] = True
    return take


def _best(
    anatomy: Anatomy,
    take: np.ndarray,
    cells: np.ndarray,
    mine: np.ndarray,
    target: np.ndarray,
    settled: np.ndarray,
) -> np.ndarray:
    """The permutation with one slice assigned anew; unchanged where nothing is gained."""
    score = np.zeros((len(cells), len(cells)))  # [own cell, place]
    for block in blocks(anatomy, cells):
        where = block.where[:, settled[block.others].all(axis=1)]
        score += mine[where] @ target[where].T
    _, best = linear_sum_assignment(-score.T)
    gain = score[best, np.arange(len(cells))].sum() - np.trace(score)
    if gain <= 1e-9 * (1 + np.abs(score).max()):
        return take  # ties are not worth moving for
    trial = take.copy()
    trial[cells] = take[cells[best]]
    return trial


def by_activations(
    network: SlicedNetwork,
    values: np.ndarray,
    known: np.ndarray,
    models: Sequence[str],
    parts: Sequence[int],
    inputs: Tensor | None,
) -> tuple[np.ndarray, list[float]]:
    """Correlate what the cells of both networks answer to the same inputs.

    What the reference does not give is silent in both, or private cells would be compared with
    nothing. Returns as `by_weights` does.
    """
    if inputs is None or len(inputs) < 2:
        raise ModelError(
            "align: by activations needs inputs, at least two of the peer's own samples"
        )
    slicing = network.slicing
    anatomy = slicing.anatomy
    if any(parameter.private for parameter in anatomy.parameters):
        raise ModelError(
            'align: by activations hears nothing through norms that are private (buffers="local"); align by '
            "weights"
        )
    chosen = [anatomy.parts[part] for part in parts]
    names = [part.name for part in chosen]
    flat = network.flat.double().cpu().numpy()
    own = _answers(_with_values(network, np.where(known, flat, 0.0)), chosen, inputs)
    theirs = _answers(_with_values(network, np.where(known, values, 0.0)), chosen, inputs)
    take = np.arange(int(anatomy.firsts[-1]))
    before = after = 0.0
    for part, name in zip(parts, names, strict=True):
        for model in models:
            cells = slicing.cells[model][part]
            if not len(cells):
                continue
            score = own[name][:, cells].T @ theirs[name][:, cells]
            _, best = linear_sum_assignment(-score.T)
            before += float(np.trace(score))
            after += float(score[best, np.arange(len(cells))].sum())
            first = anatomy.firsts[part]
            take[first + cells] = first + cells[best]
    return take, [before, after]


def _with_values(network: SlicedNetwork, flat: np.ndarray) -> nn.Module:
    """A copy of the network's module with other values, ready to answer."""
    other = deepcopy(network.module).eval()
    anatomy = network.slicing.anatomy
    tensors: dict[str, Tensor] = dict(other.named_parameters()) | dict(other.named_buffers())
    for one in anatomy.parameters:
        first = anatomy.offsets[one.name]
        piece = torch.from_numpy(flat[first : first + one.size])
        tensors[one.name].data = piece.to(tensors[one.name]).view(one.shape)
    if anatomy.buffers:  # statistics of the peer's own do not fit other values: take the batch's
        for norm in other.modules():
            if isinstance(norm, BATCH_NORMS):
                norm.train()
    return other


@torch.no_grad()
def _answers(module: nn.Module, parts: Sequence[Part], inputs: Tensor) -> dict[str, np.ndarray]:
    """For every part its layer's outputs [answers, cells], standardised; silent cells give zeros."""
    layers = dict(module.named_modules())
    for part in parts:
        if not isinstance(layers.get(part.name), (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            raise ModelError(
                "align: by activations needs parts named after a dense layer or a convolution, which "
                f"{part.name!r} is not; name those to align with parts=, or align by weights"
            )
    caught: dict[str, np.ndarray] = {}

    def catch(part: Part) -> RemovableHandle:
        def hook(layer: nn.Module, _: object, output: Tensor) -> None:
            channel = -1 if isinstance(layer, nn.Linear) else 1
            answers = output.movedim(channel, -1).flatten(0, -2).double().cpu().numpy()
            if answers.shape[1] != part.cells:
                raise ModelError(
                    f"align: layer {part.name!r} has {answers.shape[1]} outputs for {part.cells} cells, so "
                    "by activations does not say whose they are; align it by weights"
                )
            answers = answers - answers.mean(axis=0)
            length = np.linalg.norm(answers, axis=0)
            caught[part.name] = answers / np.where(length > 0, length, 1)

        return layers[part.name].register_forward_hook(hook)

    hooks = [catch(part) for part in parts]
    module(inputs)
    for hook in hooks:
        hook.remove()
    return caught


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter seen from some cells: `where` [cells, columns] are its flat coordinates.

    `others` [columns, k] are the cells that each column touches besides: none for a bias, one for a
    dense weight.
    """

    parameter: str
    where: np.ndarray
    others: np.ndarray


def standings(axis: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Positions of each cell on an axis: `[cells, standings]`, empty when they are not on it."""
    by_cell = np.argsort(axis, kind="stable")
    ordered = axis[by_cell]
    first = np.searchsorted(ordered, cells, side="left")
    count = np.searchsorted(ordered, cells, side="right") - first
    each = int(count.min()) if len(count) else 0
    return (
        by_cell[first[:, None] + np.arange(each)] if each else np.empty((len(cells), 0), np.int64)
    )


def blocks(anatomy: Anatomy, cells: np.ndarray) -> Iterator[Block]:
    """Every parameter that touches `cells`, as rows of coordinates."""
    for parameter in anatomy.parameters:
        for index, axis in enumerate(parameter.axes):
            if axis is None:
                continue
            positions = standings(axis, cells)
            if positions.shape[1]:
                yield _block(parameter, anatomy.offsets[parameter.name], index, positions)


def _block(parameter: ParameterMap, offset: int, index: int, positions: np.ndarray) -> Block:
    flat = offset + np.arange(parameter.size, dtype=np.int64).reshape(parameter.shape)
    seen = np.moveaxis(flat, index, 0)[positions]  # [cells, standings, rest…]
    rest = [axis for at, axis in enumerate(parameter.axes) if at != index]
    sizes = [size for at, size in enumerate(parameter.shape) if at != index]
    grids = np.meshgrid(
        *(np.full(n, -1) if a is None else a for a, n in zip(rest, sizes, strict=True)),
        indexing="ij",
    )
    touched = [grid.ravel() for grid, axis in zip(grids, rest, strict=True) if axis is not None]
    each = np.stack(touched, axis=1) if touched else np.empty((int(np.prod(sizes)), 0), np.int64)
    return Block(
        parameter.name, seen.reshape(len(positions), -1), np.tile(each, (positions.shape[1], 1))
    )


def flat_order(anatomy: Anatomy, take: np.ndarray) -> np.ndarray:
    """For every coordinate of the flat vector the one to take its value from.

    `take[c]` is the cell whose place cell c gets. It must stay inside the part; then the network
    computes the same function, because every axis that a part spans moves together.
    """
    order = np.empty(anatomy.size, dtype=np.int64)
    for parameter in anatomy.parameters:
        offset = anatomy.offsets[parameter.name]
        grid = np.arange(parameter.size, dtype=np.int64).reshape(parameter.shape)
        for index, axis in enumerate(parameter.axes):
            if axis is not None:
                grid = np.take(grid, _moved(axis, take), axis=index)
        order[offset : offset + parameter.size] = offset + grid.ravel()
    return order


def _moved(axis: np.ndarray, take: np.ndarray) -> np.ndarray:
    """For every position of an axis the position to take from."""
    by_cell = np.argsort(axis, kind="stable")
    ordered = axis[by_cell]
    repeat = np.empty(len(axis), dtype=np.int64)
    repeat[by_cell] = np.arange(len(axis)) - np.searchsorted(ordered, ordered, side="left")
    return by_cell[np.searchsorted(ordered, take[axis], side="left") + repeat]
