"""FedProx (Li et al. 2020): FedAvg whose clients are held back by a proximal term.

client k descends on  h_k(w) = F_k(w) + μ/2 · ‖w − w_t‖²,   ∇h_k = ∇F_k + μ (w − w_t)
"""

from __future__ import annotations

from torch import Tensor

from .fedavg import FedAvg
from .method import Client, Strength


class FedProx(FedAvg):
    """FedAvg with a pull towards the server's network; at μ = 0 it is FedAvg."""

    mu: Strength = 0.1
    """μ: raise it when clients' data differ and local training drifts apart, lower it to learn faster."""

    def update(self, client: Client, w: Tensor) -> None:
        with client.adding(lambda y: self.mu * (y - w)):
            client.train()
