"""The receiving half of a gossiper: what arrives is credited once, refused, or held until its turn.

Whatever was decided about a transfer stands in the books before it is answered, and every copy of it,
and a recall that comes too late, gets the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .compress import PackError
from .ledger import Edge, is_reclaimed
from .messages import Ack, Answer, Give, Recall, Verdict
from .state import State


class Receiving:
    """Takes transfers and recalls in. Nothing that arrives ever raises; it is counted by cause."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._held: dict[Edge, Give] = {}

    def receive(self, message: Give | Recall, *, refusing: bool) -> None:
        """Decide about a message that is new, or answer again; `refusing` credits nothing more."""
        state = self._state
        if message.receiver_session != state.ledger.session:
            # Another life of this peer's books: only its own may say what became of the transfer.
            state.counters["other-session"] += 1
            return
        if message.vector not in state.vault.weights:
            # No line in the books, or strangers could fill them; it can never be credited anyway.
            state.counters["refused-unknown-vector"] += 1
            self._answer(message, "void")
            return
        last, verdict = state.ledger.verdict(message.sender, message.session, message.vector)
        if message.sequence < max(last, 1):
            state.counters["stale"] += 1
            if last:
                # What became of this one is forgotten. Of the last one it is known, and true whoever
                # hears it: a late copy's sender has moved on, and one with old books learns that.
                self._answer(dataclasses.replace(message, sequence=last), verdict)
        elif message.sequence == last:
            state.counters["duplicate"] += 1
            self._answer(message, verdict)
        elif isinstance(message, Recall):
            self._held.pop((message.sender, message.vector), None)
            self._decide(message, "void", "recalled-from-here")
        else:
            self._receive_give(message, refusing)

    def release(self, vector: str, *, refusing: bool) -> None:
        """Take the held transfers of a vector in again, as if they had just arrived."""
        for edge in [e for e in self._held if e[1] == vector]:
            self.receive(self._held.pop(edge), refusing=refusing)

    def reclaimed(self, peer: str, session: str, rows: Iterable[Any]) -> None:
        """Give up what a leaver took back without our word; see `Gossiper.peer_gone`."""
        state = self._state
        for row in rows:
            if not is_reclaimed(row):
                state.counters["bad-reclaim"] += 1
                continue
            receiver, its_session, vector, sequence, weight = row
            if [receiver, its_session] != [state.ledger.peer, state.ledger.session]:
                continue
            if vector not in state.vault.weights:
                continue
            last, verdict = state.ledger.verdict(peer, session, vector)
            if sequence > last:
                state.ledger.decide(peer, session, vector, sequence, "void")
            elif sequence == last and verdict == "credited":
                state.ledger.decide(peer, session, vector, sequence, "void")
                state.vault.give_up(vector, weight)
                state.counters["given-up"] += 1

    def unpacked(self, give: Give) -> Give | str:
        """Return a transfer with its value, or the cause why that cannot be had."""
        state = self._state
        if give.packed is None or give.value.size or give.vector not in state.vault.weights:
            return give
        try:
            ours = state.ledger.open.get((give.sender, give.vector))
            size = state.vault.size(give.vector)
            value = state.links.unpack(give, size, None if ours is None else ours.give)
        except PackError as error:
            return error.cause
        return dataclasses.replace(give, value=value)

    def _receive_give(self, give: Give, refusing: bool) -> None:
        state = self._state
        found = self.unpacked(give)  # at once: what it refers to may be forgotten before its turn
        give = give if isinstance(found, str) else found
        defect = "leaving" if refusing else None
        if (give.sender, give.session) in state.neighbours.returned:
            defect = "gone-session"
        if defect is None and not state.mode.admit(give):
            # Looked at when its turn has come, so that a mode hears of a refusal at the right time.
            self._held[give.sender, give.vector] = give
            state.counters["held"] += 1
            return
        if defect is None and not (give.weight or give.value.size or give.packed):
            defect = "nothing"  # its sender says so because we wait for it: see `Gossiper.skip`
        if defect is None:
            defect = found if isinstance(found, str) else self._defect(give)
        if defect is None:
            defect = state.vault.credit(give)
        if defect is None:
            self._decide(give, "credited", "credited")
            state.links.credited(give)
            state.mode.credited(give)
        else:
            if (
                defect == "not-finite"
            ):  # ours may be what is wrong, and who only receives never pushes
                state.tell_diverged(give.vector)
            gone = defect == "gone-session"
            self._decide(give, "void", f"refused-{defect}", "gone" if gone else "void")
            state.mode.refused(give)

    def _defect(self, give: Give) -> str | None:
        state, vector = self._state, give.vector
        on_its_way = state.ledger.open_weight[vector]  # may all come back
        if give.weight > state.vault.room(vector) - on_its_way:
            return "weight"
        return state.vault.defect(give)

    def _decide(
        self, message: Give | Recall, verdict: Verdict, cause: str, answer: Answer | None = None
    ) -> None:
        self._state.counters[cause] += 1
        sender, session = message.sender, message.session
        self._state.ledger.decide(sender, session, message.vector, message.sequence, verdict)
        self._answer(message, answer or verdict)

    def _answer(self, message: Give | Recall, verdict: Answer) -> None:
        books = self._state.ledger
        giver, giver_session = message.sender, message.session
        vector, sequence = message.vector, message.sequence
        ack = Ack(vector, books.peer, books.session, giver, giver_session, sequence, verdict)
        self._state.outbox.append(ack)
