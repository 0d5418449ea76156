"""Makes the torch modules of networks that a config or a command names: ready ones and users' functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.entry import EntryError, describe_error, import_from, load_entry

from ..models import READY_NETWORKS, Anatomy, ModelError, discover_or_one_cell
from .data import Dataset


def find_function(name: str, folder: Path | None = None) -> Callable[..., Any]:
    """Return the function that makes a network; name: a ready network, or an entry point `module:function`.

    Its module is imported from the working directory, `folder` (that of the config), or installed packages.
    """
    if name in READY_NETWORKS:
        return READY_NETWORKS[name].build
    if ":" not in name:
        raise ModelError(
            f"no ready network is called {name!r}; there are {', '.join(READY_NETWORKS)}; or name your own "
            "function that returns a torch module, as module:function"
        )
    import_from(folder or Path())
    try:
        return load_entry(name)
    except EntryError as error:
        raise ModelError(str(error)) from None


def make_module(
    name: str,
    function: Callable[..., nn.Module],
    shape: Sequence[int],
    classes: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """Call the function of a network and return its module.

    The arguments are `options` and, if the function has parameters of these names and `options` does not set
    them, `classes`, `size` (the width of images) and `channels` (of images and windows of a time series; for
    flat samples, the number of features). shape: that of one sample.
    """
    if name in READY_NETWORKS:
        _check_shape(name, shape)
    parameters = inspect.signature(function).parameters
    accepts_any_option = any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )
    if not accepts_any_option and (
        unknown := [option for option in options if option not in parameters]
    ):
        raise ModelError(
            f"options: {name!r} has no {unknown[0]!r}; it has {', '.join(parameters) or 'none'}"
        )
    from_data = {"classes": classes, "channels": shape[0] if len(shape) == 3 else shape[-1]}
    if len(shape) == 3:
        from_data["size"] = shape[-1]
    arguments = {key: value for key, value in from_data.items() if key in parameters} | dict(
        options
    )
    try:
        module = function(**arguments)
    except ModelError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        arguments_text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ModelError(f"{name}({arguments_text}) failed: {error}") from error
    except Exception as error:  # unexpected: the message also names the line in the user's file
        raise ModelError(describe_error(name, error)) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name} returned {type(module).__name__} instead of a torch module")
    return module


class NamedNetwork:
    """A network that is given by a name; makes one module per peer, and finds its parts (layers) only once.

    slices: the slice of each partial model as the config gives it: a share, a layout, or a mapping from parts
        to shares. If each is the whole network (or there are none), it is no error if parts cannot be found:
        all parameters are then one cell.
    anatomy: the network's parts, and to which of their cells each parameter belongs.
    """

    def __init__(
        self,
        name: str,
        data: Dataset,
        options: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        slices: Iterable[object] = (),
    ):
        self._name, self._options = name, dict(options or {})
        self._function = find_function(name, folder)
        self._shape, self._classes = tuple(data.train.x.shape[1:]), data.classes
        module = self.make()  # before `order`, whose error for a wrong shape would be less clear
        # The module is run on two samples to find its parts. Only their shape matters, but a user's module
        # may fail on values that do not occur in the data.
        example = self.order(data.train.x[:2])
        self.anatomy: Anatomy = discover_or_one_cell(slices, module, example)
        _check_outputs(name, module, example)

    def make(self) -> nn.Module:
        """Return a new module. Its random numbers are the same each time, so peers freeze equal values."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            return make_module(
                self._name, self._function, self._shape, self._classes, self._options
            )

    def order(self, x: Tensor) -> Tensor:
        """Return inputs as the network expects them: see `order_dimensions`."""
        return order_dimensions(self._name, x)


def order_dimensions(name: str, x: Tensor) -> Tensor:
    """Return inputs with their dimensions in the order that a network expects.

    Samples of time series are [time, channels]. For ready networks with convolutions over time, which expect
    [channels, time], this function swaps the two.
    """
    ready = READY_NETWORKS.get(name)
    return x.transpose(1, 2).contiguous() if ready is not None and ready.time_last else x


def example_input(shape: Sequence[int]) -> Tensor:
    """Return two random samples of a shape, on which a module can be traced if there is no data set."""
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))


def _check_shape(name: str, shape: Sequence[int]) -> None:
    """Raise if samples have another number of dimensions than a ready network expects.

    Every ready network expects two or three; none takes flat samples, of one dimension.
    """
    expected = READY_NETWORKS[name].sample_shape
    if len(shape) != len(expected):
        windows, images = "windows (time × channels)", "images (channels × height × width)"
        expected_text = windows if len(expected) == 2 else images
        raise ModelError(
            f"{name} reads {expected_text}, but samples have the shape {'×'.join(map(str, shape))}"
        )


def _check_outputs(name: str, module: nn.Module, example: Tensor) -> None:
    """Raise unless a module returns one row of numbers for each sample."""
    with torch.no_grad():
        outputs = module.eval()(example)
    if not isinstance(outputs, Tensor):
        raise ModelError(f"{name} returns {type(outputs).__name__} instead of a tensor")
    if outputs.ndim != 2 or len(outputs) != len(example):
        raise ModelError(
            f"{name} returns the shape {'×'.join(map(str, outputs.shape))} for {len(example)} samples, and "
            "classifying takes one row of numbers for each"
        )
