"""Which parameters FedNP predicts, and what its network f looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..network import SlicedNetwork


def read_target(network: SlicedNetwork, target: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """Parameters by name: `last`, or names of parameters or of layers, in the network's own order."""
    parameters = dict(network.module.named_parameters())
    if target == "last":
        wanted = [_last_layer(network.module)]
    else:
        wanted = [target] if isinstance(target, str) else list(target)
    found: set[str] = set()
    for name in wanted:
        mine = {key for key in parameters if key == name or key.startswith(f"{name}.") or not name}
        if not mine:
            raise ModelError(
                f"FedNP's target {name!r}: the network of peer {network.peer!r} has no such parameter or "
                f"layer; parameters are {', '.join(parameters)}"
            )
        found |= mine
    return {name: parameter for name, parameter in parameters.items() if name in found}


class Features:
    """What f sees of inputs: the inputs themselves, or what enters a layer of the network."""

    def __init__(
        self,
        network: SlicedNetwork,
        features: str,
        target: Mapping[str, nn.Parameter],
        inputs: Tensor,
    ):
        self.inputs = inputs
        self._module = network.module
        self._layer: nn.Module | None = None
        if features != "input":
            name = next(iter(target)).rpartition(".")[0] if features == "last" else features
            layers = dict(network.module.named_modules())
            if name not in layers:
                raise ModelError(
                    f"FedNP's features {features!r}: give input, last, or one of the layers "
                    f"{', '.join(key for key in layers if key)}"
                )
            _require_shared(network, name)
            self._layer = layers[name]
        with torch.no_grad():
            self.width = self(inputs[:1]).shape[1]

    def __call__(self, inputs: Tensor) -> Tensor:
        """One row per input."""
        if self._layer is None:
            return inputs.flatten(1)
        seen: list[Tensor] = []
        handle = self._layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            self._module(inputs)
        finally:
            handle.remove()
        return seen[-1].flatten(1)


def _last_layer(module: nn.Module) -> str:
    """The name of the last linear layer; of the last layer with parameters if there is none."""
    named = list(module.named_modules())
    linear = [name for name, layer in named if isinstance(layer, nn.Linear)]
    if linear:
        return linear[-1]
    return [name for name, layer in named if list(layer.parameters(recurse=False))][-1]


def _require_shared(network: SlicedNetwork, layer: str) -> None:
    """f is averaged by everybody, so what it looks at must mean the same to everybody."""
    slicing = network.slicing
    weight = next((p for p in slicing.anatomy.parameters if p.name == f"{layer}.weight"), None)
    cells = weight.axes[1] if weight is not None and len(weight.axes) > 1 else None
    if cells is None:
        return
    firsts = slicing.anatomy.firsts
    seen = {int(cell) for cell in cells}
    holders = {
        model
        for model in network.models
        for part, own in enumerate(slicing.cells[model])
        if seen & {int(firsts[part]) + int(cell) for cell in own}
    }
    if len(holders) > 1:
        raise ModelError(
            f"FedNP's features: what enters layer {layer!r} of peer {network.peer!r} belongs to the partial "
            f"models {', '.join(sorted(holders))}, so f would mix cells that differ from peer to peer; use "
            "features='input'"
        )
