"""Following channels from layer to layer, with torch-pruning's dependency graph.

Every channel that some layer reads or writes gets a number. Channels that must move together are tied;
what is tied in the end is one cell. A tensor's axis is a list of channel numbers.

Torch-pruning records which layers meet through skips, concatenations, splits and reshapes, and how
channel numbers map on the way. It guesses where a channel axis went, so what it says is not trusted:
numbers that do not fit are refused here, by name, and proof.py checks the result on numbers. Attention
and recurrent layers, which it cannot follow, are replaced in a copy by Linear layers whose cells are heads or
hidden units; a table says where those cells stand in the real tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..discovery import BATCH_NORMS
from ..errors import ModelError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

FIXED = 0
"""The channel that never moves: whatever is tied to it carries no cell (positions, vocabularies)."""


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


@dataclass
class Ledger:
    """Channels, ties between them, and the axes of tensors they stand on."""

    spaces: list[Channels] = field(default_factory=list)
    axes: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
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

    def place(self, tensor: str, axis: int, ids: np.ndarray) -> None:
        """Say which channel each index of a tensor's axis stands for. Tied weights are placed twice."""
        key = (tensor, axis)
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

    def dropped(self, space: Channels) -> bool:
        """Whether a user named an axis that these channels stand on, so that they are not traced."""
        return any(space.first <= one < space.first + space.count for one in self._dropped)

    def cells(self) -> np.ndarray:
        """For every channel the number of its cell; 0 for those that never move."""
        pairs = np.concatenate([np.zeros((2, 1), np.int64), *self._ties], axis=1)
        graph = coo_array((np.ones(pairs.shape[1], np.int8), pairs), shape=(self._total,) * 2)
        found = connected_components(graph, directed=False)[1]
        # Cells are numbered by their first channel; the component of FIXED comes first, as 0.
        _, first = np.unique(found, return_index=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[found]


@dataclass(frozen=True)
class Ends:
    """What a layer reads and what it makes; the same channels for a layer that works on each alone."""

    reads: Channels
    makes: Channels


class Names:
    """The names of a module's parameters and buffers, by tensor: tied weights have one name."""

    def __init__(self, module: nn.Module):
        self._of = {id(value): name for name, value in module.named_buffers()}
        self._of |= {id(value): name for name, value in module.named_parameters()}

    def __getitem__(self, tensor: Tensor) -> str:
        if id(tensor) not in self._of:
            raise ModelError(
                f"a layer's tensor of shape {tuple(tensor.shape)} is computed from other parameters "
                "(weight norm, a parametrization), which cannot be traced; take that away, or give the "
                "module an anatomy() method"
            )
        return self._of[id(tensor)]


def register(ledger: Ledger, names: Names, name: str, layer: nn.Module) -> Ends | None:
    """Enter a layer into the ledger; None for one without channels of its own."""
    if isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED)):
        return _convolution(ledger, names, name, layer)
    if isinstance(layer, nn.Linear):
        reads = ledger.channels(f"{name}.in", layer.in_features, made=False)
        makes = ledger.channels(name, layer.out_features)
        ledger.place(names[layer.weight], 0, makes.ids)
        ledger.place(names[layer.weight], 1, reads.ids)
        if layer.bias is not None:
            ledger.place(names[layer.bias], 0, makes.ids)
        return Ends(reads, makes)
    if isinstance(layer, nn.Embedding):
        makes = ledger.channels(name, layer.embedding_dim)
        # Which row a token reads is data, so rows cannot change places.
        ledger.place(names[layer.weight], 0, np.full(layer.num_embeddings, FIXED))
        ledger.place(names[layer.weight], 1, makes.ids)
        return Ends(makes, makes)
    count = _per_channel(layer)
    if count is None:
        return None
    both = ledger.channels(name, count, made=False)
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.ndim and tensor.shape[0] == count:
            ledger.place(names[tensor], 0, both.ids)
    if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
        _gather(ledger, both.ids, layer.num_groups)
    return Ends(both, both)


def _per_channel(layer: nn.Module) -> int | None:
    """How many channels a layer treats one by one."""
    if isinstance(layer, _NORMS):
        return layer.num_features
    if isinstance(layer, nn.LayerNorm):
        return int(layer.normalized_shape[0])
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    if isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
        return layer.num_parameters
    return None


