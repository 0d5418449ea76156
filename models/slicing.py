"""Cutting a network: which coordinates each partial model averages, in an order all peers share.

Partial models depend on each other (ModelGraph). Cells are given to them (layouts, shares, explicit indices,
the rest); R(π) says who owns the parameters between them; coordinates follow, ordered by nothing that differs
from peer to peer, and so do starting values: shared slices start equal on every peer, private ones differ.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from .anatomy import Anatomy, Part, repeats
from .errors import ModelError

if TYPE_CHECKING:
    from networkx import DiGraph

# Names travel in topics and file names, and two of them joined by `&` name a pair.
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,31}")


class ModelGraph:
    """A strict partial order on partial models.

    Build it from who depends on whom; models that are only depended on need no entry of their own:

        ModelGraph({"quebec": ["french"], "france": ["french"]})

    A networkx DiGraph with edges *from a model to what it depends on* is accepted as well.
    """

    def __init__(self, depends: Mapping[str, Iterable[str]] | DiGraph | None = None):
        # A DiGraph's adjacency is a mapping too.
        given: Any = getattr(depends, "adj", depends) or {}
        for model, others in given.items():
            if isinstance(others, str):
                raise ModelError(
                    f"model {model!r}: write what it depends on as a list: [{others!r}]"
                )
        direct = {model: frozenset(others) for model, others in given.items()}
        self._below: dict[str, frozenset[str]] = {}
        try:
            for model in TopologicalSorter(direct).static_order():
                above = direct.get(check_name(model), frozenset())
                self._below[model] = above.union(*(self._below[other] for other in above))
        except CycleError as error:
            circle = " → ".join(map(str, reversed(error.args[1])))
            raise ModelError(f"models depend on each other in a circle: {circle}") from None

    @property
    def models(self) -> frozenset[str]:
        """Every model that the order mentions."""
        return frozenset(self._below)

    def dependencies(self, model: str) -> frozenset[str]:
        """All that `model` depends on, directly or through others."""
        return self._below.get(model, frozenset())

    def owner(self, models: Iterable[str], *, cross: bool = False) -> str | None:
        """Who averages a parameter whose cells belong to `models`; None when it stays private.

        The paper's R(π): every model that another one in the set depends on is dropped. With `cross` (its
        Algorithm 2) unrelated models that are left own the parameter together, under `pair_name`.
        """
        present = frozenset(models)
        left = present.difference(*(self.dependencies(model) for model in present))
        return pair_name(left) if len(left) == 1 or (left and cross) else None


def pair_name(models: Iterable[str]) -> str:
    """The name under which unrelated models own a coordinate together: `green&yellow`."""
    return "&".join(sorted(models))


def check_name(model: object) -> str:
    """Return a model's name if it can be used as one."""
    if not isinstance(model, str) or not _NAME.fullmatch(model):
        raise ModelError(
            f"{model!r} cannot name a partial model: use 1 to 31 letters, digits, '.', '_', '@' or '-'"
        )
    return model


@dataclass(frozen=True)
class Layout:
    """Cells per part, in order: the paper's notation.

    `Layout.network("784=300=100=10")` reads a whole network, `Layout.slice("784-250-80-10")` the
    share of it that belongs to one partial model. Only a slice may have parts with no cell.
    """

    cells: tuple[int, ...]

    @classmethod
    def network(cls, text: str) -> Layout:
        """Read `784=300=100=10`: at least two parts, none of them empty."""
        layout = cls(_numbers(text, "=", "network", "784=300=100=10"))
        if len(layout.cells) < 2:
            raise ModelError(f"network layout {text!r} has one part; write two or more: 64=32=10")
        if 0 in layout.cells:
            raise ModelError(f"network layout {text!r}: part {layout.cells.index(0)} has no cells")
        return layout

    @classmethod
    def slice(cls, text: str) -> Layout:
        """Read `784-250-80-10`: the cells of one partial model in every part, zeros allowed."""
        return cls(_numbers(text, "-", "slice", "784-250-80-10"))

    def as_slice(self) -> str:
        """Write the layout as a slice's."""
        return "-".join(map(str, self.cells))


