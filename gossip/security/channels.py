"""Packets sealed for one member and opened by nobody else. No IO.

Layout of a sealed packet (integers little-endian):

    4 bytes   magic "GSMX", then 1 byte version
    3 bytes   mark of the receiver's exchange key (the beginning of its tag)
    8 bytes   tag of the sender's exchange key (who, with which key: see `exchange_tag`)
    8 bytes   number of the packet between these two incarnations, never used twice
    8 bytes   number of the revocation list that the sender has
    rest      AES-256-GCM: the inside, and 16 bytes that prove it

Every peer draws an X25519 key when it starts and a new one every day, shown on its signed card. Two of them
make a secret that only the two peers have, so what is sealed with it names its sender: no other member can
make it.

    shared = X25519(our exchange key, theirs); all zeros are refused
    pair   = HKDF-SHA256(shared, "pair", owner's public key, swarm, both ends, sorted)     end = name 0 key
    key    = HKDF-SHA256(pair, "packet", swarm, model, sender, session, receiver, session, number >> 16)
    nonce  = 4 zero bytes, number
    associated data = the header, then swarm, model, sender, session, receiver, session

The inside is a whole chunk, header included, so its message, index and count cannot be changed or moved; or
a word about revocation lists. Its first four bytes say which: whoever carries packets cannot tell.

Whoever has one end's private key can compute the secret, so a key is deleted soon after the next one is
drawn: what a running peer holds in memory opens a day of recorded traffic at most.

AES-GCM and not ChaCha20: with AES instructions, which laptops, phones and current boards have, it takes
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
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..chunks import HEADER_BYTES as CHUNK_HEADER_BYTES
from ..wire import Buffer
from . import signed
from .identity import Identity, TrustError
from .members import INCARNATION_BYTES, Member, StatusHead

MAGIC: Final = b"GSMX"
VERSION: Final = 3
HEADER: Final = struct.Struct("<4sB3s8sQQ")
OVERHEAD: Final = HEADER.size + 16
"""Bytes that sealing adds: cut chunks that much smaller than the transport's limit."""
TAG_BYTES: Final = 8
MARK_BYTES: Final = 3
BLOCK_BITS: Final = 16
"""A key seals 2**16 packets, far below what AES-GCM bears; the numbers of a pair go on."""

ASK: Final = b"GSM?"
"""The inside of a packet that asks for an answer."""
HAVE: Final = b"GSM!"
"""The inside of an answer: its header says which revocation list the sender has."""

FIRST_REPEAT: Final = 1.0
"""Seconds after which a peer that lacks our revocation list is handed it (it may just be hearing it from the
broker), and again after 2, 4, … seconds until it says that it has it."""
LONGEST_REPEAT: Final = 30.0

WINDOW: Final = 4096
"""Packets by which one may be overtaken and still be taken in. MQTT keeps the order, so this is ample."""
MAX_INCARNATIONS: Final = 16
"""Former incarnations of one peer that are remembered one by one."""
OVERLAP: Final = 600.0
"""Seconds for which a peer's former exchange key is of use after the next one: packets under way, and
peers that have not seen its new card. Raise it if training holds up a peer's packets for longer."""
MAX_NAMES: Final = 20_000
"""Peers that one start of ours can meet. Only invited ones count, so this is a bound, not a policy."""


def check_chunk_sender(sender: str, session: str, packet: bytes) -> None:
    """Raise unless a chunk says that it comes from the peer that sealed it.

    Chunks are put together by the sender they name: a member must not be able to slip one of its own
    into another's message.
    """
    named = packet[8:16] if len(packet) >= CHUNK_HEADER_BYTES else b""
    if named != hashlib.blake2b(f"{sender}/{session}".encode(), digest_size=8).digest():
        raise TrustError("impersonated", f"{sender} sealed a chunk of somebody else's message")


# --- keys ---------------------------------------------------------------------------------------------


def exchange_tag(name: str, exchange: bytes) -> bytes:
    """8 bytes by which a receiver finds the sender of a packet: one exchange key of one peer."""
    return hashlib.blake2b(
        name.encode() + b"\0" + exchange, digest_size=TAG_BYTES, person=b"gossamer-tag"
    ).digest()


