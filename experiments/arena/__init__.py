"""The arena: a whole swarm in one process, its peers stacked in one tensor; one seed, one result."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