def _numbers(text: str, separator: str, kind: str, example: str) -> tuple[int, ...]:
    if not re.fullmatch(rf"\d+(?:{separator}\d+)*", text):
        raise ModelError(
            f"{text!r} is not a {kind} layout: write whole numbers joined by {separator!r}, as in {example}"
        )
    return tuple(int(number) for number in text.split(separator))


# --- giving cells to partial models -------------------------------------------------------------

Share = float | Mapping[str, float]
"""A fraction of every hidden part, or fractions by part name or glob; the last that matches counts."""

# A slice is a layout (`"784-250-80-10"`), a share (`0.8`, `{"*": 0.8, "head": 0}`), or the peer's own
# cell indices for every part.
SliceSpec = str | Layout | Share | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]

Cells = tuple[np.ndarray, ...]
"""One partial model's cells in every part."""


def is_share(spec: object) -> bool:
    """Whether a slice is given as shares rather than as indices or a layout."""
    if isinstance(spec, Mapping):
        return bool(spec) and all(map(_is_number, spec.values()))
    return _is_number(spec)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def allot(anatomy: Anatomy, slices: Mapping[str, SliceSpec], rest: str | None) -> dict[str, Cells]:
    """Give every cell to one model: explicit indices first, then layouts, then shares, then the rest."""
    if not slices and rest is None:
        raise ModelError("a network needs at least one slice")
    free = [np.ones(part.cells, dtype=bool) for part in anatomy.parts]
    allotted: dict[str, Cells] = {}
    shares: dict[str, Any] = {model: spec for model, spec in slices.items() if is_share(spec)}
    for model, spec in slices.items():
        if model not in shares and not isinstance(spec, str | Layout):
            allotted[model] = _explicit(anatomy, model, spec, free, allotted)
    for model, spec in slices.items():
        if isinstance(spec, str | Layout):
            layout = Layout.slice(spec) if isinstance(spec, str) else spec
            _check_count(anatomy, model, f"layout {layout.as_slice()} has", len(layout.cells))
            allotted[model] = tuple(
                _take(part, mask, count, f"model {model!r} wants {count} cells")
                for part, count, mask in zip(anatomy.parts, layout.cells, free, strict=True)
            )
    allotted |= _take_shares(anatomy, shares, free)
    left = tuple(np.flatnonzero(mask) for mask in free)
    for part, cells in zip(anatomy.parts, left, strict=True):
        if not len(cells):
            continue
        if rest is None:
            raise ModelError(
                f"part {part.name!r} has {part.cells} cells, but the slices {', '.join(slices)} take only "
                f"{part.cells - len(cells)}; give the others to a model, or name one for them with rest="
            )
        if rest in slices:
            raise ModelError(f"model {rest!r} has a slice already: it cannot take the rest as well")
        allotted[rest] = left
    return allotted


def _check_count(anatomy: Anatomy, model: str, given: str, count: int) -> None:
    if count != len(anatomy.parts):
        raise ModelError(
            f"model {model!r}: {given} {count} parts, the network has {len(anatomy.parts)} "
            f"({', '.join(anatomy.names)})"
        )


def _explicit(
    anatomy: Anatomy, model: str, spec: Any, free: list[np.ndarray], taken: Mapping[str, Cells]
) -> Cells:
    if isinstance(spec, Mapping):
        for name, cells in spec.items():
            anatomy.find(name, f"model {model!r}: ")
            if isinstance(cells, int | float):
                raise ModelError(
                    f"model {model!r}: part {name!r} is given as a share ({cells}) and others as lists of "
                    "cells; use one or the other"
                )
        spec = [spec.get(name, ()) for name in anatomy.names]
    _check_count(anatomy, model, "indices were given for", len(spec))
    found = []
    for index, (part, indices) in enumerate(zip(anatomy.parts, spec, strict=True)):
        cells = np.asarray(indices, dtype=np.int64).reshape(-1)
        for cell in cells.tolist():
            if not 0 <= cell < part.cells:
                raise ModelError(
                    f"model {model!r}: part {part.name!r} has cells 0 to {part.cells - 1}, not {cell}"
                )
            if not free[index][cell]:
                holder = next((m for m, other in taken.items() if cell in other[index]), model)
                raise ModelError(
                    f"cell {cell} of part {part.name!r} was given to {holder!r} and to {model!r}"
                )
            free[index][cell] = False
        found.append(cells)
    return tuple(found)


