"""Fusing whole networks: parts are matched from the outputs down, each on what is above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ModelError, check_number
from .assignment import Atoms, Cells, History, Matched, MatchOptions, match


@dataclass(frozen=True, eq=False)
class Layer:
    """One dense layer: `weight` [cells, inputs], and values per cell by name (`bias`, slopes, …).

    `weight_name` and the keys of `own` are the names in the network's state dict.
    """

    weight: np.ndarray
    own: Mapping[str, np.ndarray]
    weight_name: str = "weight"

    @property
    def cells(self) -> int:
        """How many cells the layer has."""
        return self.weight.shape[0]


@dataclass(frozen=True, eq=False)
class Chain:
    """Dense layers in the order in which they run, in double precision."""

    layers: tuple[Layer, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Cells per part, inputs first."""
        return (self.layers[0].weight.shape[1], *(layer.cells for layer in self.layers))

    @property
    def hidden(self) -> int:
        """The number of hidden parts."""
        return len(self.layers) - 1

    @property
    def size(self) -> int:
        """How many parameters the network has."""
        return sum(
            layer.weight.size + sum(v.size for v in layer.own.values()) for layer in self.layers
        )

    def state(self, dtype: np.dtype | type = np.float32) -> dict[str, np.ndarray]:
        """A state dict of arrays, names as they were."""
        found: dict[str, np.ndarray] = {}
        for layer in self.layers:
            found[layer.weight_name] = layer.weight.astype(dtype)
            found.update({name: value.astype(dtype) for name, value in layer.own.items()})
        return found

    @classmethod
    def read(
        cls,
        state: Mapping[str, np.ndarray],
        name: str = "the network",
        order: Sequence[str] | None = None,
    ) -> Chain:
        """Read a state dict: two-dimensional values are layers, others belong to the layer before.

        name
            Stands in errors: a file, a peer.
        order
            The names of the values as they run. By default it is that of the state dict, numbered layers by
            their numbers: right for a module's `state_dict()`, but a file sorts names as text.
        """
        layers: list[tuple[str, np.ndarray, dict[str, np.ndarray]]] = []
        for key in order or _in_order(state):
            value = np.asarray(state[key], dtype=np.float64)
            if not np.isfinite(value).all():
                raise ModelError(
                    f"{name}: layer {key!r} has {int((~np.isfinite(value)).sum())} values that are not "
                    "finite; leave this network out, or train it again at a lower rate"
                )
            if value.ndim == 2:
                if layers and layers[-1][1].shape[0] != value.shape[1]:
                    raise ModelError(
                        f"{name}: layer {key!r} takes {value.shape[1]} inputs, but the one before it "
                        f"({layers[-1][0]!r}) has {layers[-1][1].shape[0]} cells; only chains of dense "
                        "layers can be fused"
                    )
                layers.append((key, value, {}))
            elif value.ndim == 1 and layers and value.shape == (layers[-1][1].shape[0],):
                layers[-1][2][key] = value
            else:
                raise ModelError(
                    f"{name}: {key!r} of shape {value.shape} is neither a dense layer nor one value per "
                    "cell of the layer before it; only chains of dense layers can be fused"
                )
        if not layers:
            raise ModelError(f"{name}: there is no dense layer in it")
        # By name, for networks that list their values in other orders are fused too.
        return cls(
            tuple(Layer(value, dict(sorted(own.items())), key) for key, value, own in layers)
        )


def check_alike(chains: Sequence[Chain], names: Sequence[str]) -> None:
    """Refuse networks whose parts do not correspond, naming the layer and the sizes."""
    if not chains:
        raise ModelError("fuse: no networks were given")
    first = chains[0]
    for name, chain in zip(names[1:], chains[1:], strict=True):
        if len(chain.layers) != len(first.layers):
            raise ModelError(
                f"{name} has {len(chain.layers)} layers ({_shape(chain)}), {names[0]} has "
                f"{len(first.layers)} ({_shape(first)}); networks of one depth can be fused"
            )
        for mine, theirs in zip(first.layers, chain.layers, strict=True):
            if list(mine.own) != list(theirs.own) or mine.weight_name != theirs.weight_name:
                raise ModelError(
                    f"layer {theirs.weight_name!r} of {name} holds {_names(theirs)}, the one of "
                    f"{names[0]} holds {_names(mine)}: their parts do not correspond"
                )
        for what, index in (("inputs", 0), ("outputs", -1)):
            if chain.widths[index] != first.widths[index]:
                layer = chain.layers[index].weight_name
                raise ModelError(
                    f"layer {layer!r} of {name} has {chain.widths[index]} {what}, that of {names[0]} has "
                    f"{first.widths[index]}; only hidden widths may differ"
                )


