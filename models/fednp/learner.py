"""FedNP as a learner that wraps another learner, by gossip or with a server.

FedNP infers a latent variable z, which describes the data of the whole swarm, by expectation propagation.
Each peer has a *site*, the Gaussian factor of z that stands for its own data; its *cavity* is the prior times
all other peers' sites. A network f computes the site from the peer's inputs. A natural-parameter network
(NPN, gaussians.py) predicts the *target*, some of the network's parameters (by default the last layer's),
from z.

FedNP adds two partial models to the network, so simulations, live peers, checkpoints, security and the wire
handle it like any other network:

`fednp`
    f and the NPN: ordinary shared parameters, trained and averaged.
`fednp-sites`
    The means over all peers of their sites (η and λ per dimension of z) and of two counts. To the first
    count one peer, the *counting peer*, contributes 1 and all others 0; to the second every peer
    contributes 1.

A cavity needs the *sum* of sites, but push-sum yields the mean Σs / Σw. If every peer has weight 1, the
mean of the sites is Σs / N and the mean of the first count is 1 / N. Their quotient is the sum, exact as
soon as push-sum has converged, although no peer was given N. A peer that changes its site by Δ adds Δ once
to push-sum's sum, as training does. Its next cavity is prior + sum − own site, in which its own
contributions cancel. (Before other peers have received a change, the peer sees its change N-fold. Damping
reduces this error, and it vanishes as sites converge.)

Training changes a peer's estimate by Δ, and so push-sum's sum by w · Δ. If the peer's weight w is not 1
(it is the number of samples, or asynchronous gossip has changed it), the estimate must change by Δ / w:
`FedNPLearner.weight_of` gives w. Contributions to the counts are divided by w too, so the unit of weights
cancels.

Before push-sum has converged, the quotient is not the sum: on a ring, the first count is about 3^−hops at
that many hops from the counting peer, so a peer thirty hops away would compute N = 10^13. The second count
divided by the first is the number of peers, whatever their weights. It is used once it has stopped changing,
and never above the number of peers seen (PeerCount). Until a number is available, the cavity is the prior.

A newcomer adds its weight at the estimates that it receives: sums and quotients stay the same, and its own
changes then count fully, since all means are over the same weight. A peer that leaves hands over its site
with its mass, so the evidence of its data remains.
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
from ..learner import CorrectedOptimizer, Learner
from ..metrics import Metrics
from ..network import SlicedNetwork, average, check_weights
from ..optimizers import AdamRule
from ..slicing import ModelGraph, seeded_rng
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
    """Return the target parameters by name, in the network's order; see FedNPLearner."""
    parameters = network.parameters
    if target == "last":
        names = [_last_layer(network.module)]
    else:
        names = [target] if isinstance(target, str) else list(target)
    targets: set[str] = set()
    for name in names:
        keys = {key for key in parameters if key == name or key.startswith(f"{name}.") or not name}
        if not keys:
            raise ModelError(
                f"FedNP's target {name!r}: the network of peer {network.peer!r} has no such parameter or "
                f"layer; parameters are {', '.join(parameters)}"
            )
        targets |= keys
    return {name: parameter for name, parameter in parameters.items() if name in targets}


class Features:
    """Computes the inputs of f from samples: the samples themselves, or the inputs of a layer."""

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
        if features == "input" and not inputs.is_floating_point():
            raise ModelError(
                f"FedNP's features: the inputs of peer {network.peer!r} are {inputs.dtype}, and f needs real "
                "numbers; use features='last', or name a layer"
            )
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
        """Return one row of features per sample."""
        if self._layer is None:
            return inputs.flatten(1)
        layer_inputs: list[Tensor] = []
        handle = self._layer.register_forward_pre_hook(lambda _, args: layer_inputs.append(args[0]))
        try:
            self._module(inputs)
        finally:
            handle.remove()
        return layer_inputs[-1].flatten(1)


