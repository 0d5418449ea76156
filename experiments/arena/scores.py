"""Losses and right answers of many peers at once, as the learners themselves would count them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models import Metrics, cross_entropy, squared_error
from ...models.sgd import Loss


def score(outputs: Tensor, labels: Tensor, loss: Loss) -> list[Metrics]:
    """Metrics of every peer from outputs and labels [peers, samples].

    Outputs are [peers, samples, classes], or [steps, peers, batch, classes] as they were computed.
    """
    peers, samples = labels.shape
    classes, axis = outputs.shape[-1], outputs.ndim - 3
    if axis:
        labels = labels.view(peers, outputs.shape[0], -1).transpose(0, 1).contiguous()
    if loss is squared_error:  # the same, without one-hot labels as whole numbers
        errors = torch.sub(outputs, targets(labels, classes, outputs)).square_().sum(dim=-1)
        losses = errors.mul_(0.5)
    else:
        losses = loss(outputs.reshape(-1, classes), labels.reshape(-1)).view(labels.shape)
    if classes == 1:
        threshold = 0.0 if loss is cross_entropy else 0.5
        right = (outputs[..., 0] > threshold) == (labels > 0)
    else:
        right = outputs.max(dim=-1).indices == labels
    others = tuple(dim for dim in range(labels.ndim) if dim != axis)
    totals = losses.sum(dim=others, dtype=torch.float64).tolist()
    counts = right.sum(dim=others).tolist()
    return [Metrics(total, count, samples) for total, count in zip(totals, counts, strict=True)]


def targets(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    """What outputs should be: one-hot, or the label itself for a single output."""
    if classes == 1:
        return labels.to(like.dtype)[..., None]
    return like.new_zeros(*labels.shape, classes).scatter_(-1, labels[..., None], 1.0)
