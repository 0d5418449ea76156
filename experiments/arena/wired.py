"""Averaging over a wire that rounds, compresses or skips: peer by peer, as live peers do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...models import Learner, ModelError, Weighted, check_weights, implementers
from ...models.stack import Needs, Term
from ...peer import MatchedStore, NetworkStore, blocks, schema_entries
from ...topology import Schedule, static
from ..lockstep import Lockstep, references, with_shapes
from ..virtual.wire import Wire
from .lockstep import Gossip, Mixing, Server

WINDOW = 64
"""Steps after which a schedule without a period is taken to have shown all its links."""

Targets = Mapping[int, Sequence[int]]


class Wired:
    """Averages the partial models of learners through gossipers, whose stores are the networks.

    The graph, its exchanges and their shares are those that the arena's products stand for, so that a
    wire which changes nothing gives the same, to rounding.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        mixing: Mixing,
        weights: Sequence[float] | None,
        wire: Wire,
        stores: Sequence[MatchedStore] = (),
    ):
        networks = [learner.network for learner in learners]
        found = implementers(networks)
        self._owners = {owner: who for owner, who in found.items() if len(who) > 1}
        self._mixing, self._made = _checked(mixing), 0
        held = list(stores) or [NetworkStore(network) for network in networks]
        # Peers of different widths agree on the blocks of the width that they have in common.
        entries = {
            owner: schema_entries(
                networks[who[0]], owner, stores[who[0]].common if stores else None
            )
            for owner, who in self._owners.items()
        }
        sizes = {owner: held[who[0]].read(owner).size for owner, who in self._owners.items()}
        shapes = {owner: blocks(each) for owner, each in entries.items()}
        self._wire = with_shapes(wire, shapes, sizes)
        self._sizes = sizes
        # As in a live swarm, models take turns in choosing which of their peers serves.
        servers = {
            owner: who[place % len(who)] for place, (owner, who) in enumerate(self._owners.items())
        }
        self.lockstep = Lockstep(
            [network.peer for network in networks],
            held,
            check_weights(networks, weights),
            self._wire,
            servers=servers if isinstance(mixing, Server) else None,
        )
        self._kept: dict[tuple[str, int], Targets] = {}
        for place, learner in enumerate(learners):
            if isinstance(learner, Weighted):
                learner.weight_of = lambda vector, p=place: self.lockstep.weight(p, vector)

    def average(self) -> None:
        """One averaging of every partial model."""
        if not isinstance(self._mixing, Gossip):
            self.lockstep.serve()
            return
        for _ in range(self._mixing.exchanges):
            for owner in self._owners:
                self.lockstep.exchange(owner, self._targets(owner, self._made))
            self._made += 1

    def needs(self) -> Needs:
        """What both ends of all links will remember of what passed between them."""
        total = 0
        for owner, who in self._owners.items() if self._wire.compress is not None else ():
            links = 2 * len(who)
            if isinstance(self._mixing, Gossip):
                schedule = _schedule(self._mixing)
                union = schedule.union(0, schedule.period or WINDOW).subgraph(who)
                links = union.number_of_edges() * (1 if union.is_directed() else 2)
            total += references(len(who), links, self._sizes[owner])
        return Needs((Term("references of compressed links", total),))

    def _targets(self, owner: str, exchange: int) -> Targets:
        """Whom each peer gives to in one exchange; those of a graph that repeats are kept."""
        assert isinstance(self._mixing, Gossip)
        schedule = _schedule(self._mixing)
        step = exchange % schedule.period if schedule.period else exchange
        if (owner, step) in self._kept:
            return self._kept[owner, step]
        some = schedule.graph(step).subgraph(self._owners[owner])
        found = {peer: list(some.neighbors(peer)) for peer in sorted(some)}
        if schedule.period:
            self._kept[owner, step] = found
        return found


def _schedule(mixing: Gossip) -> Schedule:
    return mixing.graph if isinstance(mixing.graph, Schedule) else static(mixing.graph)


def _checked(mixing: Mixing) -> Gossip | Server:
    """The mixing, if messages are sent in it, and sent as live peers send them."""
    if isinstance(mixing, Server):
        return mixing
    if not isinstance(mixing, Gossip):
        raise ModelError(
            "a wire is for peers that send messages, and exact averaging sends none: give "
            "mixing=Gossip(graph) or Server(), or leave out wire"
        )
    if mixing.kind != "push-sum" or mixing.rule not in (None, "push"):
        raise ModelError(
            f"{mixing.rule or mixing.kind} gossip has no place on a wire, over which live peers push equal "
            "parts: leave out wire, or kind and rule"
        )
    return mixing
