"""`gossamer fuse`: several networks become one, their cells matched instead of averaged by place.

The command, the files that it reads and writes, and the order in which a file's layers run. Like the modules
in cli/, it loads torch and numpy only when they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from safetensors import SafetensorError, safe_open

from ...models import ModelError
from ..errors import ConfigError
from ..results import atomic_path, find_run
from . import console
from .console import YesOrNo, command, load_torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ...models.matching import Chain, Fusion, Layer

ACTIVATIONS = ("relu", "sigmoid", "tanh", "none")


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Options of matching: fields of `models.matching.MatchOptions`, apart from the variance.

    Args:
        prior_variance: σ0² of the prior.
        mass: γ0: raise it for more cells.
        kind: The prior on sizes: printed (the paper's), set or efpf.
        kl: MAGI's λ from 0 to 1: raise it for fewer cells.
        limit: Cells per part, at most; the widest network always fits.
        sweeps: Passes over the networks, at most.
        shrink: Let the prior shrink what few networks agree on.
    """

    prior_variance: float = 10.0
    mass: float = 1.0
    kind: str = "printed"
    kl: float = 0.0
    limit: int = 700
    sweeps: int = 20
    shrink: YesOrNo = True


@command("fuse")
def fuse_command(
    files: list[Path],
    *,
    out: Annotated[Path, typer.Option("--out", "-o")],
    force: bool = False,
    variance: list[float] | None = None,
    matching: Matching,
    bias_mean: float = 0.0,
    counts: Path | None = None,
    within_models: bool = False,
    order: str | None = None,
    data: str | None = None,
    activation: str | None = None,
    seed: int = 0,
) -> None:
    """Fuse networks whose cells are in another order, or of other widths, into one.

    Cells of different networks that do the same become one cell; the others are kept. The files may
    come from `gossamer swarm`, `gossamer join`, or from any torch network of dense layers. A folder
    stands for all networks in it, or in the latest of its runs: a finished swarm becomes one network. Files
    of gossamer say in which order their layers run; for others it follows from shapes and numbers, or
    --order says it.

    Args:
        files: Networks as safetensors, of one depth; or a swarm's results folder.
        out: The fused network.
        force: Replace OUT if it exists.
        variance: σ²: one, or one per network. Lower it for larger networks.
        bias_mean: What biases started from.
        counts: JSON: samples per class, one list per network. Weighs the outputs.
        within_models: Match only inside the same partial model.
        order: NAME,NAME,…: the layers as they run, for files that do not say it.
        data: Report accuracies on this data set; see gossamer data.
        activation: With --data: relu, sigmoid, tanh or none.
        seed: Orders the sweeps.
    """
    load_torch()
    from ...models.matching import MatchOptions, fuse

    check_target(out, force=force)
    files = network_files(files, out)
    variances = variance or [1.0]
    common: dict[str, Any] = asdict(matching)
    options = MatchOptions(variance=variances[0] if len(variances) == 1 else 1.0, **common)
    layers = None if order is None else [name.strip() for name in order.split(",")]
    networks = [read_network(path, layers) for path in files]
    fused = fuse(
        [network.chain for network in networks],
        options,
        variances=variances if len(variances) > 1 else None,
        counts=read_counts(counts) if counts else None,
        bias_mean=bias_mean,
        groups=model_groups(networks) if within_models else None,
        names=[str(network.path) for network in networks],
        seed=seed,
    )
    scores = _scores(data, activation, networks, fused.chain) if data else []
    about = {
        "files": [path.name for path in files],
        "widths": list(fused.chain.widths),
        "objective": fused.objective,
        "accuracy": scores[-1] if scores else None,
    }
    write_network(out, fused.chain, networks[0].dtype, {"fusion": json.dumps(about)})
    _report(fused, networks, scores)
    console.print_written([out])


def _report(fused: Fusion, networks: Sequence[NetworkFile], scores: Sequence[float]) -> None:
    from ...models.matching import part_names

    rows = []
    widths = fused.chain.widths[1:]
    for name, part, width in zip(part_names(fused.chain), fused.parts, widths, strict=False):
        given = [len(cells) for cells in part.assignments]
        # created: beyond the widest network; matched: given cells that share theirs with another network's
        cells = name, sum(given), width, part.matched, width - max(given)
        rows.append((*cells, f"{part.objective[-1]:.1f}", f"{part.ended}, {part.sweeps}"))
    header = ["part", "given", "fused", "matched", "created", "objective", "ended, sweeps"]
    if rows:
        console.table("cells, part by part", header, rows)
    chains = [(str(network.path), network.chain) for network in networks]
    sizes: list[list[object]] = [
        [name, "=".join(map(str, chain.widths)), chain.size]
        for name, chain in [*chains, ("fused", fused.chain)]
    ]
    for row, score in zip(sizes, scores, strict=False):
        row.append(f"{score:.3f}")
    header = ["network", "layout", "parameters", "accuracy"]
    console.table("networks", header[: len(sizes[0])], sizes)
    total = sum(network.chain.size for network in networks)
    console.say(f"fused size: {fused.chain.size / total:.1%} of all networks together")


