"""ModelError, which this package raises for invalid input, and checks of options that raise it."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from gossamer.errors import GossamerError


class ModelError(GossamerError, ValueError):
    """A network, its slices, a set of networks or an option is invalid; the message says which."""


def check_number(
    name: str, value: float, *, above: float = -inf, least: float = -inf, most: float = inf
) -> None:
    """Raise ModelError unless a number is finite and within its bounds.

    name: what the error calls the number. above: what it must exceed. least, most: the smallest and the
    largest value that is allowed.
    """
    if above < value < inf and least <= value <= most:
        return
    if most < inf:
        allowed = f"lie between {max(above, least):g} and {most:g}"
        allowed += f", and not be {above:g}" if above > -inf else ""
    else:
        allowed = (
            f"be a finite number above {above:g}"
            if above > -inf
            else f"be finite, {least:g} or more"
        )
    raise ModelError(f"{name} is {value}; it must {allowed}")


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Raise ModelError unless a value is one of `known`; `name` is what the error calls the value."""
    if value not in known:
        raise ModelError(f"{name} {value!r} is unknown; there are {', '.join(known)}")
