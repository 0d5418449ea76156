"""FedNP's knobs, declared once: for learners, for `[fednp]` in a config and for the method of a comparison.

Nothing here loads torch, so that a mistake in a config is told at once.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Moments = Literal["quadrature", "closed", "probit"]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class FedNPOptions(BaseModel):
    """How strongly, and by which auxiliary task, a learner is held to what the whole swarm's data suggest.

    In a config an empty `[fednp]` takes it as it is. Peer 0 counts the peers. Where a peer's weight varies
    while it trains (live peers in async mode, virtual time, push-sum on irregular graphs) sites count by
    that weight, so that cavities are approximate.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
    RENAMED: ClassVar = {"rate": "it is called auxiliary_rate now"}

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """λ of eq (19): how much the KL loss weighs beside the learner's own loss, as the learner reduces it.
    Raise it when peers drift apart between averagings; the paper tried 0.001 to 1, and 0 is none of it."""
    dimensions: _Count = 10
    """Of the latent z."""
    hidden: _Count = 16
    """Cells in the hidden part of f, and in that of the NPN."""
    auxiliary_rate: _Positive = 0.01
    """The learning rate of f and the NPN. They minimise the KL loss at a pace of their own, or a small
    `strength` would also keep them from learning."""
    spread: _Positive = 0.1
    """ε of eq (18), the variance that a parameter's own distribution is given. Smaller pulls harder."""
    damping: Annotated[float, Field(gt=0, le=1)] = 0.5
    """How far a site moves towards its update. Lower it when cavities are out of date."""
    moments: Moments = "quadrature"
    """How the moments of a tilted cavity are computed: see `tilted_moments`."""
    nodes: Annotated[int, Field(ge=2, le=100)] = 20
    """Of the quadrature."""
    signals: Literal["each", "one"] = "each"
    """each: f has an output for each dimension of z. one: a single number, as in the paper; all dimensions
    of z, which start alike, then stay alike for ever."""
    batch: Annotated[int, Field(ge=0)] = 32
    """Samples that f looks at in one step; 0 for all of them."""
    freeze_z: bool = False
    """The control: z stays at the prior, so that only the averaged NPN is left of the method."""
    features: str = "input"
    """What f looks at: `input`, `last` (what enters the target's layer, the paper's backbone), or a layer's
    name for what enters it. Cells whose outputs f sees must be everybody's."""
