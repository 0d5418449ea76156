"""Topology experiments: measure, compare and stress the graphs that peers gossip on, and advise on them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
