"""The gossip core of one peer: feed it messages and ticks, it returns messages to send.

It does no input or output, reads no clock and uses only the random generator it is given. A driver
runs this loop:

    for message in received: gossiper.handle(message, now)
    gossiper.tick(now)
    outgoing = gossiper.poll()
    save(gossiper.snapshot())        # if the peer is to survive a crash: before sending, atomically
    send(outgoing)

Saving before sending makes crashes harmless: a restored peer can lack a debit or a credit only if no message
about it was ever sent.

A *transfer* moves mass (a value and its weight) to a neighbour. The sender debits the mass, sends it in a
`Give` and repeats that until the receiver acknowledges it with its verdict: *credited*, or *void*, which
returns the mass to the sender. To *recall* a transfer is to ask for an early verdict; to *reclaim* it is to
take its mass back without a verdict, when the receiver cannot be reached. If the receiver had credited it
after all, one of the two must *give up* that weight.
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

from gossamer.logs import log_repeated

from .compress import Links
from .ledger import (
    Delays,
    DelaysBySize,
    Edge,
    Ledger,
    Neighbour,
    Neighbours,
    RetryPolicy,
    Transfer,
    is_reclaimed_row,
    is_verdict_row,
)
from .modes import Mode
from .pushsum import ONE, Array, Balances, Store, is_finite, subtract
from .wire import Ack, Answer, Give, Message, Packed, PackError, Recall, Tag, Verdict, WireError

_log = logging.getLogger(__name__)

SNAPSHOT_VERSION = 2
ENDED_KEPT = 64
"""Partial models that have ended whose names are remembered, so that late transfers of them are answered."""
_EMPTY = np.empty(0, dtype=np.uint8)
"""The value of a transfer without weight, which only tells the receiver not to wait: see `Gossiper.skip`."""

Admit: TypeAlias = Callable[[Give], Give | str]
"""Checks a transfer before it is credited: returns it, perhaps with another value, or the cause for which it
is refused."""


def new_session() -> str:
    """Return a random name for a new session, unique whatever seed the peer was given."""
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
    session: `new_session()` for a new peer. A session must never be used again after its snapshot was
        lost: a peer that starts without one takes a new session.
    store: the values. They count only after `inject` has given them weight.
    mode: when and to whom to push; by default only when the driver calls `push`. May be replaced at any time.
    seed: an int or a numpy Generator.
    retry: when to repeat and recall transfers.
    lossy: lossy(model, value) returns the value as a receiver will read it, if the wire format rounds it.
        This peer keeps the rounding error.
    links: compresses values to send and decompresses received ones; by default values are sent uncompressed.
        Its reference values are not part of a snapshot: a restored peer starts with none.

    `admit`, if it is set, checks every transfer before it is credited; guards are installed there.
    `refuses`, if it is set, returns whether a peer is banned: its transfers are refused, whatever they hold.
    `observe`, if it is set, is called with every transfer that is credited, as it arrived, with the own value
    before it changes, and with the distance between both values.
    `counters` counts events by cause. No message makes the gossiper raise.
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
        self.refuses: Callable[[str], bool] | None = None
        self.observe: Callable[[Give, Array, float], None] | None = None
        self.counters: Counter[str] = Counter()
        self.rejections: dict[str, str] = {}
        """The neighbours that reject this session, each with the reason in words.

        Such a neighbour has given this session up, or has received later transfers of it than this ledger
        contains, so the ledger was restored from an old copy. Mass may then count twice; only a new session
        corrects that.
        """
        self.leaving = False
        """Whether this peer hands its mass over and refuses transfers; see `hand_over`."""
        self.closed = False
        """Whether this peer neither credits nor pushes any more; see `close`."""
        self._balances = Balances(store)
        self._neighbours = Neighbours()
        self._delays = DelaysBySize(retry or RetryPolicy())
        self._deferred: dict[Edge, Give] = {}
        """Received transfers that the mode wants credited in a later exchange."""
        self._outbox: list[Message] = []
        self._diverged: set[str] = set()
        """Models with values that are not finite, about which a warning was logged."""

    @property
    def peer(self) -> str:
        """This peer's name."""
        return self.ledger.peer

    @property
    def session(self) -> str:
        """The name of this peer's session: one lifetime of its ledger."""
        return self.ledger.session

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all partial models, sorted."""
        return self._balances.models

    @property
    def retired_models(self) -> tuple[str, ...]:
        """Models that this peer no longer has; `account` still tells their weight. See `update_models`."""
        return tuple(sorted(self._balances.retired))

    def update_models(self) -> None:
        """Take over the partial models that the store has now: some may be new, some no longer there.

        A new model counts once `inject` has given it weight. The weight of a model that is no longer there
        stays in this peer's accounts: its transfers are refused, and what comes back of open ones is counted.
        The names of the latest `ENDED_KEPT` such models are remembered, and of all with open transfers.
        Neighbours share only models that both have, so call `peer_online` for them again.
        """
        for edge in [e for e in self._deferred if e[1] not in self._balances.store.names()]:
            self._decide(self._deferred.pop(edge), "void", "refused-retired")
        self._balances.update_models()
        self.mode.update_models(self.models)
        unsettled = {model for _, model in self.ledger.open} | {
            row[2] for row in self.ledger.reclaimed
        }
        ended = [model for model in self._balances.weights if model in self._balances.retired]
        for model in ended[:-ENDED_KEPT]:
            if model not in unsettled:
                self._balances.forget(model)
                self.ledger.forget(model)

    @property
    def forgotten(self) -> Account:
        """The weight of all models that ended so long ago that their names are forgotten."""
        held, injected = self._balances.forgotten
        return Account(held, 0, injected)

    # --- mass -----------------------------------------------------------------------------------

    def weight(self, model: str) -> int:
        """Return the weight held for a model, without open transfers."""
        return self._balances.weights[self._check_model(model)]

    def injected(self, model: str) -> int:
        """Return the weight that this peer has injected so far: its share in a model's average."""
        return self._balances.injected[self._check_model(model)]

    def promised(self, model: str) -> int:
        """Return the weight that will be injected with the first transfer from a neighbour; see `inject`."""
        return self._balances.promised.get(self._check_model(model), 0)

    def value(self, model: str) -> Array:
        """Return the value of a model; the caller must not change it."""
        return self._balances.store.read(self._check_model(model))

    def set_value(self, model: str, value: Array) -> None:
        """Replace the value of a model, as training does; its weight stays."""
        self._balances.store.write(self._check_model(model), value)

    def account(self, model: str) -> Account:
        """Return where the weight of a model is, according to this peer's ledger; debts count as not held."""
        held = self.weight(model) - self._balances.debts.get(model, 0)
        return Account(held, self.ledger.open_weight[model], self._balances.injected[model])

    def inject(self, model: str, weight: int, *, after_first_transfer: bool = False) -> None:
        """Add this peer's own weight at its current value: ONE, or ONE · samples.

        A peer whose starting values shall count injects at once. A newcomer to a running swarm injects
        `after_first_transfer`: it takes over the first value that it receives, and adds its weight there.
        """
        self._balances.inject(
            self._check_model(model), weight, after_first_transfer=after_first_transfer
        )

    def adjust(self, model: str, weight: int) -> None:
        """Change the injected weight to `weight`, after the number of samples has changed."""
        self._balances.adjust(self._check_model(model), weight)

    def _check_model(self, model: str) -> str:
        if model not in self._balances.weights:
            raise ValueError(
                f"peer {self.peer!r} has no partial model {model!r}, only {list(self.models)}"
            )
        return model

    def _warn_if_diverged(self, model: str) -> None:
        """Log a warning if a model's values are not finite, once per model."""
        value = self._balances.store.read(model)
        if model in self._diverged or is_finite(value):
            return
        self._diverged.add(model)
        _log.warning(
            "peer %s: model %s has diverged, %d of its %d values are NaN or infinite: it is neither sent "
            "nor averaged; lower the learning rate, or check the data",
            self.peer, model, value.size - np.isfinite(value).sum(), value.size,
        )  # fmt: skip

    @property
    def diverged(self) -> list[str]:
        """Models with values that are not finite, as far as it was noticed when they were to be sent."""
        read = self._balances.store.read
        return sorted(m for m in self._diverged if m in self.models and not is_finite(read(m)))

    # --- neighbours -----------------------------------------------------------------------------

    def peer_online(
        self,
        peer: str,
        session: str,
        models: Iterable[str],
        *,
        leaving: bool = False,
        weight: int = ONE,
    ) -> bool:
        """Note that a neighbour is online; `models` are those that may be pushed to it.

        leaving: the neighbour is about to leave and refuses transfers, so no leaver may hand over to it.
        weight: what the neighbour says that it injects; only steady gossip uses it.

        If the neighbour has a new session, its previous session is declared gone. Return False if this
        session was declared gone before: it cannot come back. Its transfers are refused, because part of its
        mass was taken back when it was given up, and the acknowledgements tell it to begin a new session.
        """
        if (peer, session) in self._neighbours.gone:
            self.counters["gone-session-online"] += 1
            if (peer, session) not in self._neighbours.returned:
                self._neighbours.returned.add((peer, session))
                _log.warning(
                    "peer %s: %s is back in a session that was given up here: its transfers are refused, "
                    "and it is told to begin a new session", self.peer, peer,
                )  # fmt: skip
            return False
        previous = self._neighbours.get(peer)
        if previous is not None and previous.session != session:
            self.peer_gone(peer, previous.session)
        for edge, transfer in list(self.ledger.open.items()):
            receiver_session = transfer.give.receiver_session
            if edge[0] == peer and receiver_session != session:  # opened before our own restart
                self.peer_gone(peer, receiver_session)
            elif edge[0] == peer and not self._neighbours.reachable(peer):
                # The next tick repeats it, and the pauses grow anew: the silence was its absence.
                self.ledger.update(edge, sent=-np.inf, attempts=1)
        shared = frozenset(models).intersection(self.models)
        self._neighbours.put(peer, Neighbour(session, shared, leaving=leaving, weight=weight))
        return True

    def peer_offline(self, peer: str) -> None:
        """Note that a neighbour cannot be reached for now: push and repeat nothing to it."""
        if (neighbour := self._neighbours.get(peer)) is not None:
            self._neighbours.put(peer, dataclasses.replace(neighbour, online=False))

    def peer_gone(
        self,
        peer: str,
        session: str,
        statement: Iterable[Iterable[Any]] | None = None,
        reclaimed: Iterable[Any] = (),
    ) -> None:
        """Note that a session is gone for good, and take back the mass of transfers to it.

        statement: the leaver's list of the transfers that it credited or refused (`Gossiper.statement`). Open
            transfers that it did not credit are taken back. Transfers that were reclaimed earlier, before an
            acknowledgement, and that it did credit, are given up again. None if the peer crashed: then all
            open transfers are taken back and recorded in `reclaimed`, because their mass would count twice if
            the peer came back after having credited them.
        reclaimed: the leaver's list of transfers that it took back before an acknowledgement arrived. Those
            that were credited here are given up again, and the others will never be credited.
        """
        self._give_up_reclaimed(peer, session, reclaimed)
        self._settle_transfers_to(peer, session, statement)
        self._neighbours.retire(peer, session, left=statement is not None)
        self.links.forget_peer(peer)
        self.mode.peer_gone(peer)

    def known_sessions(self) -> dict[str, str]:
        """Return the session of each neighbour, online or not."""
        return self._neighbours.sessions()

    def claimed_weight(self, peer: str) -> int:
        """Return the weight that a neighbour says that it injects; 0 for others."""
        neighbour = self._neighbours.get(peer)
        return 0 if neighbour is None else neighbour.weight

    def neighbours(self, model: str) -> list[str]:
        """Return the neighbours, online or not, that a model may be pushed to, sorted by name."""
        return self._neighbours.receivers(model)

    def reachable_neighbours(self, model: str) -> list[str]:
        """Return the neighbours that a model may be pushed to and that are online now."""
        return self._neighbours.receivers(model, online_only=True)

    def free_neighbours(self, model: str, *, online_only: bool = True) -> list[str]:
        """Return the neighbours to which no transfer of this model is open."""
        peers = self._neighbours.receivers(model, online_only=online_only)
        open_transfers = self.ledger.open
        return self._without_reclaimed(
            [peer for peer in peers if (peer, model) not in open_transfers], model
        )

    def heirs(self, model: str) -> list[str]:
        """Return the neighbours, online or not, to which a leaving peer may hand over a model's mass.

        None in a weightless mode: a leaver's weight is its own, and ends with it.
        """
        if self.mode.weightless:
            return []
        return self._without_reclaimed(self._neighbours.staying_receivers(model), model)

    def _is_free(self, peer: str, model: str) -> bool:
        is_open = (peer, model) in self.ledger.open
        return not is_open and bool(self._without_reclaimed([peer], model))

    def _without_reclaimed(self, peers: list[str], model: str) -> list[str]:
        """Leave out neighbours from whose present session a transfer was reclaimed, unacknowledged.

        Such a session gets no other transfer: it remembers only the verdict on the last one, and could no
        longer give up the reclaimed one if it had credited it.
        """
        if not self.ledger.reclaimed:
            return peers
        left_out = {(row[0], row[1]) for row in self.ledger.reclaimed if row[2] == model}
        return [peer for peer in peers if (peer, self._session_of(peer)) not in left_out]

    def _session_of(self, peer: str) -> str:
        neighbour = self._neighbours.get(peer)
        assert neighbour is not None
        return neighbour.session

    # --- sending transfers ----------------------------------------------------------------------

    def push(
        self,
        model: str,
        shares: Mapping[str, int],
        now: float,
        tag: Tag | None = None,
        *,
        plain: bool = False,
        exact_shares: bool = False,
    ) -> bool:
        """Send `shares` (neighbour: weight units) of a model, all with the same value.

        Return False, and count it, if the own value is not finite or too large for the wire format. Raise
        ValueError for a neighbour that is unknown or busy, and for shares beyond the held weight.

        plain: do not compress, so that no compression error remains at a peer that is about to leave.
        exact_shares: send exactly these shares. By default a share shrinks with the fraction of the value
            that its compressor transmits, which keeps values from growing.
        """
        self._check_model(model)
        for peer, share in shares.items():
            if not (self._neighbours.is_receiver(peer, model) and self._is_free(peer, model)):
                raise ValueError(
                    f"push {model!r} to {peer!r}: not a neighbour for it, or a transfer is open"
                )
            if share < 1:
                raise ValueError(f"push {model!r} to {peer!r}: share {share} must be at least 1")
        return self._open_transfers(model, shares, now, tag, plain=plain, exact_shares=exact_shares)

    def send_values(
        self, model: str, peers: Iterable[str], now: float, tag: Tag | None = None
    ) -> bool:
        """Send the own value to free neighbours, without weight; False, and count it, if that is impossible.

        Weightless modes call it. Like any transfer it is repeated until it is acknowledged; nothing is
        debited, so nothing is taken back if it is refused.
        """
        shares = dict.fromkeys(peers, 0)
        return self._open_transfers(self._check_model(model), shares, now, tag, plain=True)

    def skip(self, model: str, peers: Iterable[str], now: float, tag: Tag) -> bool:
        """Tell free neighbours not to wait for this peer in this exchange; always return True.

        Lockstep modes call it when `push` returns False. The message is a transfer without weight and value,
        repeated until it is acknowledged like any other.
        """
        for peer in peers:
            self._open_transfer(model, peer, (_EMPTY, None, 0), now, tag)
            self.counters["skip"] += 1
        return True

    def _open_transfers(
        self,
        model: str,
        shares: Mapping[str, int],
        now: float,
        tag: Tag | None,
        *,
        plain: bool,
        exact_shares: bool = False,
    ) -> bool:
        """Debit shares and send them; return False, and count it, if the value cannot be sent."""

        def pack(peer: str, value: Array) -> tuple[Array, Packed, float] | None:
            return self.links.pack(model, peer, self._session_of(peer), value, self.rng)

        try:
            if plain or not self.links.compresses(model):
                debited = self._balances.take(model, shares, self.lossy)
            else:
                debited = self._balances.take_packed(model, shares, pack, exact_shares=exact_shares)
        except WireError as error:  # raised by `lossy`, before anything was debited
            text, cause = "peer %s cannot share model %s: %s", "own-value-too-large"
            log_repeated(_log, self.counters, cause, text, self.peer, model, error)
            return False
        if debited is None:
            self.counters["own-value-not-finite"] += 1
            self._warn_if_diverged(model)
            return False
        for peer, sent in debited.items():
            self._open_transfer(model, peer, sent, now, tag)
        self.counters["push"] += len(debited)
        return True

    def _open_transfer(
        self,
        model: str,
        peer: str,
        sent: tuple[Array, Packed | None, int],
        now: float,
        tag: Tag | None,
    ) -> None:
        value, packed, share = sent
        session = self._session_of(peer)
        transfer = self.ledger.debit(model, peer, session, share, value, now, tag, packed)
        self._outbox.append(transfer.give)

    # --- waiting for acknowledgements -----------------------------------------------------------

    def in_flight(self) -> Counter[str]:
        """Return how many transfers should be acknowledged soon, by model.

        Transfers to unreachable neighbours, and those that are recalled or overdue, do not count.
        """
        reachable = self._neighbours.reachable
        return Counter(
            model
            for (peer, model), transfer in self.ledger.open.items()
            if not (transfer.recalling or transfer.overdue) and reachable(peer)
        )

    def stranded_transfers(self) -> int:
        """Return how many transfers are open to neighbours that cannot be reached now."""
        return sum(not self._neighbours.reachable(peer) for peer, _ in self.ledger.open)

    def recall(self, peer: str, model: str, now: float) -> None:
        """Ask for the mass of an open transfer back; it is taken back if the answer is "void"."""
        if (peer, model) not in self.ledger.open:
            raise ValueError(f"recall {model!r} from {peer!r}: no transfer is open")
        self.counters["recall"] += 1
        self._send(self.ledger.update((peer, model), recalling=True, sent=now, attempts=2))

    def _repeat_or_recall(self, edge: Edge, transfer: Transfer, now: float) -> None:
        """Repeat a transfer that is not acknowledged in time; recall it if it is open for much longer."""
        if transfer.opened is None:
            self._send(self.ledger.update(edge, opened=now, sent=now))
            return
        if not self._neighbours.reachable(edge[0]):
            return
        age, delays = now - transfer.opened, self._delays_of(transfer.give)
        if not transfer.overdue and age >= delays.overdue_timeout():
            transfer = self.ledger.update(edge, overdue=True)
        if (
            not transfer.recalling
            and transfer.give.tag is None  # in lockstep the receiver needs it: never recalled
            and age >= delays.recall_timeout()
        ):
            self.recall(*edge, now)
        elif now - transfer.sent >= delays.repeat_timeout(transfer.attempts):
            self.counters["repeat"] += 1
            self._send(self.ledger.update(edge, sent=now, attempts=transfer.attempts + 1))

    def _delays_of(self, give: Give) -> Delays:
        """Return the delays of transfers of this size, and of their recalls, which queue behind them."""
        if give.packed is None:
            return self._delays.of(give.value.nbytes)
        return self._delays.of(sum(len(buffer) for buffer in give.packed.data))

    def _send(self, transfer: Transfer) -> None:
        give = transfer.give
        message: Message = give
        if transfer.recalling:
            receiver = give.receiver, give.receiver_session
            message = Recall(give.model, give.sender, give.session, *receiver, give.sequence)
        self._outbox.append(message)

    # --- closing transfers ----------------------------------------------------------------------

    def reclaim(self, *, stranded_only: bool = False) -> int:
        """Take open transfers back without waiting for acknowledgements; return how many.

        For a peer that must end or hand over while receivers cannot be reached. The transfers are recorded in
        `reclaimed`: publish that list with the goodbye, so that a receiver that has credited one of them
        gives the weight up (see `peer_gone`).

        stranded_only: only transfers to neighbours that cannot be reached now.
        """
        reachable = self._neighbours.reachable
        edges = [e for e in self.ledger.open if not (stranded_only and reachable(e[0]))]
        for edge in edges:
            self.counters["reclaimed"] += 1
            self._take_back(self.ledger.reclaim(edge).give)
        return len(edges)

    @property
    def reclaimed(self) -> list[list[Any]]:
        """Transfers that were reclaimed: rows of receiver, its session, model, sequence, weight."""
        return [list(row) for row in self.ledger.reclaimed]

    def _receive_ack(self, ack: Ack, now: float) -> None:
        """Close the acknowledged transfer; take its mass back if it was not credited."""
        edge = (ack.sender, ack.model)
        transfer = self.ledger.open.get(edge)
        if transfer is None or (ack.giver_session, ack.session, ack.sequence) != (
            self.session,
            transfer.give.receiver_session,
            transfer.give.sequence,
        ):
            self.counters["stale-ack"] += 1
            if ack.giver_session == self.session and ack.sequence > self.ledger.last_sequence(
                *edge
            ):
                reason = (
                    f"its ledger is older than the transfers that {ack.sender} has received from it"
                )
                self.rejections[ack.sender] = reason
            return
        if ack.verdict == "gone":
            self.rejections[ack.sender] = f"{ack.sender} has given it up"
        elif ack.verdict not in ("credited", "void"):
            self.counters["bad-verdict"] += 1
            return
        credited = ack.verdict == "credited"
        self.ledger.close(edge)
        self.links.acknowledged(transfer.give, credited=credited)
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
        """Close all transfers to a session that is gone; take back those that its statement did not credit.

        Without a statement (it crashed) all are taken back and recorded as reclaimed.
        """
        rows = list(statement or ())
        valid_rows = [list(row) for row in rows if is_verdict_row(row)]
        if len(valid_rows) < len(rows):
            self.counters["bad-statement"] += len(rows) - len(valid_rows)
        verdicts = {row[2]: row[3:] for row in valid_rows if row[:2] == [self.peer, self.session]}
        if statement is not None:
            for model, sequence, weight in self.ledger.settle_reclaimed(peer, session):
                if verdicts.get(model) == [sequence, "credited"]:
                    self.counters["given-up"] += 1
                    self._balances.give_up(model, weight)
        for edge, transfer in list(self.ledger.open.items()):
            give = transfer.give
            if edge[0] != peer or give.receiver_session != session:
                continue
            (self.ledger.reclaim if statement is None else self.ledger.close)(edge)
            if verdicts.get(give.model) == [give.sequence, "credited"]:
                self.counters["settled-by-statement"] += 1
            else:
                self.counters["taken-back"] += 1
                self._take_back(give)

    def _take_back(self, give: Give) -> None:
        if give.weight:  # 0 in the empty transfer of `skip`
            self._balances.take_back(give)
        self.mode.taken_back(give)

    # --- receiving ------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> None:
        """Handle a received message. Faulty messages are counted by cause; none raises."""
        if message.receiver != self.peer:
            self.counters["misaddressed"] += 1
        elif isinstance(message, Ack):
            self._receive_ack(message, now)
        else:
            self._receive(message)

    def release(self, model: str) -> None:
        """Handle the deferred transfers of a model: modes call it when the next exchange begins."""
        for edge in [e for e in self._deferred if e[1] == model]:
            self._receive(self._deferred.pop(edge))

    def unpacked(self, give: Give) -> Give | str:
        """Return a received transfer with its value decompressed, or the cause why it cannot be.

        For drivers that need the value; `handle` decompresses by itself, and refuses a transfer that cannot
        be decompressed, so that its sender takes its mass back.
        """
        if give.packed is None or give.value.size or give.model not in self.models:
            return give
        try:
            outgoing = self.ledger.open.get((give.sender, give.model))
            size = self._balances.size(give.model)
            value = self.links.unpack(give, size, None if outgoing is None else outgoing.give)
        except PackError as error:
            return error.cause
        return dataclasses.replace(give, value=value)

    def _receive(self, message: Give | Recall) -> None:
        """Decide about a new transfer or recall, or repeat the answer to one that was decided before.

        The verdict is recorded in the ledger before it is answered; every copy of a transfer, and a late
        recall of it, gets the same answer.
        """
        if message.receiver_session != self.session:
            # Addressed to another session of this peer, whose ledger this one does not have.
            self.counters["other-session"] += 1
            return
        if message.model not in self._balances.weights:
            # Not recorded in the ledger, which strangers could fill otherwise; it can never be credited.
            self.counters["refused-unknown-model"] += 1
            self._answer(message, "void")
            return
        last, verdict = self.ledger.verdict(message.sender, message.session, message.model)
        if message.sequence < max(last, 1):
            self.counters["stale"] += 1
            if last:
                # The ledger only has the verdict on the last transfer, so answer with that. A sender that has
                # gone on ignores it; a sender with an old ledger learns from it that later ones existed.
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
        """Credit a new transfer, refuse it, or defer it to a later exchange."""
        # Decompressed even if it is deferred: the reference value that it needs may be dropped later.
        unpacked = self.unpacked(give)
        give = give if isinstance(unpacked, str) else unpacked
        defect = "leaving" if self.leaving or self.closed else None
        if (give.sender, give.session) in self._neighbours.returned:
            defect = "gone-session"
        if defect is None and self.refuses is not None and self.refuses(give.sender):
            defect = "banned"
        if defect is None and give.model in self._balances.retired:
            defect = "retired"
        if defect is None and not self.mode.admit(give):
            # Checked in its own exchange, so that the mode is told of a refusal at the right time.
            self._deferred[give.sender, give.model] = give
            self.counters["held"] += 1
            return
        if defect is None and not (give.weight or give.value.size or give.packed):
            defect = "nothing"  # an empty transfer, which only tells us not to wait: see `skip`
        if defect is None:
            defect = unpacked if isinstance(unpacked, str) else self._credit(give)
        if defect is None:
            self._decide(give, "credited", "credited")
            self.links.credited(give)
            self.mode.credited(give)
        else:
            if defect == "not-finite":
                # The own value may be the faulty one, and a peer that only receives never checks it in
                # `push`.
                self._warn_if_diverged(give.model)
            gone = defect == "gone-session"
            self._decide(give, "void", f"refused-{defect}", "gone" if gone else "void")
            self.mode.refused(give)

    def _credit(self, give: Give) -> str | None:
        """Absorb a transfer that is admitted; return the cause, and change nothing, if it is refused."""
        if self.mode.weightless:
            return self._move(give)
        # The weight of all open transfers may come back and must fit into the range of weights.
        defect = self._balances.defect(give, self.ledger.open_weight[give.model])
        if defect is not None:
            return defect
        admitted = give if self.admit is None else self.admit(give)
        if isinstance(admitted, str):
            return admitted

        def observe(own: Array, distance: float) -> None:
            self._observe(give, own, distance if admitted.value is give.value else None)

        return self._balances.credit(admitted, None if self.observe is None else observe)

    def _observe(self, give: Give, own: Array, distance: float | None = None) -> None:
        if self.observe is not None:
            if distance is None:  # not known: for instance because `admit` has changed the value
                distance = float(np.linalg.norm(subtract(give.value, own)))
            self.observe(give, own, distance)

    def _move(self, give: Give) -> str | None:
        """Let a value without weight move the own one, as the mode says; return the cause if it is void."""
        if (defect := self._balances.value_defect(give)) is not None:
            return defect
        value = self.mode.value_after(self, give)
        if isinstance(value, str):
            return value
        self._observe(give, self.value(give.model))
        self.set_value(give.model, value)
        return None

    def _give_up_reclaimed(self, peer: str, session: str, rows: Iterable[Any]) -> None:
        """Give up the mass of credited transfers that a leaver reclaimed; see `peer_gone`."""
        for row in rows:
            if not is_reclaimed_row(row):
                self.counters["bad-reclaim"] += 1
                continue
            receiver, receiver_session, model, sequence, weight = row
            if (receiver, receiver_session) != (self.peer, self.session):
                continue
            if model not in self._balances.weights:
                continue
            last, verdict = self.ledger.verdict(peer, session, model)
            if sequence > last or (sequence == last and verdict == "credited"):
                credited = self.ledger.weight_received(peer, session, model)
                self.ledger.decide(peer, session, model, sequence, "void")
                if sequence == last:  # the row may claim more than the transfer had
                    self._balances.give_up(model, min(weight, credited))
                    self.counters["given-up"] += 1

    def _decide(
        self, message: Give | Recall, verdict: Verdict, cause: str, answer: Answer | None = None
    ) -> None:
        self.counters[cause] += 1
        weight = message.weight if isinstance(message, Give) and verdict == "credited" else 0
        self.ledger.decide(
            message.sender, message.session, message.model, message.sequence, verdict, weight
        )
        self._answer(message, answer or verdict)

    def _answer(self, message: Give | Recall, verdict: Answer) -> None:
        head = message.model, self.peer, self.session
        self._outbox.append(Ack(*head, message.sender, message.session, message.sequence, verdict))

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeat or recall unacknowledged transfers; then hand over if leaving, or let the mode push."""
        for edge, transfer in list(self.ledger.open.items()):
            self._repeat_or_recall(edge, transfer, now)
        if self.closed:
            return
        if self.leaving:
            self._hand_over(now)
        else:
            self.mode.step(self, now)

    def poll(self) -> list[Message]:
        """Return the messages to send, and clear the outbox. To survive crashes, save before sending them."""
        outgoing, self._outbox = self._outbox, []
        return outgoing

    # --- leaving --------------------------------------------------------------------------------

    def hand_over(self, now: float) -> None:
        """Begin to leave: from now on refuse all transfers, and send all weight to neighbours.

        Keep ticking until `is_drained()`, then publish `statement()` for the neighbours' `peer_gone`.
        """
        self.leaving = True
        for model in self.models:
            self.release(model)
        self._hand_over(now)

    def _hand_over(self, now: float) -> None:
        """Send all held weight of every model to a random free neighbour that is not leaving."""
        for model in self.models:
            weight, heirs = self.weight(model), self.heirs(model)
            free_heirs = [peer for peer in self.free_neighbours(model) if peer in heirs]
            if weight and free_heirs:
                heir = free_heirs[self.rng.integers(len(free_heirs))]
                self.push(model, {heir: weight}, now, plain=True)

    def is_drained(self) -> bool:
        """Return True if no mass is held or in open transfers: a leaving peer may end."""
        held = not self.mode.weightless and any(self.weight(model) for model in self.models)
        return not self.ledger.open and not held

    def close(self) -> None:
        """Credit and push nothing from now on: the values that this peer holds are its result.

        Open transfers are sent again at the next tick, so that a driver which waits for their
        acknowledgements does not have to wait for the next repeat.
        """
        if not self.closed:
            self.closed = True
            for edge in self.ledger.open:
                self.ledger.update(edge, sent=-np.inf, attempts=2)

    def statement(self) -> list[list[Any]]:
        """Return the verdict on the last transfer from each sender that has not said goodbye, as plain rows.

        Call `close` first, or the rows may be out of date when they are read. A leaver publishes them with
        its goodbye, so that a sender whose acknowledgement was lost knows whether to take its mass back: see
        `peer_gone`. Senders that were given up are included, because they may still be running.
        """
        left = self._neighbours.left
        return [list(row) for row in self.ledger.verdicts() if row[:2] not in left]

    # --- snapshots ------------------------------------------------------------------------------

    def snapshot(self, *, values: bool = True) -> dict[str, Any]:
        """Return the whole state as plain data: dicts, lists, ints, strings and arrays.

        values=False leaves the models' values out, for a driver that saves the store in the same
        checkpoint; both must be of the same moment. Deferred transfers are left out, because their senders
        repeat them. Neighbours are kept, as offline, so that a round continues with the same ones.
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

        options: keyword arguments of a new Gossiper. `mode` must have the same settings as before; its state
            is in the snapshot.
        """
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise ValueError(
                f"gossip snapshot has version {snapshot['version']}, this program reads "
                f"{SNAPSHOT_VERSION}: restore it with the program that wrote it, or start without it"
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
