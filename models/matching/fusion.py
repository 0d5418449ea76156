"""Fuse whole networks of dense layers: match their hidden parts one by one, from the outputs to the inputs.

A *part* is the cells (neurons) of one layer; the part *above* it is the next one towards the outputs. When a
part is matched, the part above it is fused already, so the weights between the two can be compared.

An *atom* is a cell of the fused network. As in assignment.py, a cell of a peer is its atom plus Gaussian
noise of variance σ², and its *precision* is 1/σ²; `Atoms` has sums over cells, weighted by their precisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ModelError, check_number
from .assignment import Atoms, Cells, History, MatchOptions, MatchResult, match


@dataclass(frozen=True, eq=False)
class Layer:
    """One dense layer: `weight` [cells, inputs], and tensors with one value per cell (bias, PReLU slopes, …).

    Each of these values acts on its own cell only. `weight_name` and the keys of `per_cell` are the names in
    the network's state dict.
    """

    weight: np.ndarray
    per_cell: Mapping[str, np.ndarray]
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
    def hidden_parts(self) -> int:
        """The number of hidden parts."""
        return len(self.layers) - 1

    @property
    def size(self) -> int:
        """How many parameters the network has."""
        return sum(
            layer.weight.size + sum(v.size for v in layer.per_cell.values())
            for layer in self.layers
        )

    def state(self, dtype: np.dtype | type = np.float32) -> dict[str, np.ndarray]:
        """Return a state dict of arrays; its keys are those of the state dict that `read` was given."""
        state: dict[str, np.ndarray] = {}
        for layer in self.layers:
            state[layer.weight_name] = layer.weight.astype(dtype)
            state.update({name: value.astype(dtype) for name, value in layer.per_cell.items()})
        return state

    @classmethod
    def read(
        cls,
        state: Mapping[str, np.ndarray],
        name: str = "the network",
        order: Sequence[str] | None = None,
    ) -> Chain:
        """Read a state dict: matrices are layers, vectors belong to the layer before them.

        name
            What error messages call this network: a file or a peer.
        order
            The keys of `state` in the order in which the layers run. By default this is the state dict's
            order, with numbered layers sorted by number. Give it if the names come from a file, which may
            list them alphabetically.
        """
        layers: list[tuple[str, np.ndarray, dict[str, np.ndarray]]] = []
        for key in order or _run_order(state):
            value = np.asarray(state[key], dtype=np.float64)
            if not np.isfinite(value).all():
                raise ModelError(
                    f"{name}: layer {key!r} has {int((~np.isfinite(value)).sum())} values that are not "
                    "finite; leave this network out, or train it again at a lower learning rate"
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
                if _is_normalization(key, state):
                    raise ModelError(
                        f"{name}: {key!r} seems to belong to a normalization such as LayerNorm, which "
                        "computes other values if cells are added; only chains of dense layers can be fused"
                    )
                layers[-1][2][key] = value
            else:
                raise ModelError(
                    f"{name}: {key!r} of shape {value.shape} is neither a dense layer nor one value per "
                    "cell of the layer before it; only chains of dense layers can be fused"
                )
        if not layers:
            raise ModelError(f"{name}: there is no dense layer in it")
        # Sorted by name, because the networks to fuse may list the same tensors in different orders.
        return cls(
            tuple(
                Layer(weight, dict(sorted(per_cell.items())), key)
                for key, weight, per_cell in layers
            )
        )


def check_same_form(chains: Sequence[Chain], names: Sequence[str]) -> None:
    """Raise, naming the layer, unless all networks have the same layers, inputs, outputs and tensors.

    Their hidden widths may differ.
    """
    if not chains:
        raise ModelError("fuse: no networks were given")
    if len(names) != len(chains):
        raise ModelError(f"fuse: {len(names)} names were given for {len(chains)} networks")
    first = chains[0]
    for name, chain in zip(names[1:], chains[1:], strict=True):
        if len(chain.layers) != len(first.layers):
            raise ModelError(
                f"{name} has {len(chain.layers)} layers (layout {_layout(chain)}), {names[0]} has "
                f"{len(first.layers)} ({_layout(first)}); only networks with equally many layers can be fused"
            )
        for expected, layer in zip(first.layers, chain.layers, strict=True):
            if _format_names(expected) != _format_names(layer):
                raise ModelError(
                    f"layer {layer.weight_name!r} of {name} holds {_format_names(layer)}, the one of "
                    f"{names[0]} holds {_format_names(expected)}; only networks whose layers hold tensors "
                    "of the same names can be fused"
                )
        for kind, index in (("inputs", 0), ("outputs", -1)):
            if chain.widths[index] != first.widths[index]:
                layer = chain.layers[index].weight_name
                raise ModelError(
                    f"layer {layer!r} of {name} has {chain.widths[index]} {kind}, that of {names[0]} has "
                    f"{first.widths[index]}; only hidden widths may differ"
                )


def part_names(chain: Chain) -> tuple[str, ...]:
    """Return the names of the hidden parts: their layers' names without `.weight`."""
    return tuple(layer.weight_name.removesuffix(".weight") for layer in chain.layers[:-1])


