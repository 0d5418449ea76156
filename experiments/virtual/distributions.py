"""Named distributions of durations, as a config writes them.

"constant:1"    "uniform:0.5:1.5"    "exponential:2"    "lognormal:1:0.5"    "gamma:1:4"
{kind = "lognormal", median = 1, sigma = 0.5}    {kind = "gamma", mean = 0.2, shape = 4, fixed = true}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from scipy import special

from ..config.tables import ConfigError
from .draws import Floats


class TimeError(ConfigError):
    """Times, losses or schedules that make no sense; the text says what to write instead."""


@dataclass(frozen=True)
class Distribution:
    """Seconds that something takes. `at(u)` turns uniform numbers into durations.

    kind, parameters: as in the table `KINDS`.
    fixed: drawn once for each peer or link and kept, instead of anew each time: some are always slow.
    """

    kind: str
    parameters: tuple[float, ...]
    fixed: bool = False

    @property
    def mean(self) -> float:
        """The mean duration."""
        return KINDS[self.kind].mean(*self.parameters)

    def at(self, uniform: Floats) -> Floats:
        """The quantiles at numbers between 0 and 1."""
        return KINDS[self.kind].quantile(uniform, *self.parameters)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.parameters)])


@dataclass(frozen=True)
class Kind:
    """What a name in a config stands for: the names of its parameters, its mean, its quantiles."""

    names: tuple[str, ...]
    mean: Callable[..., float]
    quantile: Callable[..., Floats]


KINDS: Mapping[str, Kind] = {
    "constant": Kind(("value",), lambda value: value, lambda u, value: np.full_like(u, value)),
    "uniform": Kind(
        ("low", "high"),
        lambda low, high: (low + high) / 2,
        lambda u, low, high: low + (high - low) * u,
    ),
    "exponential": Kind(("mean",), lambda mean: mean, lambda u, mean: -mean * np.log1p(-u)),
    "lognormal": Kind(
        ("median", "sigma"),
        lambda median, sigma: median * math.exp(sigma**2 / 2),
        lambda u, median, sigma: median * np.exp(sigma * special.ndtri(u)),
    ),
    "gamma": Kind(
        ("mean", "shape"),
        lambda mean, shape: mean,
        lambda u, mean, shape: mean / shape * special.gammaincinv(shape, u),
    ),
}
"""The distributions by the name that a config uses."""


def parse(spec: str | Mapping[str, Any] | float, what: str = "duration") -> Distribution:
    """Read a distribution; a plain number is a constant. `what` starts every error."""
    if _is_number(spec):
        spec = {"kind": "constant", "value": spec}
    given: dict[str, Any]
    if isinstance(spec, str):
        kind, *words = spec.split(":")
        names = _known(kind, what).names
        if len(words) != len(names):
            raise TimeError(f"{what} is {spec!r}: write {':'.join([kind, *names])}, with numbers")
        given = dict(zip(names, words, strict=True))
    elif isinstance(spec, Mapping):
        given = dict(spec)
        kind = given.pop("kind", None)
        if not isinstance(kind, str):
            raise TimeError(f"{what} needs a kind, one of {', '.join(KINDS)}")
        names = _known(kind, what).names
    else:
        raise TimeError(f"{what} is {spec!r}: write a number, 'exponential:1', or a table")
    fixed = given.pop("fixed", False)
    if not isinstance(fixed, bool):
        raise TimeError(f"{what}: fixed is {fixed!r}, not true or false")
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
            raise TimeError(f"{what}: {kind} has no parameter {name!r}; {hint}")
    if missing := [name for name in names if name not in given]:
        raise TimeError(f"{what}: {kind} needs {missing[0]!r}")
    values = tuple(_number(given[name], name, what) for name in names)
    if kind == "uniform" and values[0] > values[1]:
        raise TimeError(f"{what}: uniform's low, {values[0]:g}, is above its high, {values[1]:g}")
    return Distribution(kind, values, fixed)


def _known(kind: str, what: str) -> Kind:
    if kind in KINDS:
        return KINDS[kind]
    near = get_close_matches(kind, KINDS, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KINDS)}"
    raise TimeError(f"{what}: unknown distribution {kind!r}; {hint}")


def _number(value: Any, name: str, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TimeError(f"{what}: {name} is {value!r}, not a number") from None
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise TimeError(f"{what}: {name} is {value}, it must be positive")
    return number


def _is_number(spec: Any) -> bool:
    try:
        float(spec)
    except (TypeError, ValueError):
        return False
    return not isinstance(spec, bool)
