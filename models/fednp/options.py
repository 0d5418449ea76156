"""FedNP's options, declared once: for learners, for `[fednp]` in a config and for `gossamer compare`.

This module does not import torch, so mistakes in a config are reported without waiting for it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Moments = Literal["quadrature", "closed", "probit"]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class FedNPOptions(BaseModel):
    """Options of FedNP, which pulls parameters towards a prediction from the data of all peers.

    In a config, an empty `[fednp]` table means the defaults. A latent z describes the data of the whole
    swarm; a peer's *site* is the Gaussian factor of z that stands for its own data, its *cavity* the prior
    times the sites of all others. A network f computes the site from the peer's inputs, and a network of
    Gaussians (NPN) predicts parameters from z. Peer 0 is the one by which peers are counted. If a peer's
    push-sum weight changes while it trains (live peers in async mode, virtual time, push-sum on irregular
    graphs), its site is multiplied by that weight, so cavities are approximate.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
    RENAMED: ClassVar = {"rate": "it is called auxiliary_rate now"}

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """λ of the paper's eq (19): the weight of the KL loss beside the learner's own loss. Raise it when peers
    drift apart between averagings; the paper tried 0.001 to 1. 0 switches the pull off."""
    dimensions: _Count = 10
    """Dimensions of the latent z."""
    hidden: _Count = 16
    """Cells in the hidden layer of f, and in that of the NPN."""
    auxiliary_rate: _Positive = 0.01
    """The learning rate of f and the NPN. It does not depend on `strength`, so they also learn if that is
    small."""
    spread: _Positive = 0.1
    """ε of the paper's eq (18): the variance assumed for the current parameters. Lower it to pull harder."""
    damping: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The fraction of the way by which a site moves towards its new value in one update. Lower it when
    cavities are out of date."""
    moments: Moments = "quadrature"
    """How the moments of a cavity, tilted by a sigmoid of the signal, are computed. quadrature: at `nodes`
    points, the most exact. closed: a formula, which may fail for variances above 16. probit: exact for
    another sigmoid."""
    nodes: Annotated[int, Field(ge=2, le=100)] = 20
    """Number of quadrature nodes. Raise it for more exact moments, which take longer."""
    signals: Literal["each", "one"] = "each"
    """each: f has an output for each dimension of z. one: a single output for all dimensions, as in the
    paper; they then stay equal, because they start equal."""
    batch: Annotated[int, Field(ge=0)] = 32
    """Samples from which f computes its signal in one step; 0 for all of them."""
    freeze_z: bool = False
    """Keep z at the prior, as a control experiment: only the averaged NPN is left of the method."""
    features: str = "input"
    """The inputs of f: `input` for the samples, `last` for the inputs of the target's layer (the paper's
    backbone features), or the name of a layer for its inputs. The cells that compute them must be shared by
    all peers."""