def _layout(chain: Chain) -> str:
    """Return the cells per part as configs write them: `784=300=10` has 784 inputs and 10 outputs."""
    return "=".join(map(str, chain.widths))


def _format_names(layer: Layer) -> str:
    """Return the names of a layer's tensors, for errors and to compare layers."""
    return ", ".join([layer.weight_name, *layer.per_cell])


def _run_order(state: Mapping[str, np.ndarray]) -> list[str]:
    """Sort names by the order in which layers run: modules by number, or by first appearance.

    `2.weight` comes before `10.bias`, as in a Sequential, although files sort names as text. Siblings are
    sorted by number only if all their names are numbers. In a layer the weight is first.
    """
    ranks: dict[str, dict[str, int]] = {}  # by parent module, the place of each of its modules
    for name in state:
        parent = ""
        for module in name.split(".")[:-1]:
            siblings = ranks.setdefault(parent, {})
            siblings.setdefault(module, len(siblings))
            parent += f".{module}"
    for siblings in ranks.values():
        if all(module.isdecimal() for module in siblings):
            siblings.update((module, int(module)) for module in siblings)

    def sort_key(name: str) -> tuple[list[int], bool]:
        *path, last = name.split(".")
        places, parent = [], ""
        for module in path:
            places.append(ranks[parent][module])
            parent += f".{module}"
        return places, last != "weight"

    return sorted(state, key=sort_key)


def _is_normalization(key: str, state: Mapping[str, np.ndarray]) -> bool:
    """Return whether the module of a tensor has a weight and a bias, both with one value per cell."""
    module = key.rpartition(".")[0]
    tensors = [state.get(f"{module}.{kind}") for kind in ("weight", "bias")]
    return all(tensor is not None and np.ndim(tensor) == 1 for tensor in tensors)


@dataclass(frozen=True, eq=False)
class Posterior:
    """What a fusion knows of its atoms. Pass it as the prior when the same peers are fused again.

    fusions: how many fusions it sums up.
    parts: for every hidden part its atoms, and an array [peers, atoms]: in how many fusions a cell of this
        peer was assigned to this atom.
    output: the output layer, with one atom for each output.
    """

    fusions: int
    parts: tuple[tuple[Atoms, np.ndarray], ...]
    output: Atoms

    def history_of_part(self, part: int, columns: int) -> History:
        """Return what `match` must know of the earlier fusions of one hidden part.

        The atoms are padded to `columns`, because the part above may have more cells than before.
        """
        atoms, uses = self.parts[part]
        padding = ((0, 0), (0, columns - atoms.sums.shape[1]))
        sums, precisions = np.pad(atoms.sums, padding), np.pad(atoms.precisions, padding)
        return History(Atoms(sums, precisions, atoms.counts), uses, self.fusions + 1)


