"""Sliced networks, whose partial models can be read, written and averaged as flat vectors.

A sliced network wraps a torch module and replaces the memory of its parameters by views of one flat tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gossamer.errors import hint_arguments

from .anatomy import Anatomy, Buffers
from .discovery import (
    BATCH_NORMS,
    discover_or_one_cell,
    evaluating,
    frozen_norms,
    named_tensors,
)
from .errors import ModelError
from .slicing import ModelGraph, SliceSpec, Slicing, Start, starting_values

LAYER_ORDER = "layer_order"
"""The key, in the metadata of a saved network, of its tensors' names in the order in which layers run."""


def find_device(name: str | torch.device) -> torch.device:
    """Return the torch device of a name; raise, naming the devices of this machine, if it has no such one."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    available = ["cpu"]
    for kind in (torch.cuda, torch.xpu, torch.mps):
        available += [f"{kind.__name__.split('.')[-1]}:{i}" for i in range(kind.device_count())]
    if device is not None:
        indexed = device if device.type == "cpu" else torch.device(device.type, device.index or 0)
        if str(indexed).removesuffix(":0") in [text.removesuffix(":0") for text in available]:
            return device
    raise ModelError(
        f"device {str(name)!r}: torch {torch.__version__} finds no such device on this machine; there is "
        f"{', '.join(available)}: name one of these, or install a torch that supports yours"
    )


class SlicedNetwork:
    """Wraps a module so that the values of a partial model can be read and written as one vector.

    The module stays an ordinary torch module: train it with any optimizer, call it, save it. Do not replace
    its parameters, and do not move it to another device or dtype after it is wrapped: its parameters would
    no longer be views of the flat tensor.

        network = SlicedNetwork(mlp("64=32=10"), {"global": "64-24-10"}, peer="anna", seed=1)
        network.read("global")            # the coordinates that "global" averages
        network(x)                        # the module's own forward

    module
        Its anatomy (which cells it has) is found without help if it is a chain of Linear layers. Other
        modules are traced with `example`, or have a method `anatomy()`. A module that cannot be traced can
        still be shared as a whole (`{"all": 1.0}`), by layers (`{"all": {"*": 1, "head": 0}}`) or not at all
        (`{}`). Parameters that are frozen (`requires_grad=False`) before it is wrapped belong to no partial
        model and are not in the flat tensor: they keep their values, and are neither averaged nor sent. Their
        values must be the same on all peers.
    slices
        The cells of every partial model that the peer has: see `Slicing`.
    graph
        Which partial models depend on which; by default none does.
    cross
        Whether weights between partial models that do not depend on each other are averaged too, among the
        peers that have both; else they are private.
    example, parts, channels, check
        The arguments of `discover`: an example input, axes that are named by hand, the dimension of the
        channels, and whether the trace is checked. Peers of one architecture may pass
        `anatomy=discover(module, x)` instead, to trace only once.
    buffers
        What happens to the running means and variances of batch norm, its statistics. `average`: they
        belong to the same partial model as their cells, and are averaged like parameters. (The average of
        the variances leaves out by how much the peers' means differ.) `local`: the statistics, gains and
        biases of batch norm stay private (FedBN). `recompute`: the statistics are private, and the learner
        recomputes them from its samples before it tests. Batch norm's counters of batches are always
        private. If peers share only some cells, prefer `recompute` or `local`: shared cells also have inputs
        from private cells, so their statistics differ between peers, and averages of them fit no peer well.
    peer
        The peer's name. Every peer needs its own name, because private starting values are drawn from it.
    rest
        The name of the model that gets the cells that no slice takes; `{peer}` in it is replaced by the
        peer's name. None makes such cells an error.
    seed, start
        The seed and the distribution of the starting values. Peers of one swarm use the same seed, so that
        they start with equal values in the models that they share. `seed=None` keeps the values that the
        module has.
    """

    @hint_arguments
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
        rest_model = rest.replace("{peer}", peer) if rest is not None else None
        self.slicing = Slicing(anatomy, slices, graph=graph, rest=rest_model, cross=cross)
        self._refuse_unlisted()
        self.flat = torch.cat([value.detach().reshape(-1) for value in self._tensors()])
        self.rebind(self.flat)
        if module not in _MODULES_WITH_HOOK:  # a module may be wrapped more than once
            module.register_state_dict_post_hook(_copy_shared_memory)
            _MODULES_WITH_HOOK.add(module)
        self._locate_models()
        if seed is not None:
            current = self.flat.cpu().double().numpy()  # a device may have no float64
            values = starting_values(self.slicing, current, seed=seed, peer=peer, start=start)
            self.flat.copy_(torch.from_numpy(values).to(self.flat.dtype))

    def _locate_models(self) -> None:
        """Find the coordinates of every averaged model: a slice if they are contiguous, else a tensor."""
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

        cross: as in the constructor, but on by default, because the slices of peers that decide what they
        share are made for it (`models/sharing/`).
        anatomy: another description of the same flat tensor, such as one that `with_norm_parts` returned.
        """
        self.slicing = Slicing(anatomy or self.slicing.anatomy, slices, graph=graph, cross=cross)
        self._locate_models()

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def __repr__(self) -> str:
        """Return a text with the layout of every partial model, and how many values each averages."""
        cells = ", ".join(f"{m} {self.slicing.layout(m).as_slice()}" for m in self.models)
        counts = ", ".join(f"{m} {len(self.slicing.coordinates(m))}" for m in self.averaged_models)
        private = len(self.slicing.private)
        return f"SlicedNetwork({self.peer}: cells {cells}; values {counts}, private {private})"

    @property
    def models(self) -> tuple[str, ...]:
        """The partial models that this peer has."""
        return self.slicing.models

    @property
    def averaged_models(self) -> tuple[str, ...]:
        """The names under which values of this network are averaged.

        These are its partial models and, with `cross`, pairs of them: `green&yellow` for the weights between
        the cells of two models.
        """
        return self.slicing.averaged_models

    def read(self, model: str) -> Tensor:
        """Return a copy of the values that `model` averages, in the same order on all peers."""
        values = self.values(model)
        is_view = isinstance(self._coordinates[model], slice)
        return values.clone() if is_view else values

    def values(self, model: str) -> Tensor:
        """Return the values that `model` averages, to be read at once and not kept.

        They are a view of the flat tensor if they are contiguous there, which saves a copy, and a copy if
        not. A view changes with the network: use `read` to keep the values.
        """
        coordinates = self._coordinates_of(model)
        if isinstance(coordinates, slice):
            return self.flat[coordinates]
        return self.flat.index_select(0, coordinates)

    def write(self, model: str, values: Tensor | np.ndarray) -> None:
        """Replace the values that `model` averages, given in the order of `read`."""
        coordinates = self._coordinates_of(model)
        values = torch.as_tensor(values).to(self.flat.dtype).to(self.flat.device)
        count = (
            coordinates.stop - coordinates.start
            if isinstance(coordinates, slice)
            else len(coordinates)
        )
        if values.shape != (count,):
            raise ModelError(
                f"model {model!r} of peer {self.peer!r} needs a vector of {count} values, not an array of "
                f"shape {tuple(values.shape)}"
            )
        if isinstance(coordinates, slice):
            self.flat[coordinates] = values
        else:
            self.flat.scatter_(0, coordinates, values)

    def rebind(self, flat: Tensor) -> None:
        """Make the module's tensors views of `flat`, into which the caller has copied their values."""
        self.flat = flat
        views = self.slicing.anatomy.views(flat).values()
        for value, view in zip(self._tensors(), views, strict=True):
            value.data = view

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in the flat tensor, by name and in its order: all but frozen ones."""
        in_flat = self.slicing.anatomy.spans
        return {name: value for name, value in self.module.named_parameters() if name in in_flat}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters that are not in the flat tensor, by name: nobody trains or averages them."""
        in_flat = self.slicing.anatomy.spans
        named = self.module.named_parameters()
        return {name: value for name, value in named if name not in in_flat}

    def frozen_digest(self) -> str:
        """Return a hash of the frozen parameters' values; empty if there are none."""
        digest = hashlib.blake2b(digest_size=16)
        for name, value in (frozen := self.frozen).items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest() if frozen else ""

    def set_training(self) -> None:
        """Put the module into training mode, except frozen batch norm layers, which keep their statistics."""
        self.module.train()
        if self.slicing.anatomy.frozen:
            for norm in frozen_norms(self.module).values():
                norm.eval()

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are not in the flat tensor: counters, and statistics not averaged."""
        names_in_flat = self.slicing.anatomy.spans
        buffers = self.module.named_buffers()
        return {name: buffer for name, buffer in buffers if name not in names_in_flat}

    @torch.no_grad()
    def recompute(self, inputs: Tensor, batch: int = 250) -> None:
        """Replace the statistics of batch norm by their means over batches of `inputs`, without momentum.

        Frozen layers keep theirs.
        """
        if not len(inputs):
            raise ModelError(
                f"peer {self.peer!r} has no samples to recompute the statistics of batch norm from"
            )
        kept = set(frozen_norms(self.module).values()) if self.slicing.anatomy.frozen else set()
        norms = [
            layer
            for layer in self.module.modules()
            if isinstance(layer, BATCH_NORMS) and layer not in kept
        ]
        momenta = [norm.momentum for norm in norms]
        try:
            with evaluating(self.module):
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # makes torch compute a plain mean
                    norm.train()
                # Batches of about equal size: a last batch of a single sample would have no variance.
                for inputs_of_batch in inputs.tensor_split(math.ceil(len(inputs) / batch)):
                    with naming_single_samples(self.peer, inputs_of_batch):
                        self.module(inputs_of_batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum

    def check_finite(self, model: str, values: Tensor) -> None:
        """Raise, naming peer, model and parameter, if one of the `values` of `model` is NaN or infinite."""
        if not_finite := torch.nonzero(~torch.isfinite(values)).flatten().tolist():
            coordinate = int(self.slicing.coordinates(model)[not_finite[0]])
            self._raise_not_finite(f", model {model!r}", len(not_finite), coordinate)

    def check_all_finite(self) -> None:
        """Raise, naming peer and parameter, if any value of the network is NaN or infinite, shared or not."""
        if not_finite := torch.nonzero(~torch.isfinite(self.flat)).flatten().tolist():
            self._raise_not_finite("", len(not_finite), not_finite[0])

    def save(self, path: str | Path, *, about: str = "") -> None:
        """Write the module's state to a safetensors file, whose metadata has slices and layer order as JSON.

        about: a text that is written to the metadata under the key `about`.
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
        # Copies: safetensors refuses tensors that share memory, as tied parameters do.
        save_file({name: value.clone() for name, value in state.items()}, path, metadata)

    def load(self, path: str | Path) -> None:
        """Read the state from a file that `save` wrote, into the tensors that the module has."""
        try:
            with safe_open(path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(
                f"{path}: cannot be read as a network (safetensors): {error}"
            ) from None
        shapes = {name: tuple(value.shape) for name, value in self.module.state_dict().items()}
        if unknown := sorted(set(state) - set(shapes)):
            raise ModelError(
                f"{path} is the file of a different network: this one has no tensor {unknown[0]!r}; name the "
                "file of a network with the same layers"
            )
        for name, shape in shapes.items():
            if name not in state:
                raise ModelError(
                    f"{path} is the file of a different network: it has no tensor {name!r}; name the file of "
                    "a network with the same layers"
                )
            if tuple(state[name].shape) != shape:
                raise ModelError(
                    f"{path} is the file of a different network: {name!r} has shape "
                    f"{tuple(state[name].shape)} in the file and {shape} in this network; name the file of a "
                    "network with layers of the same sizes"
                )
        self.module.load_state_dict(state)

    def _run_order(self, names: list[str]) -> list[str]:
        """Return the names of the state's tensors in the order in which the layers run.

        A module may list its layers in any order. Their order follows from the input and output part of each
        weight. If the layers do not form one chain, the module's own order is returned. The other tensors of
        a layer follow its weight, and tensors of no layer come last.
        """
        anatomy = self.slicing.anatomy
        parts_of = {
            parameter.name: [anatomy.part_of(axis) for axis in parameter.axes]
            for parameter in anatomy.parameters
            if parameter.axes
        }
        weights = [parts for parts in parts_of.values() if len(parts) == 2]
        next_part = {input_part: output_part for output_part, input_part in weights}
        chain = [part for part in next_part if part not in next_part.values()][:1]
        while chain and chain[-1] in next_part and len(chain) <= len(weights):
            chain.append(next_part[chain[-1]])
        layer_of_part = {part: index for index, part in enumerate(chain[1:])}
        is_one_chain = len(layer_of_part) == len(weights) and all(
            parts[0] in layer_of_part for parts in parts_of.values()
        )
        if not is_one_chain:
            return names

        def sort_key(name: str) -> tuple[int, int]:
            parts = parts_of.get(name)
            if parts is None:  # a tensor of no layer: after all layers
                return len(weights), 0
            is_weight = len(parts) == 2
            return layer_of_part[parts[0]], 0 if is_weight else 1

        return sorted(names, key=sort_key)

    def _refuse_unlisted(self) -> None:
        """Raise, naming the parameter, if one is trained that the anatomy does not have."""
        if unlisted := [name for name, value in self.frozen.items() if value.requires_grad]:
            raise ModelError(
                f"peer {self.peer!r}: parameter {unlisted[0]!r} is trained, but the network's anatomy does "
                "not have it: freeze the same parameters (requires_grad=False) as in the module that was "
                "traced, or trace this one"
            )

    def _tensors(self) -> list[Tensor]:
        """Return the module's tensors that make up the flat tensor, in order."""
        tensors_by_name = named_tensors(self.module)
        parameters = self.slicing.anatomy.parameters
        tensors = [tensors_by_name[parameter.name] for parameter in parameters]
        types = {(tensor.dtype, tensor.device) for tensor in tensors}
        if any(not tensor.is_floating_point() for tensor in tensors):
            raise ModelError(
                f"peer {self.peer!r}: values that are averaged must be real numbers; the network has some of "
                f"{', '.join(sorted({str(dtype) for dtype, _ in types}))}"
            )
        if len(types) != 1:
            raise ModelError(
                "the parameters of a sliced network must have one dtype and be on one device; these are "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in types)) or 'none'}"
            )
        return tensors

    def _raise_not_finite(self, of_model: str, count: int, coordinate: int) -> NoReturn:
        """Raise ModelError for `count` values that are not finite, the first of them at `coordinate`."""
        raise ModelError(
            f"peer {self.peer!r}{of_model}: {count} values are not finite, the first in parameter "
            f"{self.slicing.anatomy.parameter_at(coordinate)!r}; lower the learning rate or look at the "
            "peer's data"
        )

    def _coordinates_of(self, model: str) -> slice | Tensor:
        """Return the coordinates that a model averages; ModelError if it averages none here."""
        if model not in self._coordinates:
            self.slicing.coordinates(model)  # raises an error that lists the averaged models
        return self._coordinates[model]


