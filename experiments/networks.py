"""The network that a config or a command names: a perceptron, a ready network, or a user's own function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.entry import EntryError, describe_error, load_entry

from ..models import READY, Anatomy, ModelError, discover_for
from .data import Dataset, Samples


def find_function(named: str, folder: Path | None = None) -> Callable[..., nn.Module]:
    """The function behind a ready network's name, or behind `module:function` of a user.

    A user's module stands in `folder` (beside the config), in the folder that one starts from, or is
    installed.
    """
    if named in READY:
        return READY[named].build
    if ":" not in named:
        raise ModelError(
            f"no ready network is called {named!r}; there are {', '.join(READY)}; or name a function of "
            "yours that returns a torch module, as module:function"
        )
    beside = str((folder or Path()).resolve())
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        return load_entry(named)
    except EntryError as error:
        raise ModelError(str(error)) from None


def make_module(
    named: str,
    function: Callable[..., nn.Module],
    shape: Sequence[int],
    classes: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """Call a network's function with its `options`, and with what the data decide.

    `channels`, `size` (of images: their width) and `classes` are given to functions that have arguments
    of these names, unless the options say otherwise.
    """
    if named in READY:
        _check_shape(named, shape)
    known = inspect.signature(function).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    if not open_ended and (unknown := [name for name in options if name not in known]):
        raise ModelError(
            f"options: {named!r} has no {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
    given = {"classes": classes, "channels": shape[0] if len(shape) == 3 else shape[-1]}
    if len(shape) == 3:
        given["size"] = shape[-1]
    arguments = {name: value for name, value in given.items() if name in known} | dict(options)
    try:
        module = function(**arguments)
    except ModelError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        called = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelError(f"{named}({called}) failed: {error}") from error
    except Exception as error:
        raise ModelError(describe_error(named, error)) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{named} returned {type(module).__name__} instead of a torch module")
    return module


class NamedNetwork:
    """Modules of one architecture for all peers of a data set; their parts are searched for once."""

    def __init__(
        self,
        named: str,
        data: Dataset,
        options: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        slices: Iterable[object] = (),
    ):
        self._named, self._options = named, dict(options or {})
        self._function = find_function(named, folder)
        self._shape, self._classes = tuple(data.train.x.shape[1:]), data.classes
        # Two samples of the data: their values hardly matter, but zeros would prove little.
        first = self.make()
        # Parts are needed only if some of the swarm's models, `slices`, have a part of the network.
        sample = self.inputs(data.train.take([0, 1]))
        self.anatomy: Anatomy = discover_for(slices, first, sample)

    def make(self) -> nn.Module:
        """A new module."""
        return make_module(self._named, self._function, self._shape, self._classes, self._options)

    def inputs(self, samples: Samples) -> Tensor:
        """What the network reads: samples in the shape that they have, windows time last for `cnn1d`."""
        return oriented(self._named, samples.x)


def oriented(named: str, x: Tensor) -> Tensor:
    """Inputs in the order of dimensions that a network reads."""
    return x.transpose(1, 2).contiguous() if named in READY and READY[named].time_last else x


def example_input(shape: Sequence[int]) -> Tensor:
    """Two samples of a shape, for a trace."""
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))


def _check_shape(named: str, shape: Sequence[int]) -> None:
    wanted = READY[named].sample
    if len(shape) != len(wanted):
        windows, images = "windows (time × channels)", "images (channels × height × width)"
        reads, has = windows if len(wanted) == 2 else images, "×".join(map(str, shape))
        raise ModelError(f"{named} reads {reads}, but samples have the shape {has}")
