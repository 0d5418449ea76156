"""Following channels from layer to layer, with torch-pruning's dependency graph.

Every channel that some layer reads or writes gets a number. Channels that must move together are tied;
what is tied in the end is one cell. A tensor's axis is a list of channel numbers.

Torch-pruning records which layers meet through skips, concatenations, splits and reshapes, and how
channel numbers map on the way. It guesses where a channel axis went, so what it says is not trusted:
numbers that do not fit are refused here, by name, and `prove` checks the result on numbers. Attention
and recurrent layers, which it cannot follow, are replaced in a copy by Linear layers whose cells are heads or
hidden units; the ledger says where those cells stand in the real tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..discovery import BATCH_NORMS, CONVOLUTIONS, TRANSPOSED
from ..errors import ModelError

FIXED = 0
"""The channel that never moves: whatever is tied to it carries no cell (positions, vocabularies)."""
BY_HAND = (
    "name the axes by hand with parts={'name': ['parameter:axis', …]}, or give the module an "
    "anatomy() method"
)
"""What to do where a trace fails, for messages."""

_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def input_name(place: int) -> str:
    """What the part of an input's channels is called."""
    return f"input{place}" if place else "input"


@dataclass(frozen=True)
class Channels:
    """The channels on one side of a layer; `name` is what a part made of them will be called."""

    name: str
    first: int
    count: int
    made: bool
    """Whether a layer makes them (or they are the input), rather than only reads them."""
    given: bool = False
    """Whether they are an input of the whole network."""

    @property
    def ids(self) -> np.ndarray:
        """Their numbers."""
        return np.arange(self.first, self.first + self.count)


class Ends(NamedTuple):
    """What a layer reads and what it makes; the same channels for a layer that works on each alone."""

    reads: Channels
    makes: Channels


