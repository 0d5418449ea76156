"""A peer's life as its table has it, and what survives a kill in the middle of it."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_kit import (
    Clocks,
    Gate,
    Life,
    Nest,
    Still,
    begin,
    held,
    injected,
    last_seen,
    make_learner,
    quick,
)
from waiting import until

from gossamer.gossip import ONE, Give, MemoryTransport, Payload, topics
from gossamer.gossip.security import Death
from gossamer.peer.engine import Engine
from gossamer.peer.exits import GoodbyeNotDelivered, PeerError, Replaced
from gossamer.peer.lifecycle import FINAL, PHASES, TABLE, Event, Lifecycle, Report, State
from gossamer.peer.machine import load_checkpoint
from gossamer.peer.presence import Online, SessionEnded, Status, read_card, read_status
from gossamer.peer.settings import Limits, Settings

Run = Callable[[Coroutine[Any, Any, Any]], Any]

# --- the table ----------------------------------------------------------------------------------

RUNNING = (State.WAITING, State.TRAINING, State.AVERAGING, State.SETTLING, State.DONE)
FIRED = {
    State.CONNECTING: {Event.CONNECTED, Event.ENDING_RESTORED},
    State.CLAIMING: {Event.NAME_FREE},
    State.WAITING: {Event.STARTED},
    State.TRAINING: {Event.TRAINED},
    State.AVERAGING: {Event.AVERAGED, Event.ROUNDS_OVER},
    State.SETTLING: {Event.AGREED},
    State.DONE: {Event.ALL_DONE, Event.LOST_AGREEMENT},
    State.HANDING_OVER: {Event.HANDED_OVER},
    State.LEAVING: {Event.GOODBYE_ACCEPTED, Event.GOODBYE_FAILED},
}
"""What a peer's own work leads to in each state."""


def reachable(start: State, *, without: frozenset[Event] = frozenset()) -> set[State]:
    found, rest = {start}, [start]
    while rest:
        state = rest.pop()
        for (before, event), after in TABLE.items():
            if before is state and event not in without and after not in found:
                found.add(after)
                rest.append(after)
    return found


def test_every_state_can_be_reached():
    assert reachable(State.CONNECTING) == set(State)


@pytest.mark.parametrize("state", State)
def test_every_state_leads_to_an_end_without_an_abort(state):
    assert reachable(state, without=frozenset({Event.ABORT})) & FINAL


@pytest.mark.parametrize("state", sorted(FINAL, key=lambda state: state.value))
def test_a_final_state_has_no_way_out(state):
    assert {event for before, event in TABLE if before is state} == {Event.ABORT}
    assert reachable(state) <= {state, State.ABORTED}


@pytest.mark.parametrize("state", FIRED)
def test_whatever_may_happen_in_a_state_is_in_the_table(state):
    events = FIRED[state] | {Event.ABORT}
    if state in RUNNING:
        events |= {Event.ASKED_TO_LEAVE}
    if state in (State.CLAIMING, *RUNNING, State.HANDING_OVER, State.LEAVING):
        # Tasks run beside the work, up to the moment in which the state becomes LEAVING.
        events |= {Event.SESSION_OVER, Event.ERROR}
    for event in events:
        life = Lifecycle()
        life.state = state
        assert life.fire(event) is TABLE[state, event]


def test_an_event_that_the_table_does_not_know_is_a_mistake_of_ours():
    life = Lifecycle()
    with pytest.raises(RuntimeError, match="event TRAINED in state CONNECTING"):
        life.fire(Event.TRAINED)
    assert life.state is State.CONNECTING


def test_others_are_told_of_a_phase_while_a_peer_takes_part():
    assert set(PHASES) == set(RUNNING)
    assert list(dict.fromkeys(PHASES.values())) == ["starting", "training", "settling", "done"]
    assert not FINAL & PHASES.keys()


# --- ending is a write-ahead log ----------------------------------------------------------------


class Stuck(MemoryTransport):
    """A connection on which the broker never takes the goodbye."""

    goodbyes = 0

    async def publish(self, topic: str, payload: Payload, **options: Any) -> bool:
        if topic.endswith("/status") and b'"left"' in bytes(payload):
            self.goodbyes += 1
            await asyncio.Event().wait()
        return await super().publish(topic, payload, **options)


