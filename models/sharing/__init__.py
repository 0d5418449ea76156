"""Decide which cells peers share, and with whom, while a swarm trains.

An `Assignment` says for every cell whether all peers average it, each peer keeps its own, or groups of peers
average it among themselves. Peers measure, each as a `SharingMember`, how their losses would change under
other assignments; a `Planner` chooses among them, and all peers follow its `Plan`.

Nothing here sends a message: a simulator or a live peer averages what members add up, and passes plans on.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
