"""Finding the parts of a network.

A chain of Linear layers is read off the module itself. Any other module is traced with an example
input (parts/), or says what it is made of by carrying an `anatomy()` method. A network that is shared whole,
or not at all, needs no parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .anatomy import Anatomy, ParameterMap, Part, dense_axes
from .errors import ModelError
from .slicing import is_share

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)

# Layers with one value per cell in each of their parameters. A user's own layer joins them by
# carrying `per_cell = True`.
_PER_CELL = (nn.PReLU,)


def discover(
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...] | None = None,
    *,
    parts: Mapping[str, Sequence[str]] | None = None,
    channels: int | None = None,
    check: bool = True,
) -> Anatomy:
    """The anatomy of a module: its own word for it, a chain of Linear layers, or what a trace finds.

    Modules that are no chain need an `example` input; it and the other arguments are explained at
    `gossamer.models.parts.finding`.
    """
    refuse_lazy(module)
    declare = getattr(module, "anatomy", None)
    if callable(declare):
        anatomy = declare()
        if not isinstance(anatomy, Anatomy):
            raise ModelError(f"{type(module).__name__}.anatomy() must return an Anatomy")
    elif example is None:
        anatomy = _linear_chain(module)
    else:
        anatomy = None
        if not parts:
            with suppress(ModelError):
                anatomy = _linear_chain(module)
        if anatomy is None:
            from .parts import (
                find,  # only here: most peers know their parts without a trace
            )

            anatomy = find(module, example, parts=parts, channels=channels, check=check)
        else:
            try_example(module, example)
    given = {name: tuple(value.shape) for name, value in module.named_parameters()}
    known = {parameter.name: parameter.shape for parameter in anatomy.parameters}
    if list(given.items()) != list(known.items()):
        missing = sorted(set(given) - set(known)) or sorted(given)
        raise ModelError(
            f"the anatomy of {type(module).__name__} does not list its parameters in their order and "
            f"shapes; look at {missing[0]!r}"
        )
    return anatomy


def example_inputs(example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """An example input as the arguments of a call; raises if it is no tensor."""
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise ModelError("give the example input as a tensor, or as a tuple of tensors")
    return inputs


@torch.no_grad()
def try_example(module: nn.Module, example: Tensor | tuple[Tensor, ...]) -> None:
    """A chain needs no example, but one that it cannot take is a mistake to tell of at once."""
    inputs = example_inputs(example)
    modes = [(one, one.training) for one in module.modules()]
    try:
        module.eval()(*inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ModelError(
            f"the example input of shape {shapes} does not fit the network: {' '.join(str(error).split())}"
        ) from None
    finally:
        for one, training in modes:
            one.training = training


def refuse_lazy(module: nn.Module) -> None:
    """Raise, by the parameter's name, if a module has not been given its shapes yet."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, value in tensors if is_lazy(value)]:
        raise ModelError(
            f"{lazy[0]!r} has no shape yet, for its layer is lazy: call the module once on a sample, "
            "module(x), before it is wrapped"
        )


def _linear_chain(module: nn.Module) -> Anatomy:
    parts: list[Part] = []
    layers: list[tuple[str, nn.Module, int]] = []  # (prefix, layer, index of the part it acts on)
    for prefix, layer in _leaves(module, ""):
        where = f"layer {prefix!r} ({type(layer).__name__})"
        if isinstance(layer, nn.Linear):
            if not parts:
                parts.append(Part("input", layer.in_features))
            elif parts[-1].cells != layer.in_features:
                raise ModelError(
                    f"{where} takes {layer.in_features} inputs, but the layer before it has "
                    f"{parts[-1].cells} cells"
                )
            parts.append(Part(prefix or "output", layer.out_features))
        elif any(True for _ in layer.parameters()):
            if not (isinstance(layer, _PER_CELL) or getattr(layer, "per_cell", False)):
                raise ModelError(
                    f"{where}: only Linear layers and per-cell activations are found by themselves; pass "
                    "an example input (example=x) to have the module traced, or give it an anatomy() "
                    "method that says which cells each parameter touches"
                )
            if not parts:
                raise ModelError(f"{where} stands before the first Linear layer")
        layers.append((prefix, layer, len(parts) - 1))
    if not parts:
        raise ModelError(
            f"{type(module).__name__} has no Linear layer, so there is nothing to slice"
        )

    maps: list[ParameterMap] = []
    for prefix, layer, part in layers:
        for name, value in layer.named_parameters():
            full = f"{prefix}.{name}" if prefix else name
            shape = tuple(value.shape)
            if isinstance(layer, nn.Linear) and name == "weight":
                axes = dense_axes(parts, part, part - 1)
            elif shape == (parts[part].cells,):
                axes = dense_axes(parts, part)
            else:
                axes = tuple(None for _ in shape)  # Anatomy refuses it, by name
            maps.append(ParameterMap(full, shape, axes))
    return Anatomy(tuple(parts), tuple(maps))


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in the order in which they run."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _leaves(child, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, module


_STATISTICS = ("running_mean", "running_var")


def is_whole(spec: object) -> bool:
    """Whether one model's slice is the whole network."""
    return is_share(spec) and (spec == 1 or spec == {"*": 1})


def discover_for(
    slices: Iterable[object],
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...] | None = None,
    **search: Any,
) -> Anatomy:
    """What `discover` finds. Where it fails and no slice is a part of the network, that is one cell."""
    refuse_lazy(module)
    try:
        return discover(module, example, **search)
    except ModelError:
        by_hand = search.get("parts") or search.get("channels") is not None
        if by_hand or callable(getattr(module, "anatomy", None)) or not all(map(is_whole, slices)):
            raise
        if example is not None:
            try_example(module, example)  # an input that does not fit is a mistake all the same
        return _one_cell(module)


def _one_cell(module: nn.Module) -> Anatomy:
    """A part of a single cell, which all parameters and batch statistics belong to."""
    parameters = [_map(name, tuple(value.shape)) for name, value in module.named_parameters()]
    if not parameters:
        raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing to share")
    statistics = [
        _map(name, tuple(value.shape))
        for name, value in module.named_buffers()
        if name.rpartition(".")[2] in _STATISTICS and value.ndim
    ]
    return Anatomy((Part("whole", 1),), tuple(parameters), tuple(statistics))


def _map(name: str, shape: tuple[int, ...]) -> ParameterMap:
    if not shape:
        return ParameterMap(name, shape, (), cell=0)
    # The first axis leads to the cell, so that starting weights are drawn by their fan-in.
    return ParameterMap(name, shape, (np.zeros(shape[0], np.int64), *[None] * (len(shape) - 1)))
