"""Following channels from layer to layer, with torch-pruning's dependency graph.

Torch-pruning records which layers meet through skips, concatenations, splits and reshapes, and how
channel numbers map on the way. It guesses where a channel axis went, so what it says is not trusted:
numbers that do not fit are refused here, by name, and proof.py checks the result on numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ModelError
from .layers import Ends, Names, register
from .ledger import Channels, Ledger, input_name
from .stand_ins import stand_in, without_shortcuts

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


def _follow(graph: Any, layer: nn.Module, ends: dict[Any, Ends], ledger: Ledger) -> None:
    """Tie what a layer makes to every channel that it meets, through all index mappings."""
    from torch_pruning._helpers import _HybridIndex

    root = ends[layer].makes
    pruner = graph.get_pruner_of_module(layer)
    start = [_HybridIndex(idx=i, root_idx=i) for i in range(root.count)]
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


class _Watch(TorchDispatchMode):
    """Knows where in a module things happen, and notes who asks for a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.asked = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal") and not self.asked:
            self.asked = f"{self.place} asks for a value ({name})"
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
