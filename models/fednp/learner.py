"""FedNP as a learner that wraps a learner, by gossip or with a server.

To the swarm FedNP is two more partial models of an ordinary network, so arena, live peers, checkpoints,
trust and the wire take it as it is:

`fednp`
    f and the NPN: shared parameters like any others, trained and averaged.
`fednp-sites`
    What gossip knows of all sites: per dimension of z the *mean* over peers of η and of λ, and the means of
    two counts. To the first one peer, the teller, brings 1 and all others 0; to the second every peer
    brings 1.

Why a mean is enough. A cavity needs the *sum* of sites, and push-sum yields Σs / Σw. With weight 1 each,
Σs / N is the mean of what peers put in, and the first count's mean is 1/N: their quotient is the sum, exact
as soon as push-sum has converged, with nobody told how many peers there are. A peer that moves its site by Δ
adds Δ to push-sum's sum, once, as training does; its next cavity is prior + sum − its own site, in which
its own contributions cancel. (Until others have heard of a change, a peer sees its own N-fold; it is
damped, and changes die out as sites converge.)

Training by Δ means `s += w · Δ`, though. Where weights are not 1 while peers train (by numbers of samples;
asynchronously, when a peer holds more or less than its own), the step on the estimate must be Δ / w: that
is `FedNPLearner.weight_of`. The 1 of a count is divided likewise, so the unit of weights cancels.

Before that the quotient is no sum. Far from the teller the first count is 3^−hops on a ring, so that N would
be 10^13 thirty hops away. The quotient of the two counts is the number of peers, whatever they weigh. It is
believed when it has settled, and never beyond the peers that this one has seen (PeerCount); until a number
is known, the cavity is the prior.

A newcomer adds its weight at the estimates that it hears: quotient and sum stay what they were, and its
own changes then count fully, since both means are over the same weight. A peer that leaves hands its site
over with its mass: what it knew of the data stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Part
from ..discovery import in_one_cell
from ..errors import ModelError
from ..learner import AdamRule, CorrectedOptimizer, Learner, Metrics
from ..network import SlicedNetwork, average, check_weights
from ..slicing import ModelGraph, stream
from .gaussians import (
    NPN,
    Gaussian,
    Natural,
    gaussian_kl,
    server_cavities,
    tilted_factor,
    tilted_moments,
    updated_site,
)
from .options import FedNPOptions


def read_target(network: SlicedNetwork, target: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """Parameters by name: `last`, or names of parameters or of layers, in the network's own order."""
    parameters = dict(network.module.named_parameters())
    if target == "last":
        wanted = [_last_layer(network.module)]
    else:
        wanted = [target] if isinstance(target, str) else list(target)
    found: set[str] = set()
    for name in wanted:
        mine = {key for key in parameters if key == name or key.startswith(f"{name}.") or not name}
        if not mine:
            raise ModelError(
                f"FedNP's target {name!r}: the network of peer {network.peer!r} has no such parameter or "
                f"layer; parameters are {', '.join(parameters)}"
            )
        found |= mine
    return {name: parameter for name, parameter in parameters.items() if name in found}


class Features:
    """What f sees of inputs: the inputs themselves, or what enters a layer of the network."""

    def __init__(
        self,
        network: SlicedNetwork,
        features: str,
        target: Mapping[str, nn.Parameter],
        inputs: Tensor,
    ):
        self.inputs = inputs
        self._module = network.module
        self._layer: nn.Module | None = None
        if features != "input":
            name = next(iter(target)).rpartition(".")[0] if features == "last" else features
            layers = dict(network.module.named_modules())
            if name not in layers:
                raise ModelError(
                    f"FedNP's features {features!r}: give input, last, or one of the layers "
                    f"{', '.join(key for key in layers if key)}"
                )
            _require_shared(network, name)
            self._layer = layers[name]
        with torch.no_grad():
            self.width = self(inputs[:1]).shape[1]

    def __call__(self, inputs: Tensor) -> Tensor:
        """One row per input."""
        if self._layer is None:
            return inputs.flatten(1)
        seen: list[Tensor] = []
        handle = self._layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            self._module(inputs)
        finally:
            handle.remove()
        return seen[-1].flatten(1)


def _last_layer(module: nn.Module) -> str:
    """The name of the last linear layer; of the last layer with parameters if there is none."""
    named = list(module.named_modules())
    linear = [name for name, layer in named if isinstance(layer, nn.Linear)]
    if linear:
        return linear[-1]
    return [name for name, layer in named if list(layer.parameters(recurse=False))][-1]


