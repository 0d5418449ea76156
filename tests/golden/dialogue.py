"""A short dialogue of two gossipers, packet by packet: the wire format as somebody else would meet it.

Nothing in it depends on a clock or on chance: sessions, seeds and message numbers are given, and values are
multiples of 1/8, which every processor adds alike.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from gossamer.gossip import (
    MIN_PACKET_BYTES,
    ONE,
    Chunker,
    DictStore,
    Gossiper,
    Message,
    Mode,
    Reassembler,
    RoundsMode,
    decode,
    encode,
    schema_hash,
)
from gossamer.gossip.compress import Links, parse

FILE = Path(__file__).with_name("dialogue.json")
MODEL = "global"

Line = dict[str, Any]
Scene = dict[str, Any]
Carry = Callable[[Line], list[bytes]]
"""Given a line of the dialogue, returns the packets that its receiver gets."""


@dataclass
class Pair:
    """Ann and Bob, each with one vector, and what they said to each other."""

    carry: Carry
    size: int = 6
    mode: Callable[[], Mode | None] = lambda: None
    compress: str | None = None
    limit: int = 4096
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        start = np.arange(self.size, dtype=np.float32) / 8
        values = {"ann": start, "bob": 1 - 2 * start}
        self.schema = schema_hash([(MODEL, (self.size,), "float32")])
        self.gossipers = {
            name: Gossiper(
                name, f"session-of-{name}", DictStore({MODEL: value}), mode=self.mode(), seed=seed,
                links=Links(self.compress and parse(self.compress)),
            )
            for seed, (name, value) in enumerate(values.items())
        }  # fmt: skip
        self._chunkers = {
            name: Chunker(gossiper.session, self.limit, first_id=1000)
            for name, gossiper in self.gossipers.items()
        }
        self._reassemblers = {name: Reassembler() for name in self.gossipers}
        self.ann, self.bob = self.gossipers.values()
        for me, other in ((self.ann, self.bob), (self.bob, self.ann)):
            me.inject(MODEL, ONE)
            me.peer_online(other.peer, other.session, [MODEL])

    def give_half(self) -> None:
        """Let Ann push half of her weight."""
        self.ann.push(MODEL, {"bob": self.ann.weight(MODEL) // 2}, 0.0)

    def send(
        self, message: Message, lost: Iterable[int] = (), *, again: bool = False
    ) -> list[Message]:
        """Send a message and return what the receiver answers; `lost` are packets that never arrive."""
        dtype = "float64" if self.size > 6 else "float32"
        buffers = encode(message, self.schema, dtype)
        made = list(self._chunkers[message.sender].split(buffers))
        line = {
            "again": again,
            "header": header(b"".join(buffers)),
            "lost": list(lost),
            "packets": [base64.b64encode(packet).decode() for packet in made],
        }
        arrived = self.carry(line)
        receiver = self.gossipers[message.receiver]
        for number, packet in enumerate(arrived):
            if number in line["lost"]:
                continue
            whole = self._reassemblers[receiver.peer].add(packet)
            if whole is not None:
                receiver.handle(decode(whole).message, 0.0)
        self.lines.append(line)
        return receiver.poll()

    def settle(self, *messages: Message) -> None:
        """Send messages, and answers to them, until nobody has anything to say."""
        waiting = [*messages, *self.ann.poll(), *self.bob.poll()]
        while waiting:
            waiting += self.send(waiting.pop(0))

    def scene(self) -> Scene:
        """What was said, and what both have in the end."""
        held = {
            name: {"weight": one.weight(MODEL), "value": one.value(MODEL).tolist()}
            for name, one in self.gossipers.items()
        }
        return {"lines": self.lines, "held": held}


def header(encoded: bytes) -> dict[str, Any]:
    """The header of an encoded message, read without the program's own decoder."""
    [length] = struct.unpack_from("<H", encoded, 6)
    fields = msgpack.unpackb(encoded[8 : 8 + length])
    if "weight" in fields:
        fields["weight"] = fields["weight"].hex()
    return fields


def push_and_ack(carry: Carry) -> Scene:
    """A transfer, its acknowledgement, and a copy of it that is answered alike."""
    pair = Pair(carry)
    pair.give_half()
    [give] = pair.ann.poll()
    pair.settle(*pair.send(give))
    pair.settle(*pair.send(give, again=True))
    return pair.scene()


def lost_and_recalled(carry: Carry) -> Scene:
    """A transfer that is asked back before it arrives: when it comes at last, it is refused."""
    pair = Pair(carry)
    pair.give_half()
    [give] = pair.ann.poll()
    pair.send(give, lost=[0])
    pair.ann.recall("bob", MODEL, 0.0)
    [recall] = pair.ann.poll()
    pair.settle(*pair.send(recall))
    pair.settle(*pair.send(give, again=True))
    return pair.scene()


def compressed(carry: Carry) -> Scene:
    """Three compressed transfers: a whole value, and differences to what was sent and to what was heard."""
    pair = Pair(carry, compress="int8")
    for giver, receiver in ((pair.ann, "bob"), (pair.ann, "bob"), (pair.bob, "ann")):
        giver.push(MODEL, {receiver: giver.weight(MODEL) // 2}, 0.0)
        pair.settle()
    return pair.scene()


def in_chunks(carry: Carry) -> Scene:
    """A transfer in several packets, one of which is lost; the second attempt brings it."""
    pair = Pair(carry, size=50, limit=MIN_PACKET_BYTES)
    pair.give_half()
    [give] = pair.ann.poll()
    pair.send(give, lost=[2])
    pair.settle(*pair.send(give, again=True))
    return pair.scene()


def in_lockstep(carry: Carry) -> Scene:
    """A round of two exchanges, whose transfers say which exchange they belong to."""
    pair = Pair(carry, mode=lambda: RoundsMode(2))
    for one in pair.gossipers.values():
        assert isinstance(one.mode, RoundsMode)
        one.mode.begin_round(one, 0)
    for _ in range(3):
        for one in pair.gossipers.values():
            one.tick(0.0)
        pair.settle()
    return pair.scene()


SCENES = {
    scene.__name__: scene
    for scene in (push_and_ack, lost_and_recalled, compressed, in_chunks, in_lockstep)
}


def instead(lines: Iterable[Line]) -> Carry:
    """Deliver the packets of these lines, one line after the other, whatever the sender made."""
    waiting = iter(lines)
    return lambda _: packets(next(waiting))


def packets(line: Line) -> list[bytes]:
    """The packets of a line as bytes."""
    return [base64.b64decode(packet) for packet in line["packets"]]


def write() -> None:
    """Have the dialogue, and keep it."""
    scenes = {name: scene(packets) for name, scene in SCENES.items()}
    FILE.write_text(json.dumps(scenes, indent=1) + "\n", "utf-8")


def read() -> dict[str, Scene]:
    """The dialogue that was kept, by scene."""
    return json.loads(FILE.read_text("utf-8"))
