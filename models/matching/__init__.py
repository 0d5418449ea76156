"""Matching: fuse or align networks whose cells are in different orders.

    from gossamer.models.matching import Chain, MatchOptions, fuse

    fused = fuse([Chain.read(state) for state in states], MatchOptions(variance=0.1))
    fused.chain.state()          # the fused network, of any width
    fused.extract(3)             # the fused cells that peer 3 has, in its own order

`match` matches the cells of one part, `fuse` fuses whole networks; `align` permutes the cells of a
SlicedNetwork to agree with a reference, without changing its function; `CommonWidth` lets peers of different
widths average one partial model. When the same peers have trained new networks, pass the posterior of the
last fusion: `fuse(new_chains, prior=fused.posterior)`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