def _convolution(ledger: Ledger, names: Names, name: str, layer: Any) -> Ends:
    reads = ledger.channels(f"{name}.in", layer.in_channels, made=False)
    makes = ledger.channels(name, layer.out_channels)
    source, target = (0, 1) if isinstance(layer, _TRANSPOSED) else (1, 0)
    weight = names[layer.weight]
    if layer.groups == 1:
        ledger.place(weight, source, reads.ids)
        ledger.place(weight, target, makes.ids)
    else:
        # Groups change places as wholes: what a group reads and what it makes is one cell. A
        # depthwise convolution is the case of groups of one channel.
        inside = _gather(ledger, reads.ids, layer.groups)
        ledger.tie(_gather(ledger, makes.ids, layer.groups), inside)
        ledger.place(weight, 0, (reads if source == 0 else makes).ids)
    if layer.bias is not None:
        ledger.place(names[layer.bias], 0, makes.ids)
    return Ends(reads, makes)


def _gather(ledger: Ledger, ids: np.ndarray, groups: int) -> np.ndarray:
    """Let each group of channels be one cell; returns the first channel of every group."""
    grouped = ids.reshape(groups, -1)
    ledger.tie(grouped, np.repeat(grouped[:, 0], grouped.shape[1]))
    return grouped[:, 0]


@dataclass(frozen=True)
class StandIn:
    """The Linear layers that stand for a module, with the channels of each."""

    layers: dict[nn.Module, Ends]


def stand_in(ledger: Ledger, names: Names, name: str, module: nn.Module) -> StandIn | None:
    """Replace the forward of one module of a copy; None for a module that needs no stand-in."""
    if isinstance(module, nn.LSTM | nn.GRU | nn.RNN):
        return _recurrent(ledger, names, name, module)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(ledger, names, name, module)
    if _is_packed_attention(module):
        return _packed_attention(ledger, names, name, module)
    return None


def _replace(module: nn.Module, forward: Callable[..., Any], *layers: nn.Module) -> None:
    like = next(module.parameters())
    for index, layer in enumerate(layers):
        module.add_module(f"stand_in_{index}", layer.to(like))
    module.forward = forward


def _recurrent(ledger: Ledger, names: Names, name: str, module: nn.RNNBase) -> StandIn:
    if module.proj_size:
        raise ModelError(
            f"layer {name!r}: an LSTM with proj_size has two kinds of cells; leave proj_size out, or "
            "name its parts by hand"
        )
    cells, ways = module.hidden_size, 2 if module.bidirectional else 1
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    found: dict[nn.Module, Ends] = {}
    for level in range(module.num_layers):
        reading = module.input_size if level == 0 else ways * cells
        reads = ledger.channels(f"{name}.in{level}", reading, made=False)
        label = name if module.num_layers == 1 else f"{name}.{level}"
        makes = ledger.channels(label, ways * cells)
        for way in range(ways):
            own = makes.ids[way * cells : (way + 1) * cells]
            suffix = f"_l{level}{'_reverse' if way else ''}"
            stacked = np.tile(own, gates)
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                if (tensor := getattr(module, kind + suffix, None)) is not None:
                    ledger.place(names[tensor], 0, stacked)
            ledger.place(names[getattr(module, f"weight_ih{suffix}")], 1, reads.ids)
            ledger.place(names[getattr(module, f"weight_hh{suffix}")], 1, own)
        found[nn.Linear(reading, ways * cells)] = Ends(reads, makes)
    chain = list(found)

    def forward(x: Tensor, *_: Any, **__: Any) -> Any:
        for layer in chain:
            x = layer(x)
        time = 1 if module.batch_first else 0
        last = x.mean(time)[None] if x.ndim == 3 else x[-1:]
        if ways == 2 or module.num_layers > 1:
            state: Any = last.detach()  # states of all levels and ways in one: not followed
        else:
            state = last
        return x, (state, state) if isinstance(module, nn.LSTM) else state

    _replace(module, forward, *chain)
    return StandIn(found)


