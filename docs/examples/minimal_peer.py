"""A Gossamer peer in one file: it founds a partial model, exchanges transfers with a peer, and leaves.

    python minimal_peer.py HOST PORT SWARM NAME MODEL FIELDS VALUES [KEY INVITATION OWNER]

FIELDS and VALUES are JSON: the model's fields, [["w", [2], "float32"]], and its flat values. With the last
three (a key's file, an invitation's file, the owner's public key) it takes part in a swarm with trust. It
needs msgpack, cryptography and paho-mqtt; docs/explanation/protocol.md explains every line.
"""

# fmt: off
import base64
import hashlib
import json
import secrets
import struct
import sys
import time
from pathlib import Path

import msgpack
import paho.mqtt.client as mqtt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

ONE = 1 << 32  # the weight of one peer
CODES = {"float32": "f", "float64": "d", "float16": "e"}

# --- messages and chunks ------------------------------------------------------------------------------

def schema_hash(fields):
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()[:16]

def encode(header, value=()):
    packed = msgpack.packb(header)
    head = struct.pack("<4sBBH", b"GSMR", 1, 0, len(packed)) + packed
    body = struct.pack(f"<{len(value)}{CODES[header['dtype']]}", *value) if value else b""
    return head + bytes(-len(head) % 8) + body

def decode(data):
    magic, version, _, length = struct.unpack_from("<4sBBH", data)
    assert (magic, version) == (b"GSMR", 1)
    header, start = msgpack.unpackb(data[8 : 8 + length]), 8 + length + -(8 + length) % 8
    code = CODES.get(header.get("dtype"))
    return header, list(struct.unpack_from(f"<{header['length']}{code}", data, start)) if code else []

def chunk(sender, message, number):  # one chunk is enough for a small model
    tag = hashlib.blake2b(sender.encode(), digest_size=8).digest()
    return struct.pack("<4sBB2x8sQIIII", b"GSMC", 2, 0, tag, number, 0, 1, len(message), 0) + message

def unchunk(packet):
    magic, version, _, _, _, index, count, _, _ = struct.unpack_from("<4sBB2x8sQIIII", packet)
    assert (magic, version, index, count) == (b"GSMC", 2, 0, 1)
    return packet[40:]

# --- trust --------------------------------------------------------------------------------------------

def b64(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

def peer_name(label, public):
    digest = hashlib.sha256(b"gossamer identity v1\0" + public).digest()
    return f"{label}@{base64.b32encode(digest).decode().lower()[:20]}"

def statement(private, context, head, body):
    content = msgpack.packb([head, body])
    signature = private.sign(b"gossamer statement v1\0" + context.encode() + b"\0" + content)
    return struct.pack("<4sB3x64s", b"GSMS", 1, signature) + content

def framed(*parts):
    data = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in data)

def derive(secret, *context):
    return HKDF(SHA256(), 32, salt=None, info=framed("gossamer v2", *context)).derive(secret)

def end(name, public):
    return name.encode() + b"\0" + public

def exchange_tag(name, public):
    return hashlib.blake2b(end(name, public), digest_size=8, person=b"gossamer-tag").digest()