@dataclass(frozen=True, eq=False)
class Fusion:
    """A fused network, and to which fused cell every cell of every peer was assigned.

    chain
        The fused network.
    parts
        The result of matching every hidden part, in the network's order.
    peers
        The networks that were fused.
    posterior
        Pass it as `prior` to the next `fuse` of the same peers, when they have trained new networks.
    """

    chain: Chain
    parts: tuple[MatchResult, ...]
    peers: tuple[Chain, ...]
    posterior: Posterior

    @property
    def objective(self) -> float:
        """The sum over the hidden parts of the log posterior, up to a constant, at the end of matching."""
        return sum(part.objective[-1] for part in self.parts)

    def assignment(self, peer: int) -> tuple[np.ndarray, ...]:
        """Return, for every hidden part, the fused cell of each of a peer's cells."""
        return tuple(part.assignments[peer] for part in self.parts)

    def embed(self, peer: int, chain: Chain | None = None) -> Chain:
        """Return a peer's network with the fused network's widths and cell order; it computes the same.

        Cells that the peer lacks have only zero weights. If `chain` is given, it is used instead of the
        peer's network; it must have the same widths, like the same network after more training.
        """
        source = self._chain_or_default(chain, self.peers[peer], f"peer {peer}")
        cells, widths = self._cells_by_part(peer), self.chain.widths
        layers = []
        for index, layer in enumerate(source.layers):
            inputs, outputs = cells[index], cells[index + 1]
            weight = np.zeros((widths[index + 1], widths[index]))
            weight[np.ix_(outputs, inputs)] = layer.weight
            per_cell = {name: np.zeros(len(weight)) for name in layer.per_cell}
            for name, value in layer.per_cell.items():
                per_cell[name][outputs] = value
            layers.append(replace(layer, weight=weight, per_cell=per_cell))
        return Chain(tuple(layers))

    def extract(self, peer: int, chain: Chain | None = None) -> Chain:
        """Return the fused network reduced to the cells that a peer has, in that peer's own order.

        If `chain` is given, it is used instead of the fused network; it must have the same widths, like the
        fused network after more training.
        """
        source = self._chain_or_default(chain, self.chain, "the fused network")
        cells = self._cells_by_part(peer)
        return Chain(
            tuple(
                replace(
                    layer,
                    weight=layer.weight[np.ix_(cells[index + 1], cells[index])],
                    per_cell={
                        name: value[cells[index + 1]] for name, value in layer.per_cell.items()
                    },
                )
                for index, layer in enumerate(source.layers)
            )
        )

    @staticmethod
    def _chain_or_default(chain: Chain | None, default: Chain, name: str) -> Chain:
        """Return `chain`, or the default; raise if their widths differ."""
        if chain is not None and chain.widths != default.widths:
            raise ModelError(
                f"the layers of {name} have {default.widths} cells, those of the network that was given "
                f"{chain.widths}"
            )
        return chain or default

    def _cells_by_part(self, peer: int) -> list[np.ndarray]:
        """Return, for every part from inputs to outputs, the fused cell of each of a peer's cells."""
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
    prior: Posterior | None = None,
    seed: int | np.random.Generator = 0,
) -> Fusion:
    """Fuse networks that differ in their cells' order, their hidden widths and their training data.

    variances
        σ² of each peer: how far its cells are from their atoms. Raise it for peers whose networks are
        noisier. Default: `options.variance`.
    counts
        Training samples of every class, `[peers, outputs]`. An output then weighs each peer by its fraction
        of the samples of that class, which raises the accuracy considerably if peers have different classes.
        With counts, the peers' weights for a class add up to 1; without, to the number of peers. So with
        counts the prior has more influence on the outputs.
    bias_mean
        The prior mean of biases: the value from which training started.
    groups
        Labels `[peer][hidden part][cell]`: only cells with equal labels match. None: all cells may match.
    names
        What error messages call the networks.
    prior
        The `posterior` of the last fusion of the same peers, in the same order: networks that were trained on
        new samples then refine the fused network.
    seed
        Of the random order in which `match` assigns the cells of one peer after another.
    """
    options = options or MatchOptions()
    names = names or [f"network {index}" for index in range(len(chains))]
    check_same_form(chains, names)
    peer_variance = peer_variances(names, options, variances)
    shares = class_shares(chains, counts)
    rng = np.random.default_rng(seed)
    first = chains[0]
    peers = range(len(chains))
    outputs = first.widths[-1]
    output_precisions = shares / peer_variance[:, None]
    # Of each peer, the part above the one that is matched: at first the outputs, which keep their order.
    above = [_PartAbove(np.arange(outputs), output_precisions[peer], outputs) for peer in peers]
    parts: list[MatchResult] = []
    output_layer, output_atoms = _fuse_outputs(chains, output_precisions, options, bias_mean, prior)
    layers: list[Layer] = [output_layer]
    posteriors: list[tuple[Atoms, np.ndarray]] = []
    for part in reversed(range(first.hidden_parts)):
        layer = first.layers[part]
        # Only in the first hidden part the incoming weights are compared too: see _cells_of_part.
        incoming_columns = first.widths[0] if part == 0 else 0
        per_cell_means = _per_cell_means(chains, part, bias_mean)
        prior_mean = np.concatenate(
            [np.zeros(incoming_columns), per_cell_means, np.zeros(above[0].fused_cells)]
        )
        cells = [
            _cells_of_part(
                chains[peer], part, above[peer], 1 / peer_variance[peer],
                None if groups is None else np.asarray(groups[peer][part]),
            )
            for peer in peers
        ]  # fmt: skip
        history = prior.history_of_part(part, len(prior_mean)) if prior else None
        result = match(cells, options, mean=prior_mean, seed=rng, history=history)
        incoming, per_cell, outgoing = np.split(
            result.values, [incoming_columns, incoming_columns + len(layer.per_cell)], axis=1
        )
        # The outgoing weights are those of the layer above. The layer of this part gets its weights when the
        # part below is matched; until then `incoming` has no columns, except in the first hidden part.
        layers[0] = replace(layers[0], weight=outgoing.T.copy())
        by_name = dict(zip(layer.per_cell, per_cell.T, strict=True))
        layers.insert(0, replace(layer, weight=incoming, per_cell=by_name))
        parts.insert(0, result)
        posteriors.insert(0, (result.atoms, _uses(result, history)))
        above = [
            _PartAbove(
                assignment, np.full(len(assignment), 1 / peer_variance[peer]), len(result.atoms)
            )
            for peer, assignment in enumerate(result.assignments)
        ]
    fusions = prior.fusions + 1 if prior else 1
    posterior = Posterior(fusions, tuple(posteriors), output_atoms)
    return Fusion(Chain(tuple(layers)), tuple(parts), tuple(chains), posterior)


