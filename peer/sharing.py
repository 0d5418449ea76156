"""A live peer's part in deciding what its swarm shares; see `models/sharing`.

What peers measure is one more vector that gossip averages, beside the partial models: its name begins with
`statistics`. The plan that a peer follows is on its card. The online peer with the lowest name makes the next
plan; all others follow the newest plan that they find on any card. If the peer that makes plans dies, the
next one goes on with what the last plan says. When peers do not agree on who is online, there can be two
plans of one version for a moment: the one of the lower name holds.

Partial models have the name of their assignment in their own names, so peers that follow different plans
never average values of different meaning.

In rounds mode all peers change at the same round: none trains beyond the end of its plan, and after a change
each waits until the others have changed too.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..gossip import Array, Gossiper, topics
from ..models import Learner, Metrics, ModelError, norm_layers
from ..models.sharing import (
    GLOBAL,
    MIN_PEERS,
    MIN_SAMPLES,
    OWN,
    Assignment,
    AutoOptions,
    Compared,
    Decision,
    Memory,
    Plan,
    Planner,
    SharingMember,
    SharingReport,
    Statistics,
    check_learner,
    frozen_parts,
)
from .exits import PeerError
from .presence import Online
from .settings import Settings
from .store import MatchedStore

_log = logging.getLogger(__name__)

AUTO_MODELS = ("global*", "group*", "statistics-*")
"""Patterns of the names of all partial models that peers begin by themselves, for their invitations."""
MAX_VERSIONS = 10**6
"""How many versions a plan may be ahead of the newest one that is known. Far more than a peer can miss, and
far less than it would take to use up the numbers of versions, so that nobody can make the last plan."""

ASYNC_OPTIONS = AutoOptions(latest=12, every=6, settle=6)
"""In async mode a round's pushes reach only a few peers, so what is measured needs more rounds to travel."""