def goodbye(nest: Nest, name: str) -> Status | None:
    status = read_status(nest.broker.retained.get(topics.status("nest", name), b""))
    return status if status is not None and status.state == "left" else None


def ending(path: Path) -> dict[str, Any] | None:
    tree = load_checkpoint(path)
    assert tree is not None
    return tree["ending"]


@pytest.mark.parametrize("early", [False, True], ids=["finished", "left"])
def test_a_peer_killed_before_its_goodbye_says_it_at_the_next_start(run: Run, tmp_path, early):
    path, reports = tmp_path / "a.checkpoint", []

    async def swarm() -> None:
        nest, gate = Nest(quick(rounds=3), transport=Stuck), Gate(1)
        life = nest.start("a", Still(make_learner("a"), 1.0, gate), checkpoint=path)
        await gate.wait()
        if early:
            life.peer.leave("for lunch")
        gate.open()
        await until(lambda: life.transports[0].goodbyes > 0)
        assert life.peer.state is State.LEAVING
        written = ending(path)
        assert written is not None
        await life.crash()
        assert goodbye(nest, "a") is None
        again = Nest(nest.settings, nest.broker).start(
            "a", Still(make_learner("a"), 0.0), checkpoint=path, on_report=reports.append
        )
        report = await again.task
        assert reports == [report]
        assert report.ended == ("left" if early else "finished")
        assert report.session == written["report"]["session"]
        assert report.rounds == (2 if early else 3)
        said = goodbye(nest, "a")
        assert said is not None
        assert (said.session, said.reason) == (report.session, report.reason)
        assert path.exists() == early
        if early:
            assert ending(path) is None

    run(swarm())


class Hanging(MemoryTransport):
    """A connection that does not close: whoever is killed meanwhile leaves its last will behind."""

    closing = False

    async def __aexit__(self, *exc: Any) -> None:
        self.closing = True
        await asyncio.Event().wait()


def test_a_peer_killed_before_its_connection_closed_says_goodbye_again(run: Run, tmp_path):
    """Its last will took the place of the goodbye, which a peer that comes back later has to read."""
    path = tmp_path / "a.checkpoint"

    async def swarm() -> None:
        nest = Nest(quick(rounds=2), transport=Hanging)
        life = nest.start("a", checkpoint=path)
        await until(lambda: bool(life.transports) and life.transports[0].closing)
        first = goodbye(nest, "a")
        assert first is not None
        await life.crash()
        assert goodbye(nest, "a") is None
        report = await Nest(nest.settings, nest.broker).start("a", checkpoint=path).task
        assert report.session == first.session
        assert goodbye(nest, "a") == first
        assert not path.exists()

    run(swarm())


class Lost(Exception):
    """Something goes wrong while the report is written."""


def test_a_report_that_could_not_be_written_is_written_at_the_next_start(run: Run, tmp_path):
    """The goodbye was taken: it is said again in the same words, and nobody is harmed."""
    path, reports = tmp_path / "a.checkpoint", []

    def fails(report: Report) -> None:
        reports.append(report)
        raise Lost

    async def swarm() -> None:
        nest = Nest(quick(rounds=2))
        with pytest.raises(Lost):
            await nest.start("a", checkpoint=path, on_report=fails).task
        first = goodbye(nest, "a")
        assert first is not None
        with pytest.raises(Lost):
            await nest.start("a", checkpoint=path, on_report=fails).task
        await nest.start("a", checkpoint=path, on_report=reports.append).task
        assert goodbye(nest, "a") == first
        assert not path.exists()

    run(swarm())
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].ended == "finished"


def test_an_ending_is_finished_once_and_never_begins_anew(run: Run, tmp_path):
    """However often it is killed on the way, there is one report per session, and one session."""
    path, reports = tmp_path / "a.checkpoint", []

    async def swarm() -> Report:
        nest = Nest(quick(rounds=2), transport=Stuck)
        for _ in range(3):
            life = nest.start("a", checkpoint=path, on_report=reports.append)
            await until(lambda life=life: life.transports and life.transports[0].goodbyes)
            await life.crash()
        assert not reports
        return await Nest(nest.settings, nest.broker).start("a", checkpoint=path).task

    report = run(swarm())
    assert report.rounds == 2
    assert report.weight["global"] == [ONE, 0, ONE]


