"""Find the parts of any torch module by tracing its channels from layer to layer.

Every input and output channel of every layer gets an id. Channels that can only be permuted together are
tied; all channels that are tied to each other form one cell. An axis of a tensor is an array of channel ids.

Torch-pruning records which layers are connected through skips, concatenations, splits and reshapes, and how
channel indices map along each connection. It guesses where a reshape moves the channel axis, so its mappings
are checked: indices out of range raise an error that names the layer, and `check_by_permutation` compares
outputs numerically. Torch-pruning cannot trace attention and recurrent layers. In a copy of the module they
are replaced by Linear layers whose channels are heads or hidden units, and the channel table records on which
axes of the original tensors they lie. Cells that lie on the same axes, equally often, form one part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .anatomy import Anatomy, ParameterMap, Part
from .discovery import (
    BATCH_NORMS,
    CONVOLUTIONS,
    NAME_AXES_HINT,
    TRANSPOSED_CONVOLUTIONS,
    input_name,
    named_tensors,
)
from .errors import ModelError

FIXED = 0
"""The id of the channel that is never permuted. Axes tied to it have no cells (positions, vocabularies)."""
_PER_CHANNEL = (
    ((*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "num_features"),
    (nn.LayerNorm, "normalized_shape"),
    (nn.GroupNorm, "num_channels"),
    (nn.PReLU, "num_parameters"),
)
"""Layer types that process each channel separately, and the attribute that holds their number of channels."""


def find_parts(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    dims: Sequence[int | None],
    by_hand: Mapping[str, Sequence[str]],
) -> Anatomy:
    """Return the anatomy of a module: trace its channels, then group them into parts.

    `dims` holds the channel dimension of each example input, None for inputs without channels; `by_hand` is
    the argument `parts` of `discover`.
    """
    table = ChannelTable()
    _assign_by_hand(module, by_hand, table)
    # Substitute layers draw random initial weights: the caller's random state must not change.
    random_state = torch.random.get_rng_state()
    try:
        network_outputs = _trace(module, inputs, dims, table)
    finally:
        torch.random.set_rng_state(random_state)
    return _build_anatomy(module, table, network_outputs)


@dataclass(frozen=True)
class Channels:
    """The input or output channels of a layer; their ids are consecutive. `name` becomes the part's name."""

    name: str
    first_id: int
    count: int
    produced: bool
    """True for outputs of a layer and inputs of the network; False for channels that a layer only reads."""
    is_network_input: bool = False

    @property
    def ids(self) -> np.ndarray:
        """The ids of the channels."""
        return np.arange(self.first_id, self.first_id + self.count)


class LayerChannels(NamedTuple):
    """The input and output channels of a layer; identical for layers that process each channel separately."""

    inputs: Channels
    outputs: Channels


