"""Find the anatomy of a network: its parts, which are sets of interchangeable cells, usually a layer each.

The parts of a chain of Linear layers follow from the module itself. Any other module is traced with an
example input (parts.py), unless it has a method `anatomy()` that returns its anatomy. A network that is
shared as a whole, or not at all, needs no parts. The result of a trace is checked numerically: permuting the
cells of a part must not change the network's outputs.

Parameters with `requires_grad=False` are frozen: no peer trains them, so an anatomy leaves them out, and with
them each part that only they have cells of. What an `anatomy()` method returns is used as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .anatomy import Anatomy, ParameterMap, Part, dense_axes
from .errors import ModelError
from .slicing import is_share

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED_CONVOLUTIONS)

NAME_AXES_HINT = (
    "name the axes by hand with parts={'name': ['parameter:axis', …]}, or give the module an "
    "anatomy() method"
)
"""What to do if a trace fails: the end of the error's message."""

_PER_CELL = (nn.PReLU,)
"""Layers whose parameters have one value per cell. A user's own layer is treated like them if it has an
attribute `per_cell = True`."""


def norm_layers(module: nn.Module) -> set[str]:
    """Return the names of a module's norm layers of every kind: batch, layer, group norm and others."""
    return {name for name, layer in module.named_modules() if "Norm" in type(layer).__name__}


def discover(
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...] | None = None,
    *,
    parts: Mapping[str, Sequence[str]] | None = None,
    channels: int | None = None,
    check: bool = True,
) -> Anatomy:
    """Return the anatomy of a module: from its `anatomy()` method, from its Linear layers, or by a trace.

    Layers that are connected through skips, concatenations, flattening or grouped convolutions share cells.
    A cell is a channel; a hidden unit of LSTM, GRU and RNN; a head of attention. Channels that must stay in
    groups (grouped convolutions, group norm) are one cell per group. Axes whose entries are not
    interchangeable (kernels, positions, vocabularies) have no cells. A parameter without any cell (a
    temperature) becomes a part of one cell. Frozen parameters (`requires_grad=False`) and the statistics of
    frozen norm layers are left out, unless all parameters are frozen, as in a network that learns without
    gradients.

    example
        An input, a batch of any size; its values hardly matter. Modules other than chains of Linear layers
        need one.
    parts
        The cells of axes that the trace cannot find: `{"tokens": ["mix.weight:0", "mix.bias:0"]}` says that
        axis 0 of both parameters has the cells of one part, `tokens`, in the same order. Parameter names may
        be globs. Axes under the empty name have no cells.
    channels
        The dimension of the first input that holds channels: by default the last of inputs [n, f], 1 of
        images, and of [n, a, b] 1 for modules with Conv1d layers, else 2.
    check
        Whether the trace is checked: the cells of all parts are permuted on a copy, and outputs compared.
        Leave it on to get an error if the trace is wrong. It takes about two forward passes in float64.
    """
    refuse_lazy(module)
    anatomy_method = getattr(module, "anatomy", None)
    if callable(anatomy_method):
        anatomy = anatomy_method()
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
            from .parts import find_parts  # imported here because most peers need no trace

            inputs = example_inputs(example)
            if len(inputs[0]) < 1:
                raise ModelError("the example input is an empty batch; give at least one sample")
            # `channels` is the dimension of the first input; those of other inputs are guessed.
            chosen = [channels, *[None] * (len(inputs) - 1)]
            dims = [_channel_dim(module, x, dim) for x, dim in zip(inputs, chosen, strict=True)]
            anatomy = find_parts(module, inputs, dims, parts or {})
            if check:
                check_by_permutation(module, anatomy, inputs, dims)
        else:
            try_example(module, example)
    in_anatomy = {parameter.name: parameter.shape for parameter in anatomy.parameters}
    in_module = {
        name: tuple(value.shape)
        for name, value in module.named_parameters()
        if name in in_anatomy or value.requires_grad  # an anatomy() may leave frozen ones out
    }
    if list(in_module.items()) != list(in_anatomy.items()):
        missing = sorted(set(in_module) - set(in_anatomy)) or sorted(in_module)
        raise ModelError(
            f"the anatomy of {type(module).__name__} must list its parameters in the order and with the "
            f"shapes of named_parameters(); look at {missing[0]!r}"
        )
    return anatomy if callable(anatomy_method) else _without_frozen(module, anatomy)


