"""Peers of different widths in one partial model: a common width, and each peer's places in it.

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
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..anatomy import Anatomy, ParameterMap, Part, first_cells
from ..errors import ModelError
from ..network import SlicedNetwork
from ..slicing import Layout, Slicing
from ..starts import Start, starting_values
from .alignment import blocks
from .problem import MatchOptions

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
            assert (found >= 0).all(), (
                "an owner's coordinates touch cells outside the common network"
            )

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
    parts = tuple(
        Part(part.name, int(count)) for part, count in zip(anatomy.parts, cells, strict=True)
    )
    firsts = first_cells(parts)
    parameters = []
    for parameter in anatomy.parameters:
        axes: list[np.ndarray | None] = []
        for axis in parameter.axes:
            part = anatomy.part_of(axis)
            if axis is None or part is None:
                axes.append(axis)
                continue
            if not np.array_equal(axis, anatomy.cells(part)):
                raise ModelError(
                    f"parameter {parameter.name!r}: an axis does not span one part in its order, so the "
                    "network cannot be given another width"
                )
            axes.append(np.arange(firsts[part], firsts[part + 1]))
        shape = tuple(
            size if axis is None else len(axis)
            for size, axis in zip(parameter.shape, axes, strict=True)
        )
        parameters.append(ParameterMap(parameter.name, shape, tuple(axes)))
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
