"""Matching: fuse or align networks whose cells are in another order.

    from gossamer.models.matching import Chain, MatchOptions, fuse

    fused = fuse([Chain.read(state) for state in states], MatchOptions(variance=0.1))
    fused.chain.state()          # the fused network, of any width
    fused.extract(3)             # what it gives back to peer 3

`match` is one part, `fuse` a whole network; `align` permutes the cells of a SlicedNetwork to agree with a
reference, function unchanged; `CommonWidth` lets peers of different widths average one partial model.
Streams pass `past` on: `fuse(newer, past=fused.past)`.
"""

from .align import Alignment, align
from .cells import Atoms, Cells
from .chain import Chain, Layer
from .common import CommonWidth, resized
from .fusion import Fusion, Past, fuse
from .layer import Matched, match
from .optimizer import permute_optimizer
from .options import MAGI, MatchOptions
from .placing import find_places
from .state import History

__all__ = [
    "MAGI",
    "Alignment",
    "Atoms",
    "Cells",
    "Chain",
    "CommonWidth",
    "Fusion",
    "History",
    "Layer",
    "MatchOptions",
    "Matched",
    "Past",
    "align",
    "find_places",
    "fuse",
    "match",
    "permute_optimizer",
    "resized",
]