def _without_frozen(module: nn.Module, anatomy: Anatomy) -> Anatomy:
    """Return the anatomy without frozen parameters; as it is if none is frozen, or if all are."""
    parameters = dict(module.named_parameters())
    frozen = {name for name, value in parameters.items() if not value.requires_grad}
    if not frozen or len(frozen) == len(parameters):
        return anatomy
    for norm in frozen_norms(module):
        frozen |= {f"{norm}.{name}".lstrip(".") for name in _STATISTICS}
    return anatomy.without(frozen)


def frozen_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norm layers, by name, that have gains or biases, all of them frozen."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BATCH_NORMS)
        and any(True for _ in layer.parameters())
        and not any(value.requires_grad for value in layer.parameters())
    }


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def input_name(index: int) -> str:
    """Return the name of the part that consists of the channels of the module's `index`-th input."""
    return f"input{index}" if index else "input"


def example_inputs(example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return an example input as a tuple of tensors; raise if it is something else."""
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise ModelError("give the example input as a tensor, or as a tuple of tensors")
    return inputs


def _channel_dim(module: nn.Module, x: Tensor, chosen: int | None) -> int | None:
    """Return the dimension of an input that holds channels, None if it has none: see `discover`."""
    if chosen is not None:
        if not -x.ndim < chosen < x.ndim or chosen == 0:
            raise ModelError(
                f"channels={chosen}: the example input has dimensions 1 to {x.ndim - 1}"
            )
        return chosen % x.ndim
    if not x.is_floating_point() or x.ndim < 2:
        return None
    if x.ndim == 3:
        return 1 if any(isinstance(layer, nn.Conv1d) for layer in module.modules()) else 2
    return 1


@contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """Put a module into eval mode inside the context; then its submodules' modes are restored."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield module.eval()
    finally:
        for layer, training in modes:
            layer.training = training


@torch.no_grad()
def run_once(module: nn.Module, *inputs: Tensor) -> Any:
    """Return a module's output in eval mode."""
    with evaluating(module):
        return module(*inputs)


def try_example(module: nn.Module, example: Tensor | tuple[Tensor, ...]) -> None:
    """Raise ModelError if a module cannot be run on its example input."""
    inputs = example_inputs(example)
    try:
        run_once(module, *inputs)
    except Exception as error:  # the user's module may raise anything
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ModelError(
            f"the example input of shape {shapes} does not fit the network: {' '.join(str(error).split())}"
        ) from None


def refuse_lazy(module: nn.Module) -> None:
    """Raise, naming the parameter, if a module has lazy parameters without a shape."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, value in tensors if is_lazy(value)]:
        raise ModelError(
            f"{lazy[0]!r} has no shape yet, because its layer is lazy: call the module once on a sample, "
            "module(x), before it is wrapped"
        )


def _linear_chain(module: nn.Module) -> Anatomy:
    """Return the anatomy of a chain of Linear layers and activations; raise for any other module."""
    parts: list[Part] = []
    maps: list[ParameterMap] = []
    listed: set[int] = set()
    remedy = (
        "pass an example input (example=x) to have the module traced, or give it an anatomy() method "
        "that says which cells each parameter touches"
    )
    for prefix, layer in leaves(module):
        label = f"layer {prefix!r} ({type(layer).__name__})"
        if isinstance(layer, nn.Linear):
            if not parts:
                parts.append(Part("input", layer.in_features))
            elif parts[-1].cells != layer.in_features:
                raise ModelError(
                    f"{label} takes {layer.in_features} inputs, but the layer before it has "
                    f"{parts[-1].cells} cells"
                )
            parts.append(Part(prefix or "output", layer.out_features))
        elif any(True for _ in layer.parameters()):
            if not (isinstance(layer, _PER_CELL) or getattr(layer, "per_cell", False)):
                raise ModelError(
                    f"{label}: only Linear layers and per-cell activations are recognised by type; {remedy}"
                )
            if not parts:
                raise ModelError(f"{label} comes before the first Linear layer")
        elif parts and not _treats_cells_alike(layer, parts[-1].cells):
            raise ModelError(
                f"{label} does not treat all cells alike, as an activation does; {remedy}"
            )
        last = len(parts) - 1
        for name, value in layer.named_parameters():
            if id(value) in listed:
                raise ModelError(
                    f"{label} has the parameter {name!r} in common with a layer before it, which ties their "
                    f"cells; {remedy}"
                )
            listed.add(id(value))
            shape = tuple(value.shape)
            if isinstance(layer, nn.Linear) and name == "weight":
                axes = dense_axes(parts, last, last - 1)
            elif shape == (parts[last].cells,):
                axes = dense_axes(parts, last)
            else:
                axes = tuple(None for _ in shape)  # Anatomy then raises an error that names it
            maps.append(ParameterMap(f"{prefix}.{name}" if prefix else name, shape, axes))
    if not parts:
        raise ModelError(f"{type(module).__name__} has no Linear layer, so nothing can be sliced")
    return Anatomy(tuple(parts), tuple(maps))


def leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested Sequentials, with their names, in the order in which they run."""
    if type(module).forward is nn.Sequential.forward:
        names = {child: name for name, child in module.named_children()}
        for child in cast("nn.Sequential", module):  # a layer that runs twice is there twice
            yield from leaves(child, f"{prefix}.{names[child]}" if prefix else names[child])
    else:
        yield prefix, module


def _treats_cells_alike(layer: nn.Module, cells: int) -> bool:
    """Return whether permuted inputs give equally permuted outputs; True where that cannot be tried.

    A layer with a value per cell in its buffers (batch norm's statistics) does not: they may be equal now.
    """
    if any(buffer.numel() > 1 for buffer in layer.buffers()):
        return False
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(cells, generator=generator)
    for shape in ((3, cells), (3, 2, cells)):
        x = torch.randn(shape, generator=generator)
        try:
            with torch.random.fork_rng([]):
                outputs = [run_once(layer, values) for values in (x, x, x[..., order])]
        except (
            Exception
        ):  # a user's layer may raise anything, for inputs of another shape than its own
            continue
        y, again, permuted = outputs
        is_comparable = isinstance(y, Tensor) and y.ndim > 1 and y.shape[-1] == cells
        is_comparable = is_comparable and torch.equal(y, again)
        if is_comparable and not torch.allclose(y[..., order], permuted, rtol=1e-4, atol=1e-5):
            return False
    return True


_TOLERANCE = 1e-6
"""Allowed change of outputs, relative to the largest output, in float64: far above rounding errors, far below
the effect of a wrong part."""
_STATISTICS = ("running_mean", "running_var")


def is_whole(spec: object) -> bool:
    """Return whether a slice is described as the whole network: by a share of 1."""
    return is_share(spec) and (spec == 1 or spec == {"*": 1})


def _is_whole_layers(spec: object) -> bool:
    """Return whether a slice is described as whole layers: by shares of 0 and 1, with a name or a glob."""
    if not isinstance(spec, Mapping) or not is_share(spec):
        return False
    return set(spec.values()) <= {0, 1} and any(name != "*" for name in spec)


def discover_or_one_cell(
    slices: Iterable[object],
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...] | None = None,
    **options: Any,
) -> Anatomy:
    """Return the anatomy that `discover` finds; if it fails, one in which network or layers are single cells.

    The network is one cell if every slice is the whole network, or if there are no slices. Each layer is a
    cell if every slice is the whole network or whole layers, given by name: `{"*": 1, "head": 0}`. Other
    slices need the parts that were not found: then the error of `discover` is raised.

    slices: the descriptions of the slices. options: those of `discover`.
    """
    refuse_lazy(module)
    try:
        return discover(module, example, **options)
    except ModelError:
        # A user who describes the anatomy wants parts, and the error says why there are none.
        is_described = (
            options.get("parts")
            or options.get("channels") is not None
            or callable(getattr(module, "anatomy", None))
        )
        specs = list(slices)
        if is_described or not all(is_whole(spec) or _is_whole_layers(spec) for spec in specs):
            raise
        if example is not None:
            try_example(module, example)  # an example that does not fit is an error in any case
        layers = any(map(_is_whole_layers, specs))
        return _without_frozen(module, _untraced(module, layers=layers))


