"""The base classes of federated methods, their clients, simulated links that count bytes, and three bounds.

Letters in docstrings are those of McMahan et al. (2017), who defined FedAvg: K clients, of which the fraction
C trains in a round; client k has n_k samples and trains E epochs in batches of B samples.

The bounds with which methods are compared are training alone, training on pooled samples, and an ensemble.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, ValidationError

from ...gossip import Compress, Count, Positive, SettingsTable
from ...models import ModelError

if TYPE_CHECKING:  # so that reading a config and `gossamer explain` do not import torch
    from torch import Tensor

    from ...models import GradientTerm, Metrics, SgdLearner, SlicedNetwork

Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""The factor of a term that a method adds to the loss; 0 turns the term off. A method that divides by the
factor declares it as `Positive` instead."""
NonzeroFraction = Annotated[float, Field(gt=0, le=1)]

GLOBAL_MODEL = "everyone"
"""The name of the partial model that all clients have. Starting values are drawn from a seed and this name:
with another name every comparison would have other numbers."""


class Client:
    """A participant of federated learning: a learner, and the number of epochs that it trains in a round.

    Sets the learner's `local_samples` to all its samples, so that `train()` is the ClientUpdate of FedAvg:
    E epochs in batches of B samples, in the learner's own order.
    """

    def __init__(self, learner: SgdLearner, epochs: int = 1):
        if epochs < 1:
            raise ModelError(
                f"client {learner.network.peer!r}: it must train at least 1 epoch in a round, not {epochs}"
            )
        self.learner, self.epochs = learner, epochs
        learner.local_samples = self.sample_count

    @property
    def name(self) -> str:
        """The name of the peer whose network and samples the client has."""
        return self.learner.network.peer

    @property
    def network(self) -> SlicedNetwork:
        """The client's neural network."""
        return self.learner.network

    @property
    def sample_count(self) -> int:
        """n_k, the number of the client's training samples."""
        _, labels = self.learner.samples
        return len(labels)

    @property
    def steps(self) -> int:
        """The number of gradient steps in one `train()`."""
        return self.epochs * math.ceil(self.sample_count / self.learner.batch)

    @property
    def parameter_count(self) -> int:
        """The number of parameters in `values`; averaged statistics of batch norm come after them."""
        return sum(parameter.numel() for parameter in self.network.parameters.values())

    def values(self) -> Tensor:
        """Return a copy of the neural network's parameters and averaged statistics as one vector."""
        return self.network.flat.detach().clone()

    def load(self, values: Tensor) -> None:
        """Replace the neural network's parameters by those in a vector."""
        self.network.flat.copy_(values)

    def train(self) -> Metrics:
        """Train for E epochs on the client's own samples."""
        return self.learner.train(self.epochs)

    def train_samples(self, count: int) -> Metrics:
        """Train on the next `count` samples of the current epoch."""
        self.learner.local_samples = count
        try:
            return self.learner.train(1)
        finally:
            self.learner.local_samples = self.sample_count

    def test(self) -> Metrics:
        """Test the neural network on the client's own test samples."""
        return self.learner.test()

    def adding_to_gradient(self, term: GradientTerm) -> AbstractContextManager[None]:
        """Return a context in which every step descends along gradient + term(parameters).

        Papers add such a term to the *mean* loss of a batch, so the learner needs `reduction="mean"`.
        """
        from ...models import adding_to_gradient

        return adding_to_gradient(self.learner, term)