@contextmanager
def naming_single_samples(peer: str, inputs: Tensor) -> Iterator[None]:
    """Turn the error of batch norm for a batch of one sample into a ModelError with a remedy."""
    try:
        yield
    except ValueError as error:
        if len(inputs) > 1:
            raise
        raise ModelError(
            f"peer {peer!r}: a batch has only one sample, from which batch norm gets no variance ({error}); "
            "choose batch and local_samples so that all batches have more, or use group norm"
        ) from error


def permute(network: SlicedNetwork, part: str, order: Sequence[int] | np.ndarray) -> None:
    """Permute the cells of a part in place: the new k-th cell is the old cell `order[k]`.

    Parameters and batch statistics are permuted alike, so the network computes the same as before. If an
    input or output part is permuted, the network takes its inputs or gives its outputs in the new order.
    Values move, but slices do not: if a cell moves into the slice of another partial model, that model
    averages its values from now on.
    """
    anatomy = network.slicing.anatomy
    cells = anatomy.cells(anatomy.find(part))
    permutation = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(permutation), np.arange(len(cells))):
        raise ModelError(
            f"part {part!r} has {len(cells)} cells: its order must hold 0 to {len(cells) - 1}, each once"
        )
    old_cells = np.arange(anatomy.first_cells[-1])  # by new cell, of all parts
    old_cells[cells] = cells[permutation]
    anatomy.permute(named_tensors(network.module), old_cells)


