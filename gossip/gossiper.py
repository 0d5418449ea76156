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

Here is what drivers and modes call. How a transfer is given stands in giving.py, how one is received in
receiving.py, and what both work on in state.py.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .balances import Vault
from .compress import Links
from .giving import Giving
from .ledger import Ledger
from .messages import Ack, Give, Message, Tag
from .modes import ManualMode, Mode
from .pushsum import Array
from .receiving import Receiving
from .retry import Patience
from .state import State
from .store import Store

_log = logging.getLogger(__name__)

SNAPSHOT_VERSION = 2


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
        self._state = State(
            Ledger(peer, session),
            Vault(store),
            mode if mode is not None else ManualMode(),
            links if links is not None else Links(),
        )
        self.rng = np.random.default_rng(seed)
        self.leaving = False
        self.closed = False
        self._giving = Giving(self._state, self.rng, patience or Patience(), lossy)
        self._receiving = Receiving(self._state)

    @property
    def peer(self) -> str:
        """This peer's name."""
        return self._state.ledger.peer

    @property
    def session(self) -> str:
        """The name of this life of the peer's books."""
        return self._state.ledger.session

    @property
    def ledger(self) -> Ledger:
        """The books: open transfers, and what became of received ones."""
        return self._state.ledger

    @property
    def mode(self) -> Mode:
        """When and to whom to push; another one may take over at any time."""
        return self._state.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._state.mode = mode

    @property
    def links(self) -> Links:
        """What compresses and unpacks values."""
        return self._state.links

    @property
    def counters(self) -> Counter[str]:
        """How often what happened, by cause."""
        return self._state.counters

    @property
    def rejections(self) -> dict[str, str]:
        """The neighbours that reject this session, each with the reason in words.

        Such a neighbour had given the session up, or has seen more of it than its books know, which are
        then an old copy. Only a new session makes good what is counted twice.
        """
        return dict(self._state.rejections)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of all vectors, sorted."""
        return self._state.vault.vectors

    @property
    def _vault(self) -> Vault:
        # For masks, guards and tests, which have to see the mass itself.
        return self._state.vault

    # --- mass -----------------------------------------------------------------------------------

    def weight(self, vector: str) -> int:
        """Return the weight held for a vector, without open transfers."""
        return self._state.vault.weights[self._state.known(vector)]

    def injected(self, vector: str) -> int:
        """Return the weight that this peer itself has brought into a vector."""
        return self._state.vault.injected[self._state.known(vector)]

    def value(self, vector: str) -> Array:
        """Return the value of a vector, not to be changed."""
        return self._state.vault.store.read(self._state.known(vector))

    def account(self, vector: str) -> Account:
        """Return where the weight of a vector is, as this peer's books have it; debts count as not held."""
        vault = self._state.vault
        in_transfers = (t.give.weight for t in self.ledger.open.values() if t.give.vector == vector)
        held = self.weight(vector) - vault.debts.get(vector, 0)
        return Account(held, sum(in_transfers), vault.injected[vector])

    def adjust(self, vector: str, weight: int) -> None:
        """Change this peer's own weight to `weight` after it was injected: its number of samples changed."""
        self._state.vault.adjust(self._state.known(vector), weight)

    def inject(self, vector: str, weight: int, *, after_hearing: bool = False) -> None:
        """Add this peer's own weight at its current value: ONE, or ONE · samples.

        A peer whose start counts injects at once. A newcomer to a running swarm injects
        `after_hearing`: it takes over the first mass it is given and adds its weight at that value.
        """
        self._state.vault.inject(self._state.known(vector), weight, after_hearing=after_hearing)

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

        Returns False, and counts it, if the own value is not finite or does not fit the wire. A neighbour
        that is unknown or busy, or shares beyond the held weight, are the caller's mistake: ValueError.

        plain: compress nothing, so that nothing stays behind: for a peer that is about to leave.
        whole: give these very shares, also where a compressor lets little of the value through; else
            they shrink with it, which keeps values from growing.
        """
        return self._giving.push(vector, shares, now, tag, plain=plain, whole=whole)

    def skip(self, vector: str, peers: Iterable[str], now: float, tag: Tag) -> bool:
        """Tell free neighbours that nothing comes from here in this exchange, so that they go on without.

        It is a transfer of no weight and no value, repeated until it is answered like any other: what a
        schedule does when `push` cannot. Returns True.
        """
        return self._giving.skip(vector, peers, now, tag)

    def recall(self, peer: str, vector: str, now: float) -> None:
        """Ask for the mass of an open transfer back; it is absorbed if the answer is "void"."""
        self._giving.recall(peer, vector, now)

    def hand_over(self, now: float) -> None:
        """Begin to leave: refuse whatever comes, and give all weight to neighbours from now on.

        Keep ticking until `drained()`, then publish `statement()` for the neighbours' `peer_gone`.
        """
        self.leaving = True
        for vector in self.vectors:
            self.release(vector)
        self._giving.hand_over(now)

    def drained(self) -> bool:
        """Whether no mass is held or open: a leaver may go."""
        return not self.ledger.open and not any(self._state.vault.weights.values())

    def close(self) -> None:
        """Credit and push nothing from now on: what this peer holds is what it goes home with.

        Open transfers are sent again at the next tick, so that whoever waits for their answers need not
        wait for long.
        """
        if not self.closed:
            self.closed = True
            for edge in self.ledger.open:
                self.ledger.update(edge, sent=-np.inf, attempts=2)

    def statement(self) -> list[list[Any]]:
        """Return what became of the last transfer from each sender that has not left, as plain rows.

        Call `close` first, or it may be out of date when it is read. A leaver publishes it with its
        goodbye, so that a giver whose acknowledgement was lost can tell whether to take its mass
        back: see `peer_gone`. One that was only given up may be alive, and ask.
        """
        left = self._state.neighbours.left
        return [list(line) for line in self.ledger.lines() if line[:2] not in left]

    # --- neighbours -----------------------------------------------------------------------------

    def peer_online(
        self, peer: str, session: str, vectors: Iterable[str], *, leaving: bool = False
    ) -> bool:
        """Note that a neighbour is online; `vectors` are those that may be pushed to it.

        leaving: it is about to go and refuses whatever comes, so it is nobody's heir.
        A session other than the one known means that the old one is gone for good. Returns False if
        this session was already declared gone: it cannot come back. From then on what it gives is
        refused: it would lose its mass to us, who give it nothing, and part of that mass was taken back
        when it was given up. The answer tells it to begin a new one.
        """
        if (peer, session) in self._state.neighbours.gone:
            self.counters["gone-session-online"] += 1
            if (peer, session) not in self._state.neighbours.returned:
                self._state.neighbours.returned.add((peer, session))
                _log.warning(
                    "peer %s: %s is back in a session that was given up here: what it gives is refused, "
                    "and it is told to begin a new one", self.peer, peer,
                )  # fmt: skip
            return False
        known = self._state.neighbours.get(peer)
        if known is not None and known.session != session:
            self.peer_gone(peer, known.session)
        for edge, transfer in list(self.ledger.open.items()):
            addressed = transfer.give.receiver_session
            if edge[0] == peer and addressed != session:  # opened before a restart of our own
                self.peer_gone(peer, addressed)
            elif edge[0] == peer and not self._state.neighbours.reachable(peer):
                self.ledger.update(edge, sent=-np.inf)
        shared = set(vectors).intersection(self.vectors)
        self._state.neighbours.online(peer, session, shared, leaving=leaving)
        return True

    def peer_offline(self, peer: str) -> None:
        """Note that a neighbour cannot be reached for now: push and repeat nothing to it."""
        self._state.neighbours.offline(peer)

    def reclaim(self, *, stranded_only: bool = False) -> int:
        """Take open transfers back without waiting for their receivers' word; returns how many.

        For a peer that must end, or hand over, while receivers cannot be reached. The rows stay in
        `reclaimed`: publish them with the goodbye, so that a receiver that had credited one of them
        gives that weight up (see `peer_gone`).
        """
        return self._giving.reclaim(stranded_only=stranded_only)

    @property
    def reclaimed(self) -> list[list[Any]]:
        """Transfers taken back without the receiver's word: receiver, session, vector, sequence, weight."""
        return [list(row) for row in self.ledger.reclaimed]

    def peer_gone(
        self,
        peer: str,
        session: str,
        statement: Iterable[Iterable[Any]] | None = None,
        reclaimed: Iterable[Any] = (),
    ) -> None:
        """Note that a session is gone for good, and take back the mass on its way to it.

        With the leaver's `statement`, exactly what it did not credit is taken back; what was taken back
        before without its word, and it had credited, is given up again. Without a statement (it
        died) everything open is, and written down in `reclaimed`: should the peer come back after all
        with what it had credited, that mass would count twice.

        reclaimed: what the leaver took back without our word. Of those rows that are addressed to this
        session, what was credited here is given up again, and what was not never will be.
        """
        self._receiving.reclaimed(peer, session, reclaimed)
        self._giving.gone(peer, session, statement)
        self._state.neighbours.retire(peer, session, left=statement is not None)
        self.links.lost(peer)
        self.mode.gone(peer)

    def mute(self, peer: str, muted: bool) -> None:
        """Push nothing to a neighbour for now, or push to it again; it stays a neighbour all the same."""
        (self._state.neighbours.muted.add if muted else self._state.neighbours.muted.discard)(peer)

    def known_sessions(self) -> dict[str, str]:
        """Return the session that each known neighbour, online or not, is in."""
        return self._state.neighbours.sessions()

    def neighbours(self, vector: str) -> list[str]:
        """Return the neighbours, online or not, that a vector may be pushed to, sorted by name."""
        return self._state.neighbours.sharing(vector)

    def heirs(self, vector: str) -> list[str]:
        """Return the neighbours, online or not, that a leaver may leave a vector's mass to."""
        return self._giving.heirs(vector)

    def reachable_neighbours(self, vector: str) -> list[str]:
        """Return the neighbours that a vector may be pushed to and that are online now."""
        sharing = self._state.neighbours.sharing(vector)
        return [peer for peer in sharing if self._state.neighbours.reachable(peer)]

    def free_neighbours(self, vector: str, *, online_only: bool = True) -> list[str]:
        """Return the neighbours to which no transfer of this vector is open."""
        return self._giving.free_neighbours(vector, online_only=online_only)

    def in_flight(self, vector: str) -> int:
        """Return how many transfers of a vector are on their way to neighbours that should answer.

        Those to unreachable neighbours, and those old enough to be asked back, do not count.
        """
        return self._giving.in_flight(vector)

    def stranded(self) -> int:
        """Return how many transfers are open to neighbours that cannot be reached for now."""
        return self._giving.stranded()

    # --- messages and time ----------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> None:
        """Take in a message. Whatever is wrong with it is counted by cause and never raised."""
        if message.receiver != self.peer:
            self.counters["misaddressed"] += 1
        elif isinstance(message, Ack):
            self._giving.acknowledged(message, now)
        else:
            self._receiving.receive(message, refusing=self.leaving or self.closed)

    def unpacked(self, give: Give) -> Give | str:
        """Return a transfer that has just arrived with its value, or the cause why that cannot be had.

        For drivers that want to see a compressed value; `handle` does this by itself, and refuses what
        cannot be unpacked, so that its sender takes its mass back.
        """
        return self._receiving.unpacked(give)

    def tick(self, now: float) -> None:
        """Let time pass: repeat or recall what is unanswered, hand over, or let the mode push."""
        self._giving.nudge(now)
        if self.closed:
            return
        if self.leaving:
            self._giving.hand_over(now)
        else:
            self.mode.step(self, now)

    def poll(self) -> list[Message]:
        """Return the messages to send and forget them. Save a snapshot first to survive crashes."""
        outgoing, self._state.outbox = self._state.outbox, []
        return outgoing

    def release(self, vector: str) -> None:
        """Offer the held transfers of a vector again: modes call it when their turn has come."""
        self._receiving.release(vector, refusing=self.leaving or self.closed)

    # --- snapshots ------------------------------------------------------------------------------

    def snapshot(self, *, values: bool = True) -> dict[str, Any]:
        """Return the whole state as plain data: dicts, lists, ints, strings and arrays.

        values=False leaves the vectors out, for a driver that saves the store in the same
        checkpoint; both must be of the same moment. Held transfers are left out: they will be heard
        again. Neighbours are kept, as offline, so that a round goes on with those it began with.
        """
        return {
            "version": SNAPSHOT_VERSION,
            "leaving": self.leaving,
            **self._state.snapshot(values=values),
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
        books = snapshot["ledger"]
        gossiper = cls(
            books["peer"], books["session"], store,
            mode=mode, seed=seed, patience=patience, lossy=lossy, links=links,
        )  # fmt: skip
        gossiper._state.restore(snapshot)
        gossiper.leaving = snapshot["leaving"]
        return gossiper