class RoundContext:
    """The random numbers and the simulated links of one round.

    A method sends values with `to_server`, `to_client` and `to_peer`, which count their bytes and return the
    values as they arrive. Where clients gossip over a compressed wire, simulated gossipers count the bytes
    instead; the method adds them to `bytes_between_clients`.

    rng: draws the participants, and what else a method draws.
    compressor: how values to the server are compressed; None sends them unchanged.
    shapes: the shapes of the parameters in a flat vector of the whole neural network, for the compressor.

    bytes_to_server, bytes_to_clients, bytes_between_clients: the bytes sent so far from clients to the
    server, from the server to clients, and from client to client.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        compressor: str | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
    ):
        self.rng = rng
        self.bytes_to_server = self.bytes_to_clients = self.bytes_between_clients = 0
        self._compressor, self._shapes = compressor, shapes
        # Compressors have their own generator, so that participants are the same with any compressor.
        self._compressor_rng = rng.spawn(1)[0]

    @property
    def total_bytes(self) -> int:
        """The bytes sent in all directions so far."""
        return self.bytes_to_server + self.bytes_to_clients + self.bytes_between_clients

    def pick(self, clients: Sequence[Client], fraction: float = 1.0) -> list[int]:
        """Draw the clients of a round: return the indices of C·K of them, at least one, in ascending order.

        fraction: C; K is the number of `clients`.
        """
        count = max(round(fraction * len(clients)), 1)
        return sorted(self.rng.choice(len(clients), count, replace=False).tolist())

    def to_server(self, values: Tensor, relative_to: Tensor | None = None) -> Tensor:
        """Send a vector from a client to the server; return what arrives.

        relative_to: a vector that the server has already. If it is given, a compressor compresses only the
        difference from it, whose values are smaller and lose less.
        """
        if self._compressor is None:
            self.bytes_to_server += uncompressed_bytes(values)
            return values
        import torch

        from ...gossip.compress import roundtrip

        message = values if relative_to is None else values - relative_to
        is_whole_network = sum(math.prod(shape) for shape in self._shapes) == len(values)
        arrived, sent_bytes = roundtrip(
            self._compressor,
            message.float().cpu().numpy(),
            self._compressor_rng,
            self._shapes if is_whole_network else None,
        )
        self.bytes_to_server += sent_bytes
        received = torch.from_numpy(arrived).to(values)
        return received if relative_to is None else relative_to + received

    def to_client(self, values: Tensor) -> Tensor:
        """Send a vector from the server to one client; return what arrives."""
        self.bytes_to_clients += uncompressed_bytes(values)
        return values

    def to_peer(self, values: Tensor, times: int = 1) -> Tensor:
        """Send a vector from one client to another; return what arrives.

        times: the number of messages of this length to count, if one call stands for several.
        """
        self.bytes_between_clients += times * uncompressed_bytes(values)
        return values


def uncompressed_bytes(values: Tensor) -> int:
    """Return the bytes of a vector as it is sent without compression; headers are small and not counted."""
    return values.numel() * values.element_size()


class Method(SettingsTable, ABC):
    """A federated method.

    Its fields are its settings, which do not change; what changes from round to round is in a state object,
    whose type each method chooses:

        state = method.start(clients)
        for _ in range(rounds):
            state = method.round(state, clients, context := method.round_context(clients, rng))
        tests = method.test(state, clients)

    The constructor raises a ModelError that names a setting which is unknown or out of its range. A method of
    one's own defines `start` and `round`, and `test` if clients use another network than the one they train.
    """

    if not TYPE_CHECKING:  # type checkers know the settings by the fields

        def __init__(self, **settings: Any):
            try:
                super().__init__(**settings)
            except ValidationError as error:
                from ..config.tables import first_mistake

                name = type(self).__name__
                raise ModelError(f"{name}: {first_mistake(error, type(self))}") from None

        __init__.__pydantic_base_init__ = True  # tables of a config are read without it

    needs_server: ClassVar[bool] = False
    """Whether the method needs a server; comparisons with `server = false` refuse it then."""
    nearest_without_server: ClassVar[str] = "gossip-sgd"
    """For methods that need a server: the most similar method that needs none, which errors propose."""
    is_bound: ClassVar[bool] = False
    """Whether this is no federated method but a bound to compare others with: training alone, or on the
    pooled samples of all clients. The bytes of a bound are not counted."""

    rate: Positive | None = None
    """The learning rate; that of [training] if left out."""
    epochs: Count | None = None
    """E, the number of epochs that a client trains in a round; that of [training] if left out."""

    @abstractmethod
    def start(self, clients: Sequence[Client]) -> Any:
        """Return the state before the first round; the clients' networks hold their starting values."""

    @abstractmethod
    def round(self, state: Any, clients: Sequence[Client], context: RoundContext) -> Any:
        """Run one round and return the state after it. Everything that is sent goes through `context`."""

    def warning(self, state: Any) -> str:
        """Return a sentence to warn the user with once the method has started; "" if all is well."""
        return ""

    def round_context(self, clients: Sequence[Client], rng: np.random.Generator) -> RoundContext:
        """Return the random numbers and the simulated links for the next round."""
        return RoundContext(rng)

    def test(self, state: Any, clients: Sequence[Client]) -> list[Metrics]:
        """Test, on every client's samples, the network that the client would use now."""
        return [client.test() for client in clients]