_MODULES_WITH_HOOK: WeakSet[nn.Module] = WeakSet()
"""Modules whose `state_dict` has the following hook."""


def _copy_shared_memory(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Copy the tensors of a `state_dict` out of memory that several networks share (a stack).

    torch.save writes the whole storage of a tensor: one peer's file would contain the values of all peers.
    """
    tensors = {
        name: value
        for name, value in state.items()
        # With `keep_vars` the state holds the parameters themselves, which a copy must not replace.
        if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad
    }
    size = sum({value.data_ptr(): value.nbytes for value in tensors.values()}.values())
    for name, value in tensors.items():
        if value.untyped_storage().nbytes() > size:
            state[name] = value.clone()


def average(networks: Sequence[SlicedNetwork], weights: Sequence[float] | None = None) -> None:
    """Average, in place, every partial model among the networks that have it.

    Networks built with `cross=True` average pairs of unrelated models too. `weights` (for example sample
    counts) has one positive number per network; by default all are equal. Models that only one network has,
    and private coordinates, do not change at all.
    """
    weights = check_weights(networks, weights)
    for model, members in networks_by_model(networks).items():
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
        first_values = values[0].cpu().double()
        total_weight = sum(weights[index] for index in members)
        difference = torch.zeros_like(first_values)
        for index, value in zip(members[1:], values[1:], strict=True):
            difference += (weights[index] / total_weight) * (value.cpu().double() - first_values)
        mean = first_values + difference
        for index in members:
            networks[index].write(model, mean)


def networks_by_model(networks: Sequence[SlicedNetwork]) -> dict[str, list[int]]:
    """Return, for every averaged model, the indices of the networks that have it."""
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
        raise ModelError(
            f"{len(weights)} weights were given for {len(networks)} networks; give one for each"
        )
    for network, weight in zip(networks, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ModelError(f"peer {network.peer!r}: weight {weight} is not a positive number")
    return weights


def check_schema(model: str, first: SlicedNetwork, second: SlicedNetwork) -> None:
    """Raise ModelError unless two networks can average `model`; it names the first entry that differs."""
    entries, other_entries = first.slicing.schema(model), second.slicing.schema(model)
    if entries == other_entries:
        return
    for entry, other in zip(entries, other_entries, strict=False):
        if entry != other:
            raise ModelError(
                f"model {model!r} is not the same on {first.peer!r} and {second.peer!r}: "
                f"{_format_entry(entry)} on {first.peer!r}, {_format_entry(other)} on {second.peer!r}"
            )
    raise ModelError(
        f"model {model!r} is not the same on {first.peer!r} and {second.peer!r}: its schema has "
        f"{len(entries)} entries on {first.peer!r}, {len(other_entries)} on {second.peer!r}"
    )


def _format_entry(entry: tuple[str, tuple[tuple[str, int], ...]]) -> str:
    """Return an entry of a schema as text: `0.weight [2 global × 3 local]`."""
    name, axes = entry
    return f"{name} [{' × '.join(f'{count} {model}'.strip() for model, count in axes)}]"
