"""Alignment: permute a peer's cells to agree best with a reference; the network's function stays the same.

A *cell* is a neuron, a channel or a hidden unit; a *part* is a layer's interchangeable cells; a *slice* is
the cells that a peer gives to a partial model. Two peers may average a coordinate only if cell k of a
slice plays the same role in both networks, so peers align before they average. Cells move only inside
their part and their partial model, together with all their parameters: coupled channels of several layers
move together, and so do batch statistics.

`CommonWidth` is for peers whose slices of one partial model have different widths. All these peers gossip
one vector at the *common* width, and each peer's network holds only some of its cells. Training changes the
coordinates of those cells only, averaging changes all coordinates; push-sum sees vectors of equal length on
all peers, so its guarantees hold. Cells that no peer uses are zero, or still have their starting values:
they are free. A newcomer whose cells match none of the cells in use takes free ones, so the model can grow up
to the common width.

    common = CommonWidth(network.slicing, {"global": "64-100-10"})
    mass.sum += weight * common.embed("global", change)          # after training: peer's cells → common
    network.write("global", common.extract("global", estimate))  # after averaging: common → peer's cells
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ..anatomy import Anatomy, ParameterMap, Part, dense_axes
from ..discovery import BATCH_NORMS, CONVOLUTIONS, named_tensors
from ..errors import ModelError
from ..network import SlicedNetwork
from ..optimizers import RuleOptimizer
from ..slicing import Layout, Slicing, Start, starting_values
from .assignment import MatchOptions

Reference = SlicedNetwork | Mapping[str, Tensor | np.ndarray]
"""What a network is aligned with: another network, or values by partial model."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """A permutation of cells, ready to be applied to any vector of the network's shape.

    moves
        By model and part: for every index in the slice, the index of the cell that moves there.
    order
        The same permutation by coordinates: `flat[order]` is the aligned flat vector.
    agreement
        How well the network agreed with the reference before the first pass and after every pass: the sum
        of products of their weights or, for activations, of correlations. It never falls.
    """

    moves: Mapping[str, Mapping[str, np.ndarray]]
    order: np.ndarray
    agreement: tuple[float, ...]
    cell_order: np.ndarray
    """The same permutation by cell numbers: cell c gets the weights of cell `cell_order[c]`."""

    @property
    def moved(self) -> int:
        """How many cells move to another index."""
        return sum(
            int((move != np.arange(len(move))).sum())
            for parts in self.moves.values()
            for move in parts.values()
        )

    def apply(self, network: SlicedNetwork) -> None:
        """Permute the network in place, including batch statistics that are not averaged.

        Permute the optimizer's state as well, with `permute_optimizer`.
        """
        network.flat.copy_(self.permute(network.flat))
        buffers_only = replace(network.slicing.anatomy, parameters=())
        buffers_only.permute(network.own_buffers(), self.cell_order)

    def permute(self, flat: Tensor) -> Tensor:
        """Return a permuted copy of a flat vector of the network (weights, momentum or a gradient)."""
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
    """Return the permutation of `network`'s cells that agrees best with `reference`; the caller applies it.

        align(network, {"global": estimate}).apply(network)

    The reference must have the network's widths.

    reference
        Another sliced network, or values per partial model in the order that all peers share, as a
        neighbour sends them. Coordinates that the reference does not give are not compared.
    by, inputs
        Compare the weights of cells, or their activations on `inputs`, samples of this peer. Activations are
        the outputs of dense layers and convolutions that give a part its name; parts of other layers must
        be left out with `parts`, or compared by weights.
    models, parts
        Permute only these. By default: all models that the reference gives, and all parts except inputs and
        outputs, whose order has a meaning (pixels, classes).
    passes
        An upper bound; a pass that changes nothing is the last.
    """
    slicing, anatomy = network.slicing, network.slicing.anatomy
    target, is_given = _reference_values(network, reference)
    chosen_models = _chosen_models(slicing, reference, models)
    ends = anatomy.ends or ()
    part_names = [name for name in anatomy.names if name not in ends] if parts is None else parts
    slices = [
        _Slice(model, part, anatomy.first_cells[part] + slicing.cells[model][part])
        for part in sorted(anatomy.find(name, "align: ") for name in part_names)
        for model in chosen_models
        if len(slicing.cells[model][part])
    ]
    if by == "activations":
        cell_order, agreement = _by_activations(network, target, is_given, slices, inputs)
    elif by == "weights":
        for name, _ in network.module.named_buffers():
            if name in anatomy.spans:  # batch statistics are no evidence of which cells agree
                target[anatomy.spans[name]] = 0.0
        cells_of_slices = [part_slice.cells for part_slice in slices]
        cell_order, agreement = _by_weights(network, target, cells_of_slices, passes)
    else:
        raise ModelError(f"align: by {by!r} is unknown; there are weights, activations")
    moves: dict[str, dict[str, np.ndarray]] = {model: {} for model in chosen_models}
    for model, part, cells in slices:
        by_number = np.argsort(cells)
        move = by_number[np.searchsorted(cells, cell_order[cells], sorter=by_number)]
        moves[model][anatomy.names[part]] = move
    return Alignment(moves, anatomy.flat_order(cell_order), tuple(agreement), cell_order)


class _Slice(NamedTuple):
    """The cells of one part that belong to one partial model, numbered through the whole network."""

    model: str
    part: int
    cells: np.ndarray


def _reference_values(
    network: SlicedNetwork, reference: Reference
) -> tuple[np.ndarray, np.ndarray]:
    """Return the reference as a flat vector, and a mask of the coordinates that it gives; others are 0."""
    if isinstance(reference, SlicedNetwork):
        reference = {
            model: reference.read(model)
            for model in reference.averaged_models
            if model in network.averaged_models
        }
    flat = np.zeros(len(network.flat))
    is_given = np.zeros(len(flat), dtype=bool)
    for model, values in reference.items():
        coordinates = network.slicing.coordinates(model)
        if isinstance(values, Tensor):
            values = values.detach().cpu().double()  # numpy has no bfloat16
        array = np.asarray(values, np.float64)
        if array.shape != coordinates.shape:
            raise ModelError(
                f"align: {model!r} has {len(coordinates)} coordinates on peer {network.peer!r}, but the "
                f"reference has the shape {array.shape}; peers of other widths need a common width"
            )
        if not np.isfinite(array).all():
            raise ModelError(f"align: the reference of {model!r} has values that are not finite")
        flat[coordinates] = array
        is_given[coordinates] = True
    if not is_given.any():
        raise ModelError(
            f"align: the reference shares nothing with peer {network.peer!r}, whose models are "
            f"{', '.join(network.models)}"
        )
    return flat, is_given


def _chosen_models(
    slicing: Slicing, reference: Reference, models: Sequence[str] | None
) -> list[str]:
    """Return the models to permute, each after the models that it depends on."""
    if models is None:
        in_reference = set(
            reference.averaged_models if isinstance(reference, SlicedNetwork) else reference
        )
        models = [model for model in slicing.models if model in in_reference]
    if unknown := [model for model in models if model not in slicing.models]:
        raise ModelError(
            f"align: no model {unknown[0]!r} here; models are {', '.join(slicing.models)}"
        )
    return sorted(models, key=lambda model: (len(slicing.graph.dependencies(model)), model))


def permute_optimizer(
    optimizer: RuleOptimizer | torch.optim.Optimizer, network: SlicedNetwork, alignment: Alignment
) -> None:
    """Permute the optimizer's state (momentum, Adam's moments) in place, as `alignment` permutes the network.

    Every tensor that has the shape of its parameter is permuted; other state stays. Call it together with
    `alignment.apply(network)`, before the next optimizer step.
    """
    for name, parameter in network.parameters.items():
        span = network.slicing.anatomy.spans[name]
        # An alignment moves values inside a parameter, never from one parameter to another.
        order = torch.from_numpy(alignment.order[span] - span.start).to(parameter.device)
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                state.copy_(state.reshape(-1)[order].view(state.shape))


# --- by weights: coordinate ascent, one optimal assignment per slice of a part --------------------


def _by_weights(
    network: SlicedNetwork, target: np.ndarray, slices: Sequence[np.ndarray], passes: int
) -> tuple[np.ndarray, list[float]]:
    """Permute slice after slice until no permutation of one slice raises Σ weight · reference weight.

    Returns for every cell the one whose weights it gets, and the sum before and after every pass.
    """
    anatomy = network.slicing.anatomy
    flat = network.flat.cpu().double().numpy()

    def assign(cell_order: np.ndarray, aligned: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Assign the cells of one slice again; return `cell_order` itself if that gains nothing."""
        score = np.zeros((len(cells), len(cells)))  # [cell, cell of the reference]
        for coordinates, other_cells in weights_of_cells(anatomy, cells):
            compared = coordinates[:, is_assigned[other_cells].all(axis=1)]
            score += aligned[compared] @ target[compared].T
        _, chosen = linear_sum_assignment(-score.T)
        gain = score[chosen, np.arange(len(cells))].sum() - np.trace(score)
        if gain <= 1e-9 * (1 + np.abs(score).max()):  # rounding error: do not swap equal cells
            return cell_order
        trial = cell_order.copy()
        trial[cells] = cell_order[cells[chosen]]
        return trial

    identity = np.arange(int(anatomy.first_cells[-1]))
    # The first pass compares only weights whose other cell is assigned already, or is not permuted at all.
    is_assigned = np.ones(len(identity), dtype=bool)
    is_assigned[np.concatenate([identity[:0], *slices])] = False
    cell_order, aligned = identity, flat
    for cells in slices:
        cell_order = assign(cell_order, aligned, cells)
        aligned = flat[anatomy.flat_order(cell_order)]
        is_assigned[cells] = True
    agreement = [float(flat @ target)]
    if aligned @ target <= agreement[0]:  # the few weights that this pass compared were misleading
        cell_order, aligned = identity, flat
    agreement.append(float(aligned @ target))
    for _ in range(passes):
        for cells in slices:
            trial = assign(cell_order, aligned, cells)
            permuted = aligned if trial is cell_order else flat[anatomy.flat_order(trial)]
            if permuted @ target > aligned @ target:
                cell_order, aligned = trial, permuted
        agreement.append(float(aligned @ target))
        if agreement[-1] == agreement[-2]:
            break
    return cell_order, agreement


