"""What people run: the command line, configs, data, the arena and the papers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
