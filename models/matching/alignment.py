"""Alignment: permute a peer's cells to agree best with a reference; the function stays the same.

This is what runs before averaging: coordinates may be averaged only when cell k of a slice means the
same on both sides. Cells move only inside their part and their partial model, with everything that
stands for them: coupled channels of several layers move together, batch statistics along with them.

Peers of different widths in one partial model: a common width, and each peer's places in it.

A partial model may carry more cells than a peer can afford. All its peers then gossip one vector at the
*common* width; each peer's network is the part of it at the peer's own places. Training moves those
coordinates alone, averaging moves all of them, so that push-sum sees equal vectors everywhere and its
guarantees hold as they are. Cells that nobody uses are zero; a newcomer whose cells match none of those
in use takes free ones, and so the model grows, never beyond the common width.

    common = CommonWidth(network.slicing, {"global": "64-100-10"})
    mass.sum += weight * common.lift("global", change)          # after training: own change → common
    network.write("global", common.lower("global", estimate))    # after averaging: common → own
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
from ..slicing import Layout, Slicing, Start, starting_values
from .assignment import MatchOptions

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
        own.permute(network.own_buffers(), self.take)

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
    slicing, anatomy = network.slicing, network.slicing.anatomy
    target, known = _reference(network, reference)
    chosen = _chosen_models(slicing, reference, models)
    ends = anatomy.ends or ()
    wanted = [name for name in anatomy.names if name not in ends] if parts is None else parts
    slices = [
        _Slice(model, part, anatomy.firsts[part] + slicing.cells[model][part])
        for part in sorted(anatomy.find(name, "align: ") for name in wanted)
        for model in chosen
        if len(slicing.cells[model][part])
    ]
    if by == "activations":
        take, agreement = _by_activations(network, target, known, slices, inputs)
    elif by == "weights":
        for name, _ in network.module.named_buffers():
            if (
                name in anatomy.spans
            ):  # the scale of statistics says nothing about how weights agree
                target[anatomy.spans[name]] = 0.0
        take, agreement = _by_weights(network, target, [one.cells for one in slices], passes)
    else:
        raise ModelError(f"align: by {by!r} is unknown; there are weights, activations")
    moves: dict[str, dict[str, np.ndarray]] = {model: {} for model in chosen}
    for model, part, cells in slices:
        order = np.argsort(cells)
        moves[model][anatomy.names[part]] = order[np.searchsorted(cells, take[cells], sorter=order)]
    return Alignment(moves, anatomy.flat_order(take), tuple(agreement), take)


class _Slice(NamedTuple):
    """The cells, by number, that a partial model has of a part."""

    model: str
    part: int
    cells: np.ndarray


def _reference(network: SlicedNetwork, reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """The reference in this network's coordinates, 0 where it gives none, and where it gives some."""
    if isinstance(reference, SlicedNetwork):
        reference = {
            owner: reference.read(owner) for owner in reference.owners if owner in network.owners
        }
    values = np.zeros(len(network.flat))
    known = np.zeros(len(values), dtype=bool)
    for owner, given in reference.items():
        where = network.slicing.coordinates(owner)
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


def permute_optimizer(
    optimizer: torch.optim.Optimizer, network: SlicedNetwork, found: Alignment
) -> None:
    """Bring momentum, Adam's moments and the like, in place, into the order that `found` gives.

    Everything that an optimizer remembers in the shape of a parameter is moved with it; numbers that
    it keeps per parameter stay. Call it together with `found.apply(network)`, before the next step.
    """
    for name, parameter in network.module.named_parameters():
        span = network.slicing.anatomy.spans[name]
        # Cells change places inside a parameter, never between two of them.
        order = torch.from_numpy(found.order[span] - span.start).to(parameter.device)
        for slot in optimizer.state.get(parameter, {}).values():
            if isinstance(slot, Tensor) and slot.shape == parameter.shape:
                slot.copy_(slot.reshape(-1)[order].view(slot.shape))


# --- by weights: coordinate ascent, one optimal assignment per slice of a part --------------------