@dataclass
class ChannelTable:
    """All channels of a module, the ties between them, and the channel ids on every axis of its tensors."""

    all_channels: list[Channels] = field(default_factory=list)
    axes: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """Channel ids by (tensor name, axis)."""
    tensor_names: dict[int, str] = field(default_factory=dict)
    """Names of the traced module's tensors by their `id()`: weights shared by two layers have one name."""
    _axes_by_hand: set[tuple[str, int]] = field(default_factory=set)
    _untraced_ids: list[int] = field(default_factory=list)
    _ties: list[np.ndarray] = field(default_factory=list)
    _next_id: int = 1  # id 0 is FIXED

    def add_channels(
        self, name: str, count: int, *, produced: bool = True, is_network_input: bool = False
    ) -> Channels:
        """Give ids to the input or output channels of a layer."""
        channels = Channels(name, self._next_id, count, produced, is_network_input)
        self._next_id += count
        self.all_channels.append(channels)
        return channels

    def tie(self, ids: np.ndarray, other_ids: np.ndarray | int) -> None:
        """Tie `ids[k]` to `other_ids[k]`: tied channels belong to the same cell."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        other_ids = np.broadcast_to(np.asarray(other_ids, np.int64).reshape(-1), ids.shape)
        self._ties.append(np.stack([ids, other_ids]))

    def tie_groups(self, ids: np.ndarray, groups: int) -> np.ndarray:
        """Tie the channels of each group into one cell; returns the first channel id of every group."""
        grouped = ids.reshape(groups, -1)
        self.tie(grouped, np.repeat(grouped[:, 0], grouped.shape[1]))
        return grouped[:, 0]

    def assign(self, tensor: Tensor | str | None, axis: int, ids: np.ndarray) -> None:
        """Record the channel id of every index of a tensor's axis.

        An axis of a weight shared by two layers is assigned twice, which ties the two layers' channels.
        None (a layer without bias) is ignored.
        """
        if tensor is None:
            return
        if isinstance(tensor, Tensor) and id(tensor) not in self.tensor_names:
            raise ModelError(
                f"a layer's tensor of shape {tuple(tensor.shape)} is computed from other parameters "
                "(weight norm, a parametrization), which cannot be traced; remove the parametrization, or "
                "give the module an anatomy() method"
            )
        key = (tensor if isinstance(tensor, str) else self.tensor_names[id(tensor)], axis)
        if key in self._axes_by_hand:
            self._untraced_ids.append(int(np.min(ids)))
        elif key in self.axes:
            self.tie(self.axes[key], ids)
        else:
            self.axes[key] = np.asarray(ids, np.int64)

    def assign_by_hand(self, tensor: str, axis: int, ids: np.ndarray) -> None:
        """Record the channel ids that a user gave for an axis; later `assign` calls for it have no effect."""
        self.assign(tensor, axis, ids)
        self._axes_by_hand.add((tensor, axis))

    def assign_linear(self, layer: Any, input_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Assign the axes of a dense layer's weight and bias."""
        self.assign(layer.weight, 0, output_ids)
        self.assign(layer.weight, 1, input_ids)
        self.assign(layer.bias, 0, output_ids)

    def is_untraced(self, channels: Channels) -> bool:
        """Return whether the user assigned an axis of these channels by hand, so that they are not traced."""
        first = channels.first_id
        return any(first <= id < first + channels.count for id in self._untraced_ids)

    def cell_numbers(self) -> np.ndarray:
        """Return the cell number of every channel id; 0 for channels that are never permuted."""
        pairs = np.concatenate([np.zeros((2, 1), np.int64), *self._ties], axis=1)
        graph = coo_array((np.ones(pairs.shape[1], np.int8), pairs), shape=(self._next_id,) * 2)
        component = connected_components(graph, directed=False)[1]
        # Cells are numbered in the order of their lowest channel id, so the cell of FIXED is number 0.
        _, lowest_id = np.unique(component, return_index=True)
        number = np.empty(len(lowest_id), np.int64)
        number[np.argsort(lowest_id)] = np.arange(len(lowest_id))
        return number[component]


# --- layers -------------------------------------------------------------------------------------


def _register(table: ChannelTable, name: str, layer: nn.Module) -> dict[nn.Module, LayerChannels]:
    """Add a layer's channels to the table.

    Returns the channels by layer: of the layer itself, or of the layers that replace it in the trace (see
    `_substitute`). The result is empty for a layer without channels of its own.
    """
    if isinstance(layer, nn.LSTM | nn.GRU | nn.RNN):
        return _recurrent(table, name, layer)
    if isinstance(layer, nn.MultiheadAttention):
        return _attention(table, name, layer)
    if _is_packed_attention(layer):
        return _packed_attention(table, name, layer)
    if isinstance(layer, CONVOLUTIONS):
        return {layer: _convolution(table, name, layer)}
    if isinstance(layer, nn.Linear):
        inputs = table.add_channels(f"{name}.in", layer.in_features, produced=False)
        outputs = table.add_channels(name, layer.out_features)
        table.assign_linear(layer, inputs.ids, outputs.ids)
        return {layer: LayerChannels(inputs, outputs)}
    if isinstance(layer, nn.Embedding):
        outputs = table.add_channels(name, layer.embedding_dim)
        # A token is the index of a row, so rows cannot be permuted.
        table.assign(layer.weight, 0, np.full(layer.num_embeddings, FIXED))
        table.assign(layer.weight, 1, outputs.ids)
        return {layer: LayerChannels(outputs, outputs)}
    attribute = next((key for types, key in _PER_CHANNEL if isinstance(layer, types)), None)
    if attribute is None or (isinstance(layer, nn.PReLU) and layer.num_parameters == 1):
        return {}
    count = int(np.ravel(getattr(layer, attribute))[0])
    channels = table.add_channels(name, count, produced=False)  # inputs and outputs alike
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.ndim and tensor.shape[0] == count:
            table.assign(tensor, 0, channels.ids)
    if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
        table.tie_groups(channels.ids, layer.num_groups)
    return {layer: LayerChannels(channels, channels)}


