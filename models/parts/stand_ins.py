"""Layers that a tracer of channels cannot follow, replaced for the trace by Linear layers that it can.

Attention mixes whole heads, and a recurrent layer stacks its gates: for the trace each becomes Linear
layers whose cells are the heads or the hidden units, and a table says where those cells stand in the
real tensors. Only a copy of the module is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError
from .layers import Ends, Names
from .ledger import Ledger


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
