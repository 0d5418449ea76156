"""Convolutional networks: for small images, for pictures as outputs, and for sensor windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ModelError


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


class _Residual(nn.Module):
    """Two 3×3 convolutions with batch norm, and a skip over both."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet(
    channels: int = 3, classes: int = 10, *, widths: Sequence[int] = (16, 32, 64), blocks: int = 1
) -> nn.Sequential:
    """A residual network for small images (the CIFAR kind: no pooling at the entry).

    Images [n, channels, any, any] → one 3×3 convolution → for each width a stage of `blocks` residual
    blocks, each stage after the first halving the image → global mean → `classes` logits. Batch norm
    throughout. `widths=(64, 128, 256, 512), blocks=2` is ResNet-18, 11 million parameters.
    """
    stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(_Residual(before, width, 2 if stage and not block else 1))
            before = width
    head = nn.Linear(before, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def _double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class _UNet(nn.Module):
    def __init__(self, channels: int, classes: int, widths: Sequence[int]):
        super().__init__()
        self.down = nn.ModuleList(_double(a, b) for a, b in pairwise((channels, *widths)))
        back = list(reversed(widths))
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairwise(back))
        self.up = nn.ModuleList(_double(2 * width, width) for width in back[1:])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for raised, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([kept.pop(), raised(x)], dim=1))
        return self.head(x)


def unet(channels: int = 3, classes: int = 2, *, widths: Sequence[int] = (16, 32, 64)) -> nn.Module:
    """A U-Net: down through the widths and up again, with skips joined by concatenation.

    Images [n, channels, h, w], h and w divisible by 2^(levels − 1) → logits [n, classes, h, w].
    """
    if len(widths) < 2:
        raise ModelError(f"a U-Net needs two widths or more, not {tuple(widths)}")
    return _UNet(channels, classes, widths)


def cnn1d(
    channels: int = 6, classes: int = 6, *, widths: Sequence[int] = (32, 64), kernel: int = 5
) -> nn.Sequential:
    """A one-dimensional CNN for windows of sensor readings.

    Windows [n, channels, time] → for each width a convolution over time, batch norm, ReLU and pooling
    by 2 → mean over time → `classes` logits.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, *widths)):
        layers += [
            nn.Conv1d(before, after, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(2),
        ]  # fmt: skip
    head = nn.Linear(widths[-1], classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), head)