def _take(part: Part, mask: np.ndarray, count: int, wish: str) -> np.ndarray:
    """Take the first free cells of a part."""
    cells = np.flatnonzero(mask)[:count]
    if len(cells) < count:
        raise ModelError(
            f"{wish} of part {part.name!r}, which has {part.cells}, {len(cells)} of them free"
        )
    mask[cells] = False
    return cells


def _take_shares(
    anatomy: Anatomy, shares: Mapping[str, Share], free: list[np.ndarray]
) -> dict[str, Cells]:
    """The cells of every model with a share, the first free ones of each part.

    `0.8`, which is short for `{"*": 0.8}`, is that fraction of every hidden part. Inputs and outputs
    mean something by their place: they go whole to the first model here, unless a name or a glob
    other than `*` says otherwise. Counts are rounded so that shares that add up to 1 take everything;
    a share above 0 is at least one cell.
    """
    patterns = {
        model: share if isinstance(share, Mapping) else {"*": share}
        for model, share in shares.items()
    }
    for model, given in patterns.items():
        for pattern, value in given.items():
            if not 0 <= value <= 1:
                raise ModelError(
                    f"model {model!r}: a share is between 0 and 1, not {value} (for {pattern!r})"
                )
            if not any(fnmatchcase(name, pattern) for name in anatomy.names):
                raise ModelError(
                    f"model {model!r}: no part is called {pattern!r}; parts are {', '.join(anatomy.names)}"
                )
    taken: dict[str, list[np.ndarray]] = {model: [] for model in shares}
    for part, mask in zip(anatomy.parts, free, strict=True):
        fractions = _fractions(patterns, part.name, hidden=part.name not in (anatomy.ends or ()))
        for model, count in _counts(part, fractions).items():
            wish = f"model {model!r}: a share of {fractions[model]:g} is {count} cells"
            taken[model].append(_take(part, mask, count, wish))
    return {model: tuple(cells) for model, cells in taken.items()}


def _fractions(
    shares: Mapping[str, Mapping[str, float]], part: str, *, hidden: bool
) -> dict[str, float]:
    """The fraction of a part that every model asks for; inputs and outputs go to the first model."""
    found: dict[str, float] = {}
    for model, share in shares.items():
        fraction = 0.0 if hidden or found else 1.0
        for pattern, value in share.items():
            if fnmatchcase(part, pattern) and (hidden or pattern != "*"):
                fraction = float(value)
        found[model] = fraction
        if sum(found.values()) > 1 + 1e-9:
            raise ModelError(
                f"the shares of part {part!r} add up to {sum(found.values()):g} with model {model!r}; a "
                "part can be given away once"
            )
    return found


def _counts(part: Part, fractions: Mapping[str, float]) -> dict[str, int]:
    """Whole cells: sums are rounded, not the shares themselves, and nobody who asked gets nothing."""
    ends = np.rint(np.cumsum([0.0, *fractions.values()]) * part.cells).astype(int)
    counts = dict(zip(fractions, np.diff(ends).tolist(), strict=True))
    counts = {model: max(count, int(fractions[model] > 0)) for model, count in counts.items()}
    while sum(counts.values()) > part.cells:
        widest = max(counts, key=lambda model: counts[model])
        if counts[widest] == 1:
            asking = [model for model, fraction in fractions.items() if fraction > 0]
            raise ModelError(
                f"the share of model {asking[-1]!r} leaves it empty in part {part.name!r}: "
                f"{len(asking)} models want a share of its {part.cells} cells; override it, as in "
                f"{{'*': …, {part.name!r}: 0}}"
            )
        counts[widest] -= 1
    return counts