def test_a_topic_that_is_nobodys_does_not_disturb_a_goodbye(run: Run, tmp_path):
    """The owner's lists are retained too, and anybody can publish under names that no peer can have."""
    path = tmp_path / "a.checkpoint"

    async def swarm() -> Report:
        one = begin(Engine("a", make_learner("a"), quick(), checkpoint=path))
        part = {"accuracy": 0.5, "members": {}, "transport": {}, "gain": {}}
        one.end("finished", "its training is over", "done", part)
        assert one.save()
        nest = Nest(quick())
        nest.broker.publish("eve", "gossamer/v1/nest/peer/a b/status", b"{}", True)
        nest.broker.publish("eve", "gossamer/v1/nest/peer/a b/card", b"{}", True)
        return await nest.start("a", checkpoint=path).task

    assert run(swarm()).ended == "finished"
    assert not path.exists()


def test_a_goodbye_that_no_broker_took_is_handed_in_later(run: Run, tmp_path):
    path, reports = tmp_path / "a.checkpoint", []
    settings = quick(rounds=2, leave_timeout=0.2, settle_timeout=0.2)

    async def swarm() -> Report:
        nest, gate = Nest(settings), Gate(1)
        life = nest.start(
            "a", Still(make_learner("a"), 1.0, gate), checkpoint=path, on_report=reports.append
        )
        await gate.wait()
        nest.broker.stop()
        gate.open()
        with pytest.raises(GoodbyeNotDelivered, match="start the peer again to deliver it") as told:
            await life.task
        assert life.peer.state is State.UNDELIVERED
        assert str(path) in str(told.value)
        assert told.value.exit_code == 3
        learner = Still(make_learner("a"), 0.0)
        with pytest.raises(GoodbyeNotDelivered, match="the memory broker is stopped"):
            await nest.start("a", learner, checkpoint=path, on_report=reports.append).task
        assert not reports
        await nest.broker.start()
        again = nest.start("a", learner, checkpoint=path, on_report=reports.append)
        report = await again.task
        assert again.peer.state is State.CLOSED
        assert goodbye(nest, "a") is not None
        return report

    report = run(swarm())
    assert reports == [report]
    assert (report.rounds, report.ended) == (2, "finished")
    assert not path.exists()


def test_without_a_checkpoint_a_goodbye_that_was_not_taken_costs_no_report(run: Run, caplog):
    async def swarm() -> Report:
        nest, gate = Nest(quick(rounds=2, leave_timeout=0.2, settle_timeout=0.2)), Gate(1)
        life = nest.start("a", Still(make_learner("a"), 1.0, gate))
        await gate.wait()
        nest.broker.stop()
        gate.open()
        return await life.task

    assert run(swarm()).rounds == 2
    assert "the broker did not accept its goodbye within 0.2 s" in caplog.text


def test_a_failure_says_goodbye_and_the_next_start_begins_a_new_session(run: Run, tmp_path):
    path = tmp_path / "a.checkpoint"

    async def swarm() -> tuple[str, Report]:
        nest = Nest(quick(rounds=2))
        alone = quick(rounds=2, expect=("a", "nobody"), start_timeout=0.2)
        with pytest.raises(PeerError, match="nobody did not come online"):
            await nest.start("a", settings=alone, checkpoint=path).task
        said = goodbye(nest, "a")
        assert said is not None
        assert "nobody did not come online" in said.reason
        return said.session, await nest.start("a", checkpoint=path).task

    failed, report = run(swarm())
    assert report.session != failed
    assert (report.rounds, report.ended) == (2, "finished")
    assert not path.exists()


def test_who_ends_while_another_is_away_takes_its_mass_back_and_the_other_hears_of_it(
    run: Run, tmp_path
):
    """One is killed and comes back after the other has gone: nothing is counted twice, nothing is lost."""

    async def swarm() -> list[Report]:
        settings = quick(rounds=10**9, expect=("a", "b"), founder=True, leave_timeout=1.0)
        nest, paths = Nest(settings), {name: tmp_path / name for name in "ab"}
        a, b = [nest.start(name, checkpoint=paths[name]) for name in "ab"]
        await until(lambda: a.counts() and b.counts() and b.view.received > 5)
        await b.crash()
        a.peer.leave("for good")
        left = await a.task
        again = Nest(settings, nest.broker).start("b", checkpoint=paths["b"])
        await until(again.counts)
        again.go_on_for(3)
        return [left, await again.task]

    reports = run(swarm())
    assert [report.ended for report in reports] == ["left", "finished"]
    assert all(report.open == [] and report.weight["global"][1] == 0 for report in reports)
    assert held(reports) == injected(reports) == 2