def _untraced(module: nn.Module, *, layers: bool) -> Anatomy:
    """Return an anatomy of one part with one cell, to which all parameters and batch statistics belong.

    layers: whether each layer that has parameters of its own is such a part instead.
    """
    cell_of: dict[str, int] = {}

    def in_part(name: str, value: Tensor) -> ParameterMap:
        layer = (name.rpartition(".")[0] or "layer") if layers else "whole"
        return in_one_cell(name, value, cell_of.setdefault(layer, len(cell_of)))

    parameters = [in_part(name, value) for name, value in module.named_parameters()]
    if not parameters:
        raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing to share")
    statistics = [
        in_part(name, value)
        for name, value in module.named_buffers()
        if name.rpartition(".")[2] in _STATISTICS and value.ndim
    ]
    parts = tuple(Part(name, 1) for name in cell_of)
    ends = frozenset[str]() if layers else None
    return Anatomy(parts, tuple(parameters), tuple(statistics), ends)


def in_one_cell(name: str, value: Tensor, cell: int = 0) -> ParameterMap:
    """Return the map of a parameter that belongs entirely to one cell."""
    shape = tuple(value.shape)
    if not shape:
        return ParameterMap(name, shape, (), cell)
    # The cell is on the first axis, so that starting weights are scaled by their fan-in (see Start).
    return ParameterMap(name, shape, (np.full(shape[0], cell), *[None] * (len(shape) - 1)))


