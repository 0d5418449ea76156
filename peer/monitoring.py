"""What an operator watches: the problems of a swarm that need attention, and figures for Prometheus.

Figures are served with prometheus-client (the extra gossamer[metrics]); `link` is the Link of peer anna:

    with serve_metrics(lambda: summary_families({"anna": link.last_summary}), "garden", 9464): …

Names follow Prometheus' conventions: base units, `_total` for counters, partial model, peer and swarm as
labels. The figures are read when Prometheus asks, from summaries, so they are those that `gossamer status`
shows.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .exits import NotReached, PeerError
from .observer import ObservedPeer, SwarmState
from .summary import METRICS, Summary

if TYPE_CHECKING:
    from prometheus_client.core import Metric

COUNTING_GRACE = 60.0
"""Seconds that the peers of a partial model may take until one of them counts in it."""
SHOW_FAILURES = 24 * 3600.0
"""Seconds for which a peer's failure is reported; later, its operator is assumed to know."""

Kind: TypeAlias = Literal[
    "not-counted", "lost", "diverged", "refused", "failed", "no-summary", "unknown"
]
"""not-counted: no peer counts in a partial model. lost: a peer is past its lease. diverged: values or the
loss of a peer are NaN or infinite. refused: what a peer publishes is not genuine or cannot be read, it was
revoked and still runs, or another peer does not average with it. failed: a peer could not take part, and has
said why. no-summary: a peer is online and publishes no summary, so it cannot be judged. unknown: a peer has a
card and no status."""


@dataclass(frozen=True)
class Problem:
    """A problem that needs an operator's attention.

    peer, model: which peer and partial model it is about; empty if none. text: one line with the remedy.
    """

    kind: Kind
    text: str
    peer: str = ""
    model: str = ""


