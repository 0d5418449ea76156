"""Methods that fuse separately trained networks: PFNM (000), MAGI (002) and their baselines.

A setting determines the data, its split among the peers, and their networks; all methods are given the same
networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import ModelError, mlp, seeded_rng
from ...models.matching import MAGI_KL, Chain, Fusion, Layer, MatchOptions, fuse
from ..cli.fuse import accuracy, logits
from ..data import Samples, load, partition

# --- data -------------------------------------------------------------------------------------------

DATA = ("mnist-5k", "digits", "mnist")
"""The names of the data; see Setting."""


@dataclass(frozen=True)
class Setting:
    """Everything that determines a run; equal settings give equal results.

    data
        `mnist-5k`: the first 500 digits of each class of MNIST, 400 to train on and 100 to test on.
        `digits`: scikit-learn's, 1400 and 397, shuffled by the seed. `mnist`: all of it.
    alpha
        The concentration of the Dirichlet split; None splits every class evenly.
    average_width
        The hidden width of the networks that FedAvg and FedProx average; `width` by default.
    """

    data: str = "digits"
    peers: int = 10
    layers: int = 1
    width: int = 50
    alpha: float | None = 0.5
    epochs: int = 10
    average_width: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data not in DATA:
            raise ModelError(f"no such data {self.data!r} here; there are {', '.join(DATA)}")

    @property
    def title(self) -> str:
        """Data, hidden layers and split, as a label in tables."""
        split = "homogeneous" if self.alpha is None else f"Dirichlet {self.alpha:g}"
        return f"{self.data}, {self.layers} hidden, {split}"

    def layout(self, width: int | None = None) -> str:
        """Return the layout of a network for this data; hidden layers have the peers' width by default."""
        inputs = 64 if self.data == "digits" else 784
        return "=".join(map(str, [inputs, *[width or self.width] * self.layers, 10]))


@dataclass(frozen=True, eq=False)
class DataSplit:
    """All peers' training samples and the common test samples."""

    shares: tuple[Samples, ...]
    test: Samples

    @property
    def counts(self) -> np.ndarray:
        """Numbers of samples `[peers, classes]`."""
        return counts_of(self.shares)


def counts_of(shares: Sequence[Samples]) -> np.ndarray:
    """Return the numbers of samples `[peers, classes]`."""
    return np.stack([np.bincount(share.y.numpy(), minlength=10) for share in shares])


def split_data(setting: Setting) -> DataSplit:
    """Load the data and split it among the peers."""
    train, test = _load_samples(setting.data, setting.seed if setting.data == "digits" else 0)
    rng = seeded_rng(setting.seed, "matching", "split")
    if setting.alpha is None:
        indices_by_peer = _split_evenly(train.y.numpy(), setting.peers, rng)
    else:
        indices_by_peer = partition.dirichlet(
            train.y, setting.peers, setting.alpha, rng, minimum=10
        )
    return DataSplit(tuple(train.take(indices) for indices in indices_by_peer), test)


