"""What learning together is compared with: clients alone, one network on all samples, all networks at once.

Every question put to all of the clients' networks is a mark for fusing and averaging:

    p(k|x) ∝ Σ_j n_jk/n_k · p_j(k|x)          n_jk samples of class k at client j

Who never saw a class has no say in it. All networks are needed wherever one is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import Metrics
from .method import Client, Method, RoundContext, test_each_set_once


class Local(Method):
    """Each client trains its own network on its own samples. There is no state besides them."""

    bound = True

    def start(self, clients: Sequence[Client]) -> None:
        return None

    def round(self, state: None, clients: Sequence[Client], context: RoundContext) -> None:
        for k in context.pick(clients):
            clients[k].train()


class Pooled(Method):
    """One network on everybody's samples, which is what federations exist to avoid: an upper mark.

    The state is a client that has them all.

    A round is E epochs, so that it sees as many samples as a round of K clients; it takes as many more
    steps one after the other. Samples keep the labels that their clients gave them.
    """

    bound = True

    def start(self, clients: Sequence[Client]) -> Client:
        learner = copy(clients[0].learner)  # its network, optimizer, batches and order
        learner.samples = (
            torch.cat([client.learner.samples[0] for client in clients]),
            torch.cat([client.learner.samples[1] for client in clients]),
        )
        return Client(learner, clients[0].epochs)

    def round(self, state: Client, clients: Sequence[Client], context: RoundContext) -> Client:
        context.pick(clients)
        state.train()
        return state

    def test(self, state: Client, clients: Sequence[Client]) -> list[Metrics]:
        values = state.values()
        for client in clients:
            client.load(values)
        return [client.test() for client in clients]


class Ensemble(Local):
    """Local training, common answers."""

    def test(self, state: None, clients: Sequence[Client]) -> list[Metrics]:
        def test(client: Client) -> Metrics:
            inputs, labels = client.learner.held_out
            return score(answers(clients, inputs), labels)

        return test_each_set_once(clients, test)


@torch.no_grad()
def answers(clients: Sequence[Client], inputs: Tensor) -> Tensor:
    """p(k|x) for every input."""
    each = []
    for client in clients:
        client.network.module.eval()
        each.append(_probabilities(torch.cat([client.network(x) for x in inputs.split(1000)])))
    classes = each[0].shape[1]
    labels = [client.learner.samples[1] for client in clients]
    counts = torch.stack([torch.bincount(y, minlength=classes) for y in labels]).to(each[0])
    shares = counts / counts.sum(0).clamp(min=1)
    total = (torch.stack(each) * shares[:, None]).sum(0)
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
