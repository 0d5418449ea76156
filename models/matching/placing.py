"""Finding a newcomer's places in a partial model of common width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..anatomy import Anatomy
from ..errors import ModelError
from ..network import SlicedNetwork
from .common import CommonWidth
from .options import MatchOptions
from .rows import blocks


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
