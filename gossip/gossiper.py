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
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gossamer.logs import is_milestone

from .compress import Links, Packed, PackError
from .ledger import Balances, Edge, Ledger, Store, Transfer, is_line, is_reclaimed
from .modes import Mode
from .neighbours import Delays, DelaysBySize, Neighbours, RetryPolicy
from .pushsum import Array, is_finite
from .wire import Ack, Answer, Give, Message, Recall, Tag, Verdict, WireError

_log = logging.getLogger(__name__)

SNAPSHOT_VERSION = 2
_NOTHING = np.empty(0, dtype=np.uint8)  # the value of a transfer that only says that nothing comes

Admit: TypeAlias = Callable[[Give], Give | str]
"""Decides about a transfer that could be credited: returns it, perhaps with another value, or the cause for
which it is refused."""


def new_session() -> str:
    """Draw the name of a new session: unique for ever, whatever seed the peer was given."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Account:
    """The weight of one partial model at one peer: held, in open transfers, and injected so far."""

    held: int
    open: int
    injected: int


class Gossiper:
    """Averages the partial models of a store with its neighbours.

    peer: this peer's name.
    session: `new_session()` for a new peer. A session must never be used again after its state was
        lost: a peer that starts afresh takes a new one.
    store: the values. Give them weight with `inject` before they count.
    mode: when and to whom to push; by default only when the driver says so. May be replaced at any time.
    seed: an int or a numpy Generator.
    retry: when to repeat and recall transfers.
    lossy: what a receiver will read of a value that is sent, if the wire changes it: called as
        lossy(model, value). What is lost then stays in this peer.
    links: compresses what is sent and unpacks what arrives; by default sends plain values. Its
        references are not part of a snapshot: a restored peer begins with none.

    `admit`, if it is set, decides about every transfer before it is credited: guards are put there.
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
        retry: RetryPolicy | None = None,
        lossy: Callable[[str, Array], Array] | None = None,
        links: Links | None = None,
    ) -> None:
        self.ledger = Ledger(peer, session)
        self.mode = mode if mode is not None else Mode()
        self.links = links if links is not None else Links()
        self.lossy = lossy
        self.rng = np.random.default_rng(seed)
        self.admit: Admit | None = None
        self.counters: Counter[str] = Counter()
        self.rejections: dict[str, str] = {}
        """The neighbours that reject this session, each with the reason in words.

        Such a neighbour had given the session up, or has seen more of it than its ledger knows, which is
        then an old copy. Only a new session corrects what is counted twice.
        """
        self.leaving = False
        self.closed = False
        self._balances = Balances(store)
        self._neighbours = Neighbours()
        self._delays = DelaysBySize(retry or RetryPolicy())
        self._deferred: dict[Edge, Give] = {}  # received, and kept by the mode for a later exchange
        self._outbox: list[Message] = []
        self._diverged: set[str] = set()  # models about which a warning was logged

    @property
    def peer(self) -> str:
        """This peer's name."""
        return self.ledger.peer

    @property
    def session(self) -> str:
        """The name of this incarnation of the peer's ledger."""
        return self.ledger.session

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all partial models, sorted."""
        return self._balances.models

    # --- mass -----------------------------------------------------------------------------------

    def weight(self, model: str) -> int:
        """Return the weight held for a model, without open transfers."""
        return self._balances.weights[self._known(model)]

    def injected(self, model: str) -> int:
        """Return the weight that this peer itself has brought into a model."""
        return self._balances.injected[self._known(model)]

    def promised(self, model: str) -> int:
        """Return the weight that this peer will bring in after it heard from a neighbour; see `inject`."""
        return self._balances.promised.get(self._known(model), 0)

    def value(self, model: str) -> Array:
        """Return the value of a model, not to be changed."""
        return self._balances.store.read(self._known(model))

    def set_value(self, model: str, value: Array) -> None:
        """Replace the value of a model, as training does; its weight stays."""
        self._balances.store.write(self._known(model), value)

    def account(self, model: str) -> Account:
        """Return where the weight of a model is, according to this peer's ledger; debts count as not held."""
        held = self.weight(model) - self._balances.debts.get(model, 0)
        return Account(held, self.ledger.open_weight[model], self._balances.injected[model])

    def inject(self, model: str, weight: int, *, after_hearing: bool = False) -> None:
        """Add this peer's own weight at its current value: ONE, or ONE · samples.

        A peer whose start counts injects at once. A newcomer to a running swarm injects
        `after_hearing`: it takes over the first mass it is given and adds its weight at that value.
        """
        self._balances.inject(self._known(model), weight, after_hearing=after_hearing)

    def adjust(self, model: str, weight: int) -> None:
        """Change this peer's own weight to `weight` after it was injected: its number of samples changed."""
        self._balances.adjust(self._known(model), weight)

    def _known(self, model: str) -> str:
        if model not in self._balances.weights:
            raise ValueError(
                f"peer {self.peer!r} has no partial model {model!r}, only {list(self.models)}"
            )
        return model

    def _warn_if_diverged(self, model: str) -> None:
        """Log once for each model that its values are not finite, if they are not."""
        value = self._balances.store.read(model)
        if model in self._diverged or is_finite(value):
            return
        self._diverged.add(model)
        _log.warning(
            "peer %s: model %s has diverged, %d of its %d values are NaN or infinite: it gives none of "
            "them to anybody, and takes none in; lower the learning rate, or look at its data",
            self.peer, model, value.size - np.isfinite(value).sum(), value.size,
        )  # fmt: skip

    # --- neighbours -----------------------------------------------------------------------------

    def peer_online(
        self, peer: str, session: str, models: Iterable[str], *, leaving: bool = False
    ) -> bool:
        """Note that a neighbour is online; `models` are those that may be pushed to it.

        leaving: it is about to go and refuses whatever comes, so it inherits nothing.
        A session other than the one known means that the old one is gone for good. Returns False if
        this session was already declared gone: it cannot come back. From then on what it gives is
        refused: it would lose its mass to us, who give it nothing, and part of that mass was taken back
        when it was given up. The answer tells it to begin a new one.
        """
        if (peer, session) in self._neighbours.gone:
            self.counters["gone-session-online"] += 1
            if (peer, session) not in self._neighbours.returned:
                self._neighbours.returned.add((peer, session))
                _log.warning(
                    "peer %s: %s is back in a session that was given up here: what it gives is refused, "
                    "and it is told to begin a new one", self.peer, peer,
                )  # fmt: skip
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
        shared = set(models).intersection(self.models)
        self._neighbours.online(peer, session, shared, leaving=leaving)
        return True

    def peer_offline(self, peer: str) -> None:
        """Note that a neighbour cannot be reached for now: push and repeat nothing to it."""
        self._neighbours.offline(peer)

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
        self._give_up_reclaimed(peer, session, reclaimed)
        self._settle_transfers_to(peer, session, statement)
        self._neighbours.retire(peer, session, left=statement is not None)
        self.links.lost(peer)
        self.mode.gone(peer)

    def mute(self, peer: str, muted: bool) -> None:
        """Push nothing to a neighbour for now, or push to it again; it stays a neighbour all the same."""
        (self._neighbours.muted.add if muted else self._neighbours.muted.discard)(peer)

    def known_sessions(self) -> dict[str, str]:
        """Return the session that each known neighbour, online or not, is in."""
        return self._neighbours.sessions()

    def neighbours(self, model: str) -> list[str]:
        """Return the neighbours, online or not, that a model may be pushed to, sorted by name."""
        return self._neighbours.sharing(model)

    def reachable_neighbours(self, model: str) -> list[str]:
        """Return the neighbours that a model may be pushed to and that are online now."""
        return self._neighbours.sharing(model, online_only=True)

    def free_neighbours(self, model: str, *, online_only: bool = True) -> list[str]:
        """Return the neighbours to which no transfer of this model is open."""
        peers = self._neighbours.sharing(model, online_only=online_only)
        if self._neighbours.muted or self.ledger.reclaimed:
            return [peer for peer in peers if self._is_free(peer, model)]
        open_transfers = self.ledger.open
        return [peer for peer in peers if (peer, model) not in open_transfers]

    def heirs(self, model: str) -> list[str]:
        """Return the neighbours, online or not, that a leaver may leave a model's mass to."""
        staying = self._neighbours.staying(model)
        return [peer for peer in staying if not self._reclaimed_from(peer, model)]

    def _is_free(self, peer: str, model: str) -> bool:
        return (
            (peer, model) not in self.ledger.open
            and peer not in self._neighbours.muted
            and not self._reclaimed_from(peer, model)
        )

    def _reclaimed_from(self, peer: str, model: str) -> bool:
        """Return whether a transfer to this very session was taken back without its word.

        It gets no other one: it remembers the last sequence alone, and could not give up what it may have
        credited of the one before.
        """
        rows = self.ledger.reclaimed
        return bool(rows) and any(row[:3] == [peer, self._session_of(peer), model] for row in rows)

    def _session_of(self, peer: str) -> str:
        neighbour = self._neighbours.get(peer)
        assert neighbour is not None
        return neighbour.session

    # --- giving ---------------------------------------------------------------------------------

    def push(
        self,
        model: str,
        shares: Mapping[str, int],
        now: float,
        tag: Tag | None = None,
        *,
        plain: bool = False,
        whole: bool = False,
    ) -> bool:
        """Give `shares` (neighbour: weight units) of a model away, in one split of one value.

        Returns False, and counts it, if the own value is not finite or does not fit the wire. A neighbour
        that is unknown or busy, or shares beyond the held weight, are the caller's mistake: ValueError.

        plain: compress nothing, so that nothing stays behind: for a peer that is about to leave.
        whole: give these very shares, also where a compressor lets little of the value through; else
            they shrink with it, which keeps values from growing.
        """
        self._known(model)
        for peer, share in shares.items():
            if not (self._neighbours.shares(peer, model) and self._is_free(peer, model)):
                raise ValueError(
                    f"push {model!r} to {peer!r}: not a neighbour for it, or a transfer is open"
                )
            if share < 1:
                raise ValueError(f"push {model!r} to {peer!r}: share {share} must be at least 1")
        try:
            taken = self._take(model, shares, plain, whole)
        except WireError as error:  # of `lossy`, before anything was debited
            self._warn_cannot_send(model, error)
            return False
        if taken is None:
            self.counters["own-value-not-finite"] += 1
            self._warn_if_diverged(model)
            return False
        for peer, (value, packed, share) in taken.items():
            self._open(model, peer, share, value, now, tag, packed)
        self.counters["push"] += len(shares)
        return True

    def skip(self, model: str, peers: Iterable[str], now: float, tag: Tag) -> bool:
        """Tell free neighbours that nothing comes from here in this exchange, so that they go on without.

        It is a transfer of no weight and no value, repeated until it is answered like any other: what a
        schedule does when `push` cannot. Returns True.
        """
        for peer in peers:
            self._open(model, peer, 0, _NOTHING, now, tag)
            self.counters["skip"] += 1
        return True

    def _take(
        self, model: str, shares: Mapping[str, int], plain: bool, whole: bool
    ) -> Mapping[str, tuple[Array, Packed | None, int]] | None:
        """Debit shares of a model: what each receiver will read, how it travels, and its share.

        None if the value is not finite.
        """
        if plain or self.links.pipeline is None:
            value = self._balances.take(model, sum(shares.values()), self.lossy)
            return None if value is None else {p: (value, None, s) for p, s in shares.items()}
        return self._balances.take_packed(
            model,
            shares,
            lambda peer, value: self.links.pack(
                model, peer, self._session_of(peer), value, self.rng
            ),
            whole=whole,
        )

    def _open(
        self,
        model: str,
        peer: str,
        share: int,
        value: Array,
        now: float,
        tag: Tag | None,
        packed: Packed | None = None,
    ) -> None:
        session = self._session_of(peer)
        transfer = self.ledger.debit(model, peer, session, share, value, now, tag, packed)
        self._outbox.append(transfer.give)

    def _warn_cannot_send(self, model: str, error: WireError) -> None:
        self.counters["own-value-too-large"] += 1
        count = self.counters["own-value-too-large"]
        if is_milestone(count):
            _log.warning(
                "peer %s cannot share model %s: %s (%d so far)", self.peer, model, error, count
            )

    # --- waiting for answers --------------------------------------------------------------------

    def in_flight(self, model: str) -> int:
        """Return how many transfers of a model are on their way to neighbours that should answer.

        Those to unreachable neighbours, and those old enough to be asked back, do not count.
        """
        reachable = self._neighbours.reachable
        return sum(
            open_model == model and not (transfer.recalling or transfer.late) and reachable(peer)
            for (peer, open_model), transfer in self.ledger.open.items()
        )

    def stranded(self) -> int:
        """Return how many transfers are open to neighbours that cannot be reached for now."""
        return sum(not self._neighbours.reachable(peer) for peer, _ in self.ledger.open)

    def recall(self, peer: str, model: str, now: float) -> None:
        """Ask for the mass of an open transfer back; it is absorbed if the answer is "void"."""
        if (peer, model) not in self.ledger.open:
            raise ValueError(f"recall {model!r} from {peer!r}: no transfer is open")
        self.counters["recall"] += 1
        self._send(self.ledger.update((peer, model), recalling=True, sent=now, attempts=2))

    def _nudge(self, edge: Edge, transfer: Transfer, now: float) -> None:
        """Repeat a transfer that waited too long for its answer; recall one that waited much too long."""
        if transfer.opened is None:
            self._send(self.ledger.update(edge, opened=now, sent=now))
            return
        if not self._neighbours.reachable(edge[0]):
            return
        age, delays = now - transfer.opened, self._delays_of(transfer.give)
        if not transfer.late and age >= delays.silence_timeout():
            transfer = self.ledger.update(edge, late=True)
        if (
            not transfer.recalling
            and transfer.give.tag is None  # a schedule waits for its own: only death ends it
            and age >= delays.transfer_timeout()
        ):
            self.recall(*edge, now)
        elif now - transfer.sent >= delays.ack_timeout(transfer.attempts):
            self.counters["repeat"] += 1
            self._send(self.ledger.update(edge, sent=now, attempts=transfer.attempts + 1))

    def _delays_of(self, give: Give) -> Delays:
        """Return the delays of transfers of this size. A recall is small, but it follows on what is large."""
        if give.packed is None:
            return self._delays.of(give.value.nbytes)
        return self._delays.of(sum(len(buffer) for buffer in give.packed.data))

    def _send(self, transfer: Transfer) -> None:
        give = transfer.give
        message: Message = give
        if transfer.recalling:
            to, to_session = give.receiver, give.receiver_session
            message = Recall(give.model, give.sender, give.session, to, to_session, give.sequence)
        self._outbox.append(message)

    # --- settling what was given ----------------------------------------------------------------

    def reclaim(self, *, stranded_only: bool = False) -> int:
        """Take open transfers back without waiting for their receivers' word; returns how many.

        For a peer that must end, or hand over, while receivers cannot be reached. The rows stay in
        `reclaimed`: publish them with the goodbye, so that a receiver that had credited one of them
        gives that weight up (see `peer_gone`).
        """
        reachable = self._neighbours.reachable
        edges = [e for e in self.ledger.open if not (stranded_only and reachable(e[0]))]
        for edge in edges:
            self.counters["reclaimed"] += 1
            self._take_back(self.ledger.reclaim(edge).give)
        return len(edges)

    @property
    def reclaimed(self) -> list[list[Any]]:
        """Transfers taken back without the receiver's word: receiver, session, model, sequence, weight."""
        return [list(row) for row in self.ledger.reclaimed]

    def _acknowledged(self, ack: Ack, now: float) -> None:
        """Close the transfer that was answered; what was not credited comes back."""
        edge = (ack.sender, ack.model)
        transfer = self.ledger.open.get(edge)
        if transfer is None or (ack.giver_session, ack.session, ack.sequence) != (
            self.session,
            transfer.give.receiver_session,
            transfer.give.sequence,
        ):
            self.counters["stale-ack"] += 1
            if ack.giver_session == self.session and ack.sequence > self.ledger.given(*edge):
                why = f"its books are older than what {ack.sender} has seen of them"
                self.rejections[ack.sender] = why
            return
        if ack.verdict == "gone":
            self.rejections[ack.sender] = f"{ack.sender} had given it up"
        elif ack.verdict not in ("credited", "void"):
            self.counters["bad-verdict"] += 1
            return
        credited = ack.verdict == "credited"
        self.ledger.close(edge)
        self.links.settled(transfer.give, credited=credited)
        self.counters[f"acknowledged-{ack.verdict}"] += 1
        delays = self._delays_of(transfer.give)
        if transfer.opened is not None:
            delays.acknowledged(now - transfer.opened, transfer.attempts)
        if transfer.recalling or credited:
            delays.recalled(arrived=credited)
        if not credited:
            self._take_back(transfer.give)

    def _settle_transfers_to(
        self, peer: str, session: str, statement: Iterable[Any] | None
    ) -> None:
        """Close all transfers to a session that is gone; what its statement does not claim comes back.

        Without a statement it died, and nobody knows what it had credited.
        """
        rows = list(statement or ())
        lines = [list(row) for row in rows if is_line(row)]
        if len(lines) < len(rows):
            self.counters["bad-statement"] += len(rows) - len(lines)
        settled = {line[2]: line[3:] for line in lines if line[:2] == [self.peer, self.session]}
        if statement is not None:
            for model, sequence, weight in self.ledger.settle_reclaimed(peer, session):
                if settled.get(model) == [sequence, "credited"]:
                    self.counters["given-up"] += 1
                    self._balances.give_up(model, weight)
        for edge, transfer in list(self.ledger.open.items()):
            give = transfer.give
            if edge[0] != peer or give.receiver_session != session:
                continue
            (self.ledger.reclaim if statement is None else self.ledger.close)(edge)
            if settled.get(give.model) == [give.sequence, "credited"]:
                self.counters["settled-by-statement"] += 1
            else:
                self.counters["taken-back"] += 1
                self._take_back(give)

    def _take_back(self, give: Give) -> None:
        if give.weight:  # else it said that nothing comes
            self._balances.take_back(give)
        self.mode.returned(give)

    # --- receiving ------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> None:
        """Take in a message. Whatever is wrong with it is counted by cause and never raised."""
        if message.receiver != self.peer:
            self.counters["misaddressed"] += 1
        elif isinstance(message, Ack):
            self._acknowledged(message, now)
        else:
            self._receive(message)

    def release(self, model: str) -> None:
        """Take the deferred transfers of a model in again: modes call it when their turn has come."""
        for edge in [e for e in self._deferred if e[1] == model]:
            self._receive(self._deferred.pop(edge))

    def unpacked(self, give: Give) -> Give | str:
        """Return a transfer that has just arrived with its value, or the cause why that cannot be had.

        For drivers that want to see a compressed value; `handle` does this by itself, and refuses what
        cannot be unpacked, so that its sender takes its mass back.
        """
        if give.packed is None or give.value.size or give.model not in self._balances.weights:
            return give
        try:
            ours = self.ledger.open.get((give.sender, give.model))
            size = self._balances.size(give.model)
            value = self.links.unpack(give, size, None if ours is None else ours.give)
        except PackError as error:
            return error.cause
        return dataclasses.replace(give, value=value)

    def _receive(self, message: Give | Recall) -> None:
        """Decide about a transfer or recall that is new, or answer again as it was decided before.

        The decision stands in the ledger before it is answered, and every copy of a transfer, and a recall
        that comes too late, gets the same answer.
        """
        if message.receiver_session != self.session:
            # Another session of this peer: only its own ledger may say what became of the transfer.
            self.counters["other-session"] += 1
            return
        if message.model not in self._balances.weights:
            # No line in the ledger, or strangers could fill it; it can never be credited anyway.
            self.counters["refused-unknown-model"] += 1
            self._answer(message, "void")
            return
        last, verdict = self.ledger.verdict(message.sender, message.session, message.model)
        if message.sequence < max(last, 1):
            self.counters["stale"] += 1
            if last:
                # What became of this one is forgotten. Of the last one it is known, and true whoever
                # hears it: a late copy's sender has moved on, and one with an old ledger learns that.
                self._answer(dataclasses.replace(message, sequence=last), verdict)
        elif message.sequence == last:
            self.counters["duplicate"] += 1
            self._answer(message, verdict)
        elif isinstance(message, Recall):
            self._deferred.pop((message.sender, message.model), None)
            self._decide(message, "void", "recalled-from-here")
        else:
            self._receive_new(message)

    def _receive_new(self, give: Give) -> None:
        """Credit a transfer, refuse it, or defer it until its turn."""
        unpacked = self.unpacked(
            give
        )  # at once: what it refers to may be forgotten before its turn
        give = give if isinstance(unpacked, str) else unpacked
        defect = "leaving" if self.leaving or self.closed else None
        if (give.sender, give.session) in self._neighbours.returned:
            defect = "gone-session"
        if defect is None and not self.mode.admit(give):
            # Looked at when its turn has come, so that a mode hears of a refusal at the right time.
            self._deferred[give.sender, give.model] = give
            self.counters["held"] += 1
            return
        if defect is None and not (give.weight or give.value.size or give.packed):
            defect = "nothing"  # its sender says so because we wait for it: see `skip`
        if defect is None:
            defect = unpacked if isinstance(unpacked, str) else self._credit(give)
        if defect is None:
            self._decide(give, "credited", "credited")
            self.links.credited(give)
            self.mode.credited(give)
        else:
            if (
                defect == "not-finite"
            ):  # ours may be what is wrong, and who only receives never pushes
                self._warn_if_diverged(give.model)
            gone = defect == "gone-session"
            self._decide(give, "void", f"refused-{defect}", "gone" if gone else "void")
            self.mode.refused(give)

    def _credit(self, give: Give) -> str | None:
        """Absorb a transfer as it is admitted; return the cause, and change nothing, if it is refused."""
        # What is on its way may all come back, and must find room.
        defect = self._balances.defect(give, self.ledger.open_weight[give.model])
        if defect is not None:
            return defect
        admitted = give if self.admit is None else self.admit(give)
        return admitted if isinstance(admitted, str) else self._balances.credit(admitted)

    def _give_up_reclaimed(self, peer: str, session: str, rows: Iterable[Any]) -> None:
        """Give up what a leaver took back without our word; see `peer_gone`."""
        for row in rows:
            if not is_reclaimed(row):
                self.counters["bad-reclaim"] += 1
                continue
            receiver, its_session, model, sequence, weight = row
            if (receiver, its_session) != (self.peer, self.session):
                continue
            if model not in self._balances.weights:
                continue
            last, verdict = self.ledger.verdict(peer, session, model)
            if sequence > last or (sequence == last and verdict == "credited"):
                self.ledger.decide(peer, session, model, sequence, "void")
                if sequence == last:
                    self._balances.give_up(model, weight)
                    self.counters["given-up"] += 1

    def _decide(
        self, message: Give | Recall, verdict: Verdict, cause: str, answer: Answer | None = None
    ) -> None:
        self.counters[cause] += 1
        sender, session = message.sender, message.session
        self.ledger.decide(sender, session, message.model, message.sequence, verdict)
        self._answer(message, answer or verdict)

    def _answer(self, message: Give | Recall, verdict: Answer) -> None:
        at = message.model, self.peer, self.session
        self._outbox.append(Ack(*at, message.sender, message.session, message.sequence, verdict))

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: repeat or recall what is unanswered, hand over, or let the mode push."""
        for edge, transfer in list(self.ledger.open.items()):
            self._nudge(edge, transfer, now)
        if self.closed:
            return
        if self.leaving:
            self._hand_over(now)
        else:
            self.mode.step(self, now)

    def poll(self) -> list[Message]:
        """Return the messages to send and forget them. Save a snapshot first to survive crashes."""
        outgoing, self._outbox = self._outbox, []
        return outgoing

    # --- leaving --------------------------------------------------------------------------------

    def hand_over(self, now: float) -> None:
        """Begin to leave: refuse whatever comes, and give all weight to neighbours from now on.

        Keep ticking until `drained()`, then publish `statement()` for the neighbours' `peer_gone`.
        """
        self.leaving = True
        for model in self.models:
            self.release(model)
        self._hand_over(now)

    def _hand_over(self, now: float) -> None:
        """Give all held weight of every model to some free neighbour that stays, if there is one."""
        for model in self.models:
            weight, staying = self.weight(model), self.heirs(model)
            heirs = [peer for peer in self.free_neighbours(model) if peer in staying]
            if weight and heirs:
                heir = heirs[self.rng.integers(len(heirs))]
                self.push(model, {heir: weight}, now, plain=True)

    def drained(self) -> bool:
        """Return whether no mass is held or open: a leaver may go."""
        return not self.ledger.open and not any(self._balances.weights.values())

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
        left = self._neighbours.left
        return [list(line) for line in self.ledger.lines() if line[:2] not in left]

    # --- snapshots ------------------------------------------------------------------------------

    def snapshot(self, *, values: bool = True) -> dict[str, Any]:
        """Return the whole state as plain data: dicts, lists, ints, strings and arrays.

        values=False leaves the models' values out, for a driver that saves the store in the same
        checkpoint; both must be of the same moment. Deferred transfers are left out: they will be heard
        again. Neighbours are kept, as offline, so that a round goes on with those it began with.
        """
        return {
            "version": SNAPSHOT_VERSION,
            "leaving": self.leaving,
            "vault": self._balances.snapshot(values=values),
            "ledger": self.ledger.snapshot(),
            **self._neighbours.snapshot(),
            "counters": dict(self.counters),
            "mode": self.mode.snapshot(),
        }

    @classmethod
    def restore(
        cls,
        snapshot: dict[str, Any],
        store: Store,
        **options: Any,
    ) -> Gossiper:
        """Continue from a snapshot, in the same session; open transfers are sent again.

        options: of a new Gossiper; its `mode` is made with the same settings, its state is in the snapshot.
        """
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise ValueError(
                f"gossip snapshot has version {snapshot['version']}, this program reads "
                f"{SNAPSHOT_VERSION}: restore it with the program that wrote it, or start afresh"
            )
        ledger = Ledger.restore(snapshot["ledger"])
        gossiper = cls(ledger.peer, ledger.session, store, **options)
        gossiper.ledger = ledger
        gossiper._balances.restore(snapshot["vault"])
        gossiper._neighbours.restore(snapshot)
        gossiper.counters = Counter(snapshot["counters"])
        gossiper.mode.restore(snapshot["mode"])
        gossiper.leaving = snapshot["leaving"]
        return gossiper
