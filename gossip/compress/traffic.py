"""What compression and patience save, and what they distort: counted per vector."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Traffic:
    """Counts of one vector at one peer. They add with `+`."""

    messages: int = 0
    """Compressed messages that left, repeats included."""
    bytes: int = 0
    """Their bytes, headers included."""
    plain_bytes: int = 0
    """What they would have taken uncompressed."""
    packed: int = 0
    """Values compressed: each counts once for its distortion."""
    distortion: float = 0.0
    """The sum of their relative distortions, ‖value − what the receiver reads‖ / ‖value‖."""
    worst: float = 0.0
    """The largest of them."""
    skipped: int = 0
    """Messages not sent because the vector had hardly moved."""
    skipped_bytes: int = 0
    """What they would have taken uncompressed."""

    def packed_one(self, distortion: float) -> None:
        """Count a value that was compressed."""
        self.packed += 1
        self.distortion += distortion
        self.worst = max(self.worst, distortion)

    def sent(self, size: int, plain: int) -> None:
        """Count a message that left."""
        self.messages += 1
        self.bytes += size
        self.plain_bytes += plain

    def skip(self, messages: int, plain: int) -> None:
        """Count messages that were not sent."""
        self.skipped += messages
        self.skipped_bytes += plain

    @property
    def saved(self) -> int:
        """Bytes that an uncompressed twin, which skips nothing, would have sent on top."""
        return self.plain_bytes - self.bytes + self.skipped_bytes

    @property
    def mean_distortion(self) -> float:
        """The mean relative distortion of a message; 0 if there was none."""
        return self.distortion / self.packed if self.packed else 0.0

    def __add__(self, other: Traffic) -> Traffic:
        mine, theirs = asdict(self), asdict(other)
        total = Traffic(**{name: mine[name] + theirs[name] for name in mine})
        total.worst = max(self.worst, other.worst)
        return total
