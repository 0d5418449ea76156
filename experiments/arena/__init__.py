"""The arena: a whole swarm in one process, by products over stacked peers or event by event."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
