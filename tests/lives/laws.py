"""What must hold after every history, whatever happened in it.

A law is a function from a history to the sentences that say how it was broken. It reads what users can
see (reports, records, retained messages, errors) and, of sessions that died without a report, the last
checkpoint on their disk.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.gossip import ONE
from gossamer.peer import GoodbyeNotDelivered, NotSaved, PeerError, Replaced

from .history import Ending, History

Law = Callable[[History], Iterator[str]]

AGREEMENT = 0.05
"""The relative distance within which peers that settled in peace agree."""


CUT = re.compile(r"([\d.]+) \*\* .*\bcut .* for ([\d.]+) s")
"""A line of the log that says when a peer is cut off from the broker, and for how long."""


# --- books: the one place that reads checkpoints -----------------------------------------------------


@dataclass(frozen=True)
class Books:
    """The accounts of one session, as its checkpoint has them."""

    session: str
    over: bool
    """Whether it has said goodbye, or was about to."""
    held: dict[str, int]
    injected: dict[str, int]
    open: list[tuple[str, str, str, int]]
    """(model, receiver, receiver's session, weight) of every open transfer."""
    reclaimed: list[tuple[str, str, int, int]]
    """(model, receiver's session, sequence, weight) of transfers that it took back without knowing what had
    become of them."""
    credited: set[tuple[str, str, int]]
    """(model, sender's session, sequence) of the last transfer from each sender, if it was credited."""

    @classmethod
    def read(cls, tree: dict[str, Any]) -> Books:
        """Read a checkpoint."""
        vault, ledger = tree["gossip"]["vault"], tree["gossip"]["ledger"]
        rows = [(row[0], row[1], row[2], row[4]) for row in ledger["open"]]
        held = {v: w - vault["debts"].get(v, 0) for v, w in vault["weights"].items()}
        over = tree["ending"] is not None
        reclaimed = [(row[2], row[1], row[3], row[4]) for row in ledger["reclaimed"]]
        credited = {(row[2], row[1], row[3]) for row in ledger["seen"] if row[4] == "credited"}
        return cls(ledger["session"], over, held, vault["injected"], rows, reclaimed, credited)


@dataclass
class Accounts:
    """All sessions of a history: those that reported, and those that did not."""

    reported: dict[str, dict[str, list[int]]]
    """Session → model → [held, open, injected]."""
    dead: dict[str, tuple[float, Books]]
    """Session without a report → when it last saved, and its books then."""
    unknown: set[str]
    """Models that a session without a report and without a disk shared: nothing can be said of them."""
    slack: dict[str, int]
    """Model → weight that may be counted twice: of transfers between the living and the dead, and of
    those that a report leaves open."""

    @classmethod
    def of(cls, history: History) -> Accounts:
        reported = {r.session: r.weight for r in history.reports()}
        deaths = {e.process: e.at for e in history.endings}
        last: dict[str, tuple[float, Books]] = {}
        timeline: list[tuple[float, str, Books]] = []
        for save in history.saves:
            if save.at > deaths.get(save.process, float("inf")):
                continue  # the process was killed before this reached the disk
            books = Books.read(save.tree)
            last[books.session] = save.at, books
            timeline.append((save.at, books.session, books))
        dead = {session: known for session, known in last.items() if session not in reported}
        unknown: set[str] = set()
        diskless = False
        for ending in history.endings:
            for session in ending.process.sessions:
                if not ending.member.disk:
                    diskless = True
                    if session not in reported:
                        unknown |= set(ending.member.models)
        slack: dict[str, int] = defaultdict(int)
        for session, (at, books) in dead.items():
            for model, _, _, weight in (*books.open, *books.reclaimed):
                slack[model] += weight
            latest: dict[str, Books] = {}
            for when, other, theirs in timeline:
                if when <= at and other != session:
                    latest[other] = theirs
            for theirs in latest.values():
                for model, _, receiver_session, weight in theirs.open:
                    if receiver_session == session:
                        slack[model] += weight
                for model, receiver_session, sequence, weight in theirs.reclaimed:
                    # Given up before it credited this, as one who was frozen does when it wakes.
                    credited = (model, theirs.session, sequence) in books.credited
                    if receiver_session == session and credited:
                        slack[model] += weight
        for weights in reported.values():
            for model, (_, open_, _) in weights.items():
                slack[model] += open_  # its receiver may have credited it
        for ending in history.endings:
            report = ending.report
            if report is not None and not ending.member.disk:
                place = f"gossamer/v1/lives/peer/{report.peer}/status"
                status = history.retained.get(place, b"")
                if b'"left"' not in status or report.session.encode() not in status:
                    # The broker did not accept its goodbye, and there is no file to say it again from.
                    unknown |= set(report.weight)
        if diskless and dead:
            unknown |= {m for member in history.plan.members for m in member.models}
        return cls(reported, dead, unknown, slack)

    def totals(self) -> dict[str, tuple[int, int, int]]:
        """Model → held, open and injected, over all sessions."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for weights in self.reported.values():
            for model, row in weights.items():
                for index in range(3):
                    sums[model][index] += row[index]
        for _, books in self.dead.values():
            for model, weight in books.held.items():
                sums[model][0] += weight
                sums[model][2] += books.injected[model]
            for model, _, _, weight in books.open:
                sums[model][1] += weight
        return {model: (row[0], row[1], row[2]) for model, row in sums.items()}


# --- laws --------------------------------------------------------------------------------------------


def ends(history: History) -> Iterator[str]:
    """Every process ends, and nothing hangs."""
    if history.crash is not None:
        yield f"{type(history.crash).__name__}: {history.crash}"
    if history.stuck:
        yield f"did not end in time: {', '.join(history.stuck)}"


def errors(history: History) -> Iterator[str]:
    """What a user sees is a report, or an error that the documentation explains and the plan explains."""
    stuck = {task.rpartition(" ")[2] for task in history.stuck}
    for ending in _last_endings(history):
        if ending.member.name in stuck:
            continue  # a later process of this device did not end: see the law `ends`
        if ending.error is not None and not _is_explained(history, ending, ending.error):
            yield f"{ending.process.owner} ended with {type(ending.error).__name__}: {ending.error}"
    for error in history.loop_errors:
        yield f"unhandled: {error.get('message')}: {error.get('exception')!r}"


def conserved(history: History) -> Iterator[str]:
    """Held + open - injected is zero for every model, exactly, while no session dies.

    A dead session's mass is gone, but it counts here as its last checkpoint has it. A transfer between a
    living and a dead session may then be counted twice, and never be missing. So may one that is still
    open when its sender reports: the receiver may have credited it.
    """
    if history.crash is not None or history.stuck:
        return
    accounts = Accounts.of(history)
    for model, (held, open_, injected) in sorted(accounts.totals().items()):
        difference = held + open_ - injected
        if model not in accounts.unknown and not 0 <= difference <= accounts.slack[model]:
            yield (
                f"model {model}: held {held / ONE:.6f} + open {open_ / ONE:.6f} - injected "
                f"{injected / ONE:.6f} = {difference / ONE:.6f}, allowed: 0 to "
                f"{accounts.slack[model] / ONE:.6f}"
            )


def open_is_zero(history: History) -> Iterator[str]:
    """No report leaves a transfer open."""
    for report in history.reports():
        for model, (_, open_, _) in report.weight.items():
            if open_:
                yield f"model {model}: {report.peer} ({report.session}) leaves {open_ / ONE:.6f} open"


def one_report(history: History) -> Iterator[str]:
    """A session reports once at most."""
    texts: dict[str, set[str]] = defaultdict(set)
    for _, _, report in history.written:
        texts[report.session].add(repr(report))
    for session, different in texts.items():
        if len(different) > 1:
            yield f"session {session} reported {len(different)} different things"


def counted(history: History) -> Iterator[str]:
    """A peer that finished has counted once in each of its models."""
    for ending in history.endings:
        if ending.report is None or ending.report.ended != "finished":
            continue
        for model, (_, _, injected) in ending.report.weight.items():
            if injected != ONE:
                yield (
                    f"model {model}: {ending.report.peer} ({ending.report.session}) finished and "
                    f"counted {injected / ONE:g} times"
                )


def finite(history: History) -> Iterator[str]:
    """No value ever becomes infinite or NaN."""
    for ending in history.endings:
        if ending.learner is not None and not bool(ending.learner.network.flat.isfinite().all()):
            yield f"{ending.process.owner} has values that are not finite"


def agree(history: History) -> Iterator[str]:
    """Peers that ended in peace hold the same values, nearly."""
    if any("stopped settling" in line or "stops waiting" in line for line in history.log):
        return  # they said that they do not agree
    if any("stale: an older card" in line for line in history.log):
        return  # one whose clock was set back, and whose former card the broker forgot, is not believed
    if history.plan.mode != "async" or history.left_early or Accounts.of(history).dead:
        return
    if (
        history.stuck
        or history.crash
        or any(not e.member.disk for e in history.endings if e.killed)
    ):
        return
    finished = [ending for ending in history.endings if ending.report is not None]
    through = [float(line.split()[0]) for line in history.log if " has stopped averaging" in line]
    first = min(through + [ending.at for ending in finished], default=0.0)
    joined = [float(line.split()[0]) for line in history.log if " joins swarm " in line]
    if any(at > first for at in joined):
        return  # somebody came when others were through already
    cuts = [CUT.search(line) for line in history.log]
    if any(cut and float(cut[1]) <= first <= float(cut[1]) + float(cut[2]) for cut in cuts):
        return  # somebody was cut off when the first was through
    values: dict[str, list[tuple[str, np.ndarray[Any, Any]]]] = defaultdict(list)
    for ending in finished:
        if ending.report is not None and ending.learner is not None:
            for model in ending.member.models:
                read = ending.learner.network.read(model).numpy().astype(float)
                values[model].append((ending.report.peer, read))
    for model, rows in sorted(values.items()):
        mean = np.mean([value for _, value in rows], axis=0)
        for peer, value in rows:
            distance = float(np.linalg.norm(value - mean)) / (float(np.linalg.norm(mean)) or 1.0)
            if distance > AGREEMENT:
                yield f"model {model}: {peer} ended {distance:.3f} from the mean of those who finished"


def last_word(history: History) -> Iterator[str]:
    """Whoever finished after everything was healed is known at the broker to have left."""
    calm = _healed_at(history)
    for ending in _last_endings(history):
        if ending.report is None or ending.at < calm + 20.0:
            continue
        place = f"gossamer/v1/lives/peer/{ending.report.peer}"
        status = history.retained.get(f"{place}/status", b"")
        if b'"left"' not in status or ending.report.session.encode() not in status:
            yield f"{ending.report.peer} reported, but its status at the broker is {status[-160:]!r}"
        if f"{place}/card" in history.retained:
            yield f"{ending.report.peer} reported, but its card is still at the broker"


def counts_in_time(history: History) -> Iterator[str]:
    """A peer that is online in quiet times counts, soon after the last arrival."""
    if not any(event.kind == "replace" for event in history.plan.events):
        yield from history.uncounted  # two devices of one name overwrite each other's status for a while
    if history.plan.mode != "async":
        return
    quiet = _healed_at(history) + 30.0
    late = Counter(
        owner for at, owner, r in history.records if at > quiet and r.get("counts") is False
    )
    for owner, count in late.items():
        yield f"{owner} trained on without counting, in {count} records"


def waits_for_returners(history: History) -> Iterator[str]:
    """Nobody founds a model at its own values while those who count in it are coming back."""
    if not any(event.kind == "replace" for event in history.plan.events):
        yield from history.hasty


LAWS: dict[str, Law] = {
    "ends": ends,
    "errors": errors,
    "conserved": conserved,
    "open-is-zero": open_is_zero,
    "one-report": one_report,
    "counted": counted,
    "counts-in-time": counts_in_time,
    "waits-for-returners": waits_for_returners,
    "finite": finite,
    "agree": agree,
    "last-word": last_word,
}


def check(history: History, laws: tuple[str, ...] = tuple(LAWS)) -> list[tuple[str, str]]:
    """Return (law, sentence) for everything that is broken."""
    return [(name, text) for name in laws for text in LAWS[name](history)]


def _last_endings(history: History) -> list[Ending]:
    """How the last process of every device ended."""
    return list({ending.device: ending for ending in history.endings}.values())


def _healed_at(history: History) -> float:
    """Return when the last fault was over, and the last process started."""
    healed, last = float("inf"), 0.0
    for line in history.happened:
        at, what = line.split(maxsplit=1)
        if what == "everything is healed":
            healed = float(at)
        if " ended: " not in what and " failed: " not in what:
            last = float(at)
    return max(healed, last)


def _is_explained(history: History, ending: Ending, error: BaseException) -> bool:
    plan, text = history.plan, str(error)
    if not isinstance(error, PeerError):
        return False
    kinds = {event.kind for event in plan.events}
    if isinstance(error, Replaced) or "the name belongs to a device that is offline" in text:
        return "replace" in kinds
    was_replaced = ending.device is not history.devices[ending.member.name][-1]
    if isinstance(error, GoodbyeNotDelivered | NotSaved):
        return was_replaced  # and is not started again
    if (
        "is already online" in text
    ):  # where it had the name before, it should know that it was replaced
        sessions = {s for process in ending.device.processes for s in process.sessions}
        return was_replaced and not sessions & history.announced
    if "did not come online within" in text:
        missing = text.removeprefix(f"peer {text.split()[1]} ").partition(" did not")[0].split(", ")
        ended = {history.names[e.member.name] for e in history.endings if not e.killed}
        for_ever = {e.device for e in plan.events if e.seconds == float("inf")}
        return bool((ended | {history.names[name] for name in for_ever}) & set(missing))
    if plan.mode != "async" and ("midway" in text or "already training" in text):
        return bool(kinds)
    return False