def _convolution(table: ChannelTable, name: str, layer: Any) -> LayerChannels:
    """Add the channels of a convolution to the table, and return them."""
    inputs = table.add_channels(f"{name}.in", layer.in_channels, produced=False)
    outputs = table.add_channels(name, layer.out_channels)
    input_axis, output_axis = (0, 1) if isinstance(layer, TRANSPOSED_CONVOLUTIONS) else (1, 0)
    if layer.groups == 1:
        table.assign(layer.weight, input_axis, inputs.ids)
        table.assign(layer.weight, output_axis, outputs.ids)
    else:
        # Only whole groups can be permuted: the inputs and outputs of a group are one cell. In a
        # depthwise convolution every group has one channel.
        input_groups = table.tie_groups(inputs.ids, layer.groups)
        table.tie(table.tie_groups(outputs.ids, layer.groups), input_groups)
        table.assign(layer.weight, 0, (inputs if input_axis == 0 else outputs).ids)
    table.assign(layer.bias, 0, outputs.ids)
    return LayerChannels(inputs, outputs)


# --- layers that torch-pruning cannot trace, and the Linear layers that replace them -------------


def _substitute(
    module: nn.Module, forward: Callable[..., Any], layers: Sequence[nn.Module]
) -> None:
    """Replace a module's computation, in the traced copy, by `forward`, which uses only `layers`."""
    parameter = next(module.parameters())  # its dtype and device are those of the module
    for index, layer in enumerate(layers):
        module.add_module(f"substitute_{index}", layer.to(parameter))
    module.forward = forward


class _States:
    """The last hidden states of all layers and directions, in torch's order.

    Those that the module picks by number are traced. All else sees the tensor that torch returns, in which
    their channels cannot be told apart.
    """

    def __init__(self, states: list[Tensor]):
        self._states = states

    def __getitem__(self, key: Any) -> Any:
        return self._states[key] if isinstance(key, int) else self._stacked()[key]

    def __len__(self) -> int:
        return len(self._states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stacked(), name)

    def _stacked(self) -> Tensor:
        return torch.stack(self._states).detach()


