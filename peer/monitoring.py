"""What an operator watches: the problems of a swarm that need a person, and figures for Prometheus.

Figures are served with prometheus-client (the extra gossamer[metrics]):

    with serve_metrics(lambda: summary_families({"anna": link.last_summary}), "garden", 9464): …

Names follow Prometheus' conventions: base units, `_total` for counters, partial model, peer and swarm as
labels. The figures are read when Prometheus asks, from summaries, so they are those that `gossamer status`
shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .exits import PeerError
from .observer import ObservedPeer, SwarmState
from .summary import METRICS, Summary

if TYPE_CHECKING:
    from prometheus_client.core import Metric

COUNTING_GRACE = 60.0
"""Seconds that the peers of a partial model may take until one of them counts in it."""
RECENT = 24 * 3600.0
"""Seconds for which a peer that has failed is reported; later, its owner is assumed to know."""

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
            f"no summary of {len(silent)} online peer{'s' * (len(silent) > 1)} ({names}): upgrade them if "
            "they run an older version, or write the broker's access rules again (gossamer broker --acl)"
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
    if peer.checked == "revoked":  # which needs nobody, once it has gone
        text = f"peer {name}: the swarm's owner has revoked it, and it still runs: stop it there"
        return [Problem("refused", text, name)] if peer.presence == "online" else []
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


def summary_families(summaries: Mapping[str, Summary]) -> Iterator[Metric]:
    """Yield the figures of summaries, by peer. A metric that was NaN or infinite is given as NaN."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, text: str, labels: Iterable[str] = ("peer",)) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"gossamer_{name}", text, labels=list(labels))

    def counter(name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"gossamer_{name}", text, labels=["peer"])

    rounds = gauge("round", "Rounds that the peer has trained.")
    seen = gauge("summary_timestamp_seconds", "When the peer made its last summary.")
    lag = gauge("neighbours", "Online peers that the peer pushes to.")
    refused = gauge("refused_peers", "Peers that the peer does not average with.")
    diverged = gauge("diverged", "1 if values or the loss of the peer are NaN or infinite, else 0.")
    traffic = {
        name: counter(name, f"Gossip {what} by the peer's process.")
        for name, what in (
            ("sent_bytes", "bytes sent"),
            ("sent_packets", "packets sent"),
            ("received_bytes", "bytes received"),
            ("received_packets", "packets received"),
        )
    }
    metrics = {name: gauge(name, f"The peer's last {name}.") for name in METRICS}
    named = gauge("metric", "A metric that the peer's learner has named.", ("peer", "metric"))
    both = ("peer", "model")
    counts = gauge("counts", "1 if the peer's weight counts in the partial model, else 0.", both)
    weight = gauge("weight", "Push-sum weight that the peer holds; 1 is that of one peer.", both)
    distance = gauge(
        "disagreement_ratio",
        "Relative distance of the last received values from the peer's own.",
        both,
    )
    info = gauge("info", "The peer's version, state and phase, as labels; always 1.",
                 ("peer", "version", "state", "phase"))  # fmt: skip
    for peer, summary in sorted(summaries.items()):
        rounds.add_metric([peer], summary.round)
        seen.add_metric([peer], summary.time)
        lag.add_metric([peer], summary.neighbour_count)
        refused.add_metric([peer], len(summary.refused))
        diverged.add_metric([peer], bool(summary.diverged))
        info.add_metric([peer, summary.version, summary.state, summary.phase], 1)
        for name, family in traffic.items():
            family.add_metric([peer], getattr(summary, name))
        for name, value in summary.named_metrics.items():
            named.add_metric([peer, name], float("nan") if value is None else value)
        for name, family in metrics.items():
            if name in summary.metrics:
                value = summary.metrics[name]
                family.add_metric([peer], float("nan") if value is None else value)
        for model, each in summary.models.items():
            counts.add_metric([peer, model], each.counts)
            weight.add_metric([peer, model], each.weight)
            if each.disagreement is not None:
                distance.add_metric([peer, model], each.disagreement)
    yield from (rounds, seen, lag, refused, diverged, info, counts, weight, distance)
    yield from (*traffic.values(), *metrics.values(), named)


def swarm_families(state: SwarmState, now: float) -> Iterator[Metric]:
    """Yield the figures of a whole swarm, as an observer sees it: presences, problems, and all summaries."""
    from prometheus_client.core import GaugeMetricFamily

    presence = GaugeMetricFamily(
        "gossamer_peer_presence",
        "1 for the presence that the peer has, 0 for the others.",
        labels=["peer", "presence"],
    )
    for name, peer in sorted(state.peers.items()):
        for each in PRESENCES:
            presence.add_metric([name, each], each == peer.presence)
    problems = GaugeMetricFamily(
        "gossamer_problems", "What needs a person, as `gossamer status` lists it.", labels=["kind"]
    )
    found = [problem.kind for problem in find_problems(state, now)]
    for kind in PROBLEMS:
        problems.add_metric([kind], found.count(kind))
    members = GaugeMetricFamily(
        "gossamer_model_members", "Peers present that share the partial model.", labels=["model"]
    )
    counting = GaugeMetricFamily(
        "gossamer_model_counting",
        "Peers present whose weight counts in the partial model.",
        labels=["model"],
    )
    for model in state.models.values():
        members.add_metric([model.name], len(model.members))
        counting.add_metric([model.name], len(model.counting))
    yield from (presence, problems, members, counting)
    present = [peer for peer in state.peers.values() if peer.is_present]
    yield from summary_families({p.name: p.summary for p in present if p.summary is not None})


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
        raise PeerError(
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
