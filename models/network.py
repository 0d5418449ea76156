"""Sliced networks (torch modules as views of one flat tensor), and the averaging of their partial models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .anatomy import Anatomy, Buffers
from .discovery import BATCH_NORMS, discover_or_one_cell, named_tensors
from .errors import ModelError
from .slicing import ModelGraph, SliceSpec, Slicing, Start, starting_values

LAYER_ORDER = "layer_order"
"""Metadata key of a saved network: the names of its tensors, in the order in which the layers run."""


class SlicedNetwork:
    """Wraps a module so that the values of a partial model can be read and written as one vector.

    The module stays an ordinary torch module: train it with any optimizer, call it, save it. Do not replace
    its parameters, and do not move it to another device or dtype after it is wrapped.

        network = SlicedNetwork(mlp("64=32=10"), {"global": "64-24-10"}, peer="anna", seed=1)
        network.read("global")            # the coordinates that "global" averages
        network(x)                        # the module's own forward

    module
        The parts of a chain of Linear layers are found without help; other modules are traced with
        `example`, or have a method `anatomy()`. A module that cannot be traced can still be shared as a whole
        (`{"all": 1.0}`) or not at all (`{}`).
    slices, graph, cross
        See Slicing.
    example, parts, channels, check
        An example input for modules that must be traced, and options of the trace: see `discover`. Peers
        of one architecture may pass `anatomy=discover(module, x)` instead, to trace only once.
    buffers
        What happens to the statistics of batch norm. `average`: they belong to the same partial model as
        their cells, and are averaged like parameters (means of means and of variances; the spread of the
        peers' means is not added to the variance). `local`: the statistics, gains and biases of batch norm
        stay private (FedBN). `recompute`: the statistics are private, and the learner recomputes them from
        its samples before it tests. Counters are always private. If peers share only some cells, prefer
        `recompute` or `local`: shared cells also have inputs from private cells, so their statistics differ
        between peers, and averages of them fit no peer well.
    peer
        The peer's name: it seeds private values and appears in errors. Every peer needs its own name.
    rest
        The model that takes the cells that no slice takes; `{peer}` is replaced by the peer's name. None
        makes such cells an error.
    seed, start
        How starting values are drawn; `seed=None` keeps the values that the module has. Peers of one swarm
        use the same seed.
    """

    def __init__(
        self,
        module: nn.Module,
        slices: Mapping[str, SliceSpec],
        *,
        graph: ModelGraph | None = None,
        peer: str = "peer",
        rest: str | None = "local-{peer}",
        cross: bool = False,
        anatomy: Anatomy | None = None,
        example: Tensor | tuple[Tensor, ...] | None = None,
        parts: Mapping[str, Sequence[str]] | None = None,
        channels: int | None = None,
        check: bool = True,
        buffers: Buffers = "average",
        seed: int | None = None,
        start: Start | None = None,
    ):
        if not isinstance(module, nn.Module):
            raise ModelError(f"a sliced network wraps a torch module, not {module!r}")
        if not isinstance(slices, Mapping):
            raise ModelError(
                f"slices: give a dict from a model's name to its cells, as in {{'all': 1.0}}, not {slices!r}"
            )
        self.module = module
        self.peer = peer
        self.buffers: Buffers = buffers
        if anatomy is None:
            anatomy = discover_or_one_cell(
                slices.values(), module, example, parts=parts, channels=channels, check=check
            )
        anatomy = anatomy.with_buffers(buffers)
        name = rest.replace("{peer}", peer) if rest is not None else None
        self.slicing = Slicing(anatomy, slices, graph=graph, rest=name, cross=cross)
        self.flat = torch.cat([value.detach().reshape(-1) for value in self._tensors()])
        self.rebind(self.flat)
        if module not in _HOOKED:
            module.register_state_dict_post_hook(_copy_shared_memory)
            _HOOKED.add(module)
        self._locate_models()
        if seed is not None:
            current = self.flat.double().cpu().numpy()
            values = starting_values(self.slicing, current, seed=seed, peer=peer, start=start)
            self.flat.copy_(torch.from_numpy(values))

    def _locate_models(self) -> None:
        self._coordinates: dict[str, slice | Tensor] = {}
        for model in self.slicing.averaged_models:
            coordinates = self.slicing.coordinates_or_slice(model)
            if not isinstance(coordinates, slice):
                coordinates = torch.from_numpy(coordinates).to(self.flat.device)
            self._coordinates[model] = coordinates

    def reslice(
        self,
        slices: Mapping[str, SliceSpec],
        graph: ModelGraph | None = None,
        *,
        cross: bool = True,
        anatomy: Anatomy | None = None,
    ) -> None:
        """Give the cells to other partial models; the values stay as they are.

        anatomy: another description of the same flat tensor, such as one with norms as parts of their own.
        """
        self.slicing = Slicing(anatomy or self.slicing.anatomy, slices, graph=graph, cross=cross)
        self._locate_models()

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def __repr__(self) -> str:
        """The cells of every partial model, and how many values each averages."""
        cells = ", ".join(f"{m} {self.slicing.layout(m).as_slice()}" for m in self.models)
        counts = ", ".join(f"{m} {len(self.slicing.coordinates(m))}" for m in self.averaged_models)
        private = len(self.slicing.private)
        return f"SlicedNetwork({self.peer}: cells {cells}; values {counts}, private {private})"

    @property
    def models(self) -> tuple[str, ...]:
        """The partial models that this peer implements."""
        return self.slicing.models

    @property
    def averaged_models(self) -> tuple[str, ...]:
        """Models that average values of this network and, with `cross`, pairs of models: see Slicing."""
        return self.slicing.averaged_models

    def read(self, model: str) -> Tensor:
        """Return a copy of the values that `model` averages, in the same order on all peers."""
        values = self.view(model)
        return values.clone() if isinstance(self._find(model), slice) else values

    def view(self, model: str) -> Tensor:
        """Return the values that `model` averages: a view if they are contiguous, else a copy."""
        coordinates = self._find(model)
        if isinstance(coordinates, slice):
            return self.flat[coordinates]
        return self.flat.index_select(0, coordinates)

    def write(self, model: str, values: Tensor | np.ndarray) -> None:
        """Replace the values that `model` averages."""
        coordinates = self._find(model)
        values = torch.as_tensor(values)
        count = (
            coordinates.stop - coordinates.start
            if isinstance(coordinates, slice)
            else len(coordinates)
        )
        if values.shape != (count,):
            raise ModelError(
                f"model {model!r} averages {count} coordinates of peer {self.peer!r}, "
                f"but {tuple(values.shape)} values were given"
            )
        if isinstance(coordinates, slice):
            self.flat[coordinates] = values.to(self.flat)
        else:
            self.flat.scatter_(0, coordinates, values.to(self.flat))

    def rebind(self, flat: Tensor) -> None:
        """Make the module's tensors views of `flat`, into which the caller has copied their values."""
        self.flat = flat
        views = self.slicing.anatomy.views(flat).values()
        for value, view in zip(self._tensors(), views, strict=True):
            value.data = view

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are not in the flat tensor: counters, and statistics not averaged."""
        in_flat = self.slicing.anatomy.spans
        return {name: v for name, v in self.module.named_buffers() if name not in in_flat}

    @torch.no_grad()
    def recompute(self, inputs: Tensor, batch: int = 250) -> None:
        """Recompute the statistics of batch norm from `inputs`: plain means over batches, no momentum."""
        if not len(inputs):
            raise ModelError(f"peer {self.peer!r} has no samples to recompute its statistics from")
        norms = [one for one in self.module.modules() if isinstance(one, BATCH_NORMS)]
        settings = [(one.momentum, one.training) for one in norms]
        was_training = self.module.training
        self.module.eval()
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # makes torch compute a plain mean
                norm.train()
            # Batches of about equal size, as a last batch of one sample would have no variance.
            for inputs_of_batch in inputs.tensor_split(-(-len(inputs) // batch)):
                self.module(inputs_of_batch)
        finally:
            self.module.train(was_training)
            for norm, (momentum, norm_was_training) in zip(norms, settings, strict=True):
                norm.momentum = momentum
                norm.train(norm_was_training)

    def check_finite(self, model: str, values: Tensor) -> None:
        """Raise, naming peer, model and parameter, if one of the `values` of `model` is NaN or infinite."""
        bad = torch.nonzero(~torch.isfinite(values))
        if len(bad):
            coordinate = int(self.slicing.coordinates(model)[int(bad[0, 0])])
            self._raise_not_finite(f"peer {self.peer!r}, model {model!r}", len(bad), coordinate)

    def check_all_finite(self) -> None:
        """Raise, naming peer and parameter, if any value of the network is NaN or infinite, shared or not."""
        bad = torch.nonzero(~torch.isfinite(self.flat))
        if len(bad):
            self._raise_not_finite(f"peer {self.peer!r}", len(bad), int(bad[0, 0]))

    def save(self, path: str | Path, *, about: str = "") -> None:
        """Write the module's state as safetensors, with slices and layer order as JSON metadata.

        about: text to write with them, under the key `about`.
        """
        state = {name: value.contiguous() for name, value in self.module.state_dict().items()}
        slices = {
            model: [cells.tolist() for cells in self.slicing.cells[model]] for model in self.models
        }
        metadata = {
            "peer": self.peer,
            "slices": json.dumps(slices),
            LAYER_ORDER: json.dumps(self._run_order(list(state))),
        }
        if about:
            metadata["about"] = about
        save_file({name: value.clone() for name, value in state.items()}, path, metadata)

    def load(self, path: str | Path) -> None:
        """Read a state written by `save`; the flat tensor and its views stay in place."""
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(value.shape) for name, value in self.module.state_dict().items()}
        for name, shape in shapes.items():
            if name not in state:
                raise ModelError(
                    f"{path} is the file of a different network: it has no tensor {name!r}"
                )
            if tuple(state[name].shape) != shape:
                raise ModelError(
                    f"{path} is the file of a different network: {name!r} has shape "
                    f"{tuple(state[name].shape)} in the file and {shape} in this network"
                )
        self.module.load_state_dict(state)

    def _run_order(self, names: list[str]) -> list[str]:
        """Return the names of the state's tensors in the order in which the layers run.

        A module may list its layers in any order. Their order follows from the input and output part of each
        weight. If the layers do not form one chain, the module's own order is returned.
        """
        anatomy = self.slicing.anatomy
        parameters = [one for one in anatomy.parameters if one.axes]
        parts_of = {one.name: [anatomy.part_of(axis) for axis in one.axes] for one in parameters}
        weights = [parts for parts in parts_of.values() if len(parts) == 2]
        next_part = {source: target for target, source in weights}
        chain = [part for part in next_part if part not in next_part.values()][:1]
        while chain and chain[-1] in next_part and len(chain) <= len(weights):
            chain.append(next_part[chain[-1]])
        layer_of = {part: index for index, part in enumerate(chain[1:])}
        if len(layer_of) != len(weights) or any(p[0] not in layer_of for p in parts_of.values()):
            return names

        def layer_weight_first(name: str) -> tuple[int, bool]:
            parts = parts_of.get(name)
            return (layer_of[parts[0]], len(parts) != 2) if parts else (len(weights), True)

        return sorted(names, key=layer_weight_first)

    def _tensors(self) -> list[Tensor]:
        """Return the module's tensors that make up the flat tensor, in order."""
        tensors = named_tensors(self.module)
        in_flat = [tensors[one.name] for one in self.slicing.anatomy.parameters]
        types = {(value.dtype, value.device) for value in in_flat}
        if len(types) != 1:
            raise ModelError(
                f"a sliced network's parameters must have one dtype and device; these have "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in types)) or 'none'}"
            )
        return in_flat

    def _raise_not_finite(self, subject: str, count: int, coordinate: int) -> NoReturn:
        raise ModelError(
            f"{subject}: {count} values are not finite, the first in parameter "
            f"{self.slicing.anatomy.parameter_at(coordinate)!r}; lower the learning rate or look at the "
            "peer's data"
        )

    def _find(self, model: str) -> slice | Tensor:
        if model not in self._coordinates:
            self.slicing.coordinates(model)  # raises an error that names the models there are
        return self._coordinates[model]


