"""Which axes of which tensors the channels of a torch layer stand on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import ModelError
from .ledger import FIXED, Channels, Ledger


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
    if isinstance(layer, _ConvNd):
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
    if isinstance(layer, _BatchNorm | _InstanceNorm):
        return layer.num_features
    if isinstance(layer, nn.LayerNorm):
        return int(layer.normalized_shape[0])
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    if isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
        return layer.num_parameters
    return None


def _convolution(ledger: Ledger, names: Names, name: str, layer: _ConvNd) -> Ends:
    reads = ledger.channels(f"{name}.in", layer.in_channels, made=False)
    makes = ledger.channels(name, layer.out_channels)
    source, target = (0, 1) if isinstance(layer, _ConvTransposeNd) else (1, 0)
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
