"""A peer's life as a table: its states, and the events that move it from one to the next.

What a peer does in each state stands in peer.py; who may go where stands here and nowhere else.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from .cards import Phase


class State(Enum):
    """Where a session stands."""

    CONNECTING = auto()
    """Reaching the broker; nobody knows of this session yet."""
    CLAIMING = auto()
    """Making sure that the name is free."""
    WAITING = auto()
    """In the swarm; waiting for expected peers, and to count."""
    TRAINING = auto()
    AVERAGING = auto()
    SETTLING = auto()
    """All rounds are trained; gossip goes on until the peer agrees with its neighbours."""
    DONE = auto()
    """Agreed; others may not have."""
    HANDING_OVER = auto()
    """Asked to leave early: all mass goes to neighbours that stay."""
    LEAVING = auto()
    """The ending is written down; the goodbye is on its way."""
    CLOSED = auto()
    """The goodbye was taken."""
    UNTOLD = auto()
    """No broker took the goodbye; it stays in the checkpoint for the next start."""
    ABANDONED = auto()
    """The others have given this session up; another one follows."""
    ABORTED = auto()
    """Ended without a goodbye: the last will speaks."""


class Event(Enum):
    """What happened to a session."""

    CONNECTED = auto()
    ENDING_FOUND = auto()
    """The checkpoint holds an ending that was begun."""
    NAME_FREE = auto()
    STARTED = auto()
    TRAINED = auto()
    AVERAGED = auto()
    ROUNDS_OVER = auto()
    AGREED = auto()
    LOST_AGREEMENT = auto()
    ALL_DONE = auto()
    ASKED_TO_LEAVE = auto()
    HANDED_OVER = auto()
    GOODBYE_TAKEN = auto()
    GOODBYE_LOST = auto()
    SESSION_OVER = auto()
    """The lease is over, or neighbours or an operator have given the session up."""
    ERROR = auto()
    """Something that waiting does not cure."""
    ABORT = auto()
    """Nothing may be said any more: the checkpoint cannot be written, or the name is another device's."""


_S, _E = State, Event
_RUNNING: Final = (_S.WAITING, _S.TRAINING, _S.AVERAGING, _S.SETTLING, _S.DONE)

TABLE: Final[dict[tuple[State, Event], State]] = {
    (_S.CONNECTING, _E.CONNECTED): _S.CLAIMING,
    (_S.CONNECTING, _E.ENDING_FOUND): _S.LEAVING,
    (_S.CLAIMING, _E.NAME_FREE): _S.WAITING,
    (_S.WAITING, _E.STARTED): _S.AVERAGING,  # a round that a crash interrupted is averaged first
    (_S.AVERAGING, _E.AVERAGED): _S.TRAINING,
    (_S.AVERAGING, _E.ROUNDS_OVER): _S.SETTLING,
    (_S.TRAINING, _E.TRAINED): _S.AVERAGING,
    (_S.SETTLING, _E.AGREED): _S.DONE,
    (_S.DONE, _E.LOST_AGREEMENT): _S.SETTLING,
    (_S.DONE, _E.ALL_DONE): _S.LEAVING,
    **{(state, _E.ASKED_TO_LEAVE): _S.HANDING_OVER for state in _RUNNING},
    (_S.CLAIMING, _E.ASKED_TO_LEAVE): _S.ABORTED,  # nobody knows of it: nothing to hand over
    (_S.CONNECTING, _E.ASKED_TO_LEAVE): _S.ABORTED,
    (_S.HANDING_OVER, _E.HANDED_OVER): _S.LEAVING,
    **{
        (state, _E.SESSION_OVER): _S.ABANDONED
        for state in (_S.CLAIMING, *_RUNNING, _S.HANDING_OVER, _S.LEAVING)
    },
    # LEAVING too: a task beside the work may fail in the very moment in which the work is done.
    **{(state, _E.ERROR): _S.LEAVING for state in (*_RUNNING, _S.HANDING_OVER, _S.LEAVING)},
    (_S.CONNECTING, _E.ERROR): _S.ABORTED,
    (_S.CLAIMING, _E.ERROR): _S.ABORTED,  # the others do not know of this session
    **{(state, _E.ABORT): _S.ABORTED for state in _S},
    (_S.LEAVING, _E.GOODBYE_TAKEN): _S.CLOSED,
    (_S.LEAVING, _E.GOODBYE_LOST): _S.UNTOLD,
}

FINAL: Final = frozenset({_S.CLOSED, _S.UNTOLD, _S.ABANDONED, _S.ABORTED})

PHASES: Final[dict[State, Phase]] = {
    _S.WAITING: "starting",
    _S.TRAINING: "training",
    _S.AVERAGING: "training",
    _S.SETTLING: "settling",
    _S.DONE: "done",
}
"""What others are told of a state; states that are not here leave the phase as it was."""


class Lifecycle:
    """Where one session stands."""

    def __init__(self) -> None:
        self.state = State.CONNECTING

    def fire(self, event: Event) -> State:
        """Move on; an event that the table does not know in this state is a mistake of ours."""
        following = TABLE.get((self.state, event))
        if following is None:
            raise RuntimeError(f"a peer cannot {event.name} while {self.state.name}")
        self.state = following
        return following
