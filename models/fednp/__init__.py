"""FedNP: an auxiliary task that estimates the global data distribution, by a server or by gossip.

    learner = FedNPLearner(SgdLearner(…), FedNPOptions(strength=0.01), teller=is_first)

The wrapped learner runs in the arena and as a live peer. `server_round` is the paper's Algorithm 1.
"""

from .joint import MODEL, SITES
from .learner import FedNPLearner
from .moments import sigmoid_power_mean, tilted_factor, tilted_moments
from .npn import NPN, GaussianLinear, gaussian_kl, relu_moments
from .options import FedNPOptions
from .server import server_round
from .sites import Natural, product, server_cavities, updated_site

__all__ = [
    "MODEL",
    "NPN",
    "SITES",
    "FedNPLearner",
    "FedNPOptions",
    "GaussianLinear",
    "Natural",
    "gaussian_kl",
    "product",
    "relu_moments",
    "server_cavities",
    "server_round",
    "sigmoid_power_mean",
    "tilted_factor",
    "tilted_moments",
    "updated_site",
]