def test_a_peer_killed_while_it_hands_over_takes_part_again(tmp_path):
    """Whoever asked it to leave asked a process that is no more."""
    path = tmp_path / "a.checkpoint"
    x = Online(
        "x", "sx", ("global",), models_pushed_to_us=("global",), counting_rounds={"global": 1}
    )
    one = begin(Engine("a", make_learner("a"), quick(), checkpoint=path))
    one.turn([], [x], 0.0, 10**6)
    assert not one.hand_over()
    assert one.turn([], [], 1.0, 10**6)  # saved before it was sent
    two = Engine("a", make_learner("a"), quick(), checkpoint=path)
    assert two.session == one.session
    begin(two)
    two.turn([], [x], 2.0, 10**6)
    give = Give("global", "x", "sx", 1, "a", two.session, ONE, two.network.read("global").numpy())
    two.gossiper.handle(give, 2.0)
    assert two.report()["weight"]["global"] == [ONE, ONE, ONE]


def test_a_peer_that_left_early_keeps_its_goodbye_for_its_next_card(tmp_path):
    """The next session's status replaces it at the broker, and a neighbour may have been away."""
    path = tmp_path / "a.checkpoint"
    one = begin(Engine("a", make_learner("a"), quick(), checkpoint=path))
    x = Online(
        "x", "sx", ("global",), models_pushed_to_us=("global",), counting_rounds={"global": 1}
    )
    one.turn([], [x], 0.0, 10**6)
    value = one.network.read("global").numpy()
    one.gossiper.handle(Give("global", "x", "sx", 1, "a", one.session, ONE, value), 0.0)
    session = one.session
    one.end("left", "asked to", "training", {})
    one.save()
    one.finish()
    two = Engine("a", make_learner("a"), quick(), checkpoint=path)
    assert two.session != session
    former = two.last_session_goodbye
    assert former is not None
    assert (former.session, former.statement) == (session, [["x", "sx", "global", 1, "credited"]])


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_in_lockstep_a_peer_killed_while_it_hands_over_goes_on_leaving(run: Run, tmp_path, mode):
    """Its mass is with the others already, and none would come before its next round."""
    path, settings = tmp_path / "a.checkpoint", quick(rounds=1, mode=mode, founder=True)
    one = begin(Engine("a", Still(make_learner("a"), 1.0), settings, checkpoint=path))
    x = Online(
        "x", "sx", ("global",), models_pushed_to_us=("global",), counting_rounds={"global": 1}
    )
    one.turn([], [x], 0.0, 10**6)
    assert not one.hand_over()
    assert one.turn([], [], 1.0, 10**6)  # saved before it was sent

    async def swarm() -> Report:
        return (
            await Nest(settings)
            .start("a", Still(make_learner("a"), 1.0), settings.updated(lease=1e6), checkpoint=path)
            .task
        )

    two = Engine("a", Still(make_learner("a"), 1.0), settings, checkpoint=path)
    assert two.must_leave == (mode == "rounds")
    if mode == "rounds":
        report = run(swarm())
        assert (report.ended, report.rounds) == ("left", 0)


def test_in_lockstep_a_session_that_comes_midway_is_no_neighbour():
    """Both would wait for each other: it begins with the first round."""
    engine = begin(Engine("a", make_learner("a"), quick(mode="rounds")))
    x = Online(
        "x", "s1", ("global",), models_pushed_to_us=("global",), counting_rounds={"global": 1}
    )
    engine.turn([], [x], 0.0, 10**6)
    engine.train()
    again = replace(x, session="s2")
    engine.turn([], [SessionEnded("x", "s1", None), again], 1.0, 10**6)
    assert engine.gossiper.neighbours("global") == []
    assert engine.view.averaged
    engine.turn([], [replace(x, peer="y", counting_rounds={"global": 2})], 2.0, 10**6)
    assert engine.neighbours_are_ahead()