def part_names(chain: Chain) -> tuple[str, ...]:
    """The names of the hidden parts: their layers' names without `.weight`."""
    return tuple(layer.weight_name.removesuffix(".weight") for layer in chain.layers[:-1])


def _shape(chain: Chain) -> str:
    return "=".join(map(str, chain.widths))


def _names(layer: Layer) -> str:
    return ", ".join([layer.weight_name, *layer.own])


def _in_order(state: Mapping[str, np.ndarray]) -> list[str]:
    """`2.weight` before `10.bias`, other names as given; in a module the weight first.

    Files sort names as text; numbers say in which order the layers of a Sequential run.
    """
    seen: dict[str, int] = {}
    for name in state:
        for step in name.split(".")[:-1]:
            seen.setdefault(step, len(seen))

    def place(name: str) -> tuple[list[int], bool]:
        *path, last = name.split(".")
        return [int(step) if step.isdecimal() else seen[step] for step in path], last != "weight"

    return sorted(state, key=place)


@dataclass(frozen=True, eq=False)
class Past:
    """What a fusion leaves to the next one: posteriors that become priors (streaming).

    `parts` holds for every hidden part its atoms and how often each peer used each; `top` the values of the
    output layer that `_top` read, a row for each output.
    """

    step: int
    parts: tuple[tuple[Atoms, np.ndarray], ...]
    top: Atoms

    def history(self, part: int, columns: int) -> History:
        """One part's, with room for the cells that the part above has gained since."""
        atoms, uses = self.parts[part]
        more = ((0, 0), (0, columns - atoms.sums.shape[1]))
        wider = Atoms(np.pad(atoms.sums, more), np.pad(atoms.precisions, more), atoms.counts)
        return History(wider, uses, self.step + 1)


@dataclass(frozen=True, eq=False)
class Fusion:
    """A fused network and where every peer's cells went.

    chain
        The fused network.
    parts
        The outcome of every hidden part, in the network's order.
    peers
        The networks that were fused.
    past
        Hand it to the next `fuse` of the same peers when more networks arrive.
    """

    chain: Chain
    parts: tuple[Matched, ...]
    peers: tuple[Chain, ...]
    past: Past

    @property
    def objective(self) -> float:
        """The sum of the parts' final objectives."""
        return sum(part.objective[-1] for part in self.parts)

    def assignment(self, peer: int) -> tuple[np.ndarray, ...]:
        """For every hidden part, the fused cell that each of a peer's cells became."""
        return tuple(part.assignments[peer] for part in self.parts)

    def embed(self, peer: int, chain: Chain | None = None) -> Chain:
        """A peer's network in the fused shape: the same function, its cells where they were matched.

        Cells that the peer lacks neither feed nor are fed: all their weights are 0. `chain` replaces
        the peer's network by another of its shape (the same one after more training, say).
        """
        source = self._replaced(self.peers[peer], chain, f"peer {peer}")
        places, widths = self._places(peer), self.chain.widths
        layers = []
        for index, layer in enumerate(source.layers):
            weight = np.zeros((widths[index + 1], widths[index]))
            weight[np.ix_(places[index + 1], places[index])] = layer.weight
            own = {name: np.zeros(len(weight)) for name in layer.own}
            for name, value in layer.own.items():
                own[name][places[index + 1]] = value
            layers.append(replace(layer, weight=weight, own=own))
        return Chain(tuple(layers))

    def extract(self, peer: int, chain: Chain | None = None) -> Chain:
        """The fused network's cells that a peer takes part in, in that peer's own order and width.

        `chain` replaces the fused network by another of its shape (the fused one, trained further).
        """
        source, places = self._replaced(self.chain, chain, "the fused network"), self._places(peer)
        return Chain(
            tuple(
                replace(
                    layer,
                    weight=layer.weight[np.ix_(places[index + 1], places[index])],
                    own={name: value[places[index + 1]] for name, value in layer.own.items()},
                )
                for index, layer in enumerate(source.layers)
            )
        )

    @staticmethod
    def _replaced(known: Chain, given: Chain | None, what: str) -> Chain:
        if given is not None and given.widths != known.widths:
            raise ModelError(f"{what} has {known.widths} cells, {given.widths} were given")
        return given or known

    def _places(self, peer: int) -> list[np.ndarray]:
        inputs, outputs = self.chain.widths[0], self.chain.widths[-1]
        return [np.arange(inputs), *self.assignment(peer), np.arange(outputs)]


