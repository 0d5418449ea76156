"""The tables and keys of config files, as typed and frozen classes, and the functions that read them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
