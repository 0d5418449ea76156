"""Clients alone, and every question put to all of their networks: a mark for fusing and averaging.

    p(k|x) ∝ Σ_j n_jk/n_k · p_j(k|x)          n_jk samples of class k at client j

Who never saw a class has no say in it. All networks are needed wherever one is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import Metrics
from .client import Client
from .local import Local


class Ensemble(Local):
    """Local training, common answers."""

    def test(self, state: None, clients: Sequence[Client]) -> list[Metrics]:
        found: dict[int, Metrics] = {}
        for client in clients:
            inputs, labels = client.learner.held_out
            if id(labels) not in found:
                found[id(labels)] = score(answers(clients, inputs), labels)
        return [found[id(client.learner.held_out[1])] for client in clients]


@torch.no_grad()
def answers(clients: Sequence[Client], inputs: Tensor) -> Tensor:
    """p(k|x) for every input."""
    each = []
    for client in clients:
        client.network.module.eval()
        each.append(_probabilities(torch.cat([client.network(x) for x in inputs.split(1000)])))
    classes = each[0].shape[1]
    counts = torch.stack(
        [torch.bincount(client.learner.samples[1], minlength=classes) for client in clients]
    ).to(each[0])
    shares = counts / counts.sum(0).clamp(min=1)
    total = torch.stack([p * share for p, share in zip(each, shares, strict=True)]).sum(0)
    return total / total.sum(1, keepdim=True).clamp(min=1e-12)


def score(probabilities: Tensor, labels: Tensor) -> Metrics:
    """Log loss and right answers."""
    loss = -probabilities[torch.arange(len(labels)), labels].clamp(min=1e-12).log()
    return Metrics(float(loss.sum()), int((probabilities.argmax(1) == labels).sum()), len(labels))


def _probabilities(outputs: Tensor) -> Tensor:
    """Softmax; a lone output is the logit of the second of two classes."""
    if outputs.shape[1] == 1:
        yes = torch.sigmoid(outputs)
        return torch.cat([1 - yes, yes], dim=1)
    return F.softmax(outputs, dim=1)