class ServerMethod(Method):
    """A method whose server holds one neural network for all clients: `w` of the state."""

    needs_server: ClassVar[bool] = True

    participation: NonzeroFraction = 1.0
    """C, the fraction of clients that train in a round. Lower it to send less and learn more slowly."""
    compress: Compress = None
    """How the changes that clients send are compressed: `int8`, `top-k:0.05+int8`, … The compression error is
    lost, as in the sketched updates of Konečný et al. (2016); gossip sends it later instead."""

    def round_context(self, clients: Sequence[Client], rng: np.random.Generator) -> RoundContext:
        shapes = [tuple(value.shape) for value in clients[0].network.parameters.values()]
        return RoundContext(rng, self.compress, shapes)

    def participants(
        self, clients: Sequence[Client], context: RoundContext, w: Tensor
    ) -> Iterator[tuple[int, Client]]:
        """Draw the clients of this round; yield each with its index, after it has received and loaded `w`."""
        for k in context.pick(clients, self.participation):
            clients[k].load(context.to_client(w))
            yield k, clients[k]

    def test(self, state: Any, clients: Sequence[Client]) -> list[Metrics]:
        """Test the server's network on every client's test samples."""

        def load_and_test(client: Client) -> Metrics:
            client.load(state.w)
            return client.test()

        return test_each_set_once(clients, load_and_test)


def test_each_set_once(
    clients: Sequence[Client], test: Callable[[Client], Metrics]
) -> list[Metrics]:
    """Return the result of `test` for every client, calling it once for clients with the same test samples.

    test: tests the same neural network whichever client it is called with. Clients with different log-priors,
    which are added to outputs, or with statistics of batch norm of their own are tested one by one.
    """
    results: dict[tuple[Any, ...], Metrics] = {}
    keys = []
    for client in clients:
        _, test_labels = client.learner.held_out
        owner = None if client.network.buffers == "average" else client.name
        keys.append((id(test_labels), id(client.learner.log_prior), owner))
    for key, client in zip(keys, clients, strict=True):
        if key not in results:
            results[key] = test(client)
    return [results[key] for key in keys]


def mean(vectors: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return the weighted mean of vectors, Σ weight/Σ weights · vector; by default all weigh the same.

    The mean of equal vectors is that vector, bit for bit, because only differences from the first are summed.
    """
    weights = [1.0] * len(vectors) if weights is None else weights
    first = vectors[0].double()
    difference = first.new_zeros(first.shape)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        difference += weight / sum(weights) * (vector.double() - first)
    return (first + difference).to(vectors[0].dtype)


# --- bounds to compare methods with ----------------------------------------------------------------


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
        values, buffers = state.values(), state.network.own_buffers()
        for client in clients:
            client.load(values)
            for name, buffer in client.network.own_buffers().items():
                buffer.copy_(buffers[name])
        return [client.test() for client in clients]


class Ensemble(Local):
    """Trains like `Local`; tests with the ensemble of all clients' networks, a bound for fusing them.

        p(k|x) ∝ Σ_j n_jk/n_k · p_j(k|x)          client j has n_jk samples of class k

    A client without samples of a class has no weight in that class. To use the ensemble, a client needs all
    networks. If clients have log-priors (`prior`), p_j is computed without them, and client i
    multiplies p(k|x) by its own share of class k.
    """

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