def permute(network: SlicedNetwork, part: str, order: Sequence[int] | np.ndarray) -> None:
    """Permute the cells of a part in place: the new k-th cell is the old cell `order[k]`.

    Parameters and batch statistics are permuted alike, so the network computes the same as before; if an
    input or output part is permuted, inputs or outputs are in the new order. Coordinates do not move:
    permuting cells of different slices changes which partial model averages a value.
    """
    anatomy = network.slicing.anatomy
    cells = anatomy.cells(anatomy.find(part))
    permutation = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(permutation), np.arange(len(cells))):
        raise ModelError(
            f"part {part!r} has {len(cells)} cells: its order must hold 0 to {len(cells) - 1}, each once"
        )
    take = np.arange(anatomy.first_cells[-1])
    take[cells] = cells[permutation]
    anatomy.permute(named_tensors(network.module), take)


_HOOKED: WeakSet[nn.Module] = WeakSet()
"""Modules on whose `state_dict` the following hook is registered."""


def _copy_shared_memory(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Copy the tensors of a `state_dict` out of memory that several networks share (a stack).

    torch.save writes the whole storage of a tensor: one peer's file would contain the values of all peers.
    """
    tensors = {n: v for n, v in state.items() if n.startswith(prefix) and _is_detached(v)}
    size = sum(value.nbytes for value in tensors.values())
    for name, value in tensors.items():
        if value.untyped_storage().nbytes() > size:
            state[name] = value.clone()


def _is_detached(value: Any) -> bool:
    """Return whether a value may be replaced by a copy: with `keep_vars` it is a parameter itself."""
    return isinstance(value, Tensor) and not value.requires_grad


def average(networks: Sequence[SlicedNetwork], weights: Sequence[float] | None = None) -> None:
    """Average, in place, every partial model among the networks that implement it.

    Networks built with `cross=True` average pairs of unrelated models too. `weights` (for example sample
    counts) has one positive number per network; by default all are equal. Models that only one network
    implements, and private coordinates, do not change at all.
    """
    weights = check_weights(networks, weights)
    for model, members in implementers(networks).items():
        if len(members) < 2:
            continue
        first = networks[members[0]]
        for index in members[1:]:
            check_schema(model, first, networks[index])
        values = []
        for index in members:
            values.append(networks[index].read(model))
            networks[index].check_finite(model, values[-1])
        # Computed as first + mean difference from the first, so that the mean of equal values is exact.
        base = values[0].double()
        total = sum(weights[index] for index in members)
        difference = torch.zeros_like(base)
        for index, value in zip(members[1:], values[1:], strict=True):
            difference += (weights[index] / total) * (value.double() - base)
        mean = base + difference
        for index in members:
            networks[index].write(model, mean)


def implementers(networks: Sequence[SlicedNetwork]) -> dict[str, list[int]]:
    """Return, for every averaged model, the indices of the networks that implement it."""
    indices: dict[str, list[int]] = {}
    for index, network in enumerate(networks):
        for model in network.averaged_models:
            indices.setdefault(model, []).append(index)
    return dict(sorted(indices.items()))


def check_weights(
    networks: Sequence[SlicedNetwork], weights: Sequence[float] | None
) -> Sequence[float]:
    """Return one weight per network, 1 by default; raise, naming the peer, unless all are positive."""
    if weights is None:
        return [1.0] * len(networks)
    if len(weights) != len(networks):
        raise ModelError(f"{len(weights)} weights were given for {len(networks)} networks")
    for network, weight in zip(networks, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ModelError(f"peer {network.peer!r}: weight {weight} is not a positive number")
    return weights


def check_schema(model: str, first: SlicedNetwork, second: SlicedNetwork) -> None:
    """Raise, naming the first block that differs, unless two networks can average `model`."""
    blocks, other_blocks = first.slicing.schema(model), second.slicing.schema(model)
    if blocks == other_blocks:
        return
    for a, b in zip(blocks, other_blocks, strict=False):
        if a != b:
            raise ModelError(
                f"model {model!r} is not the same on {first.peer!r} and {second.peer!r}: "
                f"{_format_block(a)} on {first.peer!r}, {_format_block(b)} on {second.peer!r}"
            )
    raise ModelError(
        f"model {model!r} has {len(blocks)} blocks on {first.peer!r} and {len(other_blocks)} on "
        f"{second.peer!r}"
    )


def _format_block(block: tuple[str, tuple[tuple[str, int], ...]]) -> str:
    """Return a block as text: `0.weight [2 global × 3 local]`."""
    name, axes = block
    return f"{name} [{' × '.join(f'{count} {model}'.strip() for model, count in axes)}]"
