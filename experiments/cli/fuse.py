"""`gossamer fuse`: combines several networks into one by matching cells that compute the same.

Contains the command, the reading and writing of network files, and the search for the order in which the
layers in a file are applied. torch and numpy are imported only inside functions, so that help is fast.
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
from ..page.history import natural_key
from ..results import CHECKPOINT_FILE, atomic_path, find_run
from . import console
from .console import Seed, YesOrNo, command, load_torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ...models.matching import Chain, Fusion, Layer

ACTIVATIONS = ("relu", "sigmoid", "tanh", "none")


@dataclass(frozen=True, kw_only=True)
class MatchingOptions:
    """Options of matching: the fields of `models.matching.MatchOptions` except the variance.

    Args:
        prior_variance: σ0², the variance of the prior on weights.
        mass: γ0, the concentration of the Beta process prior: raise it for more cells.
        kind: The prior on the number of cells: printed (as in the PFNM paper), set or efpf.
        kl: MAGI's λ from 0 to 1: raise it for fewer cells.
        limit: The largest number of cells per layer, unless one of the networks is wider already.
        sweeps: The largest number of passes over the networks.
        shrink: Shrink weights towards the prior mean, most where few networks have a cell.
    """

    prior_variance: float = 10.0
    mass: float = 1.0
    kind: str = "printed"
    kl: float = 0.0
    limit: int = 700
    sweeps: int = 20
    shrink: YesOrNo = True


@command("fuse", slow=True)
def fuse_command(
    files: list[Path],
    *,
    out: Annotated[Path, typer.Option("--out", "-o")],
    force: bool = False,
    variance: list[float] | None = None,
    matching: MatchingOptions,
    bias_mean: float = 0.0,
    counts: Path | None = None,
    within_models: bool = False,
    order: str | None = None,
    data: str | None = None,
    activation: str | None = None,
    seed: Seed = 0,
) -> None:
    """Fuse trained networks into one, though their cells differ in order or number.

    Cells (neurons) of different networks that compute the same become one cell; all other cells are kept.
    The files may come from `gossamer swarm`, `gossamer join`, or from any torch network of dense layers.
    A folder stands for all networks in it, or in its latest run, so that a finished swarm becomes one
    network. Files that gossamer wrote contain the order of their layers; for other files it is derived
    from the layers' shapes and the numbers in their names, unless --order gives it.

    Args:
        files: Networks as safetensors, all with the same number of layers; or a swarm's results folder.
        out: The file for the fused network.
        force: Replace the file --out if it exists.
        variance: σ², how much cells that are matched may differ: one value, or one per network; 1 if left
            out. Lower it for a larger fused network.
        bias_mean: The prior mean of biases: the value that they had before training.
        counts: A JSON file: samples per class, one list per network. Weighs the networks' outputs.
        within_models: Match only cells of the same partial model.
        order: NAME,NAME,…: the order of the layers, for files that do not contain it.
        data: Print accuracies on this data set; see gossamer data.
        activation: With --data: the activation of hidden cells: relu, sigmoid, tanh or none.
        seed: The seed of the order in which networks are matched.
    """
    load_torch()
    from ...models.matching import MatchOptions, fuse

    if activation is not None and data is None:
        raise ConfigError(f"--activation {activation}: is only used with --data; leave it out")
    if activation not in (None, *ACTIVATIONS):
        raise ConfigError(f"--activation {activation}: there are {', '.join(ACTIVATIONS)}")
    check_target(out, force=force)
    files = network_files(files, out)
    variances = variance or [1.0]
    other_options: dict[str, Any] = asdict(matching)
    other_options["concentration"] = other_options.pop("mass")
    options = MatchOptions(variance=variances[0] if len(variances) == 1 else 1.0, **other_options)
    layer_names = None if order is None else [name.strip() for name in order.split(",")]
    networks = [read_network(path, layer_names) for path in files]
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
    accuracies = _accuracies(data, activation, networks, fused.chain) if data else []
    description = {
        "files": [path.name for path in files],
        "widths": list(fused.chain.widths),
        "objective": fused.objective,
        "accuracy": accuracies[-1] if accuracies else None,
    }
    write_network(out, fused.chain, networks[0].dtype, {"fusion": json.dumps(description)})
    _print_tables(fused, networks, accuracies)
    console.print_written([out])


def _print_tables(
    fused: Fusion, networks: Sequence[NetworkFile], accuracies: Sequence[float]
) -> None:
    """Print how the cells of each hidden part were matched, and the sizes of all networks."""
    from ...models.matching import part_names

    rows = []
    widths = fused.chain.widths[1:]
    for name, part, width in zip(part_names(fused.chain), fused.parts, widths, strict=False):
        cell_counts = [len(cells) for cells in part.assignments]  # one per network
        # matched: cells that became one with a cell of another network. created: cells of the fused network
        # beyond the number in the widest network.
        counts = sum(cell_counts), width, part.matched_cells, width - max(cell_counts)
        ended = f"{part.stop_reason}, {part.sweeps}"
        rows.append((name, *counts, f"{part.objective[-1]:.1f}", ended))
    header = ["part", "given", "fused", "matched", "created", "objective", "ended, sweeps"]
    if rows:
        console.table("cells by part", header, rows)
    chains = [(str(network.path), network.chain) for network in networks]
    sizes: list[list[object]] = [
        [name, "=".join(map(str, chain.widths)), chain.size]
        for name, chain in [*chains, ("fused", fused.chain)]
    ]
    for row, value in zip(sizes, accuracies, strict=False):
        row.append(f"{value:.3f}")
    header = ["network", "layout", "parameters", "accuracy"]
    console.table("networks", header[: len(sizes[0])], sizes)
    total = sum(network.chain.size for network in networks)
    console.say(f"fused size: {fused.chain.size / total:.1%} of all networks together")


def _accuracies(
    data: str, activation: str | None, networks: Sequence[NetworkFile], fused: Chain
) -> list[float]:
    """Return the accuracy of every network on a data set, the fused network last."""
    from ..data import load

    if activation is None and any(_slopes(layer) is None for layer in fused.layers[:-1]):
        raise ConfigError(
            "--data needs --activation as well, because the files do not contain the activation of hidden "
            f"cells: {', '.join(ACTIVATIONS)}"
        )
    dataset = load(data)
    samples = dataset.test or dataset.train
    inputs, outputs = fused.widths[0], fused.widths[-1]
    x = samples.flat()
    if x.shape[1] != inputs or dataset.classes > max(outputs, 2):
        raise ModelError(
            f"--data {data}: has {x.shape[1]} inputs and {dataset.classes} classes, the networks have "
            f"{inputs} inputs and {outputs} outputs"
        )
    return [
        accuracy(logits(chain, x, activation or "relu"), samples.y)
        for chain in [*(network.chain for network in networks), fused]
    ]


# --- a network's outputs and accuracy ---------------------------------------------------------------


def logits(chain: Chain, x: Tensor, activation: str = "relu") -> Tensor:
    """Return the outputs of a chain of dense layers, without an activation after the last layer.

    activation: of the hidden layers that have no PReLU slopes.
    """
    import torch

    functions = {
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "none": lambda h: h,
    }
    h = x.double()
    for index, layer in enumerate(chain.layers):
        values = {name.rpartition(".")[2]: value for name, value in layer.per_cell.items()}
        h = h @ torch.from_numpy(layer.weight).T
        if "bias" in values:
            h = h + torch.from_numpy(values["bias"])
        if index < chain.hidden_parts:
            slopes = _slopes(layer)
            h = functions[activation](h) if slopes is None else torch.where(h > 0, h, slopes * h)
    return h


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose largest output is that of the label.

    A network with a single output predicts class 1 if the output is above 0.
    """
    if outputs.shape[1] == 1:
        return float(((outputs[:, 0] > 0) == (labels > 0)).double().mean())
    return float((outputs.argmax(dim=1) == labels).double().mean())


