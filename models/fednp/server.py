"""FedNP with a server: Algorithm 1, its line 10 corrected to weights n_k / Σn."""

from __future__ import annotations

from collections.abc import Sequence

from ..averaging import average
from ..errors import ModelError
from ..learner import Metrics
from .learner import FedNPLearner
from .sites import server_cavities


def server_round(
    learners: Sequence[FedNPLearner], samples: Sequence[float] | None = None, steps: int = 1
) -> list[Metrics]:
    """One round: clients train and upload; the server averages parameters and divides out cavities.

    samples: n_k, by which parameters are weighed; sites always count once each. The learners' cavities
    are set for the next round, as a server would send them; nothing is left to gossip.
    """
    if not learners:
        raise ModelError("a server needs at least one client")
    metrics = [learner.train(steps) for learner in learners]
    average([learner.network for learner in learners], samples)
    first = learners[0]
    cavities = server_cavities(first.prior, [learner.site for learner in learners])
    for learner, cavity in zip(learners, cavities, strict=True):
        learner.receive(cavity, peers=len(learners))
    return metrics