def fuse(
    chains: Sequence[Chain],
    options: MatchOptions | None = None,
    *,
    variances: Sequence[float] | None = None,
    counts: np.ndarray | None = None,
    bias_mean: float = 0.0,
    groups: Sequence[Sequence[np.ndarray]] | None = None,
    names: Sequence[str] | None = None,
    past: Past | None = None,
    seed: int | np.random.Generator = 0,
) -> Fusion:
    """Fuse networks that differ in their cells' order, their widths and what they were trained on.

    variances
        σ² of each peer; raise it for peers whose networks are noisier. Default: `options.variance`.
    counts
        Training samples `[peers, outputs]` of every class. A peer then counts for an output by its
        share of that class: worth many points when peers have different classes.
    bias_mean
        The prior mean of biases: what biases started from.
    groups
        Labels `[peer][hidden part][cell]`, or None: cells match only within their label.
    past
        The `past` of the same peers' last fusion: its posterior is this one's prior, so that networks
        trained on new samples add to it. Peers keep their places in `chains`.
    seed
        Orders the sweeps; see `match`.
    """
    options = options or MatchOptions()
    names = names or [f"network {index}" for index in range(len(chains))]
    check_alike(chains, names)
    spread = peer_variances(names, options, variances)
    shares = class_shares(chains, counts)
    rng = np.random.default_rng(seed)
    first = chains[0]
    peers = range(len(chains))
    outputs = first.widths[-1]
    # Where the outputs of every peer's layer are in the fused network; outputs keep their places.
    above = [np.arange(outputs) for _ in peers]
    width, above_precision = outputs, [shares[j] / spread[j] for j in peers]
    parts: list[Matched] = []
    top, top_sums = _top(chains, shares / spread[:, None], options, bias_mean, past)
    layers: list[Layer] = [top]
    memory: list[tuple[Atoms, np.ndarray]] = []
    for part in range(first.hidden, 0, -1):
        below = first.layers[part - 1]
        inputs = first.widths[0] if part == 1 else 0
        own_means = _own_means(chains, part - 1, bias_mean)
        mean = np.concatenate([np.zeros(inputs), own_means, np.zeros(width)])
        cells = []
        for j in peers:
            out = np.zeros((chains[j].layers[part - 1].cells, width))
            out[:, above[j]] = chains[j].layers[part].weight.T
            seen = np.zeros(width)
            seen[above[j]] = above_precision[j]
            own = _own(chains[j].layers[part - 1])
            blocks, precision = [own, out], [np.full(own.shape[1], 1 / spread[j]), seen]
            if part == 1:  # inputs mean the same to all; lower parts are not matched yet
                blocks.insert(0, chains[j].layers[0].weight)
                precision.insert(0, np.full(first.widths[0], 1 / spread[j]))
            group = None if groups is None else np.asarray(groups[j][part - 1])
            cells.append(Cells(np.hstack(blocks), np.concatenate(precision), group))
        history = past.history(part - 1, len(mean)) if past else None
        found = match(cells, options, mean=mean, seed=rng, history=history)
        incoming, own, out = np.split(found.values, [inputs, inputs + len(below.own)], axis=1)
        layers[0] = replace(layers[0], weight=out.T.copy())
        layers.insert(
            0, replace(below, weight=incoming, own=dict(zip(below.own, own.T, strict=True)))
        )
        parts.insert(0, found)
        memory.insert(0, (found.atoms, _uses(found, history)))
        above = list(found.assignments)
        width = len(found.atoms)
        above_precision = [np.full(len(above[j]), 1 / spread[j]) for j in peers]
    left = Past(past.step + 1 if past else 1, tuple(memory), top_sums)
    return Fusion(Chain(tuple(layers)), tuple(parts), tuple(chains), left)


