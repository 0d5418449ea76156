"""Live peers that decide by themselves what they share: they find groups, and all weight is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from papers_kit import Papers
from peer_kit import Life, Nest, begin, delivered, quick
from torch import nn
from waiting import until

from gossamer.experiments.arena import Arena, AutoSharing, ExactMean, Gossip
from gossamer.experiments.data import load
from gossamer.gossip import ONE, ReleasePlan, topics
from gossamer.gossip.security import Admission, SwarmSecurity, revocation_topic
from gossamer.models import Metrics, ModelError, ModelGraph, SgdLearner, SlicedNetwork, mlp
from gossamer.models.sharing import (
    OWN,
    Assignment,
    AutoOptions,
    GroupValues,
    Memory,
    Plan,
    Planner,
    SharingReport,
)
from gossamer.peer import AUTO_MODELS, PeerError
from gossamer.peer.engine import Engine
from gossamer.peer.lifecycle import Report
from gossamer.peer.presence import Card, Online, Status
from gossamer.peer.settings import Settings

torch.set_num_threads(1)
NAMES = tuple("abcdef")
OTHER = torch.tensor([3, 4, 5, 6, 7, 8, 9, 0, 1, 2])


def make(name: str, *, permuted: bool = True, samples: int = 120, rate: float = 0.1) -> SgdLearner:
    """A learner of digits; every second peer has other labels if `permuted`."""
    digits, index = load("digits"), ord(name) - ord("a")
    order = torch.randperm(len(digits.train.y), generator=torch.Generator().manual_seed(0))
    own = order[index * samples : (index + 1) * samples]
    relabel = OTHER if permuted and index % 2 else torch.arange(10)
    network = SlicedNetwork(mlp("64=30=10"), {"all": 1.0}, peer=name, rest=None, seed=0)
    assert digits.test is not None
    tests = digits.test.x.flatten(1), relabel[digits.test.y]
    train = digits.train.x.flatten(1)[own], relabel[digits.train.y[own]]
    return SgdLearner(network, train, tests, local_samples=80, batch=10, rate=rate, seed=index)


def check_accounts(reports: Iterable[Report]) -> set[str]:
    """Check that the weight of every partial model there ever was adds up; return their names."""
    totals: dict[str, int] = {}
    for report in reports:
        for model, (held, on_its_way, injected) in report.weight.items():
            totals[model] = totals.get(model, 0) + held + on_its_way - injected
    assert not any(totals.values()), totals
    return set(totals)


def groups_of(learners: dict[str, SgdLearner]) -> dict[str, set[str]]:
    """The peers that share each group's model."""
    members: dict[str, set[str]] = {}
    for name, learner in learners.items():
        for model in learner.network.models:
            if model.startswith("group"):
                members.setdefault(model, set()).add(name)
    return members


def two_groups(
    learner: SgdLearner, names: Sequence[str], labels: tuple[int, ...] | None = None
) -> Plan:
    """Return a plan in which every second peer averages its outputs with the others like it."""
    anatomy = learner.network.slicing.anatomy
    labels = labels or tuple(place % 2 for place in range(len(names)))
    shared = Assignment.shared(anatomy, names)
    grouped = shared.change(anatomy.names[-1], range(10), labels).named()
    quiet = asdict(Memory(next_look=10**9))
    return Plan(grouped, version=50, round=0, until=0, deciding=False, memory=quiet)


def entry_of(by: Any, plan: Plan | dict[str, Any]) -> dict[str, Any]:
    """What the card of a plan's maker says."""
    record = plan if isinstance(plan, dict) else plan.as_record()
    return {"by": by, "version": record["version"], "plan": record, "like": None}


async def offer(life: Any, name: str, plan: Plan) -> None:
    """Let a live peer announce a plan as if it had made it."""
    link = life.peer.link
    assert link is not None
    await link.worker.run(link.engine.sharing.read_card_entry, name, entry_of(name, plan))


