"""A learner's network and FedNP's own parameters as one sliced network.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy, ParameterMap, Part, dense_axes
from ..errors import ModelError
from ..graph import ModelGraph
from ..network import SlicedNetwork
from ..starts import stream
from .gaussians import NPN
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


def require_unwrapped(network: SlicedNetwork) -> None:
    """Raise if the names of FedNP's partial models are taken."""
    for model in (MODEL, SITES):
        if model in network.models:
            raise ModelError(
                f"peer {network.peer!r} has a partial model {model!r} already, and FedNP needs the name; "
                "rename it, or wrap the learner only once"
            )


def join(network: SlicedNetwork, auxiliary: Auxiliary) -> SlicedNetwork:
    """The network with the auxiliary one beside it, cut as before, plus FedNP's two partial models."""
    slicing = network.slicing
    taken = slicing.graph.models | set(network.models)
    graph = ModelGraph(
        {model: slicing.graph.dependencies(model) for model in taken} | {MODEL: (), SITES: ()}
    )
    anatomy, first = _joined(slicing.anatomy, auxiliary)
    names = [part.name for part in anatomy.parts]
    slices: dict[str, dict[str, list[int]]] = {
        model: {
            name: cells.tolist() for name, cells in zip(names, slicing.cells[model], strict=False)
        }
        for model in network.models
    }
    for model, parts in ((MODEL, anatomy.parts[first:-2]), (SITES, anatomy.parts[-2:])):
        slices[model] = {part.name: list(range(part.cells)) for part in parts}
    return SlicedNetwork(
        Joint(network.module, auxiliary), slices,
        graph=graph, peer=network.peer, rest=None, cross=slicing.cross, anatomy=anatomy,
        buffers=network.buffers,
    )  # fmt: skip


def _joined(anatomy: Anatomy, auxiliary: Auxiliary) -> tuple[Anatomy, int]:
    """The anatomy of a Joint, and where the auxiliary parts begin."""
    hidden, dimensions = auxiliary.f[0].out_features, auxiliary.f[2].out_features
    sizes = {
        "f.hidden": hidden,
        "f.signal": dimensions,
        "npn.hidden": hidden,
        "npn.theta": len(auxiliary.npn.last.bias),
        "z": dimensions,
        "counts": 2,
    }
    parts = (*anatomy.parts, *(Part(f"{MODEL}.{name}", cells) for name, cells in sizes.items()))
    places = range(len(anatomy.parts), len(parts))
    cells = dict(zip(sizes, dense_axes(parts, *places), strict=True))
    # What f looks at has the same order on every peer, so these axes span no cells.
    spans: dict[str, tuple[str | None, ...]] = {
        "f.0.weight": ("f.hidden", None),
        "f.0.bias": ("f.hidden",),
        "f.2.weight": ("f.signal", "f.hidden"),
        "f.2.bias": ("f.signal",),
        "sites": (None, "z"),
        "counts": ("counts",),
    }
    for layer, out, into in (
        ("first", "npn.hidden", "f.signal"),
        ("last", "npn.theta", "npn.hidden"),
    ):
        for name in ("mean", "raw"):
            spans[f"npn.{layer}.{name}"] = (out, into)
        for name in ("bias", "raw_bias"):
            spans[f"npn.{layer}.{name}"] = (out,)
    own, statistics = (
        tuple(replace(each, name=f"model.{each.name}") for each in maps)
        for maps in (anatomy.parameters, anatomy.buffers)
    )
    added = [
        ParameterMap(
            f"{MODEL}.{name}",
            tuple(value.shape),
            tuple(None if span is None else cells[span] for span in spans[name]),
        )
        for name, value in auxiliary.named_parameters()
    ]
    joined = replace(anatomy, parts=parts, parameters=(*own, *added), buffers=statistics)
    return joined, len(anatomy.parts)