# --- who owns what ------------------------------------------------------------------------------

# The numbers of the models that own something together: one, or more with cross-model averaging, or
# none for what stays private.
Owner = tuple[int, ...]
_PRIVATE: Owner = ()

# A piece of a parameter: its name, on each axis with cells a model and its entries, and how many other
# values there are.
Block = tuple[str, tuple[tuple[int, int], ...], int]


@dataclass(frozen=True, eq=False)
class Ownership:
    """Coordinates by owner, in the swarm's common order, and what they are made of.

    Models are numbers here: nothing depends on names or on a peer's own cell indices. That makes
    coordinates comparable between peers, and lets peers that are cut alike share them.
    """

    coordinates: dict[Owner, slice | np.ndarray]
    blocks: dict[Owner, list[Block]]


def _own(
    anatomy: Anatomy, cells: list[Cells], below: tuple[frozenset[int], ...], cross: bool
) -> Ownership:
    """Give every coordinate to its owner.

    `cells` holds for every model its cells in every part, `below` the models that it depends on.
    """
    model_of, rank_of = np.zeros((2, anatomy.firsts[-1]), np.int64)
    part_of = np.repeat(np.arange(len(anatomy.parts)), np.diff(anatomy.firsts))
    for model, parts in enumerate(cells):
        for part, chosen in enumerate(parts):
            model_of[anatomy.firsts[part] + chosen] = model
            rank_of[anatomy.firsts[part] + chosen] = np.arange(len(chosen))
    pieces: dict[Owner, list[np.ndarray]] = {}
    blocks: dict[Owner, list[Block]] = {}
    for parameter in anatomy.parameters:
        span = anatomy.spans[parameter.name]
        where = np.arange(span.start, span.stop, dtype=np.int64).reshape(parameter.shape)
        if parameter.private:
            pieces.setdefault(_PRIVATE, []).append(where.ravel())
            continue
        spanned = [index for index, axis in enumerate(parameter.axes) if axis is not None]
        free = [index for index, axis in enumerate(parameter.axes) if axis is None]
        spans = [axis for axis in parameter.axes if axis is not None]
        # By model, part, rank in the slice, then by repetition of the same cell.
        orders = [
            np.lexsort((repeats(axis), rank_of[axis], part_of[axis], model_of[axis]))
            for axis in spans
        ]
        models = [model_of[axis[order]] for axis, order in zip(spans, orders, strict=True)]
        # Axes without cells come last, so one mask of owners serves all of them.
        where = where.transpose(*spanned, *free)[np.ix_(*orders)]
        if parameter.cell is not None:  # an axis of length 1 stands for its one cell
            models, where = [model_of[parameter.cell : parameter.cell + 1]], where[None]
        table, owners = _owner_table(len(models), below, cross)
        numbers = table[np.ix_(*models)]
        present = np.unique(numbers)
        for number in present.tolist():
            piece = where if len(present) == 1 else where[numbers == number]
            pieces.setdefault(owners[number], []).append(piece.ravel())
        each = where[(0,) * len(models)].size
        for block in itertools.product(*(np.unique(axis).tolist() for axis in models)):
            sizes = (int((axis == m).sum()) for m, axis in zip(block, models, strict=True))
            axes = tuple(zip(block, sizes, strict=True))
            blocks.setdefault(owners[table[block]], []).append((parameter.name, axes, each))
    return Ownership({owner: _compact(np.concatenate(p)) for owner, p in pieces.items()}, blocks)


def _owner_table(
    axes: int, below: tuple[frozenset[int], ...], cross: bool
) -> tuple[np.ndarray, list[Owner]]:
    """The paper's R(π): number of the owner by the models of the cells, and the owners numbered."""
    owners: list[Owner] = [_PRIVATE]
    table = np.zeros((len(below),) * axes, dtype=np.int64)
    for block in np.ndindex(table.shape):
        left = tuple(sorted(set(block).difference(*(below[model] for model in block))))
        if len(left) > 1 and not cross:
            continue
        if left not in owners:
            owners.append(left)
        table[block] = owners.index(left)
    return table, owners


