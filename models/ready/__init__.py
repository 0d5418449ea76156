"""Ready networks in plain torch, their sizes as arguments, and a table of them by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..networks import mlp
from .convolutional import cnn1d, resnet, small_cnn, unet
from .sequence import lstm_classifier, vit

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "small-cnn": small_cnn,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm_classifier,
    "cnn1d": cnn1d,
    "vit": vit,
}
"""Ready networks by the name that configs use."""

__all__ = ["NETWORKS", "cnn1d", "lstm_classifier", "mlp", "resnet", "small_cnn", "unet", "vit"]
