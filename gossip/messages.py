"""The three messages that peers exchange to move mass.

A transfer is a bank transfer: the giver debits itself and sends a `Give`; the receiver credits it
once and answers with an `Ack`; a giver that waited too long asks for its mass back with a `Recall`,
which the receiver answers with an `Ack` too. Messages are plain data: no behaviour, no clock.

A *session* names one incarnation of a peer's ledger. It is drawn when the ledger is first created and
survives a restart from a checkpoint; a peer that starts afresh has a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from .compress.packed import Packed

Tag: TypeAlias = tuple[int, int]
"""(round, exchange) of a synchronous schedule; asynchronous gossip has no tag."""

Verdict: TypeAlias = Literal["credited", "void"]
"""What became of a transfer at its receiver: credited, or never to be credited."""

Answer: TypeAlias = Literal["credited", "void", "gone"]
"""What a receiver says of it; "gone" is "void" to a session that was given up, which must begin anew."""


@dataclass(frozen=True, slots=True, eq=False)
class Give:
    """Mass on its way: `weight` units at `value`. The sender has already debited itself.

    packed: the value as it travels, where it is compressed. One that has just arrived has no `value`
        yet (an empty array): `Gossiper.unpacked` has what it takes.
    """

    model: str
    sender: str
    session: str
    sequence: int
    receiver: str
    receiver_session: str
    weight: int
    value: np.ndarray[Any, Any]
    tag: Tag | None = None
    packed: Packed | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """The receiver's answer to a `Give` or a `Recall`.

    `sender` and `session` are those of the peer that answers; `receiver` and `giver_session` those
    of the peer that gave, whose `sequence` it is: the last that the receiver knows, which is newer than
    the one asked about if the giver's books are old.
    """

    model: str
    sender: str
    session: str
    receiver: str
    giver_session: str
    sequence: int
    verdict: Answer


@dataclass(frozen=True, slots=True)
class Recall:
    """The giver asks for the mass of an open transfer back.

    The receiver answers "credited" if it was too late, else it promises never to credit that
    sequence and answers "void".
    """

    model: str
    sender: str
    session: str
    receiver: str
    receiver_session: str
    sequence: int


Message: TypeAlias = Give | Ack | Recall