def framed(parts: Iterable[str | bytes | int]) -> bytes:
    """Parts as bytes, each with its length before it, so that no two lists look alike."""
    framed = bytearray()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        framed += len(data).to_bytes(4, "big") + data
    return bytes(framed)


def derive(secret: bytes, *context: str | bytes | int) -> bytes:
    """32 bytes from a secret and everything that they are for."""
    return HKDF(SHA256(), 32, salt=None, info=framed(("gossamer v2", *context))).derive(secret)


def agree(private: X25519PrivateKey, name: str, public: bytes) -> bytes:
    """What our private key and another peer's public one have in common."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # of another length, or the result would be all zeros
        raise TrustError("malformed", f"the exchange key of {name} is not a usable key") from None


class ExchangeKey:
    """One of our own X25519 keys. `tag` marks the packets that we seal with it."""

    __slots__ = ("name", "private", "public", "tag")

    def __init__(self, name: str) -> None:
        self.name = name
        self.private = X25519PrivateKey.generate()
        self.public = self.private.public_key().public_bytes_raw()
        self.tag = exchange_tag(name, self.public)

    @property
    def mark(self) -> bytes:
        """3 bytes by which whoever seals for us says which of our keys it used."""
        return self.tag[:MARK_BYTES]

    def pair_secret(self, owner: bytes, swarm: str, name: str, exchange: bytes) -> bytes:
        """What this key and that of peer `name` make together, in one swarm of one owner."""
        ends = sorted([self.name.encode() + b"\0" + self.public, name.encode() + b"\0" + exchange])
        return derive(agree(self.private, name, exchange), "pair", owner, swarm, *ends)


# --- channels -----------------------------------------------------------------------------------------


class Window:
    """Which numbers have been seen: each counts once, and very late ones not at all.

    top: the highest one seen before, if any was; all up to it count as seen.
    """

    __slots__ = ("_seen", "top")

    def __init__(self, top: int = -1) -> None:
        self.top = top
        self._seen = 0 if top < 0 else (1 << WINDOW) - 1

    def fresh(self, number: int) -> bool:
        """Whether this number has not been seen and is not too late to tell."""
        behind = self.top - number
        return behind < 0 or (behind < WINDOW and not self._seen >> behind & 1)

    def note(self, number: int) -> None:
        """Note a number, once its packet proved genuine."""
        if number > self.top:
            self._seen = (self._seen << min(number - self.top, WINDOW)) & ((1 << WINDOW) - 1)
            self.top = number
        self._seen |= 1 << (self.top - number)


@dataclass(slots=True, eq=False)
class Channel:
    """This incarnation of ours and one of another peer's.

    Make it with `Channels.open`, which lets it go on where another between the same incarnations has stopped.
    """

    member: Member
    """The other peer, as its newest card has it."""
    exchanges: dict[bytes, bytes]
    """The other's keys by the tag on its packets, oldest first: two for a while after a renewal."""
    number: int
    """Of the last packet: it counts everything that is sealed for this incarnation of the peer, whatever the
    key, so that no key ever meets a nonce twice."""
    window: Window
    our_tag: bytes = b""
    """The tag of our newest key that the other has used: we seal with that one."""
    present: bool = False
    """Whether this incarnation has said that it is there; it stays so, in reach or not."""
    revocations: int = 0
    """The highest number of a revocation list in its statuses and genuine packets."""
    list_due: float = inf
    """When to hand our revocation list over, and how long to wait before the next time."""
    list_wait: float = 0.0
    pairs: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    """Pair secrets by our tag and the other's."""
    ciphers: dict[tuple[bytes, bytes, str, bool], tuple[int, AESGCM, bytes]] = field(
        default_factory=dict
    )
    """The cipher in use, and what its packets are bound to, by both tags, model and whether it is ours
    to seal with; with the block of numbers that it is for."""

    @property
    def name(self) -> str:
        """The other peer."""
        return self.member.name

    @property
    def newest(self) -> bytes:
        """The tag of the other's newest key, which we seal for."""
        return next(reversed(self.exchanges))

    def forget(self, tag: bytes) -> None:
        """Forget what was made with an exchange key, ours or the other's."""
        self.exchanges.pop(tag, None)
        self.pairs = {at: pair for at, pair in self.pairs.items() if tag not in at}
        self.ciphers = {at: each for at, each in self.ciphers.items() if tag not in at[:2]}


