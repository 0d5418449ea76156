"""Packets sealed for one member of one partial model's group, and opened by nobody else.

Layout of a sealed packet (integers little-endian):

    4 bytes   magic "GSMX", then 1 byte version
    3 bytes   mark of the receiver's exchange key (the beginning of its tag)
    8 bytes   tag of the sender's exchange key (who, with which key: see `exchange_tag`)
    8 bytes   number of the packet between these two starts of peers, never used twice
    8 bytes   epoch of the partial model's key; 0 in messages about keys themselves
    8 bytes   tag of the epoch's keeper
    rest      AES-256-GCM: the packet, and 16 bytes that prove it

The key is derived from the secret of the two peers and from the group's key together, for this sender,
receiver, both sessions, model and epoch: an outsider lacks both, another member lacks the first, a peer
of another group the second. Everything named here is also associated data. The packet inside is a whole
chunk, header included, so its message, index and count cannot be changed or moved either.

AES-GCM and not ChaCha20: with AES instructions, which laptops, phones and current boards have, it takes
half the time.
"""

from __future__ import annotations

import secrets
import struct
import threading
from typing import Any, Final

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..wire import Buffer
from .channel import (
    MARK_BYTES,
    Channel,
    ExchangeKey,
    agree,
    derive,
    exchange_tag,
    framed,
    packet_key,
)
from .channels import OVERLAP, Channels
from .epochs import Epoch, ModelKey
from .errors import TrustError
from .identity import Identity
from .opened import Opened, check_inside
from .register import INCARNATION_BYTES, Member

MAGIC: Final = b"GSMX"
VERSION: Final = 2
_HEADER = struct.Struct("<4sB3s8sQQ8s")
OVERHEAD: Final = _HEADER.size + 16
"""Bytes that sealing adds: cut chunks that much smaller than the transport's limit."""
_NO_KEEPER: Final = bytes(8)
_NO_EPOCH: Final = Epoch(0, "")


