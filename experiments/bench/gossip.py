"""Benchmarks of gossip: messages, encryption, steady gossip, and the load of cards and statuses."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

import networkx as nx
import numpy as np
import torch

from ...gossip import (
    FANOUT,
    ONE,
    Chunker,
    DictStore,
    Give,
    Gossiper,
    Hook,
    Mass,
    MemoryBroker,
    MemoryTransport,
    Reassembler,
    Received,
    SteadyMode,
    Will,
    absorb,
    decode,
    encode,
    topics,
)
from ...gossip.security import OVERHEAD, Admission, Identity, SwarmSecurity, invite
from ...models import SCORE_EVERY, SgdLearner, SlicedNetwork, mlp
from ...peer import Peer, Settings
from ..study import torch_threads
from . import PARAMETERS, Row, median_seconds, sliced_perceptron

_PACKET_BYTES = 4 << 20
_LOOPS = 20


def codec() -> list[Row]:
    """Time encoding a message into packets and decoding it, checks included, against copying its values."""
    value = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    give = Give("global", "a", "s", 1, "b", "t", ONE, value)
    chunker, reassembler = Chunker("a/s", _PACKET_BYTES), Reassembler()
    target = np.empty_like(value)

    def work() -> None:
        for _ in range(_LOOPS):
            for packet in chunker.split(encode(give, "schema")):
                complete = reassembler.add(packet)
                assert complete is not None
                decode(complete)

    def copy() -> None:
        for _ in range(_LOOPS):
            np.copyto(target, value)

    codec_speed, copy_speed = (
        _LOOPS * value.nbytes / seconds / 1e9 for seconds in median_seconds(work, copy)
    )
    return [
        Row("encode + decode", "GB/s", codec_speed, 1.0, 1.0, note="baseline: the wanted 1 GB/s"),
        Row("encode + decode, against memcpy", "GB/s", codec_speed, copy_speed),
    ]


# --- trust: encryption and authentication -----------------------------------------------------------

MESSAGES = 2
"""Messages that a live peer sends, and receives, per round in async mode."""
SAMPLES = 500
"""Samples that a round trains on: the smaller mini-batch of the paper."""
_SCHEMA = "0" * 16


def trust() -> list[Row]:
    """Time encryption against a round of training and messages; the time of the broker is not counted."""
    anna, ben = _pair()
    value = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    give = Give("global", anna.name, "s", 1, ben.name, "s", ONE, value)
    sending, receiving = Chunker(f"{anna.name}/s", _PACKET_BYTES - OVERHEAD), Reassembler()
    packets = list(sending.split(encode(give, _SCHEMA)))
    learner = _learner()
    mass = Mass(value, ONE)

    def sealing() -> None:
        for _ in range(MESSAGES):
            for packet in packets:
                sealed = anna.seal(ben.name, "global", packet)
                assert sealed is not None
                assert ben.open("global", sealed) is not None

    def round() -> None:
        learner.train(1)
        for _ in range(MESSAGES):
            for packet in sending.split(encode(give, _SCHEMA)):
                complete = receiving.add(packet)
                assert complete is not None
                message = decode(complete).message
                assert isinstance(message, Give)
                absorb(mass, Mass(message.value, message.weight))

    sealing_ms, round_ms = (1e3 * seconds for seconds in median_seconds(sealing, round))
    traffic = f"{MESSAGES} messages each way, {SAMPLES} samples trained"
    speed = MESSAGES * value.nbytes / sealing_ms / 1e6
    note = "authenticated by the pair's key: no signature per message"
    return [
        Row("sealing in a round", "ms", sealing_ms, sealing_ms + round_ms, 0.1, "at most", traffic),
        Row("seal + open one message", "GB/s", speed, note=note),
    ]


def _pair() -> tuple[SwarmSecurity, SwarmSecurity]:
    """The security layers of two members that have received each other's card and status."""
    owner = Identity.generate("owner")
    members = []
    for label in ("anna", "ben"):
        identity = Identity.generate(label)
        admission = Admission(invite(owner, "bench", label, identity.public))
        members.append(
            SwarmSecurity(
                identity, admission, owner.public,
                swarm="bench", session="s", models=["global"], since=time.time(),
            )
        )  # fmt: skip
    for sender, receiver in (members, members[::-1]):
        receiver.receive(topics.card("bench", sender.name), sender.card(b"{}"))
        status = sender.status(b'{"state": "online"}')
        receiver.receive(topics.status("bench", sender.name), status)
    return members[0], members[1]


def _learner() -> SgdLearner:
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(SAMPLES, 784, generator=generator)
    samples = (data, torch.randint(10, (SAMPLES,), generator=generator))
    return SgdLearner(
        sliced_perceptron("anna"), samples, samples, local_samples=SAMPLES, rate=0.1,
        loss="squared", reduction="sum", seed=0,
    )  # fmt: skip


# --- steady: scoring the values of four neighbours against a round of training ----------------------

LAYOUTS = ("64=32=10", "784=60=10", "784=300=100=10")
MAX_SHARE = 0.25
"""The claim: following four values takes at most this fraction of a round's training."""


def steady(layouts: tuple[str, ...] = LAYOUTS, repeats: int = 7) -> list[Row]:
    """Time what a peer does with four received values, by processor time, on one thread."""
    with torch_threads(1):
        return [_steady_row(layout, repeats) for layout in layouts]


