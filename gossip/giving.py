"""The giving half of a gossiper: mass is debited and sent, repeated, asked back, and settled.

A transfer is open from the moment its mass is debited until its receiver says what became of it, or is
gone for good. Credited mass is forgotten here; all other comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gossamer.logs import is_milestone

from .compress import Packed
from .ledger import Edge, Transfer, is_line
from .messages import Ack, Give, Recall, Tag
from .pushsum import Array
from .retry import Delays, DelaysBySize, Patience
from .state import State
from .wire import WireError

_log = logging.getLogger(__name__)
_NOTHING = np.empty(0, dtype=np.uint8)  # what a transfer carries that only says that nothing comes


class Giving:
    """Opens transfers and sees each of them to its end.

    patience: when to repeat and recall transfers.
    lossy: what a receiver will read of a value that is sent, called as lossy(vector, value); None if the
        wire changes nothing.
    """

    def __init__(
        self,
        state: State,
        rng: np.random.Generator,
        patience: Patience,
        lossy: Callable[[str, Array], Array] | None,
    ) -> None:
        self._state = state
        self._rng = rng
        self._delays = DelaysBySize(patience)
        self.lossy = lossy

    # --- opening --------------------------------------------------------------------------------

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
        """Debit shares of one value and send them; see `Gossiper.push`."""
        state = self._state
        state.known(vector)
        for peer, share in shares.items():
            if not (state.neighbours.shares(peer, vector) and self._is_free(peer, vector)):
                raise ValueError(
                    f"push {vector!r} to {peer!r}: not a neighbour for it, or a transfer is open"
                )
            if share < 1:
                raise ValueError(f"push {vector!r} to {peer!r}: share {share} must be at least 1")
        try:
            taken = self._take(vector, shares, plain, whole)
        except WireError as error:  # of `lossy`, before anything was debited
            self._cannot_send(vector, error)
            return False
        if taken is None:
            state.counters["own-value-not-finite"] += 1
            state.tell_diverged(vector)
            return False
        for peer, (value, packed, share) in taken.items():
            session = self._session_of(peer)
            transfer = state.ledger.debit(vector, peer, session, share, value, now, tag, packed)
            state.outbox.append(transfer.give)
        state.counters["push"] += len(shares)
        return True

    def skip(self, vector: str, peers: Iterable[str], now: float, tag: Tag) -> bool:
        """Tell neighbours that they need not wait; see `Gossiper.skip`."""
        for peer in peers:
            session = self._session_of(peer)
            transfer = self._state.ledger.debit(vector, peer, session, 0, _NOTHING, now, tag)
            self._state.outbox.append(transfer.give)
            self._state.counters["skip"] += 1
        return True

    def hand_over(self, now: float) -> None:
        """Give all held weight of every vector to some free neighbour that stays, if there is one."""
        vault = self._state.vault
        for vector in vault.vectors:
            staying = self.heirs(vector)
            heirs = [peer for peer in self.free_neighbours(vector) if peer in staying]
            if vault.weights[vector] and heirs:
                heir = heirs[self._rng.integers(len(heirs))]
                self.push(vector, {heir: vault.weights[vector]}, now, plain=True)

    def free_neighbours(self, vector: str, *, online_only: bool = True) -> list[str]:
        """Return the neighbours to which no transfer of this vector is open."""
        neighbours = self._state.neighbours
        return [
            peer
            for peer in neighbours.sharing(vector)
            if self._is_free(peer, vector) and (neighbours.reachable(peer) or not online_only)
        ]

    def heirs(self, vector: str) -> list[str]:
        """Return the neighbours that a leaver may leave a vector's mass to; see `Gossiper.heirs`."""
        staying = self._state.neighbours.staying(vector)
        return [peer for peer in staying if not self._reclaimed_from(peer, vector)]

    def _is_free(self, peer: str, vector: str) -> bool:
        """Return whether a transfer to a neighbour may be opened."""
        return (
            (peer, vector) not in self._state.ledger.open
            and peer not in self._state.neighbours.muted
            and not self._reclaimed_from(peer, vector)
        )

    def _reclaimed_from(self, peer: str, vector: str) -> bool:
        """Return whether a transfer to this very session was taken back without its word.

        It gets no other one: it remembers the last sequence alone, and could not give up what it may have
        credited of the one before.
        """
        rows = self._state.ledger.reclaimed
        return bool(rows) and any(row[:3] == [peer, self._session_of(peer), vector] for row in rows)

    def _take(
        self, vector: str, shares: Mapping[str, int], plain: bool, whole: bool
    ) -> Mapping[str, tuple[Array, Packed | None, int]] | None:
        """Debit shares of a vector: what each receiver will read, how it travels, and its share."""
        vault, links = self._state.vault, self._state.links
        if plain or links.pipeline is None:
            vault.settle(vector)
            value = vault.take(vector, sum(shares.values()), self.lossy)
            return None if value is None else {p: (value, None, s) for p, s in shares.items()}
        return vault.take_packed(
            vector,
            shares,
            lambda peer, value: links.pack(vector, peer, self._session_of(peer), value, self._rng),
            whole=whole,
        )

    def _cannot_send(self, vector: str, error: WireError) -> None:
        state = self._state
        state.counters["own-value-too-large"] += 1
        count = state.counters["own-value-too-large"]
        if is_milestone(count):
            _log.warning(
                "peer %s cannot share model %s: %s (%d so far)",
                state.ledger.peer, vector, error, count,
            )  # fmt: skip

    def _session_of(self, peer: str) -> str:
        neighbour = self._state.neighbours.get(peer)
        assert neighbour is not None
        return neighbour.session

    # --- waiting --------------------------------------------------------------------------------

    def nudge(self, now: float) -> None:
        """Repeat what waited too long for its answer; recall what waited much too long."""
        for edge, transfer in list(self._state.ledger.open.items()):
            self._nudge(edge, transfer, now)

    def recall(self, peer: str, vector: str, now: float) -> None:
        """Ask for the mass of an open transfer back."""
        ledger = self._state.ledger
        if (peer, vector) not in ledger.open:
            raise ValueError(f"recall {vector!r} from {peer!r}: no transfer is open")
        self._state.counters["recall"] += 1
        self._send(ledger.update((peer, vector), recalling=True, sent=now, attempts=2))

    def in_flight(self, vector: str) -> int:
        """Return how many transfers of a vector are on their way to neighbours that should answer."""
        reachable = self._state.neighbours.reachable
        return sum(
            open_vector == vector and not (transfer.recalling or transfer.late) and reachable(peer)
            for (peer, open_vector), transfer in self._state.ledger.open.items()
        )

    def stranded(self) -> int:
        """Return how many transfers are open to neighbours that cannot be reached for now."""
        reachable = self._state.neighbours.reachable
        return sum(not reachable(peer) for peer, _ in self._state.ledger.open)

    def _nudge(self, edge: Edge, transfer: Transfer, now: float) -> None:
        state = self._state
        if transfer.opened is None:
            self._send(state.ledger.update(edge, opened=now, sent=now))
            return
        if not state.neighbours.reachable(edge[0]):
            return
        age, delays = now - transfer.opened, self._delays_of(transfer.give)
        if not transfer.late and age >= delays.late_after():
            transfer = state.ledger.update(edge, late=True)
        if (
            not transfer.recalling
            and transfer.give.tag is None  # a schedule waits for its own: only death ends it
            and age >= delays.recall_after()
        ):
            self.recall(*edge, now)
        elif now - transfer.sent >= delays.resend_after(transfer.attempts):
            state.counters["repeat"] += 1
            self._send(state.ledger.update(edge, sent=now, attempts=transfer.attempts + 1))

    def _delays_of(self, give: Give) -> Delays:
        """The delays of transfers of this size. A recall is small, but it follows on what is large."""
        if give.packed is None:
            return self._delays.of(give.value.nbytes)
        return self._delays.of(sum(len(buffer) for buffer in give.packed.data))

    def _send(self, transfer: Transfer) -> None:
        give = transfer.give
        if transfer.recalling:
            to, to_session = give.receiver, give.receiver_session
            recall = Recall(give.vector, give.sender, give.session, to, to_session, give.sequence)
            self._state.outbox.append(recall)
        else:
            self._state.outbox.append(give)

    # --- settling -------------------------------------------------------------------------------

    def acknowledged(self, ack: Ack, now: float) -> None:
        """Close the transfer that was answered; what was not credited comes back."""
        state = self._state
        edge = (ack.sender, ack.vector)
        transfer = state.ledger.open.get(edge)
        if transfer is None or (ack.giver_session, ack.session, ack.sequence) != (
            state.ledger.session,
            transfer.give.receiver_session,
            transfer.give.sequence,
        ):
            state.counters["stale-ack"] += 1
            if ack.giver_session == state.ledger.session and ack.sequence > state.ledger.given(
                *edge
            ):
                why = f"its books are older than what {ack.sender} has seen of them"
                state.rejections[ack.sender] = why
            return
        if ack.verdict == "gone":
            state.rejections[ack.sender] = f"{ack.sender} had given it up"
        elif ack.verdict not in ("credited", "void"):
            state.counters["bad-verdict"] += 1
            return
        state.ledger.close(edge)
        state.links.settled(transfer.give, credited=ack.verdict == "credited")
        state.counters[f"acknowledged-{ack.verdict}"] += 1
        delays = self._delays_of(transfer.give)
        if transfer.opened is not None:
            delays.acknowledged(now - transfer.opened, transfer.attempts)
        if transfer.recalling or ack.verdict == "credited":
            delays.recalled(arrived=ack.verdict == "credited")
        if ack.verdict != "credited":
            self._take_back(transfer.give)

    def reclaim(self, *, stranded_only: bool = False) -> int:
        """Take open transfers back without their receivers' word; see `Gossiper.reclaim`."""
        reachable = self._state.neighbours.reachable
        edges = [e for e in self._state.ledger.open if not (stranded_only and reachable(e[0]))]
        for edge in edges:
            self._state.counters["reclaimed"] += 1
            self._take_back(self._state.ledger.reclaim(edge).give)
        return len(edges)

    def gone(self, peer: str, session: str, statement: Iterable[Any] | None) -> None:
        """Close all transfers to a session that is gone; what its statement does not claim comes back.

        Without a statement it died, and nobody knows what it had credited.
        """
        state = self._state
        mine = [state.ledger.peer, state.ledger.session]
        rows = list(statement or ())
        lines = [list(row) for row in rows if is_line(row)]
        if len(lines) < len(rows):
            state.counters["bad-statement"] += len(rows) - len(lines)
        settled = {line[2]: line[3:] for line in lines if line[:2] == mine}
        if statement is not None:
            self._settle_reclaimed(peer, session, settled)
        for edge, transfer in list(state.ledger.open.items()):
            give = transfer.give
            if edge[0] == peer and give.receiver_session == session:
                if statement is None:
                    state.ledger.reclaim(edge)
                else:
                    state.ledger.close(edge)
                if settled.get(give.vector) == [give.sequence, "credited"]:
                    state.counters["settled-by-statement"] += 1
                else:
                    state.counters["taken-back"] += 1
                    self._take_back(give)

    def _settle_reclaimed(self, peer: str, session: str, settled: Mapping[str, Any]) -> None:
        """Give up what was taken back without asking a receiver that had credited it, as it says now."""
        ledger = self._state.ledger
        for row in [each for each in ledger.reclaimed if each[:2] == [peer, session]]:
            _, _, vector, sequence, weight = row
            ledger.reclaimed.remove(row)
            ledger.revision += 1
            if settled.get(vector) == [sequence, "credited"]:
                self._state.counters["given-up"] += 1
                self._state.vault.give_up(vector, weight)

    def _take_back(self, give: Give) -> None:
        if give.weight:  # else it said that nothing comes
            self._state.vault.take_back(give)
        self._state.mode.returned(give)