class Keyring:
    """One start of a peer: its exchange keys, its channels and the keys of its partial models.

    session, since: as on the peer's card. models: the partial models that it implements and is
    admitted to. mask_key: the private key behind the session's masks, if it goes on after a restart.
    Methods may be called from the event loop and the peer's own thread alike.
    """

    def __init__(
        self,
        identity: Identity,
        session: str,
        since: float,
        swarm: str,
        models: frozenset[str],
        *,
        mask_key: bytes | None = None,
    ) -> None:
        name = identity.name
        self.name, self.session, self.swarm = name, session, swarm
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        """Tells this start of the peer from all others."""
        self.mask_key: bytes | None = mask_key or X25519PrivateKey.generate().private_bytes_raw()
        """The private key behind this session's masks; None once the session is over."""
        self.masks = _public(self.mask_key)
        self._own = [ExchangeKey(name)]
        """Our exchange keys, newest first: two for a while after a renewal."""
        self._overlap_ends = 0.0
        self._models = {model: ModelKey(model, name, since) for model in sorted(models)}
        self._channels = Channels()
        self._member_models: dict[str, frozenset[str]] = {}
        self._present: set[str] = set()
        """Members whose present incarnation has said that it is there."""
        self.answered = False
        """Whether anybody has sealed a genuine packet for this start of ours."""
        self._member_masks: dict[str, bytes] = {}
        self._ciphers: dict[tuple[Any, ...], tuple[AESGCM, bytes]] = {}
        self._outbox: list[tuple[str, str, bytes]] = []
        self._lock = threading.RLock()

    # --- members --------------------------------------------------------------------------------

    def admit(self, member: Member, now: float) -> None:
        """Note an admitted peer, a new incarnation of one, or a new exchange key or papers of one.

        TrustError, and nothing changed, if no channel to it can be had.
        """
        with self._lock:
            for public in (member.exchange, member.masks):
                agree(self._own[0].private, member.name, public)  # or the key is of no use
            known = self._channels.get(member.name)
            new = known is None or (known.incarnation, known.session) != (
                member.incarnation,
                member.session,
            )
            if known is None or new:
                self._channels.open(member).knows = self._own[0].tag
                self._forget_ciphers(member.name)
                self._present.discard(member.name)
            elif exchange_tag(member.name, member.exchange) not in known.exchanges:
                self._channels.renew(known, member.exchange, now)
            self._member_masks[member.name] = member.masks
            before = self._member_models.get(member.name, frozenset())
            self._member_models[member.name] = member.models
            for model, key in self._models.items():
                if model in member.models and (new or model not in before):
                    key.join(member.name, member.since, now)
                    if member.name in self._present:
                        key.seen(member.name)
                elif model in before and model not in member.models:
                    key.leave(member.name, now)

    def retire(self, peer: str, now: float) -> None:
        """Note that a peer left, was given up, revoked or expired: keys it knew are replaced."""
        with self._lock:
            self._channels.close(peer)
            self._forget_ciphers(peer)
            self._present.discard(peer)
            self._member_masks.pop(peer, None)
            for model in self._member_models.pop(peer, frozenset()) & self._models.keys():
                self._models[model].leave(peer, now)

    def seen(self, peer: str) -> None:
        """Note that a peer says it is there; from now on it may be the keeper of keys."""
        with self._lock:
            self._present.add(peer)
            for model in self._member_models.get(peer, frozenset()) & self._models.keys():
                self._models[model].seen(peer)

    def present(self) -> list[str]:
        """The members that say they are there and share a model with us."""
        with self._lock:
            return sorted({name for key in self._models.values() for name in key.present})

    def _forget_ciphers(self, peer: str) -> None:
        self._ciphers = {at: c for at, c in self._ciphers.items() if at[0] != peer}

    # --- exchange keys --------------------------------------------------------------------------

    @property
    def exchange(self) -> bytes:
        """Our newest exchange key, for our card."""
        return self._own[0].public

    def renew_exchange(self, now: float) -> None:
        """Draw the next exchange key; show it on a new card.

        The former one is kept for `OVERLAP` seconds. Until then we seal with it for every peer that has not
        used the new one yet: it may not have seen our card.
        """
        with self._lock:
            new = ExchangeKey(self.name)
            while new.mark == self._own[0].mark:
                new = ExchangeKey(self.name)
            self._own = [new, self._own[0]]
            self._overlap_ends = now + OVERLAP

    def _end_overlaps(self, now: float) -> None:
        """Delete former exchange keys, ours and the others', once nobody needs them."""
        if len(self._own) > 1 and now >= self._overlap_ends:
            del self._own[1:]
            self._ciphers.clear()
        for peer in self._channels.end_overlaps(now):
            self._forget_ciphers(peer)

    def epoch(self, model: str) -> Epoch | None:
        """The epoch of a partial model's key, once there is one."""
        with self._lock:
            return self._models[model].current if model in self._models else None

    def mask_secret(self, peer: str) -> bytes:
        """32 bytes that this peer and that one alone can compute, for masks (see `PrivateRound`).

        It comes from keys that both drew for their sessions. It survives a restart from a checkpoint, which
        the masks of a round under way must do, but no new session: rounds are then counted anew, and no
        mask may be used for two values.
        """
        with self._lock:
            channel = self._channel(peer)
            if self.mask_key is None:
                raise TrustError(
                    "no-key", "the session is over, and the key of its masks is deleted"
                )
            ends = sorted([(self.name, self.session), (peer, channel.session)])
            private = X25519PrivateKey.from_private_bytes(self.mask_key)
            shared = agree(private, peer, self._member_masks[peer])
            return derive(shared, "masks", self.swarm, *(part for end in ends for part in end))

    # --- packets --------------------------------------------------------------------------------

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes:
        """Seal a chunk for a member. TrustError if it is none, or if the key is not here yet.

        Without the key nothing can be sent; the ledger repeats the message, and by then it is.
        """
        with self._lock:
            channel = self._channel(receiver)
            if model not in self._member_models.get(receiver, ()):
                raise TrustError("not-a-member", f"{model!r} is not shared with {receiver}")
            epoch = self._models[model].current if model in self._models else None
            if epoch is None:
                raise TrustError("no-key", f"the key of {model!r} has not arrived yet")
            return self._seal(channel, model, epoch, packet)

    def can_seal(self, receiver: str, model: str) -> bool:
        """Whether `seal` would work now: the receiver's card and the model's key are here."""
        with self._lock:
            key = self._models.get(model)
            shared = model in self._member_models.get(receiver, ())
            return shared and key is not None and key.current is not None

    def epochs(self) -> int:
        """How many keys there have been so far: it changes when one more arrives."""
        with self._lock:
            return sum(key.adopted for key in self._models.values())

    def claimed(self, model: str, sealed: Buffer) -> Channel:
        """The channel on which a packet says that it comes; TrustError if that cannot be.

        Nothing is proved by it, but it is cheap: no lock (an event loop may ask) and no cipher.
        """
        if len(sealed) < OVERHEAD:
            raise TrustError("malformed", f"{len(sealed)} bytes are too few for a sealed packet")
        magic, version, _, tag, *_ = _HEADER.unpack_from(sealed)
        if magic != MAGIC or version != VERSION:
            raise TrustError("malformed", "a packet that is not sealed, or of another version")
        channel = self._channels.tagged(tag)
        if channel is None:
            raise TrustError("unknown-sender", "sealed by nobody whose card is known")
        if model not in self._member_models.get(channel.name, ()) or model not in self._models:
            raise TrustError("not-a-member", f"{model!r} is not shared with {channel.name}")
        return channel

    def open(self, model: str, sealed: Buffer, now: float) -> Opened | None:
        """Open a packet that arrived in the inbox of `model`; None if it was about keys.

        TrustError says why a packet is not genuine; nothing is changed by it then.
        """
        with self._lock:
            channel = self.claimed(model, sealed)
            _, _, mark, tag, number, epoch_number, keeper = _HEADER.unpack_from(sealed)
            epoch = self._epoch(model, epoch_number, keeper)
            own = next((key for key in self._own if key.mark == mark), None)
            if own is None:
                raise TrustError(
                    "stale", f"{channel.name} sealed for an exchange key of ours that is out of use"
                )
            if not channel.window.fresh(number):
                raise TrustError("replayed", f"packet {number} of {channel.name} came before")
            cipher, place = self._cipher(channel, (own, tag), model, epoch, outgoing=False)
            nonce = bytes(4) + number.to_bytes(8, "little")
            try:
                body = memoryview(sealed)[_HEADER.size :]
                inside = cipher.decrypt(nonce, body, bytes(sealed[: _HEADER.size]) + place)
            except InvalidTag:
                raise TrustError(
                    "forged", f"not sealed by {channel.name} for {model!r}, or changed on the way"
                ) from None
            channel.window.note(number)
            self.answered = True
            if own is self._own[0]:
                channel.knows = own.tag
            if epoch is _NO_EPOCH:
                self._hear_keys(channel, model, inside, now)
                return None
        check_inside(channel.name, channel.session, inside)
        return Opened(channel.name, channel.session, inside)

    def tick(self, now: float) -> list[tuple[str, str, bytes]]:
        """Messages about keys that are due: (receiver, model, packet) for the receiver's inbox."""
        with self._lock:
            self._end_overlaps(now)
            for model, key in self._models.items():
                key.pass_over(now)
                for member, message in key.due(now):
                    self._tell(member, model, message)
            outgoing, self._outbox = self._outbox, []
            return outgoing

    # --- insides --------------------------------------------------------------------------------

    def _channel(self, peer: str) -> Channel:
        channel = self._channels.get(peer)
        if channel is None:
            raise TrustError("unknown-sender", f"no admitted card of {peer} is known")
        return channel

    def _epoch(self, model: str, number: int, keeper: bytes) -> Epoch:
        if number == 0 and keeper == _NO_KEEPER:
            return _NO_EPOCH
        for epoch in self._models[model].keys:
            if epoch.number == number and _keeper_tag(epoch) == keeper:
                return epoch
        raise TrustError("no-key", f"epoch {number} of {model!r} is not known here, or too old")

    def _cipher(
        self,
        channel: Channel,
        keys: tuple[ExchangeKey, bytes],
        model: str,
        epoch: Epoch,
        *,
        outgoing: bool,
    ) -> tuple[AESGCM, bytes]:
        """The cipher of one direction, model and epoch, and what its packets are bound to.

        keys: our exchange key, and the tag of the other's.
        """
        own, tag = keys
        at = (channel.name, own.tag, tag, model, epoch, outgoing)
        found = self._ciphers.get(at)
        if found is None:
            ours, theirs = (self.name, self.session), (channel.name, channel.session)
            ends = (*ours, *theirs) if outgoing else (*theirs, *ours)
            place = framed((self.swarm, model, epoch.number, epoch.keeper, *ends))
            model_key = b"" if epoch is _NO_EPOCH else self._models[model].keys[epoch]
            exchange = channel.exchanges[tag]
            key = packet_key(self.swarm, own, channel.name, exchange, model_key, place)
            found = AESGCM(key), place
            if len(self._ciphers) >= 8 * (len(self._channels) + 1) * (len(self._models) + 1):
                self._ciphers.clear()  # epochs long past; they are derived again if needed
            self._ciphers[at] = found
        return found

    def _seal(self, channel: Channel, model: str, epoch: Epoch, packet: bytes) -> bytes:
        number = channel.take_number()
        keeper = _NO_KEEPER if epoch is _NO_EPOCH else _keeper_tag(epoch)
        own = next((key for key in self._own if key.tag == channel.knows), self._own[0])
        theirs = channel.newest
        mark = theirs[:MARK_BYTES]
        header = _HEADER.pack(MAGIC, VERSION, mark, own.tag, number, epoch.number, keeper)
        cipher, place = self._cipher(channel, (own, theirs), model, epoch, outgoing=True)
        nonce = bytes(4) + number.to_bytes(8, "little")
        return header + cipher.encrypt(nonce, packet, header + place)

    def _tell(self, member: str, model: str, message: dict[str, Any]) -> None:
        channel = self._channels.get(member)
        if channel is not None:
            packed = bytes(msgpack.packb(message) or b"")
            self._outbox.append((member, model, self._seal(channel, model, _NO_EPOCH, packed)))

    def _hear_keys(self, channel: Channel, model: str, inside: bytes, now: float) -> None:
        try:
            message = msgpack.unpackb(inside, max_map_len=8, max_array_len=0, max_ext_len=0)
            if not isinstance(message, dict):
                raise ValueError("not a map")
            answers = self._models[model].hear(channel.name, message, now)
        except Exception as error:  # msgpack raises half a dozen unrelated types on bad input
            raise TrustError(
                "malformed", f"a key message of {channel.name}: {error!s:.100}"
            ) from None
        for answer in answers:
            self._tell(channel.name, model, answer)


def _keeper_tag(epoch: Epoch) -> bytes:
    return exchange_tag(epoch.keeper, b"keeper")


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
