"""Seal packets: encrypt and authenticate them so that only one member of the swarm can open them. No IO.

Layout of a sealed packet (integers little-endian):

    4 bytes   magic "GSMX", then 1 byte version
    3 bytes   the first bytes of the tag of the receiver's exchange key
    8 bytes   tag of the sender's exchange key, which identifies the sender and the key (see `exchange_tag`)
    8 bytes   packet number, never used twice between two incarnations (starts of a peer's process)
    8 bytes   number of the revocation list that the sender has
    rest      the plaintext, encrypted with AES-256-GCM, and its 16-byte authentication tag

Every peer generates an X25519 key, its *exchange key*, when it starts and again every day, and publishes the
public half on its signed card. From two of these keys both peers derive a secret that nobody else has, so a
packet that decrypts under this secret can only come from the other peer.

    shared = X25519(our private exchange key, the other peer's public one); all zeros are refused
    end    = a peer's name, a zero byte, and its public exchange key
    pair   = HKDF-SHA256(shared, "pair", owner's public key, swarm, both ends, sorted)
    key    = HKDF-SHA256(pair, "packet", swarm, model, sender, session, receiver, session, number >> 16)
    nonce  = 4 zero bytes, number
    associated data = the header, then swarm, model, sender, session, receiver, session

The plaintext is one of two things: a whole chunk, header included, so that its message, index and count are
authenticated; or a control message about revocation lists. Its first four bytes tell the two apart, and they
are encrypted, so the broker cannot drop control messages selectively.

Either private key is enough to compute the secret, so a key is deleted soon after its successor is
generated: the memory of a running peer opens at most one day of recorded traffic.

AES-GCM rather than ChaCha20: on processors with AES instructions (laptops, phones, current boards) it takes
half the time.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from ..chunks import HEADER_BYTES as CHUNK_HEADER_BYTES
from ..wire import Buffer
from . import signed
from .identity import Identity, TrustError
from .members import INCARNATION_BYTES, Member, StatusHead

if TYPE_CHECKING:  # 9 MB that a peer without [trust] does not load
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC: Final = b"GSMX"
VERSION: Final = 3
HEADER: Final = struct.Struct("<4sB3s8sQQ")
OVERHEAD: Final = HEADER.size + 16
"""Bytes that encryption adds to a packet: make chunks that much smaller than the transport's limit."""
TAG_BYTES: Final = 8
TAG_PREFIX_BYTES: Final = 3
BLOCK_BITS: Final = 16
"""A packet key encrypts 2**16 packets, far below AES-GCM's limit; then the next key is derived. Packet
numbers keep rising."""

REQUEST: Final = b"GSM?"
"""The plaintext of a control message that requests a reply."""
REPLY: Final = b"GSM!"
"""The plaintext of a reply; the packet's header says which revocation list the sender has."""

FIRST_REPEAT: Final = 1.0
"""Seconds before our revocation list is sent to a peer that lacks it: the broker may be delivering it just
now. Sent again after 2, 4, … seconds, until the peer confirms that it has the list."""
LONGEST_REPEAT: Final = 30.0

WINDOW: Final = 4096
"""Size of the replay window: a packet is refused if packets with numbers this much higher came before it.
MQTT keeps the order, so this is ample."""
MAX_INCARNATIONS: Final = 16
"""Former incarnations of one peer whose last packet number is remembered."""
OVERLAP: Final = 600.0
"""Seconds for which a peer's old exchange key stays usable after a new one is published: for packets on
their way, and peers that have not received the new card. Raise it if training delays packets for longer."""
MAX_NAMES: Final = 20_000
"""The most peers that a peer can meet before it is restarted. Only invited peers count: a bound on memory."""


def check_chunk_sender(sender: str, session: str, packet: bytes) -> None:
    """Raise TrustError unless the chunk's header names the peer that encrypted it.

    Chunks are reassembled by the sender in their header: no member may insert a chunk into a message of
    another member.
    """
    sender_hash = packet[8:16] if len(packet) >= CHUNK_HEADER_BYTES else b""
    if sender_hash != hashlib.blake2b(f"{sender}/{session}".encode(), digest_size=8).digest():
        raise TrustError("impersonated", f"{sender} sealed a chunk of another peer's message")