@dataclass
class Ledger:
    """Channels, ties between them, and the axes of tensors they stand on."""

    spaces: list[Channels] = field(default_factory=list)
    axes: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """Names of the traced module's tensors by their `id`: tied weights have one name."""
    _by_hand: set[tuple[str, int]] = field(default_factory=set)
    _dropped: list[int] = field(default_factory=list)
    _ties: list[np.ndarray] = field(default_factory=list)
    _total: int = 1  # number 0 is FIXED

    def channels(
        self, name: str, count: int, *, made: bool = True, given: bool = False
    ) -> Channels:
        """Number the channels of one side of a layer."""
        space = Channels(name, self._total, count, made, given)
        self._total += count
        self.spaces.append(space)
        return space

    def tie(self, some: np.ndarray, others: np.ndarray | int) -> None:
        """Let channels be one cell, pair by pair."""
        some = np.asarray(some, np.int64).reshape(-1)
        others = np.broadcast_to(np.asarray(others, np.int64).reshape(-1), some.shape)
        self._ties.append(np.stack([some, others]))

    def gather(self, ids: np.ndarray, groups: int) -> np.ndarray:
        """Let each group of channels be one cell; returns the first channel of every group."""
        grouped = ids.reshape(groups, -1)
        self.tie(grouped, np.repeat(grouped[:, 0], grouped.shape[1]))
        return grouped[:, 0]

    def place(self, tensor: Tensor | str | None, axis: int, ids: np.ndarray) -> None:
        """Say which channel each index of a tensor's axis stands for.

        Tied weights are placed twice; None, a bias that a layer does not have, is passed over.
        """
        if tensor is None:
            return
        if isinstance(tensor, Tensor) and id(tensor) not in self.names:
            raise ModelError(
                f"a layer's tensor of shape {tuple(tensor.shape)} is computed from other parameters "
                "(weight norm, a parametrization), which cannot be traced; take that away, or give the "
                "module an anatomy() method"
            )
        key = (tensor if isinstance(tensor, str) else self.names[id(tensor)], axis)
        if key in self._by_hand:
            self._dropped.append(int(np.min(ids)))
        elif key in self.axes:
            self.tie(self.axes[key], ids)
        else:
            self.axes[key] = np.asarray(ids, np.int64)

    def place_by_hand(self, tensor: str, axis: int, ids: np.ndarray) -> None:
        """The same, said by a user: what the trace finds for this axis does not count."""
        self.place(tensor, axis, ids)
        self._by_hand.add((tensor, axis))

    def place_linear(self, layer: Any, reads: np.ndarray, makes: np.ndarray) -> None:
        """Place a dense layer's weight and bias."""
        self.place(layer.weight, 0, makes)
        self.place(layer.weight, 1, reads)
        self.place(layer.bias, 0, makes)

    def dropped(self, space: Channels) -> bool:
        """Whether a user named an axis that these channels stand on, so that they are not traced."""
        return any(space.first <= one < space.first + space.count for one in self._dropped)

    def cells(self) -> np.ndarray:
        """For every channel the number of its cell; 0 for those that never move."""
        pairs = np.concatenate([np.zeros((2, 1), np.int64), *self._ties], axis=1)
        graph = coo_array((np.ones(pairs.shape[1], np.int8), pairs), shape=(self._total,) * 2)
        component = connected_components(graph, directed=False)[1]
        # Cells are numbered by their first channel; the component of FIXED comes first, as 0.
        _, first = np.unique(component, return_index=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[component]


# --- layers -------------------------------------------------------------------------------------


def _register(ledger: Ledger, name: str, layer: nn.Module) -> Ends | None:
    """Enter a layer into the ledger; None for one without channels of its own."""
    if isinstance(layer, CONVOLUTIONS):
        return _convolution(ledger, name, layer)
    if isinstance(layer, nn.Linear):
        reads = ledger.channels(f"{name}.in", layer.in_features, made=False)
        makes = ledger.channels(name, layer.out_features)
        ledger.place_linear(layer, reads.ids, makes.ids)
        return Ends(reads, makes)
    if isinstance(layer, nn.Embedding):
        makes = ledger.channels(name, layer.embedding_dim)
        # Which row a token reads is data, so rows cannot change places.
        ledger.place(layer.weight, 0, np.full(layer.num_embeddings, FIXED))
        ledger.place(layer.weight, 1, makes.ids)
        return Ends(makes, makes)
    if isinstance(layer, _NORMS):
        count = layer.num_features
    elif isinstance(layer, nn.LayerNorm):
        count = int(layer.normalized_shape[0])
    elif isinstance(layer, nn.GroupNorm):
        count = layer.num_channels
    elif isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
        count = layer.num_parameters
    else:
        return None
    both = ledger.channels(name, count, made=False)  # a layer that treats channels one by one
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.ndim and tensor.shape[0] == count:
            ledger.place(tensor, 0, both.ids)
    if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
        ledger.gather(both.ids, layer.num_groups)
    return Ends(both, both)


def _convolution(ledger: Ledger, name: str, layer: Any) -> Ends:
    reads = ledger.channels(f"{name}.in", layer.in_channels, made=False)
    makes = ledger.channels(name, layer.out_channels)
    source, target = (0, 1) if isinstance(layer, TRANSPOSED) else (1, 0)
    if layer.groups == 1:
        ledger.place(layer.weight, source, reads.ids)
        ledger.place(layer.weight, target, makes.ids)
    else:
        # Groups change places as wholes: what a group reads and what it makes is one cell. A
        # depthwise convolution is the case of groups of one channel.
        inside = ledger.gather(reads.ids, layer.groups)
        ledger.tie(ledger.gather(makes.ids, layer.groups), inside)
        ledger.place(layer.weight, 0, (reads if source == 0 else makes).ids)
    ledger.place(layer.bias, 0, makes.ids)
    return Ends(reads, makes)


# --- layers that a tracer of channels cannot follow ---------------------------------------------


def _stand_in(ledger: Ledger, name: str, module: nn.Module) -> dict[nn.Module, Ends] | None:
    """Replace the forward of one module of a copy by Linear layers, which are returned."""
    if isinstance(module, nn.LSTM | nn.GRU | nn.RNN):
        return _recurrent(ledger, name, module)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(ledger, name, module)
    if _is_packed_attention(module):
        return _packed_attention(ledger, name, module)
    return None


def _replace(module: nn.Module, forward: Callable[..., Any], layers: Sequence[nn.Module]) -> None:
    like = next(module.parameters())
    for index, layer in enumerate(layers):
        module.add_module(f"stand_in_{index}", layer.to(like))
    module.forward = forward


def _recurrent(ledger: Ledger, name: str, module: nn.RNNBase) -> dict[nn.Module, Ends]:
    if module.proj_size:
        raise ModelError(
            f"layer {name!r}: an LSTM with proj_size has two kinds of cells; leave proj_size out, or "
            "name its parts by hand"
        )
    cells, ways = module.hidden_size, 2 if module.bidirectional else 1
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    layers: dict[nn.Module, Ends] = {}
    for level in range(module.num_layers):
        reading = module.input_size if level == 0 else ways * cells
        reads = ledger.channels(f"{name}.in{level}", reading, made=False)
        label = name if module.num_layers == 1 else f"{name}.{level}"
        makes = ledger.channels(label, ways * cells)
        for way in range(ways):
            own = makes.ids[way * cells : (way + 1) * cells]
            suffix = f"_l{level}{'_reverse' if way else ''}"
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                ledger.place(getattr(module, kind + suffix, None), 0, np.tile(own, gates))
            ledger.place(getattr(module, f"weight_ih{suffix}"), 1, reads.ids)
            ledger.place(getattr(module, f"weight_hh{suffix}"), 1, own)
        layers[nn.Linear(reading, ways * cells)] = Ends(reads, makes)
    chain = list(layers)

    def forward(x: Tensor, *_: Any, **__: Any) -> Any:
        for layer in chain:
            x = layer(x)
        time = 1 if module.batch_first else 0
        state = x.mean(time)[None] if x.ndim == 3 else x[-1:]
        if ways == 2 or module.num_layers > 1:
            state = state.detach()  # states of all levels and ways in one: not followed
        return x, (state, state) if isinstance(module, nn.LSTM) else state

    _replace(module, forward, chain)
    return layers


def _attention(ledger: Ledger, name: str, module: nn.MultiheadAttention) -> dict[nn.Module, Ends]:
    """Queries, keys and values by head; within a head the dimensions keep their places."""
    heads, width = module.num_heads, module.embed_dim
    inner = ledger.channels(f"{name}.heads", heads)
    by_head = np.repeat(inner.ids, width // heads)
    reads = [
        ledger.channels(f"{name}.{what}", size, made=False)
        for what, size in (("query", width), ("key", module.kdim), ("value", module.vdim))
    ]
    if module.in_proj_weight is not None:
        for other in reads[1:]:
            ledger.tie(reads[0].ids, other.ids)
        ledger.place(module.in_proj_weight, 0, np.tile(by_head, 3))
        ledger.place(module.in_proj_weight, 1, reads[0].ids)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for weight, read in zip(weights, reads, strict=True):
            ledger.place(weight, 0, by_head)
            ledger.place(weight, 1, read.ids)
    ledger.place(module.in_proj_bias, 0, np.tile(by_head, 3))
    for extra in (module.bias_k, module.bias_v):
        ledger.place(extra, 2, by_head)
    makes = ledger.channels(name, width)
    ledger.place_linear(module.out_proj, by_head, makes.ids)
    middle = [nn.Linear(read.count, heads) for read in reads]
    out = nn.Linear(heads, width)

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        time = 0 if query.ndim == 2 or not module.batch_first else 1
        seen = middle[1](key) + middle[2](value)
        return out(middle[0](query) + seen.mean(time, keepdim=True)), None

    _replace(module, forward, [*middle, out])
    layers = {layer: Ends(read, inner) for layer, read in zip(middle, reads, strict=True)}
    return {**layers, out: Ends(inner, makes)}


def _is_packed_attention(module: nn.Module) -> bool:
    """The usual shape in vision libraries: one Linear for queries, keys and values, one to leave."""
    qkv, proj = getattr(module, "qkv", None), getattr(module, "proj", None)
    heads = getattr(module, "num_heads", None)
    return (
        isinstance(qkv, nn.Linear)
        and isinstance(proj, nn.Linear)
        and isinstance(heads, int)
        and qkv.out_features == 3 * proj.in_features
        and proj.in_features % heads == 0
    )


def _packed_attention(ledger: Ledger, name: str, module: Any) -> dict[nn.Module, Ends]:
    heads, qkv, proj = module.num_heads, module.qkv, module.proj
    reads = ledger.channels(f"{name}.in", qkv.in_features, made=False)
    inner = ledger.channels(f"{name}.heads", heads)
    by_head = np.repeat(inner.ids, proj.in_features // heads)
    ledger.place_linear(qkv, reads.ids, np.tile(by_head, 3))
    for key, tensor in module.named_parameters(recurse=False):
        # Biases that are added to the scores have one column for every head.
        if tensor.ndim == 2 and tensor.shape[1] == heads and "bias" in key:
            ledger.place(tensor, 1, inner.ids)
        elif tensor.shape == (proj.in_features,) and key in ("q_bias", "k_bias", "v_bias"):
            ledger.place(tensor, 0, by_head)
    makes = ledger.channels(name, proj.out_features)
    ledger.place_linear(proj, by_head, makes.ids)
    enter, leave = nn.Linear(qkv.in_features, heads), nn.Linear(heads, proj.out_features)
    _replace(module, lambda x, *_, **__: leave(enter(x)), [enter, leave])
    return {enter: Ends(reads, inner), leave: Ends(inner, makes)}


# --- the trace ----------------------------------------------------------------------------------


class _Whole(nn.Module):
    """The module, with a layer before each of its inputs that stands for the input's channels."""

    def __init__(self, module: nn.Module, inputs: Sequence[nn.Module]):
        super().__init__()
        self.body, self.inputs = module, nn.ModuleList(inputs)

    def forward(self, *given: Tensor) -> Any:
        return self.body(*(layer(x) for layer, x in zip(self.inputs, given, strict=True)))


def trace(
    module: nn.Module, example: tuple[Tensor, ...], dims: Sequence[int | None], ledger: Ledger
) -> list[Channels]:
    """Fill the ledger with the channels of `module`; returns those that leave it as outputs.

    `dims` says which dimension of each example input holds channels, None where none does.
    """
    # Imported here: it costs seconds, and peers whose parts are known need not pay them.
    from torch_pruning import DependencyGraph

    body = copy.deepcopy(module).eval().requires_grad_(True)
    ledger.names = {id(value): name for name, value in body.named_buffers()}
    ledger.names |= {id(value): name for name, value in body.named_parameters()}
    ends: dict[Any, Ends] = {}
    inputs: list[nn.Module] = []
    for index, (x, dim) in enumerate(zip(example, dims, strict=True)):
        inputs.append(_input_layer(x, dim))
        if dim is not None:
            made = ledger.channels(input_name(index), x.shape[dim], given=True)
            ends[inputs[-1]] = Ends(made, made)
    replaced: list[nn.Module] = []  # which the trace must not see
    for name, layer in list(body.named_modules()):
        if layer in replaced:
            continue
        if (layers := _stand_in(ledger, name or "output", layer)) is not None:
            ends.update(layers)
            replaced += [one for one in layer.modules() if one not in layers]
        elif (own := _register(ledger, name or "output", layer)) is not None:
            ends[layer] = own
    whole = _Whole(body, inputs).eval()
    _check_runs(whole, example)
    graph: Any = DependencyGraph()
    try:
        with _layer_by_layer(), torch.enable_grad():
            graph.build_dependency(whole, example, ignored_layers=replaced, verbose=False)
    except Exception as error:  # whatever a tracer of autograd graphs stumbles over
        raise ModelError(
            f"{type(module).__name__} cannot be traced ({type(error).__name__}: {error}); {BY_HAND}"
        ) from error
    for node in list(graph.module2node.values()):
        if isinstance(node.module, nn.Parameter) and node.module not in ends:
            name, size = ledger.names[id(node.module)], node.module.shape[node.pruning_dim]
            both = ledger.channels(name, size, made=False)
            ledger.place(name, node.pruning_dim, both.ids)
            ends[node.module] = Ends(both, both)
    leaving: list[Channels] = []
    for layer, end in ends.items():
        if not end.makes.made or layer not in graph.module2node:
            continue
        if not ledger.dropped(end.makes):
            _follow(graph, layer, ends, ledger)
        if not graph.module2node[layer].outputs:
            leaving.append(end.makes)
    return leaving or _last(graph, ends)


def _input_layer(x: Tensor, dim: int | None) -> nn.Module:
    """A layer of as many channels as the input has, that torch-pruning knows."""
    if dim is None:
        return nn.Identity()
    count = x.shape[dim]
    if dim in (x.ndim - 1, -1):
        return nn.Linear(count, count).to(x)
    return {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[x.ndim](count, count, 1).to(x)


class _Index(NamedTuple):
    """A channel here and the one it comes from, as torch-pruning's mappings of indices take them."""

    idx: int
    root_idx: int


def _follow(graph: Any, layer: nn.Module, ends: dict[Any, Ends], ledger: Ledger) -> None:
    """Tie what a layer makes to every channel that it meets, through all index mappings."""
    root = ends[layer].makes
    pruner = graph.get_pruner_of_module(layer)
    start = [_Index(i, i) for i in range(root.count)]
    stack = [(graph.module2node[layer], pruner.prune_out_channels, start)]
    seen: set[tuple[Any, ...]] = set()
    while stack:
        node, handler, indices = stack.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(handler):
                continue
            moved = indices
            for mapping in dependency.index_mapping:
                if mapping is not None:
                    moved = mapping(moved)
            key = (id(dependency.target), dependency.handler, tuple(sorted(moved)))
            if not moved or key in seen:
                continue
            seen.add(key)
            met = ends.get(dependency.target.module)
            if met is not None:
                reads = graph.is_in_channel_pruning_fn(dependency.handler)
                makes = graph.is_out_channel_pruning_fn(dependency.handler)
                side = met.reads if reads and not makes else met.makes
                if ledger.dropped(side):
                    continue
                here, there = np.array([(index.idx, index.root_idx) for index in moved]).T
                if here.max() >= side.count or here.min() < 0:
                    raise ModelError(
                        f"channels of {root.name!r} ({root.count} of them) reach {side.name!r}, which has "
                        f"only {side.count}: a reshape or a transposition on the way cannot be followed; "
                        f"{BY_HAND}"
                    )
                ledger.tie(side.first + here, root.first + there)
            stack.append((dependency.target, dependency.handler, moved))


def _last(graph: Any, ends: dict[Any, Ends]) -> list[Channels]:
    """The makers from which the output comes when operations without channels follow them."""
    makers: list[Channels] = []
    stack = [node for node in graph.module2node.values() if not node.outputs]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        end = ends.get(node.module)
        if end is not None and end.makes.made:
            makers.append(end.makes)
        else:
            stack += node.inputs
    return makers


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Let torch's own attention run layer by layer, as the trace needs it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_READING = {
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "item", "tolist",
    "is_nonzero", "nonzero", "argwhere", "equal", "allclose",
}  # fmt: skip
"""Functions of torch by which Python learns what a tensor holds."""


class _Watch(TorchFunctionMode):
    """Knows which module is computing, and notes who asks for a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = ["the network"]
        self.asked = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.asked and (name in _READING or (name == "where" and len(args) == 1)):
            self.asked = f"{self.inside[-1]} asks for a value ({name.strip('_')})"
        return func(*args, **(kwargs or {}))


def _check_runs(whole: _Whole, example: tuple[Tensor, ...]) -> None:
    """Run once under watch, so that errors can name the place."""
    watch = _Watch()
    hooks = []
    for name, layer in whole.body.named_modules():
        label = f"{name!r} ({type(layer).__name__})" if name else type(layer).__name__
        enter = layer.register_forward_pre_hook(lambda *_, label=label: watch.inside.append(label))
        leave = layer.register_forward_hook(lambda *_: watch.inside.pop() and None)
        hooks += [enter, leave]
    try:
        with _layer_by_layer(), torch.no_grad(), watch:
            whole(*example)
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f"the example input does not run through the network: {type(error).__name__} in "
            f"{watch.inside[-1]}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if watch.asked:
        raise ModelError(
            f"{watch.asked} while it computes: control flow that depends on data cannot be traced, "
            "another input may take another way; give the module an anatomy() method, which says by hand "
            "which cells each parameter touches"
        )
