"""Compressed values: fewer bytes on the wire; what they leave out stays in the sender."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
