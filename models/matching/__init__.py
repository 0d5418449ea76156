"""Matching: fuse or align networks whose cells are in another order.

    from gossamer.models.matching import Chain, MatchOptions, fuse

    fused = fuse([Chain.read(state) for state in states], MatchOptions(variance=0.1))
    fused.chain.state()          # the fused network, of any width
    fused.extract(3)             # what it gives back to peer 3

`match` is one part, `fuse` a whole network; `align` permutes the cells of a SlicedNetwork to agree with a
reference, function unchanged; `CommonWidth` lets peers of different widths average one partial model.
Streams pass `past` on: `fuse(newer, past=fused.past)`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