def _require_shared(network: SlicedNetwork, layer: str) -> None:
    """f is averaged by everybody, so what it looks at must mean the same to everybody."""
    slicing = network.slicing
    weight = next((p for p in slicing.anatomy.parameters if p.name == f"{layer}.weight"), None)
    cells = weight.axes[1] if weight is not None and len(weight.axes) > 1 else None
    if cells is None:
        return
    holders = {
        model
        for model in network.models
        for first, own in zip(slicing.anatomy.firsts, slicing.cells[model], strict=False)
        if np.isin(first + own, cells).any()
    }
    if len(holders) > 1:
        raise ModelError(
            f"FedNP's features: what enters layer {layer!r} of peer {network.peer!r} belongs to the partial "
            f"models {', '.join(sorted(holders))}, so f would mix cells that differ from peer to peer; use "
            "features='input'"
        )


MODEL, SITES = "fednp", "fednp-sites"


class Auxiliary(nn.Module):
    """f, the NPN, and the gossiped means of sites and counts."""

    def __init__(self, inputs: int, outputs: int, options: FedNPOptions):
        super().__init__()
        hidden, dimensions = options.hidden, options.dimensions
        self.f = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, dimensions))
        self.npn = NPN(dimensions, hidden, outputs)
        self.sites = nn.Parameter(torch.zeros(2, dimensions), requires_grad=False)
        self.counts = nn.Parameter(torch.zeros(2), requires_grad=False)

    def learned(self) -> list[nn.Parameter]:
        """What descends along the KL loss: f and the NPN."""
        return [*self.f.parameters(), *self.npn.parameters()]

    @torch.no_grad()
    def start(self, seed: int, target: Tensor) -> None:
        """Starting values that all peers of a swarm draw alike; the NPN first predicts `target`."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and parameter.requires_grad and not name.endswith("raw"):
                drawn = stream(seed, MODEL, name).standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(drawn / np.sqrt(parameter.shape[1])))
            elif name in ("f.0.bias", "f.2.bias"):
                parameter.zero_()
        self.npn.last.bias.copy_(target)


class Joint(nn.Module):
    """A module with FedNP's parameters beside it; called, it is the module."""

    def __init__(self, model: nn.Module, auxiliary: Auxiliary):
        super().__init__()
        self.model, self.fednp = model, auxiliary

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the module itself computes."""
        return self.model(*inputs)


def join(network: SlicedNetwork, auxiliary: Auxiliary) -> SlicedNetwork:
    """The network with the auxiliary one beside it, cut as before, plus FedNP's two partial models.

    Those are on every peer, whole: each is a part of one cell.
    """
    slicing, anatomy = network.slicing, network.slicing.anatomy
    taken = slicing.graph.models | set(network.models)
    graph = ModelGraph(
        {model: slicing.graph.dependencies(model) for model in taken} | {MODEL: (), SITES: ()}
    )
    own, statistics = (
        tuple(replace(each, name=f"model.{each.name}") for each in maps)
        for maps in (anatomy.parameters, anatomy.buffers)
    )
    cell = int(anatomy.firsts[-1])
    added = (
        in_one_cell(f"{MODEL}.{name}", value, cell if value.requires_grad else cell + 1)
        for name, value in auxiliary.named_parameters()
    )
    joined = replace(
        anatomy, parts=(*anatomy.parts, Part(MODEL, 1), Part(SITES, 1)),
        parameters=(*own, *added), buffers=statistics,
    )  # fmt: skip
    slices = {model: [*map(list, slicing.cells[model]), [], []] for model in network.models}
    none = [[] for _ in anatomy.parts]
    return SlicedNetwork(
        Joint(network.module, auxiliary), slices | {MODEL: [*none, [0], []], SITES: [*none, [], [0]]},
        graph=graph, peer=network.peer, rest=None, cross=slicing.cross, anatomy=joined,
        buffers=network.buffers,
    )  # fmt: skip


_MOST = 1000  # samples that f looks at for a site


class FedNPLearner:
    """Trains as the learner inside does, and holds its last layer to what the swarm's data suggest.

        learner = FedNPLearner(SgdLearner(network, …), FedNPOptions(strength=0.01), teller=peer == 0)

    In each of the inner learner's steps, f looks at some of the peer's inputs, its answer tilts the cavity
    to q(z), the NPN turns q(z) into a distribution of the target parameters, and the gradient of
    strength · (KL to the present parameters + KL of q(z) to the prior) joins the step. After training, the
    peer's site is updated and the change handed to gossip; this module's docstring says how.

    inner
        Any learner. Its network is replaced by a joint one, in place: use `learner.network` from then on.
        One without an `optimizer` gets the pull at the end of each training instead of at each step.
    teller
        True for exactly one peer of the swarm, the one that brings 1 to the count of peers.
    peers
        How many peers there are, where that is known, stays, and all weigh 1; None counts by gossip. The
        count is not believed beyond `peers_seen`, which an arena or a live peer sets.
    target
        The parameters that the NPN predicts: `last` for the last linear layer, or names of parameters or
        layers of the inner network. They should be shared: private ones would be drawn together.
    inputs
        The peer's own training inputs; taken from the inner learner's `samples` if left out.
    seed
        The swarm's: shared parameters start alike.
    """

    def __init__(
        self,
        inner: Learner,
        options: FedNPOptions | None = None,
        *,
        teller: bool = False,
        peers: int | None = None,
        target: str | Sequence[str] = "last",
        inputs: Tensor | None = None,
        seed: int = 0,
    ):
        self.inner, self.options = inner, options or FedNPOptions()
        if peers is not None and peers < 1:
            raise ModelError(f"a swarm of {peers} peers: there is at least one")
        network = inner.network
        if taken := {MODEL, SITES} & set(network.models):
            raise ModelError(
                f"peer {network.peer!r} has a partial model {min(taken)!r} already, and FedNP needs the "
                "name; rename it, or wrap the learner only once"
            )
        self._peers, self._model = peers, network.module
        self._target = read_target(network, target)
        self._features = Features(
            network, self.options.features, self._target, _inputs_of(inner, inputs)
        )
        auxiliary = Auxiliary(
            self._features.width, sum(p.numel() for p in self._target.values()), self.options
        )
        auxiliary.start(seed, self._values().detach())
        self._auxiliary = auxiliary.to(network.flat)
        self.network = inner.network = join(network, self._auxiliary)
        self._adam = AdamRule(self.options.auxiliary_rate, (0.9, 0.999), 1e-8, 0.0, decoupled=False)
        self._moments = [[torch.zeros_like(p.data) for p in auxiliary.learned()] for _ in range(2)]
        self._steps = 0
        dimensions = self.options.dimensions
        self.prior = Natural.standard(dimensions)
        self.site = Natural.flat(dimensions)
        """This peer's own site, as it was handed to gossip."""
        self.cavity = self.prior
        """What all the others say of z, as of the last training."""
        self.weight_of: Callable[[str], float] = lambda model: 1.0
        """The weight that this peer holds of a partial model at the end of its training, in any unit that
        all peers share. Whoever runs the peer sets it where that is not 1."""
        self.peers_seen: Callable[[], float] = lambda: inf
        """How many peers of the swarm this one knows of, itself included. Whoever runs the peer sets it;
        without it, cavities are the prior until gossip's count has settled."""
        self._count = PeerCount()
        self._untold = torch.tensor([1.0 if teller else 0.0, 1.0], dtype=torch.float64)
        """What this peer has still to bring to the counts."""
        drawn = stream(seed, "fednp order", network.peer).integers(2**31)
        self._generator = torch.Generator().manual_seed(int(drawn))
        self._optimizer = getattr(inner, "optimizer", None)
        if self._optimizer is not None:
            inner.optimizer = CorrectedOptimizer(self._optimizer, self._assist)  # type: ignore[attr-defined]

    def count_as(self, weight: float) -> None:
        """Say that this peer's weight in averages is not 1, but this number: its samples, for one."""
        check_weights([self.network], [weight])
        self.weight_of = lambda model: weight

    def train(self, steps: int = 1) -> Metrics:
        """Train the inner learner `steps` times under the pull, then update the site."""
        self.inner.network = self.network  # whoever runs the learner may have given it another
        self.cavity = self.present_cavity()
        self._count.observe(self._gossiped(), self.peers_seen())
        metrics = self.inner.train(steps)
        if self._optimizer is None:
            self._assist()
            self._pull()
        weight = self.weight_of(SITES)
        if weight > 0:  # a newcomer that has heard nothing yet has no mass to put changes into
            if not self.options.freeze_z:
                self._update_site(weight)
            counts = self._auxiliary.counts.data
            counts.add_((self._untold / weight).to(counts))
            self._untold.zero_()  # it is brought once
        return metrics

    def test(self) -> Metrics:
        """The inner learner's test."""
        self.inner.network = self.network
        return self.inner.test()

    def state(self) -> dict[str, Any]:
        """The inner learner's state, this peer's site and last cavity, and the random state."""
        return {
            "inner": self.inner.state(),
            "site": self.site.stack(),
            "cavity": self.cavity.stack(),
            "adam": {
                "steps": self._steps,
                "first": [moment.clone() for moment in self._moments[0]],
                "second": [moment.clone() for moment in self._moments[1]],
            },
            "untold": self._untold.clone(),
            "count": asdict(self._count),
            "generator": self._generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self.inner.restore(state["inner"])
        self.site = Natural.unstack(torch.as_tensor(state["site"]))
        self.cavity = Natural.unstack(torch.as_tensor(state["cavity"]))
        self._steps = int(state["adam"]["steps"])
        for moments, saved in zip(self._moments, ("first", "second"), strict=True):
            for moment, value in zip(moments, state["adam"][saved], strict=True):
                moment.copy_(torch.as_tensor(value))
        self._untold = torch.as_tensor(state["untold"]).clone()
        self._count = PeerCount(**state["count"])
        self._generator.set_state(torch.as_tensor(state["generator"]))

    # --- what the swarm knows -------------------------------------------------------------------

    def counted(self) -> float:
        """The swarm's weight: how many peers there are, if each weighs 1. It is 1 while nobody knows.

        It is never above what the peers that this one has seen weigh.
        """
        if self._peers is not None:
            return float(self._peers)
        brought = float(self._auxiliary.counts[1])
        peers = self._count.number(self._gossiped(), self.peers_seen())
        return peers / brought if brought > 0 and peers < inf else 1.0

    def present_cavity(self) -> Natural:
        """prior + N · mean − own site, from what gossip says now; the prior while N is not steady.

        Sites only ever sharpen, so no cavity is wider than the prior. Where one seems to be, gossip is
        still far from agreement: the last good one stands.
        """
        known = self._peers is not None
        if not known and not self._count.steady(self._gossiped(), self.peers_seen()):
            return self.prior
        mean = Natural.unstack(self._auxiliary.sites)
        found = self.prior + mean * self.counted() - self.site
        slack = 1e-5 * self.prior.precision
        return found.where(found.precision >= self.prior.precision - slack, self.cavity)

    @torch.no_grad()
    def receive(self, cavity: Natural, peers: int) -> None:
        """Take a cavity from a server, together with the number of clients."""
        self._peers = peers
        total = cavity + self.site - self.prior
        self._auxiliary.sites.copy_(total.stack() / peers)
        self._auxiliary.counts.copy_(torch.tensor([1.0 / peers, 1.0], dtype=torch.float64))

    def _gossiped(self) -> float:
        """How many peers gossip has counted; infinite if it has not yet heard of the teller."""
        told, brought = self._auxiliary.counts.tolist()
        return brought / told if told > 0 else inf

    def signal(self, inputs: Tensor) -> Tensor:
        """f(X): what f says of some inputs together, one number per dimension of z."""
        found = self._auxiliary.f(self._features(inputs)).mean(dim=0).double()
        return found.mean().expand_as(found) if self.options.signals == "one" else found

    def latent(self, inputs: Tensor) -> Gaussian:
        """q(z): the cavity, tilted by what f says of some inputs; untilted in dimensions where that fails."""
        options, cavity = self.options, self.cavity.moments()
        if options.freeze_z:
            return self.prior.moments()
        signal = self.signal(inputs)
        mean, variance = tilted_moments(*cavity, signal, options.moments, options.nodes)
        usable = torch.isfinite(mean) & torch.isfinite(variance) & (variance > 0)
        return torch.where(usable, mean, cavity[0]), torch.where(usable, variance, cavity[1])

    @torch.no_grad()
    def predicted(self) -> Gaussian:
        """p(θ | z) by all of the peer's inputs: what is expected of the target parameters, flat."""
        return self._decode(*self.latent(self._features.inputs[:_MOST]))

    # --- insides --------------------------------------------------------------------------------

    def _values(self) -> Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self._target.values()])

    def _loss(self, inputs: Tensor) -> Tensor:
        latent = self.latent(inputs)
        values = self._values()
        own = (values, torch.full_like(values, self.options.spread))
        loss = gaussian_kl(self._decode(*latent), own)
        if self.options.freeze_z:
            return loss
        return loss + gaussian_kl(latent, self.prior.moments()).to(loss)

    def _decode(self, mean: Tensor, variance: Tensor) -> Gaussian:
        like = self.network.flat
        return self._auxiliary.npn(mean.to(like), variance.to(like))

    def _assist(self) -> None:
        """One step of f and the NPN along the KL loss; the inner parameters get its gradient, scaled."""
        steps = self._optimizer is not None
        inner = [p for p in self._model.parameters() if steps and p.requires_grad]
        learned = self._auxiliary.learned()
        with torch.enable_grad():
            loss = self._loss(self._draw())
            found = torch.autograd.grad(loss, [*inner, *learned], allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(inner, found, strict=False):
                if gradient is not None:
                    pull = self.options.strength * gradient
                    parameter.grad = pull if parameter.grad is None else parameter.grad + pull
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(learned, found[len(inner) :], strict=True)
            ]
            self._steps += 1
            self._adam.step(learned, gradients, self._moments, self._steps)

    @torch.no_grad()
    def _pull(self) -> None:
        """For learners without an optimizer: one step of the target along the KL loss."""
        options, target = self.options, list(self._target.values())
        share = min(options.auxiliary_rate * options.strength / options.spread, 1.0)
        wanted = self.predicted()[0].split([parameter.numel() for parameter in target])
        for parameter, mean in zip(target, wanted, strict=True):
            parameter.lerp_(mean.view_as(parameter), share)

    def _draw(self) -> Tensor:
        inputs, batch = self._features.inputs, self.options.batch
        if batch == 0 or batch >= len(inputs):
            return inputs
        return inputs[torch.randint(len(inputs), (batch,), generator=self._generator)]

    @torch.no_grad()
    def _update_site(self, weight: float) -> None:
        options = self.options
        signal = self.signal(self._features.inputs[:_MOST])
        factor = tilted_factor(*self.cavity.moments(), signal, options.moments, options.nodes)
        site = updated_site(self.site, Natural(*factor), options.damping)
        change = (site - self.site).stack() / weight
        self._auxiliary.sites.add_(change.to(self._auxiliary.sites))
        self.site = site