# --- keys ---------------------------------------------------------------------------------------------


def exchange_tag(name: str, exchange: bytes) -> bytes:
    """Return 8 bytes that identify one exchange key of one peer; a receiver finds the sender by them."""
    return hashlib.blake2b(
        name.encode() + b"\0" + exchange, digest_size=TAG_BYTES, person=b"gossamer-tag"
    ).digest()


def framed(parts: Iterable[str | bytes | int]) -> bytes:
    """Concatenate parts, each preceded by its length, so that different lists never give the same bytes."""
    result = bytearray()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        result += len(data).to_bytes(4, "big") + data
    return bytes(result)


def derive(secret: bytes, *context: str | bytes | int) -> bytes:
    """Derive a 32-byte key from a secret; `context` says what the key is for."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=framed(("gossamer v2", *context))).derive(secret)


def agree(private: X25519PrivateKey, name: str, public: bytes) -> bytes:
    """Return the X25519 shared secret of our private key and the public key of peer `name`."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # of another length, or the result would be all zeros
        raise TrustError("malformed", f"the exchange key of {name} is not a usable key") from None


class ExchangeKey:
    """One of our own X25519 keys. Packets that we seal with it carry its `tag`."""

    __slots__ = ("name", "private", "public", "tag")

    def __init__(self, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.name = name
        self.private = X25519PrivateKey.generate()
        self.public = self.private.public_key().public_bytes_raw()
        self.tag = exchange_tag(name, self.public)

    @property
    def tag_prefix(self) -> bytes:
        """The 3 bytes in a packet's header that say which of our keys it was sealed for."""
        return self.tag[:TAG_PREFIX_BYTES]

    def pair_secret(self, owner: bytes, swarm: str, name: str, exchange: bytes) -> bytes:
        """Return the secret of this key and the exchange key of peer `name`, for this owner and swarm."""
        ends = sorted([self.name.encode() + b"\0" + self.public, name.encode() + b"\0" + exchange])
        return derive(agree(self.private, name, exchange), "pair", owner, swarm, *ends)


# --- channels -----------------------------------------------------------------------------------------


class ReplayWindow:
    """Remembers which packet numbers were received, so that each packet is accepted once.

    highest: the highest number received on an earlier channel, or -1; all numbers up to it count as received.
    """

    __slots__ = ("_received", "highest")

    def __init__(self, highest: int = -1) -> None:
        self.highest = highest
        self._received = 0 if highest < 0 else (1 << WINDOW) - 1
        """A bit set: bit i stands for the number `highest - i`."""

    def is_new(self, number: int) -> bool:
        """Return True if this number was not received yet; False also for numbers below the window."""
        offset = self.highest - number
        return offset < 0 or (offset < WINDOW and not self._received >> offset & 1)

    def add(self, number: int) -> None:
        """Mark a number as received, once its packet proved genuine."""
        if number > self.highest:
            shift = min(number - self.highest, WINDOW)
            self._received = (self._received << shift) & ((1 << WINDOW) - 1)
            self.highest = number
        self._received |= 1 << (self.highest - number)


@dataclass(slots=True, eq=False)
class Channel:
    """The keys and counters between our present incarnation and one incarnation of another peer.

    Make it with `Channels.open`, which continues the counters of an earlier channel between the same two.
    """

    member: Member
    """The other peer, as described by its newest card."""
    their_keys: dict[bytes, bytes]
    """The other peer's public exchange keys by their tags, oldest first: two for a while after a renewal."""
    last_number: int
    """Number of the last packet that we sealed for this incarnation of the peer. One counter for all keys, so
    that no key is ever used twice with the same nonce."""
    window: ReplayWindow
    our_tag: bytes = b""
    """The tag of our newest key that the other peer has used: we seal with that key."""
    seen_online: bool = False
    """Whether this incarnation was ever online, by its status or a genuine packet; never reset."""
    list_number: int = 0
    """The highest number of a revocation list in the other peer's statuses and genuine packets."""
    list_due: float = inf
    """When to send our revocation list to the other peer; infinite if it has the list."""
    list_wait: float = 0.0
    """Seconds between that time and the next."""
    pair_secrets: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    """Secrets by the tags of our key and the other peer's key."""
    ciphers: dict[tuple[bytes, bytes, str, bool], tuple[int, AESGCM, bytes]] = field(
        default_factory=dict
    )
    """Cached ciphers by (our tag, their tag, model, outgoing): the block of packet numbers that the cipher is
    for, the cipher, and the associated data of its packets."""

    @property
    def name(self) -> str:
        """The name of the other peer."""
        return self.member.name

    @property
    def newest_tag(self) -> bytes:
        """The tag of the other peer's newest key, for which we seal."""
        return next(reversed(self.their_keys))

    def forget(self, tag: bytes) -> None:
        """Delete an exchange key, ours or the other peer's, and everything derived from it."""
        self.their_keys.pop(tag, None)
        self.pair_secrets = {
            tags: secret for tags, secret in self.pair_secrets.items() if tag not in tags
        }
        self.ciphers = {key: cipher for key, cipher in self.ciphers.items() if tag not in key[:2]}


class FormerIncarnations:
    """The highest packet number of each former incarnation of a peer, so that no packet can be replayed."""

    __slots__ = ("_forgotten_until", "_highest")

    def __init__(self) -> None:
        self._highest: dict[bytes, tuple[float, int]] = {}
        """By incarnation: when it started, and the highest packet number received from it."""
        self._forgotten_until = -inf
        """An unknown incarnation that started no later than this may have been met and forgotten."""

    def __len__(self) -> int:
        return len(self._highest)

    def add(self, incarnation: bytes, since: float, highest: int) -> None:
        """Remember the highest packet number of an incarnation; forget the oldest beyond the limit."""
        self._highest.pop(incarnation, None)
        self._highest[incarnation] = (since, highest)
        if len(self._highest) > MAX_INCARNATIONS:
            oldest_since, _ = self._highest.pop(next(iter(self._highest)))
            self._forgotten_until = max(self._forgotten_until, oldest_since)

    def highest(self, member: Member) -> int:
        """Return the highest packet number of this incarnation, or -1 if it is new.

        TrustError if the incarnation is so old that its number may have been forgotten.
        """
        if member.incarnation in self._highest:
            return self._highest[member.incarnation][1]
        if member.since <= self._forgotten_until:
            raise TrustError(
                "stale",
                f"{member.name} started before other incarnations of it that have ended since: restart it",
            )
        return -1


class Channels:
    """Our channels to the other peers, and the packet numbers of closed channels.

    A peer that was given up may come back in the same incarnation, for instance if an attacker published
    its last will while it was running. The new channel then has the same keys as the closed one, so packet
    numbers must not start again in either direction. Our numbers continue above the highest number used on
    any closed channel. For the other direction, `FormerIncarnations` keeps the highest number received.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self.by_name: dict[str, Channel] = {}
        """The channel to each peer's present incarnation, by the peer's name."""
        self.by_tag: dict[bytes, Channel] = {}
        """The same channels, by the sender's tag in incoming packets."""
        self._former: dict[str, FormerIncarnations] = {}
        self._overlaps: dict[str, float] = {}
        """Peers with two exchange keys, and the time at which the old one is dropped."""
        self._highest_sent = 0
        """The highest packet number that we used on any closed channel."""

    def open(self, member: Member) -> Channel:
        """Open a channel to this incarnation of a member; it replaces the channel to any other incarnation.

        Raise TrustError, and change nothing, if packets from this incarnation could be replayed.
        """
        name = member.name
        known_names = self.by_name.keys() | self._former.keys()
        if name not in known_names and len(known_names) >= self._max_names:
            raise TrustError(
                "used-up",
                f"{name} is not admitted: this peer has met {self._max_names} others, its limit; restart it",
            )
        if name in self._former:
            self._former[name].highest(member)  # may raise, before anything is changed
        self.close(name)
        highest = self._former[name].highest(member) if name in self._former else -1
        tag = exchange_tag(name, member.exchange)
        window = ReplayWindow(highest)
        channel = Channel(member, {tag: member.exchange}, self._highest_sent, window)
        self.by_name[name] = self.by_tag[tag] = channel
        return channel

    def renew(self, channel: Channel, exchange: bytes, now: float) -> None:
        """Add a peer's new exchange key; its old one stays usable for `OVERLAP` seconds."""
        self._drop_old_keys(channel)
        tag = exchange_tag(channel.name, exchange)
        channel.their_keys[tag] = exchange
        self.by_tag[tag] = channel
        self._overlaps[channel.name] = now + OVERLAP

    def end_overlaps(self, now: float) -> None:
        """Drop the old exchange keys of other peers whose overlap is over."""
        for name in [name for name, until in self._overlaps.items() if now >= until]:
            del self._overlaps[name]
            self._drop_old_keys(self.by_name[name])

    def close(self, peer: str) -> None:
        """Close the channel to a peer, if there is one; its packet numbers are remembered."""
        channel = self.by_name.pop(peer, None)
        if channel is None:
            return
        self._overlaps.pop(peer, None)
        for tag in channel.their_keys:
            self.by_tag.pop(tag, None)
        self._highest_sent = max(self._highest_sent, channel.last_number)
        if channel.window.highest >= 0:
            former = self._former.setdefault(peer, FormerIncarnations())
            former.add(channel.member.incarnation, channel.member.since, channel.window.highest)

    def _drop_old_keys(self, channel: Channel) -> None:
        for tag in list(channel.their_keys)[:-1]:
            channel.forget(tag)
            del self.by_tag[tag]


# --- the keyring --------------------------------------------------------------------------------------


class Keyring:
    """The keys of one incarnation of a peer: its exchange keys, its channels to others, and its mask key.

    It also keeps track of which revocation list each peer has. Methods are thread-safe: the event loop and
    the worker thread both call them.

    owner: the public key of the swarm's owner. session: as on the peer's card. models: the partial models
    that the peer implements and is admitted to. mask_key: the private key of the session's masks, if the
    session continues after a restart; a new one is generated otherwise.
    """

    def __init__(
        self,
        identity: Identity,
        owner: bytes,
        session: str,
        swarm: str,
        models: Collection[str],
        *,
        mask_key: bytes | None = None,
        max_names: int = MAX_NAMES,
    ) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.name, self.session, self.swarm = identity.name, session, swarm
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        """A random number that identifies this start of the peer."""
        self.mask_key: bytes | None = mask_key or X25519PrivateKey.generate().private_bytes_raw()
        """The private key from which this session's masks are derived; None once the session is over."""
        mask_private = X25519PrivateKey.from_private_bytes(self.mask_key)
        self.mask_public = mask_private.public_key().public_bytes_raw()
        self.has_received = False
        """Whether any peer has sent a genuine packet to this incarnation."""
        self._owner, self._models = owner, frozenset(models)
        self._our_keys = [ExchangeKey(self.name)]
        """Our exchange keys, newest first: two for a while after a renewal."""
        self._overlap_ends = 0.0
        """When the older of two keys is deleted."""
        self._channels = Channels(max_names)
        self._signed_list, self._list_number = b"", 0
        """The newest revocation list, as the swarm's owner signed it, and its number."""
        self._reply_to: dict[str, bytes] = {}
        """Peers that await a reply, and the revocation list that each sent (empty if none)."""
        self._outbox: list[tuple[str, str, bytes]] = []
        self._lock = threading.RLock()

    # --- members --------------------------------------------------------------------------------

    def admit(self, member: Member, now: float) -> None:
        """Add a member, or update it: a new incarnation, exchange key or invitation of a known peer.

        Raise TrustError, and change nothing, if no channel to it can be opened.
        """
        with self._lock:
            for public in (member.exchange, member.masks):
                agree(self._our_keys[0].private, member.name, public)  # raises on unusable keys
            channel = self._channels.by_name.get(member.name)
            start = (member.incarnation, member.session)
            if channel is None or (channel.member.incarnation, channel.member.session) != start:
                channel = self._channels.open(member)
                channel.our_tag = self._our_keys[0].tag
                self._plan_sending_list(channel, now)
            elif exchange_tag(member.name, member.exchange) not in channel.their_keys:
                self._channels.renew(channel, member.exchange, now)
            channel.member = member

    def retire(self, peer: str) -> None:
        """Close the channel to a peer that left, was given up or revoked, or whose invitation expired."""
        with self._lock:
            self._channels.close(peer)
            self._reply_to.pop(peer, None)

    def note_status(self, peer: str, status: StatusHead, now: float, *, online: bool) -> None:
        """Note from a member's status which revocation list it has, and whether it is online."""
        with self._lock:
            channel = self._channels.by_name.get(peer)
            if channel is not None and channel.member.incarnation == status.incarnation:
                channel.seen_online |= online
                channel.list_number = max(channel.list_number, status.revocations)
                self._plan_sending_list(channel, now)

    def online_members(self) -> list[str]:
        """Return the members that were seen online and share a model with us."""
        with self._lock:
            return sorted(
                c.name
                for c in self._channels.by_name.values()
                if c.seen_online and c.member.models & self._models
            )

    def add_models(self, models: Iterable[str]) -> None:
        """Seal and open packets of these partial models too."""
        with self._lock:
            self._models |= frozenset(models)

    # --- exchange keys --------------------------------------------------------------------------

    @property
    def exchange(self) -> bytes:
        """Our newest public exchange key, for our card."""
        return self._our_keys[0].public

    def renew_exchange(self, now: float) -> None:
        """Generate the next exchange key; the caller publishes it on a new card.

        The old one is kept for `OVERLAP` seconds. Until then we still seal with it for every peer that has
        not used the new one: that peer may not have received our new card.
        """
        with self._lock:
            new = ExchangeKey(self.name)
            while new.tag_prefix == self._our_keys[0].tag_prefix:
                new = ExchangeKey(self.name)
            for old in self._our_keys[1:]:
                for channel in self._channels.by_name.values():
                    channel.forget(old.tag)
            self._our_keys = [new, self._our_keys[0]]
            self._overlap_ends = now + OVERLAP

    def _end_overlaps(self, now: float) -> None:
        """Delete the old exchange keys, ours and other peers', whose overlap is over."""
        self._channels.end_overlaps(now)
        if len(self._our_keys) > 1 and now >= self._overlap_ends:
            old = self._our_keys.pop()
            for channel in self._channels.by_name.values():
                channel.forget(old.tag)

    def mask_secret(self, peer: str) -> bytes:
        """Return the 32-byte secret that only we and `peer` can compute, for masks (see `PrivateRound`).

        It is derived from the mask keys of both peers' sessions. It survives a restart from a checkpoint, as
        the masks of an unfinished round must, but not a new session: round numbers then start again, and no
        mask may be used for two values.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        with self._lock:
            channel = self._channel(peer)
            if self.mask_key is None:
                raise TrustError("stale", "the session is over, and its mask key is deleted")
            ends = sorted([(self.name, self.session), (peer, channel.member.session)])
            private = X25519PrivateKey.from_private_bytes(self.mask_key)
            shared = agree(private, peer, channel.member.masks)
            return derive(shared, "masks", self.swarm, *(part for end in ends for part in end))

    # --- revocation lists -----------------------------------------------------------------------

    def set_list(self, number: int, data: bytes, now: float) -> None:
        """Install a newer revocation list: a member that lacks it is sent only this list from now on."""
        with self._lock:
            self._signed_list, self._list_number = data, number
            for channel in self._channels.by_name.values():
                self._plan_sending_list(channel, now)

    def send_control(self, peers: Iterable[str], plaintext: bytes) -> None:
        """Queue a control message for members: REQUEST, or REPLY."""
        with self._lock:
            for channel in filter(None, map(self._channels.by_name.get, peers)):
                self._send_control(channel, plaintext)

    def take_requests(self) -> list[tuple[str, bytes]]:
        """Return and clear the peers that await a reply, and the revocation list of each (empty if none)."""
        with self._lock:
            requests, self._reply_to = self._reply_to, {}
            return list(requests.items())

    def tick(self, now: float) -> list[tuple[str, str, bytes]]:
        """Return the control packets that are due, as (receiver, model whose inbox to use, packet)."""
        with self._lock:
            self._end_overlaps(now)
            for channel in self._channels.by_name.values():
                if channel.seen_online and now >= channel.list_due:
                    channel.list_due = now + channel.list_wait
                    channel.list_wait = min(2 * channel.list_wait, LONGEST_REPEAT)
                    self._send_control(channel, self._signed_list)
            outgoing, self._outbox = self._outbox, []
            return outgoing

    def _plan_sending_list(self, channel: Channel, now: float) -> None:
        """Plan to send our revocation list to a peer if it lacks the list; cancel the plan if not."""
        if channel.list_number >= self._list_number:
            channel.list_due = inf
        else:
            self._start_sending_list(channel, now)

    def _start_sending_list(self, channel: Channel, now: float) -> None:
        """Plan the first sending of our revocation list to a peer, unless it is planned already."""
        if channel.list_due == inf:
            channel.list_due, channel.list_wait = now + FIRST_REPEAT, 2 * FIRST_REPEAT

    def _send_control(self, channel: Channel, plaintext: bytes) -> None:
        # A control message concerns all models, so the inbox of any model of the receiver will do.
        if channel.member.models:
            model = min(channel.member.models)
            self._outbox.append((channel.name, model, self._seal(channel, model, plaintext)))

    # --- packets --------------------------------------------------------------------------------

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes:
        """Seal a chunk for a member.

        Raise TrustError if the receiver is not a member of the model, or lacks our revocation list. The
        receiver's card need not name the model: it may have ended there while a transfer was on its way.
        """
        with self._lock:
            channel = self._channel(receiver)
            if model not in self._models or not channel.member.claims.admits(model):
                raise TrustError("not-a-member", f"{model!r} is not shared with {receiver}")
            if channel.list_number < self._list_number:
                raise TrustError("behind", self._behind_message(channel, channel.list_number))
            return self._seal(channel, model, packet)

    def claimed_channel(self, model: str, sealed: Buffer) -> Channel:
        """Return the channel that a packet's header names; TrustError if there is no such channel.

        This proves nothing, but it is cheap: it takes no lock (the event loop calls it) and decrypts nothing.
        """
        if len(sealed) < OVERHEAD:
            raise TrustError("malformed", f"{len(sealed)} bytes are too few for a sealed packet")
        magic, version, _, tag, *_ = HEADER.unpack_from(sealed)
        if magic != MAGIC or version != VERSION:
            raise TrustError("malformed", "a packet that is not sealed, or of another version")
        channel = self._channels.by_tag.get(tag)
        if channel is None:
            raise TrustError("unknown-sender", "sealed by a peer whose card is not known")
        if model not in self._models:
            raise TrustError("not-a-member", f"this peer has no model {model!r}")
        return channel

    def open(self, model: str, sealed: Buffer, now: float) -> tuple[str, str, bytes] | None:
        """Open a packet that arrived in the inbox of `model`.

        Return its sender, the sender's session and the chunk, or None if it was a control message. Raise
        TrustError if the packet is not genuine, or the two peers do not have the same revocation list.
        """
        from cryptography.exceptions import InvalidTag

        with self._lock:
            channel = self.claimed_channel(model, sealed)
            _, _, tag_prefix, tag, number, list_number = HEADER.unpack_from(sealed)
            our_key = next((key for key in self._our_keys if key.tag_prefix == tag_prefix), None)
            if our_key is None:
                raise TrustError(
                    "stale", f"{channel.name} sealed for an exchange key that this peer has deleted"
                )
            if not channel.window.is_new(number):
                raise TrustError("replayed", f"packet {number} of {channel.name} came before")
            cipher, context = self._cipher(channel, our_key, tag, model, number, outgoing=False)
            try:
                body = memoryview(sealed)[HEADER.size :]
                header = bytes(sealed[: HEADER.size])
                plaintext = cipher.decrypt(_nonce(number), body, header + context)
            except InvalidTag:
                raise TrustError(
                    "forged", f"not sealed by {channel.name} for {model!r}, or changed on the way"
                ) from None
            channel.window.add(number)
            channel.seen_online = self.has_received = True
            if our_key is self._our_keys[0]:
                channel.our_tag = our_key.tag
            channel.list_number = max(channel.list_number, list_number)
            self._plan_sending_list(channel, now)
            magic = plaintext[:4]
            if magic == signed.MAGIC:
                self._reply_to[channel.name] = plaintext
            elif magic == REQUEST:
                self._reply_to.setdefault(channel.name, b"")
            if magic in (signed.MAGIC, REQUEST, REPLY):
                return None
            if not channel.member.claims.admits(model):
                raise TrustError("not-a-member", f"{model!r} is not shared with {channel.name}")
            if list_number < self._list_number:
                self._start_sending_list(channel, now)  # even if its statuses name a newer list
                raise TrustError("behind", self._behind_message(channel, list_number))
            if list_number > self._list_number:
                raise TrustError(
                    "ahead",
                    f"{channel.name} has revocation list {list_number}, this peer {self._list_number}",
                )
        check_chunk_sender(channel.name, channel.member.session, plaintext)
        return channel.name, channel.member.session, plaintext

    # --- internals ------------------------------------------------------------------------------

    def _channel(self, peer: str) -> Channel:
        channel = self._channels.by_name.get(peer)
        if channel is None:
            raise TrustError("unknown-sender", f"no admitted card of {peer} is known")
        return channel

    def _behind_message(self, channel: Channel, list_number: int) -> str:
        return (
            f"{channel.name} has revocation list {list_number}, this peer {self._list_number}: the newer "
            "list is sent to it first"
        )

    def _seal(self, channel: Channel, model: str, plaintext: bytes) -> bytes:
        channel.last_number += 1
        number, tag = channel.last_number, channel.newest_tag
        keys = self._our_keys
        our_key = next((key for key in keys if key.tag == channel.our_tag), keys[0])
        header = HEADER.pack(
            MAGIC, VERSION, tag[:TAG_PREFIX_BYTES], our_key.tag, number, self._list_number
        )
        cipher, context = self._cipher(channel, our_key, tag, model, number, outgoing=True)
        return header + cipher.encrypt(_nonce(number), plaintext, header + context)

    def _cipher(
        self,
        channel: Channel,
        our_key: ExchangeKey,
        tag: bytes,
        model: str,
        number: int,
        *,
        outgoing: bool,
    ) -> tuple[AESGCM, bytes]:
        """Return the cipher of a packet and its associated data after the header.

        tag: that of the other peer's exchange key.
        """
        cache_key, block = (our_key.tag, tag, model, outgoing), number >> BLOCK_BITS
        cached = channel.ciphers.get(cache_key)
        if cached is not None and cached[0] == block:
            return cached[1:]
        tags = (our_key.tag, tag)
        pair = channel.pair_secrets.get(tags)
        if pair is None:
            their_key = channel.their_keys[tag]
            pair = our_key.pair_secret(self._owner, self.swarm, channel.name, their_key)
            channel.pair_secrets[tags] = pair
        ours, theirs = (self.name, self.session), (channel.name, channel.member.session)
        context = (self.swarm, model, *((*ours, *theirs) if outgoing else (*theirs, *ours)))
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher = AESGCM(derive(pair, "packet", *context, block))
        channel.ciphers[cache_key] = (block, cipher, framed(context))
        return cipher, framed(context)


def _nonce(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "little")