class LiveSharing:
    """Measures, follows plans and, if it is this peer's turn, makes them. Used on the worker thread."""

    def __init__(self, name: str, learner: Learner, store: MatchedStore, settings: Settings):
        try:
            self._learner = check_learner(learner)
        except ModelError as error:
            raise PeerError(f"peer {name}: {error}") from None
        samples = len(self._learner.samples[1])
        if samples < MIN_SAMPLES:
            raise PeerError(
                f'peer {name}: it has {samples} training samples, and sharing = "auto" holds some out, which '
                f"takes {MIN_SAMPLES}"
            )
        self._name, self._store, self._settings = name, store, settings
        self._lockstep = settings.mode == "rounds"
        self._options = AutoOptions() if self._lockstep else ASYNC_OPTIONS
        network = learner.network
        self._anatomy = network.slicing.anatomy.with_norm_parts(norm_layers(network.module))
        self._member: SharingMember | None = None
        self._planner: Planner | None = None
        self._newest: tuple[Plan, str] | None = None
        """The newest plan that is known, and the name of the peer that made it."""
        self._made_by = ""
        """The name of the peer that made the plan that is followed."""
        self._added: Array | None = None
        """What this peer has added to the statistics so far."""
        self._round_is_open = False
        """Whether a round was trained whose averaging has not been measured."""
        self._report: SharingReport | None = None
        self._decisions: list[Decision] = []
        self._compared: list[Compared] = []
        everything = Assignment.shared(self._anatomy, [name])
        network.reslice(*everything.slices(name), anatomy=self._anatomy)
        expected = {*settings.expect, name}
        self._never_decides = self._lockstep and len(expected) < MIN_PEERS
        if self._never_decides:
            _log.warning(
                "peer %s: everything stays shared: %d peers are expected, and comparing them takes %d",
                name, len(expected), MIN_PEERS,
            )  # fmt: skip

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed."""
        return None if self._member is None else self._member.plan

    @property
    def version(self) -> int:
        """Counts the plans: 1 for the first one that is followed; 0 before."""
        return 0 if self.plan is None else self.plan.version + 1

    @property
    def group_models(self) -> frozenset[str]:
        """Partial models that some peers share; their members average them whatever the graph is."""
        plan = self.plan
        if plan is None:
            return frozenset()
        assignment, network = plan.assignment, self._learner.network
        apart = {assignment.model(scheme, self._name) for scheme in (GLOBAL, OWN)}
        return frozenset(network.averaged_models) - apart

    # --- plans on cards -------------------------------------------------------------------------

    def as_card_entry(self) -> dict[str, Any] | None:
        """Return the plan that is followed and who made it, for the peer's card."""
        plan = self.plan
        return None if plan is None else {"by": self._made_by, "plan": plan.as_record()}

    def offer(self, entry: dict[str, Any]) -> None:
        """Note the plan on another peer's card; raise ModelError if it is not a plan for this network."""
        try:
            by, record = topics.check_name("peer", entry["by"]), entry["plan"]
            version, known = record["version"], self._newest
            if known is not None:
                if not _holds(version, by, known[0].version, known[1]):
                    return
                if version > known[0].version + MAX_VERSIONS:
                    raise ModelError(f"version {version} of a plan, after {known[0].version}")
            plan = Plan.from_record(self._anatomy, record)
            if plan.assignment.suffix != plan.assignment.named().suffix:
                raise ModelError("a plan names partial models like those of another assignment")
            self._newest = plan, by
        except ModelError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the plan on a card cannot be read ({error!r})") from None

    def follow(self) -> bool:
        """Follow the newest plan, if it is newer than the present one; return whether models change."""
        if self._newest is None:
            return False
        plan, by = self._newest
        present = self.plan
        if present is not None and not _holds(plan.version, by, present.version, self._made_by):
            return False
        before = set(self._store.names())
        if self._member is None:
            self._member = SharingMember(self._learner, plan, self._options, name=self._name)
        else:
            self._member.follow(plan)
        self._store.own_model = plan.assignment.model(OWN, self._name)
        if by != self._name:
            self._planner = None
        self._made_by = by
        if self._report is None:
            self._report = SharingReport(plan.assignment)
        self._report.add(plan.round, plan.assignment)
        if present is None or plan.layout.name != present.layout.name:
            self._added = None
        if present is None or plan.assignment.digest != present.assignment.digest:
            models = ", ".join(sorted(self._learner.network.models))
            _log.info(
                "peer %s follows plan %d of %s: it has the models %s",
                self._name, plan.version, by, models,
            )  # fmt: skip
        if self._added is None:
            zeros = np.zeros(plan.layout.size, np.float32)
            self._store.extra = {self._statistics_name: zeros}
        return before != set(self._store.names())

    # --- rounds ---------------------------------------------------------------------------------

    def trained(self, training: Metrics, gossiper: Gossiper) -> None:
        """Add what was measured to the statistics, after a round of training."""
        if self._member is None:
            return
        new = self._member.before_averaging(training)
        name = self._statistics_name
        weight = gossiper.weight(name)
        if weight:
            # The estimate is sum / weight, and the peer's own weight is that of one peer.
            change = new if self._added is None else new - self._added
            scale = gossiper.injected(name) / weight
            self._store.extra[name] = self._store.extra[name] + (change * scale).astype(np.float32)
            self._added = new
        self._round_is_open = True

    def averaged(self, round_number: int, online: Collection[str]) -> None:
        """Measure, when the averaging of a round is over; make the next plan if it is due and our turn.

        online: the names of the other peers that are online.
        """
        if self._member is not None and self._round_is_open and self._added is not None:
            self._member.after_averaging(self._store.extra[self._statistics_name])
        self._round_is_open = False
        if self._is_over(round_number) or self._name != min([*online, self._name], key=_in_order):
            return
        plan = self.plan
        known = self._newest
        if known is not None and (plan is None or known[0].version > plan.version):
            return  # the next plan is known, and not followed yet
        if plan is None:
            others = {*self._settings.expect, *online} - {self._name}
            if len(others) + 1 >= MIN_PEERS and others <= {*online}:
                self._newest = self.first_plan(round_number, others), self._name
            return
        if round_number < plan.until or self._added is None:
            return
        statistics = Statistics(plan.layout, self._store.extra[self._statistics_name])
        if plan.candidates and statistics.measured < MIN_PEERS:  # too little has arrived yet
            longer = replace(plan, version=plan.version + 1, until=round_number + 1, chosen=None)
            self._newest = longer, self._name
            return
        if self._planner is None:
            frozen = frozen_parts(self._learner, self._anatomy)
            self._planner = Planner(self._options, Memory(**plan.memory), frozen=frozen)
        planner = self._planner
        made = planner.next(replace(plan, until=round_number), statistics)
        if made.chosen is not None:
            made = replace(made, assignment=made.assignment.named())
            _log.info("peer %s decides for the swarm: %s", self._name, planner.decisions[-1])
        self._decisions, planner.decisions = [*self._decisions, *planner.decisions], []
        self._compared, planner.compared = [*self._compared, *planner.compared], []
        self._newest = made, self._name

    def _is_over(self, round_number: int) -> bool:
        """Whether no plan is made any more: a change shortly before the end of training is of no use."""
        return self._never_decides or round_number + self._options.every > self._settings.last_round

    def awaits_plan(self, round_number: int) -> bool:
        """Return whether, in lockstep, no round may be trained before the next plan is known."""
        if not self._lockstep or self._is_over(round_number):
            return False
        known = self._newest[0] if self._newest is not None else self.plan
        return known is None or known.until <= round_number

    def awaits_others(self, others: Mapping[str, Online]) -> bool:
        """Return whether, in lockstep, a peer that is online has not yet changed to the plan that we follow.

        others: by name, what is known of the peers that are online.
        """
        plan, settings = self.plan, self._settings
        if not self._lockstep or plan is None:
            return False
        assignment = plan.assignment
        schemes = np.unique(assignment.scheme_of).tolist()
        own = {scheme: assignment.model(scheme, self._name) for scheme in schemes}
        for peer in set(assignment.peers) & others.keys():
            shared = {m for scheme, m in own.items() if m == assignment.model(scheme, peer)}
            shared.add(self._statistics_name)
            sources = settings.neighbours if settings.sources is None else settings.sources
            for models, neighbours in (
                (others[peer].models, settings.neighbours),
                (others[peer].models_pushed_to_us, sources),
            ):
                is_neighbour = neighbours is None or peer in neighbours
                if not {m for m in shared if is_neighbour or m in self.group_models} <= {*models}:
                    return True
        return False

    def report(self) -> dict[str, Any] | None:
        """Return what was shared over time, and what this process has decided and compared for the swarm."""
        if self._report is None:
            return None
        return self._report.as_record(self._decisions, self._compared)

    def first_plan(self, round_number: int, others: Collection[str]) -> Plan:
        """Return the plan with which a swarm begins to decide: everything is shared."""
        peers = sorted([*others, self._name], key=_in_order)
        first = Planner(self._options).first(Assignment.shared(self._anatomy, peers))
        return replace(first, until=round_number + first.until)

    @property
    def _statistics_name(self) -> str:
        assert self._member is not None
        return f"statistics-{self._member.plan.layout.name}"

    # --- checkpoints ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any] | None:
        """Return what a restart needs; None before the first plan."""
        entry = self.as_card_entry()
        if entry is None:
            return None
        return entry | {
            "statistics": self._store.extra[self._statistics_name],
            "added": self._added,
        }

    def restore(self, data: dict[str, Any] | None) -> None:
        """Continue from a snapshot; what was measured since the last averaging is measured again."""
        if data is None:
            return
        self.offer({"by": data["by"], "plan": data["plan"]})
        self.follow()
        self._store.extra[self._statistics_name] = np.array(data["statistics"])
        self._added = None if data["added"] is None else np.array(data["added"])


def _in_order(name: str) -> tuple[int, str]:
    """Sort names like those of a swarm's peers, 0, 1, … 10, in the order of their numbers."""
    return len(name), name


def _holds(version: int, by: str, other_version: int, other_by: str) -> bool:
    """Return whether a plan replaces another: a newer version does, or the same one of a lower name."""
    if version != other_version:
        return version > other_version
    return _in_order(by) < _in_order(other_by)
