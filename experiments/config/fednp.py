"""The config table that wraps every peer's learner in FedNP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ...gossip import Count, Positive, SettingsTable

if TYPE_CHECKING:
    from ...models import Learner
    from ...models.fednp import FedNPLearner


class FedNP(SettingsTable):
    """`[fednp]`: peers estimate the data of the whole swarm beside their own task, and are held to it.

    An empty table takes it as it is. Peer 0 counts the peers. Where a peer's weight varies while it
    trains (live peers in async mode, virtual time, push-sum on irregular graphs) sites count by that
    weight, so that cavities are approximate.
    """

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """λ: raise it when peers drift apart between averagings; the paper tried 0.001 to 1."""
    dimensions: Count = 10
    """Of the latent z."""
    hidden: Count = 16
    """Hidden cells of f and of the NPN."""
    rate: Positive = 0.01
    """The learning rate of f and the NPN."""
    spread: Positive = 0.1
    """ε: smaller pulls harder."""
    damping: Annotated[float, Field(gt=0, le=1)] = 0.5
    """How far a site moves in one update."""
    moments: Literal["quadrature", "closed", "probit"] = "quadrature"
    nodes: Annotated[int, Field(ge=2, le=100)] = 20
    """Of the quadrature."""
    signals: Literal["each", "one"] = "each"
    """Whether f has an output for each dimension of z, or one for all, as in the paper."""
    batch: Annotated[int, Field(ge=0)] = 32
    """Samples that f looks at in one step; 0 for all."""
    freeze_z: bool = False
    """The control: only the averaged NPN is left."""
    features: str = "input"
    """What f looks at: `input`, `last` (what enters the last layer), or a layer's name."""

    def wrap(self, inner: Learner, *, teller: bool, weight: float, seed: int) -> FedNPLearner:
        """A peer's learner in FedNP; its weight in averages is needed to add up sites."""
        from ...models.fednp import FedNPLearner, FedNPOptions  # torch: a config is read without it

        options = FedNPOptions(**self.model_dump(exclude={"features"}))
        learner = FedNPLearner(inner, options, teller=teller, features=self.features, seed=seed)
        learner.count_as(weight)
        return learner
