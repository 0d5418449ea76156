"""What needs a person's attention in a swarm, as an observer sees it. No IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .observer import ObservedPeer, SwarmState

COUNTING_GRACE = 60.0
"""Seconds that the peers of a partial model may take until one of them counts in it."""
RECENT = 24 * 3600.0
"""Seconds for which a peer that has failed is reported; it may have been given up on purpose."""

Kind: TypeAlias = Literal[
    "not-counted", "lost", "diverged", "refused", "failed", "no-summary", "unknown"
]
"""not-counted: no peer counts in a partial model. lost: a peer is past its lease. diverged: values or the
loss of a peer are NaN or infinite. refused: what a peer publishes is not genuine or cannot be read, it was
revoked, or another peer does not average with it. failed: a peer could not take part, and has said why.
no-summary: a peer is online and publishes no summary, so it cannot be judged. unknown: a peer has a card and
no status."""


@dataclass(frozen=True)
class Problem:
    """One thing that needs a person.

    peer, model: whom and what it is about; empty if that does not apply. text: one line with the remedy.
    """

    kind: Kind
    text: str
    peer: str = ""
    model: str = ""


def find_problems(state: SwarmState, now: float) -> list[Problem]:
    """Return what needs a person now, in the order of models and peers' names.

    now: the wall clock.
    """
    problems = _uncounted_models(state, now)
    silent = [peer.name for peer in state.peers.values() if _lacks_summary(peer)]
    for _, peer in sorted(state.peers.items()):
        problems += _problems_of(peer, now)
    for _, peer in sorted(state.peers.items()):
        told = {} if peer.summary is None or not peer.is_present else peer.summary.refused
        for other, reason in sorted(told.items()):
            if other in state.peers and not state.peers[other].is_present:
                continue
            text = f"peer {peer.name} refuses peer {other}: {reason}"
            problems.append(Problem("refused", text, other))
    if silent:
        names = ", ".join(sorted(silent)[:3]) + (", …" if len(silent) > 3 else "")
        text = (
            f"no summary of {len(silent)} online peers ({names}): upgrade them if they run an older version, "
            "or write the broker's access rules again (gossamer broker --acl)"
        )
        problems.append(Problem("no-summary", text, silent[0] if len(silent) == 1 else ""))
    return problems


def _uncounted_models(state: SwarmState, now: float) -> list[Problem]:
    found = []
    for model in state.models.values():
        if model.counting or all(state.peers[m].presence != "online" for m in model.members):
            continue
        joined = [state.peers[name].joined for name in model.members]
        since = min((each for each in joined if each is not None), default=now)
        if now - since > COUNTING_GRACE:
            text = (
                f"nobody counts in model {model.name} after {now - since:.0f} s: the logs of its members "
                f"({', '.join(model.members[:3])}) say what they wait for"
            )
            found.append(Problem("not-counted", text, model=model.name))
    return found


def _problems_of(peer: ObservedPeer, now: float) -> list[Problem]:
    found, name = [], peer.name
    if peer.presence == "lost":
        ago = "" if peer.since is None else f" for {duration(now - peer.since)}"
        text = (
            f"peer {name} is past its lease of {peer.lease:g} s, silent{ago}: start it again, or declare it "
            f"dead with gossamer forget"
        )
        found.append(Problem("lost", text, name))
    if peer.checked == "refused":
        found.append(Problem("refused", f"peer {name}: {peer.problem}", name))
    elif peer.presence == "unknown" and peer.joined is not None and now - peer.joined > peer.lease:
        text = f"peer {name} has a card and no status: start it again, or clear its card"
        found.append(Problem("unknown", text, name))
    summary = peer.summary
    if summary is None:
        return found
    if peer.is_present and summary.diverged:
        text = (
            f"peer {name}: {', '.join(summary.diverged)} diverged (NaN or infinite): lower its learning "
            "rate, or check its data"
        )
        found.append(Problem("diverged", text, name))
    ended = summary.ended
    has_failed = ended is not None and ended.kind == "failed" and now - ended.time < RECENT
    if ended is not None and has_failed and peer.presence == "left":
        text = f"peer {name} could not take part: {ended.reason}"
        found.append(Problem("failed", text, name))
    return found


def _lacks_summary(peer: ObservedPeer) -> bool:
    return peer.presence == "online" and peer.summary is None and not peer.problem


def duration(seconds: float) -> str:
    """Return a time span in the unit that suits it: 12 s, 3 min, 5 h, 2 days."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
