"""Giving cells to partial models: layouts, shares, explicit indices, and whatever is left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .anatomy import Anatomy
from .errors import ModelError
from .layout import Layout
from .shares import Share, is_share, take_shares

# A slice is a layout (`"784-250-80-10"`), a share (`0.8`, `{"*": 0.8, "head": 0}`), or the peer's own
# cell indices for every part.
SliceSpec = str | Layout | Share | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]


def allot(
    anatomy: Anatomy, slices: Mapping[str, SliceSpec], rest: str | None
) -> dict[str, tuple[np.ndarray, ...]]:
    """Give every cell to one model: explicit indices first, then layouts, then shares, then the rest."""
    if not slices and rest is None:
        raise ModelError("a network needs at least one slice")
    free = [np.ones(part.cells, dtype=bool) for part in anatomy.parts]
    allotted: dict[str, tuple[np.ndarray, ...]] = {}
    holder: list[dict[int, str]] = [{} for _ in anatomy.parts]
    shares: dict[str, Any] = {model: spec for model, spec in slices.items() if is_share(spec)}
    for model, spec in slices.items():
        if model not in shares and not isinstance(spec, str | Layout):
            allotted[model] = _explicit(anatomy, model, spec, free, holder)
    for model, spec in slices.items():
        if isinstance(spec, str | Layout):
            layout = Layout.slice(spec) if isinstance(spec, str) else spec
            allotted[model] = _first_free(anatomy, model, layout, free)
    allotted |= take_shares(anatomy, shares, free)
    left = tuple(np.flatnonzero(mask) for mask in free)
    if any(len(cells) for cells in left):
        if rest is None:
            part = next(index for index, cells in enumerate(left) if len(cells))
            raise ModelError(
                f"part {anatomy.parts[part].name!r} has {anatomy.parts[part].cells} cells, but the slices "
                f"{', '.join(slices)} take only {anatomy.parts[part].cells - len(left[part])}; "
                "give the others to a model, or name one for them with rest="
            )
        if rest in allotted:
            raise ModelError(
                f"model {rest!r} has a slice already, so it cannot take the rest as well"
            )
        allotted[rest] = left
    return allotted


def _first_free(
    anatomy: Anatomy, model: str, layout: Layout, free: list[np.ndarray]
) -> tuple[np.ndarray, ...]:
    if len(layout.cells) != len(anatomy.parts):
        raise ModelError(
            f"model {model!r}: layout {layout.as_slice()} has {len(layout.cells)} parts, the network "
            f"has {len(anatomy.parts)} ({', '.join(part.name for part in anatomy.parts)})"
        )
    taken = []
    for part, count, mask in zip(anatomy.parts, layout.cells, free, strict=True):
        cells = np.flatnonzero(mask)[:count]
        if len(cells) < count:
            raise ModelError(
                f"model {model!r} wants {count} cells of part {part.name!r}, which has {part.cells}, "
                f"{len(cells)} of them free"
            )
        mask[cells] = False
        taken.append(cells)
    return tuple(taken)


def _explicit(
    anatomy: Anatomy,
    model: str,
    spec: Any,
    free: list[np.ndarray],
    holder: list[dict[int, str]],
) -> tuple[np.ndarray, ...]:
    if isinstance(spec, Mapping):
        names = [part.name for part in anatomy.parts]
        if unknown := [name for name in spec if name not in names]:
            raise ModelError(
                f"model {model!r}: the network has no part {unknown[0]!r}; parts are {', '.join(names)}"
            )
        for name, cells in spec.items():
            if isinstance(cells, int | float):
                raise ModelError(
                    f"model {model!r}: part {name!r} is given as a share ({cells}) and others as lists of "
                    "cells; use one or the other"
                )
        lists = [spec.get(name, ()) for name in names]
    else:
        lists = list(spec)
        if len(lists) != len(anatomy.parts):
            raise ModelError(
                f"model {model!r}: indices were given for {len(lists)} parts, the network has "
                f"{len(anatomy.parts)} ({', '.join(part.name for part in anatomy.parts)})"
            )
    taken = []
    for part, indices, mask, held in zip(anatomy.parts, lists, free, holder, strict=True):
        cells = np.asarray(indices, dtype=np.int64).reshape(-1)
        for cell in cells.tolist():
            if not 0 <= cell < part.cells:
                raise ModelError(
                    f"model {model!r}: part {part.name!r} has cells 0 to {part.cells - 1}, not {cell}"
                )
            if not mask[cell]:
                raise ModelError(
                    f"cell {cell} of part {part.name!r} was given to {held[cell]!r} and to {model!r}"
                )
            mask[cell] = False
            held[cell] = model
        taken.append(cells)
    return tuple(taken)
