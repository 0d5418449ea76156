"""Test vectors of the protocol: bytes and the fields in them, for whoever writes a peer in another language.

Keys and ids are fixed, so the bytes are the same every time. Bytes are hexadecimal in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gossamer.gossip import Chunker, SchemaEntry, encode, inbox, schema_hash, topics
from gossamer.gossip.security import Identity, channels, signed
from gossamer.gossip.wire import Ack, Give, Message, Recall

FILE = Path(__file__).parents[2] / "docs" / "examples" / "vectors.json"
SWARM, MODEL = "garden", "all"
FIELDS: list[SchemaEntry] = [("hidden.weight", [1, 2], "float32"), ("hidden.bias", [1], "float32")]
ANNA, BEN = ("anna", "a1b2c3d4e5f60718"), ("ben", "0123456789abcdef")
"""Names and sessions."""
VALUE = [0.5, -2.0, 3.25]
Vector = dict[str, Any]


def make() -> dict[str, Any]:
    """Return all vectors."""
    schema = schema_hash(FIELDS)
    messages = [_message(*each) for each in _messages()]
    return {
        "about": "docs/explanation/protocol.md says what the fields mean; bytes are hexadecimal",
        "schema": {"fields": FIELDS, "hash": schema},
        "topics": {
            "card": topics.card(SWARM, "anna"),
            "status": topics.status(SWARM, "anna"),
            "inbox": inbox(SWARM, "anna", MODEL),
        },
        "messages": messages,
        "chunks": _chunks(bytes.fromhex(messages[0]["bytes"])),
        "statement": _statement(),
        "sealed": _sealed(bytes.fromhex(messages[0]["bytes"])),
    }


def write() -> None:
    """Write the file anew."""
    FILE.write_text(json.dumps(make(), indent=1) + "\n", "utf-8")


def read() -> dict[str, Any]:
    """Return the vectors in the file."""
    return json.loads(FILE.read_text("utf-8"))


def _messages() -> list[tuple[Message, str]]:
    give = (MODEL, *ANNA, 7, *BEN, 3 << 31)
    return [
        (Give(*give, np.array(VALUE, np.float32)), "float32"),
        (Give(*give, np.array(VALUE, np.float32), tag=(4, 1)), "float16"),
        (Give(*give, np.array(VALUE, np.float64)), "float64"),
        (Ack(MODEL, *BEN, *ANNA, 7, "credited"), "float32"),
        (Ack(MODEL, *BEN, *ANNA, 7, "void"), "float32"),
        (Recall(MODEL, *ANNA, *BEN, 7), "float32"),
    ]


def _message(message: Message, dtype: Any) -> Vector:
    fields: Vector = {"vector": MODEL, "seq": 7, "schema": schema_hash(FIELDS)}
    givers = {"from": ANNA[0], "session": ANNA[1], "to": BEN[0], "to_session": BEN[1]}
    match message:
        case Give():
            fields |= {"kind": "give", **givers, "weight": message.weight.to_bytes(5, "big").hex()}
            tag = None if message.tag is None else list(message.tag)
            fields |= {"tag": tag, "dtype": dtype, "length": len(VALUE)}
        case Recall():
            fields |= {"kind": "recall", **givers}
        case Ack():
            fields |= {"kind": "ack", "from": BEN[0], "session": BEN[1], "verdict": message.verdict}
            fields |= {"to": ANNA[0], "to_session": ANNA[1]}
    encoded = b"".join(encode(message, schema_hash(FIELDS), dtype))
    value = VALUE if isinstance(message, Give) else None
    return {"header": fields, "value": value, "bytes": encoded.hex()}


def _chunks(message: bytes) -> list[Vector]:
    """One message in one packet, and in several."""
    sender = "/".join(ANNA)
    vectors = []
    for limit in (1 << 20, 168):
        packets = Chunker(sender, limit, first_id=2**40 + 5).split([message])
        vectors.append(
            {
                "sender": sender, "message_id": 2**40 + 5, "limit": limit, "message": message.hex(),
                "packets": [packet.hex() for packet in packets],
            }
        )  # fmt: skip
    return vectors


def _statement() -> Vector:
    """A signed statement: a status whose head is shortened."""
    secret = bytes(range(32))
    identity = Identity.from_secret("anna", secret)
    context = topics.status(SWARM, identity.name)
    head = {"version": 3, "key": identity.public, "number": 1}
    body = b'{"state": "online"}'
    return {
        "label": "anna", "private": secret.hex(), "public": identity.public.hex(),
        "name": identity.name, "context": context,
        "head": head | {"key": identity.public.hex()}, "body": body.decode(),
        "bytes": signed.sign(identity, context, head, body).hex(),
    }  # fmt: skip


def _sealed(message: bytes) -> Vector:
    """A packet that anna seals for ben."""
    owner, number, revocations = bytes([9]) * 32, 70_001, 3
    keys = {name: bytes([byte]) * 32 for name, byte in (("anna", 1), ("ben", 2))}
    publics = {
        name: X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
        for name, key in keys.items()
    }
    private = X25519PrivateKey.from_private_bytes(keys["anna"])
    ends = sorted(name.encode() + b"\0" + public for name, public in publics.items())
    shared = channels.agree(private, "ben", publics["ben"])
    pair = channels.derive(shared, "pair", owner, SWARM, *ends)
    context = (SWARM, MODEL, *ANNA, *BEN)
    key = channels.derive(pair, "packet", *context, number >> channels.BLOCK_BITS)
    tags = {name: channels.exchange_tag(name, public) for name, public in publics.items()}
    header = channels.HEADER.pack(
        channels.MAGIC, channels.VERSION, tags["ben"][:3], tags["anna"], number, revocations
    )
    (packet,) = Chunker("/".join(ANNA), first_id=1).split([message])
    nonce = bytes(4) + number.to_bytes(8, "little")
    ciphertext = AESGCM(key).encrypt(nonce, packet, header + channels.framed(context))
    return {
        "owner": owner.hex(), "swarm": SWARM, "model": MODEL, "number": number,
        "revocations": revocations,
        "sender": {
            "name": ANNA[0], "session": ANNA[1],
            "private": keys["anna"].hex(), "public": publics["anna"].hex(),
        },
        "receiver": {
            "name": BEN[0], "session": BEN[1],
            "private": keys["ben"].hex(), "public": publics["ben"].hex(),
        },
        "pair": pair.hex(), "key": key.hex(), "packet": packet.hex(),
        "bytes": (header + ciphertext).hex(),
    }  # fmt: skip