def _by_weights(
    network: SlicedNetwork, target: np.ndarray, slices: Sequence[np.ndarray], passes: int
) -> tuple[np.ndarray, list[float]]:
    """Raise Σ own · reference over known coordinates until no slice can be permuted to more.

    Returns for every cell the one that takes its place, and the sum before and after every pass.
    """
    anatomy = network.slicing.anatomy
    flat = network.flat.double().cpu().numpy()

    def best(take: np.ndarray, mine: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """The permutation with one slice assigned anew; `take` itself where nothing is gained."""
        score = np.zeros((len(cells), len(cells)))  # [own cell, place]
        for where, others in blocks(anatomy, cells):
            where = where[:, settled[others].all(axis=1)]
            score += mine[where] @ target[where].T
        _, chosen = linear_sum_assignment(-score.T)
        gain = score[chosen, np.arange(len(cells))].sum() - np.trace(score)
        if gain <= 1e-9 * (1 + np.abs(score).max()):
            return take  # ties are not worth moving for
        trial = take.copy()
        trial[cells] = take[cells[chosen]]
        return trial

    stay = np.arange(int(anatomy.firsts[-1]))
    # A first pass compares only columns whose other end is in its place already.
    settled = np.ones(len(stay), dtype=bool)
    settled[np.concatenate([stay[:0], *slices])] = False
    take, mine = stay, flat
    for cells in slices:
        take = best(take, mine, cells)
        mine = flat[anatomy.flat_order(take)]
        settled[cells] = True
    agreement = [float(flat @ target)]
    if mine @ target <= agreement[0]:  # it looked at few columns, and they led astray
        take, mine = stay, flat
    agreement.append(float(mine @ target))
    for _ in range(passes):
        for cells in slices:
            trial = best(take, mine, cells)
            moved = mine if trial is take else flat[anatomy.flat_order(trial)]
            if moved @ target > mine @ target:
                take, mine = trial, moved
        agreement.append(float(mine @ target))
        if agreement[-1] == agreement[-2]:
            break
    return take, agreement


def blocks(anatomy: Anatomy, cells: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every parameter that touches `cells`, seen from them: their coordinates and the cells besides.

    The first is [cells, columns]. The second, [columns, k], holds the cells that each column touches
    besides: none for a bias, one for a dense weight. A cell may stand on an axis several times (a channel
    flattened into a dense layer, four stacked gates): its k-th position means what the k-th of any other
    cell of its part means.
    """
    for parameter in anatomy.parameters:
        for index, axis in enumerate(parameter.axes):
            if axis is None:
                continue
            by_cell = np.argsort(axis, kind="stable")
            first = np.searchsorted(axis[by_cell], cells)
            count = np.searchsorted(axis[by_cell], cells, side="right") - first
            each = int(count.min()) if len(count) else 0
            if not each:
                continue
            span = anatomy.spans[parameter.name]
            flat = np.arange(span.start, span.stop, dtype=np.int64).reshape(parameter.shape)
            seen = np.moveaxis(flat, index, 0)[by_cell[first[:, None] + np.arange(each)]]
            sizes = (*parameter.shape[:index], *parameter.shape[index + 1 :])
            columns = int(np.prod(sizes, dtype=np.int64))
            rest = (*parameter.axes[:index], *parameter.axes[index + 1 :])
            grid = np.indices(sizes).reshape(len(sizes), columns)
            others = [axis[at] for axis, at in zip(rest, grid, strict=True) if axis is not None]
            besides = np.stack(others, axis=1) if others else np.empty((columns, 0), np.int64)
            yield seen.reshape(len(cells), -1), np.tile(besides, (each, 1))


# --- by activations: correlations on the peer's own samples -------------------------------------


def _by_activations(
    network: SlicedNetwork,
    target: np.ndarray,
    known: np.ndarray,
    slices: Sequence[_Slice],
    inputs: Tensor | None,
) -> tuple[np.ndarray, list[float]]:
    """Correlate what the cells of both networks answer to the same inputs; returns as `_by_weights`.

    What the reference does not give is silent in both, or private cells would be compared with nothing.
    """
    if inputs is None or len(inputs) < 2:
        raise ModelError(
            "align: by activations needs inputs: two or more of the peer's own samples"
        )
    anatomy = network.slicing.anatomy
    if any(parameter.private for parameter in anatomy.parameters):
        raise ModelError(
            'align: by activations hears nothing through norms that are private (buffers="local"); align by '
            "weights"
        )
    parts = [anatomy.parts[part] for part in sorted({one.part for one in slices})]
    flat = np.where(known, network.flat.double().cpu().numpy(), 0.0)
    own = _answers(_with_values(network, flat), parts, inputs)
    theirs = _answers(_with_values(network, target), parts, inputs)
    take = np.arange(int(anatomy.firsts[-1]))
    agreement = [0.0, 0.0]
    for _, part, cells in slices:
        name, chosen = anatomy.names[part], cells - anatomy.firsts[part]
        score = own[name][:, chosen].T @ theirs[name][:, chosen]
        _, best = linear_sum_assignment(-score.T)
        agreement[0] += float(np.trace(score))
        agreement[1] += float(score[best, np.arange(len(cells))].sum())
        take[cells] = cells[best]
    return take, agreement


def _with_values(network: SlicedNetwork, flat: np.ndarray) -> nn.Module:
    """A copy of the network's module with other values, ready to answer."""
    other = deepcopy(network.module).eval()
    anatomy = network.slicing.anatomy
    tensors = named_tensors(other)
    for name, piece in anatomy.views(torch.from_numpy(flat)).items():
        tensors[name].data = piece.to(tensors[name])
    if anatomy.buffers:  # statistics of the peer's own do not fit other values: take the batch's
        for norm in other.modules():
            if isinstance(norm, BATCH_NORMS):
                norm.train()
    return other


@torch.no_grad()
def _answers(module: nn.Module, parts: Sequence[Part], inputs: Tensor) -> dict[str, np.ndarray]:
    """For every part its layer's outputs [answers, cells], standardised; silent cells give zeros."""
    layers = dict(module.named_modules())
    caught: dict[str, np.ndarray] = {}

    def hook(part: Part, layer: nn.Module, _: object, output: Tensor) -> None:
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

    for part in parts:  # the module is a copy: hooks may stay
        layer = layers.get(part.name)
        if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            raise ModelError(
                "align: by activations needs parts named after a dense layer or a convolution, which "
                f"{part.name!r} is not; name those to align with parts=, or align by weights"
            )
        layer.register_forward_hook(partial(hook, part))
    module(inputs)
    return caught


Places = Mapping[str, Sequence[np.ndarray]]


class CommonWidth:
    """Where one peer's slices are in partial models of a common width.

    slicing
        The peer's own.
    widths
        For every model with a common width its layout there; the same on all peers. Models that these
        depend on take part at the peer's own layout unless they are named too.
    places
        For every such model and part, the common cell of each of the peer's cells. Without them a peer
        takes the first ones: right for peers that start fresh, for then all widths are nested. A
        peer with a network of its own finds its places with `find_places`.
    """

    def __init__(
        self, slicing: Slicing, widths: Mapping[str, str | Layout], places: Places | None = None
    ):
        self.own = slicing
        layouts = {
            model: Layout.slice(text) if isinstance(text, str) else text
            for model, text in widths.items()
        }
        for model, layout in layouts.items():
            _check_layout(slicing, model, layout)
        for model in list(layouts):
            for other in slicing.graph.dependencies(model):
                layouts.setdefault(other, slicing.layout(other))
        self.models: tuple[str, ...] = tuple(sorted(layouts))
        anatomy = resized(slicing.anatomy, np.sum([lay.cells for lay in layouts.values()], axis=0))
        self.common = Slicing(anatomy, layouts, graph=slicing.graph, cross=slicing.cross)
        self.places: dict[str, tuple[np.ndarray, ...]] = {
            model: _check_places(slicing, model, layouts[model], (places or {}).get(model))
            for model in self.models
        }
        into = _cell_map(slicing, self.common, self.places)
        mapped = _coordinate_map(slicing.anatomy, anatomy, into)
        self._positions: dict[str, np.ndarray] = {}
        for owner in self.common.owners:
            where = self.common.coordinates(owner)
            position = np.full(anatomy.size, -1, dtype=np.int64)
            position[where] = np.arange(len(where))
            found = self._positions[owner] = position[mapped[slicing.coordinates(owner)]]
            assert (found >= 0).all(), "an owner touches cells outside the common network"

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners that are averaged at the common width."""
        return self.common.owners

    def size(self, owner: str) -> int:
        """How many values `owner` averages."""
        return len(self.common.coordinates(owner))

    def positions(self, owner: str) -> np.ndarray:
        """For each of the peer's values of `owner`, its position in the common vector."""
        if owner not in self._positions:
            raise ModelError(
                f"{owner!r} has no common width here; owners are {', '.join(self.owners)}"
            )
        return self._positions[owner]

    def lower(self, owner: str, common: np.ndarray) -> np.ndarray:
        """The peer's own values out of a common vector."""
        self._check_size(owner, common, self.size(owner), "common")
        return common[self.positions(owner)]

    def lift(self, owner: str, own: np.ndarray, common: np.ndarray | None = None) -> np.ndarray:
        """A common vector with the peer's own values in it; elsewhere `common`, or zeros."""
        positions = self.positions(owner)
        self._check_size(owner, own, len(positions), "own")
        if common is None:
            found = np.zeros(self.size(owner), dtype=own.dtype)
        else:
            self._check_size(owner, common, self.size(owner), "common")
            found = common.copy()
        found[positions] = own
        return found

    def start(self, seed: int, start: Start | None = None) -> dict[str, np.ndarray]:
        """Starting values at the common width, the same on every peer of the swarm.

        Pass the same seed everywhere; `lower` gives each peer its part.
        """
        values = starting_values(
            self.common, np.zeros(self.common.anatomy.size), seed=seed, peer="", start=start
        )
        return {owner: values[self.common.coordinates(owner)] for owner in self.owners}

    def flat(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Common vectors per owner as one flat vector of the common network; others are zero."""
        flat = np.zeros(self.common.anatomy.size)
        for owner, given in values.items():
            self._check_size(owner, given, self.size(owner), "common")
            flat[self.common.coordinates(owner)] = given
        return flat

    def _check_size(self, owner: str, values: np.ndarray, size: int, kind: str) -> None:
        if values.shape != (size,):
            raise ModelError(f"{owner!r} has {size} {kind} values here, {values.shape} were given")


def resized(anatomy: Anatomy, cells: Sequence[int] | np.ndarray) -> Anatomy:
    """The anatomy of the same network with other widths. Every axis must span one whole part."""
    parts = tuple(Part(name, int(count)) for name, count in zip(anatomy.names, cells, strict=True))
    parameters = []
    for one in anatomy.parameters:
        shape, axes = list(one.shape), list(one.axes)
        for index, axis in enumerate(one.axes):
            part = anatomy.part_of(axis)
            if axis is None or part is None:
                continue
            if not np.array_equal(axis, anatomy.cells(part)):
                raise ModelError(
                    f"parameter {one.name!r}: an axis does not span one part in its order, so the "
                    "network cannot be given another width"
                )
            axes[index] = dense_axes(parts, part)[0]
            shape[index] = parts[part].cells
        parameters.append(ParameterMap(one.name, tuple(shape), tuple(axes)))
    return Anatomy(parts, tuple(parameters))


def _cell_map(
    own: Slicing, common: Slicing, places: Mapping[str, Sequence[np.ndarray | None]]
) -> np.ndarray:
    """For each own cell its number in the common network; -1 for cells outside it, or without a place."""
    found = np.full(int(own.anatomy.firsts[-1]), -1, dtype=np.int64)
    for model, parts in places.items():
        for part, chosen in enumerate(parts):
            if chosen is not None:
                mine = own.anatomy.firsts[part] + own.cells[model][part]
                found[mine] = common.anatomy.firsts[part] + common.cells[model][part][chosen]
    return found


def _coordinate_map(own: Anatomy, common: Anatomy, into: np.ndarray) -> np.ndarray:
    """For each own coordinate the one in the common network, or -1; `into` maps the cells."""
    found = np.full(own.size, -1, dtype=np.int64)
    for mine, theirs in zip(own.parameters, common.parameters, strict=True):
        index, inside = np.zeros(mine.shape, np.int64), np.ones(mine.shape, bool)
        for at, (axis, other) in enumerate(zip(mine.axes, theirs.axes, strict=True)):
            place = np.arange(mine.shape[at])
            if axis is not None and other is not None:
                first = other[0] if len(other) else 0  # an axis spans one whole part
                place = np.where(into[axis] >= 0, into[axis] - first, -1)
            place = place.reshape([-1 if i == at else 1 for i in range(len(mine.shape))])
            index = index * theirs.shape[at] + place
            inside &= place >= 0
        coordinates = np.where(inside, common.offsets[theirs.name] + index, -1)
        found[own.spans[mine.name]] = coordinates.ravel()
    return found


def _check_layout(slicing: Slicing, model: str, layout: Layout) -> None:
    if model not in slicing.models:
        raise ModelError(
            f"common width of {model!r}: this peer implements {', '.join(slicing.models)}"
        )
    own = slicing.layout(model)
    if len(layout.cells) != len(own.cells):
        raise ModelError(
            f"common width of {model!r}: {layout.as_slice()} has {len(layout.cells)} parts, the network "
            f"has {len(own.cells)}"
        )
    for part, have, bound in zip(slicing.anatomy.parts, own.cells, layout.cells, strict=True):
        if have > bound:
            raise ModelError(
                f"common width of {model!r}: this peer has {have} cells of part {part.name!r}, the common "
                f"width allows {bound}; raise it on all peers, or make the slice smaller"
            )


def _check_places(
    slicing: Slicing, model: str, layout: Layout, places: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, ...]:
    own = slicing.layout(model).cells
    if places is None:
        return tuple(np.arange(count) for count in own)
    found = []
    for part, count, bound, given in zip(
        slicing.anatomy.parts, own, layout.cells, places, strict=True
    ):
        array = np.asarray(given, dtype=np.int64)
        good = array.shape == (count,) and len(np.unique(array)) == count
        if not good or (count and not 0 <= array.min() <= array.max() < bound):
            raise ModelError(
                f"places of {model!r} in part {part.name!r}: give {count} different numbers from 0 to "
                f"{bound - 1}"
            )
        found.append(array)
    return tuple(found)


def find_places(
    network: SlicedNetwork,
    common: CommonWidth,
    values: Mapping[str, np.ndarray],
    options: MatchOptions | None = None,
    *,
    parts: Sequence[str] | None = None,
) -> CommonWidth:
    """The same common width with places at which `network`'s cells agree best with `values`.

    values
        Common vectors per owner, as neighbours send them. Cells that are all zero there are free.
    options
        What a match and a free cell cost: raise `variance` to match more, raise `mass` to grow more.
    parts
        As in `align`: by default all but the first and the last.

    Each part is matched on the columns whose other end has its place already, from the inputs up.
    What was received counts as one observation, however many peers stand behind it.
    """
    options = options or MatchOptions()
    own, theirs = network.slicing, common.common
    anatomy = theirs.anatomy
    inner = anatomy.names[1:-1] if parts is None else parts
    chosen = sorted(anatomy.find(name, "common width: ") for name in inner)
    flat = network.flat.double().cpu().numpy()
    target = common.flat(values)
    if not np.isfinite(target).all():
        raise ModelError("common width: the values of the neighbours are not all finite")
    places: dict[str, list[np.ndarray | None]] = {
        model: [
            None if part in chosen else cells for part, cells in enumerate(common.places[model])
        ]
        for model in common.models
    }
    order = sorted(common.models, key=lambda model: (len(own.graph.dependencies(model)), model))
    for part, model in itertools.product(chosen, order):
        cells = own.cells[model][part]
        into = _cell_map(own, theirs, places)
        settled = np.zeros(int(anatomy.firsts[-1]), dtype=bool)
        settled[into[into >= 0]] = True
        # The own values at the common width, as if the cells to be placed had the first places.
        there = anatomy.firsts[part] + theirs.cells[model][part]
        into[own.anatomy.firsts[part] + cells] = there[: len(cells)]
        mapped = _coordinate_map(own.anatomy, anatomy, into)
        lifted = np.zeros(anatomy.size)
        lifted[mapped[mapped >= 0]] = flat[mapped >= 0]
        columns = [
            (where, where[:, settled[others].all(axis=1)])
            for where, others in blocks(anatomy, there)
        ]
        used = np.zeros(len(there), dtype=bool)
        for where, _ in columns:
            used |= (target[where] != 0).any(axis=1)
        pairs = [(lifted[some[: len(cells)]], target[some]) for _, some in columns]
        places[model][part] = _assign(pairs, used, len(cells), options)
    layouts = {model: theirs.layout(model) for model in common.models}
    return CommonWidth(common.own, layouts, places)  # pyright: ignore[reportArgumentType]


def _assign(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    used: np.ndarray,
    cells: int,
    options: MatchOptions,
) -> np.ndarray:
    """The best place of every cell, from its values and those of the places, column by column."""
    cross = np.zeros((cells, len(used)))
    here, away = np.zeros(cells), np.zeros(len(used))
    for x, y in pairs:
        cross += x @ y.T
        here += (x**2).sum(axis=1)
        away += (y**2).sum(axis=1)
    precision, prior = 1 / options.variance, options.prior_precision
    both, one = precision**2 / (prior + 2 * precision), precision**2 / (prior + precision)
    # Two observers: odds 1/1 for an atom that the other has, mass/2 for a new one.
    gain = both * (here[:, None] + 2 * cross + away) - one * away
    free = one * here + 2 * np.log(options.mass / 2)
    score = np.where(used, gain, free[:, None])
    empty = np.flatnonzero(~used)
    if options.kind == "printed":
        score[:, empty] -= 2 * np.log(np.arange(1, len(empty) + 1))
    elif options.kind == "efpf":
        score[:, empty] -= 2 * np.log(used.sum() + np.arange(1, len(empty) + 1))
    return linear_sum_assignment(-score)[1]
