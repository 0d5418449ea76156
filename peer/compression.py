"""A peer's compressed exchange: made from its settings, counted, and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..gossip import Buffer, Drift, Give, Message, SchemaEntry
from ..gossip.compress import CompressError, Links, Shapes, parse
from .errors import PeerError
from .settings import Settings


class Compression:
    """What a peer leaves out of its messages, and which messages it leaves out.

    entries: what each vector is made of. sizes: how many values it has.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        entries: Mapping[str, Sequence[SchemaEntry]],
        sizes: Mapping[str, int],
    ) -> None:
        self._settings = settings
        shapes = {vector: blocks(each) for vector, each in entries.items()}
        # Blocks that do not make up their vector are of no use to anybody.
        shapes = {
            vector: found
            for vector, found in shapes.items()
            if sum(math.prod(shape) for shape in found) == sizes[vector]
        }
        try:
            _check(settings)
            pipeline = None if settings.compress is None else parse(settings.compress)
            if pipeline is not None and shapes:
                _fit_one(pipeline.fit, shapes)
            self.links = Links(pipeline, shapes)
            self.drift()
        except ValueError as error:
            raise PeerError(f"peer {name}: {error}") from None

    def drift(self) -> Drift | None:
        """A new watch over how far vectors have moved, if the settings ask for one."""
        bound = self._settings.drift
        return None if bound is None else Drift(bound, self.links.traffic)

    def sent(self, message: Message, buffers: Sequence[Buffer]) -> None:
        """Count a message that leaves."""
        if isinstance(message, Give) and message.packed is not None:
            size, packed = sum(len(buffer) for buffer in buffers), message.packed
            plain = size - packed.nbytes + 4 * packed.length
            self.links.traffic[message.model].sent(size, plain)

    def report(self) -> dict[str, dict[str, float]]:
        """Per vector that was compressed or skipped, what was counted, as JSON-friendly data."""
        return {
            vector: {**asdict(each), "mean_distortion": each.mean_distortion}
            for vector, each in self.links.traffic.items()
        }

    def record(self) -> dict[str, Any]:
        """The same in short, for metrics; nothing where nothing is compressed or skipped."""
        traffic = self.links.traffic
        if not traffic:
            return {}
        return {
            "saved_bytes": sum(each.saved for each in traffic.values()),
            "distortion": {
                v: [each.mean_distortion, each.worst] for v, each in traffic.items() if each.packed
            },
            "skipped": sum(each.skipped for each in traffic.values()),
        }


def blocks(entries: Sequence[SchemaEntry]) -> Shapes:
    """The shapes of a vector's blocks."""
    return [tuple(int(size) for size in shape) for _, shape, _ in entries]


def _check(settings: Settings) -> None:
    if settings.compress is not None and settings.dtype != "float32":
        raise ValueError(
            f"compress = {settings.compress!r} and dtype = {settings.dtype!r} exclude each other: leave "
            "dtype out, compressors say how values are written"
        )
    if settings.compress is not None and settings.private:
        raise ValueError(
            "compress: masked values look like noise, which no compressor makes shorter; leave compress "
            "out, or private"
        )
    if settings.drift is not None and settings.mode != "async":
        raise ValueError(
            f"drift: in {settings.mode} mode the others wait for every push, so none can be skipped; use "
            'mode = "async", or leave drift out'
        )


def _fit_one(fit: Any, shapes: Mapping[str, Shapes]) -> None:
    """Raise CompressError if a compressor fits none of the vectors; a peer's own need not be fit."""
    mistakes = []
    for vector, each in shapes.items():
        try:
            fit(each)
        except CompressError as error:
            mistakes.append(f"model {vector!r}: {error}")
    if len(mistakes) == len(shapes):
        raise CompressError(mistakes[0])