def _scores(
    data: str, activation: str | None, networks: Sequence[NetworkFile], fused: Chain
) -> list[float]:
    """Accuracy of every network, the fused one last."""
    from ..data import load

    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"--activation {activation}: there are {', '.join(ACTIVATIONS)}")
    if activation is None and any(_slopes(layer) is None for layer in fused.layers[:-1]):
        raise ConfigError(
            "--data needs --activation as well, for files do not say what hidden cells compute: "
            f"{', '.join(ACTIVATIONS)}"
        )
    found = load(data)
    samples = found.test or found.train
    inputs, outputs = fused.widths[0], fused.widths[-1]
    x = samples.flat()
    if x.shape[1] != inputs or found.classes > max(outputs, 2):
        raise ModelError(
            f"--data {data}: has {x.shape[1]} inputs and {found.classes} classes, the networks have "
            f"{inputs} inputs and {outputs} outputs"
        )
    return [
        accuracy(logits(chain, x, activation or "relu"), samples.y)
        for chain in [*(network.chain for network in networks), fused]
    ]


# --- what networks answer ---------------------------------------------------------------------------


def logits(chain: Chain, x: Tensor, activation: str = "relu") -> Tensor:
    """A chain's outputs before any last activation."""
    import torch

    hidden = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": lambda h: h}
    h = x.double()
    for index, layer in enumerate(chain.layers):
        own = {name.rpartition(".")[2]: value for name, value in layer.own.items()}
        h = h @ torch.from_numpy(layer.weight).T
        if "bias" in own:
            h = h + torch.from_numpy(own["bias"])
        if index < chain.hidden:
            slopes = _slopes(layer)
            h = hidden[activation](h) if slopes is None else torch.where(h > 0, h, slopes * h)
    return h


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """The share of samples whose most active output is the label; a lone output says yes above 0."""
    if outputs.shape[1] == 1:
        return float(((outputs[:, 0] > 0) == (labels > 0)).double().mean())
    return float((outputs.argmax(dim=1) == labels).double().mean())


def _slopes(layer: Layer) -> Tensor | None:
    """PReLU keeps its slopes under the name `weight`, one per cell."""
    import torch

    found = next((v for name, v in layer.own.items() if not name.endswith("bias")), None)
    return None if found is None else torch.from_numpy(found)


# --- networks on disk: read to be fused, written whole or not at all --------------------------------


@dataclass(frozen=True, eq=False)
class NetworkFile:
    """A network and what its file says about it."""

    path: Path
    chain: Chain
    dtype: type
    """numpy's float32, or float64 if any of its values has it."""
    slices: dict[str, list[list[int]]] | None


def read_network(path: Path, order: Sequence[str] | None = None) -> NetworkFile:
    """Read a safetensors file of dense layers, as `SlicedNetwork.save` or torch users write them.

    order: names of layers as they run, for files that do not say it; see `layer_order`.
    """
    import numpy as np
    import torch

    from ...models.matching import Chain

    if not path.is_file():
        raise ModelError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors ({error})") from None
    kinds = {value.dtype for value in state.values()}
    if odd := [kind for kind in kinds if not kind.is_floating_point]:
        raise ModelError(f"{path}: holds values of type {odd[0]}; only dense layers can be fused")
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    chain = Chain.read(
        {name: value.double().numpy() for name, value in state.items()},
        str(path),
        layer_order(shapes, metadata, order, str(path)),
    )
    dtype = np.float64 if torch.float64 in kinds else np.float32
    try:
        slices = json.loads(metadata["slices"]) if "slices" in metadata else None
    except json.JSONDecodeError:
        raise ModelError(f"{path}: its metadata about slices is damaged") from None
    return NetworkFile(path, chain, dtype, slices)


