"""Losses and right answers of many peers at once, as the learners themselves would count them."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from ...models import Loss, Metrics, Right, cross_entropy, squared_error


def score(outputs: Tensor, labels: Tensor, loss: Loss, own: Right | None = None) -> list[Metrics]:
    """Metrics of every peer from outputs and labels [peers, samples].

    Outputs are [peers, samples, classes], or [steps, peers, batch, classes] as they were computed.
    own: the learners' own word for what is right, which comes with modules' outputs, as targets that are
    no classes do; both are [peers, samples, …].
    """
    if own is not None or labels.is_floating_point():
        return [_metrics(one, goal, loss, own) for one, goal in zip(outputs, labels, strict=True)]
    peers, samples = labels.shape
    classes, axis = outputs.shape[-1], outputs.ndim - 3
    if axis:
        labels = labels.view(peers, outputs.shape[0], -1).transpose(0, 1).contiguous()
    if classes == 1:
        threshold = 0.0 if loss is cross_entropy else 0.5
        right = (outputs[..., 0] > threshold) == (labels > 0)
    else:
        right = _right(outputs, labels)
    if loss is squared_error:  # the same, without one-hot labels
        losses = _errors(outputs, labels).square_().sum(dim=-1).mul_(0.5)
    else:
        losses = loss(outputs.reshape(-1, classes), labels.reshape(-1)).view(labels.shape)
    others = tuple(dim for dim in range(labels.ndim) if dim != axis)
    totals = losses.sum(dim=others, dtype=torch.float64).tolist()
    counts = right.sum(dim=others).tolist()
    return [Metrics(total, count, samples) for total, count in zip(totals, counts, strict=True)]


def _metrics(outputs: Tensor, labels: Tensor, loss: Loss, own: Right | None) -> Metrics:
    """Of one peer, by functions that know nothing of stacks."""
    total = float(loss(outputs, labels).sum(dtype=torch.float64))
    return Metrics(total, nan if own is None else int(own(outputs, labels).sum()), len(labels))


def _right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the most active output is the label's; of equal ones the first counts.

    Torch finds the largest value much faster than its place. The place is only asked for if that does
    not decide it: when a label's output equals the largest of the others, or one is not a number.
    """
    own = outputs.gather(-1, labels[..., None])[..., 0]
    others = _moved(outputs, labels, -torch.inf).amax(dim=-1)
    right = own > others
    if bool((right | (own < others)).all()):
        return right
    return outputs.max(dim=-1).indices == labels


def _errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """Outputs less what they should be: one-hot, or the label itself for a single output."""
    if outputs.shape[-1] == 1:
        return outputs - labels[..., None]
    return _moved(outputs, labels, -1.0)


def _moved(outputs: Tensor, labels: Tensor, change: float) -> Tensor:
    """A copy in which each label's own output is changed; adding is faster than writing."""
    where = labels[..., None]
    return outputs.clone().scatter_add_(-1, where, outputs.new_full((1,), change).expand_as(where))