def _recurrent(
    table: ChannelTable, name: str, module: nn.RNNBase
) -> dict[nn.Module, LayerChannels]:
    """Register a recurrent module: each layer becomes one Linear layer per direction, of hidden units."""
    if module.proj_size:
        raise ModelError(
            f"layer {name!r}: an LSTM with proj_size has hidden units and projected outputs, which "
            "cannot be sliced together; set proj_size to 0, or name its parts by hand"
        )
    units, directions = module.hidden_size, 2 if module.bidirectional else 1
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    layers: dict[nn.Module, LayerChannels] = {}
    levels: list[list[nn.Module]] = []
    for level in range(module.num_layers):
        input_size = module.input_size if level == 0 else directions * units
        inputs = table.add_channels(f"{name}.in{level}", input_size, produced=False)
        label = name if module.num_layers == 1 else f"{name}.{level}"
        levels.append([nn.Linear(input_size, units) for _ in range(directions)])
        for direction, layer in enumerate(levels[-1]):
            outputs = table.add_channels(label, units)
            layers[layer], unit_ids = LayerChannels(inputs, outputs), outputs.ids
            suffix = f"_l{level}{'_reverse' if direction else ''}"
            for prefix in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                table.assign(getattr(module, prefix + suffix, None), 0, np.tile(unit_ids, gates))
            table.assign(getattr(module, f"weight_ih{suffix}"), 1, inputs.ids)
            table.assign(getattr(module, f"weight_hh{suffix}"), 1, unit_ids)

    def forward(x: Tensor, *_: Any, **__: Any) -> Any:
        time = 1 if module.batch_first and x.ndim == 3 else 0
        states: list[Tensor] = []
        for directions_of_level in levels:
            outputs = [layer(x) for layer in directions_of_level]
            states += [output.mean(time) for output in outputs]
            x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        state = states[0][None] if len(states) == 1 else _States(states)
        return x, (state, state) if isinstance(module, nn.LSTM) else state

    _substitute(module, forward, list(layers))
    return layers


