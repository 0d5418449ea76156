"""A live peer's log-prior, from its own class counts and the totals of all peers; see models/prior.py."""

from __future__ import annotations

from typing import Any

import torch

from ..gossip import Gossiper
from ..models import (
    Learner,
    ModelError,
    Prior,
    SgdLearner,
    auto_log_prior,
    class_summary,
    log_priors,
)
from .exits import PeerError
from .means import SwarmMean
from .store import MatchedStore

CLASS_COUNTS = "class-counts"
"""The name under which totals of class counts are averaged; only with the prior `auto`."""


class LivePrior:
    """Sets a learner's log-prior: `own` at once, `auto` after every averaging. Used on the worker thread."""

    def __init__(self, name: str, learner: Learner, store: MatchedStore, how: Prior):
        if type(learner) is not SgdLearner:
            raise PeerError(
                f"peer {name}: a prior needs a learner with samples and a loss per sample (SgdLearner), not "
                f"{type(learner).__name__}"
            )
        inputs, labels = learner.samples
        with torch.no_grad():
            classes = learner.network.module.eval()(inputs[:2]).shape[-1]
        if classes < 2 or labels.is_floating_point():
            raise PeerError(
                f"peer {name}: a prior needs one output for each class, and two or more"
            )
        self._learner = learner
        self._counts = torch.bincount(labels.flatten(), minlength=classes).numpy()
        self._mean: SwarmMean | None = None
        if how == "auto":
            self._mean = SwarmMean(store, CLASS_COUNTS, len(class_summary(self._counts)))
            return
        try:
            priors = log_priors([self._counts], how)
            learner.log_prior = None if priors is None else torch.from_numpy(priors[0])
        except ModelError as error:
            raise PeerError(f"peer {name}: {error}") from None

    def trained(self, gossiper: Gossiper) -> None:
        """Add this peer's counts to the totals."""
        if self._mean is not None:
            self._mean.add(gossiper, class_summary(self._counts))

    def averaged(self, peers: int) -> None:
        """Set the log-prior by the totals as this peer knows them; peers: how many there are."""
        mean = self._mean
        if mean is None or not mean.has_own or not mean.value[0] > 0:
            return
        totals = mean.value.astype(float) * (peers / float(mean.value[0]))
        prior = auto_log_prior(self._counts, totals)
        self._learner.log_prior = None if prior is None else torch.from_numpy(prior)

    def reset(self) -> None:
        """Begin anew, in a new session."""
        if self._mean is not None:
            self._mean.reset()

    def snapshot(self) -> dict[str, Any] | None:
        """Return what a restart needs."""
        return None if self._mean is None else self._mean.snapshot()

    def restore(self, data: dict[str, Any] | None) -> None:
        """Continue from a snapshot."""
        if self._mean is not None and data is not None:
            self._mean.restore(data)
