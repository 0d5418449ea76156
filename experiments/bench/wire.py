"""Benchmarks of messages: encoding and decoding against copying, encryption against a round of training."""

from __future__ import annotations

import time

import numpy as np
import torch

from ...gossip import ONE, Chunker, Give, Mass, Reassembler, absorb, decode, encode, topics
from ...gossip.security import OVERHEAD, Admission, Identity, SwarmSecurity, invite
from ...models import SgdLearner
from . import PARAMETERS, Row, alternate, sliced_perceptron

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
        _LOOPS * value.nbytes / seconds / 1e9 for seconds in alternate(work, copy)
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

    sealing_ms, round_ms = (1e3 * seconds for seconds in alternate(sealing, round))
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
    for one, other in (members, members[::-1]):
        other.receive(topics.card("bench", one.name), one.card(b"{}"))
        other.receive(topics.status("bench", one.name), one.status(b'{"state": "online"}'))
    return members[0], members[1]


def _learner() -> SgdLearner:
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(SAMPLES, 784, generator=generator)
    samples = (data, torch.randint(10, (SAMPLES,), generator=generator))
    return SgdLearner(
        sliced_perceptron("anna"), samples, samples, local_samples=SAMPLES, rate=0.1,
        loss="squared", reduction="sum", seed=0,
    )  # fmt: skip
