"""Shares: slices given as fractions of parts, for networks whose layout nobody wants to write down."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import numpy as np

from .anatomy import Anatomy, Part
from .errors import ModelError

Share = float | Mapping[str, float]
"""A fraction of every hidden part, or fractions by part name or glob; the last that matches counts."""


def is_share(spec: object) -> bool:
    """Whether a slice is given as shares rather than as indices or a layout."""
    if isinstance(spec, Mapping):
        return bool(spec) and all(_is_number(value) for value in spec.values())
    return _is_number(spec)


def take_shares(
    anatomy: Anatomy, shares: Mapping[str, Share], free: list[np.ndarray]
) -> dict[str, tuple[np.ndarray, ...]]:
    """The cells of every model with a share, the first free ones of each part; marks them as taken.

    `0.8`, which is short for `{"*": 0.8}`, is that fraction of every hidden part. Inputs and outputs
    mean something by their place: they go whole to the first model here, unless a name or a glob
    other than `*` says otherwise. Counts are rounded so that shares that add up to 1 take everything;
    a share above 0 is at least one cell.
    """
    for model, share in shares.items():
        _check(anatomy, model, share)
    taken: dict[str, list[np.ndarray]] = {model: [] for model in shares}
    for part, mask in zip(anatomy.parts, free, strict=True):
        fractions = _fractions(shares, part.name, hidden=part.name not in (anatomy.ends or ()))
        for model, count in _counts(part, fractions).items():
            cells = np.flatnonzero(mask)[:count]
            if len(cells) < count:
                raise ModelError(
                    f"model {model!r}: a share of {fractions[model]:g} is {count} of the {part.cells} cells "
                    f"of part {part.name!r}, of which {len(cells)} are free"
                )
            mask[cells] = False
            taken[model].append(cells)
    return {model: tuple(cells) for model, cells in taken.items()}


def _fractions(shares: Mapping[str, Share], part: str, *, hidden: bool) -> dict[str, float]:
    """The fraction of a part that every model asks for."""
    found: dict[str, float] = {}
    for model, share in shares.items():
        fraction = _fraction(share, part, hidden=hidden)
        if fraction is None:
            fraction = 0.0 if hidden or found else 1.0  # ends go to the first model
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


def _fraction(share: Share, part: str, *, hidden: bool) -> float | None:
    """The fraction that applies to a part; None where nothing does."""
    if not isinstance(share, Mapping):
        return float(share) if hidden else None
    found = None
    for pattern, value in share.items():
        if fnmatchcase(part, pattern) and (hidden or pattern != "*"):
            found = float(value)
    return found


def _check(anatomy: Anatomy, model: str, share: Share) -> None:
    given = share if isinstance(share, Mapping) else {"*": share}
    names = [part.name for part in anatomy.parts]
    for pattern, value in given.items():
        if not 0 <= value <= 1:
            raise ModelError(
                f"model {model!r}: a share is between 0 and 1, not {value} (for {pattern!r})"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"model {model!r}: no part is called {pattern!r}; parts are {', '.join(names)}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