def test_a_goodbye_that_was_heard_last_is_heeded_before_anything_is_taken_back(tmp_path):
    """Its sender has ended with what it was given, and can give nothing up any more."""
    x = Online(
        "x", "sx", ("global",), models_pushed_to_us=("global",), counting_rounds={"global": 1}
    )
    engine = begin(Engine("a", make_learner("a"), quick()))
    engine.turn([], [x], 0.0, 10**6)
    engine.train()
    (message,) = [m for m in engine.turn([], [], 1.0, 10**6) if m.model == "global"]
    assert message.receiver == "x"
    given = engine.report()["weight"]["global"][1]
    rows = [["a", engine.session, "global", 1, "credited"]]
    engine.end("left", "for lunch", "training", {}, [SessionEnded("x", "sx", rows)])
    assert engine.ending is not None
    assert engine.ending.reclaimed == []
    assert engine.ending.report["weight"]["global"] == [ONE - given, 0, ONE]


def test_a_newcomer_does_not_wait_for_long_for_another_one_that_came_first():
    """It may have died while the broker was down: its retained status says that it is online."""
    engine = Engine("b", make_learner("b", seed=1), quick(silence=5.0))
    engine.record_session()
    engine.open_session(100.0, 1)
    engine.begin(0.0, as_founder=False, all_online=False)
    first = Online(
        "a",
        "sa",
        ("global",),
        models_pushed_to_us=("global",),
        session_began=50.0,
        starts={"global": "x"},
    )
    engine.turn([], [first], 0.0, 10**6)
    for now in (4.9, 5.1, 7.4):
        engine.turn([], [], now, 10**6)
        assert "global" in engine.view.waiting, now
    engine.turn([], [], 7.6, 10**6)
    assert "global" in engine.view.counting_rounds


class SlowCards(MemoryTransport):
    """A connection on which the broker takes cards late, or never."""

    async def publish(self, topic: str, payload: Payload, **options: Any) -> bool:
        taken = await super().publish(topic, payload, **options)
        if topic.endswith("/card") and payload:
            await asyncio.Event().wait()
        return taken


def test_a_peer_asked_to_leave_while_it_shows_its_card_says_goodbye(run: Run):
    async def swarm() -> Nest:
        nest = Nest(quick(rounds=2, leave_timeout=0.5), transport=SlowCards)
        life = nest.start("a")
        await until(lambda: topics.card("nest", "a") in nest.broker.retained)
        life.peer.leave("never mind")
        report = await life.task
        assert (report.ended, report.rounds) == ("left", 0)
        return nest

    nest = run(swarm())
    assert topics.card("nest", "a") not in nest.broker.retained
    assert goodbye(nest, "a") is not None


# --- one name, two devices ----------------------------------------------------------------------


def cut_off(nest: Nest, life: Life) -> MemoryTransport:
    """Cut a peer's connection; its last will speaks."""
    transport = life.transports[-1]
    nest.broker.disconnect(transport, transport.will)
    transport.lose("the cable was pulled")
    return transport


def card_of(nest: Nest, name: str):
    return read_card(nest.broker.retained.get(topics.card("nest", name), b""))


ENDLESS = quick(rounds=10**9, expect=("a", "b"), founder=True)


async def pair(tmp_path: Path) -> tuple[Nest, Life, Life]:
    """Two peers that train: "a", whose device will be replaced, and "b", who watches."""
    nest = Nest(ENDLESS)
    a, b = [nest.start(name, checkpoint=tmp_path / f"{name}.checkpoint") for name in "ab"]
    await until(lambda: a.counts() and b.counts())
    return nest, a, b


def test_a_name_that_is_offline_is_refused_to_another_device(run: Run, tmp_path):
    async def swarm() -> None:
        nest, a, b = await pair(tmp_path)
        await a.crash()
        stranger = Nest(quick(rounds=2), nest.broker).start("a")
        with pytest.raises(PeerError, match=r"belongs to a device that is offline .* --replace"):
            await stranger.task
        assert stranger.peer.state is State.ABORTED
        again = nest.start("a", checkpoint=tmp_path / "a.checkpoint")  # it may, without --replace
        await until(again.counts)
        for one in (again, b):
            one.go_on_for(3)
        assert held([await again.task, await b.task]) == 2

    run(swarm())