def _attention(ledger: Ledger, names: Names, name: str, module: nn.MultiheadAttention) -> StandIn:
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
        ledger.place(names[module.in_proj_weight], 0, np.tile(by_head, 3))
        ledger.place(names[module.in_proj_weight], 1, reads[0].ids)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for weight, read in zip(weights, reads, strict=True):
            ledger.place(names[weight], 0, by_head)
            ledger.place(names[weight], 1, read.ids)
    if module.in_proj_bias is not None:
        ledger.place(names[module.in_proj_bias], 0, np.tile(by_head, 3))
    for extra in (module.bias_k, module.bias_v):
        if extra is not None:
            ledger.place(names[extra], 2, by_head)
    makes = _leaving(ledger, names, name, module.out_proj, by_head)
    middle = [nn.Linear(read.count, heads) for read in reads]
    out = nn.Linear(heads, width)

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        time = 0 if query.ndim == 2 or not module.batch_first else 1
        seen = middle[1](key) + middle[2](value)
        return out(middle[0](query) + seen.mean(time, keepdim=True)), None

    _replace(module, forward, *middle, out)
    found: dict[nn.Module, Ends] = {
        layer: Ends(read, inner) for layer, read in zip(middle, reads, strict=True)
    }
    found[out] = Ends(inner, makes)
    return StandIn(found)


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


def _packed_attention(ledger: Ledger, names: Names, name: str, module: Any) -> StandIn:
    heads, qkv, proj = module.num_heads, module.qkv, module.proj
    reads = ledger.channels(f"{name}.in", qkv.in_features, made=False)
    inner = ledger.channels(f"{name}.heads", heads)
    by_head = np.repeat(inner.ids, proj.in_features // heads)
    ledger.place(names[qkv.weight], 0, np.tile(by_head, 3))
    ledger.place(names[qkv.weight], 1, reads.ids)
    if qkv.bias is not None:
        ledger.place(names[qkv.bias], 0, np.tile(by_head, 3))
    for key, tensor in module.named_parameters(recurse=False):
        # Biases that are added to the scores have one column for every head.
        if tensor.ndim == 2 and tensor.shape[1] == heads and "bias" in key:
            ledger.place(names[tensor], 1, inner.ids)
        elif tensor.shape == (proj.in_features,) and key in ("q_bias", "k_bias", "v_bias"):
            ledger.place(names[tensor], 0, by_head)
    makes = _leaving(ledger, names, name, proj, by_head)
    enter, leave = nn.Linear(qkv.in_features, heads), nn.Linear(heads, proj.out_features)

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return leave(enter(x))

    _replace(module, forward, enter, leave)
    return StandIn({enter: Ends(reads, inner), leave: Ends(inner, makes)})


def _leaving(ledger: Ledger, names: Names, name: str, proj: nn.Linear, by_head: np.ndarray) -> Any:
    makes = ledger.channels(name, proj.out_features)
    ledger.place(names[proj.weight], 0, makes.ids)
    ledger.place(names[proj.weight], 1, by_head)
    if proj.bias is not None:
        ledger.place(names[proj.bias], 0, makes.ids)
    return makes


def without_shortcuts() -> Any:
    """A context in which torch's own attention runs layer by layer, as the trace needs it."""

    class _Off:
        def __enter__(self) -> None:
            self._was = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)

        def __exit__(self, *_: object) -> None:
            torch.backends.mha.set_fastpath_enabled(self._was)

    return _Off()


_BY_HAND = (
    "name the axes by hand with parts={'name': ['parameter:axis', …]}, or give the module an "
    "anatomy() method"
)


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
    names = Names(body)
    ends: dict[Any, Ends] = {}
    inputs: list[nn.Module] = []
    for index, (x, dim) in enumerate(zip(example, dims, strict=True)):
        inputs.append(_input_layer(x, dim))
        if dim is not None:
            made = ledger.channels(input_name(index), x.shape[dim], given=True)
            ends[inputs[-1]] = Ends(made, made)
    replaced = _register_all(body, names, ledger, ends)
    whole = _Whole(body, inputs).eval()
    _check_runs(whole, example)
    graph: Any = DependencyGraph()
    try:
        with without_shortcuts(), torch.enable_grad():
            graph.build_dependency(whole, example, ignored_layers=replaced, verbose=False)
    except Exception as error:  # whatever a tracer of autograd graphs stumbles over
        raise ModelError(
            f"{type(module).__name__} cannot be traced ({type(error).__name__}: {error}); {_BY_HAND}"
        ) from error
    for node in list(graph.module2node.values()):
        if isinstance(node.module, nn.Parameter) and node.module not in ends:
            name = names[node.module]
            both = ledger.channels(name, node.module.shape[node.pruning_dim], made=False)
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