class FormerIncarnations:
    """The former incarnations of one peer: a packet of theirs that counted once never counts again."""

    __slots__ = ("_before", "_tops")

    def __init__(self) -> None:
        self._tops: dict[bytes, tuple[float, int]] = {}
        self._before = -inf
        """Incarnations that began no later, and are not among those remembered, may be ones we forgot."""

    def __len__(self) -> int:
        return len(self._tops)

    def note(self, incarnation: bytes, since: float, top: int) -> None:
        """Remember how far an incarnation has counted."""
        self._tops.pop(incarnation, None)
        self._tops[incarnation] = (since, top)
        if len(self._tops) > MAX_INCARNATIONS:
            since, _ = self._tops.pop(next(iter(self._tops)))
            self._before = max(self._before, since)

    def top(self, member: Member) -> int:
        """How far this incarnation has counted, -1 if it is new. TrustError if that may be forgotten."""
        if member.incarnation in self._tops:
            return self._tops[member.incarnation][1]
        if member.since <= self._before:
            raise TrustError(
                "stale",
                f"an incarnation of {member.name} that began before others of it that are over: start "
                "it again",
            )
        return -1


class Channels:
    """Our channels to the others, by name and by tag, and what must not be forgotten of closed ones.

    A peer that was given up may come back in the same incarnation: somebody showed us its last will while
    it lived. Its channel then has the keys of the one before, so neither our numbers nor its own may begin
    again. Ours go on above every number of any channel that was closed: one count, whatever else is
    forgotten. Of its own the highest is remembered, for each of its last incarnations; those before are told
    by when they began.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self.by_name: dict[str, Channel] = {}
        """Every peer's, to its present incarnation."""
        self.by_tag: dict[bytes, Channel] = {}
        """By the tags on the packets that come on them."""
        self._former: dict[str, FormerIncarnations] = {}
        self._overlaps: dict[str, float] = {}
        """Peers with two exchange keys, and until when the former one is of use."""
        self._floor = 0
        """No closed channel has taken a higher number."""

    def open(self, member: Member) -> Channel:
        """A channel to this incarnation of a member, in place of any other to it.

        TrustError, and nothing changed, if its packets could count twice.
        """
        name = member.name
        met = self.by_name.keys() | self._former.keys()
        if name not in met and len(met) >= self._max_names:
            raise TrustError(
                "used-up",
                f"over {self._max_names} peers were here: {name} is not taken in; start this peer again",
            )
        if name in self._former:
            self._former[name].top(member)
        self.close(name)
        top = self._former[name].top(member) if name in self._former else -1
        tag = exchange_tag(name, member.exchange)
        channel = Channel(member, {tag: member.exchange}, self._floor, Window(top))
        self.by_name[name] = self.by_tag[channel.newest] = channel
        return channel

    def renew(self, channel: Channel, exchange: bytes, now: float) -> None:
        """Note the next exchange key of a peer; its former one is of use for a while."""
        self._drop_former(channel)
        tag = exchange_tag(channel.name, exchange)
        channel.exchanges[tag] = exchange
        self.by_tag[tag] = channel
        self._overlaps[channel.name] = now + OVERLAP

    def end_overlaps(self, now: float) -> None:
        """Forget former exchange keys of the others whose time is over."""
        for name in [name for name, until in self._overlaps.items() if now >= until]:
            del self._overlaps[name]
            self._drop_former(self.by_name[name])

    def close(self, peer: str) -> None:
        """Close the channel to a peer, if there is one; what may never come twice is kept."""
        old = self.by_name.pop(peer, None)
        if old is None:
            return
        self._overlaps.pop(peer, None)
        for tag in old.exchanges:
            self.by_tag.pop(tag, None)
        self._floor = max(self._floor, old.number)
        if old.window.top >= 0:
            former = self._former.setdefault(peer, FormerIncarnations())
            former.note(old.member.incarnation, old.member.since, old.window.top)

    def _drop_former(self, channel: Channel) -> None:
        for tag in list(channel.exchanges)[:-1]:
            channel.forget(tag)
            del self.by_tag[tag]