@pytest.mark.parametrize("wire", [{"compress": "int8"}, {"dtype": "float16", "drift": 0.02}])
def test_peers_with_two_tasks_part(run, wire: dict[str, Any]) -> None:
    """However their values are sent: what they measure is sent as it is."""
    learners = {name: make(name) for name in NAMES}

    async def scenario() -> list[Report]:
        nest = Nest(
            quick(
                rounds=10**6,
                expect=NAMES,
                sharing="auto",
                exchanges=2,
                settle_tolerance=1e-2,
                **wire,
            )
        )
        for name, learner in learners.items():
            nest.start(name, learner)
        await until(  # the cells that are still shared by all have another name then
            lambda: all(
                any(model.startswith("global-") for model in each.network.models)
                for each in learners.values()
            )
        )
        await nest.learned(0.7)  # without groups they get about half right
        return await nest.finish(3)

    reports = run(scenario())
    models = check_accounts(reports)
    assert "global" in models
    assert any(model.startswith("statistics") for model in models)
    compressed = {model for report in reports for model in report.compression}
    assert compressed or "compress" not in wire  # drift counts only pushes that it skips
    assert not any(model.startswith("statistics") for model in compressed)
    groups = groups_of(learners)
    for members in groups.values():
        assert len({ord(name) % 2 for name in members}) == 1, groups


def label(name: str) -> str:
    """A peer's name without the id of its key."""
    return name.partition("@")[0]


def check_refusals(reports: Iterable[Report]) -> None:
    """Check that guards refused nobody, as all are honest, and that no transfer was left unanswered."""
    causes = {cause for report in reports for cause in report.dropped}
    assert not any(cause.startswith(("guards", "too-large")) for cause in causes), causes


def half_by_hand(name: str) -> SgdLearner:
    """A learner that shares five outputs with the peers of its task, by hand, and all else with everybody."""
    learner, task = make(name), f"task{ord(name) % 2}"
    slices = {"global": {"*": 1.0, "2": 0.5}, task: {"2": 0.5}}
    learner.network.reslice(slices, ModelGraph({"global": [], task: ["global"]}), cross=False)
    return learner


BY_HAND = ("task0", "task1")


DENSE, RING = nx.circulant_graph(len(NAMES), [1, 2]), nx.cycle_graph(len(NAMES))


@pytest.mark.parametrize(
    ("mode", "build", "graph"),
    [
        ("server", half_by_hand, DENSE),
        ("rounds", make, RING),
    ],
    ids=["server-by-hand", "rounds-on-a-ring"],
)
def test_in_lockstep_peers_decide_what_a_simulation_decides_at_the_same_rounds(
    run, tmp_path: Path, mode: str, build: Callable[[str], SgdLearner], graph: nx.Graph
) -> None:
    """The same networks, samples and graph: a live swarm in lockstep is the simulation, up to rounding.

    The peers trust each other, and nobody knew the names of their groups when invitations were signed. What
    was given by hand stays as it is. On a ring, both wait until the values of all peers have arrived.
    """
    is_slow = graph is RING
    rounds, exchanges = (34, 1) if is_slow else (18, 3)
    simulated = [build(name) for name in NAMES]
    sharing = AutoSharing(keep_models=build is half_by_hand)
    mixing = Gossip(graph, exchanges=exchanges) if mode == "rounds" else ExactMean()
    arena = Arena(simulated, mixing=mixing, sharing=sharing)
    expected = list(arena.run(rounds))[-1]
    assert sharing.decisions
    learners = {name: build(name) for name in NAMES}
    papers = Papers(tmp_path)
    names = tuple(papers.invite(name, models=(*AUTO_MODELS, *BY_HAND)) for name in NAMES)

    async def scenario() -> list[Report]:
        servers = {"task0": names[1], "task1": names[0]} if build is half_by_hand else {}
        settings = quick(
            rounds=rounds,
            expect=names,
            sharing="auto",
            mode=mode,
            exchanges=exchanges,
            lease=600.0,
            servers=servers,
        )
        nest = Nest(settings)
        for index, (name, learner) in enumerate(learners.items()):
            neighbours = tuple(names[other] for other in graph[index])
            own = settings.updated(neighbours=neighbours) if mode == "rounds" else settings
            nest.start(name, learner, papers.settings(name, own))
        return await nest.all()

    reports = run(scenario())
    models = check_accounts(reports)
    check_refusals(reports)
    assert not any(model.startswith("local-") for model in models)  # no card may name these
    groups = groups_of(learners)
    assert groups
    for members in groups.values():
        assert len({ord(name) % 2 for name in members}) == 1, groups
    decided = [one for report in reports if report.sharing for one in report.sharing["decisions"]]
    last = rounds - Planner(AutoOptions()).length(sharing.plan.spread)
    assert bool(sharing.plan.spread) == is_slow
    simulated_decisions = [one for one in sharing.as_record()["decisions"] if one["round"] <= last]
    assert decided
    for one in decided:
        one["groups"] = [[label(name) for name in group] for group in one["groups"]]
    assert [(one["round"], one["part"], one["cells"], one["groups"]) for one in decided] == [
        (one["round"], one["part"], one["cells"], one["groups"]) for one in simulated_decisions
    ]
    accuracies = [test.accuracy for test in expected.tests]
    assert [report.accuracy for report in reports] == pytest.approx(accuracies, abs=0.06)
    if build is half_by_hand:
        record = SharingReport.merged([report.sharing for report in reports if report.sharing])
        first, last = (record["history"][index]["assignment"] for index in (0, -1))
        assert first["cells"]["2"] == {"0": [0, 1, 2, 3, 4], "2": [5, 6, 7, 8, 9]}
        assert first["schemes"][2] == [0, 1] * 3
        assert {5, 6, 7, 8, 9} <= {*last["cells"]["2"]["2"]}


