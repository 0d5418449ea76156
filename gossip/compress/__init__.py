"""Compressed values: fewer bytes on the wire; what they leave out stays in the sender."""

from .links import Links
from .packed import CompressError, Packed, PackError, Shapes
from .pipeline import NAMES, Pipeline, distortion, parse, roundtrip, unpack
from .traffic import Traffic

__all__ = [
    "NAMES",
    "CompressError",
    "Links",
    "PackError",
    "Packed",
    "Pipeline",
    "Shapes",
    "Traffic",
    "distortion",
    "parse",
    "roundtrip",
    "unpack",
]