def _compact(coordinates: np.ndarray) -> slice | np.ndarray:
    """A slice where it says the same: it copies faster, and takes no memory."""
    first = int(coordinates[0])
    whole = np.array_equal(coordinates, np.arange(first, first + len(coordinates)))
    return slice(first, first + len(coordinates)) if whole else coordinates


def _indices(where: slice | np.ndarray) -> np.ndarray:
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where


# What an owner averages, block by block: a parameter's name, then the model and the number of entries
# on each of its axes.
Schema = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


class Slicing:
    """One peer's network cut into slices.

    slices
        For every partial model that the peer implements, the cells it gives to it: a layout, which
        takes the first free cells of every part; a share (0.8) of every hidden part, or shares by part
        (`{"*": 0.8, "head": 0}`); or explicit indices per part (a list of lists, or a
        dict from part name to list). The order of explicit indices matters: the k-th cell of a slice is
        averaged with the k-th cell of the same slice on every other peer.
    graph
        The dependency order; without one no model depends on another. It must name every model in
        `slices`, and a peer that implements a model must implement all that it depends on.
    rest
        The name of a model that takes every cell no other slice claimed; None (the default) makes
        unclaimed cells an error. Give each peer's rest a name of its own, or peers will share it.
    cross
        Average weights between unrelated models among the peers that implement both (Algorithm 2).
    """

    def __init__(
        self,
        anatomy: Anatomy,
        slices: Mapping[str, SliceSpec],
        *,
        graph: ModelGraph | None = None,
        rest: str | None = None,
        cross: bool = False,
    ):
        self.anatomy = anatomy
        self.graph = graph or ModelGraph()
        self.cross = cross
        self.cells = allot(anatomy, slices, rest)
        self._check_models(rest)
        self.models: tuple[str, ...] = tuple(sorted(self.cells))
        self._number = {model: index for index, model in enumerate(self.models)}
        self._owned = self._ownership()
        self._coordinates = {
            pair_name(self.models[index] for index in owner): where
            for owner, where in self._owned.coordinates.items()
        }
        self.owners: tuple[str, ...] = tuple(sorted(name for name in self._coordinates if name))
        """Models, and pairs of models with `cross`, that own at least one coordinate."""

    def coordinates(self, owner: str) -> np.ndarray:
        """Indices into the flat parameter vector that `owner` averages, in the swarm's common order."""
        return _indices(self.where(owner))

    def where(self, owner: str) -> slice | np.ndarray:
        """The same as `coordinates`, but as a slice where they follow each other without a gap."""
        if not owner or owner not in self._coordinates:
            raise ModelError(f"{owner!r} owns nothing here; owners are {', '.join(self.owners)}")
        return self._coordinates[owner]

    @property
    def private(self) -> np.ndarray:
        """Coordinates between unrelated models, which nobody averages."""
        return _indices(self._coordinates.get("", np.empty(0, dtype=np.int64)))

    def schema(self, owner: str) -> Schema:
        """What `owner` averages, block by block: equal on two peers iff they may average it."""
        self.where(owner)
        blocks = self._owned.blocks[tuple(sorted(map(self._number.__getitem__, owner.split("&"))))]
        return tuple(
            (
                name,
                tuple((self.models[index], count) for index, count in axes)
                + ((("", free),) if free > 1 else ()),
            )
            for name, axes, free in blocks
        )

    def layout(self, model: str) -> Layout:
        """The cells per part of one of the peer's slices."""
        return Layout(tuple(len(cells) for cells in self.cells[model]))

    def _check_models(self, rest: str | None) -> None:
        known = self.graph.models
        for model, cells in self.cells.items():
            check_name(model)
            if known and model not in known and model != rest:
                raise ModelError(
                    f"unknown model {model!r}: the dependency order knows {', '.join(sorted(known))}"
                )
            if not any(len(part) for part in cells):
                raise ModelError(f"model {model!r} is empty: it has no cell in any part")
            if lacking := sorted(self.graph.dependencies(model) - set(self.cells)):
                raise ModelError(
                    f"model {model!r} depends on {lacking[0]!r}, which this peer does not implement; "
                    f"give {lacking[0]!r} a slice too"
                )

    def _ownership(self) -> Ownership:
        """Who owns what, by numbers of models; shared by all peers that are cut alike."""
        cells = [self.cells[model] for model in self.models]
        below = tuple(
            frozenset(self._number[other] for other in self.graph.dependencies(model))
            for model in self.models
        )
        digest = hashlib.blake2b()
        for part in itertools.chain(*cells):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, np.int64).tobytes())
        key = (self.anatomy.digest, digest.digest(), below, self.cross)
        found = _SHARED.get(key)
        if found is None:
            found = _SHARED[key] = _own(self.anatomy, cells, below, self.cross)
        return found