def test_a_newcomer_averages_models_given_by_hand_with_those_that_have_the_same(run) -> None:
    """From the next plan on, and without a look at its samples; nobody else's models change."""
    names = NAMES[:4]
    learners = {name: half_by_hand(name) for name in (*names, "e", "f")}
    tasks = {task: {name for name in learners if ord(name) % 2 == task} for task in range(2)}

    def models_by_hand() -> list[set[str]]:
        """The peers that share each model of the first grouping, by the present plan's names."""
        found = groups_of(learners)
        return [members for model, members in found.items() if model.startswith("group2-")]

    async def scenario() -> list[Report]:
        nest = Nest(quick(rounds=10**6, expect=names, sharing="auto", settle_tolerance=1e-2))
        lives = {name: nest.start(name, learners[name]) for name in names}
        await until(lambda: all(life.trains() and life.view.plan for life in lives.values()))
        for name in "ef":
            nest.start(name, learners[name], quick(rounds=10**6, sharing="auto"))
        await until(lambda: all(members in models_by_hand() for members in tasks.values()))
        return await nest.finish(8)

    reports = run(scenario())
    models = check_accounts(reports)
    assert {"global", *BY_HAND} <= models, "the names of before the first plan"


def test_models_by_hand_that_do_not_go_together_are_one_line() -> None:
    """A peer keeps outputs that the plan's maker shares with all; or two give other cells to one model."""
    other, own = half_by_hand("b"), make("b")
    own.network.reslice({"global": {"*": 1.0, "2": 0.0}, "local-b": {"2": 1.0}}, cross=False)
    other.network.reslice({"global": {"*": 1.0, "2": 0.4}, "task0": {"2": 0.6}})
    shared = begin(Engine("a", make("a"), quick(sharing="auto", rounds=60))).sharing
    assert shared is not None
    plan = entry_of("a", shared.first_plan(0, ["b", "c", "d"]))
    engine = begin(Engine("b", own, quick(sharing="auto", rounds=60)))
    engine.turn([], [Online("a", "s", (), plan=plan)], 0.0, 10**6)
    with pytest.raises(
        PeerError, match=r"plan 0 of peer a cannot be followed: peer b: .*average across"
    ):
        engine.begin_round()
    engine = begin(Engine("b", other, quick(sharing="auto", rounds=60)))
    sharing, cards = engine.sharing, {}
    assert sharing is not None
    for name in "adf":
        each = begin(Engine(name, half_by_hand(name), quick(sharing="auto", rounds=60))).sharing
        assert each is not None
        cards[name] = each.as_card_entry()
        assert cards[name] is not None
        sharing.read_card_entry(name, cards[name])
    with pytest.raises(PeerError, match="gives other cells to partial model"):
        sharing.first_plan(0, "adf")
    for given in ({"task0": {"nose": [0]}}, {"task0": {"2": [10]}}):
        sharing.read_card_entry("a", cards["a"] | {"given": given})
        with pytest.raises(PeerError, match=r"^sharing = .*part"):
            sharing.first_plan(0, "adf")
    for given in (7, {"task0": 7}, {"task0": {"2": ["x"]}}, {"task0": {"2": [1.5]}}):
        with pytest.raises(ModelError, match="cannot be read"):
            sharing.read_card_entry("a", cards["a"] | {"given": given})