@dataclass(frozen=True, eq=False)
class _PartAbove:
    """One peer's cells of a part that is fused already: the fused cell (its index) and precision of each.

    `fused_cells` is the number of fused cells of the part.
    """

    assignment: np.ndarray
    precision: np.ndarray
    fused_cells: int


def _cells_of_part(
    chain: Chain, part: int, above: _PartAbove, precision: float, group: np.ndarray | None
) -> Cells:
    """Return the cells of a hidden part of one peer, in the form in which `match` compares them.

    The columns are the weights from the inputs (of the first hidden part only: other parts are not matched
    with each other yet, so weights from their cells cannot be compared), the values per cell, and the weights
    to the fused cells of the part above.
    """
    layer, next_layer = chain.layers[part], chain.layers[part + 1]
    outgoing = np.zeros((layer.cells, above.fused_cells))
    outgoing[:, above.assignment] = next_layer.weight.T
    outgoing_precision = np.zeros(above.fused_cells)
    outgoing_precision[above.assignment] = above.precision
    incoming = layer.weight if part == 0 else np.empty((layer.cells, 0))
    own_values = np.hstack([incoming, _per_cell_matrix(layer)])
    own_precision = np.full(own_values.shape[1], precision)
    return Cells(
        np.hstack([own_values, outgoing]),
        np.concatenate([own_precision, outgoing_precision]),
        group,
    )


