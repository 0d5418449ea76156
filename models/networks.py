"""Ready networks in plain torch, their sizes as arguments, and a table of them by name.

A new one is one function here under `@ready`: configs, the command line and its help read the table. They
do so without torch, which takes a second to load, so functions import it themselves.
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
"""Activations of a perceptron, and torch's names for them; `prelu` beside them."""


@dataclass(frozen=True)
class ReadyNetwork:
    """A ready network and what it reads.

    build
        Its function. Those of its arguments that are called `channels`, `size` and `classes` follow the data.
    sample
        The shape of a typical sample: images (channels, height, width) or windows (time, channels).
    time_last
        Windows are to be given to it as (channels, time).
    classifies
        Whether it gives one row of logits for each sample.
    """

    build: Callable[..., nn.Module]
    sample: tuple[int, ...]
    time_last: bool = False
    classifies: bool = True


READY: dict[str, ReadyNetwork] = {}
"""Ready networks by the name that configs use."""


def ready(name: str, sample: tuple[int, ...] = (3, 32, 32), **options: bool) -> Callable[..., Any]:
    """Enter a function into the table under a name; see ReadyNetwork."""

    def enter(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        READY[name] = ReadyNetwork(build, sample, **options)
        return build

    return enter


def mlp(layout: str, *, activation: str = "relu", output: str = "none") -> nn.Sequential:
    """A multi-layer perceptron from its layout: `mlp("784=300=100=10")`.

    `output` is the last layer's activation: by default none, for logits, which cross-entropy reads; the
    paper's networks are sigmoid throughout. `prelu` gives every cell a slope of its own.
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


@ready("small-cnn")
def small_cnn(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    *,
    widths: Sequence[int] = (32, 64),
    hidden: int = 128,
    norm: bool = False,
) -> nn.Sequential:
    """Two convolutions with pooling, then two dense layers (MAGI's ConvNet shape).

    Images [n, channels, size, size] → for each width a 3×3 convolution, ReLU and 2×2 pooling →
    `hidden` dense cells → `classes` logits. No buffers, unless `norm` puts batch norm behind every
    convolution.
    """
    from torch import nn

    left = size // 2 ** len(widths)
    if left < 1:
        raise ModelError(
            f"images of {size}×{size} cannot be halved {len(widths)} times; give fewer widths"
        )
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, *widths)):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm2d(after))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(widths[-1] * left * left, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


@ready("resnet")
def resnet(
    channels: int = 3, classes: int = 10, *, widths: Sequence[int] = (16, 32, 64), blocks: int = 1
) -> nn.Sequential:
    """A residual network for small images (the CIFAR kind: no pooling at the entry).

    Images [n, channels, any, any] → one 3×3 convolution → for each width a stage of `blocks` residual
    blocks, each stage after the first halving the image → global mean → `classes` logits. Batch norm
    throughout. `widths=(64, 128, 256, 512), blocks=2` is ResNet-18, 11 million parameters.
    """
    from torch import nn

    from .blocks import Residual

    stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(before, width, 2 if stage and not block else 1))
            before = width
    head = nn.Linear(before, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


@ready("unet", classifies=False)
def unet(channels: int = 3, classes: int = 2, *, widths: Sequence[int] = (16, 32, 64)) -> nn.Module:
    """A U-Net: down through the widths and up again, with skips joined by concatenation.

    Images [n, channels, h, w], h and w divisible by 2^(levels − 1) → logits [n, classes, h, w].
    """
    from .blocks import UNet

    if len(widths) < 2:
        raise ModelError(f"a U-Net needs two widths or more, not {tuple(widths)}")
    return UNet(channels, classes, widths)


@ready("lstm", (128, 6))
def lstm_classifier(
    channels: int = 6, classes: int = 6, *, hidden: int = 64, layers: int = 1
) -> nn.Module:
    """An LSTM for windows of sensor readings.

    Windows [n, time, channels] → `layers` LSTM layers of `hidden` cells → the last step → `classes`
    logits. Note the order of dimensions: time first, unlike `cnn1d`.
    """
    from .blocks import LstmClassifier

    return LstmClassifier(channels, classes, hidden, layers)


@ready("cnn1d", (128, 6), time_last=True)
def cnn1d(
    channels: int = 6, classes: int = 6, *, widths: Sequence[int] = (32, 64), kernel: int = 5
) -> nn.Sequential:
    """A one-dimensional CNN for windows of sensor readings.

    Windows [n, channels, time] → for each width a convolution over time, batch norm, ReLU and pooling
    by 2 → mean over time → `classes` logits.
    """
    from torch import nn

    layers: list[nn.Module] = []
    for before, after in pairwise((channels, *widths)):
        layers += [
            nn.Conv1d(before, after, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(2),
        ]  # fmt: skip
    head = nn.Linear(widths[-1], classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), head)


@ready("vit")
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
    class token and learned places → `depth` encoder layers of `heads` heads → `classes` logits from
    the class token.
    """
    from .blocks import Vit

    if size % patch:
        raise ModelError(f"images of {size}×{size} do not divide into patches of {patch}×{patch}")
    if width % heads:
        raise ModelError(f"a width of {width} does not divide into {heads} heads")
    return Vit(channels, size, patch, classes, width, depth, heads)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    **{name: one.build for name, one in READY.items()},
}
"""The functions by name, the perceptron's included."""

if TYPE_CHECKING:
    ReadyName = ImageNetworkName = str
else:  # types for settings: their checks and messages name the networks that there are
    ReadyName = Literal[tuple(READY)]
    ImageNetworkName = Literal[
        ("mlp", *(name for name, one in READY.items() if one.classifies and len(one.sample) == 3))
    ]