def test_a_replaced_device_ends_when_it_comes_back(run: Run, tmp_path, caplog):
    async def swarm() -> None:
        nest, old, b = await pair(tmp_path)
        transport = cut_off(nest, old)
        new_settings = ENDLESS.updated(expect=(), founder=None, replace=True)
        new = nest.start("a", settings=new_settings, checkpoint=tmp_path / "new.checkpoint")
        await until(new.counts)
        session = new.peer.link.session
        assert new.peer.link.generation == 2
        reconnecting = asyncio.create_task(transport.reconnect())
        with pytest.raises(Replaced, match="another device has replaced it"):
            await old.task
        old.crashed = True
        await asyncio.gather(reconnecting, return_exceptions=True)
        # Whoever comes later must find the new device's card and status, and b must still know it.
        await until(lambda: (card := card_of(nest, "a")) and card.session == session)
        status = topics.status("nest", "a")
        await until(
            lambda: (
                (read := read_status(nest.broker.retained[status])) is not None
                and (read.session, read.state) == (session, "online")
            )
        )
        assert new.peer.link.session == session
        assert b.peer.link.roster.online()["a"].session == session
        for one in (new, b):
            one.go_on_for(3)
        reports = [await new.task, await b.task]
        assert reports[0].session == session
        # A restart of the old device is told the same, as often as it is tried.
        for _ in range(2):
            last = nest.start("a", checkpoint=tmp_path / "a.checkpoint")
            with pytest.raises(Replaced):
                await last.task

    with caplog.at_level(logging.INFO):
        run(swarm())
    assert "replaces another device of the same name" in caplog.text


def test_a_copy_of_a_running_device_is_refused_and_disturbs_nobody(run: Run, tmp_path):
    async def swarm() -> None:
        nest, a, b = await pair(tmp_path)
        session = a.peer.link.session
        shutil.copy(tmp_path / "a.checkpoint", tmp_path / "copy.checkpoint")
        copy = Nest(ENDLESS, nest.broker, limits=Limits(name_grace=0.3))
        for _ in range(2):  # however often a service manager starts it
            life = copy.start("a", checkpoint=tmp_path / "copy.checkpoint")
            with pytest.raises(
                PeerError, match="from a copy of this device's files: stop the other"
            ):
                await life.task
            # Two MQTT clients with one id would disconnect each other.
            assert life.transports[-1].client_id != a.transports[-1].client_id
        assert a.transports[-1].connection.state == "connected"
        await until(lambda: b.peer.link.roster.online().keys() == {"a"})
        for one in (a, b):
            one.go_on_for(3)
        reports = [await a.task, await b.task]
        assert reports[0].session == session
        assert held(reports) == 2

    run(swarm())


def test_a_copy_may_replace_the_running_device(run: Run, tmp_path):
    async def swarm() -> None:
        nest, a, b = await pair(tmp_path)
        shutil.copy(tmp_path / "a.checkpoint", tmp_path / "copy.checkpoint")
        settings = ENDLESS.updated(replace=True)
        copy = nest.start("a", settings=settings, checkpoint=tmp_path / "copy.checkpoint")
        with pytest.raises(Replaced, match="another device has replaced it"):
            await a.task
        a.crashed = True
        await until(copy.counts)
        assert copy.peer.link.session != a.peer.link.session
        assert copy.peer.link.generation == 2
        for one in (copy, b):
            one.go_on_for(3)
        await asyncio.gather(copy.task, b.task)

    run(swarm())


def test_a_restart_with_its_own_checkpoint_replaces_nobody(run: Run, tmp_path):
    """A service file that says --replace must not raise the generation at every start."""

    async def swarm() -> list[int]:
        nest, a, b = await pair(tmp_path)
        found = [a.peer.link.generation]
        settings = ENDLESS.updated(replace=True)
        life = a
        for _ in range(2):
            session = life.peer.link.session
            await life.crash()
            life = nest.start("a", settings=settings, checkpoint=tmp_path / "a.checkpoint")
            await until(life.counts)
            assert life.peer.link.session == session
            found.append(life.peer.link.generation)
        for one in (life, b):
            one.go_on_for(3)
        assert held([await life.task, await b.task]) == 2
        return found

    assert run(swarm()) == [1, 1, 1]


