"""Serves a peer's or a swarm's figures to Prometheus, with prometheus-client (the extra gossamer[metrics]).

    with serve_metrics(lambda: {"anna": peer.summary}, 9464): …

Names follow Prometheus' conventions: base units, `_total` for counters, partial model and peer as labels. The
figures are read when Prometheus asks, from summaries, so they are those that `gossamer status` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .exits import PeerError
from .observer import SwarmState
from .problems import find_problems
from .summary import Summary

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PRESENCES = ("online", "offline", "lost", "left", "dead", "unknown")
PROBLEMS = ("not-counted", "lost", "diverged", "refused", "failed", "no-summary", "unknown")
METRICS = ("accuracy", "loss", "training_loss", "alone_accuracy", "alone_loss")
"""Metrics of a summary that are served, each as gossamer_NAME."""


def summary_families(summaries: Mapping[str, Summary]) -> Iterator[Metric]:
    """Yield the figures of summaries, by peer. What is not finite is NaN."""
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
    yield from (*traffic.values(), *metrics.values())


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
        "gossamer_model_counting", "Those of them whose weight counts.", labels=["model"]
    )
    for model in state.models.values():
        members.add_metric([model.name], len(model.members))
        counting.add_metric([model.name], len(model.counting))
    yield from (presence, problems, members, counting)
    present = [peer for peer in state.peers.values() if peer.is_present]
    yield from summary_families({p.name: p.summary for p in present if p.summary is not None})


@contextmanager
def serve_metrics(
    families: Callable[[], Iterable[Metric]], port: int, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve metrics at http://host:port/metrics while the block runs; yields the port (0 chooses a free one).

    families: called on the server's thread whenever Prometheus asks.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError:
        raise PeerError(
            "--metrics-port needs prometheus-client: install gossamer[metrics]"
        ) from None

    class Figures(Collector):
        """Asks for the figures whenever they are wanted."""

        def collect(self) -> Iterable[Metric]:
            return list(families())

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
    """Serve the figures of a swarm that is observed; see serve_metrics."""
    return serve_metrics(lambda: swarm_families(state, wall()), port, host)