def test_kills_and_newcomers_lose_no_weight(run, tmp_path: Path) -> None:
    """A follower and the peer that makes plans are killed and restarted, and a newcomer finds the plan.

    All have invitations, and judge each other's values.
    """
    learners = {name: make(name) for name in (*NAMES, "g")}
    papers = Papers(tmp_path)
    names = tuple(papers.invite(name, models=AUTO_MODELS) for name in learners)

    async def scenario() -> tuple[list[Report], int]:
        settings = quick(rounds=10**6, sharing="auto", exchanges=2, settle_tolerance=1e-2)
        nest, expecting = Nest(settings), settings.updated(expect=names[:-1])

        def start(name: str, own: Settings = expecting) -> Life:
            signed = papers.settings(name, own)
            return nest.start(name, learners[name], signed, checkpoint=tmp_path / name)

        lives = {name: start(name) for name in NAMES}
        await until(lambda: lives["b"].trains() and lives["b"].view.plan >= 3)
        for name in ("c", "a"):  # a is the first in order: it makes the plans
            version = lives["b"].view.plan
            await lives[name].crash()
            await until(lambda version=version: lives["b"].view.plan > version)
            learners[name] = make(name)
            lives[name] = start(name)
            await until(lambda name=name: lives[name].trains())
        late = start("g", settings)
        await until(lambda: late.counts() and late.view.plan >= lives["b"].view.plan - 1)
        newcomer_plan = late.view.plan
        return await nest.finish(3), newcomer_plan

    reports, newcomer_plan = run(scenario())
    assert newcomer_plan > 1
    models = check_accounts(reports)
    check_refusals(reports)
    assert len(models) > 3
    assert {report.ended for report in reports} == {"finished"}


def test_newcomers_join_the_groups_that_their_own_held_out_samples_prefer(run) -> None:
    """The others keep their models; every weight adds up, and a newcomer has a row in the next plan."""
    names = NAMES[:4]
    learners = {name: make(name) for name in (*names, "e", "f")}
    plan = two_groups(learners["a"], names)
    first, second = (plan.assignment.model(OWN + 1, name) for name in "ab")

    async def scenario() -> list[Report]:
        nest = Nest(quick(rounds=10**6, expect=names, sharing="auto", settle_tolerance=1e-2))
        lives = {name: nest.start(name, learners[name]) for name in names}
        await until(lambda: all(life.trains() and life.view.plan for life in lives.values()))
        await offer(lives["a"], "a", plan)
        await until(
            lambda: all({first, second} & {*life.view.counting_rounds} for life in lives.values())
        )
        counting = {name: lives[name].view.counting_rounds[first] for name in "ac"}
        for name in "ef":
            nest.start(name, learners[name], quick(rounds=10**6, sharing="auto"))
        await until(
            lambda: groups_of(learners) == {first: {"a", "c", "e"}, second: {"b", "d", "f"}}
        )
        for name in "ac":  # their weight has counted all the time
            assert lives[name].view.counting_rounds[first] > counting[name]
        await nest.learned(0.7)
        return await nest.finish(3)

    reports = run(scenario())
    models = check_accounts(reports)
    assert any(model.startswith("groups") for model in models)
    record = SharingReport.merged([report.sharing for report in reports if report.sharing])
    assert set(record["assignment"]["peers"]) == set(learners)


def test_a_peer_that_was_left_alone_when_groups_formed_finds_its_group(run) -> None:
    """All follow the plan that moves it, although it is one of those that the groups were made for."""
    names = NAMES[:5]
    # a has the task of c and e, and learns nothing by itself, so that their values are better in any history.
    learners = {name: make(name, rate=1e-6 if name == "a" else 0.1) for name in names}
    plan = two_groups(learners["a"], names, (0, 1, 2, 1, 2))

    async def scenario() -> list[Report]:
        nest = Nest(quick(rounds=10**6, expect=names, sharing="auto", settle_tolerance=1e-2))
        lives = {name: nest.start(name, learners[name]) for name in names}
        await until(lambda: all(life.trains() and life.view.plan for life in lives.values()))
        await until(lambda: min(lives[name].view.round for name in "bcde") >= 5)
        await offer(lives["a"], "a", plan)
        await until(lambda: {"a", "c", "e"} in groups_of(learners).values())
        await until(lambda: {"b", "d"} in groups_of(learners).values())
        return await nest.finish(3)

    reports = run(scenario())
    check_accounts(reports)
    assert not any("plan" in report.dropped for report in reports)