# --- the check: permuting the cells of a part must not change the outputs -------------------------


def check_by_permutation(
    module: nn.Module, anatomy: Anatomy, example: tuple[Tensor, ...], dims: Sequence[int | None]
) -> None:
    """Raise, naming the part, if permuting the cells of a part changes what `module` computes.

    Works on a copy in float64 with noise added to all values, because parameters whose values are all equal
    (gains of 1, biases of 0) would hide that they were not permuted. All parts are permuted at once; only if
    that changes outputs, each part is tried separately.
    """
    try:
        trial = _PermutationTrial(module, anatomy, example, dims)
    except Exception as error:  # the user's module may raise anything
        raise ModelError(
            f"{type(module).__name__} cannot be checked on a copy in float64 ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); let it make its tensors in the dtype of its inputs, as with "
            "x.new_zeros(…), or pass check=False"
        ) from error
    if not trial.expected:
        raise ModelError(f"{type(module).__name__} returns no tensor: its parts cannot be checked")
    if trial.error(trial.parts) <= _TOLERANCE:
        return
    if trial.error([]) > _TOLERANCE:
        raise ModelError(
            f"{type(module).__name__} does not compute the same on every call, even in eval mode (random "
            "numbers?), so its parts cannot be checked; make it repeatable, or pass check=False"
        )
    for index in trial.parts:
        error = trial.error([index])
        if error > _TOLERANCE:
            part = anatomy.parts[index]
            raise ModelError(
                f"part {part.name!r} ({part.cells} cells) was traced wrongly: permuting its cells changes "
                f"the output by {error:.1e}. Its axes are {_axes_of(anatomy, index)}; {NAME_AXES_HINT}"
            )
    raise ModelError(
        "permuting the cells of all parts together changes the output, though permuting any single part "
        "does not; look for values near a threshold, or pass check=False"
    )


