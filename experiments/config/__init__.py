"""What a config file may say: typed, frozen tables, and errors that name the key."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
