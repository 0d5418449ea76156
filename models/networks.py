"""Ready-made networks in plain torch, with their sizes as arguments, and a table of them by name.

To add one, write a function here with the decorator `@register`: configs, the command line and its help read
the table. The functions import torch themselves, because it takes a second to load and the table does not
need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from .errors import ModelError

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "ReLU", "none": "Identity"}
"""Activations of a perceptron and the names of their torch classes; `mlp` accepts `prelu` as well."""


@dataclass(frozen=True)
class ReadyNetwork:
    """A ready-made network, and the shape of the samples that it takes.

    build
        The function that builds it. Its arguments `channels`, `size` and `classes` are set to fit the data.
    sample_shape
        The shape of a typical sample: images (channels, height, width) or windows of a time series (time,
        channels).
    time_last
        Whether windows must be transposed to (channels, time).
    classifies
        Whether it returns one row of logits for each sample.
    """

    build: Callable[..., nn.Module]
    sample_shape: tuple[int, ...]
    time_last: bool = False
    classifies: bool = True


READY_NETWORKS: dict[str, ReadyNetwork] = {}
"""Ready-made networks by the name that configs use."""


def register(
    name: str, sample_shape: tuple[int, ...] = (3, 32, 32), **options: bool
) -> Callable[..., Any]:
    """Return a decorator that adds a function to the table; the arguments are the fields of ReadyNetwork."""

    def decorator(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        READY_NETWORKS[name] = ReadyNetwork(build, sample_shape, **options)
        return build

    return decorator


def mlp(layout: str, *, activation: str = "relu", output: str = "none") -> nn.Sequential:
    """Build a multi-layer perceptron from its layout: `mlp("784=300=100=10")`.

    `output` is the activation of the last layer: by default none, because cross-entropy takes logits; the
    paper's networks have sigmoids in all layers. `prelu` has one learned slope per cell.
    """
    from torch import nn

    from .slicing import Layout

    layers: list[nn.Module] = []
    sizes = Layout.network(layout).cells
    names = [activation] * (len(sizes) - 2) + [output]
    for (inputs, cells), name in zip(pairwise(sizes), names, strict=True):
        if name != "prelu" and name not in ACTIVATIONS:
            raise ModelError(f"unknown activation {name!r}: use {', '.join(ACTIVATIONS)} or prelu")
        layers.append(nn.Linear(inputs, cells))
        layers.append(nn.PReLU(cells) if name == "prelu" else getattr(nn, ACTIVATIONS[name])())
    return nn.Sequential(*layers)


@register("small-cnn")
def small_cnn(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    *,
    widths: Sequence[int] = (32, 64),
    hidden: int = 128,
    norm: bool = False,
) -> nn.Sequential:
    """Two convolutions with pooling, then two dense layers (the form of MAGI's ConvNet).

    Images [n, channels, size, size] → for each width a 3×3 convolution, ReLU and 2×2 pooling →
    `hidden` dense cells → `classes` logits. `norm` adds batch norm, which has buffers, after every
    convolution.
    """
    from torch import nn

    pooled_size = size // 2 ** len(widths)
    if pooled_size < 1:
        raise ModelError(
            f"images of {size}×{size} cannot be halved {len(widths)} times; give fewer widths"
        )
    layers: list[nn.Module] = []
    for input_width, width in pairwise((channels, *widths)):
        layers.append(nn.Conv2d(input_width, width, 3, padding=1, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm2d(width))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(widths[-1] * pooled_size**2, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


@register("resnet")
def resnet(
    channels: int = 3, classes: int = 10, *, widths: Sequence[int] = (16, 32, 64), blocks: int = 1
) -> nn.Sequential:
    """A residual network for small images, as for CIFAR: the first convolution has no stride or pooling.

    Images [n, channels, any, any] → one 3×3 convolution → for each width a stage of `blocks` residual
    blocks, each stage after the first halving the image → global mean → `classes` logits. Batch norm
    throughout. `widths=(64, 128, 256, 512), blocks=2` is ResNet-18, 11 million parameters.
    """
    from torch import nn

    from .blocks import Residual

    stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    input_width = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(input_width, width, 2 if stage and not block else 1))
            input_width = width
    head = nn.Linear(input_width, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


@register("unet", classifies=False)
def unet(channels: int = 3, classes: int = 2, *, widths: Sequence[int] = (16, 32, 64)) -> nn.Module:
    """A U-Net: an encoder and a decoder, connected by skips that are concatenated.

    Images [n, channels, h, w], h and w divisible by 2^(len(widths) − 1) → logits [n, classes, h, w].
    """
    from .blocks import UNet

    if len(widths) < 2:
        raise ModelError(f"a U-Net needs two widths or more, not {tuple(widths)}")
    return UNet(channels, classes, widths)


@register("lstm", (128, 6))
def lstm_classifier(
    channels: int = 6, classes: int = 6, *, hidden: int = 64, layers: int = 1
) -> nn.Module:
    """An LSTM for windows of sensor readings.

    Windows [n, time, channels] → `layers` LSTM layers of `hidden` cells → output of the last time step →
    `classes` logits. The order of dimensions differs from `cnn1d`: time comes before channels.
    """
    from .blocks import LstmClassifier

    return LstmClassifier(channels, classes, hidden, layers)


@register("cnn1d", (128, 6), time_last=True)
def cnn1d(
    channels: int = 6, classes: int = 6, *, widths: Sequence[int] = (32, 64), kernel: int = 5
) -> nn.Sequential:
    """A one-dimensional CNN for windows of sensor readings.

    Windows [n, channels, time] → for each width a convolution over time, batch norm, ReLU and pooling
    by 2 → mean over time → `classes` logits.
    """
    from torch import nn

    layers: list[nn.Module] = []
    for input_width, width in pairwise((channels, *widths)):
        layers += [
            nn.Conv1d(input_width, width, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
        ]  # fmt: skip
    head = nn.Linear(widths[-1], classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), head)


@register("vit")
def vit(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    *,
    patch: int = 4,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
) -> nn.Module:
    """A small vision transformer.

    Images [n, channels, size, size] → patches of `patch`×`patch` as tokens of `width` channels, with a
    class token and learned position embeddings → `depth` encoder layers of `heads` heads → `classes` logits
    from the class token.
    """
    from .blocks import Vit

    if size % patch:
        raise ModelError(f"images of {size}×{size} do not divide into patches of {patch}×{patch}")
    if width % heads:
        raise ModelError(f"a width of {width} does not divide into {heads} heads")
    return Vit(channels, size, patch, classes, width, depth, heads)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    **{name: network.build for name, network in READY_NETWORKS.items()},
}
"""The functions that build networks, by name, including `mlp`."""

if TYPE_CHECKING:
    ReadyNetworkName = str
else:  # types of settings, whose validation errors list the names of all networks
    ReadyNetworkName = Literal[tuple(READY_NETWORKS)]