def packet_cipher(private, owner, swarm, us, them, number, context):
    """us, them: name and public exchange key. context: model, sender, session, receiver, session."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(them[1]))
    pair = derive(shared, "pair", owner, swarm, *sorted([end(*us), end(*them)]))
    return AESGCM(derive(pair, "packet", swarm, *context, number >> 16))

def seal(private, owner, swarm, us, them, number, context, packet, revocations=0):
    tags = exchange_tag(*them)[:3], exchange_tag(*us)
    header = struct.pack("<4sB3s8sQQ", b"GSMX", 3, *tags, number, revocations)
    cipher = packet_cipher(private, owner, swarm, us, them, number, context)
    nonce = bytes(4) + number.to_bytes(8, "little")
    return header + cipher.encrypt(nonce, packet, header + framed(swarm, *context))

def unseal(private, owner, swarm, us, them, context, sealed):
    number, header = struct.unpack_from("<Q", sealed, 16)[0], sealed[:32]
    cipher = packet_cipher(private, owner, swarm, us, them, number, context)
    nonce = bytes(4) + number.to_bytes(8, "little")
    return cipher.decrypt(nonce, sealed[32:], header + framed(swarm, *context))

class Trust:
    """What a swarm with trust adds. A real peer also checks signatures, invitations and packet numbers."""

    def __init__(self, swarm, session, models, key, invitation, owner):
        label, secret = Path(key).read_text().strip().split(":")[1:]
        self.owner, self.swarm, self.session = b64(owner.split(":")[1]), swarm, session
        self.sent = self.number = 0
        self.private = Ed25519PrivateKey.from_private_bytes(b64(secret))
        public = self.private.public_key().public_bytes_raw()
        self.exchange, masks = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.us = peer_name(label, public), self.exchange.public_key().public_bytes_raw()
        self.start = {"version": 3, "key": public, "incarnation": secrets.token_bytes(16)}
        invited = b64(Path(invitation).read_text().strip().split(":")[1])
        self.invited = {"invitation": invited, "endorsement": b""}
        self.about = {"number": 1, "issued": time.time(), "since": time.time(), "session": session}
        self.about |= {"models": models, "exchange": self.us[1]} | self.invited
        self.about["masks"] = masks.public_key().public_bytes_raw()

    def sign(self, topic, body):  # body: of a card, or of a status
        head = self.start | (self.about if "models" in body else self.status_head(body["state"]))
        return statement(self.private, topic, head, json.dumps(body).encode())

    def status_head(self, state):  # a last will has number 0; a goodbye shows date and invitation
        self.number += state != "offline"
        head = {"number": self.number * (state != "offline"), "revocations": 0, "will": state == "offline"}
        goodbye = self.invited | {"issued": time.time()} if state == "left" else {}
        return head | {"answers": []} | goodbye

    def read(self, payload):
        head, body = msgpack.unpackb(payload[72:])
        return json.loads(body) | {key: head[key] for key in ("exchange",) if key in head}

    def seal(self, packet, model, them):
        self.sent += 1
        context = model, self.us[0], self.session, them["name"], them["session"]
        ends = self.us, (them["name"], them["exchange"])
        return seal(self.exchange, self.owner, self.swarm, *ends, self.sent, context, packet)

    def open(self, sealed, model, them):
        context = model, them["name"], them["session"], self.us[0], self.session
        ends = self.us, (them["name"], them["exchange"])
        return unseal(self.exchange, self.owner, self.swarm, *ends, context, sealed)

# --- the peer -----------------------------------------------------------------------------------------

class Peer:
    """Averages one partial model with one other peer."""

    def __init__(self, swarm, name, model, fields, value, trust):
        self.model, self.fields, self.value, self.session = model, fields, value, secrets.token_hex(8)
        self.trust = Trust(swarm, self.session, [model], *trust) if trust else None
        self.name, self.root = self.trust.us[0] if self.trust else name, f"gossamer/v1/{swarm}/peer"
        self.weight, self.sequence, self.open, self.leaving = ONE, 0, None, False
        self.them, self.verdicts = {}, {}  # card and status of the other peer; the last verdict per edge

    def publish(self, kind, body, retain=True):
        topic = f"{self.root}/{self.name}/{kind}"
        payload = self.trust.sign(topic, body) if self.trust else json.dumps(body).encode()
        return self.client.publish(topic, payload, 1, retain)

    def status(self, state, **more):
        return {"state": state, "session": self.session, "phase": "training", "reason": "", "statement": [],
                "leaving": self.leaving, "counts": {self.model: 0}, "generation": 1, "reclaimed": [],
                "hops": [0, 0]} | more

    def card(self):
        return {"session": self.session, "since": time.time(), "samples": 1, "generation": 1, "lease": 600.0,
                "models": {self.model: self.fields}, "agree": {"mode": "async", "weights": "peers"},
                "starts": {}, "former": None, "goodbyes": {}, "plan": None, "asleep": 0.0}

    def send(self, kind, value=(), **more):
        header = {"kind": kind, "schema": schema_hash(self.fields), "vector": self.model, "from": self.name,
                  "session": self.session, "to": self.them["name"], "to_session": self.them["session"]}
        packet = chunk(f"{self.name}/{self.session}", encode(header | more, value), secrets.randbits(63))
        packet = self.trust.seal(packet, self.model, self.them) if self.trust else packet
        self.client.publish(f"{self.root}/{self.them['name']}/inbox/{self.model}", packet)

    def give(self, share):  # debit first; `wait` sends the same transfer until it is acknowledged
        self.weight, self.sequence = self.weight - share, self.sequence + 1
        weight = share.to_bytes((share.bit_length() + 7) // 8, "big")
        self.open = {"seq": self.sequence, "weight": weight, "tag": None}
        self.open |= {"dtype": "float32", "length": len(self.value)}

    def receive(self, client, data, message):
        peer, kind = message.topic.removeprefix(self.root + "/").split("/")[:2]
        if kind in ("card", "status") and peer != self.name and message.payload:
            self.them |= (self.trust.read if self.trust else json.loads)(message.payload) | {"name": peer}
        elif kind == "inbox" and "models" in self.them:
            packet = message.payload
            packet = self.trust.open(packet, self.model, self.them) if self.trust else packet
            if packet[:4] == b"GSMC":  # else a control message about revocation lists
                self.handle(*decode(unchunk(packet)))

    def handle(self, header, value):
        if header["kind"] == "ack":
            if self.open and header["seq"] == self.open["seq"]:
                if header["verdict"] != "credited":
                    self.weight += int.from_bytes(self.open["weight"], "big")
                self.open = None
            return
        edge = header["from"], header["session"], self.model
        if header["seq"] > self.verdicts.get(edge, (0, ""))[0]:  # new: it is credited once, or never
            credited = header["kind"] == "give" and not self.leaving
            self.verdicts[edge] = header["seq"], "credited" if credited else "void"
            if credited:
                w, more = self.weight, int.from_bytes(header["weight"], "big")
                self.value = [(w * a + more * b) / (w + more) for a, b in zip(self.value, value, strict=True)]
                self.weight += more
        self.send("ack", seq=self.verdicts[edge][0], verdict=self.verdicts[edge][1])

    def wait(self, done):
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, "the other peer does not answer"
            self.publish("status", self.status("online"))
            if self.open and self.them.get("state") == "online":
                self.send("give", self.value, **self.open)
            time.sleep(0.2)

    def run(self, host, port):
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, f"minimal-{self.name}")
        self.client.on_message, topic = self.receive, f"{self.root}/{self.name}/status"
        will = self.status("offline")
        self.client.will_set(topic, self.trust.sign(topic, will) if self.trust else json.dumps(will), 1, True)
        self.client.connect(host, port)
        self.client.subscribe([(f"{self.root}/+/card", 1), (f"{self.root}/+/status", 1)])
        self.client.subscribe(f"{self.root}/{self.name}/inbox/+")
        self.publish("card", self.card())
        self.client.loop_start()
        self.wait(lambda: self.them.get("state") == "online" and "models" in self.them)
        self.give(self.weight // 2)
        self.wait(lambda: not self.open and self.verdicts)  # ours is credited, and we have credited one
        print(json.dumps({"value": self.value, "weight": self.weight}))
        self.leaving = True
        self.give(self.weight)  # hand everything over
        self.wait(lambda: not self.open and not self.weight)
        rows = [[*edge, *last] for edge, last in self.verdicts.items()]
        self.publish("status", self.status("left", phase="done", statement=rows)).wait_for_publish(10)
        self.client.disconnect()

if __name__ == "__main__":
    host, port, swarm, name, model, fields, values, *trust = sys.argv[1:]
    Peer(swarm, name, model, json.loads(fields), json.loads(values), trust).run(host, int(port))
