"""What becomes of values on the wire: rounded, compressed, or not sent because they hardly moved.

The compressors, references and bounds are those of live peers. Sizes are those of the values alone:
headers and answers are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...gossip import Array, Drift, Give, Message, WireDtype, as_sent, wide_enough
from ...gossip.compress import Links, Shapes, Traffic, parse
from ...peer import blocks, schema_entries
from ..build import Member
from ..config.tables import Config
from ..results import write_csv


@dataclass(frozen=True)
class Wire:
    """The settings of all links.

    dtype: of values that travel as they are. compress: a compressor's name, as in a config. drift: see
    `gossip.drift.Drift`. shapes: the blocks of each vector, for compressors that look at matrices.
    """

    dtype: WireDtype = "float32"
    compress: str | None = None
    drift: float | Mapping[str, float] | None = None
    shapes: Mapping[str, Shapes] = field(default_factory=dict)

    @property
    def lossy(self) -> Callable[[str, Array], Array] | None:
        """What a receiver reads of a value that is sent as it is, if that is not the value itself."""
        return _as_float16 if self.dtype == "float16" else None

    def end(self) -> End:
        """A new life's end of the wire, which remembers nothing yet."""
        links = Links(None if self.compress is None else parse(self.compress), self.shapes)
        drift = None if self.drift is None else Drift(self.drift, links.traffic)
        return End(links, drift, self.dtype)


@dataclass(frozen=True)
class End:
    """One life's end of the wire: its references, what it pushed last, and how plain values are written."""

    links: Links
    drift: Drift | None
    dtype: WireDtype

    def skips(self, vector: str, value: Array, messages: int) -> bool:
        """Whether a push is left out because the value has hardly moved since the last."""
        if self.drift is None or not self.drift.small(vector, value):
            return False
        self.drift.skip(vector, messages, value.size)
        return True

    def sent(self, messages: Sequence[Message]) -> int:
        """Count what leaves; its bytes."""
        total = 0
        for give in messages:
            assert isinstance(give, Give)
            plain = np.dtype(wide_enough(give.value, self.dtype)).itemsize * give.value.size
            if give.packed is not None:
                self.links.traffic[give.vector].sent(give.packed.nbytes, plain)
            total += plain if give.packed is None else give.packed.nbytes
        return total

    def traffic(self, vector: str) -> Traffic:
        """What was saved and distorted of one vector."""
        return self.links.traffic[vector]


def write_traffic(path: Path, counted: Iterable[tuple[str, int, Traffic]]) -> Path:
    """A table of bytes that were sent, and what was saved and distorted, from a row for each model."""
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [name, size, size + each.saved, each.skipped, f"{each.mean_distortion:.4g}", f"{each.worst:.4g}"]
        for name, size, each in counted
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def wire_of(config: Config, members: Sequence[Member], owners: Mapping[str, Sequence[int]]) -> Wire:
    """The wire that a config's [gossip] table describes."""
    gossip = config.gossip
    shapes = {
        owner: blocks(schema_entries(members[who[0]].network, owner))
        for owner, who in owners.items()
    }
    return Wire(gossip.dtype, gossip.compress, gossip.drift, shapes)


def _as_float16(_vector: str, value: Array) -> Array:
    return as_sent(value, wide_enough(value, "float16"))