def _register_all(
    body: nn.Module, names: Names, ledger: Ledger, ends: dict[Any, Ends]
) -> list[nn.Module]:
    """Enter every layer; returns the modules that were replaced, which the trace must not see."""
    replaced: list[nn.Module] = []
    for name, layer in list(body.named_modules()):
        if layer in replaced:
            continue
        found = stand_in(ledger, names, name or "output", layer)
        if found is not None:
            ends.update(found.layers)
            replaced += [one for one in layer.modules() if one not in found.layers]
        elif (own := register(ledger, names, name or "output", layer)) is not None:
            ends[layer] = own
    return replaced


def _input_layer(x: Tensor, dim: int | None) -> nn.Module:
    """A layer of as many channels as the input has, that torch-pruning knows."""
    if dim is None:
        return nn.Identity()
    count = x.shape[dim]
    if dim in (x.ndim - 1, -1):
        layer: nn.Module = nn.Linear(count, count)
    else:
        layer = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[x.ndim](count, count, 1)
    return layer.to(x)


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
                _tie(ledger, root, side, moved)
            stack.append((dependency.target, dependency.handler, moved))


def _tie(ledger: Ledger, root: Channels, met: Channels, indices: Sequence[Any]) -> None:
    here = np.array([index.idx for index in indices])
    there = np.array([index.root_idx for index in indices])
    if here.max() >= met.count or here.min() < 0:
        raise ModelError(
            f"channels of {root.name!r} ({root.count} of them) reach {met.name!r}, which has only "
            f"{met.count}: a reshape or a transposition on the way cannot be followed; {_BY_HAND}"
        )
    ledger.tie(met.first + here, root.first + there)


def _last(graph: Any, ends: dict[Any, Ends]) -> list[Channels]:
    """The makers from which the output comes when operations without channels follow them."""
    found: list[Channels] = []
    stack = [node for node in graph.module2node.values() if not node.outputs]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        end = ends.get(node.module)
        if end is not None and end.makes.made:
            found.append(end.makes)
        else:
            stack += node.inputs
    return found


_READING = {
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "item", "tolist",
    "is_nonzero", "nonzero", "argwhere", "equal", "allclose",
}  # fmt: skip
"""Functions of torch by which Python learns what a tensor holds."""


class _Watch(TorchFunctionMode):
    """Knows where in a module things happen, and notes who asks for a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.asked = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.asked and (name in _READING or (name == "where" and len(args) == 1)):
            self.asked = f"{self.place} asks for a value ({name.strip('_')})"
        return func(*args, **(kwargs or {}))

    @property
    def place(self) -> str:
        """The module that is computing now."""
        return self.inside[-1] if self.inside else "the network"

    def enter(self, name: str) -> Any:
        """A hook for before a layer runs."""
        return lambda *_: self.inside.append(name)

    def leave(self, *_: Any) -> None:
        """A hook for after a layer ran."""
        self.inside.pop()


def _check_runs(whole: _Whole, example: tuple[Tensor, ...]) -> None:
    """Run once under watch, so that errors can name the place."""
    watch = _Watch()
    hooks = []
    for name, layer in whole.body.named_modules():
        label = f"{name!r} ({type(layer).__name__})" if name else type(layer).__name__
        hooks.append(layer.register_forward_pre_hook(watch.enter(label)))
        hooks.append(layer.register_forward_hook(watch.leave))
    try:
        with without_shortcuts(), torch.no_grad(), watch:
            whole(*example)
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f"the example input does not run through the network: {type(error).__name__} in "
            f"{watch.place}: {error}"
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
