"""Finding the parts of any torch module: channels are followed from layer to layer, then made into cells.

Every channel that some layer reads or writes gets a number. Channels that must move together are tied;
what is tied in the end is one cell. A tensor's axis is a list of channel numbers.

Torch-pruning records which layers meet through skips, concatenations, splits and reshapes, and how
channel numbers map on the way. It guesses where a channel axis went, so what it says is not trusted:
numbers that do not fit are refused here, by name, and `prove` checks the result on numbers. Attention
and recurrent layers, which it cannot follow, are replaced in a copy by Linear layers whose cells are heads or
hidden units; the ledger says where those cells stand in the real tensors. Cells that stand on the same axes
equally often are one part.
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
from .discovery import BATCH_NORMS, BY_HAND, CONVOLUTIONS, TRANSPOSED, input_name, named_tensors
from .errors import ModelError

FIXED = 0
"""The channel that never moves: whatever is tied to it carries no cell (positions, vocabularies)."""
_PER_CHANNEL = (
    ((*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "num_features"),
    (nn.LayerNorm, "normalized_shape"),
    (nn.GroupNorm, "num_channels"),
    (nn.PReLU, "num_parameters"),
)
"""Layers that treat channels one by one, and their attributes that say how many there are."""


def find_parts(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    dims: Sequence[int | None],
    by_hand: Mapping[str, Sequence[str]],
) -> Anatomy:
    """The anatomy of a module: trace, then assemble.

    `dims` says which dimension of each example input holds channels, None where none does; `by_hand` are
    the `parts` of `discover`.
    """
    ledger = Ledger()
    _enter_by_hand(module, by_hand, ledger)
    state = torch.random.get_rng_state()  # stand-ins draw weights: leave no trace
    try:
        leaving = _trace(module, inputs, dims, ledger)
    finally:
        torch.random.set_rng_state(state)
    return _assemble(module, ledger, leaving)


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


def _enter(ledger: Ledger, name: str, layer: nn.Module) -> dict[nn.Module, Ends]:
    """Enter a layer into the ledger; returns it, or its stand-ins; nothing for one without channels."""
    if isinstance(layer, nn.LSTM | nn.GRU | nn.RNN):
        return _recurrent(ledger, name, layer)
    if isinstance(layer, nn.MultiheadAttention):
        return _attention(ledger, name, layer)
    if _is_packed_attention(layer):
        return _packed_attention(ledger, name, layer)
    if isinstance(layer, CONVOLUTIONS):
        return {layer: _convolution(ledger, name, layer)}
    if isinstance(layer, nn.Linear):
        reads = ledger.channels(f"{name}.in", layer.in_features, made=False)
        makes = ledger.channels(name, layer.out_features)
        ledger.place_linear(layer, reads.ids, makes.ids)
        return {layer: Ends(reads, makes)}
    if isinstance(layer, nn.Embedding):
        makes = ledger.channels(name, layer.embedding_dim)
        # Which row a token reads is data, so rows cannot change places.
        ledger.place(layer.weight, 0, np.full(layer.num_embeddings, FIXED))
        ledger.place(layer.weight, 1, makes.ids)
        return {layer: Ends(makes, makes)}
    size = next((size for kinds, size in _PER_CHANNEL if isinstance(layer, kinds)), None)
    if size is None or (isinstance(layer, nn.PReLU) and layer.num_parameters == 1):
        return {}
    count = int(np.ravel(getattr(layer, size))[0])
    both = ledger.channels(name, count, made=False)
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.ndim and tensor.shape[0] == count:
            ledger.place(tensor, 0, both.ids)
    if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
        ledger.gather(both.ids, layer.num_groups)
    return {layer: Ends(both, both)}


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


def _trace(
    module: nn.Module, example: tuple[Tensor, ...], dims: Sequence[int | None], ledger: Ledger
) -> list[Channels]:
    """Fill the ledger with the channels of `module`; returns those that leave it as outputs."""
    # Imported here: it costs seconds, and peers whose parts are known need not pay them.
    from torch_pruning import DependencyGraph

    body = copy.deepcopy(module).eval().requires_grad_(True)
    ledger.names = {id(value): name for name, value in named_tensors(body).items()}
    ends: dict[Any, Ends] = {}
    inputs: list[nn.Module] = []
    for index, (x, dim) in enumerate(zip(example, dims, strict=True)):
        inputs.append(_input_layer(x, dim))
        if dim is not None:
            made = ledger.channels(input_name(index), x.shape[dim], given=True)
            ends[inputs[-1]] = Ends(made, made)
    replaced: list[nn.Module] = []  # which the trace must not see
    for name, layer in list(body.named_modules()):
        if layer not in replaced:
            entered = _enter(ledger, name or "output", layer)
            ends.update(entered)
            if entered and layer not in entered:
                replaced += [one for one in layer.modules() if one not in entered]
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
    for layer, end in ends.items():
        if end.makes.made and layer in graph.module2node and not ledger.dropped(end.makes):
            _follow(graph, layer, ends, ledger)
    return _last(graph, ends)


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
    """The last makers on the ways to the outputs: operations without channels may follow them."""
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


# --- from channels to parts ----------------------------------------------------------------------


def _enter_by_hand(module: nn.Module, parts: Mapping[str, Sequence[str]], ledger: Ledger) -> None:
    shapes = {name: tuple(value.shape) for name, value in named_tensors(module).items()}
    for part, entries in parts.items():
        found: dict[tuple[str, int], int] = {}
        for entry in [entries] if isinstance(entries, str) else entries:
            pattern, _, axis = entry.rpartition(":")
            matching = [name for name in shapes if fnmatchcase(name, pattern)]
            if not matching or not axis.isdecimal():
                raise ModelError(
                    f"part {part!r}: {entry!r} names no axis; write 'parameter:axis', as in "
                    f"'{next(iter(shapes), 'weight')}:0'"
                )
            for name in matching:
                if int(axis) >= len(shapes[name]):
                    raise ModelError(
                        f"part {part!r}: {name!r} has {len(shapes[name])} axes, so none is {axis}"
                    )
                found[name, int(axis)] = shapes[name][int(axis)]
        if not part:
            for (name, axis), size in found.items():
                ledger.place_by_hand(name, axis, np.full(size, FIXED))
            continue
        if len(set(found.values())) != 1:
            sizes = ", ".join(f"{name}:{axis} has {n}" for (name, axis), n in found.items())
            raise ModelError(f"part {part!r}: its axes must have as many cells each, but {sizes}")
        space = ledger.channels(part, next(iter(found.values())))
        for name, axis in found:
            if (name, axis) in ledger.axes:
                raise ModelError(f"{name}:{axis} was given to part {part!r} and to another one")
            ledger.place_by_hand(name, axis, space.ids)


def _assemble(module: nn.Module, ledger: Ledger, leaving: Sequence[Channels]) -> Anatomy:
    cell_of = _settled(ledger)
    groups = _parts(ledger, cell_of, leaving)
    parts = [Part(name, len(cells)) for name, cells, _ in groups]
    order = np.concatenate([np.empty(0, np.int64), *(cells for _, cells, _ in groups)])
    number = np.full(int(cell_of.max()) + 1, -1, np.int64)
    number[order] = np.arange(len(order))

    def axes(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray | None, ...]:
        found: list[np.ndarray | None] = []
        for axis, size in enumerate(shape):
            ids = ledger.axes.get((name, axis))
            if ids is not None and len(ids) != size:
                raise ModelError(f"axis {axis} of {name!r} has {size} indices, not {len(ids)}")
            moves = ids is not None and (cell_of[ids] != FIXED).all()
            found.append(number[cell_of[ids]] if moves else None)
        return tuple(found)

    parameters: list[ParameterMap] = []
    for name, value in module.named_parameters():
        shape = tuple(value.shape)
        found, cell = axes(name, shape), None
        if all(axis is None for axis in found):
            # A parameter that no cell touches (a temperature) is a part of one cell of its own.
            cell = sum(part.cells for part in parts)
            parts.append(Part(name, 1))
        parameters.append(ParameterMap(name, shape, found, cell))
    statistics = [
        ParameterMap(name, tuple(value.shape), axes(name, tuple(value.shape)))
        for name, value in module.named_buffers()
        if value.is_floating_point()
    ]
    buffers = [one for one in statistics if any(axis is not None for axis in one.axes)]
    ends = frozenset(name for name, _, is_end in groups if is_end)
    return Anatomy(tuple(parts), tuple(parameters), tuple(buffers), ends)


def _settled(ledger: Ledger) -> np.ndarray:
    """Cells of channels, after what nothing makes and what stands beside it was fixed."""
    spaces = ledger.spaces
    made = np.repeat([False, *(one.made for one in spaces)], [1, *(one.count for one in spaces)])
    cell_of = ledger.cells()
    has_maker = np.zeros(int(cell_of.max()) + 1, bool)
    has_maker[cell_of[made]] = True
    for space in ledger.spaces:
        reached = has_maker[cell_of[space.ids]]
        if not reached.any() or ledger.dropped(space):
            ledger.tie(space.ids, FIXED)
        elif not reached.all():
            raise ModelError(
                f"only {int(reached.sum())} of the {space.count} channels of {space.name!r} could be "
                f"traced to what makes them; {BY_HAND}"
            )
    # An axis moves as a whole or not at all.
    while True:
        cell_of = ledger.cells()
        mixed = [
            ids
            for ids in ledger.axes.values()
            if (cell_of[ids] == FIXED).any() and (cell_of[ids] != FIXED).any()
        ]
        if not mixed:
            return cell_of
        for ids in mixed:
            ledger.tie(ids, FIXED)


def _parts(
    ledger: Ledger, cell_of: np.ndarray, leaving: Sequence[Channels]
) -> list[tuple[str, np.ndarray, bool]]:
    """Every part's name, its cells, and whether it is an input or output; outputs come last."""
    standing: dict[int, list[tuple[int, int]]] = {}
    for index, ids in enumerate(ledger.axes.values()):
        cells, counts = np.unique(cell_of[ids], return_counts=True)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            standing.setdefault(cell, []).append((index, count))
    standing.pop(FIXED, None)
    maker = np.full(int(cell_of.max()) + 1, -1, np.int64)
    for index in reversed(range(len(ledger.spaces))):
        if ledger.spaces[index].made:
            maker[cell_of[ledger.spaces[index].ids]] = index
    leaves = set(np.concatenate([np.empty(0, int), *(cell_of[one.ids] for one in leaving)]))
    groups: dict[tuple[object, ...], list[int]] = {}
    for cell, places in sorted(standing.items()):
        groups.setdefault((cell in leaves, int(maker[cell]), *places), []).append(cell)
    found: list[tuple[str, np.ndarray, bool]] = []
    for (is_output, *_), cells in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        space = ledger.spaces[maker[cells[0]]]
        count = sum(other.split("#")[0] == space.name for other, _, _ in found)
        name = f"{space.name}#{count + 1}" if count else space.name
        found.append((name, np.array(cells), bool(is_output) or space.given))
    return found
