"""Finding the parts of a network.

A chain of Linear layers is read off the module itself. Any other module is traced with an example
input (parts.py), or says what it is made of by carrying an `anatomy()` method. A network that is shared
whole, or not at all, needs no parts. What a trace found is proved: permuting the cells of a part changes
nothing.
"""

from __future__ import annotations

import copy
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

BY_HAND = (
    "name the axes by hand with parts={'name': ['parameter:axis', …]}, or give the module an "
    "anatomy() method"
)
"""What to do where a trace fails, for messages."""

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

    Layers that meet through skips, concatenations, flattening or grouped convolutions share cells.
    A cell is a channel; a hidden unit of LSTM, GRU and RNN; a head of attention. Channels that must stay in
    groups (grouped convolutions, group norm) are one cell per group. Dimensions whose places mean something
    (kernels, positions, vocabularies) carry no cells; a parameter without any cell (a temperature) is a part
    of one cell of its own.

    example
        An input, a batch of any size; values hardly matter. Modules that are no chain need one.
    parts
        Axes to name by hand where the trace fails: `{"tokens": ["mix.weight:0", "mix.bias:0"]}` says
        that these axes, of equal length, stand for the same cells in the same order. Parameter names
        may be globs. Axes under the empty name carry no cells.
    channels
        The dimension of the first input that holds channels: by default the last of inputs [n, f], 1 of
        images, and of [n, a, b] 1 for modules with Conv1d layers, else 2.
    check
        Permute the cells of all parts, on a copy, and compare outputs. Leave it on: it turns a trace
        that went wrong into an error. It costs about two forward passes in float64.
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
            from .parts import find_parts  # only here: most peers know their parts without a trace

            inputs = example_inputs(example)
            if len(inputs[0]) < 1:
                raise ModelError("the example input is an empty batch; give at least one sample")
            given = [channels, *[None] * (len(inputs) - 1)]
            dims = [_channel_dim(module, x, dim) for x, dim in zip(inputs, given, strict=True)]
            anatomy = find_parts(module, inputs, dims, parts or {})
            if check:
                check_by_permutation(module, anatomy, inputs, dims)
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


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def input_name(place: int) -> str:
    """What the part of an input's channels is called."""
    return f"input{place}" if place else "input"