def _fuse_outputs(
    chains: Sequence[Chain],
    precision: np.ndarray,
    options: MatchOptions,
    bias_mean: float,
    prior: Posterior | None,
) -> tuple[Layer, Atoms]:
    """Fuse the output layer's biases, and its weights if there is no hidden part; return layer and atoms.

    With hidden parts, the output weights are fused together with the cells of the last hidden part.

    precision: of each peer's outputs, [peers, outputs].
    """
    last, has_hidden = chains[0].layers[-1], chains[0].hidden_parts > 0
    columns = slice(0) if has_hidden else slice(None)  # no column of the weights, or all
    values = [
        np.hstack([_per_cell_matrix(chain.layers[-1]), chain.layers[-1].weight[:, columns]])
        for chain in chains
    ]
    # p: peers, o: outputs, c: columns
    sums = np.einsum("po,poc->oc", precision, np.stack(values))
    precisions = np.broadcast_to(precision.sum(0)[:, None], sums.shape)
    atoms = Atoms(sums, precisions, np.full(len(sums), len(chains)))
    if prior is not None:
        atoms = prior.output.plus(atoms)
    prior_mean = np.zeros(sums.shape[1])
    prior_mean[: len(last.per_cell)] = _per_cell_means(chains, -1, bias_mean)
    fused = atoms.read(options.prior_precision, prior_mean, shrink=options.shrink)
    per_cell, weight = np.split(fused, [len(last.per_cell)], axis=1)
    by_name = dict(zip(last.per_cell, per_cell.T, strict=True))
    return replace(last, weight=last.weight if has_hidden else weight, per_cell=by_name), atoms


def _uses(result: MatchResult, history: History | None) -> np.ndarray:
    """Return [peers, atoms] in how many fusions, with this one, a cell of the peer was in the atom."""
    uses = np.zeros((len(result.assignments), len(result.atoms)), dtype=np.int64)
    if history is not None:
        uses[:, : history.uses.shape[1]] = history.uses
    for peer, assignment in enumerate(result.assignments):
        uses[peer, assignment] += 1
    return uses


def _per_cell_matrix(layer: Layer) -> np.ndarray:
    """Return a layer's per-cell tensors as the columns of a matrix [cells, tensors]."""
    if not layer.per_cell:
        return np.empty((layer.cells, 0))
    return np.stack(list(layer.per_cell.values()), axis=1)


def _per_cell_means(chains: Sequence[Chain], layer: int, bias_mean: float) -> list[float]:
    """Return the prior means of a layer's per-cell tensors: `bias_mean` for biases, else the peers' mean."""
    return [
        bias_mean
        if name.rpartition(".")[2] == "bias"
        else float(np.mean([chain.layers[layer].per_cell[name].mean() for chain in chains]))
        for name in chains[0].layers[layer].per_cell
    ]


def peer_variances(
    names: Sequence[str], options: MatchOptions, variances: Sequence[float] | None
) -> np.ndarray:
    """Return σ² of every peer; raise if there is not one positive number for each."""
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
    """Return by how much each output weighs each peer [peers, outputs]: its fraction of that class's samples.

    Peers have equal fractions of a class without samples. Without `counts`, all weights are 1: see `fuse`.
    """
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