# Peers that are cut alike share their coordinates, which would be most of the memory of a large swarm.
_SHARED: WeakValueDictionary[tuple[object, ...], Ownership] = WeakValueDictionary()


def stream(seed: int, *names: object) -> np.random.Generator:
    """The generator that belongs to a seed and a path of names, the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, names)]).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))


@dataclass(frozen=True)
class Start:
    """How weights are drawn.

    Biases start at 0; norm gains, slopes, statistics and whatever else has one value per cell keep the
    module's own constant. Tokens and places that are constant stay so; otherwise they and embeddings are
    drawn with rows of length about `gain`.

    kind, gain
        `normal` draws N(0, (gain/√fan_in)²), `uniform` draws from ±gain/√fan_in.
    by_fan_in
        False leaves out the division by √fan_in: `Start("uniform", 1.0, by_fan_in=False)` is [−1, 1].
    shift
        Added to every weight: the distribution's mean.
    equal
        True (the default) lets every peer start a shared slice from the same values. Independent
        starts are possible, but the first averagings then shrink the weights and cost many rounds.
    """

    kind: Literal["normal", "uniform"] = "normal"
    gain: float = 1.0
    by_fan_in: bool = True
    shift: float = 0.0
    equal: bool = True


def starting_values(
    slicing: Slicing, current: np.ndarray, *, seed: int, peer: str, start: Start | None = None
) -> np.ndarray:
    """A flat parameter vector for one peer, drawn per owner so that owners agree across peers."""
    start = start or Start()
    scale, values = _scales(slicing.anatomy, current, start)
    pieces = [("model", owner, slicing.coordinates(owner)) for owner in slicing.owners]
    pieces.append(("peer", peer, slicing.private))
    for kind, name, coordinates in pieces:
        names = (kind, name) if start.equal else (kind, name, peer)
        generator = stream(seed, "start", *names)
        if start.kind == "normal":
            drawn = generator.standard_normal(len(coordinates))
        else:
            drawn = generator.uniform(-1.0, 1.0, len(coordinates))
        values[coordinates] += drawn * scale[coordinates]
    return values


def _scales(anatomy: Anatomy, current: np.ndarray, start: Start) -> tuple[np.ndarray, np.ndarray]:
    """Per coordinate: the spread of its draw, and what the draw is added to."""
    scale, base = np.zeros(anatomy.size), np.zeros(anatomy.size)

    def spread(fan_in: int) -> float:
        return start.gain / np.sqrt(fan_in) if start.by_fan_in else start.gain

    for one in anatomy.parameters:
        span, axes = anatomy.spans[one.name], len(one.shape)
        if (
            axes > 1 and one.axes[0] is not None
        ):  # leads to cells: dense, convolution, gates, attention
            scale[span] = spread(int(np.prod(one.shape[1:], dtype=np.int64)))
            base[span] = start.shift
        elif axes == 1 and "bias" in one.name.rpartition(".")[2]:
            continue  # by name: a layer of one cell has a bias that looks as constant as a gain
        elif one.size and bool((current[span] == current[span.start]).all()):
            base[span] = current[span.start]  # PReLU slopes, norm gains: the module knows best
        elif axes > 1:
            scale[span] = spread(one.shape[-1])
    return scale, base
