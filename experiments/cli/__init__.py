"""The command line: one module for each group of commands, loaded when one of them is called."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
