"""Which graph should a swarm use? Candidates within a budget, ranked by their predicted rate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, log

from .check import Members, bridge, bridged
from .graphs import REASONS
from .schedule import SCHEDULES, Schedule, static
from .spec import build, build_schedule, parse
from .spectrum import Pace, predict_pace
from .structure import DisconnectedError, Edge, Seed, TopologyError, components, weak_spots

WINDOW = 16
"""Steps over which a schedule that draws afresh is rated: its first so many, repeated."""


@dataclass(frozen=True)
class Candidate:
    """A graph that fits the budget.

    `topology` is what a config writes. `rate` is |λ2| per exchange of the slowest partial model,
    `sends` the messages of the busiest peer in one exchange, `error` what is left of the
    disagreement when the byte budget is spent (None without one).
    """

    topology: str
    rate: float
    sends: int
    messages: float
    exchanges: float
    reason: str
    slowest: str = ""
    added: tuple[Edge, ...] = ()
    error: float | None = None


@dataclass(frozen=True)
class Advice:
    """Candidates, best first, and what did not fit with the reason."""

    ranked: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...] = field(default=())


def specs(peers: int, degree: int | None, groups: int = 1) -> Iterator[str]:
    """Topologies worth asking about, for a swarm of this size and this many links per peer."""
    links = min(degree if degree is not None else ceil(log(max(peers, 2), 2)), peers - 1)
    yield from ("ring", "torus", "hypercube", "clique", "exponential", "expander")
    for count in range(links, 2, -1):
        if peers * count % 2 == 0 and count < peers:
            yield f"regular:{count}"
            break
    for count in (links // 2 * 2, (links - 2) // 2 * 2):
        if 4 <= count < peers:
            yield f"watts-strogatz:{count}:0.3"
    if groups > 1:  # a link to the next group for everybody, or a few for the whole group
        size, sides = peers // groups, 1 if groups == 2 else 2
        for inner, joints in ((links - sides, size), (links - 1, 2), (links - sides, 1)):
            if inner > 1 and _even(peers, groups, inner):
                yield f"clusters:{groups}:{joints}:{inner}"
    yield from (
        "one-peer-exponential",
        f"random-matchings:{WINDOW}",
        f"rotating-rings:{WINDOW}",
    )


def _even(peers: int, groups: int, degree: int) -> bool:
    sizes = {peers // groups, -(-peers // groups)}
    return all(size * degree % 2 == 0 and degree < size for size in sizes)


def advise(
    peers: int,
    degree: int | None = None,
    *,
    budget: float | None = None,
    message: float = 1.0,
    members: Members | None = None,
    tolerance: float = 1e-6,
    seed: Seed = 0,
    asked: Sequence[str] | None = None,
) -> Advice:
    """Rank topologies for `peers` peers.

    degree
        Messages that a peer may send in one exchange; None leaves them free.
    budget, message
        Bytes that a peer may send, on the average, in one averaging, and bytes of one message. With a
        budget the rank is by the disagreement left when it is spent, else by the rate per exchange.
    members
        Partial models that must be connected: torn ones are bridged, within `degree`, and the slowest
        model counts.
    """
    if peers < 2:
        raise TopologyError(f"a swarm has at least 2 peers, not {peers}")
    if degree is not None and degree < 1:
        raise TopologyError(f"degree is a number of links per peer, 1 or more, not {degree}")
    if budget is not None and budget < message:
        raise TopologyError(
            f"a budget of {budget:.3g} bytes is less than one message of {message:.3g}: raise it"
        )
    models = {"everybody": range(peers), **(members or {})}
    ranked: list[Candidate] = []
    refused: list[tuple[str, str]] = []
    for spec in asked or specs(peers, degree, max(len(members or {}), 1)):
        try:
            ranked.append(_judge(spec, peers, degree, budget, message, models, tolerance, seed))
        except TopologyError as error:
            refused.append((spec, " ".join(str(error).split())))
    # exchanges before rate: an exact schedule has rate 0, and still needs its whole period
    ranked.sort(key=lambda one: (one.error or 0.0, one.exchanges, round(one.rate, 9), one.messages))
    return Advice(tuple(ranked), tuple(refused))


def _judge(
    spec: str,
    peers: int,
    degree: int | None,
    budget: float | None,
    message: float,
    models: Members,
    tolerance: float,
    seed: Seed,
) -> Candidate:
    kind, _ = parse(spec)
    added: tuple[Edge, ...] = ()
    reason = REASONS.get(kind, "")
    if kind in SCHEDULES:
        schedule = build_schedule(spec, peers, seed)
        sends, per_exchange = _traffic(schedule)
        _within(sends, degree)
    else:
        graph = build(spec, peers, seed)
        _within(_traffic(static(graph))[0], degree)
        bridging = bridge(graph, models)
        graph, added = bridged(graph, bridging), bridging.edges
        schedule = static(graph)
        sends, per_exchange = _traffic(schedule)
        if added:
            _within(sends, degree, f", {len(added)} of them to join torn models")
        edges, cut = weak_spots(graph)
        if edges or cut:
            reason += f"; {len(cut)} peers and {len(edges)} links alone can split it"
    slowest, pace = _slowest(schedule, models, tolerance)
    error = None
    if budget is not None:
        affordable = int(budget // (message * per_exchange))
        # an exact schedule has averaged nothing for certain before its period is over
        exact = pace.exact_after
        error = pace.rate**affordable if exact is None else float(affordable < exact)
    if len(models) > 1 and slowest != "everybody":
        reason += f"; slowest is {slowest}"
    messages = pace.exchanges * per_exchange
    return Candidate(
        spec, pace.rate, sends, messages, pace.exchanges, reason, slowest, added, error
    )


def _within(sends: int, degree: int | None, why: str = "") -> None:
    if degree is not None and sends > degree:
        raise TopologyError(f"its busiest peer has {sends} links{why}, the budget is {degree}")


def _traffic(schedule: Schedule) -> tuple[int, float]:
    """Messages of the busiest peer in one exchange, and per peer on the average."""
    most, total = 0, 0
    steps = schedule.period or WINDOW
    for step in range(steps):
        graph = schedule.graph(step)
        sends = [len(graph[peer]) for peer in graph]
        most, total = max(most, *sends), total + sum(sends)
    return most, total / steps / schedule.peers


def _slowest(schedule: Schedule, models: Members, tolerance: float) -> tuple[str, Pace]:
    """The partial model that averages most slowly, and its pace."""
    paces: dict[str, Pace] = {}
    window = schedule.period or WINDOW
    for model, who in models.items():
        part = schedule.part(who)
        parts = components(part.union(0, window))
        if len(parts) > 1:
            raise DisconnectedError(
                f"{model!r} never meets on it: a schedule cannot be bridged", parts
            )
        paces[model] = predict_pace(part, tolerance=tolerance, steps=window)
    slowest = max(paces, key=lambda model: paces[model].rate)
    return slowest, paces[slowest]
