"""FedNP: an auxiliary task that estimates the global data distribution, with a server or by gossip.

    learner = FedNPLearner(SgdLearner(…), FedNPOptions(strength=0.01), counting_peer=is_first)

The FedNPLearner runs in the arena and as a live peer. `server_round` is the paper's Algorithm 1."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