def _last_layer(module: nn.Module) -> str:
    """Return the name of the last linear layer, or of the last layer with parameters if there is none."""
    layers = list(module.named_modules())
    linear = [name for name, layer in layers if isinstance(layer, nn.Linear)]
    if linear:
        return linear[-1]
    return [name for name, layer in layers if list(layer.parameters(recurse=False))][-1]


def _require_shared(network: SlicedNetwork, layer: str) -> None:
    """Raise unless the inputs of `layer` belong to one partial model: f is shared, so its inputs must be."""
    slicing = network.slicing
    weight = next((p for p in slicing.anatomy.parameters if p.name == f"{layer}.weight"), None)
    cells = weight.axes[1] if weight is not None and len(weight.axes) > 1 else None
    if cells is None:
        return
    models = {
        model
        for model in network.models
        for first, indices in zip(slicing.anatomy.first_cells, slicing.cells[model], strict=False)
        if np.isin(first + indices, cells).any()
    }
    if len(models) > 1:
        raise ModelError(
            f"FedNP's features: the inputs of layer {layer!r} of peer {network.peer!r} belong to the partial "
            f"models {', '.join(sorted(models))}, so f would mix cells that differ from peer to peer; use "
            "features='input'"
        )


MODEL, SITES = "fednp", "fednp-sites"
"""The names of FedNP's two partial models; see the module's docstring."""


class Auxiliary(nn.Module):
    """The parameters that FedNP adds: f, the NPN, and the gossiped means of sites and counts."""

    def __init__(self, inputs: int, outputs: int, options: FedNPOptions):
        super().__init__()
        hidden, dimensions = options.hidden, options.dimensions
        self.f = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, dimensions))
        self.npn = NPN(dimensions, hidden, outputs)
        self.sites = nn.Parameter(torch.zeros(2, dimensions), requires_grad=False)
        self.counts = nn.Parameter(torch.zeros(2), requires_grad=False)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained on the KL loss: those of f and of the NPN."""
        return [*self.f.parameters(), *self.npn.parameters()]

    @torch.no_grad()
    def start(self, seed: int, target: Tensor) -> None:
        """Set starting values, equal on all peers with equal seeds; the NPN first predicts `target`."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and parameter.requires_grad and not name.endswith("raw"):
                drawn = seeded_rng(seed, MODEL, name).standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(drawn / np.sqrt(parameter.shape[1])))
            elif name in ("f.0.bias", "f.2.bias"):
                parameter.zero_()
        self.npn.last.bias.copy_(target)