def _slopes(layer: Layer) -> Tensor | None:
    """Return the slopes of a layer's PReLU, one per cell; None if it has none."""
    import torch

    # In a state dict PReLU's slopes are called `weight`; besides the bias they are the only values per cell.
    slopes = next((v for name, v in layer.per_cell.items() if not name.endswith("bias")), None)
    return None if slopes is None else torch.from_numpy(slopes)


# --- network files ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NetworkFile:
    """A network that was read from a file."""

    path: Path
    chain: Chain
    dtype: type
    """numpy's float64 if the file contains values of that type, else float32."""
    slices: dict[str, list[list[int]]] | None
    """By partial model, its cells in each part; None if the file's metadata do not contain them."""


def read_network(path: Path, order: Sequence[str] | None = None) -> NetworkFile:
    """Read a safetensors file of dense layers, written by `SlicedNetwork.save` or from any torch state dict.

    order: the layers' names in order, for files that do not contain the order; see `layer_order`.
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
    dtypes = {value.dtype for value in state.values()}
    if unsupported := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise ModelError(
            f"{path}: holds values of type {unsupported[0]}; only dense layers can be fused"
        )
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    chain = Chain.read(
        {name: value.double().numpy() for name, value in state.items()},
        str(path),
        layer_order(shapes, metadata, order, str(path)),
    )
    dtype = np.float64 if torch.float64 in dtypes else np.float32
    try:
        slices = json.loads(metadata["slices"]) if "slices" in metadata else None
    except json.JSONDecodeError:
        raise ModelError(f"{path}: its metadata about slices are not valid JSON") from None
    return NetworkFile(path, chain, dtype, slices)


def network_files(paths: Sequence[Path], out: Path) -> list[Path]:
    """Return the files to fuse: every folder in `paths` is replaced by the networks in it, without `out`.

    A folder holds the results of a swarm: one safetensors file for each peer that finished. If it holds
    several runs, the latest is used.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        path = find_run(path)
        others = {out.resolve(), (path / CHECKPOINT_FILE).resolve()}
        networks = [file for file in path.glob("*.safetensors") if file.resolve() not in others]
        if not networks:
            why = "; its peers have not finished" if any(path.glob("*.checkpoint")) else ""
            raise ModelError(
                f"{path}: there is no network (*.safetensors) in this folder{why}; give the folder that "
                "gossamer swarm or gossamer simulate --networks wrote"
            )
        files += sorted(networks, key=lambda file: natural_key(file.stem))
    return files


