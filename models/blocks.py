"""The torch modules of which the ready-made networks (networks.py) are built."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A residual block: two 3×3 convolutions with batch norm, and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """An encoder and a decoder, connected by skips that are concatenated.

    `down` are the convolutions of the encoder, `up` those of the decoder; `raise_` doubles the size of the
    image before each of the latter. `head` makes the logits.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int]):
        super().__init__()
        self.down = nn.ModuleList(
            _double_convolution(inputs, outputs)
            for inputs, outputs in pairwise((channels, *widths))
        )
        decoder_widths = list(reversed(widths))
        self.raise_ = nn.ModuleList(
            nn.ConvTranspose2d(inputs, outputs, 2, 2)
            for inputs, outputs in pairwise(decoder_widths)
        )
        self.up = nn.ModuleList(
            _double_convolution(2 * width, width) for width in decoder_widths[1:]
        )
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()  # the lowest level has no skip
        for upsample, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([skips.pop(), upsample(x)], dim=1))
        return self.head(x)


class LstmClassifier(nn.Module):
    """An LSTM, and a linear layer on the output of its last time step."""

    def __init__(self, channels: int, classes: int, hidden: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Vit(nn.Module):
    """A vision transformer: its tokens are the patches of an image and a class token (`token`).

    `places` are the learned position embeddings of the tokens.
    """

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