def test_a_device_restarts_though_the_one_it_replaced_seems_to_be_online(run: Run, tmp_path):
    """The old one came back while the new one was away, was told, and ended: its status stays stored."""

    async def swarm() -> int:
        nest, old, b = await pair(tmp_path)
        session = old.peer.link.session
        await old.crash()
        settings = ENDLESS.updated(expect=(), founder=None, replace=True)
        new = nest.start("a", settings=settings, checkpoint=tmp_path / "new.checkpoint")
        await until(new.counts)
        await new.crash()
        stale = Status("online", session, "training", generation=1)
        nest.broker.publish("old", topics.status("nest", "a"), stale.encode(), True)
        settings = settings.updated(replace=False)
        back = nest.start("a", settings=settings, checkpoint=tmp_path / "new.checkpoint")
        await until(back.counts)
        for one in (back, b):
            one.go_on_for(3)
        await back.task
        await b.task
        return back.peer.link.generation

    assert run(swarm()) == 2


@pytest.mark.parametrize("end", ["crashes", "leaves"])
def test_a_replaced_device_takes_its_name_back_with_replace(run: Run, tmp_path, end):
    """In a new session: others gave up its former one when the other device joined."""

    async def swarm() -> int:
        nest, old, b = await pair(tmp_path)
        session = old.peer.link.session
        await old.crash()
        settings = ENDLESS.updated(expect=(), founder=None, replace=True)
        new = nest.start("a", settings=settings)
        await until(new.counts)
        if end == "crashes":
            await new.crash()
        else:
            new.peer.leave()
            await new.task
        back = nest.start("a", settings=settings, checkpoint=tmp_path / "a.checkpoint")
        await until(back.counts)
        assert back.peer.link.session != session
        generation = back.peer.link.generation
        for one in (back, b):
            one.go_on_for(3)
        await back.task
        await b.task
        return generation

    assert run(swarm()) == 3


# --- death notices ------------------------------------------------------------------------------


def declare_dead(nest: Nest, name: str, session: str) -> None:
    notice = Death(session, "the battery burnt", "the owner", 0.0)
    topic = str(topics.Topic("nest", name, "death"))
    nest.broker.publish("operator", topic, notice.encode(), True)


def test_a_peer_that_is_declared_dead_is_given_up_at_once(run: Run, tmp_path, caplog):
    async def swarm() -> None:
        nest, a, b = await pair(tmp_path)
        session = a.peer.link.session
        await a.crash()
        await until(lambda: b.peer.link.roster.offline_unfinished() == ["a"])
        declare_dead(nest, "a", session)
        await until(lambda: b.peer.link.roster.offline_unfinished() == [])
        b.go_on_for(3)
        assert (await b.task).open == []

    run(swarm())
    assert "peer a was declared dead by the owner: the battery burnt" in caplog.text


def test_a_peer_that_is_declared_dead_and_lives_takes_a_new_session(run: Run, tmp_path, caplog):
    async def swarm() -> None:
        nest, a, b = await pair(tmp_path)
        session = a.peer.link.session
        declare_dead(nest, "a", session)
        await until(lambda: a.peer.link.session != session and a.counts())
        await until(lambda: "a" in b.peer.link.roster.online())
        for one in (a, b):
            one.go_on_for(3)
        report = await a.task
        assert [each["session"] for each in report.abandoned] == [session]
        assert "declared dead by the owner" in report.abandoned[0]["reason"]
        await b.task

    run(swarm())
    assert "rejoining with a new session" in caplog.text


@pytest.mark.parametrize("device", ["the same", "another"])
def test_the_name_of_a_dead_session_is_free(run: Run, tmp_path, device):
    """Nobody gives to the old session, so a peer that went on in it would wait for ever to count."""

    async def swarm() -> Report:
        nest, a, b = await pair(tmp_path)
        session = a.peer.link.session
        await a.crash()
        declare_dead(nest, "a", session)
        await until(lambda: b.peer.link.roster.offline_unfinished() == [])
        if device == "the same":
            again = nest.start("a", checkpoint=tmp_path / "a.checkpoint")
        else:
            again = nest.start("a", settings=ENDLESS.updated(expect=(), founder=None))
        await until(again.counts)
        assert again.peer.link.session != session
        for one in (again, b):
            one.go_on_for(3)
        await b.task
        return await again.task

    assert run(swarm()).ended == "finished"


# --- settings that changed between a crash and a restart ----------------------------------------


