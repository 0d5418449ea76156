"""What every method of learning together is made of: clients, knobs, a state, rounds, and a counted wire."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...gossip import Compress, Count, Positive, SettingsTable
from ...gossip.compress import roundtrip
from ...models import (
    GradientTerm,
    Metrics,
    ModelError,
    SgdLearner,
    SlicedNetwork,
    adding_to_gradient,
)

# At least 0 for a pull's strength, above 0 where a method divides by it.
Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

WHOLE = "everyone"
"""The partial model that all clients implement; at the start it has all cells."""


class Client:
    """One peer of a federation: its learner and how many epochs it trains in a round.

    The learner's local samples become one pass over its samples, so that `train()` is deck 001's
    ClientUpdate: E epochs of batches of B, in the learner's own order.
    """

    def __init__(self, learner: SgdLearner, epochs: int = 1):
        if epochs < 1:
            raise ModelError(f"{epochs} local epochs: a client trains at least one")
        self.learner, self.epochs = learner, epochs
        learner.local_samples = self.samples

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.learner.network.peer

    @property
    def network(self) -> SlicedNetwork:
        """The client's network."""
        return self.learner.network

    @property
    def samples(self) -> int:
        """n_k, the number of its training samples."""
        return len(self.learner.samples[1])

    @property
    def steps(self) -> int:
        """Gradient steps of one `train()`."""
        return self.epochs * math.ceil(self.samples / self.learner.batch)

    def values(self) -> Tensor:
        """The network's parameters as one vector (a copy)."""
        return self.network.flat.detach().clone()

    def load(self, values: Tensor) -> None:
        """Replace the network's parameters."""
        self.network.flat.copy_(values)

    def train(self) -> Metrics:
        """E epochs over the client's own samples."""
        return self.learner.train(self.epochs)

    def train_some(self, samples: int) -> Metrics:
        """Go on with the next so many samples of the epoch."""
        self.learner.local_samples = samples
        try:
            return self.learner.train(1)
        finally:
            self.learner.local_samples = self.samples

    def test(self) -> Metrics:
        """The network on the client's own test samples."""
        return self.learner.test()

    def adding(self, term: GradientTerm) -> AbstractContextManager[None]:
        """While inside, every step descends along gradient + term(parameters).

        Papers write terms beside the *mean* loss of a batch: give the learner `reduction="mean"`.
        """
        return adding_to_gradient(self.learner, term)


class Turn:
    """One round: its dice, its participants, and a wire that counts what is sent.

    Whatever leaves a machine goes through `to_server`, `to_client` or `to_peer`, which count its bytes
    and return what arrives. There is no other place where bytes are counted.

    up, down, across: bytes to servers, from servers, and between peers so far.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        compress: str | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
    ):
        self.rng = rng
        self.up = self.down = self.across = 0
        self._compress, self._shapes = compress, shapes
        self._noise = rng.spawn(1)[0]  # compressors draw apart, so that participants stay the same

    @property
    def bytes(self) -> int:
        """All that was sent."""
        return self.up + self.down + self.across

    def pick(self, clients: Sequence[Client], share: float = 1.0) -> list[int]:
        """Deck 001's S_t: max(C·K, 1) clients at random, in ascending order."""
        count = max(round(share * len(clients)), 1)
        return sorted(self.rng.choice(len(clients), count, replace=False).tolist())

    def to_server(self, values: Tensor, since: Tensor | None = None) -> Tensor:
        """From a client to a server; `since` is what the server knows, so that changes are compressed."""
        if self._compress is None:
            self.up += size(values)
            return values
        change = values if since is None else values - since
        whole = sum(math.prod(shape) for shape in self._shapes) == len(values)
        shapes = self._shapes if whole else None
        numbers = change.float().cpu().numpy()
        arrived, sent = roundtrip(self._compress, numbers, self._noise, shapes)
        self.up += sent
        found = torch.from_numpy(arrived).to(values)
        return found if since is None else since + found

    def to_client(self, values: Tensor) -> Tensor:
        """From a server to one client."""
        self.down += size(values)
        return values

    def to_peer(self, values: Tensor, times: int = 1) -> Tensor:
        """From a client to another, or to several."""
        self.across += times * size(values)
        return values


