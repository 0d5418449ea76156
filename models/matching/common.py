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

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..anatomy import Anatomy, ParameterMap, Part
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
        self._cells = self._cell_map()
        self._positions = {owner: self._locate(owner) for owner in self.common.owners}

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

    def _cell_map(self) -> np.ndarray:
        """For each of the peer's cells its number in the common network; -1 for cells outside it."""
        found = np.full(int(self.own.anatomy.firsts[-1]), -1, dtype=np.int64)
        for model in self.models:
            for part, places in enumerate(self.places[model]):
                mine = self.own.anatomy.firsts[part] + self.own.cells[model][part]
                theirs = self.common.cells[model][part][places]
                found[mine] = self.common.anatomy.firsts[part] + theirs
        return found

    def _locate(self, owner: str) -> np.ndarray:
        """Positions of the peer's coordinates of `owner` in the common vector of `owner`."""
        where = self.common.coordinates(owner)
        position = np.full(self.common.anatomy.size, -1, dtype=np.int64)
        position[where] = np.arange(len(where))
        found = position[self._coordinate_map()[self.own.coordinates(owner)]]
        assert (found >= 0).all(), "an owner's coordinates touch cells outside the common network"
        return found

    def _coordinate_map(self) -> np.ndarray:
        """For each of the peer's coordinates the one in the common network, or -1."""
        own, common = self.own.anatomy, self.common.anatomy
        found = np.full(own.size, -1, dtype=np.int64)
        for mine, theirs in zip(own.parameters, common.parameters, strict=True):
            index = np.zeros(mine.shape, dtype=np.int64)
            inside = np.ones(mine.shape, dtype=bool)
            for at, (axis, other) in enumerate(zip(mine.axes, theirs.axes, strict=True)):
                if axis is None or other is None:
                    place = np.arange(mine.shape[at])
                else:
                    cell = self._cells[axis]
                    first = other[0] if len(other) else 0  # an axis spans one whole part
                    place = np.where(cell >= 0, cell - first, -1)
                shape = [1] * len(mine.shape)
                shape[at] = -1
                index = index * theirs.shape[at] + place.reshape(shape)
                inside &= place.reshape(shape) >= 0
            first = own.offsets[mine.name]
            found[first : first + mine.size] = np.where(
                inside, common.offsets[theirs.name] + index, -1
            ).ravel()
        return found

    def _check_size(self, owner: str, values: np.ndarray, size: int, kind: str) -> None:
        if values.shape != (size,):
            raise ModelError(f"{owner!r} has {size} {kind} values here, {values.shape} were given")


def resized(anatomy: Anatomy, cells: Sequence[int] | np.ndarray) -> Anatomy:
    """The anatomy of the same network with other widths. Every axis must span one whole part."""
    parts = tuple(
        Part(part.name, int(count)) for part, count in zip(anatomy.parts, cells, strict=True)
    )
    firsts = np.concatenate([[0], np.cumsum([part.cells for part in parts], dtype=np.int64)])
    parameters = []
    for parameter in anatomy.parameters:
        axes: list[np.ndarray | None] = []
        for axis in parameter.axes:
            if axis is None:
                axes.append(None)
                continue
            part = int(np.searchsorted(anatomy.firsts, axis[0], side="right")) - 1
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
    own, theirs = network.slicing.anatomy, common.common.anatomy
    chosen = _chosen(own, parts)
    flat = network.flat.double().cpu().numpy()
    target = common.flat(values)
    if not np.isfinite(target).all():
        raise ModelError("common width: the values of the neighbours are not all finite")
    places = {model: list(common.places[model]) for model in common.models}
    # Number of every own cell in the common network; cells of the chosen parts have none as yet.
    into = np.full(int(own.firsts[-1]), -1, dtype=np.int64)
    for model in common.models:
        for part, mine in enumerate(places[model]):
            if part not in chosen:
                into[own.firsts[part] + network.slicing.cells[model][part]] = (
                    theirs.firsts[part] + common.common.cells[model][part][mine]
                )
    order = sorted(
        common.models, key=lambda model: (len(common.own.graph.dependencies(model)), model)
    )
    for part in chosen:
        for model in order:
            mine = own.firsts[part] + network.slicing.cells[model][part]
            if not len(mine):
                continue
            there = theirs.firsts[part] + common.common.cells[model][part]
            found = _place(own, theirs, flat, target, mine, there, into, options)
            places[model][part] = found
            into[mine] = there[found]
    layouts = {model: common.common.layout(model) for model in common.models}
    return CommonWidth(common.own, layouts, {model: tuple(p) for model, p in places.items()})


def _place(
    own: Anatomy,
    theirs: Anatomy,
    flat: np.ndarray,
    target: np.ndarray,
    mine: np.ndarray,
    there: np.ndarray,
    into: np.ndarray,
    options: MatchOptions,
) -> np.ndarray:
    """The best injective map of `mine` cells into `there` cells."""
    common_blocks = list(blocks(theirs, there))
    used = np.zeros(len(there), dtype=bool)
    cross = np.zeros((len(mine), len(there)))
    here, away = np.zeros(len(mine)), np.zeros(len(there))
    for ours, block in zip(blocks(own, mine), common_blocks, strict=True):
        used |= (target[block.where] != 0).any(axis=1)
        column = _columns(ours.others, block.others, into)
        x = flat[ours.where[:, column >= 0]]
        y = target[block.where[:, column[column >= 0]]]
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


def _columns(others: np.ndarray, common: np.ndarray, into: np.ndarray) -> np.ndarray:
    """For each of our columns the common column that touches the same cells, or -1."""
    if not others.shape[1]:
        return np.arange(len(others))
    wanted = into[others]
    base = int(max(common.max(initial=0), wanted.max(initial=0))) + 1
    powers = base ** np.arange(others.shape[1])
    theirs = _distinct(common @ powers)
    ours = _distinct(np.where((wanted >= 0).all(axis=1), wanted @ powers, -1))
    order = np.lexsort(theirs[::-1])
    # Several columns may touch the same cells (a kernel's positions): they pair up in their order.
    stride = len(others) + len(common)
    sought = np.searchsorted((theirs[0] * stride + theirs[1])[order], ours[0] * stride + ours[1])
    sought = np.minimum(sought, len(order) - 1)
    found = order[sought]
    good = (ours[0] >= 0) & (theirs[0][found] == ours[0]) & (theirs[1][found] == ours[1])
    return np.where(good, found, -1)


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys, and for each how many equal ones come before it."""
    by_key = np.argsort(keys, kind="stable")
    ordered = keys[by_key]
    repeat = np.empty(len(keys), dtype=np.int64)
    repeat[by_key] = np.arange(len(keys)) - np.searchsorted(ordered, ordered, side="left")
    return keys, repeat


def _chosen(anatomy: Anatomy, parts: Sequence[str] | None) -> list[int]:
    names = [part.name for part in anatomy.parts]
    if parts is None:
        return list(range(1, len(names) - 1))
    if unknown := [part for part in parts if part not in names]:
        raise ModelError(f"common width: no part {unknown[0]!r} here; parts are {', '.join(names)}")
    return sorted(names.index(part) for part in parts)
