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
                f"the output by {error:.1e}. It stands on {_stands_on(anatomy, part)}. Name "
                "these axes by hand with parts={'name': ['parameter:axis', …]}, or give the module an "
                "anatomy() method"
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