def _inputs_of(inner: Learner, inputs: Tensor | None) -> Tensor:
    if inputs is None:
        samples = getattr(inner, "samples", None)
        inputs = samples[0] if isinstance(samples, tuple) else samples
    if not isinstance(inputs, Tensor) or not len(inputs):
        raise ModelError(
            f"peer {inner.network.peer!r}: FedNP needs the peer's training inputs, and "
            f"{type(inner).__name__} has no samples: give them as inputs="
        )
    return inputs


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


_CLOSE = 0.1
"""The relative difference up to which two numbers of peers are taken for the same."""
_PATIENCE = 10
"""Trainings for which gossip's count must stay the same before it is believed, at least."""


@dataclass
class PeerCount:
    """The number of peers: those seen, or fewer once gossip's count has settled.

    Gossip's count is exact when push-sum has converged and off by any factor before; the peers seen (by their
    presence, or all that an arena runs) are known at once, and may include some that are gone for good.
    """

    seen: float = 1.0
    reference: float = inf
    trainings: int = 0
    """For which gossip's count was close to the reference."""
    before: float | None = None

    def observe(self, gossiped: float, seen: float) -> None:
        """Take in what is known at a training. `gossiped` is infinite if nothing was counted yet."""
        self.before = self.number(gossiped, seen)
        if _close(gossiped, self.reference):
            self.trainings += 1
        else:
            self.reference, self.trainings = gossiped, 0

    def number(self, gossiped: float, seen: float) -> float:
        """How many peers there are; infinite if that is not known at all."""
        # The most ever seen: what those who left have contributed is still in the means.
        self.seen = max(self.seen, seen)
        settled = self.trainings >= _patience(gossiped) and _close(gossiped, self.reference)
        return min(gossiped, self.seen) if settled else self.seen

    def steady(self, gossiped: float, seen: float) -> bool:
        """Whether the number is known, and about what it was at the last training."""
        now = self.number(gossiped, seen)
        return now < inf and (self.before is None or _close(now, self.before))


def _patience(count: float) -> float:
    """Trainings after which a count that stayed the same is no longer about to change.

    On a ring, where mixing is slowest, the count of peers next to the teller grows with √(4t) in t exchanges:
    it stays within a tenth for up to count² / 18 of them. Peers far away count down from 3^hops.
    """
    return max(_PATIENCE, count * count / 4)


def _close(one: float, other: float) -> bool:
    return one < inf and other < inf and abs(one - other) <= _CLOSE * max(one, other)