def network_files(paths: Sequence[Path], out: Path) -> list[Path]:
    """Files as they are, and of every folder the networks in it, by number or name; never `out` itself.

    A folder is what a swarm left behind: one safetensors file per peer that finished. Of a folder with
    several runs, it is the latest.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        path = find_run(path)
        inside = [each for each in path.glob("*.safetensors") if each.resolve() != out.resolve()]
        if not inside:
            why = "; its peers have not finished" if any(path.glob("*.checkpoint")) else ""
            raise ModelError(
                f"{path}: there is no network (*.safetensors) in this folder{why}; give the folder that "
                "gossamer swarm or gossamer simulate --networks wrote"
            )
        found += sorted(inside, key=lambda each: (len(each.stem), each.stem))
    return found


def check_target(path: Path, *, force: bool) -> None:
    """Refuse an output that exists, or a folder that does not, before any work is done."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise ModelError(f"{path} exists: give another name, or --force to replace it")
    if not path.parent.is_dir():
        raise ModelError(f"{path}: there is no folder {path.parent}; make it first")


def write_network(path: Path, chain: Chain, dtype: type, metadata: dict[str, str]) -> None:
    """Write a network as safetensors; a file of that name is replaced at once or not at all.

    The order of its layers joins the metadata.
    """
    import numpy as np
    from safetensors.numpy import save_file

    from ...models import LAYER_ORDER

    state = {name: np.ascontiguousarray(value) for name, value in chain.state(dtype).items()}
    with atomic_path(path) as part:
        save_file(state, part, {**metadata, LAYER_ORDER: json.dumps(list(state))})


def model_groups(networks: Sequence[NetworkFile]) -> list[list[np.ndarray]]:
    """Labels `[network][hidden part][cell]`: equal for cells of one partial model in all files."""
    import numpy as np

    number: dict[str, int] = {}
    found = []
    for network in networks:
        if network.slices is None:
            raise ModelError(
                f"{network.path}: says nothing about its partial models, so cells cannot be kept "
                "inside them; save it with SlicedNetwork.save, or leave out --within-models"
            )
        labels = [np.full(width, -1) for width in network.chain.widths]
        for model, parts in network.slices.items():
            for label, cells in zip(labels, parts, strict=True):
                label[cells] = number.setdefault(model, len(number))
        found.append(labels[1:-1])
    return found


def read_counts(path: Path) -> np.ndarray:
    """Sample counts: a JSON list with one list of numbers per network."""
    import numpy as np

    try:
        return np.array(json.loads(path.read_text("utf-8")), dtype=np.float64)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path}: is no list of lists of numbers, one list per network ({error})"
        ) from None


# --- the order of layers ----------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]

_STEPS = 10_000
"""Partial chains that are tried before the user is asked; a network of 50 layers needs a few hundred."""


def layer_order(
    shapes: Shapes, metadata: Mapping[str, str], given: Sequence[str] | None, file: str
) -> list[str]:
    """The names of a file's values in the order in which they run, each layer's weight first.

    A safetensors file lists its values by name, which says nothing about the order in which they run. What
    says it, from the surest on: the file's own metadata (`SlicedNetwork.save` writes it), the user, the
    shapes of the layers where they fit together in one way only, and numbers in names, as those of a
    Sequential.

    given: what the user says: names of layers, or of values, in order.

    Raises ModelError, with the remedy, for an order that does not fit, and where none can be told.
    """
    layers = _Layers(shapes, file)
    recorded = layers.recorded(metadata)
    listed = layers.listed(given) if given else None
    if recorded is None:
        return layers.with_rest(layers.by_shapes() if listed is None else listed)
    asked, own = layers.weights_of(listed or recorded), layers.weights_of(recorded)
    if asked != own:
        raise ModelError(
            f"{file}: --order says {_join(asked)}, the file itself says {_join(own)}; leave out --order"
        )
    return recorded


