"""Starting values: shared slices start equal on every peer, private ones differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:  # a config's settings name a Start, and should not load networkx for it
    from .anatomy import Anatomy, ParameterMap
    from .slicing import Slicing


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
    for parameter in anatomy.parameters:
        span = anatomy.spans[parameter.name]
        constant = parameter.size > 0 and bool((current[span] == current[span.start]).all())
        if _is_weight(parameter):
            scale[span] = _spread(int(np.prod(parameter.shape[1:], dtype=np.int64)), start)
            base[span] = start.shift
        elif _is_bias(parameter):
            continue
        elif constant:
            base[span] = current[span.start]  # PReLU slopes, norm gains: the module knows best
        elif len(parameter.shape) > 1:
            scale[span] = _spread(parameter.shape[-1], start)
    return scale, base


def _is_weight(parameter: ParameterMap) -> bool:
    """Whether it leads to the cells of its first axis: dense, convolution, gates, attention."""
    return len(parameter.shape) > 1 and parameter.axes[0] is not None


def _is_bias(parameter: ParameterMap) -> bool:
    """By name: a layer of one cell has a bias that looks as constant as a gain."""
    return len(parameter.shape) == 1 and "bias" in parameter.name.rpartition(".")[2]


def _spread(fan_in: int, start: Start) -> float:
    return start.gain / np.sqrt(fan_in) if start.by_fan_in else start.gain
