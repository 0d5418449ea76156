"""A live peer's part in deciding what its swarm shares; see `models/sharing`.

What peers measure is one more vector that gossip averages, beside the partial models: its name begins with
`statistics`. A plan is on the card of the peer that made it, so with trust it has its maker's signature. The
cards of others say whose plan they follow. Of the online peers that follow a plan, the first in order (see
`presence.name_order`) makes the next; all others follow the newest one. If the peer that made the plan is not
online, the first of the others announces the same plan as its own, so that newcomers find it, and goes on
with it. When peers do not agree on who is online, two may make plans of one version: the plan of the first in
order replaces the other.

The names of partial models end with a digest of their assignment, so peers that follow different plans never
average values of different meaning.

In the modes rounds and server all peers change to the next plan at the same round: none trains beyond the end
of its plan, and after a change each waits until the others have changed too. The server of a partial model is
the first peer that has it.

A newcomer follows the plan on the cards; cells that groups average are its own at first. The next plan gives
it a row in the statistics and lets it look for its groups: all peers then average the values of their groups
in one more vector (its name begins with `groups`), the newcomer tries each group's values on its held-out
samples, and its card says whose groups it prefers (`like`). The plan after that puts it into these. Only the
newcomer's models change: those of the others keep their names, their members and all their weight. A peer
that has left stays in the assignment, where it makes no difference: its row is empty, and the other members
of its groups average without it. If it comes back, it is in these groups again.

Partial models that were given by hand stay as they are; only cells that all peers share may change. Cards say
which cells each peer gave to which model (`given`), and the first plan is made from that. A newcomer averages
those models at once with the peers that have models of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter

from ..gossip import Gossiper, topics
from ..models import Learner, Metrics, ModelError, norm_layers
from ..models.sharing import (
    MIN_PEERS,
    MIN_SAMPLES,
    OWN,
    SPREAD,
    Assignment,
    AutoOptions,
    Compared,
    Decision,
    Given,
    GroupValues,
    Memory,
    Plan,
    Planner,
    SharingMember,
    SharingReport,
    Statistics,
    averaged_by_hand,
    check_learner,
    frozen_parts,
    given_cells,
    models_of_cells,
    untrained_text,
)
from .exits import PeerError
from .presence import Online, first_of, name_order
from .settings import Settings
from .store import MatchedStore, SwarmMean

_log = logging.getLogger(__name__)

MAX_VERSIONS_AHEAD = 10**6
"""How far a plan's version may be ahead of the newest one that is known. It is far more than a peer can miss,
but a forged plan cannot have the highest version of all, which no other plan could replace."""

MAX_SENTENCES = 4
"""The most of its latest decisions that a peer reports in its metrics."""
MAX_REPORTED = 1000
"""The most decisions, and the most comparisons, that are kept for the report of a peer that runs for ever."""


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
        self._lockstep = settings.mode != "async"
        self._options = AutoOptions()
        network = learner.network
        if norm_layers(network.module) and network.buffers != "average":
            raise PeerError(
                f"peer {name}: peers decide about norm layers, too: leave out buffers, or set buffers = "
                '"average"'
            )
        self._anatomy = network.slicing.anatomy.with_norm_parts(norm_layers(network.module))
        self._given: dict[str, Given] = {}
        """The cells of partial models that were given by hand, by peer; empty if this peer has none."""
        if len(network.models) > 1:
            self._given[name] = given_cells(network.slicing)
            self._averaged_by_hand = averaged_by_hand(network.slicing)
        self._member: SharingMember | None = None
        self._planner: Planner | None = None
        self._newest: tuple[Plan, str] | None = None
        """The newest plan that is known, and the name of the peer that made it."""
        self._made_by = ""
        """The name of the peer that made the plan that is followed, or announced it again."""
        self._highest_version = -1
        """The highest version of a plan that a card has named so far."""
        self._statistics: SwarmMean | None = None
        """What all peers have measured."""
        self._groups: GroupValues | None = None
        self._group_means: SwarmMean | None = None
        """While newcomers look for their groups: where the values of groups are in a vector, and its mean."""
        self._preferred: str | None = None
        """As a newcomer: the peer whose groups this one prefers, empty while it has tried none; else None."""
        self._values_when_sent = np.zeros(0, np.float32)
        """This peer's values when those of groups were sent. A newcomer tries the groups' values with these:
        newer ones would have the advantage of more training."""
        self._announcements = len(self._given)
        self._round_is_open = False
        """Whether a round was trained whose averaging has not been measured."""
        self._report: SharingReport | None = None
        self._decisions: list[Decision] = []
        self.sentences: tuple[str, ...] = ()
        """The latest decisions that this process has made for the swarm, a sentence each."""
        self._compared: list[Compared] = []
        if not self._given:
            everything = Assignment.shared(self._anatomy, [name])
            network.reslice(*everything.slices(name), anatomy=self._anatomy)
        expected = {*settings.expect, name}
        self._never_decides = self._lockstep and len(expected) < MIN_PEERS
        if self._never_decides or 1 < len(expected) < MIN_PEERS:
            _log.warning(
                "peer %s: everything stays shared as it is%s: %d peers are expected, but %d are needed",
                name, "" if self._lockstep else " until more have joined", len(expected), MIN_PEERS,
            )  # fmt: skip
        if text := untrained_text(self._learner):
            _log.warning("peer %s: %s", name, text)

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed."""
        return None if self._member is None else self._member.plan

    @property
    def _spread(self) -> int:
        """`Plan.spread` of the present plan, or of the first: in async mode a push reaches only few peers."""
        if self.plan is not None:
            return self.plan.spread
        return 0 if self._lockstep else SPREAD

    @property
    def plan_number(self) -> int:
        """The number of the plan that is followed, from 1; 0 before the first."""
        return 0 if self.plan is None else self.plan.version + 1

    @property
    def announcements(self) -> int:
        """How often what the card says has changed."""
        return self._announcements

    @property
    def group_models(self) -> frozenset[str]:
        """Partial models of groups, which average them as if all of their peers were neighbours."""
        plan = self.plan
        if plan is None:
            return frozenset()
        models = self._learner.network.averaged_models
        return plan.assignment.models_of_formed_groups(models)

    def server_of(self, model: str) -> str:
        """Return the peer that averages a partial model in server mode: the first of those that have it."""
        plan = self.plan
        if plan is None:
            if self._given:
                return self._settings.servers.get(model, self._name)
            return first_of({*self._settings.expect, self._name})
        assignment = plan.assignment
        schemes = np.unique(assignment.scheme_of).tolist()
        for peer in assignment.peers:
            models = {assignment.model(scheme, peer) for scheme in schemes}
            if models.issuperset(model.split("&")) or model in self._store.extra:
                return peer
        return self._name

    # --- plans on cards -------------------------------------------------------------------------

    def as_card_entry(self) -> dict[str, Any] | None:
        """Return what our card says: whose plan is followed, the plan if it is ours, a newcomer's choice.

        Beside partial models given by hand, it says which cells these have, also before there is a plan.
        """
        plan, record, given = self.plan, None, self._given.get(self._name)
        if plan is None and given is None:
            return None
        if plan is not None and self._made_by == self._name:
            record = plan.as_record()
        version = NO_PLAN if plan is None else plan.version
        entry = {"by": self._made_by, "version": version, "plan": record, "like": self._preferred}
        return entry if given is None else entry | {"given": given}

    def read_card_entry(self, peer: str, entry: dict[str, Any]) -> None:
        """Note what another peer's card says about plans; peer: its owner.

        Raises ModelError if a plan is not one for this network, or not the card owner's own.
        """
        try:
            version, record, newest = entry["version"], entry["plan"], self._newest
            if type(version) is not int:
                raise ModelError(f"the version of a plan is {version!r:.50}")
            if self._given and (given := entry.get("given")) is not None:
                self._given[peer] = _GIVEN.validate_python(given)
            if newest is not None:
                if version > newest[0].version + MAX_VERSIONS_AHEAD:
                    raise ModelError(f"version {version} is too far ahead of {newest[0].version}")
                self._highest_version = max(self._highest_version, version)
            if record is None:
                return
            by = topics.check_name("peer", entry["by"])
            if by != peer:
                raise ModelError(f"only the card of {by} may have a plan of {by}")
            if newest is None or _replaces(version, by, newest[0].version, newest[1]):
                self._note(by, version, record)
        except ModelError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the plan on a card cannot be read ({error!r})") from None

    def _note(self, by: str, version: int, record: dict[str, Any]) -> None:
        """Remember a plan as the newest one."""
        # Plans of 1.0 do not say how fast values spread.
        plan = Plan.from_record(self._anatomy, {"spread": self._spread, **record})
        if plan.version != version:
            raise ModelError(f"a card gives plan {plan.version} the version {version}")
        if not plan.assignment.is_named_by_content:
            raise ModelError("a plan's assignment does not have its own digest as its suffix")
        self._newest = plan, by

    def follow(self) -> bool:
        """Follow the newest plan, if it is newer than the present one; return whether models change."""
        if self._newest is None:
            return False
        plan, by = self._newest
        present = self.plan
        if present is not None and not _replaces(plan.version, by, present.version, self._made_by):
            return False
        before = set(self._store.names())
        if self._given:
            try:
                plan.assignment.check_averages(self._name, self._averaged_by_hand)
            except ModelError as error:
                raise PeerError(
                    f"plan {plan.version} of peer {by} cannot be followed: {error}"
                ) from None
        self._join_groups(plan, present)
        if self._member is None:
            self._member = SharingMember(self._learner, plan, self._options, name=self._name)
        else:
            self._member.follow(plan)
        self._store.own_model = plan.assignment.model(OWN, self._name)
        if by != self._name:
            self._planner = None
        self._made_by = by
        self._announcements += 1
        if self._report is None:
            self._report = SharingReport(plan.assignment)
        self._report.add(plan.round, plan.assignment)
        if present is None or plan.assignment.digest != present.assignment.digest:
            models = ", ".join(sorted(self._learner.network.models))
            _log.info(
                "peer %s follows plan %d of %s: it has the models %s",
                self._name, plan.version, by, models,
            )  # fmt: skip
        name = f"statistics-{plan.layout.name}"
        if (
            plan.spread
        ):  # a new vector for each plan: values that are added later distort what is read
            name += f"-{plan.round}"
        self._statistics = self._mean_named(self._statistics, name, plan.layout.size)
        groups = None
        if plan.newcomers and self._name in plan.assignment.peers:
            groups = GroupValues(plan.assignment, plan.newcomers)
        if groups is None or self._groups is None or groups.name != self._groups.name:
            self._groups = groups
            self._values_when_sent = np.zeros(0, np.float32)
        if groups is not None:
            self._group_means = self._mean_named(
                self._group_means, f"groups-{groups.name}", groups.size
            )
        elif self._group_means is not None:
            self._group_means.remove()
            self._group_means = None
        return before != set(self._store.names())

    def _mean_named(self, mean: SwarmMean | None, name: str, size: int) -> SwarmMean:
        """Return the mean if it has this name; otherwise replace it by a new one."""
        if mean is not None and mean.name == name:
            return mean
        if mean is not None:
            mean.remove()
        return SwarmMean(self._store, name, size)

    def _join_groups(self, plan: Plan, present: Plan | None) -> None:
        """Become a newcomer if a plan leaves us out; take over the values of groups that it puts us into."""
        assignment = plan.assignment
        if self._name not in assignment.peers:
            self._preferred = ""
        elif self._preferred is None:
            new = present is not None and assignment.suffix != present.assignment.suffix
            if new and not self._lockstep and self._is_alone(assignment):
                self._preferred = ""  # our measurements had not arrived when groups were formed
        elif not assignment.formed:
            self._preferred = None
        elif self._preferred in assignment.peers and assignment.groups_of(
            self._name
        ) == assignment.groups_of(self._preferred):
            if self._groups is not None and self._group_means is not None:
                values = self._values_in_groups_of(self._preferred, self._values())
                if values is not None:
                    self._learner.network.flat.copy_(torch.from_numpy(values))
            if self._preferred != self._name:
                _log.info("peer %s joins the groups of peer %s", self._name, self._preferred)
            self._preferred = None
        elif present is not None and assignment.suffix != present.assignment.suffix:
            self._preferred = ""  # the groups that it preferred no longer exist

    def _is_alone(self, assignment: Assignment) -> bool:
        """Return whether we are alone in our group, in every grouping that has formed."""
        place = assignment.peers.index(self._name)
        labels = [assignment.schemes[scheme] for scheme in assignment.formed]
        return bool(labels) and all(each.count(each[place]) == 1 for each in labels)

    # --- rounds ---------------------------------------------------------------------------------

    def before_training(self) -> None:
        """Note the values that a round of training begins with."""
        if self._member is not None:
            self._member.before_training()

    def after_training(self, training: Metrics, gossiper: Gossiper) -> None:
        """Add what was measured to the statistics, after a round of training."""
        if self._member is None or self._statistics is None:
            return
        previous = self._statistics.contribution
        self._statistics.contribute(gossiper, self._member.before_averaging(training, previous))
        means = self._group_means
        if self._groups is not None and means is not None:
            if not len(self._values_when_sent):
                self._values_when_sent = self._values()
            if means.contribution is None:
                means.contribute(gossiper, self._groups.pack(self._name, self._values_when_sent))
        self._round_is_open = True

    def _values(self) -> np.ndarray:
        return self._learner.network.flat.cpu().numpy().copy()

    def _values_in_groups_of(self, example: str, values: np.ndarray) -> np.ndarray | None:
        """Return values with the means of a peer's groups put in their places; None while one is unknown."""
        assert self._groups is not None
        assert self._group_means is not None
        if example == self._name:
            return values
        return self._groups.values_in_groups_of(example, self._group_means.value, values)

    def _try_groups(self, online: Mapping[str, Online]) -> None:
        """As a newcomer: try the values of all groups on held-out samples, and note which are best.

        It prefers its own values, as they were before training on these samples, only if they are better by
        more than a standard error. It waits for the values of every group that a peer of `online` is in:
        else it would join the group that it hears first.
        """
        if self._groups is None or self._preferred is None or not len(self._values_when_sent):
            return
        assert self._member is not None
        assignment = self._member.plan.assignment
        present = {
            assignment.groups_of(name)
            for name, other in online.items()
            if name in assignment.peers and _follows_plan(other)
        }
        tried = {}
        for example in self._groups.examples_for(self._name):
            values = self._values_in_groups_of(example, self._values_when_sent)
            if values is not None:
                tried[example] = self._member.held_out_losses(values)
            elif assignment.groups_of(example) in present:
                return
        if not tried:
            return
        best = min(tried, key=lambda each: float(tried[each].mean()))
        own = self._member.values_before_release
        if own is None:
            own = self._values_when_sent
        gain = self._member.held_out_losses(own) - tried[best]
        if float(gain.mean()) < -float(gain.std(ddof=1)) / len(gain) ** 0.5:
            best = self._name
        if best != self._preferred:
            self._preferred = best
            self._announcements += 1

    def after_averaging(self, round_number: int, online: Mapping[str, Online]) -> None:
        """Measure, when the averaging of a round is over; make the next plan if it is due and our turn.

        online: by name, what is known of the other peers that are online.
        """
        mean = self._statistics
        if mean is not None and mean.contribution is None:
            mean = None  # this peer has no part in it yet
        if self._member is not None and self._round_is_open and mean is not None:
            self._member.after_averaging(mean.value, complete=self._is_complete(mean.value, online))
            self._try_groups(online)
        self._round_is_open = False
        plan = self.plan
        if self._no_plan_follows(round_number) or not self._makes_plans(online):
            return
        known = self._newest
        if known is not None and (plan is None or known[0].version > plan.version):
            return  # the next plan is known, and not followed yet
        if plan is None:
            others = {*self._settings.expect, *online} - {self._name}
            all_cells_known = not self._given or others <= self._given.keys()
            if len(others) + 1 >= MIN_PEERS and others <= {*online} and all_cells_known:
                self._newest = self.first_plan(round_number, others), self._name
            return
        maker = online.get(self._made_by)
        if self._made_by != self._name and (maker is None or not _follows_plan(maker)):
            version = max(plan.version, self._highest_version) + 1
            self._newest = replace(plan, version=version, chosen=None), self._name
            return
        # In async mode a plan ends as soon as all measurements have arrived; in lockstep at a fixed round.
        ends_early = plan.deciding and not self._lockstep
        if mean is None or (round_number < plan.until and not ends_early):
            return
        statistics = Statistics(plan.layout, mean.value, spread=plan.spread)
        if self._planner is None:
            frozen = frozen_parts(self._learner, self._anatomy)
            self._planner = Planner(self._options, Memory(**plan.memory), frozen=frozen)
        planner = self._planner
        online_count = len({self._name, *online}.intersection(plan.assignment.peers))
        is_slow = self._member is not None and self._member.is_slow
        made = planner.next_if_measured(plan, statistics, round_number, online_count, is_slow)
        if made is None:
            if self._lockstep:  # nobody trains beyond the end of a plan
                self._newest = planner.extended(plan, round_number), self._name
            return
        if made.chosen is not None:
            made = replace(made, assignment=made.assignment.named())
            assert self._report is not None
            text = self._report.decision(planner.decisions[-1])["sentence"]
            self.sentences = (*self.sentences, text)[-MAX_SENTENCES:]
            _log.info("peer %s decides for the swarm: %s", self._name, text)
        self._decisions = [*self._decisions, *planner.decisions][-MAX_REPORTED:]
        self._compared = [*self._compared, *planner.compared][-MAX_REPORTED:]
        planner.decisions, planner.compared = [], []
        self._newest = self._with_newcomers(made, online), self._name

    def _makes_plans(self, online: Mapping[str, Online]) -> bool:
        """Return whether we make the next plan: as the first of the peers that follow one, if any do."""
        following = [name for name, other in online.items() if _follows_plan(other)]
        if self.plan is not None:
            following.append(self._name)
        return self._name == first_of(following or [*online, self._name])

    def _is_complete(self, vector: np.ndarray, online: Mapping[str, Online]) -> bool:
        """Return whether values of all online peers have arrived, with about the same weight each."""
        assert self.plan is not None
        online_peers, peers = {self._name, *online}, self.plan.assignment.peers
        numbers = (number for number, name in enumerate(peers) if name in online_peers)
        return self.plan.layout.is_complete(vector, numbers)

    def _with_newcomers(self, plan: Plan, online: Mapping[str, Online]) -> Plan:
        """Return the plan with peers that joined late: first they get a row, later the groups they prefer.

        Candidates are compared once all peers have measured, so a plan that adds or moves peers has none.
        """
        preferred = {name: (other.plan or {}).get("like") for name, other in online.items()}
        preferred[self._name] = self._preferred
        assignment = before = plan.assignment
        # If the plan changes the assignment, the groups that newcomers have tried no longer exist.
        for name in assignment.peers if plan.chosen is None else ():
            if (example := preferred.get(name)) in assignment.peers and example != name:
                assignment = assignment.joined(name, example)
        new = sorted(preferred.keys() - {*assignment.peers}, key=name_order)
        assignment = assignment.with_peers(new)
        for name in new:
            assignment = self._with_models_by_hand(assignment, name, plan.memory.get("moved", ()))
        if not assignment.is_named_by_content:  # a peer of the assignment has changed its groups
            assignment = assignment.named()

        def has_groups(name: str) -> bool:
            example = preferred.get(name)
            return example in assignment.peers and (
                assignment.groups_of(name) == assignment.groups_of(example)
            )

        looking = [
            name
            for name in assignment.peers
            if (name in new or preferred.get(name) is not None) and not has_groups(name)
        ]
        plan = replace(plan, newcomers=tuple(looking) if assignment.formed else ())
        if assignment.digest == before.digest:
            return plan
        rounds = Planner(self._options).length(plan.spread)
        return replace(plan, assignment=assignment, candidates=(), until=plan.round + rounds)

    def _with_models_by_hand(
        self, assignment: Assignment, peer: str, moved: Collection[int]
    ) -> Assignment:
        """Return the assignment with a newcomer among the peers that gave the same cells to the same models.

        moved: cells that all peers shared before a decision; who averages these does not matter here.
        """
        anatomy = assignment.anatomy
        for scheme in range(OWN + 1, assignment.given):
            cells = np.setdiff1d(np.flatnonzero(assignment.scheme_of == scheme), list(moved))
            for example in assignment.peers:
                models = [
                    models_of_cells(anatomy, self._given.get(each, {}), cells)
                    for each in (peer, example)
                ]
                if example != peer and models[0] == models[1] != {}:
                    assignment = assignment.joined(peer, example, [scheme])
                    break
        return assignment

    def _no_plan_follows(self, round_number: int) -> bool:
        """Return whether no more plans are made: a change shortly before the end of training is of no use."""
        rounds = Planner(self._options).length(self._spread)
        return self._never_decides or round_number + rounds > self._settings.last_round

    def awaits_plan(self, round_number: int) -> bool:
        """Return whether, in lockstep, no round may be trained before the next plan is known."""
        if not self._lockstep or self._no_plan_follows(round_number):
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
            if self._statistics is not None:
                shared.add(self._statistics.name)
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
        """Return the plan with which a swarm begins to decide: what was not given by hand is shared by all.

        Raises PeerError if no plan can be made beside the partial models that peers were given.
        """
        peers = sorted([*others, self._name], key=name_order)
        assignment = Assignment.shared(self._anatomy, peers)
        if self._given:
            try:
                given = {peer: self._given[peer] for peer in peers}
                assignment = Assignment.by_hand(self._anatomy, given).named()
            except ModelError as error:
                raise PeerError(f'sharing = "auto" cannot use the given models: {error}') from None
        first = Planner(self._options).first(assignment, spread=self._spread)
        return replace(first, until=round_number + first.until)

    def reset(self) -> None:
        """Start the averages of measurements anew, in a new session."""
        for mean in (self._statistics, self._group_means):
            if mean is not None:
                mean.reset()

    # --- checkpoints ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any] | None:
        """Return what a restart needs; None before the first plan."""
        if self.plan is None or self._statistics is None:
            return None
        groups = self._group_means
        return {
            "by": self._made_by,
            "plan": self.plan.as_record(),
            "like": self._preferred,
            "statistics": self._statistics.snapshot(),
            "groups": None if groups is None else groups.snapshot(),
        }

    def restore(self, data: dict[str, Any] | None) -> None:
        """Continue from a snapshot; what was measured since the last averaging is measured again."""
        if data is None:
            return
        self._note(data["by"], data["plan"]["version"], data["plan"])
        self.follow()
        self._preferred = data["like"]
        for mean, values in (
            (self._statistics, data["statistics"]),
            (self._group_means, data["groups"]),
        ):
            if mean is not None and values is not None:
                mean.restore(values)


_GIVEN = TypeAdapter(Given, config=ConfigDict(strict=True))
NO_PLAN = -1
"""The version on the card of a peer that follows no plan yet."""


def _follows_plan(other: Online) -> bool:
    """Return whether another peer's card says that it follows a plan."""
    return other.plan is not None and other.plan.get("version") != NO_PLAN


def _replaces(version: int, by: str, other_version: int, other_by: str) -> bool:
    """Return whether a plan replaces another: it is newer, or as new and its maker is earlier in order."""
    if version != other_version:
        return version > other_version
    return name_order(by) < name_order(other_by)