def _top(
    chains: Sequence[Chain],
    precision: np.ndarray,
    options: MatchOptions,
    bias_mean: float,
    past: Past | None,
) -> tuple[Layer, Atoms]:
    """The output layer's own values; its weights too when no hidden part decides about them."""
    last, columns = chains[0].layers[-1], None if not chains[0].hidden else 0
    values = [np.hstack([_own(c.layers[-1]), c.layers[-1].weight[:, :columns]]) for c in chains]
    sums = np.einsum("jk,jkc->kc", precision, np.stack(values))
    amounts = np.broadcast_to(precision.sum(0)[:, None], sums.shape)
    atoms = Atoms(sums, amounts, np.full(len(sums), len(chains)))
    if past is not None:
        atoms = past.top.plus(atoms)
    mean = np.zeros(sums.shape[1])
    mean[: len(last.own)] = _own_means(chains, -1, bias_mean)
    read = atoms.read(options.prior_precision, mean, shrink=options.shrink)
    own, weight = np.split(read, [len(last.own)], axis=1)
    named = dict(zip(last.own, own.T, strict=True))
    return replace(last, weight=last.weight if columns == 0 else weight, own=named), atoms


def _uses(found: Matched, history: History | None) -> np.ndarray:
    """How often each peer has used each atom, this step included."""
    uses = np.zeros((len(found.assignments), len(found.atoms)), dtype=np.int64)
    if history is not None:
        uses[:, : history.uses.shape[1]] = history.uses
    for peer, atoms in enumerate(found.assignments):
        uses[peer, atoms] += 1
    return uses


def _own(layer: Layer) -> np.ndarray:
    if not layer.own:
        return np.empty((layer.cells, 0))
    return np.stack(list(layer.own.values()), axis=1)


def _own_means(chains: Sequence[Chain], layer: int, bias_mean: float) -> list[float]:
    """Prior means of a layer's values per cell: biases as told, the others their average."""
    return [
        bias_mean
        if name.rpartition(".")[2] == "bias"
        else float(np.mean([chain.layers[layer].own[name].mean() for chain in chains]))
        for name in chains[0].layers[layer].own
    ]


def peer_variances(
    names: Sequence[str], options: MatchOptions, variances: Sequence[float] | None
) -> np.ndarray:
    """σ² of every peer."""
    if variances is None:
        return np.full(len(names), options.variance)
    if len(variances) != len(names):
        raise ModelError(
            f"fuse: {len(variances)} variances were given for {len(names)} networks; give one each"
        )
    for name, value in zip(names, variances, strict=True):
        check_number(f"matching: variance (σ²) of {name}", value, above=0)
    return np.asarray(variances, dtype=np.float64)


def class_shares(chains: Sequence[Chain], counts: np.ndarray | None) -> np.ndarray:
    """Each peer's share of each class; a class that nobody saw is shared evenly."""
    peers, outputs = len(chains), chains[0].widths[-1]
    if counts is None:
        return np.ones((peers, outputs))
    counts = np.asarray(counts, dtype=np.float64)
    if counts.shape != (peers, outputs):
        raise ModelError(
            f"fuse: counts of shape {counts.shape} were given; {peers} networks with {outputs} outputs "
            f"need {(peers, outputs)}"
        )
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ModelError("fuse: a sample count is negative or not finite")
    total = counts.sum(axis=0)
    return np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / peers)
