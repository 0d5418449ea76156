"""Push-sum of a whole swarm in virtual time: peers × coordinates in one array, no object per event.

Time advances in windows. A window's timetable is laid out first; then its events are applied in waves:
a wave holds, for every peer, its next event, if the push that this event waits for has been made. Each
peer's events thus happen in order of time, whatever the length of the window, and peers of a wave are
all different, so that a wave is a few operations on arrays, in as many threads as one likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np

from .draws import Floats, Ints
from .flow import Flow, Open
from .holdings import Holdings, share_rule, whole_weights
from .timetable import Timetable
from .world import Conditions, World


@dataclass(frozen=True)
class Sample:
    """The swarm at one moment.

    error: how far estimates are from the average of all mass, relative to the start.
    events: pushes, arrivals and returns so far: what moved mass.
    """

    time: float
    error: float
    events: int


class PushSumSwarm:
    """Averages one row of numbers per peer by push-sum, asynchronously.

        conditions = Conditions(training=parse("exponential:1"), delay=parse("gamma:0.5:2"))
        swarm = PushSumSwarm(values, graph, conditions)
        for sample in swarm.run(seconds=60, every=5):
            print(sample.time, sample.error)

    values: peers × coordinates; peer i is node i of the graph.
    weights: units of push-sum weight per peer (`gossip.ONE` is one peer's), all the same if left out.
    fanout: neighbours that share in one push.
    fraction: the share of its weight that a peer gives away in one push; equal parts for the chosen
        neighbours and the peer itself if left out.
    window: virtual seconds that are laid out at once. It changes speed and memory, never a result.
    threads: likewise.

    `counters` says what happened; "idle" are pushes for which no neighbour was free.
    """

    def __init__(
        self,
        values: Floats,
        graph: nx.Graph,
        conditions: Conditions,
        *,
        weights: Ints | None = None,
        fanout: int = 1,
        fraction: float | None = None,
        seed: int = 0,
        window: float | None = None,
        threads: int = 1,
    ):
        if values.ndim != 2 or len(values) != len(graph):
            raise ValueError(
                f"values have shape {values.shape}: give one row for each of the {len(graph)} peers"
            )
        self.world = World(conditions, graph, seed)
        self.now = 0.0
        self.counters: Counter[str] = Counter()
        here = self.world.present(np.arange(len(values)), np.zeros(len(values)))
        self._holdings = Holdings(values, whole_weights(len(values), weights), here, threads)
        self._flow = Flow(self.world, self._holdings, share_rule(fraction), self.counters)
        self._timetable = Timetable(self.world, graph, fanout=fanout)
        self._open = Open.of(self._timetable.until(0.0).transfers)  # none yet
        self._window = window or conditions.pace
        self._spread = self._distance()

    @property
    def estimates(self) -> Floats:
        """Every peer's estimate of the average, as it is now; meaningless where the weight is 0."""
        return self._holdings.estimates

    @property
    def weights(self) -> Ints:
        """Every peer's weight; 0 for those that are away, or have come and heard nobody yet."""
        return self._holdings.weights

    @property
    def events(self) -> int:
        """Pushes, arrivals and returns so far."""
        return sum(self.counters[kind] for kind in ("push", "arrival", "return"))

    def run(self, seconds: float, every: float | None = None) -> Iterator[Sample]:
        """Let time pass; yield a sample every so many virtual seconds, and at the end."""
        start, end, turn = self.now, self.now + seconds, 0
        while self.now < end:
            turn += 1
            stop = end if every is None else min(start + turn * every, end)
            while self.now < stop:
                self._advance(min(self.now + self._window, stop))
            yield Sample(self.now, self.error(), self.events)

    def error(self) -> float:
        """Root mean square distance of the estimates from the average, relative to the start."""
        return self._distance() / self._spread if self._spread else 0.0

    def average(self) -> Floats:
        """What the estimates tend to: the average of all mass, held or on its way."""
        vector, weight = self.total()
        return vector / weight

    def total(self) -> tuple[Floats, int]:
        """The sums of weight · value and of weight, over what is held and what is on its way."""
        vector, weight = self._open.total(self._holdings.pool, self.now)
        held = self._holdings
        return (
            vector + held.weights.astype(np.float64) @ held.estimates,
            weight + int(held.weights.sum()),
        )

    def books(self) -> dict[str, tuple[Floats, int]]:
        """Sums over all time: what was injected is what there is (`total`) and what died."""
        tallies = {"injected": self._holdings.injected, "died": self._holdings.died}
        return {"total": self.total()} | {n: (t.vector, t.weight) for n, t in tallies.items()}

    def _distance(self) -> float:
        return self._holdings.average_distance(self.average())

    def _advance(self, end: float) -> None:
        plan = self._timetable.until(end)
        self.counters["idle"] += plan.idle
        self._open = self._flow.run(plan, self._open, self.now, end)
        self.now = end