def crashed_engine(path: Path, settings: Settings, samples: int = 1) -> Engine:
    """An engine that took part, trained a round, and was killed."""
    engine = begin(Engine("a", make_learner("a"), settings, samples=samples, checkpoint=path))
    engine.train()
    assert engine.save()
    return engine


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "rounds"}, "mode = 'async', and the settings now say 'rounds'; change mode back"),
        ({"dtype": "float64"}, "dtype = 'float32', and the settings now say 'float64'"),
        ({"weights": "samples"}, "weights = 'peers', and the settings now say 'samples'"),
    ],
)
def test_settings_that_a_session_cannot_change_are_refused_in_one_line(tmp_path, changes, words):
    path = tmp_path / "a.checkpoint"
    crashed_engine(path, quick())
    with pytest.raises(PeerError) as told:
        Engine("a", make_learner("a"), quick(**changes), checkpoint=path)
    assert f"peer a: {path} was written with {words}" in str(told.value)
    assert "\n" not in str(told.value)


def test_who_left_early_may_come_back_with_other_settings(tmp_path):
    path = tmp_path / "a.checkpoint"
    one = crashed_engine(path, quick())
    one.end("left", "for lunch", "training", {})
    assert one.save()
    one.finish()
    two = Engine("a", make_learner("a"), quick(mode="rounds", dtype="float64"), checkpoint=path)
    assert two.view.round == 1
    np.testing.assert_array_equal(two.network.flat, one.network.flat)


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3)])
def test_a_changed_number_of_samples_changes_the_weight_by_the_difference(tmp_path, before, after):
    path = tmp_path / "a.checkpoint"
    settings = quick(weights="samples")
    one = crashed_engine(path, settings, before)
    two = Engine("a", make_learner("a"), settings, samples=after, checkpoint=path)
    assert two.session == one.session
    assert two.report()["weight"]["global"] == [after * ONE, 0, after * ONE]
    np.testing.assert_array_equal(two.network.read("global"), one.network.read("global"))
    three = Engine("a", make_learner("a"), settings, samples=after, checkpoint=path)
    assert three.report()["weight"]["global"] == [after * ONE, 0, after * ONE]


@pytest.mark.parametrize("key", ["mode", "weights"])
def test_peers_that_do_not_agree_on_their_settings_do_not_mix(run: Run, key):
    other = {"mode": {"mode": "rounds"}, "weights": {"weights": "samples"}}[key]

    async def swarm() -> list[Any]:
        settings = quick(rounds=2, expect=("a", "b"))
        nest = Nest(settings)
        lives = [nest.start("a"), nest.start("b", settings=settings.updated(**other))]
        return await asyncio.gather(*(life.task for life in lives), return_exceptions=True)

    for error in run(swarm()):
        assert isinstance(error, PeerError)
        assert "cannot average with peer" in str(error)
        assert {"mode": "mode is", "weights": "weights is"}[key] in str(error)


# --- leases and clocks --------------------------------------------------------------------------


def test_a_peer_is_given_up_after_the_lease_on_its_own_card(run: Run, tmp_path, caplog):
    """The one who waits has a lease of its own, which is about itself."""

    async def swarm() -> Report:
        clocks = Clocks()
        nest = Nest(ENDLESS)
        short = nest.start("a", settings=ENDLESS.updated(lease=40.0))
        b = nest.start("b", machine=clocks)
        await until(lambda: short.counts() and b.counts())
        await short.crash()
        await until(lambda: b.peer.link.roster.offline_unfinished() == ["a"])
        clocks.ahead += 60.0
        await until(lambda: b.peer.link.roster.offline_unfinished() == [])
        b.go_on_for(3)
        return await b.task

    assert run(swarm()).rounds > 0
    assert "its lease is 40 s" in caplog.text


def test_sessions_without_a_report_are_in_the_next_one(tmp_path):
    """Whoever adds all reports up finds where the weight of a session went that was given up."""
    path = tmp_path / "a.checkpoint"
    one = crashed_engine(path, quick())
    last_seen(path, 10_000.0)
    two = begin(Engine("a", make_learner("a"), quick(), checkpoint=path))
    (former,) = two.report()["abandoned"]
    assert former["session"] == one.session
    assert former["weight"]["global"] == [ONE, 0, ONE]
    assert former["reason"].startswith("lease expired (")
    assert two.session != one.session
