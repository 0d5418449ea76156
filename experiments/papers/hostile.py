"""`gossamer study hostile`: what hostile members do to a swarm, in every mode, in virtual time.

Honest peers train on the digits (or MNIST), and gossip by the same code (`Gossiper`) as live peers. Hostile
members know everything: all peers' values, the test set, the rule by which a receiver uses a value, and the
receiver's state. An *adaptive* attack has a direction; it tries the receiver's own rule, without changing the
receiver, to find how far along the direction a value should lie to move the receiver most. Messages take a
while, and peers train at different times in a round.

The same attacks are made on steady gossip (gossip/robust.py), on push-sum without defence, and on two robust
means (gossip/robust.py) in lockstep, which have no delays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from ...gossip import (
    FANOUT,
    ONE,
    ROBUST,
    Ack,
    FaultPlan,
    Give,
    Gossiper,
    MemoryNetwork,
    Message,
    PacedMode,
    SteadyMode,
    tolerated,
)
from ...models import SgdLearner
from ...topology import build, links_to_add
from ..build import Member, Swarm
from ..config.tables import Config, Data, Gossip, Model, Network, Training
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry

Array = np.ndarray[Any, Any]
MODEL = "global"
CLEAN = "clean"
"""The `line` of a run without attack: the peers that are hostile in other runs behave honestly. They are left
out of its accuracy too, so that it is comparable."""
ALONE = "without them"
"""The `line` of a run in which the peers that are hostile in other runs take no part: but for chance, no
defence can do better than that."""
DIGITS = "digits"
"""The setting in which all attacks are made: every peer has four neighbours and a random part of the data."""
MESSAGE_DELAY = (0.02, 0.6)
"""The shortest and longest time that a message takes, in rounds."""
TRIED_STEPS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0)
"""How far along its direction an adaptive attack tries values, in units of the median distance between the
receiver and its honest neighbours."""
LOCAL_SAMPLES, BATCH, RATE = 100, 25, 0.4
"""Samples that a peer trains on in a round, or twice all of its own if these are more; the batch size and the
learning rate."""
TEST_SAMPLES = 1000
"""The most samples of a test set that are used, to save time."""
HEARD_ROUNDS = 10
"""A peer counts as cut off from a neighbour if it credited none of its values in so many last rounds."""
SPAM_MESSAGES = 8
"""Messages that a spamming member sends to each neighbour in a round."""
FIRST_SEED, FIRST_MNIST_SEED = 5000, 8000
"""The first seeds of the full study. Steady gossip's constants were chosen with lower seeds only; the rule
for peers with 100 samples or more, which MNIST's have, was changed after seeds 5000 to 5004 had been run."""


@dataclass(frozen=True)
class HostileRun(StudyCell):
    """One run; `line` is the name of the attack.

    rule: steady, push-sum, clipped or trimmed.
    setting: a name for the fields that follow, in the tables.
    graph: a builder of `topology`, karate, or ba:M (Barabási–Albert with M links per added peer).
    place: which peers are hostile: apart (no honest peer has two of them as neighbours, if possible), hub
        (the peer with most links), leaf (with fewest), or together (one honest peer has two of them).
    data: the data set, digits or mnist, and after a colon the samples of each peer.
    alpha: the parameter of a Dirichlet split of the classes; None for a random split.
    hostile: how many peers are hostile; ignored with hub and leaf, where it is one.
    pace: peers with odd numbers train and send in every `pace`-th round only, the others in every round.
    """

    rule: str
    seed: int
    setting: str = DIGITS
    graph: str = "regular:4"
    place: str = "apart"
    data: str = "digits"
    alpha: float | None = None
    peers: int = 16
    hostile: int = 3
    rounds: int = 40
    pace: int = 1


# --- the swarm --------------------------------------------------------------------------------------


