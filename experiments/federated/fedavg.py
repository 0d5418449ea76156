"""FedAvg, and three variants that correct the drift of clients with different data.

FedAvg (McMahan et al. 2017, Algorithm 1):

    S_t ← max(C·K, 1) random clients                                        K clients in all
    w_k ← E epochs of w ← w − η ∇ℓ(w; b), batches b of size B, from w_t     for k in S_t
    w_{t+1} ← Σ_k n_k/n · w_k                                               n = Σ_{k in S_t} n_k

FedProx (Li et al. 2020), with a proximal term that limits how far clients move:

    client k descends on  h_k(w) = F_k(w) + μ/2 · ‖w − w_t‖²,   ∇h_k = ∇F_k + μ (w − w_t)

SCAFFOLD (Karimireddy et al. 2020), with option II for the control variates:

    y ← w;  K steps:  y ← y − η_l (g_i(y) − c_i + c)                      in client i
    c_i⁺ ← c_i − c + (w − y) / (K η_l)
    w ← w + η_g · mean(y − w),   c ← c + |S|/N · mean(c_i⁺ − c_i)        over the clients S of N

FedDyn (Acar et al. 2021), dynamic regularisation, so that local and global minima agree:

    θ_k ← argmin  L_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − w‖²        gradient: ∇L_k − g_k + α (θ − w)
    g_k ← g_k − α (θ_k − w)
    h ← h − α/m Σ_{k in P} (θ_k − w),    w ← mean_{k in P} θ_k − h/α        m clients in all

Statistics of batch norm, which are no parameters, are averaged by all four without rates and corrections.

To run FedAvg with live peers, use `gossamer swarm` with `mode = "server"` in [gossip], `weights = "samples"`
and one partial model with all cells; clients then train `local_samples` × `every` samples in a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...gossip import Positive
from ...models import ModelError
from .method import Client, RoundContext, ServerMethod, Strength, mean

if TYPE_CHECKING:  # so that reading a config and `gossamer explain` do not import torch
    from torch import Tensor


@dataclass(frozen=True)
class ServerState:
    """The server's network."""

    w: Tensor


class FedAvg(ServerMethod):
    """Averages the clients' networks, weighted by their numbers of samples."""

    def start(self, clients: Sequence[Client]) -> ServerState:
        return ServerState(clients[0].values())

    def round(
        self, state: ServerState, clients: Sequence[Client], context: RoundContext
    ) -> ServerState:
        w, trained, n = state.w, [], []
        for _, client in self.participants(clients, context, w):
            self.update(client, w)
            trained.append(context.to_server(client.values(), relative_to=w))
            n.append(client.sample_count)
        return ServerState(mean(trained, n))

    def update(self, client: Client, w: Tensor) -> None:
        """ClientUpdate(k, w) of the paper: train the client's network, which holds w already."""
        client.train()


class FedProx(FedAvg):
    """FedAvg with a pull towards the server's network; at μ = 0 it is FedAvg."""

    mu: Strength = 0.1
    """μ: raise it when clients' data differ and their networks diverge, lower it to learn faster."""

    def update(self, client: Client, w: Tensor) -> None:
        with client.adding_to_gradient(lambda y: self.mu * (y - w)):
            client.train()


@dataclass(frozen=True)
class CorrectionState:
    """The server's network, its correction (c or h), and every client's correction (c_i or g_k).

    c and c_i are SCAFFOLD's, h and g_k are FedDyn's.
    """

    w: Tensor
    correction: Tensor
    client_corrections: tuple[Tensor, ...]

    @classmethod
    def start(cls, clients: Sequence[Client]) -> CorrectionState:
        """Return the state before the first round: all corrections are 0."""
        w = clients[0].values()
        return cls(w, w.new_zeros(w.shape), tuple(w.new_zeros(w.shape) for _ in clients))


class Scaffold(ServerMethod):
    """Corrects the drift of each client by the difference between its own and the mean gradient.

    A client sends and receives two vectors where FedAvg has one. All clients have the same weight, as in the
    paper, whatever their numbers of samples.
    """

    server_rate: Positive = 1.0
    """η_g: the step of the server towards the mean of the clients' networks."""

    def start(self, clients: Sequence[Client]) -> CorrectionState:
        for client in clients:
            plain_sgd_rate(client)  # raises for an optimizer with which the method cannot work
        return CorrectionState.start(clients)

    def round(
        self, state: CorrectionState, clients: Sequence[Client], context: RoundContext
    ) -> CorrectionState:
        w, corrections, movements, changes = state.w, list(state.client_corrections), [], []
        for i, client in self.participants(clients, context, w):
            c, c_i = context.to_client(state.correction), corrections[i]
            correction = c - c_i
            with client.adding_to_gradient(lambda _, correction=correction: correction):
                client.train()
            y = client.values()
            corrections[i] = c_i - c + (w - y) / (client.steps * plain_sgd_rate(client))
            movements.append(context.to_server(y - w))
            changes.append(context.to_server(corrections[i] - c_i))
        step = mean(movements)
        step[: clients[0].parameter_count] *= self.server_rate
        return CorrectionState(
            w + step,
            state.correction + len(changes) / len(clients) * mean(changes),
            tuple(corrections),
        )


def plain_sgd_rate(client: Client) -> float:
    """Return η_l, the client's learning rate; raise ModelError unless its optimizer is plain SGD.

    Only for plain SGD, which steps by rate times gradient, (w − y)/(K η_l) is the mean gradient.
    """
    from ...models import PlainRule, RuleOptimizer

    optimizer = client.learner.optimizer
    if not isinstance(optimizer, RuleOptimizer) or not isinstance(optimizer.rule, PlainRule):
        raise ModelError(
            f"client {client.name!r}: scaffold computes gradients from the change of the parameters, so it "
            "needs plain SGD; leave out the learner's optimizer and give it a rate"
        )
    return optimizer.rate


class FedDyn(ServerMethod):
    """Adds to every client's loss a linear term from its earlier rounds, and a proximal term.

    All clients have the same weight, as in the paper. Sends as many bytes as FedAvg: h stays on the server
    and g_k on client k.
    """

    alpha: Positive = 0.1
    """α: raise it for steadier, slower progress; if it is too low, h/α grows and w oscillates."""

    def start(self, clients: Sequence[Client]) -> CorrectionState:
        return CorrectionState.start(clients)

    def round(
        self, state: CorrectionState, clients: Sequence[Client], context: RoundContext
    ) -> CorrectionState:
        w, corrections, trained, movements = state.w, list(state.client_corrections), [], []
        for k, client in self.participants(clients, context, w):
            g = corrections[k]
            with client.adding_to_gradient(lambda theta, g=g: self.alpha * (theta - w) - g):
                client.train()
            theta = client.values()
            corrections[k] = g - self.alpha * (theta - w)
            trained.append(context.to_server(theta, relative_to=w))
            movements.append(trained[-1] - w)
        h = state.correction - self.alpha * len(movements) / len(clients) * mean(movements)
        h[clients[0].parameter_count :] = 0  # statistics have no gradient to bring h back
        return CorrectionState(mean(trained) - h / self.alpha, h, tuple(corrections))