def check_target(path: Path, *, force: bool) -> None:
    """Raise if the output file exists (without `force`) or its folder does not, before any work is done."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise ModelError(f"{path} exists: give another name, or --force to replace it")
    if not path.parent.is_dir():
        raise ModelError(f"{path}: there is no folder {path.parent}; create it first")


def write_network(path: Path, chain: Chain, dtype: type, metadata: dict[str, str]) -> None:
    """Write a network as safetensors, atomically; the order of its layers is added to the metadata."""
    import numpy as np
    from safetensors.numpy import save_file

    from ...models import LAYER_ORDER

    state = {name: np.ascontiguousarray(value) for name, value in chain.state(dtype).items()}
    with atomic_path(path) as temporary:
        save_file(state, temporary, {**metadata, LAYER_ORDER: json.dumps(list(state))})


def model_groups(networks: Sequence[NetworkFile]) -> list[list[np.ndarray]]:
    """Return the number of every cell's partial model, as `[network][hidden part][cell]`.

    A partial model has the same number in all networks.
    """
    import numpy as np

    number_of_model: dict[str, int] = {}
    groups = []
    for network in networks:
        if network.slices is None:
            raise ModelError(
                f"{network.path}: does not contain its partial models, so --within-models cannot be used; "
                "save it with SlicedNetwork.save, or leave the option out"
            )
        models_by_part = [np.full(width, -1) for width in network.chain.widths]
        for model, cells_by_part in network.slices.items():
            number = number_of_model.setdefault(model, len(number_of_model))
            for model_numbers, cells in zip(models_by_part, cells_by_part, strict=True):
                model_numbers[cells] = number
        groups.append(models_by_part[1:-1])
    return groups


def read_counts(path: Path) -> np.ndarray:
    """Read sample counts: a JSON list with one list of numbers per network."""
    import numpy as np

    try:
        return np.array(json.loads(path.read_text("utf-8")), dtype=np.float64)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path}: is not a list of lists of numbers, one list per network ({error})"
        ) from None


# --- the order of layers ----------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]

_MAX_SEARCH_STEPS = 10_000
"""Partial chains that are tried before the user is asked for --order; 50 layers need a few hundred."""


def layer_order(
    shapes: Shapes, metadata: Mapping[str, str], user_order: Sequence[str] | None, file: str
) -> list[str]:
    """Return the names of a file's tensors in the order in which layers are applied, weights before biases.

    A safetensors file lists its tensors by name, so the order of its layers must be found. Sources of the
    order, the most reliable first: the file's metadata (written by `SlicedNetwork.save`), the user's --order,
    the layers' shapes if they fit together in only one way, and numbers in names, as in a torch Sequential.

    user_order: the value of --order: names of layers or of tensors.

    Raises ModelError if the order does not fit the shapes or cannot be found.
    """
    layers = _Layers(shapes, file)
    from_metadata = layers.order_from_metadata(metadata)
    from_user = layers.order_from_user(user_order) if user_order else None
    if from_metadata is None:
        return layers.complete(layers.order_from_shapes() if from_user is None else from_user)
    weights = layers.weights_of(from_metadata)
    if from_user is not None and (user_weights := layers.weights_of(from_user)) != weights:
        raise ModelError(
            f"{file}: --order says {_join(user_weights)}, the file itself says {_join(weights)}; leave out "
            "--order"
        )
    return from_metadata


@dataclass(frozen=True)
class _Layers:
    """The tensors of a file, given by their shapes; those with two dimensions are the weights of layers."""

    shapes: Shapes
    file: str

    def weights_of(self, names: Iterable[str]) -> list[str]:
        """Return those of the named tensors that are weights of layers."""
        return [name for name in names if len(self.shapes[name]) == 2]

    def order_from_metadata(self, metadata: Mapping[str, str]) -> list[str] | None:
        """Return the order of all tensors in the file's metadata; None if they do not contain it."""
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
            f"{self.file}: its metadata about the order of layers are invalid; save it again"
        )

    def order_from_user(self, user_order: Sequence[str]) -> list[str]:
        """Return the tensors that --order names; a layer's name stands for all its tensors, weight first."""
        shapes, where = self.shapes, f"{self.file}: --order"
        names: list[str] = []
        for text in user_order:
            tensors = [text] if text in shapes else sorted(n for n in shapes if _module(n) == text)
            if not tensors:
                known = dict.fromkeys(
                    _module(name) or name for name in sorted(shapes, key=natural_key)
                )
                raise ModelError(
                    f"{where} names {text!r}, which is not one of its layers: {_join(known)}"
                )
            names += sorted(tensors, key=lambda name: len(shapes[name]) != 2)
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise ModelError(f"{where} names {_layer(duplicate)!r} twice")
        if missing := [name for name in self.weights_of(shapes) if name not in names]:
            raise ModelError(f"{where} leaves out {_join(missing)}; name every layer")
        for layer, following in pairwise(self.weights_of(names)):
            if shapes[layer][0] != shapes[following][1]:
                raise ModelError(
                    f"{where} puts {_layer(following)!r}, which has {shapes[following][1]} inputs, after "
                    f"{_layer(layer)!r}, which has {shapes[layer][0]} cells"
                )
        return names

    def order_from_shapes(self) -> list[str]:
        """Return the only chain that the layers form; if shapes allow several, numbers in names decide."""
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
        """Return the first two orders of the layers in which each layer has as many inputs as the layer
        before it has cells. Fewer than two are returned if there are no more.

        numbered: only orders in which layers whose names differ by a number are in the order of the numbers.
        """
        complete: list[list[str]] = []
        stack: list[list[str]] = [[]]
        for _ in range(_MAX_SEARCH_STEPS):
            if not stack or len(complete) == 2:
                return complete
            chain = stack.pop()
            remaining = [name for name in weights if name not in chain]
            if not remaining:
                complete.append(chain)
            for name in remaining:
                fits = not chain or self.shapes[chain[-1]][0] == self.shapes[name][1]
                if fits and not (numbered and any(_precedes(other, name) for other in remaining)):
                    stack.append([*chain, name])
        raise ModelError(
            f"{self.file}: the order of its {len(weights)} layers cannot be derived from their shapes; give "
            "it with --order NAME,NAME,…"
        )

    def complete(self, order: Sequence[str]) -> list[str]:
        """Return the order with the file's other tensors added, each after the layer to which it belongs."""
        layers = self.weights_of(order)
        missing = [name for name in sorted(self.shapes, key=natural_key) if name not in order]
        if not layers:
            return missing
        tensors_of_layer = {layer: [layer] for layer in layers}
        for name in missing:
            tensors_of_layer[self._layer_of(name, layers)].append(name)
        return [tensor for name in order for tensor in tensors_of_layer.get(name, [name])]

    def _layer_of(self, name: str, layers: Sequence[str]) -> str:
        """Return the layer to which a tensor such as a bias belongs.

        This is the layer of the same torch module; else, of the layers with a fitting number of cells, the
        last one with a lower number in its name, or the only one.
        """
        for layer in layers:
            if _module(layer) == _module(name):
                return layer
        fitting = [layer for layer in layers if self.shapes[name] == self.shapes[layer][:1]]
        if preceding := [layer for layer in fitting if _precedes(layer, name)]:
            return max(preceding, key=natural_key)
        if len(fitting) > 1:
            raise ModelError(
                f"{self.file}: {name!r} may belong to any of the layers {_join(fitting)}; list it after its "
                "layer with --order NAME,NAME,…"
            )
        # If no layer fits, any will do: Chain.read raises an error that names the tensor.
        return fitting[0] if fitting else layers[-1]


def _precedes(name: str, other: str) -> bool:
    """Return whether the first difference of two dotted names is a number that is lower in `name`."""
    for step, other_step in zip(name.split("."), other.split("."), strict=False):
        if step != other_step:
            return step.isdecimal() and other_step.isdecimal() and int(step) < int(other_step)
    return False


def _module(name: str) -> str:
    """Return the name of the torch module that has a tensor: `layer.9` for `layer.9.bias`."""
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    """Return a layer's name as --order accepts it, without `.weight`."""
    return name.removesuffix(".weight")


def _join(names: Iterable[str]) -> str:
    """Return layers' names in the form of --order."""
    return ",".join(map(_layer, names))