# --- the keyring --------------------------------------------------------------------------------------


class Keyring:
    """One start of a peer: its exchange keys, its channels, and which revocation list it and others have.

    owner: the public key of the swarm's owner. session: as on the peer's card. models: the partial models
    that it implements and is admitted to. mask_key: the private key behind the session's masks, if it goes
    on after a restart. Methods may be called from the event loop and the peer's own thread alike.
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
        self.name, self.session, self.swarm = identity.name, session, swarm
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        """Tells this start of the peer from all others."""
        self.mask_key: bytes | None = mask_key or X25519PrivateKey.generate().private_bytes_raw()
        """The private key behind this session's masks; None once the session is over."""
        mask_private = X25519PrivateKey.from_private_bytes(self.mask_key)
        self.masks = mask_private.public_key().public_bytes_raw()
        self.answered = False
        """Whether anybody has sealed a genuine packet for this start of ours."""
        self._owner, self._models = owner, frozenset(models)
        self._own = [ExchangeKey(self.name)]
        """Our exchange keys, newest first: two for a while after a renewal."""
        self._overlap_ends = 0.0
        self._channels = Channels(max_names)
        self._list, self._list_number = b"", 0
        """The newest revocation list, as its owner signed it."""
        self._asked: dict[str, bytes] = {}
        """Who waits for an answer, and the revocation list that came with the question, if one did."""
        self._outbox: list[tuple[str, str, bytes]] = []
        self._lock = threading.RLock()

    # --- members --------------------------------------------------------------------------------

    def admit(self, member: Member, now: float) -> None:
        """Note an admitted peer, a new incarnation of one, or a new exchange key or invitation of one.

        TrustError, and nothing changed, if no channel to it can be had.
        """
        with self._lock:
            for public in (member.exchange, member.masks):
                agree(self._own[0].private, member.name, public)  # or the key is of no use
            channel = self._channels.by_name.get(member.name)
            start = (member.incarnation, member.session)
            if channel is None or (channel.member.incarnation, channel.member.session) != start:
                channel = self._channels.open(member)
                channel.our_tag = self._own[0].tag
                self._plan_handing_over(channel, now)
            elif exchange_tag(member.name, member.exchange) not in channel.exchanges:
                self._channels.renew(channel, member.exchange, now)
            channel.member = member

    def retire(self, peer: str) -> None:
        """Note that a peer left, was given up, revoked or expired."""
        with self._lock:
            self._channels.close(peer)
            self._asked.pop(peer, None)

    def seen(self, peer: str, status: StatusHead, now: float, *, online: bool) -> None:
        """Note a status of a member: which revocation list it has, and whether it says that it is there."""
        with self._lock:
            channel = self._channels.by_name.get(peer)
            if channel is not None and channel.member.incarnation == status.incarnation:
                channel.present |= online
                channel.revocations = max(channel.revocations, status.revocations)
                self._plan_handing_over(channel, now)

    def present(self) -> list[str]:
        """The members that say they are there and share a model with us."""
        with self._lock:
            return sorted(
                c.name
                for c in self._channels.by_name.values()
                if c.present and c.member.models & self._models
            )

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
            for old in self._own[1:]:
                for channel in self._channels.by_name.values():
                    channel.forget(old.tag)
            self._own = [new, self._own[0]]
            self._overlap_ends = now + OVERLAP

    def _end_overlaps(self, now: float) -> None:
        """Delete former exchange keys, ours and the others', once nobody needs them."""
        self._channels.end_overlaps(now)
        if len(self._own) > 1 and now >= self._overlap_ends:
            former = self._own.pop()
            for channel in self._channels.by_name.values():
                channel.forget(former.tag)

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
                    "stale", "the session is over, and the key of its masks is deleted"
                )
            ends = sorted([(self.name, self.session), (peer, channel.member.session)])
            private = X25519PrivateKey.from_private_bytes(self.mask_key)
            shared = agree(private, peer, channel.member.masks)
            return derive(shared, "masks", self.swarm, *(part for end in ends for part in end))

    # --- revocation lists -----------------------------------------------------------------------

    def set_list(self, number: int, data: bytes, now: float) -> None:
        """Take over a newer revocation list: members that lack it are given nothing else from now on."""
        with self._lock:
            self._list, self._list_number = data, number
            for channel in self._channels.by_name.values():
                self._plan_handing_over(channel, now)

    def tell(self, peers: Iterable[str], word: bytes) -> None:
        """Say something to members: ASK for an answer, or HAVE, which says which revocation list we have."""
        with self._lock:
            for channel in filter(None, map(self._channels.by_name.get, peers)):
                self._tell(channel, word)

    def take_asked(self) -> list[tuple[str, bytes]]:
        """Who waits for an answer, each with the revocation list that it handed over, empty if none."""
        with self._lock:
            asked, self._asked = self._asked, {}
            return list(asked.items())

    def tick(self, now: float) -> list[tuple[str, str, bytes]]:
        """Packets about revocation lists that are due: (receiver, model, packet) for its inbox."""
        with self._lock:
            self._end_overlaps(now)
            for channel in self._channels.by_name.values():
                if channel.present and now >= channel.list_due:
                    channel.list_due = now + channel.list_wait
                    channel.list_wait = min(2 * channel.list_wait, LONGEST_REPEAT)
                    self._tell(channel, self._list)
            outgoing, self._outbox = self._outbox, []
            return outgoing

    def _plan_handing_over(self, channel: Channel, now: float) -> None:
        """Plan to hand our revocation list to a peer that lacks it, or stop."""
        if channel.revocations >= self._list_number:
            channel.list_due = inf
        else:
            self._begin_handing_over(channel, now)

    def _begin_handing_over(self, channel: Channel, now: float) -> None:
        if channel.list_due == inf:
            channel.list_due, channel.list_wait = now + FIRST_REPEAT, 2 * FIRST_REPEAT

    def _tell(self, channel: Channel, inside: bytes) -> None:
        # In the inbox of any model that the other has: what is said concerns all of them.
        if channel.member.models:
            model = min(channel.member.models)
            self._outbox.append((channel.name, model, self._seal(channel, model, inside)))

    # --- packets --------------------------------------------------------------------------------

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes:
        """Seal a chunk for a member. TrustError if it is none, or lacks the revocation list that we have."""
        with self._lock:
            channel = self._channel(receiver)
            if model not in channel.member.models or model not in self._models:
                raise TrustError("not-a-member", f"{model!r} is not shared with {receiver}")
            if channel.revocations < self._list_number:
                raise TrustError("behind", self._list_is_missing(channel, channel.revocations))
            return self._seal(channel, model, packet)

    def claimed(self, model: str, sealed: Buffer) -> Channel:
        """The channel on which a packet says that it comes; TrustError if that cannot be.

        Nothing is proved by it, but it is cheap: no lock (an event loop may ask) and no cipher.
        """
        if len(sealed) < OVERHEAD:
            raise TrustError("malformed", f"{len(sealed)} bytes are too few for a sealed packet")
        magic, version, _, tag, *_ = HEADER.unpack_from(sealed)
        if magic != MAGIC or version != VERSION:
            raise TrustError("malformed", "a packet that is not sealed, or of another version")
        channel = self._channels.by_tag.get(tag)
        if channel is None:
            raise TrustError("unknown-sender", "sealed by nobody whose card is known")
        if model not in self._models:
            raise TrustError("not-a-member", f"{model!r} is not a model of ours")
        return channel

    def open(self, model: str, sealed: Buffer, now: float) -> tuple[str, str, bytes] | None:
        """Open a packet that arrived in the inbox of `model`: its sender, the sender's session and the chunk
        inside; None if it was about revocation lists.

        TrustError says why a packet is not genuine, or not handed on.
        """
        with self._lock:
            channel = self.claimed(model, sealed)
            _, _, mark, tag, number, listed = HEADER.unpack_from(sealed)
            own = next((key for key in self._own if key.mark == mark), None)
            if own is None:
                raise TrustError(
                    "stale", f"{channel.name} sealed for an exchange key of ours that is out of use"
                )
            if not channel.window.fresh(number):
                raise TrustError("replayed", f"packet {number} of {channel.name} came before")
            cipher, place = self._cipher(channel, own, tag, model, number, outgoing=False)
            try:
                body = memoryview(sealed)[HEADER.size :]
                header = bytes(sealed[: HEADER.size])
                inside = cipher.decrypt(_nonce(number), body, header + place)
            except InvalidTag:
                raise TrustError(
                    "forged", f"not sealed by {channel.name} for {model!r}, or changed on the way"
                ) from None
            channel.window.note(number)
            channel.present = self.answered = True
            if own is self._own[0]:
                channel.our_tag = own.tag
            channel.revocations = max(channel.revocations, listed)
            self._plan_handing_over(channel, now)
            kind = inside[:4]
            if kind == signed.MAGIC:
                self._asked[channel.name] = inside
            elif kind == ASK:
                self._asked.setdefault(channel.name, b"")
            if kind in (signed.MAGIC, ASK, HAVE):
                return None
            if model not in channel.member.models:
                raise TrustError("not-a-member", f"{model!r} is not shared with {channel.name}")
            if listed < self._list_number:
                self._begin_handing_over(channel, now)  # though it may have said otherwise
                raise TrustError("behind", self._list_is_missing(channel, listed))
            if listed > self._list_number:
                raise TrustError(
                    "ahead",
                    f"{channel.name} has revocation list {listed}; {self._list_number} is known",
                )
        check_chunk_sender(channel.name, channel.member.session, inside)
        return channel.name, channel.member.session, inside

    # --- insides --------------------------------------------------------------------------------

    def _channel(self, peer: str) -> Channel:
        channel = self._channels.by_name.get(peer)
        if channel is None:
            raise TrustError("unknown-sender", f"no admitted card of {peer} is known")
        return channel

    def _list_is_missing(self, channel: Channel, listed: int) -> str:
        return (
            f"{channel.name} has revocation list {listed}, and {self._list_number} is known: it is handed "
            "over first"
        )

    def _seal(self, channel: Channel, model: str, inside: bytes) -> bytes:
        channel.number += 1
        number = channel.number
        own = next((key for key in self._own if key.tag == channel.our_tag), self._own[0])
        theirs = channel.newest
        header = HEADER.pack(
            MAGIC, VERSION, theirs[:MARK_BYTES], own.tag, number, self._list_number
        )
        cipher, place = self._cipher(channel, own, theirs, model, number, outgoing=True)
        return header + cipher.encrypt(_nonce(number), inside, header + place)

    def _cipher(
        self,
        channel: Channel,
        own: ExchangeKey,
        tag: bytes,
        model: str,
        number: int,
        *,
        outgoing: bool,
    ) -> tuple[AESGCM, bytes]:
        """The cipher of a packet, and what the packet is bound to. tag: of the other's exchange key."""
        at, block = (own.tag, tag, model, outgoing), number >> BLOCK_BITS
        known = channel.ciphers.get(at)
        if known is not None and known[0] == block:
            return known[1:]
        pair = channel.pairs.get(at[:2])
        if pair is None:
            exchange = channel.exchanges[tag]
            pair = own.pair_secret(self._owner, self.swarm, channel.name, exchange)
            channel.pairs[at[:2]] = pair
        ours, theirs = (self.name, self.session), (channel.name, channel.member.session)
        place = (self.swarm, model, *((*ours, *theirs) if outgoing else (*theirs, *ours)))
        found = AESGCM(derive(pair, "packet", *place, block)), framed(place)
        channel.ciphers[at] = (block, *found)
        return found


def _nonce(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "little")