def size(values: Tensor) -> int:
    """Bytes of a vector on the wire: its numbers as they are; headers are too small to matter."""
    return values.numel() * values.element_size()


class Method(SettingsTable, ABC):
    """A way to learn together. Fields are its knobs; what it learns is in a state of its own.

        state = method.start(clients)
        for _ in range(rounds):
            state = method.round(state, clients, turn := method.turn(clients, rng))
        tests = method.test(state, clients)

    A knob out of its range is a `ValueError` that names it.
    """

    needs_server: ClassVar[bool] = False
    nearest_without: ClassVar[str] = "gossip-sgd"
    """For methods that need a server: the method most like them that needs none."""
    bound: ClassVar[bool] = False
    """Not a way to learn together, but a mark to compare with; it sends nothing that is counted."""

    rate: Positive | None = None
    """The learning rate, if another than all methods'."""
    epochs: Count | None = None
    """E, the local epochs in a round, if others than all methods'."""

    @abstractmethod
    def start(self, clients: Sequence[Client]) -> Any:
        """The state before the first round; the clients' networks are as they were built."""

    @abstractmethod
    def round(self, state: Any, clients: Sequence[Client], turn: Turn) -> Any:
        """One round; returns the state after it. All that is sent goes through `turn`."""

    def turn(self, clients: Sequence[Client], rng: np.random.Generator) -> Turn:
        """The dice and the wire of the next round."""
        return Turn(rng)

    def test(self, state: Any, clients: Sequence[Client]) -> list[Metrics]:
        """Every client's test of the network that it would use now."""
        return [client.test() for client in clients]


class ServerMethod(Method):
    """A method with a server, which holds one network for all: `w` of the state."""

    needs_server: ClassVar[bool] = True

    participation: Share = 1.0
    """C, the share of clients that train in a round. Lower it to send less and learn more slowly."""
    compress: Compress = None
    """How clients' changes are compressed: `int8`, `top-k:0.05+int8`, … What is lost is lost, as in deck
    001's sketched updates; gossip's own compression keeps it."""

    def turn(self, clients: Sequence[Client], rng: np.random.Generator) -> Turn:
        shapes = [tuple(value.shape) for value in clients[0].network.module.parameters()]
        return Turn(rng, self.compress, shapes)

    def visit(
        self, clients: Sequence[Client], turn: Turn, w: Tensor
    ) -> Iterator[tuple[int, Client]]:
        """This round's clients and their places, each with the server's network loaded."""
        for k in turn.pick(clients, self.participation):
            clients[k].load(turn.to_client(w))
            yield k, clients[k]

    def test(self, state: Any, clients: Sequence[Client]) -> list[Metrics]:
        """The server's network on every client's test samples."""

        def test(client: Client) -> Metrics:
            client.load(state.w)
            return client.test()

        return tested_once(clients, test)


def tested_once(clients: Sequence[Client], test: Callable[[Client], Metrics]) -> list[Metrics]:
    """Test one network on every client's samples; common ones are gone through once."""
    found: dict[int, Metrics] = {}
    for client in clients:
        key = id(client.learner.held_out[1])
        if key not in found:
            found[key] = test(client)
    return [found[id(client.learner.held_out[1])] for client in clients]


def mean(vectors: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Σ n_k/n · v_k, or the plain mean. One vector is its own mean, bit for bit."""
    shares = [1.0] * len(vectors) if weights is None else weights
    base = vectors[0].double()
    drift = torch.zeros_like(base)
    for vector, share in zip(vectors[1:], shares[1:], strict=True):
        drift += share / sum(shares) * (vector.double() - base)
    return (base + drift).to(vectors[0].dtype)
