"""Base classes of federated methods: clients, rounds, and a simulated network that counts bytes."""

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

# Strengths may be 0, which turns a term off; methods that divide by their strength use Positive instead.
Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

GLOBAL_MODEL = "everyone"
"""The name of the partial model that all clients implement."""


class Client:
    """One client of a federation: its learner and how many epochs it trains in a round.

    Sets the learner's `local_samples` to all its samples, so that `train()` is ClientUpdate of McMahan et
    al. (2017): E epochs of batches of size B, in the learner's own order.
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
        """n_k, the number of the client's training samples."""
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

    def train_samples(self, samples: int) -> Metrics:
        """Train on the next `samples` samples of the current epoch."""
        self.learner.local_samples = samples
        try:
            return self.learner.train(1)
        finally:
            self.learner.local_samples = self.samples

    def test(self) -> Metrics:
        """Test the network on the client's own test samples."""
        return self.learner.test()

    def adding_to_gradient(self, term: GradientTerm) -> AbstractContextManager[None]:
        """Within the context, every step descends along gradient + term(parameters).

        In papers such a term is added to the *mean* loss of a batch: give the learner `reduction="mean"`.
        """
        return adding_to_gradient(self.learner, term)


class RoundContext:
    """What a method needs for one round: random numbers, and a simulated network that counts bytes.

    Values that one machine sends to another go through `to_server`, `to_client` or `to_peer`, which count
    their bytes and return the values as they arrive. Gossip over a compressed wire is counted by the
    simulated gossipers instead; their bytes are added to `across`.

    up, down, across: bytes to servers, from servers, and between clients so far.
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
        # Compressors have their own generator, so that participants are the same with any compressor.
        self._compressor_rng = rng.spawn(1)[0]

    @property
    def bytes(self) -> int:
        """Bytes that were sent in all directions so far."""
        return self.up + self.down + self.across

    def pick(self, clients: Sequence[Client], share: float = 1.0) -> list[int]:
        """S_t in FedAvg: the indices of max(C·K, 1) random clients, in ascending order."""
        count = max(round(share * len(clients)), 1)
        return sorted(self.rng.choice(len(clients), count, replace=False).tolist())

    def to_server(self, values: Tensor, since: Tensor | None = None) -> Tensor:
        """Send from a client to a server.

        since: the values that the server has already; if given, only the difference is compressed.
        """
        if self._compress is None:
            self.up += wire_bytes(values)
            return values
        change = values if since is None else values - since
        whole_network = sum(math.prod(shape) for shape in self._shapes) == len(values)
        shapes = self._shapes if whole_network else None
        numbers = change.float().cpu().numpy()
        arrived, sent = roundtrip(self._compress, numbers, self._compressor_rng, shapes)
        self.up += sent
        received = torch.from_numpy(arrived).to(values)
        return received if since is None else since + received

    def to_client(self, values: Tensor) -> Tensor:
        """Send from a server to one client."""
        self.down += wire_bytes(values)
        return values

    def to_peer(self, values: Tensor, times: int = 1) -> Tensor:
        """Send from one client to another; `times` counts the bytes of as many equally long messages."""
        self.across += times * wire_bytes(values)
        return values


def wire_bytes(values: Tensor) -> int:
    """Bytes of an uncompressed vector on the wire; headers are too small to be counted."""
    return values.numel() * values.element_size()


class Method(SettingsTable, ABC):
    """A federated method. Its fields are its knobs; everything that changes is in a state object.

        state = method.start(clients)
        for _ in range(rounds):
            state = method.round(state, clients, context := method.round_context(clients, rng))
        tests = method.test(state, clients)

    A knob out of its range is a `ValueError` that names it.
    """

    needs_server: ClassVar[bool] = False
    nearest_without_server: ClassVar[str] = "gossip-sgd"
    """For methods that need a server: the method most like them that needs none."""
    bound: ClassVar[bool] = False
    """Whether this is only a reference to compare with, such as training on pooled data; counts no bytes."""

    rate: Positive | None = None
    """The learning rate; that of [training] if left out."""
    epochs: Count | None = None
    """E, the local epochs in a round; those of [training] if left out."""

    @abstractmethod
    def start(self, clients: Sequence[Client]) -> Any:
        """Return the state before the first round; the clients' networks have their starting values."""

    @abstractmethod
    def round(self, state: Any, clients: Sequence[Client], context: RoundContext) -> Any:
        """Run one round and return the state after it. Everything that is sent goes through `context`."""

    def warning(self, state: Any) -> str:
        """Return what the user should know about a method that has started; usually nothing."""
        return ""

    def round_context(self, clients: Sequence[Client], rng: np.random.Generator) -> RoundContext:
        """Return the random numbers and the simulated network of the next round."""
        return RoundContext(rng)

    def test(self, state: Any, clients: Sequence[Client]) -> list[Metrics]:
        """Test, on every client's samples, the network that the client would use now."""
        return [client.test() for client in clients]


class ServerMethod(Method):
    """A method whose server holds one network for all clients: `w` of the state."""

    needs_server: ClassVar[bool] = True

    participation: Share = 1.0
    """C, the share of clients that train in a round. Lower it to send less and learn more slowly."""
    compress: Compress = None
    """How clients' changes are compressed: `int8`, `top-k:0.05+int8`, … The compression error is dropped, as
    in the sketched updates of Konečný et al. (2016); the compression of gossip sends it later."""

    def round_context(self, clients: Sequence[Client], rng: np.random.Generator) -> RoundContext:
        shapes = [tuple(value.shape) for value in clients[0].network.module.parameters()]
        return RoundContext(rng, self.compress, shapes)

    def participants(
        self, clients: Sequence[Client], context: RoundContext, w: Tensor
    ) -> Iterator[tuple[int, Client]]:
        """Yield the index of each client of this round and the client, with the server's network loaded."""
        for k in context.pick(clients, self.participation):
            clients[k].load(context.to_client(w))
            yield k, clients[k]

    def test(self, state: Any, clients: Sequence[Client]) -> list[Metrics]:
        """Test the server's network on every client's test samples."""

        def test(client: Client) -> Metrics:
            client.load(state.w)
            return client.test()

        return test_each_set_once(clients, test)


def test_each_set_once(
    clients: Sequence[Client], test: Callable[[Client], Metrics]
) -> list[Metrics]:
    """Test one network on every client's samples; test samples that clients share are used only once.

    Clients with log-priors of their own are tested one by one: the same outputs mean other classes to them.
    """
    results: dict[tuple[int, int], Metrics] = {}
    keys = [(id(client.learner.held_out[1]), id(client.learner.log_prior)) for client in clients]
    for key, client in zip(keys, clients, strict=True):
        if key not in results:
            results[key] = test(client)
    return [results[key] for key in keys]


def mean(vectors: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Σ n_k/n · v_k, or the unweighted mean. The mean of equal vectors is that vector, bit for bit."""
    shares = [1.0] * len(vectors) if weights is None else weights
    base = vectors[0].double()
    drift = torch.zeros_like(base)
    for vector, share in zip(vectors[1:], shares[1:], strict=True):
        drift += share / sum(shares) * (vector.double() - base)
    return (base + drift).to(vectors[0].dtype)