@dataclass(frozen=True)
class _Layers:
    """The values of a file by their shapes; those with two dimensions are the weights of its layers."""

    shapes: Shapes
    file: str

    def weights_of(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if len(self.shapes[name]) == 2]

    def recorded(self, metadata: Mapping[str, str]) -> list[str] | None:
        """The order that the file's metadata gives, if any."""
        from ...models import LAYER_ORDER

        if LAYER_ORDER not in metadata:
            return None
        try:
            names = json.loads(metadata[LAYER_ORDER])
            if sorted(names) == sorted(self.shapes):
                return names
        except (json.JSONDecodeError, TypeError):
            pass
        raise ModelError(
            f"{self.file}: its metadata about the order of layers is damaged; save it again"
        )

    def listed(self, given: Sequence[str]) -> list[str]:
        """The values that the user named, a layer standing for its weight and what is beside it."""
        shapes, where = self.shapes, f"{self.file}: --order"
        names: list[str] = []
        for one in given:
            meant = [one] if one in shapes else sorted(n for n in shapes if _module(n) == one)
            if not meant:
                known = dict.fromkeys(
                    _module(name) or name for name in sorted(shapes, key=_natural)
                )
                raise ModelError(
                    f"{where} names {one!r}, which is no layer of it; its layers are {_join(known)}"
                )
            names += sorted(meant, key=lambda name: len(shapes[name]) != 2)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ModelError(f"{where} names {_layer(twice)!r} twice")
        if missing := [name for name in self.weights_of(shapes) if name not in names]:
            raise ModelError(f"{where} leaves out {_join(missing)}; name every layer")
        for one, other in pairwise(self.weights_of(names)):
            if shapes[one][0] != shapes[other][1]:
                raise ModelError(
                    f"{where} puts {_layer(other)!r}, which takes {shapes[other][1]} inputs, behind "
                    f"{_layer(one)!r}, which has {shapes[one][0]} cells"
                )
        return names

    def by_shapes(self) -> list[str]:
        """The one chain that the layers form; where shapes allow several, numbers in their names decide."""
        weights = self.weights_of(self.shapes)
        chains = self._two_chains(weights, numbered=False)
        if len(chains) == 2 and len(numbered := self._two_chains(weights, numbered=True)) == 1:
            chains = numbered
        if len(chains) == 1:
            return chains[0]
        if chains:
            raise ModelError(
                f"{self.file}: its layers fit together in more than one order, as {_join(chains[0])} and as "
                f"{_join(chains[1])}; give the right one with --order NAME,NAME,…"
            )
        sizes = [f"{name!r} {self.shapes[name][1]} to {self.shapes[name][0]}" for name in weights]
        raise ModelError(
            f"{self.file}: its layers form no chain ({', '.join(sizes)}); only chains of dense layers can be "
            "fused"
        )

    def _two_chains(self, weights: Sequence[str], *, numbered: bool) -> list[list[str]]:
        """Orders of the layers in which each takes what the one before it gives: the first two found.

        numbered: only those in which layers whose names differ by a number stand by their numbers.
        """
        found: list[list[str]] = []
        stack: list[list[str]] = [[]]
        for _ in range(_STEPS):
            if not stack or len(found) == 2:
                return found
            chain = stack.pop()
            rest = [name for name in weights if name not in chain]
            if not rest:
                found.append(chain)
            for name in rest:
                fits = not chain or self.shapes[chain[-1]][0] == self.shapes[name][1]
                if fits and not (numbered and any(_precedes(other, name) for other in rest)):
                    stack.append([*chain, name])
        raise ModelError(
            f"{self.file}: the order of its {len(weights)} layers cannot be told from their shapes; give it "
            "with --order NAME,NAME,…"
        )

    def with_rest(self, listed: Sequence[str]) -> list[str]:
        """The listed values, and behind each layer those of its own that were not listed."""
        layers = self.weights_of(listed)
        loose = [name for name in sorted(self.shapes, key=_natural) if name not in listed]
        if not layers:
            return loose
        behind = {layer: [layer] for layer in layers}
        for name in loose:
            behind[self._owner(layers, name)].append(name)
        return [each for name in listed for each in behind.get(name, [name])]

    def _owner(self, layers: Sequence[str], name: str) -> str:
        """The layer that a value belongs to: its module's, the last with a lower number, or the only one."""
        for one in layers:
            if _module(one) == _module(name):
                return one
        fitting = [layer for layer in layers if self.shapes[name] == self.shapes[layer][:1]]
        if before := [layer for layer in fitting if _precedes(layer, name)]:
            return max(before, key=_natural)
        if len(fitting) > 1:
            raise ModelError(
                f"{self.file}: {name!r} may belong to any of the layers {_join(fitting)}; list it behind its "
                "own with --order NAME,NAME,…"
            )
        return (
            fitting[0] if fitting else layers[-1]
        )  # where nothing fits, reading the chain says so


def _precedes(one: str, other: str) -> bool:
    """Whether two names differ first by a number, which is lower in the first."""
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            return mine.isdecimal() and theirs.isdecimal() and int(mine) < int(theirs)
    return False


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A sorting key by which `layer.9` stands before `layer.10`."""
    return [
        (not step.isdecimal(), int(step) if step.isdecimal() else 0, step)
        for step in name.split(".")
    ]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _join(names: Iterable[str]) -> str:
    return ",".join(map(_layer, names))
