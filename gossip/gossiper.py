"""The gossip core of one peer: feed it messages and ticks, it returns messages to send.

It does no input or output, reads no clock and draws no randomness that was not handed in. A driver
runs this loop:

    for message in received: gossiper.handle(message, now)
    gossiper.tick(now)
    outgoing = gossiper.poll()
    save(gossiper.snapshot())        # if the peer is to survive a crash: before sending, atomically
    send(outgoing)

Saving before sending is what makes crashes harmless: a restored peer may have forgotten a debit or a
credit only if nobody was ever told of it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compress import Links, Packed, PackError
from .ledger import Delays, Edge, Ledger, Patience, Transfer
from .messages import Ack, Give, Message, Recall, Tag, Verdict
from .modes import ManualMode, Mode
from .neighbours import Neighbours
from .pushsum import Array
from .store import Store
from .vault import Vault

SNAPSHOT_VERSION = 1


def new_session() -> str:
    """Draw the name of a new session: unique for ever, whatever seed the peer was given."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Account:
    """The weight of one vector at one peer: held, in open transfers, and injected so far."""

    held: int
    open: int
    injected: int


class Gossiper:
    """Averages the vectors of a store with its neighbours.

    peer: this peer's name.
    session: `new_session()` for a new peer. A session must never be used again after its state was
        lost: a peer that starts afresh takes a new one.
    store: the vectors. Give them weight with `inject` before they count.
    mode: when and to whom to push; by default only when the driver says so.
    seed: an int or a numpy Generator.
    patience: when to repeat and recall transfers.
    lossy: what a receiver will read of a value that is sent, if the wire changes it: called as
        lossy(vector, value). What is lost then stays in this peer.
    links: compresses what is sent and unpacks what arrives; by default sends plain values. Its
        references are not part of a snapshot: a restored peer begins with none.

    `counters` counts what happened, by cause; nothing that arrives in a message ever raises.
    """

    def __init__(
        self,
        peer: str,
        session: str,
        store: Store,
        *,
        mode: Mode | None = None,
        seed: int | np.random.Generator = 0,
        patience: Patience | None = None,
        lossy: Callable[[str, Array], Array] | None = None,
        links: Links | None = None,
    ) -> None:
        self.mode: Mode = mode if mode is not None else ManualMode()
        self.rng = np.random.default_rng(seed)
        self.ledger = Ledger(peer, session)
        self.counters: Counter[str] = Counter()
        self.leaving = False
        self.closed = False
        self._vault = Vault(store)
        self._neighbours = Neighbours()
        self._delays = Delays(patience or Patience())
        self._lossy = lossy
        self.links = links if links is not None else Links()
        self._held: dict[Edge, Give] = {}
        self._outbox: list[Message] = []

    @property
    def peer(self) -> str:
        """This peer's name."""
        return self.ledger.peer

    @property
    def session(self) -> str:
        """The name of this life of the peer's books."""
        return self.ledger.session

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of all vectors, sorted."""
        return self._vault.vectors

    # --- mass -----------------------------------------------------------------------------------

    def weight(self, vector: str) -> int:
        """Return the weight held for a vector, without open transfers."""
        return self._vault.weights[self._known(vector)]

    def value(self, vector: str) -> Array:
        """Return the value of a vector, not to be changed."""
        return self._vault.store.read(self._known(vector))

    def account(self, vector: str) -> Account:
        """Return where the weight of a vector is, as this peer's books have it."""
        in_transfers = (t.give.weight for t in self.ledger.open.values() if t.give.vector == vector)
        return Account(self.weight(vector), sum(in_transfers), self._vault.injected[vector])

    def inject(self, vector: str, weight: int, *, after_hearing: bool = False) -> None:
        """Add this peer's own weight at its current value: ONE, or ONE · samples.

        A peer whose start counts injects at once. A newcomer to a running swarm injects
        `after_hearing`: it takes over the first mass it is given and adds its weight at that value.
        """
        self._vault.inject(self._known(vector), weight, after_hearing=after_hearing)

    def push(
        self,
        vector: str,
        shares: Mapping[str, int],
        now: float,
        tag: Tag | None = None,
        *,
        plain: bool = False,
        whole: bool = False,
    ) -> bool:
        """Give `shares` (neighbour: weight units) of a vector away, in one split of one value.

        Returns False, and counts it, if the own value is not finite. A neighbour that is unknown or
        busy, or shares beyond the held weight, are the caller's mistake: ValueError.

        plain: compress nothing, so that nothing stays behind: for a peer that is about to leave.
        whole: give these very shares, also where a compressor lets little of the value through; else
            they shrink with it, which keeps values from growing.
        """
        free = self.free_neighbours(self._known(vector), online_only=False)
        for peer, share in shares.items():
            if peer not in free:
                raise ValueError(
                    f"push {vector!r} to {peer!r}: not a neighbour for it, or a transfer is open"
                )
            if share < 1:
                raise ValueError(f"push {vector!r} to {peer!r}: share {share} must be at least 1")
        taken = self._take(vector, shares, plain, whole)
        if taken is None:
            self.counters["own-value-not-finite"] += 1
            return False
        for peer, (value, packed, share) in taken.items():
            session = self._session_of(peer)
            self.ledger.debit(vector, peer, session, share, value, now, tag, packed)
            self._outbox.append(self.ledger.open[peer, vector].give)
        self.counters["push"] += len(shares)
        return True

    def recall(self, peer: str, vector: str, now: float) -> None:
        """Ask for the mass of an open transfer back; it is absorbed if the answer is "void"."""
        if (peer, vector) not in self.ledger.open:
            raise ValueError(f"recall {vector!r} from {peer!r}: no transfer is open")
        self.counters["recall"] += 1
        self._send(self.ledger.update((peer, vector), recalling=True, sent=now, attempts=2))

    def hand_over(self, now: float) -> None:
        """Begin to leave: refuse whatever comes, and give all weight to neighbours from now on.

        Keep ticking until `drained()`, then publish `statement()` for the neighbours' `peer_gone`.
        """
        self.leaving = True
        for vector in self.vectors:
            self.release(vector)
        self._hand_over_free(now)

    def drained(self) -> bool:
        """Whether no mass is held or open: a leaver may go."""
        return not self.ledger.open and not any(self._vault.weights.values())

    def close(self) -> None:
        """Credit and push nothing from now on: what this peer holds is what it goes home with."""
        self.closed = True

    def statement(self) -> list[list[Any]]:
        """Return what became of the last transfer from each sender, as plain rows.

        Call `close` first, or it may be out of date when it is read. A leaver publishes it with its
        goodbye, so that a giver whose acknowledgement was lost can tell whether to take its mass
        back: see `peer_gone`.
        """
        return [list(line) for line in self.ledger.lines()]

    # --- neighbours -----------------------------------------------------------------------------

    def peer_online(self, peer: str, session: str, vectors: Iterable[str]) -> bool:
        """Note that a neighbour is online; `vectors` are those that may be pushed to it.

        A session other than the one known means that the old one is gone for good. Returns False,
        and changes nothing, if this session was already declared gone: it cannot come back.
        """
        if (peer, session) in self._neighbours.gone:
            self.counters["gone-session-online"] += 1
            return False
        known = self._neighbours.get(peer)
        if known is not None and known.session != session:
            self.peer_gone(peer, known.session)
        for edge, transfer in list(self.ledger.open.items()):
            addressed = transfer.give.receiver_session
            if edge[0] == peer and addressed != session:  # opened before a restart of our own
                self.peer_gone(peer, addressed)
            elif edge[0] == peer and not self._neighbours.reachable(peer):
                self.ledger.update(edge, sent=-np.inf)
        self._neighbours.online(peer, session, set(vectors).intersection(self.vectors))
        return True

    def peer_offline(self, peer: str) -> None:
        """Note that a neighbour cannot be reached for now: push and repeat nothing to it."""
        self._neighbours.offline(peer)

    def peer_gone(
        self, peer: str, session: str, statement: Iterable[Iterable[Any]] | None = None
    ) -> None:
        """Note that a session is gone for good, and take back the mass on its way to it.

        With the leaver's `statement`, exactly what it did not credit is taken back. Without one (it
        died) everything open is: what it had credited died with it. Say so only when sure: a peer
        that comes back after all with what it credited would count that mass twice.
        """
        mine = [self.peer, self.session]
        rows = [list(row) for row in statement or ()]
        settled = {row[2]: row[3:] for row in rows if len(row) == 5 and row[:2] == mine}
        for edge, transfer in list(self.ledger.open.items()):
            give = transfer.give
            if edge[0] == peer and give.receiver_session == session:
                self.ledger.close(edge)
                if settled.get(give.vector) == [give.sequence, "credited"]:
                    self.counters["settled-by-statement"] += 1
                else:
                    self.counters["taken-back"] += 1
                    self._take_back(give)
        self._neighbours.retire(peer, session)
        self.links.lost(peer)
        self.mode.gone(peer)

    def known_sessions(self) -> dict[str, str]:
        """Return the session that each known neighbour, online or not, is in."""
        return self._neighbours.sessions()

    def neighbours(self, vector: str) -> list[str]:
        """Return the neighbours, online or not, that a vector may be pushed to, sorted by name."""
        return self._neighbours.sharing(vector)

    def reachable_neighbours(self, vector: str) -> list[str]:
        """Return the neighbours that a vector may be pushed to and that are online now."""
        sharing = self._neighbours.sharing(vector)
        return [peer for peer in sharing if self._neighbours.reachable(peer)]

    def free_neighbours(self, vector: str, *, online_only: bool = True) -> list[str]:
        """Return the neighbours to which no transfer of this vector is open."""
        return [
            peer
            for peer in self._neighbours.sharing(vector)
            if (peer, vector) not in self.ledger.open
            and (self._neighbours.reachable(peer) or not online_only)
        ]

    def in_flight(self, vector: str) -> int:
        """Return how many transfers of a vector are on their way to neighbours that should answer.

        Those to unreachable neighbours, and those old enough to be asked back, do not count.
        """
        return sum(
            open_vector == vector and not transfer.recalling and self._neighbours.reachable(peer)
            for (peer, open_vector), transfer in self.ledger.open.items()
        )

    def stranded(self) -> int:
        """Return how many transfers are open to neighbours that cannot be reached for now."""
        return sum(not self._neighbours.reachable(peer) for peer, _ in self.ledger.open)

    # --- messages and time ----------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> None:
        """Take in a message. Whatever is wrong with it is counted by cause and never raised."""
        if message.receiver != self.peer:
            self.counters["misaddressed"] += 1
        elif isinstance(message, Ack):
            self._handle_ack(message, now)
        else:
            self._receive(message)

    def unpacked(self, give: Give) -> Give | str:
        """Return a transfer that has just arrived with its value, or the cause why that cannot be had.

        For drivers that want to see a compressed value; `handle` does this by itself, and refuses what
        cannot be unpacked, so that its sender takes its mass back.
        """
        if give.packed is None or give.value.size or give.vector not in self._vault.weights:
            return give
        try:
            ours = self.ledger.open.get((give.sender, give.vector))
            size = self._vault.size(give.vector)
            value = self.links.unpack(give, size, None if ours is None else ours.give)
        except PackError as error:
            return error.cause
        return dataclasses.replace(give, value=value)

    def tick(self, now: float) -> None:
        """Let time pass: repeat or recall what is unanswered, hand over, or let the mode push."""
        for edge, transfer in list(self.ledger.open.items()):
            self._nudge(edge, transfer, now)
        if self.closed:
            return
        if self.leaving:
            self._hand_over_free(now)
        else:
            self.mode.step(self, now)

    def poll(self) -> list[Message]:
        """Return the messages to send and forget them. Save a snapshot first to survive crashes."""
        outgoing, self._outbox = self._outbox, []
        return outgoing

    def release(self, vector: str) -> None:
        """Offer the held transfers of a vector again: modes call it when their turn has come."""
        for edge in [e for e in self._held if e[1] == vector]:
            self._receive(self._held.pop(edge))

    # --- snapshots ------------------------------------------------------------------------------

    def snapshot(self, *, values: bool = True) -> dict[str, Any]:
        """Return the whole state as plain data: dicts, lists, ints, strings and arrays.

        values=False leaves the vectors out, for a driver that saves the store in the same
        checkpoint; both must be of the same moment. Held transfers are left out: they will be heard
        again. Neighbours are kept, as offline, so that a round goes on with those it began with.
        """
        return {
            "version": SNAPSHOT_VERSION,
            "vault": self._vault.snapshot(values=values),
            "ledger": self.ledger.snapshot(),
            "gone": sorted([peer, session] for peer, session in self._neighbours.gone),
            "neighbours": self._neighbours.snapshot(),
            "leaving": self.leaving,
            "counters": dict(self.counters),
            "mode": self.mode.snapshot(),
        }

    @classmethod
    def restore(
        cls,
        snapshot: dict[str, Any],
        store: Store,
        *,
        mode: Mode | None = None,
        seed: int | np.random.Generator = 0,
        patience: Patience | None = None,
        lossy: Callable[[str, Array], Array] | None = None,
        links: Links | None = None,
    ) -> Gossiper:
        """Continue from a snapshot, in the same session; open transfers are sent again.

        `mode` is a new one made with the same settings; its state comes from the snapshot.
        """
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise ValueError(
                f"gossip snapshot has version {snapshot['version']}, this program reads "
                f"{SNAPSHOT_VERSION}: restore it with the program that wrote it, or start afresh"
            )
        books = Ledger.restore(snapshot["ledger"])
        gossiper = cls(
            books.peer, books.session, store,
            mode=mode, seed=seed, patience=patience, lossy=lossy, links=links,
        )  # fmt: skip
        gossiper.ledger = books
        gossiper._vault.restore(snapshot["vault"])
        gossiper._neighbours.gone = {(peer, session) for peer, session in snapshot["gone"]}
        gossiper._neighbours.restore(snapshot.get("neighbours", []))
        gossiper.leaving = snapshot["leaving"]
        gossiper.counters = Counter(snapshot["counters"])
        gossiper.mode.restore(snapshot["mode"])
        return gossiper

    # --- insides --------------------------------------------------------------------------------

    def _known(self, vector: str) -> str:
        if vector not in self._vault.weights:
            raise ValueError(
                f"peer {self.peer!r} has no vector {vector!r}, only {list(self.vectors)}"
            )
        return vector

    def _take(
        self, vector: str, shares: Mapping[str, int], plain: bool, whole: bool
    ) -> Mapping[str, tuple[Array, Packed | None, int]] | None:
        """Debit shares of a vector: what each receiver will read, how it travels, and its share."""
        links = self.links
        if plain or links.pipeline is None:
            self._vault.settle(vector)
            value = self._vault.take(vector, sum(shares.values()), self._lossy)
            return None if value is None else {p: (value, None, s) for p, s in shares.items()}
        return self._vault.take_packed(
            vector,
            shares,
            lambda peer, value: links.pack(vector, peer, self._session_of(peer), value, self.rng),
            whole=whole,
        )

    def _session_of(self, peer: str) -> str:
        neighbour = self._neighbours.get(peer)
        assert neighbour is not None
        return neighbour.session

    def _receive(self, message: Give | Recall) -> None:
        if message.receiver_session != self.session:
            # Another life of this peer's books: only its own may say what became of the transfer.
            self.counters["other-session"] += 1
            return
        if message.vector not in self._vault.weights:
            # No line in the books, or strangers could fill them; it can never be credited anyway.
            self.counters["refused-unknown-vector"] += 1
            self._answer(message, "void")
            return
        last, verdict = self.ledger.verdict(message.sender, message.session, message.vector)
        if message.sequence < max(last, 1):
            self.counters["stale"] += 1
        elif message.sequence == last:
            self.counters["duplicate"] += 1
            self._answer(message, verdict)
        elif isinstance(message, Recall):
            self._held.pop((message.sender, message.vector), None)
            self._decide(message, "void", "recalled-from-here")
        else:
            self._receive_give(message)

    def _receive_give(self, give: Give) -> None:
        found = self.unpacked(give)  # at once: what it refers to may be forgotten before its turn
        give = give if isinstance(found, str) else found
        defect = "leaving" if self.leaving or self.closed else None
        if defect is None and not self.mode.admit(give):
            # Looked at when its turn has come, so that a mode hears of a refusal at the right time.
            self._held[give.sender, give.vector] = give
            self.counters["held"] += 1
            return
        if defect is None:
            defect = found if isinstance(found, str) else self._vault.defect(give)
        if defect is None:
            defect = self._vault.credit(give)
        if defect is None:
            self._decide(give, "credited", "credited")
            self.links.credited(give)
            self.mode.credited(give)
        else:
            self._decide(give, "void", f"refused-{defect}")
            self.mode.refused(give)

    def _decide(self, message: Give | Recall, verdict: Verdict, cause: str) -> None:
        self.counters[cause] += 1
        sender, session = message.sender, message.session
        self.ledger.decide(sender, session, message.vector, message.sequence, verdict)
        self._answer(message, verdict)

    def _answer(self, message: Give | Recall, verdict: Verdict) -> None:
        giver, giver_session = message.sender, message.session
        vector, sequence = message.vector, message.sequence
        ack = Ack(vector, self.peer, self.session, giver, giver_session, sequence, verdict)
        self._outbox.append(ack)

    def _handle_ack(self, ack: Ack, now: float) -> None:
        edge = (ack.sender, ack.vector)
        transfer = self.ledger.open.get(edge)
        if transfer is None or (ack.giver_session, ack.session, ack.sequence) != (
            self.session,
            transfer.give.receiver_session,
            transfer.give.sequence,
        ):
            self.counters["stale-ack"] += 1
            return
        if ack.verdict not in ("credited", "void"):
            self.counters["bad-verdict"] += 1
            return
        self.ledger.close(edge)
        self.links.settled(transfer.give, credited=ack.verdict == "credited")
        self.counters[f"acknowledged-{ack.verdict}"] += 1
        if transfer.opened is not None:
            self._delays.acknowledged(now - transfer.opened, transfer.attempts)
        if ack.verdict == "void":
            self._take_back(transfer.give)

    def _take_back(self, give: Give) -> None:
        self._vault.take_back(give)
        self.mode.returned(give)

    def _send(self, transfer: Transfer) -> None:
        give = transfer.give
        if transfer.recalling:
            to, to_session = give.receiver, give.receiver_session
            recall = Recall(give.vector, self.peer, self.session, to, to_session, give.sequence)
            self._outbox.append(recall)
        else:
            self._outbox.append(give)

    def _nudge(self, edge: Edge, transfer: Transfer, now: float) -> None:
        """Repeat an open transfer that waited too long; recall it if it waited much too long."""
        if transfer.opened is None:
            self._send(self.ledger.update(edge, opened=now, sent=now))
        elif not self._neighbours.reachable(edge[0]):
            return
        elif (
            not transfer.recalling
            and transfer.give.tag is None  # a schedule waits for its own: only death ends it
            and now - transfer.opened >= self._delays.recall_after()
        ):
            self.recall(*edge, now)
        elif now - transfer.sent >= self._delays.resend_after(transfer.attempts):
            self.counters["repeat"] += 1
            self._send(self.ledger.update(edge, sent=now, attempts=transfer.attempts + 1))

    def _hand_over_free(self, now: float) -> None:
        """Give all held weight of every vector to some free neighbour, if there is one."""
        for vector in self.vectors:
            free = self.free_neighbours(vector)
            if self.weight(vector) and free:
                heir = free[self.rng.integers(len(free))]
                self.push(vector, {heir: self.weight(vector)}, now, plain=True)