class _PermutationTrial:
    """A copy of a module in float64 with noise on its values, and its outputs before any permutation.

    `parts` are the indices of parts that can be permuted: all but input and output parts for which it is not
    known which dimension of the inputs or outputs must be permuted alike.
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
        for value in self._module.buffers():
            if value.is_floating_point():
                value.add_(0.2 * torch.rand(value.shape, generator=generator, dtype=value.dtype))
        self._values = {name: value.clone() for name, value in self._module.state_dict().items()}
        self._example = tuple(
            x.detach().cpu().double() + torch.randn(x.shape, generator=generator).double()
            if x.is_floating_point()
            else x.cpu()
            for x in example
        )
        self.expected = _tensors(self._module(*self._example))
        # (part, dimension that is permuted with it) of each input, by its index, and of the output.
        self._inputs: dict[int, tuple[int, int]] = {}
        self._output: tuple[int, int] | None = None
        ends = set(anatomy.ends or ())
        for index, dim in enumerate(dims):
            name = input_name(index)
            ends = {end for end in ends if end.partition("#")[0] != name}
            if dim is not None and name in anatomy.names:
                part = anatomy.find(name)
                # An input whose channels are several parts (input, input#2, …) is not permuted.
                if anatomy.parts[part].cells == self._example[index].shape[dim]:
                    self._inputs[index] = part, dim
        if len(ends) == len(self.expected) == 1 and self.expected[0].ndim > 1:
            part, shape = anatomy.find(ends.pop()), self.expected[0].shape
            dims_of_part = [d for d in (1, len(shape) - 1) if shape[d] == anatomy.parts[part].cells]
            self._output = (part, dims_of_part[0]) if dims_of_part else None
        ends_with_dim = {
            part for part, _ in (*self._inputs.values(), *filter(None, [self._output]))
        }
        self.parts = [
            index
            for index, part in enumerate(anatomy.parts)
            if part.name not in (anatomy.ends or ()) or index in ends_with_dim
        ]

    def error(self, parts: Sequence[int]) -> float:
        """Permute parts; return the largest change of an output, relative to the largest output."""
        anatomy = self._anatomy
        old_cells = np.arange(anatomy.first_cells[-1])
        for part in parts:
            cells = anatomy.cells(part)
            old_cells[cells] = self._random.permutation(cells)

        def permute(x: Tensor, part: int, dim: int) -> Tensor:
            cells = anatomy.cells(part)
            return x.index_select(dim, torch.from_numpy(old_cells[cells] - cells[0]))

        self._module.load_state_dict(self._values)
        anatomy.permute(named_tensors(self._module), old_cells)
        inputs = list(self._example)
        for index, (part, dim) in self._inputs.items():
            inputs[index] = permute(inputs[index], part, dim)
        largest = 0.0
        for output, expected in zip(_tensors(self._module(*inputs)), self.expected, strict=True):
            if self._output is not None:
                expected = permute(expected, *self._output)
            scale = float(expected.abs().max()) or 1.0
            error = float((output - expected).abs().max()) / scale
            largest = max(largest, error if np.isfinite(error) else float("inf"))
        return largest


def _tensors(output: object) -> list[Tensor]:
    """Return all tensors in a module's output, in float64."""
    if isinstance(output, Tensor):
        return [output.detach().double()]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in _tensors(item)]
    return []


def _axes_of(anatomy: Anatomy, part: int) -> str:
    """Return the axes on which a part has cells, as text, at most eight of them."""
    cells = anatomy.cells(part)
    axes = [
        f"{tensor.name}:{index}"
        for tensor in (*anatomy.parameters, *anatomy.buffers)
        for index, axis in enumerate(tensor.axes)
        if axis is not None and np.isin(axis, cells).any()
    ]
    return ", ".join(axes[:8] + ["…"][: len(axes) > 8])