def _steady_row(layout: str, repeats: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (int(layout.split("=")[end]) for end in (0, -1))
    x = torch.rand(SAMPLES, inputs, generator=generator)
    y = torch.randint(outputs, (SAMPLES,), generator=generator)
    network = SlicedNetwork(mlp(layout), {"global": layout.replace("=", "-")}, seed=0)
    learner = SgdLearner(
        network, (x, y), (x, y), local_samples=SAMPLES, batch=10, rate=0.1, score_every=SCORE_EVERY
    )
    own = network.read("global").numpy().copy()
    received = [own + 0.001 * (number + 1) for number in range(FANOUT)]
    mode = SteadyMode(
        score=lambda model, value: learner.score({} if value is None else {model: value})
    )
    gossiper = Gossiper("me", "s", DictStore({"global": own}), mode=mode)
    gossiper.inject("global", ONE)
    for number in range(FANOUT):
        gossiper.peer_online(f"n{number}", f"s{number}", ["global"])
    sequence = 0

    def follow() -> None:
        """Follow the values of four neighbours, with new allowances."""
        nonlocal sequence
        sequence += 1
        mode.end_round(gossiper)
        for number, value in enumerate(received):
            give = Give("global", f"n{number}", f"s{number}", sequence, "me", "s", 0, value)
            gossiper.handle(give, 0.0)
        gossiper.poll()

    following, training = median_seconds(
        follow, lambda: learner.train(1), repeats=repeats, clock=time.process_time
    )
    assert gossiper.counters["credited"] == FANOUT * (repeats + 1), "no value was left out"
    name = f"following {FANOUT} values in steady mode, {layout}"
    note = f"baseline: a round of training with {SAMPLES} samples"
    return Row(name, "s", following, training, MAX_SHARE, "at most", note)


# --- presence: bytes of cards and statuses that a peer receives -------------------------------------

DEGREE = 4
SWARM_SIZES = (16, 64, 256)
MOST_GROWTH = 1.5
"""How many times as much a peer may receive in the largest swarm, which has 16 times as many peers."""
TIMEOUT = 600.0


@dataclass(frozen=True)
class PresenceLoad:
    """What one peer receives from its start to its end, as a mean over all peers of a swarm."""

    peers: int
    messages: float
    bytes: float
    subscriptions: float
    hops: int


class CountingTransport(MemoryTransport):
    """A transport that counts cards, statuses and death notices as they arrive, before they are read."""

    def __init__(self, broker: MemoryBroker, client_id: str, **options: Any) -> None:
        super().__init__(broker, client_id, **options)
        self.presence_messages = self.presence_bytes = 0

    @property
    def subscriptions(self) -> int:
        """The number of topic filters that it has subscribed to."""
        return len(self._patterns)

    def receive(self, message: Received) -> None:
        """Count and queue a message."""
        if not topics.is_gossip(message.topic):
            self.presence_messages += 1
            self.presence_bytes += len(message.topic) + len(message.payload)
        super().receive(message)


def presence_load(peers: int, degree: int | None = DEGREE, *, rounds: int = 2) -> PresenceLoad:
    """Run small peers of this process to their end: on a graph of this degree, or without any graph."""
    return asyncio.run(_run_presence(peers, degree, rounds))


async def _run_presence(peers: int, degree: int | None, rounds: int) -> PresenceLoad:
    graph = None if degree is None else nx.random_regular_graph(degree, peers, seed=0)
    hops = 1 if graph is None else nx.diameter(graph)
    broker = MemoryBroker()
    transports: list[CountingTransport] = []

    def connect(client_id: str, will: Will, on_connect: Hook) -> CountingTransport:
        transport = CountingTransport(broker, client_id, will=will, on_connect=on_connect)
        transports.append(transport)
        return transport

    def settings(index: int) -> Settings:
        neighbours = None if graph is None else tuple(map(str, graph[index]))
        return Settings(
            swarm="bench", rounds=rounds, neighbours=neighbours, hops=hops, founder=True,
            expect=tuple(map(str, range(peers))), start_timeout=TIMEOUT, settle_timeout=TIMEOUT,
            settle_tolerance=0.05, tick=0.5, lease=1e4,
        )  # fmt: skip

    running = [
        Peer(str(index), _small_learner(index), settings(index), connect, seed=index)
        for index in range(peers)
    ]
    async with asyncio.timeout(TIMEOUT):
        await asyncio.gather(*(peer.run() for peer in running))
    return PresenceLoad(
        peers,
        mean(transport.presence_messages for transport in transports),
        mean(transport.presence_bytes for transport in transports),
        mean(transport.subscriptions for transport in transports),
        hops,
    )


def _small_learner(index: int) -> SgdLearner:
    network = SlicedNetwork(mlp("2=2=2"), {"global": "2-2-2"}, peer=str(index), seed=0)
    generator = torch.Generator().manual_seed(index)
    data = torch.randn(4, 2, generator=generator), torch.randint(0, 2, (4,), generator=generator)
    return SgdLearner(network, data, data, local_samples=4, batch=4, rate=0.01, seed=index)


def presence() -> list[Row]:
    """Measure the bytes of presence that a peer receives in swarms of 16, 64 and 256 peers."""
    smallest, *larger = (presence_load(peers) for peers in SWARM_SIZES)
    rows = [
        Row(
            f"presence received, {load.peers} peers of degree {DEGREE}", "bytes/peer",
            load.bytes, smallest.bytes, MOST_GROWTH, "at most",
            note=f"baseline: {smallest.peers} peers; {load.messages:.0f} messages, {load.subscriptions:.0f} "
            f"subscriptions, {load.hops} hops",
        )
        for load in larger
    ]  # fmt: skip
    small, large = (presence_load(peers, None) for peers in SWARM_SIZES[:2])
    note = f"baseline: {small.peers} peers; {large.messages:.0f} messages"
    name = f"presence received, {large.peers} peers, no graph"
    return [*rows, Row(name, "bytes/peer", large.bytes, small.bytes, note=note)]
