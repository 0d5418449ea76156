"""Bounds to compare federated methods with: training alone, training on pooled samples, and an ensemble.

The ensemble of all clients' networks is a bound for methods that fuse or average networks:

    p(k|x) ∝ Σ_j n_jk/n_k · p_j(k|x)          client j has n_jk samples of class k

A client without samples of a class has no weight in that class. To use the ensemble, a client needs all
networks. If clients have log-priors (models/prior.py), p_j is computed without them, and client i multiplies
p(k|x) by its own share of class k.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from .method import Client, Method, RoundContext, test_each_set_once

if TYPE_CHECKING:  # a method's settings are read and explained without torch
    from torch import Tensor

    from ...models import Metrics


class Local(Method):
    """Each client trains its own network on its own samples; there is no state besides the clients."""

    is_bound = True

    def start(self, clients: Sequence[Client]) -> None:
        return None

    def round(self, state: None, clients: Sequence[Client], context: RoundContext) -> None:
        for k in context.pick(clients):
            clients[k].train()


class Pooled(Method):
    """Trains one network on the samples of all clients, which federated learning avoids: an upper bound.

    The state is a client with all samples. A round is E epochs over them, as many samples as K clients see in
    a round, but in K times as many consecutive steps. Samples keep the labels that their clients gave them.
    If clients have log-priors, the network is trained with that of all samples together, and tested with
    each client's own.
    """

    is_bound = True

    def start(self, clients: Sequence[Client]) -> Client:
        import torch

        from ...models import log_priors

        learner = copy(clients[0].learner)  # with its network, optimizer, batch size and order
        learner.samples = (
            torch.cat([client.learner.samples[0] for client in clients]),
            torch.cat([client.learner.samples[1] for client in clients]),
        )
        if learner.log_prior is not None:
            counts = torch.bincount(learner.samples[1], minlength=len(learner.log_prior))
            pooled_priors = log_priors(counts[None].numpy(), "own")
            assert pooled_priors is not None
            learner.log_prior = torch.from_numpy(pooled_priors[0])
        return Client(learner, clients[0].epochs)

    def round(self, state: Client, clients: Sequence[Client], context: RoundContext) -> Client:
        context.pick(clients)  # so that the same random numbers are drawn as by other methods
        state.train()
        return state

    def test(self, state: Client, clients: Sequence[Client]) -> list[Metrics]:
        values = state.values()
        for client in clients:
            client.load(values)
        return [client.test() for client in clients]


class Ensemble(Local):
    """Trains like `Local`; tests with the ensemble of all clients' networks."""

    def test(self, state: None, clients: Sequence[Client]) -> list[Metrics]:
        def test(client: Client) -> Metrics:
            inputs, labels = client.learner.held_out
            probabilities = ensemble_probabilities(clients, inputs)
            if client.learner.log_prior is not None:
                logits = client.learner.add_prior(probabilities.clamp(min=1e-12).log())
                probabilities = logits.softmax(dim=1)
            return score(probabilities, labels)

        return test_each_set_once(clients, test)


def ensemble_probabilities(clients: Sequence[Client], inputs: Tensor) -> Tensor:
    """Return p(k|x) of the ensemble for every input x and class k, without any client's log-prior."""
    import torch

    by_client = []
    for client in clients:
        client.network.module.eval()
        with torch.no_grad():
            outputs = torch.cat([client.network(x) for x in inputs.split(1000)])
        by_client.append(_probabilities(outputs))
    classes = by_client[0].shape[1]
    labels = [client.learner.samples[1] for client in clients]
    counts = torch.stack([torch.bincount(y, minlength=classes) for y in labels]).to(by_client[0])
    shares = counts / counts.sum(0).clamp(min=1)
    weighted_sums = (torch.stack(by_client) * shares[:, None]).sum(0)
    return weighted_sums / weighted_sums.sum(1, keepdim=True).clamp(min=1e-12)


def score(probabilities: Tensor, labels: Tensor) -> Metrics:
    """Return the summed log loss, correct predictions and the number of samples."""
    from ...models import Metrics

    loss = -probabilities.gather(1, labels[:, None]).clamp(min=1e-12).log()
    return Metrics(float(loss.sum()), int((probabilities.argmax(1) == labels).sum()), len(labels))


def _probabilities(outputs: Tensor) -> Tensor:
    """Return the softmax of outputs; a single output is the logit of the second of two classes."""
    if outputs.shape[1] == 1:
        import torch

        second_class = outputs.sigmoid()
        return torch.cat([1 - second_class, second_class], dim=1)
    return outputs.softmax(dim=1)
