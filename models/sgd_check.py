"""What a gradient learner is given, looked at before it trains: samples, labels, and a loss of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError
from .network import SlicedNetwork

REGRESSION = "loss=lambda out, y: (out[:, 0] - y).square()"


@torch.no_grad()
def check_samples(
    network: SlicedNetwork,
    what: str,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Find out now, with the peer's name, what torch would say deep in the first training step.

    loss: the user's own, if it is that; only such a one has targets that are no classes.
    """
    peer = f"peer {network.peer!r}, {what} samples"
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        raise ModelError(f"{peer}: give inputs and labels as torch tensors")
    # Integers are tokens for an embedding, whatever the network computes in.
    if inputs.is_floating_point() and inputs.dtype != network.flat.dtype:
        raise ModelError(f"{peer}: inputs are {inputs.dtype}, the network is {network.flat.dtype}")
    _check_labels(peer, network, len(inputs), labels, loss is not None)
    if not len(inputs):
        return
    try:
        training = network.module.training
        outputs = network.module.eval()(inputs[:2])
        network.module.train(training)
    except RuntimeError as error:
        raise ModelError(
            f"{peer}: inputs of shape {tuple(inputs.shape[1:])} do not fit the network: {error}"
        ) from None
    if loss is not None:
        _check_loss(peer, loss, outputs, labels[:2])
    if labels.is_floating_point():
        return
    if outputs.ndim < 2:
        raise ModelError(
            f"{peer}: the network's outputs have the shape {tuple(outputs.shape)} for {len(outputs)} "
            "samples; classes want one row of outputs for each sample"
        )
    classes = max(outputs.shape[1], 2)
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ModelError(
            f"{peer}: labels run from {int(labels.min())} to {int(labels.max())}, but the network's "
            f"{outputs.shape[1]} outputs allow 0 to {classes - 1}"
        )


def _check_labels(
    peer: str, network: SlicedNetwork, count: int, labels: Tensor, own_loss: bool
) -> None:
    given = f"{labels.dtype} of shape {tuple(labels.shape)}"
    if labels.is_floating_point() and own_loss:
        if labels.dtype != network.flat.dtype or labels.ndim < 1 or len(labels) != count:
            raise ModelError(
                f"{peer}: targets must be {network.flat.dtype}, as the network is, and {count}, one for "
                f"each input, not {given}"
            )
    elif labels.dtype != torch.int64 or labels.shape != (count,):
        hint = f"; targets that are no classes need a loss of your own, as in {REGRESSION}"
        raise ModelError(
            f"{peer}: labels must be int64 of shape ({count},), not {given}"
            f"{hint if labels.is_floating_point() else ''}"
        )


def _check_loss(peer: str, loss: Callable[..., Any], outputs: Tensor, labels: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(labels.shape)}"
    try:
        losses = loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{peer}: the loss failed on {shapes}: {' '.join(str(error).split())}"
        ) from error
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (len(labels),):
        raise ModelError(
            f"{peer}: a loss gives one number for each sample, so shape ({len(labels)},) for {shapes}, not "
            f"{shape}; as in {REGRESSION}, or reduction='none' of torch's own"
        )
