"""Parts are right if permuting their cells changes nothing: the check on numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy
from ..errors import ModelError
from ..permuting import permute_tensors
from .trace import input_name

_TOLERANCE = 1e-6  # of the largest output, in float64: far above rounding, far below a wrong part


def prove(
    module: nn.Module, anatomy: Anatomy, example: tuple[Tensor, ...], dims: Sequence[int | None]
) -> None:
    """Raise, naming the part, if permuting the cells of a part changes what `module` computes.

    Works on a copy in float64 with shaken values, since gains of 1 and biases of 0 would hide that
    they were left behind. All parts are permuted at once; only when that fails is the culprit sought.
    """
    trial = _Trial(module, anatomy, example, dims)
    if not trial.has_output:
        raise ModelError(
            f"{type(module).__name__} returns no tensor, so its parts cannot be checked"
        )
    everything = trial.parts()
    if trial.error(everything) <= _TOLERANCE:
        return
    if trial.error([]) > _TOLERANCE:
        raise ModelError(
            f"{type(module).__name__} does not compute the same on every call, even in eval mode (random "
            "numbers?), so its parts cannot be checked; make it repeatable, or pass check=False"
        )
    for part in everything:
        error = trial.error([part])
        if error > _TOLERANCE:
            one = anatomy.parts[part]
            raise ModelError(
                f"part {one.name!r} ({one.cells} cells) was traced wrongly: permuting its cells changes "
                f"the output by {error:.1e}. It stands on {', '.join(_stands_on(anatomy, part))}. Name "
                "these axes by hand with parts={'name': ['parameter:axis', …]}, or give the module an "
                "anatomy() method"
            )
    raise ModelError(
        "permuting the cells of all parts together changes the output, though each part alone seems "
        "right; look for values near a threshold, or pass check=False"
    )


class _Trial:
    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        example: tuple[Tensor, ...],
        dims: Sequence[int | None],
    ):
        self._anatomy, self._dims = anatomy, dims
        self._module = copy.deepcopy(module).cpu().double().eval().requires_grad_(False)
        self._random = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)
        tensors = dict(self._module.named_parameters())
        for value in tensors.values():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.mul_(1 + 0.2 * noise).add_(0.05 * noise.roll(1, -1) if noise.ndim else 0.05)
        for one in anatomy.buffers:
            value = self._module.get_buffer(one.name)
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
            value.add_(0.2 * noise)
        self._values = {name: value.clone() for name, value in self._module.state_dict().items()}
        self._example = tuple(
            x.detach().cpu().double() + torch.randn(x.shape, generator=generator).double()
            if x.is_floating_point()
            else x.cpu()
            for x in example
        )
        self._expected = _tensors(self._module(*self._example))
        self._inputs, self._output = self._ends()

    def _ends(self) -> tuple[dict[int, int], tuple[int, int] | None]:
        """Which part permutes each input, and which part permutes which dimension of the output."""
        index = {part.name: number for number, part in enumerate(self._anatomy.parts)}
        ends = set(self._anatomy.ends or ())
        inputs: dict[int, int] = {}
        for place, dim in enumerate(self._dims):
            name = input_name(place)
            part = index.get(name)
            ends = {end for end in ends if end.partition("#")[0] != name}
            if dim is None or part is None:
                continue
            # Channels that are used in several ways are several parts: those are left alone.
            if self._anatomy.parts[part].cells == self._example[place].shape[dim]:
                inputs[place] = part
        if len(ends) == len(self._expected) == 1 and self._expected[0].ndim > 1:
            part, shape = index[ends.pop()], self._expected[0].shape
            for dim in (1, len(shape) - 1):
                if shape[dim] == self._anatomy.parts[part].cells:
                    return inputs, (part, dim)
        return inputs, None

    @property
    def has_output(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self._expected)

    def parts(self) -> list[int]:
        """The parts that can be permuted: all but inputs and outputs that nobody could permute back."""
        known = {*self._inputs.values(), *([self._output[0]] if self._output else [])}
        ends = self._anatomy.ends or ()
        return [
            number
            for number, part in enumerate(self._anatomy.parts)
            if part.name not in ends or number in known
        ]

    def error(self, parts: Sequence[int]) -> float:
        """The largest change of an output, relative to the largest output, when parts are permuted."""
        anatomy = self._anatomy
        take = np.arange(anatomy.firsts[-1])
        for part in parts:
            cells = anatomy.cells(part)
            take[cells] = self._random.permutation(cells)

        def order(part: int) -> Tensor:
            cells = anatomy.cells(part)
            return torch.from_numpy(take[cells] - cells[0])

        self._module.load_state_dict(self._values)
        own: dict[str, Tensor] = dict(self._module.named_parameters())
        permute_tensors(anatomy, own | dict(self._module.named_buffers()), take)
        inputs = list(self._example)
        for place, part in self._inputs.items():
            dim = self._dims[place]
            assert dim is not None
            inputs[place] = inputs[place].index_select(dim, order(part))
        largest = 0.0
        for found, expected in zip(_tensors(self._module(*inputs)), self._expected, strict=True):
            if self._output is not None:
                expected = expected.index_select(self._output[1], order(self._output[0]))
            scale = float(expected.abs().max()) or 1.0
            error = float((found - expected).abs().max()) / scale
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


def _stands_on(anatomy: Anatomy, part: int) -> list[str]:
    first, last = anatomy.firsts[part], anatomy.firsts[part + 1]
    found = [
        f"{one.name}:{index}"
        for one in (*anatomy.parameters, *anatomy.buffers)
        for index, axis in enumerate(one.axes)
        if axis is not None and ((axis >= first) & (axis < last)).any()
    ]
    return found[:8] + (["…"] if len(found) > 8 else [])