def _attention(
    table: ChannelTable, name: str, module: nn.MultiheadAttention
) -> dict[nn.Module, LayerChannels]:
    """Register an attention layer whose cells are heads; dimensions within a head are not permuted."""
    heads, width = module.num_heads, module.embed_dim
    head_channels = table.add_channels(f"{name}.heads", heads)
    head_ids = np.repeat(head_channels.ids, width // heads)
    inputs = [
        table.add_channels(f"{name}.{role}", size, produced=False)
        for role, size in (("query", width), ("key", module.kdim), ("value", module.vdim))
    ]
    if module.in_proj_weight is not None:
        for other in inputs[1:]:
            table.tie(inputs[0].ids, other.ids)
        table.assign(module.in_proj_weight, 0, np.tile(head_ids, 3))
        table.assign(module.in_proj_weight, 1, inputs[0].ids)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for weight, source in zip(weights, inputs, strict=True):
            table.assign(weight, 0, head_ids)
            table.assign(weight, 1, source.ids)
    table.assign(module.in_proj_bias, 0, np.tile(head_ids, 3))
    for bias in (module.bias_k, module.bias_v):
        table.assign(bias, 2, head_ids)
    outputs = table.add_channels(name, width)
    table.assign_linear(module.out_proj, head_ids, outputs.ids)
    to_heads = [nn.Linear(source.count, heads) for source in inputs]
    out = nn.Linear(heads, width)

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        time = 0 if query.ndim == 2 or not module.batch_first else 1
        attended = to_heads[1](key) + to_heads[2](value)
        return out(to_heads[0](query) + attended.mean(time, keepdim=True)), None

    _substitute(module, forward, [*to_heads, out])
    layers = {
        layer: LayerChannels(source, head_channels)
        for layer, source in zip(to_heads, inputs, strict=True)
    }
    return {**layers, out: LayerChannels(head_channels, outputs)}


def _is_packed_attention(module: nn.Module) -> bool:
    """Return whether a module has the form usual in vision libraries.

    That is one Linear layer `qkv` for queries, keys and values together, and one output layer `proj`.
    """
    qkv, proj = getattr(module, "qkv", None), getattr(module, "proj", None)
    heads = getattr(module, "num_heads", None)
    return (
        isinstance(qkv, nn.Linear)
        and isinstance(proj, nn.Linear)
        and isinstance(heads, int)
        and qkv.out_features == 3 * proj.in_features
        and proj.in_features % heads == 0
    )


def _packed_attention(
    table: ChannelTable, name: str, module: Any
) -> dict[nn.Module, LayerChannels]:
    """Register an attention layer with a joint `qkv` layer (`_is_packed_attention`); its cells are heads."""
    heads, qkv, proj = module.num_heads, module.qkv, module.proj
    inputs = table.add_channels(f"{name}.in", qkv.in_features, produced=False)
    head_channels = table.add_channels(f"{name}.heads", heads)
    head_ids = np.repeat(head_channels.ids, proj.in_features // heads)
    table.assign_linear(qkv, inputs.ids, np.tile(head_ids, 3))
    for key, tensor in module.named_parameters(recurse=False):
        # A bias that is added to the attention scores has one column for every head.
        if tensor.ndim == 2 and tensor.shape[1] == heads and "bias" in key:
            table.assign(tensor, 1, head_channels.ids)
        elif tensor.shape == (proj.in_features,) and key in ("q_bias", "k_bias", "v_bias"):
            table.assign(tensor, 0, head_ids)
    outputs = table.add_channels(name, proj.out_features)
    table.assign_linear(proj, head_ids, outputs.ids)
    to_heads, out = nn.Linear(qkv.in_features, heads), nn.Linear(heads, proj.out_features)
    _substitute(module, lambda x, *_, **__: out(to_heads(x)), [to_heads, out])
    return {
        to_heads: LayerChannels(inputs, head_channels),
        out: LayerChannels(head_channels, outputs),
    }


# --- the trace ----------------------------------------------------------------------------------


class _WithInputLayers(nn.Module):
    """A module behind one extra layer per input: torch-pruning traces from layers, not from inputs."""

    def __init__(self, module: nn.Module, input_layers: Sequence[nn.Module]):
        super().__init__()
        self.module, self.input_layers = module, nn.ModuleList(input_layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*(f(x) for f, x in zip(self.input_layers, inputs, strict=True)))


def _trace(
    module: nn.Module, example: tuple[Tensor, ...], dims: Sequence[int | None], table: ChannelTable
) -> list[Channels]:
    """Fill the table with the channels of `module`; returns the channels of the network's outputs."""
    # Imported here because the import takes seconds, and only peers that trace a module need it.
    from torch_pruning import DependencyGraph

    try:
        traced_copy = copy.deepcopy(module).eval().requires_grad_(True)
    except Exception as error:  # the user's module may raise anything
        raise ModelError(
            f"{type(module).__name__} cannot be copied, and only a copy can be traced: "
            f"{' '.join(str(error).split())}"
        ) from error
    table.tensor_names = {id(value): name for name, value in named_tensors(traced_copy).items()}
    channels_of: dict[Any, LayerChannels] = {}
    input_layers: list[nn.Module] = []
    for index, (x, dim) in enumerate(zip(example, dims, strict=True)):
        input_layers.append(_input_layer(x, dim))
        if dim is not None:
            channels = table.add_channels(input_name(index), x.shape[dim], is_network_input=True)
            channels_of[input_layers[-1]] = LayerChannels(channels, channels)
    replaced: list[nn.Module] = []  # torch-pruning must ignore these
    for name, layer in list(traced_copy.named_modules()):
        if layer not in replaced:
            registered = _register(table, name or "output", layer)
            channels_of.update(registered)
            if registered and layer not in registered:  # other layers replace it in the trace
                replaced += [child for child in layer.modules() if child not in registered]
    network = _WithInputLayers(traced_copy, input_layers).eval()
    _check_runs(network, example)
    graph: Any = DependencyGraph()
    try:
        with _without_fused_attention(), torch.enable_grad():
            graph.build_dependency(network, example, ignored_layers=replaced, verbose=False)
    except Exception as error:  # torch-pruning documents no types of errors
        raise ModelError(
            f"{type(module).__name__} cannot be traced ({type(error).__name__}: {error}); {NAME_AXES_HINT}"
        ) from error
    for node in list(graph.module2node.values()):
        if isinstance(node.module, nn.Parameter) and node.module not in channels_of:
            # A parameter that the module's own forward uses, such as a class token.
            name, size = table.tensor_names[id(node.module)], node.module.shape[node.pruning_dim]
            channels = table.add_channels(name, size, produced=False)
            table.assign(name, node.pruning_dim, channels.ids)
            channels_of[node.module] = LayerChannels(channels, channels)
    for layer, (_, outputs) in channels_of.items():
        if outputs.produced and layer in graph.module2node and not table.is_untraced(outputs):
            _tie_downstream(graph, layer, channels_of, table)
    return _output_channels(graph, channels_of)


def _input_layer(x: Tensor, dim: int | None) -> nn.Module:
    """Return a layer of a type that torch-pruning supports, with as many channels as the input has."""
    if dim is None:
        return nn.Identity()
    count = x.shape[dim]
    if dim in (x.ndim - 1, -1):
        return nn.Linear(count, count).to(x)
    return {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[x.ndim](count, count, 1).to(x)


class _Index(NamedTuple):
    """A channel's index at the current layer and at the layer where the trace began.

    The field names are those that torch-pruning's index mappings read.
    """

    idx: int
    root_idx: int


def _tie_downstream(
    graph: Any, layer: nn.Module, channels_of: dict[Any, LayerChannels], table: ChannelTable
) -> None:
    """Tie a layer's output channels to all channels connected to them in torch-pruning's graph."""
    root = channels_of[layer].outputs
    pruner = graph.get_pruner_of_module(layer)
    identity = [_Index(i, i) for i in range(root.count)]
    stack = [(graph.module2node[layer], pruner.prune_out_channels, identity)]
    visited: set[tuple[Any, ...]] = set()
    while stack:
        node, handler, indices = stack.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(handler):
                continue
            mapped = indices
            for mapping in dependency.index_mapping:
                if mapping is not None:
                    mapped = mapping(mapped)
            key = (id(dependency.target), dependency.handler, tuple(sorted(mapped)))
            if not mapped or key in visited:
                continue
            visited.add(key)
            target = channels_of.get(dependency.target.module)
            if target is not None:
                prunes_inputs = graph.is_in_channel_pruning_fn(dependency.handler)
                prunes_outputs = graph.is_out_channel_pruning_fn(dependency.handler)
                is_input = prunes_inputs and not prunes_outputs
                reached = target.inputs if is_input else target.outputs
                if table.is_untraced(reached):
                    continue
                at_target, at_root = np.array([(index.idx, index.root_idx) for index in mapped]).T
                if at_target.max() >= reached.count or at_target.min() < 0:
                    raise ModelError(
                        f"channels of {root.name!r} ({root.count} of them) reach {reached.name!r}, which has "
                        f"only {reached.count}: a reshape or transposition between them cannot be traced; "
                        f"{NAME_AXES_HINT}"
                    )
                table.tie(reached.first_id + at_target, root.first_id + at_root)
            stack.append((dependency.target, dependency.handler, mapped))


def _output_channels(graph: Any, channels_of: dict[Any, LayerChannels]) -> list[Channels]:
    """Return the output channels of the last layers; operations without channels may come after them."""
    outputs: list[Channels] = []
    stack = [node for node in graph.module2node.values() if not node.outputs]
    visited: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        channels = channels_of.get(node.module)
        if channels is not None and channels.outputs.produced:
            outputs.append(channels.outputs)
        else:
            stack += node.inputs
    return outputs


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Disable torch's fused attention kernel: the trace must see every layer run."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


_VALUE_READS = {
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "item", "tolist",
    "is_nonzero", "nonzero", "argwhere", "equal", "allclose",
}  # fmt: skip
"""Torch functions that turn a tensor's values into Python values, on which control flow can depend."""


class _ValueReadDetector(TorchFunctionMode):
    """Records the first module that turns a tensor's values into Python values."""

    def __init__(self) -> None:
        super().__init__()
        # Names of the modules whose forward is running, innermost last.
        self.running = ["the network"]
        self.value_read = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.value_read and (name in _VALUE_READS or (name == "where" and len(args) == 1)):
            self.value_read = f"{self.running[-1]} reads a tensor's value ({name.strip('_')})"
        return func(*args, **(kwargs or {}))


def _check_runs(network: _WithInputLayers, example: tuple[Tensor, ...]) -> None:
    """Run the network once on the example; raise, naming the module, if it fails or reads values."""
    detector = _ValueReadDetector()
    running, hooks = detector.running, []
    for name, layer in network.module.named_modules():
        label = f"{name!r} ({type(layer).__name__})" if name else type(layer).__name__
        hooks += [
            layer.register_forward_pre_hook(lambda *_, label=label: running.append(label)),
            layer.register_forward_hook(lambda *_: running.pop() and None),
        ]
    try:
        with _without_fused_attention(), torch.no_grad(), detector:
            network(*example)
    except Exception as error:  # the user's module may raise anything
        raise ModelError(
            f"the example input does not run through the network: {type(error).__name__} in "
            f"{running[-1]}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if detector.value_read:
        raise ModelError(
            f"{detector.value_read} in its forward pass: control flow that depends on data cannot be "
            "traced, because another input may take another branch; give the module an anatomy() method, "
            "which says by hand which cells each parameter touches"
        )


# --- from channels to parts ----------------------------------------------------------------------


def _assign_by_hand(
    module: nn.Module, parts: Mapping[str, Sequence[str]], table: ChannelTable
) -> None:
    """Assign the axes that the user listed by part; axes listed under the empty name have no cells."""
    shapes = {name: tuple(value.shape) for name, value in named_tensors(module).items()}
    for part, entries in parts.items():
        sizes: dict[tuple[str, int], int] = {}
        for entry in [entries] if isinstance(entries, str) else entries:
            pattern, _, axis = entry.rpartition(":")
            matching = [name for name in shapes if fnmatchcase(name, pattern)]
            if not matching or not axis.isdecimal():
                raise ModelError(
                    f"part {part!r}: {entry!r} names no axis of a parameter; write 'parameter:axis', as in "
                    f"'{next(iter(shapes), 'weight')}:0'"
                )
            for name in matching:
                if int(axis) >= len(shapes[name]):
                    raise ModelError(
                        f"part {part!r}: {name!r} has {len(shapes[name])} axes, so there is no axis {axis} "
                        "(axes are counted from 0)"
                    )
                sizes[name, int(axis)] = shapes[name][int(axis)]
        if not part:
            for (name, axis), size in sizes.items():
                table.assign_by_hand(name, axis, np.full(size, FIXED))
            continue
        if len(set(sizes.values())) != 1:
            lengths = ", ".join(f"{name}:{axis} has {n}" for (name, axis), n in sizes.items())
            raise ModelError(f"part {part!r}: its axes must have the same length, but {lengths}")
        channels = table.add_channels(part, next(iter(sizes.values())))
        for name, axis in sizes:
            if (name, axis) in table.axes:
                raise ModelError(f"{name}:{axis} was given to part {part!r} and to another part")
            table.assign_by_hand(name, axis, channels.ids)


def _build_anatomy(
    module: nn.Module, table: ChannelTable, network_outputs: Sequence[Channels]
) -> Anatomy:
    """Return the anatomy of a module whose channels are all in the table."""
    cell_of = _final_cell_numbers(table)
    groups = _cells_by_part(table, cell_of, network_outputs)
    parts = [Part(name, len(cells)) for name, cells, _ in groups]
    # The table numbers cells by their channels, an anatomy part by part.
    part_order = np.concatenate([np.empty(0, np.int64), *(cells for _, cells, _ in groups)])
    new_number = np.full(int(cell_of.max()) + 1, -1, np.int64)
    new_number[part_order] = np.arange(len(part_order))

    def cells_on_axes(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray | None, ...]:
        axes: list[np.ndarray | None] = []
        for axis, size in enumerate(shape):
            ids = table.axes.get((name, axis))
            if ids is not None and len(ids) != size:
                raise ModelError(f"axis {axis} of {name!r} has {size} indices, not {len(ids)}")
            has_cells = ids is not None and (cell_of[ids] != FIXED).all()
            axes.append(new_number[cell_of[ids]] if has_cells else None)
        return tuple(axes)

    parameters: list[ParameterMap] = []
    for name, value in module.named_parameters():
        shape = tuple(value.shape)
        axes, cell = cells_on_axes(name, shape), None
        if all(axis is None for axis in axes):
            # A parameter without cells on any axis (a temperature) becomes a part of one cell.
            cell = sum(part.cells for part in parts)
            parts.append(Part(name, 1))
        parameters.append(ParameterMap(name, shape, axes, cell))
    buffers = [
        ParameterMap(name, tuple(value.shape), cells_on_axes(name, tuple(value.shape)))
        for name, value in module.named_buffers()
        if value.is_floating_point()
    ]
    statistics = [buffer for buffer in buffers if any(axis is not None for axis in buffer.axes)]
    ends = frozenset(name for name, _, is_end in groups if is_end)
    return Anatomy(tuple(parts), tuple(parameters), tuple(statistics), ends)


def _final_cell_numbers(table: ChannelTable) -> np.ndarray:
    """Return the cell number of every channel id, after fixing channels that no layer produces.

    Axes on which some channels are fixed are then fixed entirely.
    """
    # By channel id, whether a layer produces it; id 0 is FIXED.
    produced = np.repeat(
        [False, *(channels.produced for channels in table.all_channels)],
        [1, *(channels.count for channels in table.all_channels)],
    )
    cell_of = table.cell_numbers()
    has_producer = np.zeros(int(cell_of.max()) + 1, bool)
    has_producer[cell_of[produced]] = True
    for channels in table.all_channels:
        traced = has_producer[cell_of[channels.ids]]
        if not traced.any() or table.is_untraced(channels):
            table.tie(channels.ids, FIXED)
        elif not traced.all():
            raise ModelError(
                f"only {int(traced.sum())} of the {channels.count} channels of {channels.name!r} could be "
                f"traced to the layer that produces them; {NAME_AXES_HINT}"
            )
    while True:
        cell_of = table.cell_numbers()
        partly_fixed = [
            ids
            for ids in table.axes.values()
            if (cell_of[ids] == FIXED).any() and (cell_of[ids] != FIXED).any()
        ]
        if not partly_fixed:
            return cell_of
        for ids in partly_fixed:
            table.tie(ids, FIXED)


def _cells_by_part(
    table: ChannelTable, cell_of: np.ndarray, network_outputs: Sequence[Channels]
) -> list[tuple[str, np.ndarray, bool]]:
    """Return each part's name, its cells, and whether it is a network input or output; outputs come last.

    Cells of one part have the same producer and lie on the same axes, equally often.
    """
    axes_of_cell: dict[int, list[tuple[int, int]]] = {}
    for axis, ids in enumerate(table.axes.values()):
        cells, counts = np.unique(cell_of[ids], return_counts=True)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            axes_of_cell.setdefault(cell, []).append((axis, count))
    axes_of_cell.pop(FIXED, None)
    producer = np.full(int(cell_of.max()) + 1, -1, np.int64)
    for index in reversed(range(len(table.all_channels))):
        if table.all_channels[index].produced:
            producer[cell_of[table.all_channels[index].ids]] = index
    output_cells = set(
        np.concatenate([np.empty(0, int), *(cell_of[output.ids] for output in network_outputs)])
    )
    groups: dict[tuple[object, ...], list[int]] = {}
    for cell, axes in sorted(axes_of_cell.items()):
        groups.setdefault((cell in output_cells, int(producer[cell]), *axes), []).append(cell)
    parts: list[tuple[str, np.ndarray, bool]] = []
    for (is_output, *_), cells in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        channels = table.all_channels[producer[cells[0]]]
        count = sum(other.split("#")[0] == channels.name for other, _, _ in parts)
        name = f"{channels.name}#{count + 1}" if count else channels.name
        parts.append((name, np.array(cells), bool(is_output) or channels.is_network_input))
    return parts