def example_inputs(example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """An example input as the arguments of a call; raises if it is no tensor."""
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise ModelError("give the example input as a tensor, or as a tuple of tensors")
    return inputs


def _channel_dim(module: nn.Module, x: Tensor, given: int | None) -> int | None:
    if given is not None:
        if not -x.ndim < given < x.ndim or given == 0:
            raise ModelError(
                f"channels={given}: the example input has dimensions 1 to {x.ndim - 1}"
            )
        return given % x.ndim
    if not x.is_floating_point() or x.ndim < 2:
        return None
    if x.ndim == 3:
        return 1 if any(isinstance(one, nn.Conv1d) for one in module.modules()) else 2
    return 1


@torch.no_grad()
def run_once(module: nn.Module, *inputs: Tensor) -> Any:
    """What a module answers when it is not trained; it stays in the mode that it is in."""
    modes = [(one, one.training) for one in module.modules()]
    try:
        return module.eval()(*inputs)
    finally:
        for one, training in modes:
            one.training = training


def try_example(module: nn.Module, example: Tensor | tuple[Tensor, ...]) -> None:
    """A chain needs no example, but one that it cannot take is a mistake to tell of at once."""
    inputs = example_inputs(example)
    try:
        run_once(module, *inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ModelError(
            f"the example input of shape {shapes} does not fit the network: {' '.join(str(error).split())}"
        ) from None


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
    maps: list[ParameterMap] = []
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
        last = len(parts) - 1
        for name, value in layer.named_parameters():
            shape = tuple(value.shape)
            if isinstance(layer, nn.Linear) and name == "weight":
                axes = dense_axes(parts, last, last - 1)
            elif shape == (parts[last].cells,):
                axes = dense_axes(parts, last)
            else:
                axes = tuple(None for _ in shape)  # Anatomy refuses it, by name
            maps.append(ParameterMap(f"{prefix}.{name}" if prefix else name, shape, axes))
    if not parts:
        raise ModelError(f"{type(module).__name__} has no Linear layer, so nothing can be sliced")
    return Anatomy(tuple(parts), tuple(maps))


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in the order in which they run."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _leaves(child, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, module


_TOLERANCE = 1e-6  # of the largest output, in float64: far above rounding, far below a wrong part
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
    parameters = [in_one_cell(name, value) for name, value in module.named_parameters()]
    if not parameters:
        raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing to share")
    statistics = [
        in_one_cell(name, value)
        for name, value in module.named_buffers()
        if name.rpartition(".")[2] in _STATISTICS and value.ndim
    ]
    return Anatomy((Part("whole", 1),), tuple(parameters), tuple(statistics))


def in_one_cell(name: str, value: Tensor, cell: int = 0) -> ParameterMap:
    """A parameter all of which belongs to one cell."""
    shape = tuple(value.shape)
    if not shape:
        return ParameterMap(name, shape, (), cell)
    # The first axis leads to the cell, so that starting weights are drawn by their fan-in.
    return ParameterMap(name, shape, (np.full(shape[0], cell), *[None] * (len(shape) - 1)))


# --- proof: parts are right if permuting their cells changes nothing, on numbers -----------------


def check_by_permutation(
    module: nn.Module, anatomy: Anatomy, example: tuple[Tensor, ...], dims: Sequence[int | None]
) -> None:
    """Raise, naming the part, if permuting the cells of a part changes what `module` computes.

    Works on a copy in float64 with shaken values, since gains of 1 and biases of 0 would hide that
    they were left behind. All parts are permuted at once; only when that fails is the culprit sought.
    """
    trial = _Trial(module, anatomy, example, dims)
    if not trial.expected:
        raise ModelError(f"{type(module).__name__} returns no tensor: its parts cannot be checked")
    if trial.error(trial.parts) <= _TOLERANCE:
        return
    if trial.error([]) > _TOLERANCE:
        raise ModelError(
            f"{type(module).__name__} does not compute the same on every call, even in eval mode (random "
            "numbers?), so its parts cannot be checked; make it repeatable, or pass check=False"
        )
    for part in trial.parts:
        error = trial.error([part])
        if error > _TOLERANCE:
            one = anatomy.parts[part]
            raise ModelError(
                f"part {one.name!r} ({one.cells} cells) was traced wrongly: permuting its cells changes "
                f"the output by {error:.1e}. It stands on {_stands_on(anatomy, part)}; {BY_HAND}"
            )
    raise ModelError(
        "permuting the cells of all parts together changes the output, though each part alone seems "
        "right; look for values near a threshold, or pass check=False"
    )


class _Trial:
    """A shaken copy of a module in float64, and what it computes before anything is permuted.

    `parts` are those that can be permuted: all but inputs and outputs that nobody could permute back.
    """

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        example: tuple[Tensor, ...],
        dims: Sequence[int | None],
    ):
        self._anatomy = anatomy
        self._module = copy.deepcopy(module).cpu().double().eval().requires_grad_(False)
        self._random = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)
        for value in self._module.parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.mul_(1 + 0.2 * noise).add_(0.05 * noise.roll(1, -1) if noise.ndim else 0.05)
        for one in anatomy.buffers:
            value = self._module.get_buffer(one.name)
            value.add_(0.2 * torch.rand(value.shape, generator=generator, dtype=value.dtype))
        self._values = {name: value.clone() for name, value in self._module.state_dict().items()}
        self._example = tuple(
            x.detach().cpu().double() + torch.randn(x.shape, generator=generator).double()
            if x.is_floating_point()
            else x.cpu()
            for x in example
        )
        self.expected = _tensors(self._module(*self._example))
        # Which part permutes which dimension of each input, and of the output.
        self._inputs: dict[int, tuple[int, int]] = {}
        self._output: tuple[int, int] | None = None
        ends = set(anatomy.ends or ())
        for place, dim in enumerate(dims):
            name = input_name(place)
            ends = {end for end in ends if end.partition("#")[0] != name}
            if dim is not None and name in anatomy.names:
                part = anatomy.find(name)
                # Channels that are used in several ways are several parts: those are left alone.
                if anatomy.parts[part].cells == self._example[place].shape[dim]:
                    self._inputs[place] = part, dim
        if len(ends) == len(self.expected) == 1 and self.expected[0].ndim > 1:
            part, shape = anatomy.find(ends.pop()), self.expected[0].shape
            fitting = [d for d in (1, len(shape) - 1) if shape[d] == anatomy.parts[part].cells]
            self._output = (part, fitting[0]) if fitting else None
        known = {part for part, _ in (*self._inputs.values(), *filter(None, [self._output]))}
        self.parts = [
            number
            for number, part in enumerate(anatomy.parts)
            if part.name not in (anatomy.ends or ()) or number in known
        ]

    def error(self, parts: Sequence[int]) -> float:
        """The largest change of an output, relative to the largest output, when parts are permuted."""
        anatomy = self._anatomy
        take = np.arange(anatomy.firsts[-1])
        for part in parts:
            cells = anatomy.cells(part)
            take[cells] = self._random.permutation(cells)

        def permuted(x: Tensor, part: int, dim: int) -> Tensor:
            cells = anatomy.cells(part)
            return x.index_select(dim, torch.from_numpy(take[cells] - cells[0]))

        self._module.load_state_dict(self._values)
        anatomy.permute(named_tensors(self._module), take)
        inputs = list(self._example)
        for place, (part, dim) in self._inputs.items():
            inputs[place] = permuted(inputs[place], part, dim)
        largest = 0.0
        for output, expected in zip(_tensors(self._module(*inputs)), self.expected, strict=True):
            if self._output is not None:
                expected = permuted(expected, *self._output)
            scale = float(expected.abs().max()) or 1.0
            error = float((output - expected).abs().max()) / scale
            largest = max(largest, error if np.isfinite(error) else float("inf"))
        return largest


def _tensors(output: object) -> list[Tensor]:
    """The numbers in whatever a module returns."""
    if isinstance(output, Tensor):
        return [output.detach().double()]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for one in output for tensor in _tensors(one)]
    return []


def _stands_on(anatomy: Anatomy, part: int) -> str:
    cells = anatomy.cells(part)
    axes = [
        f"{one.name}:{index}"
        for one in (*anatomy.parameters, *anatomy.buffers)
        for index, axis in enumerate(one.axes)
        if axis is not None and np.isin(axis, cells).any()
    ]
    return ", ".join(axes[:8] + ["…"][: len(axes) > 8])