def _split_evenly(labels: np.ndarray, peers: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return sample indices by peer: every class is split evenly."""
    by_class = [
        np.array_split(rng.permutation(np.flatnonzero(labels == label)), peers)
        for label in np.unique(labels)
    ]
    return [rng.permutation(np.concatenate(chosen)) for chosen in zip(*by_class, strict=True)]


@lru_cache(maxsize=2)
def _load_samples(name: str, seed: int) -> tuple[Samples, Samples]:
    """Return training and test samples of one of DATA; the seed shuffles the digits."""
    data = load("digits" if name == "digits" else "mnist")
    assert data.test is not None
    train, test = (Samples(subset.flat(), subset.y) for subset in (data.train, data.test))
    if name == "mnist":
        return train, test
    if name == "digits":
        samples = Samples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
        order = seeded_rng(seed, "matching", "digits").permutation(len(samples))
        return samples.take(order[:1400]), samples.take(order[1400:])
    firsts = np.stack([np.flatnonzero(train.y.numpy() == label)[:500] for label in range(10)])
    return train.take(np.sort(firsts[:, :400], None)), train.take(np.sort(firsts[:, 400:], None))


# --- local training ---------------------------------------------------------------------------------

RATE, BATCH, WEIGHT_DECAY = 0.01, 32, 1e-6
INIT_DEVIATION, INIT_BIAS = 0.1, 0.1


def new_network(layout: str, seed: int) -> nn.Sequential:
    """Return a ReLU network with the paper's initial values: weights N(0, 0.1²), biases 0.1."""
    module = mlp(layout, activation="relu", output="none")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if name.endswith("bias"):
                value.fill_(INIT_BIAS)
            else:
                value.normal_(0, INIT_DEVIATION, generator=generator)
    return module


def train(
    module: nn.Sequential,
    share: Samples,
    *,
    epochs: int,
    seed: int,
    targets: Tensor | None = None,
    proximal: float = 0.0,
) -> nn.Sequential:
    """Train in place with Adam (amsgrad) in batches of 32.

    targets
        Class probabilities to train on instead of the labels (distillation).
    proximal
        The weight of FedProx's penalty on the distance from the initial values.
    """
    parameters = list(module.parameters())
    start = [value.detach().clone() for value in parameters] if proximal else []
    optimizer = torch.optim.Adam(
        parameters, RATE, weight_decay=WEIGHT_DECAY, amsgrad=True, fused=True
    )
    generator = torch.Generator().manual_seed(seed)
    labels = share.y if targets is None else targets
    for _ in range(epochs):
        order = torch.randperm(len(share.y), generator=generator)
        for batch in order.split(BATCH):
            loss = F.cross_entropy(module(share.x[batch]), labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for value, initial in zip(parameters, start, strict=False):  # no start without penalty
                assert value.grad is not None
                value.grad.add_(value.detach() - initial, alpha=proximal)
            optimizer.step()
    return module


def chain_of(module: nn.Module, name: str = "the network") -> Chain:
    """Return the network's layers as numpy arrays."""
    return Chain.read({key: value.numpy() for key, value in module.state_dict().items()}, name)


# --- baselines: averages, ensembles, distillation, clusters -----------------------------------------

DISTILLED_WIDTH = 500
"""Cells per hidden layer of a distilled network, as in the paper."""


def average(chains: Sequence[Chain], weights: np.ndarray) -> Chain:
    """Return the average of networks without matching (one-shot FedAvg); weights: numbers of samples."""
    shares, states = weights / weights.sum(), [chain.state(np.float64) for chain in chains]
    means = {
        name: np.tensordot(shares, np.stack([state[name] for state in states]), axes=1)
        for name in states[0]
    }
    return Chain.read(means)


def ensemble_outputs(
    chains: Sequence[Chain], x: Tensor, counts: np.ndarray | None = None
) -> Tensor:
    """Return an ensemble's class probabilities; `counts` [peers, classes] weight each peer for each class."""
    probabilities = torch.stack([torch.softmax(logits(chain, x), dim=1) for chain in chains])
    if counts is None:
        return probabilities.mean(dim=0)
    total = counts.sum(axis=0)
    shares = torch.from_numpy(counts / np.where(total > 0, total, 1))
    return (probabilities * shares[:, None]).sum(dim=0)


def distill(
    chains: Sequence[Chain], shares: Sequence[Samples], layout: str, *, epochs: int, seed: int
) -> Chain:
    """Return a new network, trained on the ensemble's outputs for the samples of all peers."""
    pooled = Samples(torch.cat([s.x for s in shares]), torch.cat([s.y for s in shares]))
    targets = ensemble_outputs(chains, pooled.x).to(pooled.x.dtype)
    return chain_of(
        train(new_network(layout, seed), pooled, epochs=epochs, seed=seed, targets=targets)
    )


def dp_means(
    chains: Sequence[Chain], counts: np.ndarray, *, limit: int = 700, passes: int = 20
) -> Chain:
    """Return a network with one hidden cell per cluster of all peers' cells, whichever peer they belong to.

    A cell whose distance from every centre exceeds the penalty becomes a new centre. To find the penalty,
    choose as many centres as a peer has cells, each as far from the others as possible; the penalty is then
    the largest distance of a cell from its nearest centre. Output weights are averaged by the peers' shares
    of each class, as in matching.
    """
    if chains[0].hidden_parts != 1:
        raise ValueError("DP-means of cells is defined for networks with one hidden layer")
    first, last = chains[0].layers
    inputs, per_cell_names = first.weight.shape[1], list(first.per_cell)
    rows = np.concatenate([_cell_vectors(chain) for chain in chains])
    peer = np.repeat(np.arange(len(chains)), [chain.widths[1] for chain in chains])
    total = counts.sum(axis=0)
    shares = np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / len(chains))
    penalty = _farthest_first(rows, chains[0].widths[1])
    centres = rows.mean(axis=0, keepdims=True)
    label, members = np.zeros(len(rows), dtype=np.int64), np.ones((1, len(rows)))
    for _ in range(passes):
        distance = _squared_distances(rows, centres)
        while len(centres) < limit:
            farthest = int(distance.min(axis=1).argmax())
            if distance[farthest].min() <= penalty:
                break
            centres = np.vstack([centres, rows[farthest]])
            distance = np.hstack([distance, _squared_distances(rows, rows[farthest][None])])
        used_centres, new_label = np.unique(distance.argmin(axis=1), return_inverse=True)
        has_converged = len(used_centres) == len(centres) and np.array_equal(new_label, label)
        label = new_label
        members = np.equal.outer(np.arange(len(used_centres)), label).astype(float)
        centres = members @ rows / members.sum(axis=1, keepdims=True)
        if has_converged:
            break
    weight = shares[peer]
    weight_sums = members @ weight
    output_weights = (
        members @ (rows[:, -weight.shape[1] :] * weight) / np.where(weight_sums > 0, weight_sums, 1)
    )
    hidden = replace(
        first,
        weight=centres[:, :inputs],
        per_cell={name: centres[:, inputs + index] for index, name in enumerate(per_cell_names)},
    )
    output_biases = {
        name: np.einsum("jk,jk->k", shares, np.stack([c.layers[1].per_cell[name] for c in chains]))
        for name in last.per_cell
    }
    return Chain((hidden, Layer(output_weights.T, output_biases, last.weight_name)))


def _cell_vectors(chain: Chain) -> np.ndarray:
    """Return one row per hidden cell: its input weights, its values per cell, its output weights."""
    first, last = chain.layers
    per_cell = [value[:, None] for value in first.per_cell.values()]
    return np.hstack([first.weight, *per_cell, last.weight.T])


def _farthest_first(rows: np.ndarray, count: int) -> float:
    """Return the largest squared distance from `count` centres, each the point farthest from those before."""
    nearest = _squared_distances(rows, rows.mean(axis=0, keepdims=True))[:, 0]
    for _ in range(count):
        chosen = rows[int(nearest.argmax())]
        nearest = np.minimum(nearest, _squared_distances(rows, chosen[None])[:, 0])
    return float(nearest.max())


def _squared_distances(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the squared distance of every row from every centre."""
    squared = (rows**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1) - 2 * rows @ centres.T
    return np.maximum(squared, 0)


# --- every method on one setting --------------------------------------------------------------------

SWEEPS = 5
"""The largest number of sweeps of matching."""
PROXIMAL = 0.01
"""The weight of FedProx's penalty."""


@dataclass(frozen=True)
class Outcome:
    """Accuracy on the common test samples; hidden cells and parameters of the network or ensemble."""

    accuracy: float
    cells: int
    parameters: int


class Peers:
    """A setting's peers. Their networks are trained when a method first uses them, and cached."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self._networks: dict[tuple[str, int, float], list[Chain]] = {}

    @cached_property
    def split(self) -> DataSplit:
        """The samples of each peer, and the test samples."""
        return split_data(self.setting)

    @property
    def own(self) -> list[Chain]:
        """The peers' networks, trained from different initial values."""
        return self.networks("own", self.setting.width)

    def replace_own(self, chains: list[Chain]) -> None:
        """Replace the peers' own networks by these."""
        self._networks["own", self.setting.width, 0.0] = chains

    def networks(self, start: str, width: int | None = None, proximal: float = 0.0) -> list[Chain]:
        """Return all peers' networks, trained from initial values of their `own`, or `shared` by all peers.

        width: of the hidden layers; by default that of FedAvg.
        proximal: the weight of FedProx's penalty on the distance from the initial values.
        """
        setting = self.setting
        width = width or setting.average_width or setting.width
        key = (start, width, proximal)
        if key not in self._networks:
            self._networks[key] = []
            for peer, share in enumerate(self.split.shares):
                init_seed = self.seed("start", "all" if start == "shared" else peer)
                module = new_network(setting.layout(width), init_seed)
                order = self.seed("order", peer)
                train(module, share, epochs=setting.epochs, seed=order, proximal=proximal)
                self._networks[key].append(chain_of(module, f"peer {peer}"))
        return self._networks[key]

    def seed(self, *names: object) -> int:
        """Return a seed for the purpose that `names` describe."""
        return int(seeded_rng(self.setting.seed, "matching", *names).integers(2**31))

    def outcome(self, outputs: Tensor, cells: int, parameters: int) -> Outcome:
        """Return the outcome of a network or ensemble with these outputs for the test samples."""
        return Outcome(accuracy(outputs, self.split.test.y), cells, parameters)

    def score(self, chain: Chain) -> Outcome:
        """Test a network."""
        return self.outcome(logits(chain, self.split.test.x), sum(chain.widths[1:-1]), chain.size)

    def fused(self, options: MatchOptions) -> Outcome:
        """Fuse and test the own networks; for paired results, all options have the same order of sweeps."""
        seed, counts = self.seed("sweeps"), self.split.counts
        fusion = fuse(self.own, options, counts=counts, bias_mean=INIT_BIAS, seed=seed)
        return self.score(fusion.chain)

    def ensemble(self, counts: np.ndarray | None) -> Outcome:
        """Test the ensemble of the own networks, weighted by class if `counts` are given."""
        outputs = ensemble_outputs(self.own, self.split.test.x, counts)
        cells = sum(sum(chain.widths[1:-1]) for chain in self.own)
        return self.outcome(outputs, cells, sum(chain.size for chain in self.own))


def _local(peers: Peers) -> Outcome:
    """Return the mean accuracy of the peers' own networks."""
    outcomes = [peers.score(chain) for chain in peers.own]
    mean = float(np.mean([outcome.accuracy for outcome in outcomes]))
    return replace(outcomes[0], accuracy=mean)


def _average_method(start: str, proximal: float = 0.0) -> Callable[[Peers], Outcome]:
    """Return a method that averages networks; arguments as for `Peers.networks`."""

    def run(peers: Peers) -> Outcome:
        samples = peers.split.counts.sum(axis=1)
        return peers.score(average(peers.networks(start, proximal=proximal), samples))

    return run


def _match_method(**options: object) -> Callable[[Peers], Outcome]:
    """Return a method that fuses the peers' own networks with these options of matching."""
    match_options = MatchOptions(**{"sweeps": SWEEPS, **options})  # type: ignore[arg-type]
    return lambda peers: peers.fused(match_options)


def _distill_method(peers: Peers) -> Outcome:
    """Distill the ensemble of the peers' own networks, and test the result."""
    setting = peers.setting
    layout, seed = setting.layout(DISTILLED_WIDTH), peers.seed("distil")
    chain = distill(peers.own, peers.split.shares, layout, epochs=setting.epochs, seed=seed)
    return peers.score(chain)


def _downpour_method(peers: Peers) -> Outcome:
    """Train by downpour SGD, with one exchange per epoch, and test the result.

    In every round the peers train one epoch from the server's network, and the mean of what they changed is
    the gradient of the server's Adam. The peers' own Adam starts anew in each round.
    """
    setting, shares = peers.setting, peers.split.shares
    module = new_network(setting.layout(), peers.seed("start", "all"))
    server = torch.optim.Adam(module.parameters(), RATE, weight_decay=WEIGHT_DECAY, amsgrad=True)
    for round_number in range(setting.epochs):
        changes = [torch.zeros_like(value) for value in module.parameters()]
        for peer, share in enumerate(shares):
            seed = peers.seed("downpour", peer, round_number)
            trained = train(deepcopy(module), share, epochs=1, seed=seed)
            pairs = zip(module.parameters(), trained.parameters(), strict=True)
            for change, (old, new) in zip(changes, pairs, strict=True):
                change += (old - new).detach() / len(shares)
        for value, change in zip(module.parameters(), changes, strict=True):
            value.grad = change
        server.step()
    return peers.score(chain_of(module))


LAMBDAS = (0.0, MAGI_KL, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
"""The λ with which MAGI is run."""


def magi(value: float, variance: float = 1.0) -> str:
    """Return the name of MAGI with one λ (and a σ², if not 1); at λ = 0 it is PFNM."""
    variance_text = "" if variance == 1 else f" σ²={variance:g}"
    return f"MAGI{variance_text} λ={value:g}" if value else f"PFNM{variance_text}"


METHODS: Mapping[str, Callable[[Peers], Outcome]] = MappingProxyType(
    {
        "local": _local,
        "FedAvg, own starts": _average_method("own"),
        "FedAvg, shared start": _average_method("shared"),
        "FedProx, shared start": _average_method("shared", PROXIMAL),
        "DP-means": lambda peers: peers.score(dp_means(peers.own, peers.split.counts)),
        "PFNM": _match_method(),
        "PFNM γ0=1e-5": _match_method(concentration=1e-5),
        **{f"PFNM σ0²={value:g}": _match_method(prior_variance=value) for value in (1, 100)},
        **{f"PFNM γ0={value:g}": _match_method(concentration=value) for value in (0.1, 10)},
        **{f"PFNM σ²={value:g}": _match_method(variance=value) for value in (0.5, 2)},
        "PFNM σ²=0.1": _match_method(variance=0.1, limit=None),
        **{magi(value): _match_method(kl=value) for value in LAMBDAS[1:]},
        **{
            magi(value, 0.1): _match_method(kl=value, variance=0.1, limit=None)
            for value in LAMBDAS[1:]
        },
        "ensemble": lambda peers: peers.ensemble(None),
        "weighted ensemble": lambda peers: peers.ensemble(peers.split.counts),
        "distillation": _distill_method,
        "downpour SGD": _downpour_method,
    }
)


# --- PFNM's streaming experiment: samples arrive in steps, a posterior is the next step's prior ------

NEW_CELLS = 1
"""γ0 of the paper: the number of cells of a peer's next network that are not copies of fused cells."""
NOISE = 0.05
"""The standard deviation of the noise that is added to a peer's next network."""


def run_stream(setting: Setting, steps: int) -> dict[int, dict[str, Outcome]]:
    """Return outcomes by step and method. The ensembles' networks are trained further in every step."""
    if setting.layers != 1:
        raise ValueError("the streaming experiment is defined for networks with one hidden layer")
    peers = Peers(setting)
    split = peers.split
    rng = seeded_rng(setting.seed, "matching", "stream")
    indices_by_step = [
        np.array_split(rng.permutation(len(share.y)), steps) for share in split.shares
    ]
    modules = [_new_network(setting, rng) for _ in split.shares]
    ensemble = [_new_network(setting, rng) for _ in split.shares]
    counts_so_far = np.zeros_like(split.counts)
    fused: Fusion | None = None
    outcomes: dict[int, dict[str, Outcome]] = {}
    options = MatchOptions(sweeps=SWEEPS)
    for step in range(steps):
        shares = [
            share.take(indices[step])
            for share, indices in zip(split.shares, indices_by_step, strict=True)
        ]
        counts = counts_of(shares)
        counts_so_far += counts
        if fused is not None:
            modules = [_next_network(setting, fused, peer, rng) for peer in range(setting.peers)]
        for module, ensemble_module, share in zip(modules, ensemble, shares, strict=True):
            seed = int(rng.integers(2**31))
            if len(share.y):
                train(module, share, epochs=setting.epochs, seed=seed)
                train(ensemble_module, share, epochs=setting.epochs, seed=seed)
        chains, seed = [chain_of(module) for module in modules], int(rng.integers(2**31))
        prior = fused.posterior if fused else None
        fused = fuse(chains, options, counts=counts, bias_mean=INIT_BIAS, prior=prior, seed=seed)
        peers.replace_own([chain_of(module) for module in ensemble])
        outcomes[step + 1] = {
            "PFNM streaming": peers.score(fused.chain),
            "ensemble": peers.ensemble(None),
            "weighted ensemble": peers.ensemble(counts_so_far),
            "local": _local(peers),
        }
    return outcomes


def _new_network(setting: Setting, rng: np.random.Generator) -> nn.Sequential:
    """Return a network with random initial values."""
    return new_network(setting.layout(), int(rng.integers(2**31)))


def _next_network(
    setting: Setting, fused: Fusion, peer: int, rng: np.random.Generator
) -> nn.Sequential:
    """Return the network that a peer trains in the next step.

    Its cells are fused cells, drawn by how often the peer used them, and NEW_CELLS new ones, with some noise.
    """
    _, uses = fused.posterior.parts[0]
    weights = uses[peer] + 1e-9  # cells that the peer never used are hardly ever drawn
    count = setting.width - NEW_CELLS
    chosen = rng.choice(uses.shape[1], size=count, replace=False, p=weights / weights.sum())
    first, last = fused.chain.layers

    def with_new_cells(values: np.ndarray) -> np.ndarray:
        zeros = np.zeros((NEW_CELLS, *values.shape[1:]))
        return np.concatenate([values[chosen], zeros])

    values = {
        first.weight_name: with_new_cells(first.weight),
        **{name: with_new_cells(value) for name, value in first.per_cell.items()},
        last.weight_name: with_new_cells(last.weight.T).T, **last.per_cell,
    }  # fmt: skip
    module = _new_network(setting, rng)
    noisy = {name: value + NOISE * rng.normal(size=value.shape) for name, value in values.items()}
    module.load_state_dict({name: torch.from_numpy(v).float() for name, v in noisy.items()})
    return module