def weights_of_cells(
    anatomy: Anatomy, cells: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, for every parameter with `cells` on an axis, the cells' coordinates and the other cells there.

    The coordinates are [cells, columns]: row i has the weights of `cells[i]`, and a column has weights that
    correspond. The other cells are [columns, k]: those on the parameter's other axes, none for a bias, one
    for a dense weight. A cell may occur several times on an axis (a channel flattened into a dense layer,
    four stacked gates): its n-th occurrence corresponds to the n-th occurrence of every cell of its part.
    """
    for parameter in anatomy.parameters:
        for index, axis in enumerate(parameter.axes):
            if axis is None:
                continue
            by_cell = np.argsort(axis, kind="stable")
            first = np.searchsorted(axis[by_cell], cells)
            count = np.searchsorted(axis[by_cell], cells, side="right") - first
            occurrences = int(count.min()) if len(count) else 0
            if not occurrences:
                continue
            span = anatomy.spans[parameter.name]
            flat = np.arange(span.start, span.stop, dtype=np.int64).reshape(parameter.shape)
            positions = by_cell[first[:, None] + np.arange(occurrences)]
            coordinates = np.moveaxis(flat, index, 0)[positions]
            other_sizes = (*parameter.shape[:index], *parameter.shape[index + 1 :])
            columns = int(np.prod(other_sizes, dtype=np.int64))
            other_axes = (*parameter.axes[:index], *parameter.axes[index + 1 :])
            grid = np.indices(other_sizes).reshape(len(other_sizes), columns)
            cells_on_axes = [
                other_axis[i]
                for other_axis, i in zip(other_axes, grid, strict=True)
                if other_axis is not None
            ]
            no_cells = np.empty((columns, 0), np.int64)
            other_cells = np.stack(cells_on_axes, axis=1) if cells_on_axes else no_cells
            yield coordinates.reshape(len(cells), -1), np.tile(other_cells, (occurrences, 1))


# --- by activations: correlations on the peer's own samples -------------------------------------


def _by_activations(
    network: SlicedNetwork,
    target: np.ndarray,
    is_given: np.ndarray,
    slices: Sequence[_Slice],
    inputs: Tensor | None,
) -> tuple[np.ndarray, list[float]]:
    """Match the cells whose activations on `inputs` correlate best; the result is as in `_by_weights`.

    Coordinates that the reference does not give are set to 0 in both networks, because the reference has
    nothing that this peer's private cells could be compared with.
    """
    if inputs is None or len(inputs) < 2:
        raise ModelError(
            "align: by activations needs inputs: two or more of the peer's own samples"
        )
    anatomy = network.slicing.anatomy
    if any(parameter.never_averaged for parameter in anatomy.parameters):
        raise ModelError(
            'align: by activations cannot compare networks whose norms are private (buffers="local"), '
            "because the reference has no values for them; align by weights"
        )
    part_numbers = sorted({part_slice.part for part_slice in slices})
    parts = [anatomy.parts[part] for part in part_numbers]
    flat = np.where(is_given, network.flat.cpu().double().numpy(), 0.0)
    activations = _activations(_with_values(network, flat), parts, inputs)
    references = _activations(_with_values(network, target), parts, inputs)
    cell_order = np.arange(int(anatomy.first_cells[-1]))
    agreement = [0.0, 0.0]
    for _, part, cells in slices:
        name, columns = anatomy.names[part], cells - anatomy.first_cells[part]
        score = activations[name][:, columns].T @ references[name][:, columns]
        _, chosen = linear_sum_assignment(-score.T)
        agreement[0] += float(np.trace(score))
        agreement[1] += float(score[chosen, np.arange(len(cells))].sum())
        cell_order[cells] = cells[chosen]
    return cell_order, agreement


def _with_values(network: SlicedNetwork, flat: np.ndarray) -> nn.Module:
    """Return a copy of the network's module with the values of `flat`, in evaluation mode."""
    module = deepcopy(network.module).eval()
    anatomy = network.slicing.anatomy
    tensors = named_tensors(module)
    for name, values in anatomy.views(torch.from_numpy(flat)).items():
        tensors[name].data = values.to(tensors[name])
    if anatomy.buffers:  # the peer's own statistics do not fit these values: use the batch's
        for norm in module.modules():
            if isinstance(norm, BATCH_NORMS):
                norm.train()
    return module


@torch.no_grad()
def _activations(module: nn.Module, parts: Sequence[Part], inputs: Tensor) -> dict[str, np.ndarray]:
    """Return for every part its layer's outputs [outputs, cells], centred and of length 1 per cell."""
    layers = dict(module.named_modules())
    activations: dict[str, np.ndarray] = {}

    def record_output(part: Part, layer: nn.Module, _: object, output: Tensor) -> None:
        channel = -1 if isinstance(layer, nn.Linear) else 1
        values = output.movedim(channel, -1).flatten(0, -2).cpu().double().numpy()
        if values.shape[1] != part.cells:
            raise ModelError(
                f"align: layer {part.name!r} has {values.shape[1]} outputs for {part.cells} cells, so its "
                "activations cannot be told apart by cell; align it by weights"
            )
        values = values - values.mean(axis=0)
        length = np.linalg.norm(values, axis=0)
        activations[part.name] = values / np.where(length > 0, length, 1)

    for part in parts:  # the module is a copy, so hooks need not be removed
        layer = layers.get(part.name)
        if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            raise ModelError(
                "align: by activations needs parts named after a dense layer or a convolution, which "
                f"{part.name!r} is not; name those to align with parts=, or align by weights"
            )
        layer.register_forward_hook(partial(record_output, part))
    module(inputs)
    return activations


CellIndices = Mapping[str, Sequence[np.ndarray]]
"""By model, for every part, the index in the common slice of each of the peer's cells."""


class CommonWidth:
    """Which cells of partial models of a common width one peer's network holds.

    peer_slicing
        The slicing of the peer's network.
    widths
        Layouts at the common width by model, the same on all peers. Models that these models depend on are
        included with the peer's own layout unless they have an entry too.
    indices
        For every such model and part, the index in the common slice of each of the peer's cells. By
        default a peer with n cells holds the first n: right for untrained peers, because a narrow peer's
        cells are then among those of every wider peer. For a trained network use `find_indices`.
    """

    def __init__(
        self,
        peer_slicing: Slicing,
        widths: Mapping[str, str | Layout],
        indices: CellIndices | None = None,
    ):
        self.peer_slicing = peer_slicing
        layouts = {
            model: Layout.slice(text) if isinstance(text, str) else text
            for model, text in widths.items()
        }
        for model, layout in layouts.items():
            _check_layout(peer_slicing, model, layout)
        for model in list(layouts):
            for other in peer_slicing.graph.dependencies(model):
                layouts.setdefault(other, peer_slicing.layout(other))
        self.models: tuple[str, ...] = tuple(sorted(layouts))
        self.slicing = with_layouts(peer_slicing, layouts)
        """The slicing of a network at the common width."""
        anatomy = self.slicing.anatomy
        self.indices: dict[str, tuple[np.ndarray, ...]] = {
            model: _check_indices(peer_slicing, model, layouts[model], (indices or {}).get(model))
            for model in self.models
        }
        cell_map = _cell_map(peer_slicing, self.slicing, self.indices)
        coordinate_map = _coordinate_map(peer_slicing.anatomy, anatomy, cell_map)
        self._positions: dict[str, np.ndarray] = {}
        for model in self.slicing.averaged_models:
            coordinates = self.slicing.coordinates(model)
            position_of = np.full(anatomy.size, -1, dtype=np.int64)
            position_of[coordinates] = np.arange(len(coordinates))
            positions = position_of[coordinate_map[peer_slicing.coordinates(model)]]
            assert (positions >= 0).all(), "a model has coordinates outside the common network"
            self._positions[model] = positions

    @property
    def averaged_models(self) -> tuple[str, ...]:
        """The partial models (and pairs of them) that are averaged at the common width."""
        return self.slicing.averaged_models

    def size(self, model: str) -> int:
        """How many values `model` averages."""
        return len(self.slicing.coordinates(model))

    def positions(self, model: str) -> np.ndarray:
        """Return, for each of the peer's values of `model`, its position in the common vector."""
        if model not in self._positions:
            raise ModelError(
                f"model {model!r} has no common width here; models with one are "
                f"{', '.join(self.averaged_models)}"
            )
        return self._positions[model]

    def extract(self, model: str, common: np.ndarray) -> np.ndarray:
        """Return the peer's own values out of a common vector."""
        self._check_size(model, common, self.size(model), "common")
        return common[self.positions(model)]

    def embed(self, model: str, own: np.ndarray, common: np.ndarray | None = None) -> np.ndarray:
        """Return a common vector with the peer's own values; the others are those of `common`, or zeros."""
        positions = self.positions(model)
        self._check_size(model, own, len(positions), "own")
        if common is None:
            values = np.zeros(self.size(model), dtype=own.dtype)
        else:
            self._check_size(model, common, self.size(model), "common")
            values = common.copy()
        values[positions] = own
        return values

    def start(self, seed: int, start: Start | None = None) -> dict[str, np.ndarray]:
        """Return starting values at the common width, the same on every peer that passes the same seed.

        `extract` takes a peer's own values out of them.
        """
        values = starting_values(
            self.slicing, np.zeros(self.slicing.anatomy.size), seed=seed, peer="", start=start
        )
        return {model: values[self.slicing.coordinates(model)] for model in self.averaged_models}

    def flat(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the flat vector of a network at the common width; models not in `values` are zero."""
        flat = np.zeros(self.slicing.anatomy.size)
        for model, common in values.items():
            self._check_size(model, common, self.size(model), "common")
            flat[self.slicing.coordinates(model)] = common
        return flat

    def _check_size(self, model: str, values: np.ndarray, size: int, kind: str) -> None:
        """Raise ModelError unless `values` is a vector of `size` values; kind: `own` or `common`."""
        if values.shape != (size,):
            raise ModelError(
                f"model {model!r} needs a vector of {size} {kind} values, not an array of shape "
                f"{values.shape}"
            )


def with_layouts(slicing: Slicing, layouts: Mapping[str, Layout]) -> Slicing:
    """Return the slicing of the same network with these slices, by partial model, and no other cells."""
    cells = np.sum([layout.cells for layout in layouts.values()], axis=0)
    anatomy = resized(slicing.anatomy, cells)
    return Slicing(anatomy, layouts, graph=slicing.graph, cross=slicing.cross)


def resized(anatomy: Anatomy, cells: Sequence[int] | np.ndarray) -> Anatomy:
    """Return the anatomy of the same network with `cells` per part. Every axis must span one whole part."""
    parts = tuple(Part(name, int(count)) for name, count in zip(anatomy.names, cells, strict=True))
    parameters = []
    for parameter in anatomy.parameters:
        shape, axes = list(parameter.shape), list(parameter.axes)
        for index, axis in enumerate(parameter.axes):
            part = anatomy.part_of(axis)
            if axis is None or part is None:
                continue
            if not np.array_equal(axis, anatomy.cells(part)):
                raise ModelError(
                    f"parameter {parameter.name!r}: an axis does not span one part in its order, so the "
                    "network cannot be given another width"
                )
            axes[index] = dense_axes(parts, part)[0]
            shape[index] = parts[part].cells
        parameters.append(ParameterMap(parameter.name, tuple(shape), tuple(axes)))
    return Anatomy(parts, tuple(parameters))


def _cell_map(
    peer: Slicing, common: Slicing, indices: Mapping[str, Sequence[np.ndarray | None]]
) -> np.ndarray:
    """Return for each of the peer's cells its number in the common network, or -1 if it has none (yet)."""
    cell_map = np.full(int(peer.anatomy.first_cells[-1]), -1, dtype=np.int64)
    for model, parts in indices.items():
        for part, chosen in enumerate(parts):
            if chosen is not None:
                peer_cells = peer.anatomy.first_cells[part] + peer.cells[model][part]
                common_cells = common.anatomy.first_cells[part] + common.cells[model][part]
                cell_map[peer_cells] = common_cells[chosen]
    return cell_map


def _coordinate_map(peer: Anatomy, common: Anatomy, cell_map: np.ndarray) -> np.ndarray:
    """Return for each of the peer's coordinates the one in the common network, or -1 if it has none."""
    coordinate_map = np.full(peer.size, -1, dtype=np.int64)
    for peer_parameter, parameter in zip(peer.parameters, common.parameters, strict=True):
        shape = peer_parameter.shape
        flat_index, is_mapped = np.zeros(shape, np.int64), np.ones(shape, bool)
        axis_pairs = zip(peer_parameter.axes, parameter.axes, strict=True)
        for dimension, (peer_axis, axis) in enumerate(axis_pairs):
            index = np.arange(shape[dimension])
            if peer_axis is not None and axis is not None:
                first = axis[0] if len(axis) else 0  # an axis spans one whole part
                index = np.where(cell_map[peer_axis] >= 0, cell_map[peer_axis] - first, -1)
            index = index.reshape([-1 if i == dimension else 1 for i in range(len(shape))])
            flat_index = flat_index * parameter.shape[dimension] + index
            is_mapped &= index >= 0
        coordinates = np.where(is_mapped, common.offsets[parameter.name] + flat_index, -1)
        coordinate_map[peer.spans[peer_parameter.name]] = coordinates.ravel()
    return coordinate_map


def _check_layout(slicing: Slicing, model: str, layout: Layout) -> None:
    """Raise ModelError unless the peer has `model`, and its slice fits into `layout`."""
    if model not in slicing.models:
        raise ModelError(
            f"common width of {model!r}: this peer has no such model, but {', '.join(slicing.models)}"
        )
    peer_layout = slicing.layout(model)
    if len(layout.cells) != len(peer_layout.cells):
        raise ModelError(
            f"common width of {model!r}: {layout.as_slice()} has {len(layout.cells)} parts, the network "
            f"has {len(peer_layout.cells)}"
        )
    counts = zip(slicing.anatomy.parts, peer_layout.cells, layout.cells, strict=True)
    for part, count, bound in counts:
        if count > bound:
            raise ModelError(
                f"common width of {model!r}: this peer has {count} cells of part {part.name!r}, the common "
                f"width allows {bound}; raise it on all peers, or make the slice smaller"
            )


def _check_indices(
    slicing: Slicing, model: str, layout: Layout, indices: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, ...]:
    """Return the indices of a peer's cells by part, by default the first ones; raise if they do not fit."""
    counts = slicing.layout(model).cells
    if indices is None:
        return tuple(np.arange(count) for count in counts)
    if len(indices) != len(counts):
        raise ModelError(
            f"indices of {model!r} were given for {len(indices)} parts, but the network has {len(counts)}"
        )
    arrays = []
    for part, count, bound, indices_of_part in zip(
        slicing.anatomy.parts, counts, layout.cells, indices, strict=True
    ):
        array = np.asarray(indices_of_part, dtype=np.int64)
        is_distinct = array.shape == (count,) and len(np.unique(array)) == count
        if not is_distinct or (count and not 0 <= array.min() <= array.max() < bound):
            raise ModelError(
                f"indices of {model!r} in part {part.name!r}: give {count} different numbers from 0 to "
                f"{bound - 1}"
            )
        arrays.append(array)
    return tuple(arrays)


def find_indices(
    network: SlicedNetwork,
    common: CommonWidth,
    values: Mapping[str, np.ndarray],
    options: MatchOptions | None = None,
    *,
    parts: Sequence[str] | None = None,
) -> CommonWidth:
    """Return the same common width with the indices at which `network`'s cells agree best with `values`.

    values
        Common vectors per partial model, as neighbours send them. Cells whose values are all zero are free.
    options
        The cost of a match and of a free cell: raise `variance` for more matches, `concentration` for growth.
    parts
        The parts to match; by default all but the first and the last.

    Parts are matched from the inputs up. Only weights whose other cell already has an index are compared.
    The received values count as one observation, however many peers they are averaged from.
    """
    options = options or MatchOptions()
    own_slicing, slicing = network.slicing, common.slicing
    anatomy = slicing.anatomy
    names = anatomy.names[1:-1] if parts is None else parts
    matched_parts = sorted(anatomy.find(name, "common width: ") for name in names)
    flat = network.flat.cpu().double().numpy()
    target = common.flat(values)
    if not np.isfinite(target).all():
        raise ModelError("common width: the values of the neighbours are not all finite")
    indices: dict[str, list[np.ndarray | None]] = {
        model: [
            None if part in matched_parts else cells
            for part, cells in enumerate(common.indices[model])
        ]
        for model in common.models
    }
    by_dependency = sorted(
        common.models, key=lambda model: (len(own_slicing.graph.dependencies(model)), model)
    )
    for part, model in itertools.product(matched_parts, by_dependency):
        cells = own_slicing.cells[model][part]
        common_cells = anatomy.first_cells[part] + slicing.cells[model][part]
        cell_map = _cell_map(own_slicing, slicing, indices)
        has_index = np.zeros(int(anatomy.first_cells[-1]), dtype=bool)
        has_index[cell_map[cell_map >= 0]] = True
        # Embed the network's values as if the n cells to be matched had the first n indices.
        cell_map[own_slicing.anatomy.first_cells[part] + cells] = common_cells[: len(cells)]
        coordinate_map = _coordinate_map(own_slicing.anatomy, anatomy, cell_map)
        embedded = np.zeros(anatomy.size)
        embedded[coordinate_map[coordinate_map >= 0]] = flat[coordinate_map >= 0]
        is_used = np.zeros(len(common_cells), dtype=bool)
        pairs = []
        for coordinates, other_cells in weights_of_cells(anatomy, common_cells):
            is_used |= (target[coordinates] != 0).any(axis=1)
            compared = coordinates[:, has_index[other_cells].all(axis=1)]
            pairs.append((embedded[compared[: len(cells)]], target[compared]))
        indices[model][part] = _assign(pairs, is_used, len(cells), options)
    layouts = {model: slicing.layout(model) for model in common.models}
    return CommonWidth(common.peer_slicing, layouts, indices)  # pyright: ignore[reportArgumentType]


UNTRAINED_CHANGE = 1e-3
"""A cell counts as untrained if none of its values differs from its starting value by more than this, as a
multiple of the starting values' root mean square. Averaging alone changes values by rounding only."""


def clear_untrained_cells(
    common: CommonWidth, values: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return common vectors in which hidden cells that still have their starting values are zero.

    No peer holds such a cell, or none has trained it: for `find_indices` it is free. Otherwise newcomers
    would match their cells with random ones and leave trained ones out.

    start
        The common starting values by model; models without any start at zero.
    """
    anatomy = common.slicing.anatomy
    flat = common.flat(values)
    before = common.flat({model: start[model] for model in values if model in start})
    is_changed = np.abs(flat - before) > UNTRAINED_CHANGE * np.sqrt(np.mean(before**2))
    for part in range(1, len(anatomy.parts) - 1):
        cells = anatomy.cells(part)
        coordinates_by_parameter = [item for item, _ in weights_of_cells(anatomy, cells)]
        is_trained = np.zeros(len(cells), dtype=bool)
        for coordinates in coordinates_by_parameter:
            is_trained |= is_changed[coordinates].any(axis=1)
        for coordinates in coordinates_by_parameter:
            flat[coordinates[~is_trained]] = 0.0
    return {
        model: flat[common.slicing.coordinates(model)].astype(value.dtype)
        for model, value in values.items()
    }


def _assign(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    is_used: np.ndarray,
    cells: int,
    options: MatchOptions,
) -> np.ndarray:
    """Return the best index in the common slice for each of the peer's cells.

    Each pair compares weights of one parameter: [the peer's cells, columns] with [common cells, columns].
    """
    products = np.zeros((cells, len(is_used)))
    own_squares, common_squares = np.zeros(cells), np.zeros(len(is_used))
    for own, common in pairs:
        products += own @ common.T
        own_squares += (own**2).sum(axis=1)
        common_squares += (common**2).sum(axis=1)
    precision, prior = 1 / options.variance, options.prior_precision
    # The factor of squared sums in the evidence Q (assignment.py) of an atom with two cells, and with one.
    two_cells, one_cell = precision**2 / (prior + 2 * precision), precision**2 / (prior + precision)
    # PFNM with two peers, this one and the swarm: the prior odds of a cell that the swarm has are 1/1, those
    # of a new one concentration/2.
    match_score = two_cells * (own_squares[:, None] + 2 * products + common_squares)
    match_score -= one_cell * common_squares
    free_score = one_cell * own_squares + 2 * np.log(options.concentration / 2)
    score = np.where(is_used, match_score, free_score[:, None])
    free = np.flatnonzero(~is_used)
    if options.kind == "printed":
        score[:, free] -= 2 * np.log(np.arange(1, len(free) + 1))
    elif options.kind == "efpf":
        score[:, free] -= 2 * np.log(is_used.sum() + np.arange(1, len(free) + 1))
    return linear_sum_assignment(-score)[1]
