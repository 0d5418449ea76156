"""Compressors by name, one after the other: `top-k:0.05+int8`.

| name | what is sent | unbiased |
| --- | --- | --- |
| `float16` | every value in 2 bytes | no |
| `int8` … `int2` | every value in 8 … 2 bits, rounded at random | yes |
| `mask:0.1` | a tenth of the values, picked by a draw that both sides make | no |
| `subsample:0.1` | the same, divided by 0.1 | yes |
| `top-k:0.01` | the largest hundredth, with places | no |
| `low-rank:4` | matrices as products of thin ones | no |

Those that leave fewer values come first, in any number; one that makes values smaller may come last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .low_rank import LowRank
from .packed import (
    MAX_STAGES,
    Array,
    CompressError,
    Packed,
    PackError,
    Reader,
    Shapes,
    as_buffer,
)
from .quantize import Full, Half, Whole
from .sparse import Mask, TopK
from .stage import Quantizer, Reducer

NAMES: Final = "float16, int8, mask:RATE, subsample:RATE, top-k:RATE, low-rank:RANK"

_EXPANDERS: Mapping[str, type[Any]] = {
    "top-k": TopK, "mask": Mask, "subsample": Mask, "low-rank": LowRank,
}  # fmt: skip
_RESTORERS: Mapping[str, type[Any]] = {"float32": Full, "float16": Half, "int": Whole}


@dataclass(frozen=True)
class Pipeline:
    """Compressors in the order in which they are applied; see `parse`."""

    name: str
    reducers: tuple[Reducer, ...]
    quantizer: Quantizer

    @property
    def unbiased(self) -> bool:
        """Whether what is unpacked is right on average."""
        return all(stage.unbiased for stage in (*self.reducers, self.quantizer))

    @property
    def dense(self) -> Pipeline:
        """The same without what leaves values out: for vectors of which nothing is known yet."""
        return Pipeline(self.name, (), self.quantizer)

    def fit(self, shapes: Shapes) -> None:
        """Raise CompressError if vectors made of such blocks cannot be compressed this way."""
        for reducer in self.reducers[:1]:  # only the first sees the vector's own blocks
            reducer.fit(shapes)

    def pack(
        self, values: Array, rng: np.random.Generator, shapes: Shapes | None = None, base: int = 0
    ) -> Packed:
        """Compress a flat vector. `shapes` are its blocks; one block of its length if left out."""
        left = np.ascontiguousarray(values, dtype=np.float32)
        blocks: Shapes = [left.shape] if shapes is None else shapes
        stages: list[Any] = []
        arrays: list[Array] = []
        for reducer in self.reducers:
            facts, sides, left = reducer.reduce(left, rng, blocks)
            stages.append(facts)
            arrays += sides
            blocks = [left.shape]
        facts, numbers = self.quantizer.quantize(left, rng)
        data = tuple(as_buffer(array) for array in (*arrays, *numbers))
        return Packed(values.size, (*stages, facts), data, base)


def parse(name: str) -> Pipeline:
    """The compressor of this name; CompressError says what is wrong with it."""
    reducers: list[Reducer] = []
    quantizer: Quantizer | None = None
    for part in name.split("+"):
        if quantizer is not None:
            raise CompressError(
                f"{name!r}: nothing can follow {_last(name)}; put {part!r} before it"
            )
        stage = _stage(part.strip(), name)
        if isinstance(stage, TopK | Mask | LowRank):
            if isinstance(stage, LowRank) and reducers:
                raise CompressError(
                    f"{name!r}: low-rank needs the vector's own matrices; put it first"
                )
            reducers.append(stage)
        else:
            quantizer = stage
    if len(reducers) >= MAX_STAGES:
        raise CompressError(
            f"{name!r}: more than {MAX_STAGES - 1} compressors that leave values out"
        )
    return Pipeline(name, tuple(reducers), quantizer or Full())


def _last(name: str) -> str:
    return next(
        repr(p) for p in name.split("+") if p.strip() == "float16" or p.strip()[:3] == "int"
    )


def _stage(part: str, name: str) -> TopK | Mask | LowRank | Half | Whole:
    kind, colon, knob = part.partition(":")
    if kind == "float16" and not colon:
        return Half()
    if (bits := re.fullmatch(r"int(\d{1,3})", part)) is not None:
        return Whole(int(bits[1]))
    if kind in _EXPANDERS:
        try:
            number = float(knob)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (kind == "low-rank" and number != int(number)):
            example = "low-rank:4" if kind == "low-rank" else f"{kind}:0.1"
            raise CompressError(f"{name!r}: {kind} needs a number, as in {example}")
        match kind:
            case "top-k":
                return TopK(number)
            case "low-rank":
                return LowRank(int(number))
            case _:
                return Mask(number, scaled=kind == "subsample")
    raise CompressError(
        f"{name!r}: no compressor is called {part!r}; there are {NAMES}, joined by +"
    )


def unpack(packed: Packed, length: int) -> Array:
    """The vector that was packed, float32, if it has the `length` that the receiver expects.

    Whatever the bytes are, PackError is all that is raised, and no more is allocated than a few
    vectors of that length.
    """
    if packed.length != length:
        raise PackError("garbage", f"a vector of {packed.length} values, ours has {length}")
    reader = Reader(packed)
    expands = []
    left = length
    for facts in packed.stages[:-1]:
        reducer = _EXPANDERS.get(facts[0])
        if reducer is None:
            raise PackError("garbage", f"no compressor that leaves values out is {facts[0]!r:.40}")
        left, expand = reducer.expander(facts, reader, left)
        if left > length:
            raise PackError("too-large", f"{facts[0]} leaves {left} values of {length}")
        expands.append(expand)
    last = packed.stages[-1]
    if last[0] not in _RESTORERS:
        raise PackError("garbage", f"values are written as {last[0]!r:.40}, which is not known")
    values = _RESTORERS[last[0]].restore(last, reader, left)
    reader.end()
    for expand in reversed(expands):
        values = expand(values)
    if not np.isfinite(values).all():
        raise PackError("non-finite", "a compressed value holds a NaN or an infinity")
    return values


def distortion(values: Array, other: Array) -> float:
    """How far `other` is from `values`, relative to the length of `values`."""
    size = float(np.linalg.norm(values))
    far = float(np.linalg.norm(np.subtract(values, other, dtype=np.float64)))
    return far / size if size else far


def roundtrip(
    name: str,
    values: Array,
    rng: np.random.Generator,
    shapes: Shapes | None = None,
) -> tuple[Array, int]:
    """What a receiver reads of `values` sent through the compressor `name`, and the bytes it took.

    For simulations: compress a difference to something that the receiver has, keep what is lost.
    """
    pipeline = parse(name)
    if shapes is not None:
        pipeline.fit(shapes)
    packed = pipeline.pack(values, rng, shapes)
    return unpack(packed, values.size), packed.nbytes