class Joint(nn.Module):
    """A module that also holds FedNP's parameters; its output is the inner module's."""

    def __init__(self, model: nn.Module, auxiliary: Auxiliary):
        super().__init__()
        self.model, self.fednp = model, auxiliary

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output of the inner module."""
        return self.model(*inputs)


def add_auxiliary(network: SlicedNetwork, auxiliary: Auxiliary) -> SlicedNetwork:
    """Return the network with the same slices, plus FedNP's parameters in two partial models of their own.

    All peers have these two models in full: each is a part that has one cell.
    """
    slicing, anatomy = network.slicing, network.slicing.anatomy
    models = slicing.graph.models | set(network.models)
    graph = ModelGraph(
        {model: slicing.graph.dependencies(model) for model in models} | {MODEL: (), SITES: ()}
    )
    parameters, statistics = (
        tuple(replace(tensor, name=f"model.{tensor.name}") for tensor in tensors)
        for tensors in (anatomy.parameters, anatomy.buffers)
    )
    cell = int(anatomy.first_cells[-1])  # of `fednp`; the next one is that of `fednp-sites`
    added_parameters = (
        in_one_cell(f"{MODEL}.{name}", value, cell if value.requires_grad else cell + 1)
        for name, value in auxiliary.named_parameters()
    )
    joint_anatomy = replace(
        anatomy, parts=(*anatomy.parts, Part(MODEL, 1), Part(SITES, 1)),
        parameters=(*parameters, *added_parameters), buffers=statistics,
    )  # fmt: skip
    slices = {model: [*map(list, slicing.cells[model]), [], []] for model in network.models}
    no_cells = [[] for _ in anatomy.parts]
    auxiliary_slices = {MODEL: [*no_cells, [0], []], SITES: [*no_cells, [], [0]]}
    return SlicedNetwork(
        Joint(network.module, auxiliary), slices | auxiliary_slices,
        graph=graph, peer=network.peer, rest=None, cross=slicing.cross, anatomy=joint_anatomy,
        buffers=network.buffers,
    )  # fmt: skip


_MAX_SAMPLES = 1000
"""The number of samples from which a site is computed, at most."""


class FedNPLearner:
    """Trains another learner, and pulls its target parameters towards those predicted from all peers' data.

        learner = FedNPLearner(SgdLearner(network, …), FedNPOptions(strength=0.01), counting_peer=peer == 0)

    In each step of the inner learner, f computes a signal from some of the peer's inputs, the signal tilts
    the cavity to q(z), and the NPN turns q(z) into a distribution of the target parameters. The gradient of
    strength · (KL to the current parameters + KL of q(z) to the prior) is added to the step's gradient. After
    training, the peer's site is updated and the change is given to gossip, as the module's docstring says.

    inner
        Any learner. Its network is replaced by a joint one, in place: use `learner.network` from then on.
        If it has no `optimizer`, its target parameters are pulled once, at the end of each training.
    counting_peer
        True for exactly one peer of the swarm: the one that contributes 1 to the first count.
    peers
        The number of peers, if it is fixed and all have weight 1; None counts them by gossip. The count is
        limited by `peers_seen`, which an arena or a live peer sets.
    target
        The parameters that the NPN predicts: `last` for the last linear layer, or names of parameters or
        layers of the inner network. They should be shared: FedNP pulls private ones together as well.
    inputs
        The peer's own training inputs; by default those in the inner learner's `samples`.
    seed
        The same on all peers, so that shared parameters start equal.
    """

    def __init__(
        self,
        inner: Learner,
        options: FedNPOptions | None = None,
        *,
        counting_peer: bool = False,
        peers: int | None = None,
        target: str | Sequence[str] = "last",
        inputs: Tensor | None = None,
        seed: int = 0,
    ):
        self.inner, self.options = inner, options or FedNPOptions()
        if peers is not None and peers < 1:
            raise ModelError(f"FedNP: peers is {peers}; a swarm has at least one")
        network = inner.network
        if taken_names := {MODEL, SITES} & set(network.models):
            raise ModelError(
                f"peer {network.peer!r} has a partial model {min(taken_names)!r} already, and FedNP needs "
                "the name; rename it, or wrap the learner only once"
            )
        self._peers, self._model = peers, network.module
        self._target = read_target(network, target)
        self._features = Features(
            network, self.options.features, self._target, _inputs_of(inner, inputs)
        )
        auxiliary = Auxiliary(
            self._features.width, sum(p.numel() for p in self._target.values()), self.options
        )
        auxiliary.start(seed, self._target_values().detach())
        self._auxiliary = auxiliary.to(network.flat)
        self.network = inner.network = add_auxiliary(network, self._auxiliary)
        self._adam = AdamRule(self.options.auxiliary_rate, (0.9, 0.999), 1e-8, 0.0, decoupled=False)
        trained = auxiliary.trained_parameters()
        self._moments = [[torch.zeros_like(p.data) for p in trained] for _ in range(2)]
        self._steps = 0
        dimensions = self.options.dimensions
        self.prior = Natural.standard(dimensions)
        self.site = Natural.flat(dimensions)
        """This peer's own site, as it was last given to gossip."""
        self.cavity = self.prior
        """The prior times all other peers' sites, at the start of the last training."""
        self.weight_of: Callable[[str], float] = lambda model: 1.0
        """Returns the weight that this peer holds of a partial model at the end of its training, in a unit
        that all peers share. An arena or a live peer replaces it if weights are not 1."""
        self.peers_seen: Callable[[], float] = lambda: inf
        """Returns how many peers of the swarm this peer has seen, including itself. An arena or a live peer
        replaces it; otherwise cavities are the prior until gossip's count has stopped changing."""
        self._count = PeerCount()
        contribution = [1.0 if counting_peer else 0.0, 1.0]
        self._not_contributed = torch.tensor(contribution, dtype=torch.float64)
        """This peer's contributions to the counts; 0 once they are made."""
        generator_seed = seeded_rng(seed, "fednp order", network.peer).integers(2**31)
        self._generator = torch.Generator().manual_seed(int(generator_seed))
        self._optimizer = getattr(inner, "optimizer", None)
        if self._optimizer is not None:
            corrected = CorrectedOptimizer(self._optimizer, self._train_auxiliary)
            inner.optimizer = corrected  # type: ignore[attr-defined]

    def set_weight(self, weight: float) -> None:
        """Set this peer's weight in averages, if it is not 1 but the number of samples, for example."""
        check_weights([self.network], [weight])
        self.weight_of = lambda model: weight

    def train(self, steps: int = 1) -> Metrics:
        """Train the inner learner `steps` times with FedNP's loss, then update the site."""
        self.inner.network = self.network  # a caller may have replaced the network of this learner
        self.cavity = self.current_cavity()
        self._count.observe(self._gossiped_count(), self.peers_seen())
        metrics = self.inner.train(steps)
        if self._optimizer is None:
            self._train_auxiliary()
            self._pull_target()
        weight = self.weight_of(SITES)
        # A newcomer has weight 0 until it has received values, and cannot contribute before.
        if weight > 0:
            if not self.options.freeze_z:
                self._update_site(weight)
            counts = self._auxiliary.counts.data
            counts.add_((self._not_contributed / weight).to(counts))
            self._not_contributed.zero_()
        return metrics

    def test(self) -> Metrics:
        """Return the inner learner's test metrics."""
        self.inner.network = self.network
        return self.inner.test()

    def state(self) -> dict[str, Any]:
        """Return the inner learner's state and FedNP's own, for a checkpoint."""
        return {
            "inner": self.inner.state(),
            "site": self.site.stack(),
            "cavity": self.cavity.stack(),
            "adam": {
                "steps": self._steps,
                "first": [moment.clone() for moment in self._moments[0]],
                "second": [moment.clone() for moment in self._moments[1]],
            },
            "untold": self._not_contributed.clone(),  # the key that older checkpoints have
            "count": asdict(self._count),
            "generator": self._generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.inner.restore(state["inner"])
        self.site = Natural.unstack(torch.as_tensor(state["site"]))
        self.cavity = Natural.unstack(torch.as_tensor(state["cavity"]))
        self._steps = int(state["adam"]["steps"])
        for moments, key in zip(self._moments, ("first", "second"), strict=True):
            for moment, value in zip(moments, state["adam"][key], strict=True):
                moment.copy_(torch.as_tensor(value))
        self._not_contributed = torch.as_tensor(state["untold"]).clone()
        self._count = PeerCount(**state["count"])
        self._generator.set_state(torch.as_tensor(state["generator"]))

    # --- estimates from gossip ------------------------------------------------------------------

    def total_weight(self) -> float:
        """Return the sum of all peers' weights: the number of peers, if each has weight 1. 1 if unknown."""
        if self._peers is not None:
            return float(self._peers)
        # The mean of a count to which each peer contributes 1: peers / total weight.
        peers_per_weight = float(self._auxiliary.counts[1])
        peers = self._count.number(self._gossiped_count(), self.peers_seen())
        return peers / peers_per_weight if peers_per_weight > 0 and peers < inf else 1.0

    def current_cavity(self) -> Natural:
        """Return prior + total weight · mean site − own site, by gossip's current values.

        It is the prior while the number of peers is not steady. Sites have precisions of 0 or more, so a
        correct cavity has at least the precision of the prior. If it has less, push-sum is far from
        convergence, and the last cavity is returned.
        """
        is_fixed = self._peers is not None
        if not is_fixed and not self._count.steady(self._gossiped_count(), self.peers_seen()):
            return self.prior
        mean = Natural.unstack(self._auxiliary.sites)
        cavity = self.prior + mean * self.total_weight() - self.site
        slack = 1e-5 * self.prior.precision
        return cavity.where(cavity.precision >= self.prior.precision - slack, self.cavity)

    @torch.no_grad()
    def receive(self, cavity: Natural, peers: int) -> None:
        """Use a cavity that a server has computed for a swarm of `peers` clients."""
        self._peers = peers
        total = cavity + self.site - self.prior
        self._auxiliary.sites.copy_(total.stack() / peers)
        self._auxiliary.counts.copy_(torch.tensor([1.0 / peers, 1.0], dtype=torch.float64))

    def _gossiped_count(self) -> float:
        """Return the number of peers by gossip's counts; infinite before the counting peer's has arrived."""
        counting_peers, all_peers = self._auxiliary.counts.tolist()
        return all_peers / counting_peers if counting_peers > 0 else inf

    def signal(self, inputs: Tensor) -> Tensor:
        """Return f(X), the mean of f over the inputs: one number per dimension of z."""
        signal = self._auxiliary.f(self._features(inputs)).mean(dim=0).double()
        return signal.mean().expand_as(signal) if self.options.signals == "one" else signal

    def latent(self, inputs: Tensor) -> Gaussian:
        """Return q(z), the cavity tilted by the signal of the inputs.

        Dimensions in which the result is not a distribution, because of rounding, are not tilted.
        """
        options, cavity = self.options, self.cavity.moments()
        if options.freeze_z:
            return self.prior.moments()
        signal = self.signal(inputs)
        mean, variance = tilted_moments(*cavity, signal, options.moments, options.nodes)
        is_valid = torch.isfinite(mean) & torch.isfinite(variance) & (variance > 0)
        return torch.where(is_valid, mean, cavity[0]), torch.where(is_valid, variance, cavity[1])

    @torch.no_grad()
    def predict_target(self) -> Gaussian:
        """Return the NPN's distribution of the target parameters, flat, from the peer's own inputs."""
        return self._decode(*self.latent(self._features.inputs[:_MAX_SAMPLES]))

    # --- training -------------------------------------------------------------------------------

    def _target_values(self) -> Tensor:
        """Return the current target parameters as one flat tensor."""
        return torch.cat([parameter.reshape(-1) for parameter in self._target.values()])

    def _loss(self, inputs: Tensor) -> Tensor:
        """Return the KL loss: of the NPN's prediction to the current target, plus of q(z) to the prior."""
        latent = self.latent(inputs)
        values = self._target_values()
        current = (values, torch.full_like(values, self.options.spread))
        loss = gaussian_kl(self._decode(*latent), current)
        if self.options.freeze_z:
            return loss
        return loss + gaussian_kl(latent, self.prior.moments()).to(loss)

    def _decode(self, mean: Tensor, variance: Tensor) -> Gaussian:
        """Return the NPN's distribution of the target parameters for a distribution of z."""
        flat = self.network.flat  # z is in float64, the NPN has the network's dtype
        return self._auxiliary.npn(mean.to(flat), variance.to(flat))

    def _train_auxiliary(self) -> None:
        """Train f and the NPN for one step on the KL loss; add its scaled gradient to the network's."""
        has_optimizer = self._optimizer is not None
        inner = [p for p in self._model.parameters() if has_optimizer and p.requires_grad]
        trained = self._auxiliary.trained_parameters()
        with torch.enable_grad():
            loss = self._loss(self._sample_inputs())
            gradients = torch.autograd.grad(loss, [*inner, *trained], allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(inner, gradients, strict=False):
                if gradient is not None:
                    pull = self.options.strength * gradient
                    parameter.grad = pull if parameter.grad is None else parameter.grad + pull
            trained_gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(trained, gradients[len(inner) :], strict=True)
            ]
            self._steps += 1
            self._adam.step(trained, trained_gradients, self._moments, self._steps)

    @torch.no_grad()
    def _pull_target(self) -> None:
        """Move the target parameters one step along the KL loss, for learners without an optimizer."""
        options, target = self.options, list(self._target.values())
        fraction = min(options.auxiliary_rate * options.strength / options.spread, 1.0)
        means = self.predict_target()[0].split([parameter.numel() for parameter in target])
        for parameter, mean in zip(target, means, strict=True):
            parameter.lerp_(mean.view_as(parameter), fraction)

    def _sample_inputs(self) -> Tensor:
        """Return the inputs from which f computes the signal of one step."""
        inputs, batch = self._features.inputs, self.options.batch
        if batch == 0 or batch >= len(inputs):
            return inputs
        return inputs[torch.randint(len(inputs), (batch,), generator=self._generator)]

    @torch.no_grad()
    def _update_site(self, weight: float) -> None:
        """Move the site towards the peer's data, and add the change to the gossiped mean of sites."""
        options = self.options
        signal = self.signal(self._features.inputs[:_MAX_SAMPLES])
        factor = tilted_factor(*self.cavity.moments(), signal, options.moments, options.nodes)
        site = updated_site(self.site, Natural(*factor), options.damping)
        change = (site - self.site).stack() / weight
        self._auxiliary.sites.add_(change.to(self._auxiliary.sites))
        self.site = site


def _inputs_of(inner: Learner, inputs: Tensor | None) -> Tensor:
    """Return the training inputs: those given, else those in the learner's samples."""
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
    """Run one round with a server: clients train, the server averages parameters and computes cavities.

    samples: the weights of the clients' parameters in the average; sites always have weight 1. The learners'
    cavities are set for the next round, as if the server had sent them; no gossip is needed.
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


_TOLERANCE = 0.1
"""The relative difference up to which two numbers of peers count as equal."""
_MIN_TRAININGS = 10
"""The number of trainings for which gossip's count must stay equal before it is used, at least."""


@dataclass
class PeerCount:
    """Estimates the number of peers: the peers seen, or gossip's count once that is steady and lower.

    Gossip's count is exact when push-sum has converged, and may be wrong by any factor before. The number of
    peers seen (those with a presence, or all peers of an arena) is available at once, but may include peers
    that have left.
    """

    seen: float = 1.0
    """The most peers ever seen."""
    reference: float = inf
    """The gossiped count that later ones are compared with."""
    trainings: int = 0
    """For how many trainings gossip's count has been close to the reference."""
    before: float | None = None
    """The number of peers at the last training."""

    def observe(self, gossiped: float, seen: float) -> None:
        """Record the counts at a training. `gossiped` is infinite before gossip has counted any peer."""
        self.before = self.number(gossiped, seen)
        if _are_close(gossiped, self.reference):
            self.trainings += 1
        else:
            self.reference, self.trainings = gossiped, 0

    def number(self, gossiped: float, seen: float) -> float:
        """Return how many peers there are; infinite if unknown."""
        # Peers that have left still count: their contributions are in the means.
        self.seen = max(self.seen, seen)
        lasted_enough = self.trainings >= _trainings_needed(gossiped)
        is_steady = lasted_enough and _are_close(gossiped, self.reference)
        return min(gossiped, self.seen) if is_steady else self.seen

    def steady(self, gossiped: float, seen: float) -> bool:
        """Return whether the number of peers is known, and close to the one at the last training."""
        number = self.number(gossiped, seen)
        return number < inf and (self.before is None or _are_close(number, self.before))


def _trainings_needed(count: float) -> float:
    """Return for how many trainings a count must stay about equal before it is believed.

    On a ring, where gossip mixes slowest, the count that peers near the counting peer compute grows like
    √(4t) in t exchanges. So it can stay within a tenth for up to count² / 18 exchanges although it still
    grows. Far from the counting peer the count falls from 3^hops.
    """
    return max(_MIN_TRAININGS, count * count / 4)


def _are_close(a: float, b: float) -> bool:
    """Return whether two counts are finite and about equal."""
    return a < inf and b < inf and abs(a - b) <= _TOLERANCE * max(a, b)
