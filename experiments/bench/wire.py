"""What messages cost: encoding and decoding against copying, sealing and opening against a round."""

from __future__ import annotations

import time

import numpy as np
import torch

from ...gossip import ONE, Chunker, Give, Mass, Reassembler, absorb, decode, encode, topics
from ...gossip.security import OVERHEAD, Admission, Identity, SwarmSecurity, invite
from ...models import SgdLearner
from . import PARAMETERS, Row, alternate, sliced_perceptron

_LIMIT = 4 << 20
_LOOPS = 20


def codec() -> list[Row]:
    """Message to packet and back: header, the copy into the packet, checks, the finite check."""
    value = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    give = Give("global", "a", "s", 1, "b", "t", ONE, value)
    chunker, reassembler = Chunker("a/s", _LIMIT), Reassembler()
    target = np.empty_like(value)

    def work() -> None:
        for _ in range(_LOOPS):
            for packet in chunker.split(encode(give, "schema")):
                whole = reassembler.add(packet)
                assert whole is not None
                decode(whole)

    def copy() -> None:
        for _ in range(_LOOPS):
            np.copyto(target, value)

    mine, plain = (_LOOPS * value.nbytes / seconds / 1e9 for seconds in alternate(work, copy))
    return [
        Row("encode + decode", "GB/s", mine, 1.0, 1.0, note="baseline: the wanted 1 GB/s"),
        Row("encode + decode, against memcpy", "GB/s", mine, plain),
    ]


# --- trust ------------------------------------------------------------------------------------------

MESSAGES = 2
"""What a live peer sends, and receives, after training once in async mode."""
SAMPLES = 500
"""Samples trained: the paper's smaller mini-batch."""
_SCHEMA = "0" * 16


def trust() -> list[Row]:
    """A round without the broker's own time, which only makes the part of trust look larger."""
    anna, ben = _pair()
    value = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    give = Give("global", anna.name, "s", 1, ben.name, "s", ONE, value)
    sending, receiving = Chunker(f"{anna.name}/s", _LIMIT - OVERHEAD), Reassembler()
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
                whole = receiving.add(packet)
                assert whole is not None
                message = decode(whole).message
                assert isinstance(message, Give)
                absorb(mass, Mass(message.value, message.weight))

    extra, plain = (1e3 * seconds for seconds in alternate(sealing, round))
    traffic = f"{MESSAGES} messages each way, {SAMPLES} samples trained"
    speed = MESSAGES * value.nbytes / extra / 1e6
    keyed = "authenticated by the pair's key: no signature per message"
    return [
        Row("sealing in a round", "ms", extra, extra + plain, 0.1, "at most", traffic),
        Row("seal + open one message", "GB/s", speed, note=keyed),
    ]


def _pair() -> tuple[SwarmSecurity, SwarmSecurity]:
    """Two members who know each other."""
    owner = Identity.generate("owner")
    people = []
    for label in ("anna", "ben"):
        identity = Identity.generate(label)
        admission = Admission(invite(owner, "bench", label, identity.public))
        people.append(
            SwarmSecurity(
                identity, admission, owner.public,
                swarm="bench", session="s", models=["global"], since=time.time(),
            )
        )  # fmt: skip
    for one, other in (people, people[::-1]):
        other.receive(topics.card("bench", one.name), one.card(b"{}"))
        other.receive(topics.status("bench", one.name), one.status(b'{"state": "online"}'))
    return people[0], people[1]


def _learner() -> SgdLearner:
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(SAMPLES, 784, generator=generator)
    samples = (data, torch.randint(10, (SAMPLES,), generator=generator))
    return SgdLearner(
        sliced_perceptron("anna"), samples, samples, local_samples=SAMPLES, rate=0.1,
        loss="squared", reduction="sum", seed=0,
    )  # fmt: skip
