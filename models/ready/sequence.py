"""Networks that read sequences: an LSTM over time, and a vision transformer over patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ModelError


class _LstmClassifier(nn.Module):
    def __init__(self, channels: int, classes: int, hidden: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm_classifier(
    channels: int = 6, classes: int = 6, *, hidden: int = 64, layers: int = 1
) -> nn.Module:
    """An LSTM for windows of sensor readings.

    Windows [n, time, channels] → `layers` LSTM layers of `hidden` cells → the last step → `classes`
    logits. Note the order of dimensions: time first, unlike `cnn1d`.
    """
    return _LstmClassifier(channels, classes, hidden, layers)


class _Vit(nn.Module):
    def __init__(
        self, channels: int, size: int, patch: int, classes: int, width: int, depth: int, heads: int
    ):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


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
    if size % patch:
        raise ModelError(f"images of {size}×{size} do not divide into patches of {patch}×{patch}")
    if width % heads:
        raise ModelError(f"a width of {width} does not divide into {heads} heads")
    return _Vit(channels, size, patch, classes, width, depth, heads)