def learners_of(cell: HostileRun) -> list[SmallLearner]:
    """Return the peers' learners; the whole network is one partial model, so attacks affect all of it."""
    data, _, samples = cell.data.partition(":")
    layout = "64=32=10" if data == "digits" else "784=60=10"
    usual_samples = min(50, 1400 // cell.peers) if data == "digits" else 100
    config = Config(
        seed=cell.seed, peers=cell.peers,
        data=Data(
            set=data, samples=int(samples or usual_samples),
            partition="iid" if cell.alpha is None else "dirichlet", alpha=cell.alpha or 0.5,
        ),
        network=Network(layout=layout, activation="relu"),
        models=[Model(name=MODEL, layout=layout.replace("=", "-"))],
        training=Training(prior="own" if cell.alpha is not None else "none"),
        gossip=Gossip(mode="steady" if cell.rule == "steady" else "async"),
    )  # fmt: skip
    members = Swarm(config).members()
    return [SmallLearner(member, [cell.seed, number]) for number, member in enumerate(members)]


class SmallLearner:
    """A peer's network with one hidden layer, in numpy, and the store of its values.

    Networks and batches are so small that torch takes several times as long for the same steps. Everything
    is as in `SgdLearner`: mean cross-entropy with the log-prior added, and how values are scored.
    """

    def __init__(self, member: Member, seed: Sequence[int]):
        learner = member.learner
        assert isinstance(learner, SgdLearner)
        parameters = [p.detach().numpy() for p in member.network.module.parameters()]
        ends = np.cumsum([parameter.size for parameter in parameters]).tolist()
        self._parts = [
            (slice(end - parameter.size, end), parameter.shape)
            for parameter, end in zip(parameters, ends, strict=True)
        ]
        self.value = np.concatenate([parameter.ravel() for parameter in parameters])
        """The parameters: weights and biases of the hidden layer, then of the outputs."""
        self.samples, self.scored = _arrays(*learner.samples), _arrays(*learner.scored)
        self.held_out = _arrays(*(tensor[:TEST_SAMPLES] for tensor in learner.held_out))
        prior = learner.log_prior
        self.log_prior: Array | None = None if prior is None else prior.numpy()
        count = len(self.samples[1]) + len(self.scored[1])
        self._local_samples = max(LOCAL_SAMPLES, 2 * count)
        self._random = np.random.default_rng(seed)
        self._own_score: tuple[Array, float] | None = None

    def names(self) -> tuple[str]:
        """Return the name of the only partial model."""
        return (MODEL,)

    def read(self, name: str) -> Array:
        """Return the values themselves."""
        return self.value

    def write(self, name: str, value: Array) -> None:
        """Replace the values."""
        self.value = value

    def _outputs(self, value: Array, inputs: Array) -> tuple[list[Array], Array, Array]:
        """Return the layers' parameters, the hidden cells and the outputs, with the log-prior."""
        layers = [value[part].reshape(shape) for part, shape in self._parts]
        hidden = np.maximum(inputs @ layers[0].T + layers[1], 0.0)
        outputs = hidden @ layers[2].T + layers[3]
        return layers, hidden, outputs if self.log_prior is None else outputs + self.log_prior

    def gradient(self, inputs: Array, labels: Array) -> Array:
        """Return the gradient of the mean loss of these samples."""
        layers, hidden, outputs = self._outputs(self.value, inputs)
        outputs -= outputs.max(axis=1, keepdims=True)
        np.exp(outputs, out=outputs)
        outputs /= outputs.sum(axis=1, keepdims=True)
        outputs[np.arange(len(labels)), labels] -= 1.0
        outputs /= len(labels)
        back = (outputs @ layers[2]) * (hidden > 0)
        parts = back.T @ inputs, back.sum(axis=0), outputs.T @ hidden, outputs.sum(axis=0)
        return np.concatenate([part.ravel() for part in parts])

    def train(self) -> None:
        """Train for a round."""
        inputs, labels = self.samples
        count, epochs = self._local_samples, -(-self._local_samples // len(labels))
        order = np.concatenate([self._random.permutation(len(labels)) for _ in range(epochs)])
        for batch in np.split(order[:count], range(BATCH, count, BATCH)):
            self.value = self.value - RATE * self.gradient(inputs[batch], labels[batch])

    def score(self, model: str, value: Array | None) -> float:
        """Return the loss of a received value, or of the learner's own if it is None, for SteadyMode.

        The score of the learner's own value is kept until it changes, because dry runs ask for it often.
        """
        if value is not None:
            return self._score(value)
        if self._own_score is None or self._own_score[0] is not self.value:
            self._own_score = self.value, self._score(self.value)
        return self._own_score[1]

    def _score(self, value: Array) -> float:
        inputs, labels = self.scored if len(self.scored[1]) else self.samples
        *_, outputs = self._outputs(value, inputs)
        largest = outputs.max(axis=1)
        totals = np.log(np.exp(outputs - largest[:, None]).sum(axis=1)) + largest
        losses = totals - outputs[np.arange(len(labels)), labels]
        counts = np.bincount(labels)
        return float((losses / counts[labels]).sum() / np.count_nonzero(counts))

    def accuracy(self) -> float:
        """Return the accuracy on the test set, which all peers have in common.

        The log-prior is left out, because it fits the peer's own classes and not those of the test set.
        """
        inputs, labels = self.held_out
        *_, outputs = self._outputs(self.value, inputs)
        outputs = outputs if self.log_prior is None else outputs - self.log_prior
        return float((outputs.argmax(axis=1) == labels).mean())


def _arrays(inputs: Any, labels: Any) -> tuple[Array, Array]:
    """Return samples as arrays, an input as one row."""
    return inputs.flatten(1).numpy(), labels.numpy()


def graph_of(cell: HostileRun) -> nx.Graph:
    """Return the graph of a run; links are added until every peer has at least FANOUT neighbours."""
    if cell.graph == "karate":
        graph = nx.convert_node_labels_to_integers(nx.karate_club_graph())
    elif cell.graph.startswith("ba:"):
        graph = nx.barabasi_albert_graph(cell.peers, int(cell.graph[3:]), seed=cell.seed)
    else:
        graph = nx.Graph(build(cell.graph, cell.peers, seed=cell.seed))
    graph.add_edges_from(links_to_add(graph, {"": range(len(graph))}, FANOUT))
    return graph


def hostile_peers(cell: HostileRun, graph: nx.Graph) -> list[int]:
    """Return the hostile peers."""
    by_degree = sorted(graph, key=lambda peer: (graph.degree[peer], peer))
    if cell.place in ("hub", "leaf"):
        return [by_degree[-1 if cell.place == "hub" else 0]]
    choices = list(combinations(graph, cell.hostile))
    order = np.random.default_rng([cell.seed, 1]).permutation(len(choices))

    def most_hostile_neighbours(chosen: Sequence[int]) -> int:
        """Return how many hostile neighbours an honest peer has at most."""
        return max(len({*graph[peer]} & {*chosen}) for peer in graph if peer not in chosen)

    def crowding(chosen: Sequence[int]) -> tuple[int, int]:
        """Return what `apart` keeps low; hostile members that are neighbours waste their influence."""
        return most_hostile_neighbours(chosen), graph.subgraph(chosen).number_of_edges()

    shuffled = (choices[i] for i in order)
    if cell.place == "together":
        return list(max(shuffled, key=lambda chosen: most_hostile_neighbours(chosen) == 2))
    return list(min(shuffled, key=crowding))


# --- attacks ----------------------------------------------------------------------------------------


@dataclass
class Knowledge:
    """All that hostile members know when they send."""

    learners: Sequence[SmallLearner]
    hostile: Sequence[int]
    graph: nx.Graph
    starts: Sequence[Array]
    """The starting value of every peer."""
    random: np.random.Generator
    means: list[Array] = field(default_factory=list)
    """The honest peers' mean after every round."""

    def value(self, peer: int) -> Array:
        """Return the present value of a peer: the parameters of its network."""
        return self.learners[peer].value

    @property
    def honest(self) -> list[int]:
        """The honest peers."""
        return [peer for peer in range(len(self.learners)) if peer not in self.hostile]

    def honest_values(self) -> Array:
        """Return the present values of all honest peers."""
        return np.stack([self.value(peer) for peer in self.honest])


Respond = Callable[[Array], Array | None]
"""Returns what the receiver's value would become if it received a value; None if it would refuse it."""
Forge = Callable[[Knowledge, int, int], Array]
"""A function of (knowledge, hostile sender, receiver) that returns the value to send, or the direction in
which the attack wants to move the receiver."""


def against_test(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return the direction that raises the loss of the test set."""
    learner = knowledge.learners[receiver]
    return learner.gradient(*learner.held_out)


def against_own_data(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return the direction that raises the loss of the sender's own samples, all that a real attacker has."""
    return knowledge.learners[receiver].gradient(*knowledge.learners[sender].samples)


def flipped_labels(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return the direction that lowers the loss of the hostile member's own samples with wrong labels."""
    inputs, labels = knowledge.learners[sender].samples
    return -knowledge.learners[receiver].gradient(inputs, 9 - labels)


def against_the_mean(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return the direction back to the honest peers' mean of five rounds ago."""
    earlier_mean = knowledge.means[-5:][0] if knowledge.means else knowledge.starts[0]
    return earlier_mean - knowledge.honest_values().mean(axis=0)


def to_the_start(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return the direction back to the receiver's starting values."""
    return knowledge.starts[receiver] - knowledge.value(receiver)


def dissensus(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return the direction away from the receiver's honest neighbours."""
    honest = [peer for peer in knowledge.graph[receiver] if peer not in knowledge.hostile]
    return knowledge.value(receiver) - np.mean([knowledge.value(peer) for peer in honest], axis=0)


def shared_noise(knowledge: Knowledge, sender: int, receiver: int) -> Array:
    """Return a random direction, the same for all receivers and rounds."""
    return np.random.default_rng(7).normal(size=knowledge.starts[0].size)


def _within_spread(knowledge: Knowledge) -> Array:
    """Return a value 1.5 standard deviations from the honest peers' mean, which looks like an honest one."""
    values = knowledge.honest_values()
    return values.mean(axis=0) - 1.5 * values.std(axis=0)


ADAPTIVE: Mapping[str, Forge] = {
    "drift, test set": against_test,
    "drift, own data": against_own_data,
    "drift, wrong labels": flipped_labels,
    "against the mean": against_the_mean,
    "back to the start": to_the_start,
    "dissensus": dissensus,
    "shared noise": shared_noise,
}
"""The directions of adaptive attacks, each of which sends the value along its direction that moves the
receiver most."""
VARIANTS = {"inflate": "drift, own data", "spam": "drift, test set", "rejoin": "drift, test set"}
"""Attacks that use the direction of another one. In steady gossip they send it with the weight of 16 peers
instead of none (inflate), many times a round (spam), or many times and in a new session each time (rejoin).
In push-sum only inflate differs from the attack whose direction it uses; in lockstep none does."""
FIXED_VALUES: Mapping[str, Forge] = {
    "NaN": lambda knowledge, sender, receiver: np.full_like(knowledge.starts[0], np.nan),
    "1e30": lambda knowledge, sender, receiver: np.full_like(knowledge.starts[0], 1e30),
    "random": lambda knowledge, sender, receiver: knowledge.random.normal(
        0, knowledge.value(receiver).std(), knowledge.starts[0].size
    ),
    "sign flipped": lambda knowledge, sender, receiver: -knowledge.value(receiver),
    "half of it": lambda knowledge, sender, receiver: knowledge.value(receiver) / 2,
    "a tenth less": lambda knowledge, sender, receiver: 0.9 * knowledge.value(receiver),
    "a little is enough": lambda knowledge, sender, receiver: _within_spread(knowledge),
    "inner product": lambda knowledge, sender, receiver: (
        -0.1 * knowledge.honest_values().mean(axis=0)
    ),
}
"""Attacks whose values do not depend on the rule."""
DATA_ATTACKS = ("label flip", "silent")
"""Attacks by other means than forged values: training on wrong labels, and sending nothing."""
ATTACKS = (*ADAPTIVE, *VARIANTS, *FIXED_VALUES, *DATA_ATTACKS)
"""The names of all attacks."""
WORST_ATTACKS = ("drift, test set", "drift, own data", "dissensus", "rejoin")
"""The attacks that are made on other graphs, data and places too."""
COMPARED_ATTACKS = (
    "drift, test set", "drift, own data", "dissensus", "against the mean", "sign flipped",
)  # fmt: skip
"""The attacks that are made on other modes than steady gossip."""


def forge_value(
    attack: str, knowledge: Knowledge, sender: int, receiver: int, respond: Respond | None
) -> Array:
    """Return the value that a hostile member sends.

    respond: tries values on the receiver; None if it accepts every value, so that nothing has to be tried.
    """
    if attack in FIXED_VALUES:
        return FIXED_VALUES[attack](knowledge, sender, receiver).astype(np.float32)
    own = knowledge.value(receiver)
    direction = ADAPTIVE[VARIANTS.get(attack, attack)](knowledge, sender, receiver)
    length = float(np.linalg.norm(direction))
    if not length:
        return own
    direction = direction / length
    honest = [peer for peer in knowledge.graph[receiver] if peer not in knowledge.hostile]
    distances = [np.linalg.norm(knowledge.value(peer) - own) for peer in honest]
    usual_distance = float(np.median(distances))
    values = [(own + step * usual_distance * direction).astype(np.float32) for step in TRIED_STEPS]
    if respond is None:
        return values[-1]

    def movement(value: Array) -> float:
        """Return how far a value would move the receiver along the direction."""
        new_value = respond(value)
        return 0.0 if new_value is None else float((new_value - own) @ direction)

    return max(values, key=movement)


# --- steady gossip and push-sum, in virtual time ----------------------------------------------------


def run_gossip(cell: HostileRun) -> Record:
    """Train and gossip at different times in every round; return the honest peers' accuracies."""
    swarm = _GossipSwarm(cell)
    knowledge = swarm.knowledge
    for gossiper in swarm.gossipers:
        gossiper.tick(0.0)
    for round_number in range(cell.rounds):
        times = knowledge.random.random(len(knowledge.learners))
        for peer in np.argsort(times).tolist():
            now = round_number + float(times[peer])
            swarm.deliver(now)
            if (round_number + peer) % pace_of(cell, peer):
                continue
            knowledge.learners[peer].train()
            swarm.send(peer, now)
        knowledge.means.append(knowledge.honest_values().mean(axis=0))
    swarm.deliver(cell.rounds + 2.0)
    return _record(cell, knowledge) | {"cut off": swarm.cut_off(cell.rounds - HEARD_ROUNDS)}


def pace_of(cell: HostileRun, peer: int) -> int:
    """Return a peer's pace: 4 means that it trains in every fourth round."""
    return cell.pace if peer % 2 else 1


class _GossipSwarm:
    """The gossipers of one run, and the simulated network between them."""

    def __init__(self, cell: HostileRun):
        self._cell = cell
        self.knowledge, self.attack = _prepare(cell)
        learners = enumerate(self.knowledge.learners)
        self.gossipers = [_gossiper(cell, learner, number) for number, learner in learners]
        for u, v in self.knowledge.graph.edges:
            for a, b in ((u, v), (v, u)):
                other = self.gossipers[b]
                self.gossipers[a].peer_online(other.peer, other.session, [MODEL])
        faults = FaultPlan(delay=MESSAGE_DELAY)
        self._network: MemoryNetwork[Message] = MemoryNetwork(self.knowledge.random, faults)
        self._numbers = {gossiper.peer: number for number, gossiper in enumerate(self.gossipers)}
        self._forged = 0
        self._heard: dict[tuple[int, int], float] = {}
        """When a receiver last credited a value of a sender, by (sender, receiver)."""

    def cut_off(self, since: float) -> int:
        """Return how many pairs (sender, receiver) of honest neighbours had no value credited since then."""
        pairs = self.knowledge.graph.subgraph(self.knowledge.honest).to_directed().edges
        return sum(self._heard.get(pair, 0.0) < since for pair in pairs)

    def deliver(self, now: float) -> None:
        """Deliver all messages that have arrived by `now`, and send the answers."""
        for message in self._network.deliver(now):
            number = self._numbers[message.receiver]
            receiver = self.gossipers[number]
            receiver.handle(message, now)
            for answer in receiver.poll():
                if isinstance(answer, Ack) and answer.verdict == "credited":
                    self._heard[self._numbers[answer.receiver], number] = now
                self._network.send(answer, now)

    def send(self, peer: int, now: float) -> None:
        """Send what a peer sends after it has trained."""
        gossiper, attack = self.gossipers[peer], self.attack
        is_honest = attack in (None, "label flip") or peer not in self.knowledge.hostile
        if is_honest or self._cell.rule == "push-sum":
            assert isinstance(gossiper.mode, PacedMode | SteadyMode)
            gossiper.mode.request()
            gossiper.tick(now)
        for message in gossiper.poll():
            if isinstance(message, Give) and not is_honest and attack is not None:
                if attack == "silent":
                    continue
                # In push-sum a hostile member sends the messages of its gossiper, with other values.
                receiver = self._numbers[message.receiver]
                value = forge_value(attack, self.knowledge, peer, receiver, None)
                weight = 16 * ONE if attack == "inflate" else message.weight
                message = replace(message, value=value, weight=weight)
            self._network.send(message, now)
        if not is_honest and self._cell.rule != "push-sum" and attack not in (None, "silent"):
            self._send_forged(attack, peer, now)

    def _send_forged(self, attack: str, sender: int, now: float) -> None:
        """Send forged values of steady gossip to all honest neighbours of a hostile member."""
        knowledge, name = self.knowledge, self.gossipers[sender].peer
        for number in sorted({*knowledge.graph[sender]} - {*knowledge.hostile}):
            receiver = self.gossipers[number]
            respond = partial(_dry_run, receiver, name)
            value = forge_value(attack, knowledge, sender, number, respond)
            for _ in range(SPAM_MESSAGES if attack in ("spam", "rejoin") else 1):
                self._forged += 1
                session = f"again {self._forged}" if attack == "rejoin" else "forged"
                weight = 16 * ONE if attack == "inflate" else 0
                give = Give(
                    MODEL, name, session, self._forged, receiver.peer, receiver.session, weight,
                    value,
                )  # fmt: skip
                self._network.send(give, now)


def _prepare(cell: HostileRun) -> tuple[Knowledge, str | None]:
    """Return what hostile members know of a run, and the name of its attack, None for a run without one.

    If `line` is ALONE, the hostile members have no links. In the attack `label flip`, the labels of the
    hostile members' samples are changed here.
    """
    learners, graph = learners_of(cell), graph_of(cell)
    knowledge = Knowledge(
        learners,
        hostile_peers(cell, graph),
        graph,
        [learner.value for learner in learners],
        np.random.default_rng([cell.seed, 2]),
    )
    if cell.line == ALONE:
        graph.remove_edges_from([*graph.edges(knowledge.hostile)])
    if cell.line == "label flip":
        for peer in knowledge.hostile:
            inputs, labels = learners[peer].samples
            learners[peer].samples = inputs, 9 - labels
    return knowledge, None if cell.line in (CLEAN, ALONE) else cell.line


def _gossiper(cell: HostileRun, learner: SmallLearner, number: int) -> Gossiper:
    """Return a peer's gossiper, which has injected its weight."""
    mode: PacedMode | SteadyMode = PacedMode(FANOUT)
    if cell.rule == "steady":
        mode = SteadyMode(score=learner.score)
    name = f"{number}"
    gossiper = Gossiper(name, f"session {name}", learner, mode=mode, seed=number)
    gossiper.inject(MODEL, ONE)
    return gossiper


def _dry_run(receiver: Gossiper, sender: str, value: Array) -> Array | None:
    """Return what the receiver's value would become, by its own mode; None if it would refuse the value."""
    mode = receiver.mode
    assert isinstance(mode, SteadyMode)
    give = Give(MODEL, sender, "dry run", 1, receiver.peer, receiver.session, 0, value)
    new_value = mode.would_move(receiver, give)
    return None if isinstance(new_value, str) else new_value  # a text is the cause of a refusal


# --- robust means, in lockstep ----------------------------------------------------------------------


def run_lockstep(cell: HostileRun) -> Record:
    """Train all peers, then let each take the robust mean of its own value and its neighbours'.

    Returns the honest peers' accuracies.
    """
    knowledge, attack = _prepare(cell)
    learners, graph, hostile = knowledge.learners, knowledge.graph, knowledge.hostile
    robust_mean = ROBUST[cell.rule]
    for _ in range(cell.rounds):
        for learner in learners:
            learner.train()
        values = [learner.value for learner in learners]
        means: dict[int, Array] = {}
        for peer in range(len(learners)):
            received = [values[other] for other in graph[peer] if other not in hostile]
            max_hostile = tolerated("auto", graph.degree[peer])
            for attacker in (other for other in graph[peer] if other in hostile):
                if attack in (None, "label flip"):
                    received.append(values[attacker])
                elif attack != "silent" and peer not in hostile:
                    respond = partial(
                        _mean_with, robust_mean, values[peer], list(received), max_hostile
                    )
                    received.append(forge_value(attack, knowledge, attacker, peer, respond))
            means[peer] = robust_mean(values[peer], received, max_hostile)
        for peer, value in means.items():
            learners[peer].value = value
        knowledge.means.append(knowledge.honest_values().mean(axis=0))
    return _record(cell, knowledge)


def _mean_with(
    robust_mean: Any, own: Array, received: list[Array], max_hostile: int, value: Array
) -> Array:
    """Return the robust mean that a receiver would compute if it received one more value."""
    with np.errstate(over="ignore", invalid="ignore"):
        return robust_mean(own, [*received, value], max_hostile)


def _record(cell: HostileRun, knowledge: Knowledge) -> Record:
    """Return the result of a run: the honest peers' accuracies on the common test set."""
    accuracies = {peer: knowledge.learners[peer].accuracy() for peer in knowledge.honest}
    worst = min(accuracies, key=lambda peer: accuracies[peer])
    record = {
        "attack": cell.line, "rule": cell.rule, "seed": cell.seed, "setting": cell.setting,
        "accuracy": float(np.mean([*accuracies.values()])), "worst": accuracies[worst],
        "worst degree": knowledge.graph.degree[worst],
        "worst hostile neighbours": len({*knowledge.graph[worst]} & {*knowledge.hostile}),
        "hostile": len(knowledge.hostile),
    }  # fmt: skip
    if cell.pace > 1:
        slow = [accuracies[peer] for peer in accuracies if pace_of(cell, peer) > 1]
        record["slow"] = float(np.mean(slow))
    return record


def run_hostile(cell: HostileRun, job: Job) -> Record:
    """Run one cell and return its record."""
    with np.errstate(over="ignore", invalid="ignore"):
        return run_lockstep(cell) if cell.rule in ROBUST else run_gossip(cell)


# --- the study --------------------------------------------------------------------------------------

RULES = ("steady", "push-sum", "clipped", "trimmed")
"""The ways of averaging that are compared: `rule` in the code, modes in titles."""
OTHER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "MNIST": {"data": "mnist"},
    "MNIST, 500 samples": {"data": "mnist:500"},
    "karate, a leaf": {"graph": "karate", "peers": 34, "place": "leaf"},
    "karate, a hub": {"graph": "karate", "peers": 34, "place": "hub"},
    "scale-free, a leaf": {"graph": "ba:2", "place": "leaf"},
    "scale-free, a hub": {"graph": "ba:2", "place": "hub"},
    "degree 6": {"graph": "regular:6"},
    "complete": {"graph": "clique"},
    "label skew": {"alpha": 0.5},
    "unequal speeds": {"pace": 4},
    "two of four neighbours": {"place": "together"},
}
"""Other graphs, places and data, for the worst attacks; on the graphs with hubs one peer is hostile."""

OTHER_SEEDS = 3
"""The most seeds with which other settings, and attacks on other modes, are run."""


def hostile(entry: StudyEntry, quick: bool, seeds: range) -> Study[HostileRun]:
    """Return the study: all attacks on steady gossip and some on the other rules, with the digits; the worst
    attacks on steady gossip in other settings, where push-sum runs without attack.

    quick: fewer attacks and rounds, and only the digits.
    """
    first_seed = 0 if quick else FIRST_SEED
    first_seeds = {name: FIRST_MNIST_SEED for name in OTHER_SETTINGS if "MNIST" in name}
    attacks = WORST_ATTACKS if quick else ATTACKS
    cells: list[HostileRun] = []
    for number in seeds:
        for rule in RULES:
            compared = [attack for attack in attacks if attack in COMPARED_ATTACKS]
            compared = compared if number < OTHER_SEEDS else []
            cells += [
                HostileRun(attack, rule, first_seed + number, rounds=15 if quick else 40)
                for attack in (CLEAN, ALONE, *(attacks if rule == "steady" else compared))
            ]
    for number in range(0 if quick else min(OTHER_SEEDS, len(seeds))):
        cells += [
            HostileRun(attack, rule, first_seeds.get(name, first_seed) + number, name, **fields)
            for name, fields in OTHER_SETTINGS.items()
            for rule in ("steady", "push-sum")
            for attack in (CLEAN, ALONE, *(WORST_ATTACKS if rule == "steady" else ()))
        ]
    return Study(
        entry.name, cells, EachCell(run_hostile), hostile_tables, hostile_figure,
        titles={
            "summary": f"{cells[0].hostile} of {cells[0].peers} peers hostile, digits, {cells[0].rounds} "
            "rounds: accuracy of the honest peers, their mean and the worst of them",
            "costs": "steady gossip: what attacks cost the mean accuracy (±: standard error); how far the "
            "worst honest peer is below the mean without attack (mean and largest of the seeds)",
            "controls": "no attack, by setting: all behave honestly, or the hostile ones take no part: "
            "accuracy of the honest peers, their mean and the worst of them",
            "bars": "steady gossip: what was measured, and what it should be at most",
        },
        latest=lambda record: f"{record['rule']}, {record['attack']}: {record['accuracy']:.3f}",
        always_run={CLEAN, ALONE},
    )  # fmt: skip


def hostile_tables(records: Sequence[Record]) -> dict[str, Frame]:
    """Return tables: accuracies by attack and mode, costs of attacks by setting, and limits ("bars")."""
    runs = frame_of(records, ordered=["attack", "rule", "setting"])
    frame = runs[runs["setting"] == DIGITS]
    tables = {"summary": mean_and_worst(frame, "attack", "rule")}
    controls = runs[runs["attack"].isin((CLEAN, ALONE)) & runs["rule"].isin(("push-sum", "steady"))]
    if len(controls):
        kinds = controls["rule"].astype(str) + ", " + controls["attack"].astype(str)
        tables["controls"] = mean_and_worst(controls.assign(kind=kinds), "setting", "kind")
    steady = runs[runs["rule"] == "steady"]
    if len(steady):
        costs = attack_costs(steady)
        formats = dict.fromkeys(("accuracy", "worst", "cost", "±", "below", "largest"), ".3f")
        tables["costs"] = as_text(costs, formats)
        tables["bars"] = bars(runs, costs)
    return tables


def mean_and_worst(runs: Frame, row: str, column: str) -> Frame:
    """Return, for each value of `column`, the peers' mean accuracy and the worst of them; mean over seeds."""
    mean = runs.pivot_table("accuracy", row, column, observed=True)
    worst = runs.pivot_table("worst", row, column, observed=True)
    columns: dict[str, Any] = {row: list(mean.index)}
    for name in mean.columns:
        columns[str(name)] = list(mean[name])
        columns[f"{name}, worst"] = list(worst[name])
    return as_text(frame_of(columns), dict.fromkeys(columns, ".3f") | {row: ""})


def attack_costs(steady: Frame) -> Frame:
    """Return a row for every setting and attack, with means over seeds.

    cost, ±: of the honest peers' mean accuracy, against the run of the same seed without attack, and its
    standard error. below, largest: how far the worst honest peer is below the mean of that run, the mean and
    the largest over seeds.
    """
    clean = steady[steady["attack"] == CLEAN][["setting", "seed", "accuracy"]]
    pairs = steady.merge(clean, on=["setting", "seed"], suffixes=("", " clean"))
    pairs["cost"] = pairs["accuracy clean"] - pairs["accuracy"]
    pairs["below"] = pairs["accuracy clean"] - pairs["worst"]
    groups = pairs.groupby(["setting", "attack"], observed=True, sort=True)
    rows = groups[["accuracy", "worst", "cost", "below"]].mean()
    rows.insert(0, "seeds", groups.size())
    rows.insert(4, "±", groups["cost"].sem())
    rows["largest"] = groups["below"].max()
    return rows.reset_index()


IRREGULAR = ("karate, a leaf", "karate, a hub", "scale-free, a leaf", "scale-free, a hub")
SKEW_COST = 0.054
"""The most that attacks may cost with label skew: the cost of the mildest of the worst attacks in the study
from which the rule of steady gossip comes."""


def bars(runs: Frame, costs: Frame) -> Frame:
    """Return what was measured beside what it should be at most; settings that were not run are left out."""
    rows: list[tuple[str, float, float, str]] = []
    clean = runs[(runs["setting"] == DIGITS) & (runs["attack"] == CLEAN)]
    by_rule = clean.pivot_table("accuracy", "seed", "rule", observed=True)
    if {"steady", "push-sum"} <= {*by_rule.columns}:
        lost = by_rule["push-sum"] - by_rule["steady"]
        note = f"± {lost.sem():.3f}, {len(lost)} seeds" if len(lost) > 1 else "one seed"
        rows.append(("without attack: cost against push-sum", float(lost.mean()), 0.01, note))

    def add_worst_attack(setting: str, column: str, limit: float, what: str) -> None:
        attacked = costs[(costs["setting"] == setting) & ~costs["attack"].isin((CLEAN, ALONE))]
        if len(attacked):
            row = attacked.loc[attacked[column].idxmax()]
            rows.append((f"{setting}: {what}", float(row[column]), limit, str(row["attack"])))

    for setting in (DIGITS, "MNIST", "MNIST, 500 samples"):
        add_worst_attack(setting, "cost", 0.03, "mean cost of the worst attack")
        add_worst_attack(setting, "below", 0.08, "worst peer below the clean mean, mean of seeds")
        add_worst_attack(setting, "largest", 0.08, "worst peer below the clean mean, any seed")
    for setting in IRREGULAR:
        add_worst_attack(setting, "cost", 0.04, "mean cost of the worst attack")
    add_worst_attack("label skew", "cost", SKEW_COST, "mean cost of the worst attack")
    cut_off = runs[runs["rule"] == "steady"]["cut off"].sum()
    rows.append(("pairs of honest neighbours cut off, all runs", float(cut_off), 0.0, ""))
    what, measured, limits, notes = zip(*rows, strict=True)
    holds = ["yes" if value <= limit else "no" for _, value, limit, _ in rows]
    columns = {"what": what, "measured": measured, "at most": limits, "holds": holds, "": notes}
    return as_text(frame_of(columns), {"measured": ".3f", "at most": ".3f"})


def hostile_figure(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw a dot for every attack and mode: the mean accuracy, with a line down to the worst peer."""
    from ..study.figures import COLOURS, MARKERS, canvas, place_legend, save

    frame = frame_of(records, ordered=["attack", "rule"])
    frame = frame[frame["setting"] == DIGITS]
    attacks = list(dict.fromkeys(frame["attack"]))
    figure, axes = canvas(
        "dot: mean accuracy of the honest peers; line: down to the worst of them; mean over seeds",
        height=0.3 * len(attacks) + 1.6,
    )
    for index, rule in enumerate(dict.fromkeys(frame["rule"])):
        of_rule = frame[frame["rule"] == rule].groupby("attack", observed=True)
        rows = of_rule[["accuracy", "worst"]].mean()
        places = [attacks.index(attack) + 0.16 * (index - 1.5) for attack in rows.index]
        axes.hlines(places, rows["worst"], rows["accuracy"], color=COLOURS[index], alpha=0.5)
        axes.plot(
            rows["accuracy"],
            places,
            MARKERS[index],
            color=COLOURS[index],
            label=str(rule),
            markersize=4,
        )
    axes.set_yticks(range(len(attacks)), attacks)
    axes.invert_yaxis()
    axes.set(xlabel="accuracy", title="hostile members, by attack and mode")
    place_legend(axes)
    return save(figure, folder / "hostile")