def hostile_entries(good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a card may have in the place of a plan; good: the record of a plan for peers a to d."""
    assignment, own = good["assignment"], {"part": "2", "cells": [0], "scheme": 1}
    yield {}
    yield entry_of("a", good) | {"plan": 7}
    yield entry_of("a", good) | {"version": 7}
    yield entry_of("a", good) | {"version": "many", "plan": None}
    for by in ("", "a/b", "x" * 65, 7, None, ["a"], "b"):
        yield entry_of(by, good)
    for changes in (
        {"version": "many"},
        {"version": 10**400},
        {"version": 1.5},
        {"version": -1},
        {"until": float("inf")},
        {"deciding": "yes"},
        {"chosen": -1},
        {"memory": {"steps": "many"}},
        {"memory": {"recent_losses": "few"}},
        {"assignment": {"peers": []}},
        {"assignment": assignment | {"peers": []}},
        {"assignment": assignment | {"peers": ["a", "a", "b", "c"]}},
        {"assignment": assignment | {"peers": ["a", ["b"], "c", "d"]}},
        {"assignment": assignment | {"suffix": "+/#"}},
        {"assignment": assignment | {"suffix": "0123abcd"}},  # that of another assignment
        {"assignment": assignment | {"schemes": [[0, 0, 1, 1], [0, 1, 2, 3]]}},
        {"assignment": assignment | {"schemes": assignment["schemes"] * 20}},
        {"assignment": assignment | {"cells": {"2": {"9": [0]}}}},
        {"candidates": [own | {"part": "nose"}]},
        {"candidates": [own | {"cells": [10]}]},
        {"candidates": [own | {"cells": [-1]}]},
        {"candidates": [own | {"cells": []}]},
        {"candidates": [own | {"scheme": 2}]},
        {"candidates": [own | {"scheme": [0, 1]}]},
        {"candidates": [own] * 1000},
    ):
        yield entry_of("a", good | changes)


def test_a_plan_that_cannot_be_read_is_dropped_and_the_first_makers_plan_is_followed() -> None:
    engine = begin(Engine("b", make("b"), quick(sharing="auto", rounds=60)))
    sharing = engine.sharing
    assert sharing is not None
    good = sharing.first_plan(0, ["a", "c", "d"]).as_record()
    for number, entry in enumerate(hostile_entries(good), 1):
        engine.turn([], [Online("a", "s", (), plan=entry)], 0.0, 10**6)
        assert engine.dropped["plan"] == number, entry
    engine.begin_round()
    assert sharing.plan_number == 0
    for by, followed in (("c", "c"), ("d", "c"), ("a", "a")):
        sharing.read_card_entry(by, entry_of(by, good))
        sharing.follow()
        entry = sharing.as_card_entry()
        assert entry is not None
        assert entry["by"] == followed


def test_the_next_in_order_announces_the_plan_of_a_peer_that_went_offline_as_its_own() -> None:
    """Plans are read from their makers' cards, and newcomers must find one. They do not make plans before."""
    engine = begin(Engine("c", make("c"), quick(sharing="auto", rounds=60)))
    sharing = engine.sharing
    assert sharing is not None
    plan = sharing.first_plan(0, ["b", "d", "e"])
    sharing.read_card_entry("b", entry_of("b", plan))
    sharing.follow()
    behind = {"by": "b", "version": plan.version, "plan": None, "like": None}
    ahead = behind | {"version": plan.version + 3}  # it has seen more of the peer that is gone
    sharing.read_card_entry("e", ahead)
    newcomer, follower = Online("a", "s", ()), Online("e", "s", (), plan=ahead)
    without_plan = Online("b", "s2", ())  # as after a restart that has lost everything
    for others in ({"b": Online("b", "s", (), plan=entry_of("b", plan))}, {"b": without_plan}):
        sharing.after_averaging(1, {"a": newcomer, "e": follower} | others)
        sharing.follow()
        entry = sharing.as_card_entry()
        assert entry is not None
        assert entry["by"] == ("c" if others["b"] is without_plan else "b")
    assert entry["version"] == plan.version + 4
    assert entry["plan"]["assignment"] == plan.assignment.as_record()
    late = begin(Engine("a", make("a"), quick(sharing="auto", rounds=60))).sharing
    assert late is not None
    late.after_averaging(1, {"c": Online("c", "s", (), plan=entry), "d": follower, "e": follower})
    late.follow()
    assert late.plan_number == 0
    late.read_card_entry("c", entry)
    late.follow()
    assert late.plan_number == entry["version"] + 1


def test_a_newcomer_joins_no_group_before_it_has_heard_the_others_that_are_online() -> None:
    names = NAMES[:5]
    learner = make("e")
    engine = begin(Engine("e", learner, quick(sharing="auto", rounds=60)))
    sharing = engine.sharing
    assert sharing is not None
    alone = two_groups(learner, names, (1, 2, 1, 2, 0))
    looks = replace(alone, version=51, newcomers=("e",))
    for plan in (sharing.first_plan(0, names[:4]), alone, looks):
        sharing.read_card_entry("a", entry_of("a", plan))
        engine.begin_round()
    (groups,) = (model for model in engine.store.extra if model.startswith("groups"))
    sharing.after_training(Metrics(0.0, 0, 1), engine.gossiper)
    layout, trained = GroupValues(looks.assignment, looks.newcomers), make("a")
    heard = np.zeros(layout.size, np.float32)
    online = {
        name: Online(name, "s", (), plan=entry_of("a", looks) | {"plan": None}) for name in "abd"
    }
    preferred = []
    for name in ("b", "a"):
        heard += layout.pack(name, trained.network.flat.numpy())
        engine.store.extra[groups] = heard
        sharing.after_averaging(1, online)
        sharing.after_training(Metrics(0.0, 0, 1), engine.gossiper)
        entry = sharing.as_card_entry()
        assert entry is not None
        preferred.append(entry["like"])
    assert preferred[0] == ""
    assert preferred[1] in ("a", "b")


def test_nobody_can_make_the_last_plan() -> None:
    engine = begin(Engine("b", make("b"), quick(sharing="auto", rounds=60)))
    sharing = engine.sharing
    assert sharing is not None
    good = sharing.first_plan(0, ["a", "c", "d"]).as_record()
    sharing.read_card_entry("c", entry_of("c", good))
    with pytest.raises(ModelError, match="version"):
        sharing.read_card_entry("a", entry_of("a", good | {"version": 2**52}))
    sharing.read_card_entry("a", entry_of("a", good | {"version": 1000}))  # it was away for long
    sharing.follow()
    assert sharing.plan_number == 1001


def test_plans_of_strangers_and_of_revoked_members_are_ignored(run, tmp_path: Path) -> None:
    papers, others = Papers(tmp_path), Papers(tmp_path / "others")
    others.folder.mkdir()
    names = papers.names("a", "b", "c")
    engine = Engine("a", make("a"), quick(sharing="auto", rounds=60))
    assert engine.sharing is not None
    entry = entry_of("b", engine.sharing.first_plan(0, ["b", "c", "d"]))

    def security_of(owner: Papers, label: str) -> SwarmSecurity:
        identity = owner.people[label]
        admission = Admission.load(owner.folder / f"{label}.invitation", identity)
        return SwarmSecurity(
            identity, admission, owner.owner.public,
            swarm="nest", session=f"s{label}", models=["global"], since=0.0,
        )  # fmt: skip

    def announce(owner: Papers, label: str) -> list[tuple[str, bytes]]:
        """The card of a peer that has made a plan, and its status."""
        security = security_of(owner, label)
        card = Card(f"s{label}", 0.0, 1, {"global": []}, plan=entry)
        return [
            (topics.card("nest", security.name), security.card(card.encode())),
            (topics.status("nest", security.name), security.status(
                Status("online", f"s{label}").encode())),
        ]  # fmt: skip

    others.names("d")
    unsigned = [
        (topics.card("nest", names[1]), Card("sb", 0.0, 1, {"global": []}, plan=entry).encode()),
        (topics.status("nest", names[1]), Status("online", "sb").encode()),
    ]
    revoked = [(revocation_topic("nest"), papers.revoke(names[2]))]
    for arrivals, planners in (
        (announce(papers, "b"), [names[1]]),
        (unsigned, []),
        (announce(others, "d"), []),
        (revoked + announce(papers, "c"), []),
    ):
        link, _ = run(delivered(arrivals, security=security_of(papers, "a"), engine=engine))
        online = [event for event in link.take_events() if isinstance(event, Online)]
        assert [event.peer for event in online if event.plan == entry] == planners


def test_what_auto_cannot_do_is_refused() -> None:
    for changes, reason in (
        ({"dp": ReleasePlan(clip=1.0, noise=1.0)}, "leave dp out"),
        (
            {"private": {"global": 64.0}, "trust": "swarm", "mode": "rounds"},
            "without masks; leave private out",
        ),
        ({"mode": "rounds", "sources": ("b",)}, "a graph without directions"),
    ):
        with pytest.raises(PeerError, match=reason):
            Engine("a", make("a"), quick(sharing="auto", **changes))


def test_a_learner_with_which_nothing_can_be_decided_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Other(SgdLearner):
        """May have any loss."""

    few, other, frozen = make("a", samples=9), make("a"), make("a")
    other.__class__ = Other
    proximal = make("a")
    proximal.proximal = 0.1
    layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
    normed = SlicedNetwork(
        nn.Sequential(*layers), {"all": 1.0}, peer="a", rest=None, buffers="local"
    )
    own_statistics = SgdLearner(normed, frozen.samples, frozen.held_out)
    for learner, reason in (
        (few, r"9 training samples, and sharing = \"auto\" holds some out, which takes 10$"),
        (other, r"needs learners with a loss per sample \(SgdLearner\), not Other$"),
        (proximal, "adds a proximal term of 0.1 to them: leave it out$"),
        (own_statistics, r"leave out buffers, or set buffers = \"average\"$"),
    ):
        with pytest.raises(PeerError, match=f"^peer a: .*{reason}"):
            Engine("a", learner, quick(sharing="auto"))
    for parameter in frozen.network.module[0].parameters():
        parameter.requires_grad_(False)
    Engine("a", frozen, quick(sharing="auto", expect=("a", "b", "c")))
    assert [record.message for record in caplog.records] == [
        "peer a: everything stays shared as it is until more have joined: 3 peers are expected, but "
        "4 are needed",
        "peer a: parts 0 and input stay shared, because they are not trained",
    ]


def test_a_plan_is_announced_when_the_checkpoint_has_it(tmp_path: Path) -> None:
    """Also if its models stay the same: a restarted maker must not give its number to another plan."""
    settings = quick(sharing="auto", rounds=60, save_every=1e9)
    engine = begin(Engine("a", make("a"), settings, checkpoint=tmp_path / "x"))
    assert engine.sharing is not None
    plan = engine.sharing.first_plan(0, ["b", "c", "d"])
    for version in (0, 1):
        engine.sharing.read_card_entry("a", entry_of("a", replace(plan, version=version)))
        engine.begin_round()
        assert engine.announced_plan() is None
        engine.turn([], [], 0.0, 10**6)
        announced, _ = engine.announced_plan() or (None, None)
        assert announced is not None
        assert announced["version"] == version
        again = Engine("a", make("a"), settings, checkpoint=tmp_path / "x")
        assert again.sharing is not None
        assert again.sharing.as_card_entry() == announced


def test_a_restart_goes_on_with_the_plan_that_it_followed(tmp_path: Path) -> None:
    learner = make("a")
    engine = Engine("a", learner, quick(sharing="auto", rounds=60), checkpoint=tmp_path / "x")
    begin(engine)
    assert engine.sharing is not None
    plan = engine.sharing.first_plan(0, ["b", "c", "d"])
    engine.sharing.read_card_entry("a", entry_of("a", plan))
    for _ in range(2):
        engine.begin_round()
        engine.train()
    assert engine.save()
    models, held = engine.gossiper.models, engine.gossiper.account
    assert any(model.startswith("statistics") for model in models)
    again = Engine("a", make("a"), quick(sharing="auto", rounds=60), checkpoint=tmp_path / "x")
    assert again.gossiper.models == models
    assert again.sharing is not None
    assert again.sharing.as_card_entry() == engine.sharing.as_card_entry()
    assert all(again.gossiper.account(model) == held(model) for model in models)
    assert engine.gossiper.account(models[-1]).held == ONE
