"""The anatomy of a module that does not declare one: trace, assemble, prove."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy, ParameterMap, Part
from ..discovery import example_inputs
from ..errors import ModelError
from ..permuting import permute_tensors
from .trace import BY_HAND, FIXED, Channels, Ledger, input_name, trace

_TOLERANCE = 1e-6  # of the largest output, in float64: far above rounding, far below a wrong part


def find(
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    parts: Mapping[str, Sequence[str]] | None = None,
    channels: int | None = None,
    check: bool = True,
) -> Anatomy:
    """The parts of a module, from one example input (a batch of any size; values hardly matter).

    Layers that meet through skips, concatenations, flattening or grouped convolutions share cells.
    A cell is a channel; a hidden unit of LSTM, GRU and RNN; a head of attention. Channels that must
    stay in groups (grouped convolutions, group norm) are one cell per group. Dimensions whose places
    mean something (kernels, positions, vocabularies) carry no cells; a parameter without any cell (a
    temperature) is a part of one cell of its own.

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
    inputs = example_inputs(example)
    if len(inputs[0]) < 1:
        raise ModelError("the example input is an empty batch; give at least one sample")
    dims = [_channel_dim(module, x, channels if i == 0 else None) for i, x in enumerate(inputs)]
    ledger = Ledger()
    _enter_by_hand(module, parts or {}, ledger)
    state = torch.random.get_rng_state()  # stand-ins draw weights: leave no trace
    try:
        leaving = trace(module, inputs, dims, ledger)
    finally:
        torch.random.set_rng_state(state)
    anatomy = assemble(module, ledger, leaving)
    if check:
        prove(module, anatomy, inputs, dims)
    return anatomy


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


def _enter_by_hand(module: nn.Module, parts: Mapping[str, Sequence[str]], ledger: Ledger) -> None:
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    shapes |= {name: tuple(value.shape) for name, value in module.named_buffers()}
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


def assemble(module: nn.Module, ledger: Ledger, leaving: Sequence[Channels]) -> Anatomy:
    """Cells that stand on the same axes equally often are one part, named after what makes them."""
    cell_of = _settled(ledger)
    tensors = dict(module.named_parameters())
    statistics = {
        name: value for name, value in module.named_buffers() if value.is_floating_point()
    }
    order, names, inputs, outputs = _parts(ledger, cell_of, leaving)
    number = {cell: index for index, cell in enumerate(np.concatenate([*order, []]).tolist())}
    table = np.full(int(cell_of.max()) + 1, -1, np.int64)
    table[[int(cell) for cell in number]] = list(number.values())

    def axes(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray | None, ...]:
        found: list[np.ndarray | None] = []
        for axis, size in enumerate(shape):
            ids = ledger.axes.get((name, axis))
            if ids is not None and len(ids) != size:
                raise ModelError(f"axis {axis} of {name!r} has {size} indices, not {len(ids)}")
            moves = ids is not None and (cell_of[ids] != FIXED).all()
            found.append(table[cell_of[ids]] if moves else None)
        return tuple(found)

    parts = [Part(name, len(cells)) for name, cells in zip(names, order, strict=True)]
    maps: list[ParameterMap] = []
    total = sum(part.cells for part in parts)
    loose: list[Part] = []
    for name, value in tensors.items():
        shape = tuple(value.shape)
        found = axes(name, shape)
        cell = None
        if all(axis is None for axis in found):
            # A parameter that no cell touches (a temperature) is a part of one cell of its own.
            cell = total + len(loose)
            loose.append(Part(name, 1))
        maps.append(ParameterMap(name, shape, found, cell))
    buffers = []
    for name, value in statistics.items():
        found = axes(name, tuple(value.shape))
        if any(axis is not None for axis in found):
            buffers.append(ParameterMap(name, tuple(value.shape), found))
    return Anatomy((*parts, *loose), tuple(maps), tuple(buffers), frozenset(inputs + outputs))


def _settled(ledger: Ledger) -> np.ndarray:
    """Cells of channels, after what nothing makes and what stands beside it was fixed."""
    made = np.zeros(1, bool)
    for space in ledger.spaces:
        made = np.concatenate([made, np.full(space.count, space.made)])
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
) -> tuple[list[np.ndarray], list[str], list[str], list[str]]:
    """Cells by part, the parts' names, and which parts are inputs and outputs; outputs come last."""
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
    found: list[np.ndarray] = []
    names: list[str] = []
    inputs, outputs = [], []
    for key, cells in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        name = ledger.spaces[maker[cells[0]]].name
        count = sum(other.split("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count else name)
        found.append(np.array(cells))
        if key[0]:
            outputs.append(names[-1])
        elif ledger.spaces[maker[cells[0]]].given:
            inputs.append(names[-1])
    return found, names, inputs, outputs


# --- proof: parts are right if permuting their cells changes nothing, on numbers -----------------


def prove(
    module: nn.Module, anatomy: Anatomy, example: tuple[Tensor, ...], dims: Sequence[int | None]
) -> None:
    """Raise, naming the part, if permuting the cells of a part changes what `module` computes.

    Works on a copy in float64 with shaken values, since gains of 1 and biases of 0 would hide that
    they were left behind. All parts are permuted at once; only when that fails is the culprit sought.
    """
    trial = _Trial(module, anatomy, example, dims)
    if not trial.expected:
        raise ModelError(
            f"{type(module).__name__} returns no tensor, so its parts cannot be checked"
        )
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
        own: dict[str, Tensor] = dict(self._module.named_parameters())
        permute_tensors(anatomy, own | dict(self._module.named_buffers()), take)
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