def find_problems(state: SwarmState, now: float) -> list[Problem]:
    """Return the problems that need attention now: those of models, then those of peers by name.

    now: the wall clock.
    """
    problems = _uncounted_models(state, now)
    lacking = [peer.name for peer in state.peers.values() if _lacks_summary(peer)]
    for _, peer in sorted(state.peers.items()):
        problems += _problems_of(peer, now)
    for _, peer in sorted(state.peers.items()):
        refused = {} if peer.summary is None or not peer.is_present else peer.summary.refused
        for other, reason in sorted(refused.items()):
            if other in state.peers and not state.peers[other].is_present:
                continue
            text = f"peer {peer.name} refuses peer {other}: {reason}"
            problems.append(Problem("refused", text, other))
    if lacking:
        names = ", ".join(sorted(lacking)[:3]) + (", …" if len(lacking) > 3 else "")
        text = (
            f"no summary of {len(lacking)} online peer{'s' * (len(lacking) > 1)} ({names}): upgrade them "
            "if they run an older version, or write the broker's access rules again (gossamer broker --acl)"
        )
        problems.append(Problem("no-summary", text, lacking[0] if len(lacking) == 1 else ""))
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
    if peer.checked == "revoked":  # its other problems do not matter any more
        text = f"peer {name}: the swarm's owner has revoked it, and it still runs: stop it on its device"
        return [Problem("refused", text, name)] if peer.presence == "online" else []
    if peer.presence == "lost":
        period = "" if peer.since is None else f" for {duration(now - peer.since)}"
        text = (
            f"peer {name} is past its lease of {peer.lease:g} s, silent{period}: start it again, or declare "
            f"it dead with gossamer forget"
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
    has_failed = ended is not None and ended.kind == "failed" and now - ended.time < SHOW_FAILURES
    if ended is not None and has_failed and peer.presence == "left":
        text = f"peer {name} could not take part: {ended.reason.removeprefix(f'peer {name}: ')}"
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


PRESENCES = ("online", "offline", "lost", "left", "dead", "unknown")
PROBLEMS = ("not-counted", "lost", "diverged", "refused", "failed", "no-summary", "unknown")


class _Families:
    """Figures for Prometheus, gathered by name: a family has the values of all peers or models."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def add(
        self, name: str, text: str, value: float | None, *, is_total: bool = False, **labels: str
    ) -> None:
        """Add one figure. None, which stands for NaN or infinity in a summary, is given as NaN."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if name not in self.by_name:
            kind = CounterMetricFamily if is_total else GaugeMetricFamily
            self.by_name[name] = kind(f"gossamer_{name}", text, labels=list(labels))
        self.by_name[name].add_metric(list(labels.values()), nan if value is None else value)


def summary_families(summaries: Mapping[str, Summary]) -> Iterable[Metric]:
    """Return the figures of summaries, by peer. A metric that was NaN or infinite is given as NaN."""
    families = _Families()
    for peer, each in sorted(summaries.items()):
        add = partial(families.add, peer=peer)
        add("round", "Rounds that the peer has trained.", each.round)
        add("summary_timestamp_seconds", "When the peer made its last summary.", each.time)
        add("neighbours", "Online peers that the peer pushes to.", each.neighbour_count)
        add("refused_peers", "Peers that the peer does not average with.", len(each.refused))
        text = "1 if values or the loss of the peer are NaN or infinite, else 0."
        add("diverged", text, bool(each.diverged))
        text = "The peer's version, state and phase, as labels; always 1."
        add("info", text, 1, version=each.version, state=each.state, phase=each.phase)
        for name in ("sent_bytes", "sent_packets", "received_bytes", "received_packets"):
            direction, unit = name.split("_")
            text = f"Gossip {unit} {direction} by the peer's process."
            add(name, text, getattr(each, name), is_total=True)
        for name in METRICS:
            if name in each.metrics:
                add(name, f"The peer's last {name}.", each.metrics[name])
        for name, value in each.named_metrics.items():
            add("metric", "A metric that the peer's learner has named.", value, metric=name)
        for model, own in each.models.items():
            text = "1 if the peer's weight counts in the partial model, else 0."
            add("counts", text, own.counts, model=model)
            text = "Push-sum weight that the peer holds; 1 is that of one peer."
            add("weight", text, own.weight, model=model)
            if own.disagreement is not None:
                text = "Relative distance of the last received values from the peer's own."
                add("disagreement_ratio", text, own.disagreement, model=model)
    return families.by_name.values()


def swarm_families(state: SwarmState, now: float) -> Iterable[Metric]:
    """Return the figures of an observed swarm: presences, problems, models, and present peers' summaries."""
    families = _Families()
    for name, peer in sorted(state.peers.items()):
        for each in PRESENCES:
            text = "1 for the presence that the peer has, 0 for the others."
            families.add("peer_presence", text, each == peer.presence, peer=name, presence=each)
    found = [problem.kind for problem in find_problems(state, now)]
    for kind in PROBLEMS:
        text = "Number of problems of this kind, as `gossamer status` lists them."
        families.add("problems", text, found.count(kind), kind=kind)
    for model in state.models.values():
        text = "Peers present that share the partial model."
        families.add("model_members", text, len(model.members), model=model.name)
        text = "Peers present whose weight counts in the partial model."
        families.add("model_counting", text, len(model.counting), model=model.name)
    present = [peer for peer in state.peers.values() if peer.is_present]
    summaries = {peer.name: peer.summary for peer in present if peer.summary is not None}
    return [*families.by_name.values(), *summary_families(summaries)]


@contextmanager
def serve_metrics(
    families: Callable[[], Iterable[Metric]], swarm: str, port: int, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve metrics at http://host:port/metrics while the block runs; yields the port (0 chooses a free one).

    families: called on the server's thread whenever Prometheus asks. swarm: a label of every figure.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError:
        raise PeerError(
            "--metrics-port needs prometheus-client: pip install 'gossamer[metrics]'"
        ) from None

    class Figures(Collector):
        """Calls `families` for every request of Prometheus."""

        def collect(self) -> Iterable[Metric]:
            found = list(families())
            for sample in (sample for family in found for sample in family.samples):
                sample.labels["swarm"] = swarm
            return found

        def describe(self) -> Iterable[Metric]:
            return []

    registry = CollectorRegistry()
    registry.register(Figures())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        # Whoever has the port now, such as this peer's last process, may have left it at the next start.
        kind = NotReached if error.errno == errno.EADDRINUSE else PeerError
        raise kind(
            f"--metrics-port {port}: {error.strerror or error}; choose another port"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serve_swarm_metrics(
    state: SwarmState, port: int, host: str = "127.0.0.1", wall: Callable[[], float] = time.time
):
    """Serve the figures of an observed swarm, as `swarm_families` gives them; see serve_metrics."""
    return serve_metrics(lambda: swarm_families(state, wall()), state.swarm, port, host)
