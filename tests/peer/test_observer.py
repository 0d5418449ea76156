"""Watching a swarm: what an observer makes of what peers publish, and that no peer notices it."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers_kit import Papers
from peer_kit import Gate, Nest, Still, held, injected, make_learner, quick
from waiting import until

from gossamer.gossip import MemoryTransport, topics
from gossamer.gossip.security import (
    Admission,
    Death,
    Identity,
    SwarmSecurity,
    endorse,
    invite,
    open_ticket,
    revocation_topic,
    sign_death,
)
from gossamer.peer.exits import PeerError
from gossamer.peer.monitoring import find_problems
from gossamer.peer.observer import KINDS, MAX_OBSERVED, Observer, SwarmState
from gossamer.peer.presence import LEASE_MARGIN, Card, Status
from gossamer.peer.summary import Ended, ModelSummary, PeerEvent, Summary, read_summary

FIELDS = [("layer.weight (global)", [4, 3], "float32")]
NOW = float(int(time.time())) + 3600
"""The observer's clock. Invitations are dated by the real one: this is later, however late a test runs."""


def card(session: str = "s1", *, since: float = NOW, lease: float = 10.0) -> bytes:
    return Card(
        session, since, 5, {"global": FIELDS}, lease=lease, agree={"mode": "async"}
    ).encode()


def status(state: str = "online", session: str = "s1", **more) -> bytes:
    return Status(state, session, "training", **more).encode()


def summary(when: float = NOW, session: str = "s1", **more) -> bytes:
    values = {
        "session": session, "time": when, "since": NOW, "state": "averaging", "phase": "training",
        "round": 3, "rounds": 30, "version": "0.1.0",
    }  # fmt: skip
    data = Summary(**{**values, **more}).encode()
    assert data is not None
    return data


class Told:
    """A swarm's state, and short ways to tell it something."""

    def __init__(self, owner: bytes | None = None) -> None:
        self.state = SwarmState("nest", owner)

    def tell(self, kind, payload, now=NOW, *, peer="bob", retained=False):
        return self.state.receive(
            str(topics.Topic("nest", peer, kind)), payload, now, retained=retained
        )

    def come(self, now=NOW, *, peer="bob", retained=False, lease=10.0):
        self.tell("card", card(lease=lease), now, peer=peer, retained=retained)
        self.tell("status", status(counts={"global": 3}), now, peer=peer, retained=retained)

    def bob(self):
        return self.state.peers["bob"]

    def kinds(self):
        return [event.kind for event in self.state.timeline]


# --- who takes part -----------------------------------------------------------------------------------


def test_a_peer_that_comes_is_online_with_what_its_card_says():
    told = Told()
    told.come()
    bob = told.bob()
    assert (bob.presence, bob.since, bob.checked) == ("online", NOW, "unsigned")
    assert (bob.samples, bob.lease, bob.models) == (5, 10.0, ("global",))
    assert (bob.counts, bob.settings) == ({"global": 3}, {"mode": "async"})
    assert bob.summary is None
    assert told.kinds() == ["joined"]


def test_a_lost_connection_is_offline_then_lost_and_a_return_is_noted():
    told = Told()
    told.come()
    told.tell("status", status("offline", reason="connection lost"), NOW + 5)
    assert (told.bob().presence, told.bob().since) == ("offline", NOW + 5)
    assert told.state.tick(NOW + 5 + LEASE_MARGIN * 10) == []
    (_, change) = told.state.tick(NOW + 5.1 + LEASE_MARGIN * 10)
    assert (change.peer, told.bob().presence) == ("bob", "lost")
    assert "longer than its lease of 10 s" in told.bob().reason
    assert told.state.tick(NOW + 99) == []
    told.tell("status", status(), NOW + 100)
    assert told.bob().presence == "online"
    assert told.kinds() == ["joined", "offline", "lost", "back"]


def test_a_last_will_does_not_take_away_where_a_peer_counts():
    told = Told()
    told.come()
    told.tell("summary", summary(models={"global": ModelSummary(True, 3)}))
    told.tell("status", status("offline"), NOW + 1)
    assert (told.bob().counts, told.bob().phase) == ({"global": 3}, "training")
    assert told.state.models["global"].counting == ("bob",)


def test_a_retained_online_status_does_not_prove_that_its_peer_lives():
    """Killed while the broker was down: its last summary is older than its lease."""
    told = Told()
    told.come(retained=True)
    told.tell("summary", summary(NOW - 20), NOW, retained=True)
    assert told.bob().presence == "lost"
    assert told.bob().since == NOW - 20


def test_a_peer_whose_clock_is_behind_is_not_taken_to_be_lost_once_it_is_heard():
    told = Told()
    told.come(retained=True)
    told.tell("summary", summary(0.0), NOW)
    assert (told.bob().presence, told.bob().last_heard) == ("online", NOW)


def test_a_clock_that_is_ahead_does_not_keep_a_peer_alive():
    told = Told()
    told.come(retained=True)
    told.tell("summary", summary(NOW + 1e6), NOW, retained=True)
    told.state.tick(NOW + 99)
    assert told.bob().presence == "lost"


def test_who_left_is_named_with_time_and_reason():
    told = Told()
    told.come()
    told.tell("summary", summary(NOW + 3, ended=Ended("left", "told to stop", NOW + 3)), NOW + 3)
    told.tell("card", b"", NOW + 4)
    told.tell("status", status("left", reason="told to stop"), NOW + 4)
    bob = told.bob()
    assert (bob.presence, bob.since, bob.reason) == ("left", NOW + 4, "told to stop")
    told.tell("status", status("offline"), NOW + 5)  # killed while it disconnected
    assert told.bob() == replace(bob, last_heard=told.bob().last_heard)
    late = Told()
    late.tell("status", status("left", reason="told to stop"), NOW + 50, retained=True)
    ended = summary(NOW + 3, ended=Ended("left", "told to stop", NOW + 3))
    late.tell("summary", ended, NOW + 50, retained=True)
    assert (late.bob().presence, late.bob().since) == ("left", NOW + 3)
    assert late.kinds() == ["left"]
    assert late.bob().summary.ended.kind == "left"


def test_a_death_notice_is_for_one_session():
    told = Told()
    told.come()
    told.tell("status", status("offline"), NOW + 1)
    notice = Death("s1", "was killed by signal 9", "its supervisor", NOW + 2).encode()
    told.tell("death", notice, NOW + 2)
    assert told.bob().presence == "dead"
    assert told.bob().reason == "was killed by signal 9 (declared by its supervisor)"
    told.tell("card", card("s2", since=NOW + 9), NOW + 9)
    told.tell("status", status("online", "s2"), NOW + 9)
    assert told.bob().presence == "online"
    assert told.kinds() == ["joined", "offline", "dead", "joined"]


def test_a_device_that_asks_for_the_name_changes_nothing():
    told = Told()
    told.tell("status", status("offline", reason="asks whether its name is free"))
    assert (told.state.peers, told.kinds()) == ({}, [])
    told.come()
    before = told.bob()
    told.tell("status", status("offline", "s9", reason="asks whether its name is free"), NOW)
    assert told.bob() == before
    told.tell("status", status("online", "s1"), NOW)
    assert told.bob().presence == "online"


# --- summaries, models and events ---------------------------------------------------------------------


def test_models_are_put_together_from_the_peers_that_are_present():
    told = Told()
    for peer, weight, distance in (("bob", 0.5, 0.1), ("eve", 1.5, 0.3), ("joe", 9.0, 0.9)):
        told.come(peer=peer)
        model = ModelSummary(True, 3, 2, 3, distance, weight)
        told.tell("summary", summary(models={"global": model}), peer=peer)
    told.tell("status", status("online"), peer="eve")  # it does not count any more
    told.tell("status", status("left"), peer="joe")
    (model,) = told.state.models.values()
    assert (model.name, model.members, model.counting) == ("global", ("bob", "eve"), ("bob",))
    assert (model.disagreement, model.weights) == (0.3, (0.5, 1.5))


def test_a_peers_events_enter_the_timeline_once():
    told = Told()
    told.come()
    first = PeerEvent(NOW + 1, "founded", "founds model global at its own values")
    second = PeerEvent(NOW + 2, "refused", "refuses peer eve: other models", "eve")
    told.tell("summary", summary(NOW + 1, events=(first,)))
    told.tell("summary", summary(NOW + 2, events=(first, second)))
    assert told.kinds() == ["joined", "founded", "refused"]
    event = told.state.timeline[-1]
    assert (event.peer, event.other, event.text) == ("bob", "eve", second.text)
    assert told.state.summaries == 2


def test_all_of_it_is_plain_data():
    told = Told()
    told.come()
    told.tell("summary", summary(metrics={"accuracy": 0.5, "loss": None}))
    record = json.loads(json.dumps(told.state.as_record(), allow_nan=False))
    assert record["peers"]["bob"]["summary"]["metrics"] == {"accuracy": 0.5, "loss": None}
    assert record["models"]["global"]["members"] == ["bob"]


def test_what_cannot_be_read_is_marked_and_the_record_stays():
    told = Told()
    told.come()
    told.tell("status", b'{"state": "online"}')
    assert (told.bob().presence, told.bob().checked) == ("online", "refused")
    assert "its status cannot be read: it runs another version" in told.bob().problem
    told.tell("status", status())
    assert (told.bob().checked, told.bob().problem) == ("unsigned", "")


@given(st.sampled_from(KINDS), st.binary(max_size=100) | st.just(b"GSMS") | st.just(b"{}"))
def test_no_message_makes_it_raise(kind, payload):
    for told in (Told(), Told(Identity.generate("owner").public)):
        told.tell(kind, payload)
        told.state.tick(NOW + 1e9)
        assert not told.state.models


def test_strangers_cannot_fill_the_memory():
    told = Told()
    for index in range(MAX_OBSERVED + 9):
        told.tell("status", status(), peer=f"p{index}")
    assert len(told.state.peers) == MAX_OBSERVED
    assert told.state.receive("gossamer/v1/other/peer/a/status", status(), NOW) == []
    assert told.state.receive("elsewhere", b"x", NOW) == []


# --- trust --------------------------------------------------------------------------------------------

OWNER = Identity.generate("owner")


class Member:
    """A peer that signs."""

    def __init__(self, label: str, *, owner: Identity = OWNER, ticket: bool = False) -> None:
        self.identity = Identity.generate(label)
        self.name, public = self.identity.name, self.identity.public
        self.now = NOW
        if ticket:
            paper, secret = open_ticket(owner, "nest", uses=1)
            admission = endorse(paper, secret, self.identity)
        else:
            admission = Admission(invite(owner, "nest", label, public, days=1.0), b"")
        self.security = SwarmSecurity(
            self.identity, admission, owner.public, swarm="nest", session="s1", models=["global"],
            since=NOW, wall=lambda: self.now, clock=lambda: 0.0,
        )  # fmt: skip

    def come(self, told: Told, *, retained: bool = False) -> None:
        told.tell("card", self.security.card(card()), peer=self.name, retained=retained)
        told.tell("status", self.security.status(status()), peer=self.name, retained=retained)

    def told(self, told: Told):
        return told.state.peers[self.name]


@pytest.mark.parametrize("card_first", [True, False])
def test_with_the_owners_key_members_are_told_from_strangers(card_first):
    told, anna, eve = (
        Told(OWNER.public),
        Member("anna"),
        Member("eve", owner=Identity.generate("e")),
    )
    for one in (anna, eve):
        messages = {
            "card": one.security.card(card()),
            "status": one.security.status(status()),
            "summary": one.security.summary(summary()),
        }
        for kind in messages if card_first else reversed(messages):
            told.tell(kind, messages[kind], peer=one.name)
    assert (anna.told(told).checked, anna.told(told).presence) == ("member", "online")
    assert anna.told(told).summary is not None
    assert eve.told(told).checked == "refused"
    assert "its card is refused: no valid invitation" in eve.told(told).problem
    assert told.state.is_signed
    assert "eve" not in str(told.state.models)


def test_without_the_owners_key_only_the_key_in_the_name_is_checked():
    told, anna, eve = Told(), Member("anna"), Member("eve")
    anna.come(told)
    assert anna.told(told).checked == "signed"
    told.tell("status", eve.security.status(status("left")), peer=anna.name)
    assert (anna.told(told).checked, anna.told(told).presence) == ("refused", "online")
    told.tell("status", status("left"), peer=anna.name)
    assert "it is not signed" in anna.told(told).problem
    notice = sign_death(OWNER, "nest", anna.name, Death("s1", "gone", "owner", NOW))
    told.tell("death", notice, peer=anna.name)
    assert anna.told(told).presence == "online"
    assert "without the owner's public key" in anna.told(told).problem


def test_nothing_unsigned_counts_where_the_owners_key_is_given():
    told = Told(OWNER.public)
    told.come()
    assert (told.bob().presence, told.bob().checked) == ("unknown", "refused")


def test_an_old_summary_or_status_brought_back_changes_nothing():
    told, anna = Told(OWNER.public), Member("anna")
    old_status, old = anna.security.status(status()), anna.security.summary(summary(round=1))
    anna.come(told)
    told.tell("summary", anna.security.summary(summary(round=2)), peer=anna.name)
    told.tell("status", anna.security.status(status("left")), peer=anna.name)
    for kind, payload in (("summary", old), ("status", old_status)):
        told.tell(kind, payload, peer=anna.name)
    assert (anna.told(told).round, anna.told(told).presence) == (2, "left")
    assert anna.told(told).checked == "member"


def test_a_summary_is_good_on_its_own_topic_alone():
    told, anna, ben = Told(OWNER.public), Member("anna"), Member("ben")
    anna.come(told)
    ben.come(told)
    told.tell("summary", anna.security.summary(summary()), peer=ben.name)
    told.tell("summary", anna.security.status(summary()), peer=anna.name)
    for one in (anna, ben):
        assert (one.told(told).summary, one.told(told).checked) == (None, "refused")


def test_the_owners_death_notice_and_revocation_count():
    told, anna, ben = Told(OWNER.public), Member("anna"), Member("ben")
    anna.come(told)
    ben.come(told)
    notice = sign_death(OWNER, "nest", anna.name, Death("s1", "burnt", "owner", NOW))
    told.tell(
        "death",
        sign_death(ben.identity, "nest", anna.name, Death("s1", "", "", NOW)),
        peer=anna.name,
    )
    assert anna.told(told).presence == "online"
    told.tell("death", notice, peer=anna.name)
    assert (anna.told(told).presence, anna.told(told).checked) == ("dead", "member")
    papers = Papers(None, owner=OWNER)  # type: ignore[arg-type]
    told.state.receive(revocation_topic("nest"), papers.revoke(ben.name), NOW)
    assert (ben.told(told).checked, ben.told(told).problem) == (
        "revoked", "the swarm's owner has revoked it",
    )  # fmt: skip
    (problem,) = find_problems(told.state, NOW)
    assert (problem.kind, problem.peer) == ("refused", ben.name)
    assert problem.text.endswith("and it still runs: stop it on its device")
    told.state.receive(revocation_topic("nest"), b"garbage", NOW)


@pytest.mark.parametrize("list_first", [True, False])
def test_a_revoked_peer_that_has_left_is_shown_as_that_and_needs_nobody(list_first):
    told, ben = Told(OWNER.public), Member("ben")
    papers = Papers(None, owner=OWNER)  # type: ignore[arg-type]
    goodbye = ben.security.status(status("left", reason="its invitation was revoked"))
    messages = [
        (revocation_topic("nest"), papers.revoke(ben.name)),
        (topics.status("nest", ben.name), goodbye),
    ]
    for topic, payload in messages if list_first else reversed(messages):
        told.state.receive(topic, payload, NOW, retained=True)
    assert (ben.told(told).presence, ben.told(told).checked) == ("left", "revoked")
    assert find_problems(told.state, NOW) == []
    assert "refused" not in told.kinds()  # it happened before the first look


def test_an_invitation_that_ends_is_noticed():
    told, anna = Told(OWNER.public), Member("anna")
    anna.come(told)
    told.state.tick(NOW + 25 * 3600)
    assert "its invitation has expired" in anna.told(told).problem


def test_a_goodbye_that_nobody_can_check_is_shown_and_marked():
    """A peer that came by a ticket, and left before the observer came: who held the ticket is not known."""
    told, anna = Told(OWNER.public), Member("anna", ticket=True)
    goodbye = anna.security.status(status("left", reason="done"))
    told.tell("status", goodbye, peer=anna.name, retained=True)
    assert (anna.told(told).presence, anna.told(told).checked) == ("left", "signed")
    invited = Member("ben")
    told.tell("status", invited.security.status(status("left")), peer=invited.name, retained=True)
    assert invited.told(told).checked == "member"


# --- real peers on a broker in memory -----------------------------------------------------------------


async def watched(settings, nest, start):
    """Run a swarm with an observer; returns its state and the reports."""
    async with Observer(
        lambda: MemoryTransport(nest.broker, "observer"), "nest", owner=settings.get("owner")
    ) as observer:
        await start(observer.swarm)
        reports = await nest.all()
        await until(lambda: all(p.presence == "left" for p in observer.swarm.peers.values()))
        return observer.swarm, reports


def test_a_swarm_is_seen_from_beginning_to_end_and_sees_nobody(run):
    names = ("a", "b", "c")

    async def scenario():
        nest, gate = Nest(quick(expect=names, rounds=4)), Gate(2)

        async def start(state):
            for name in names:
                nest.start(name, Still(make_learner(name), 1.0, gate))
            await gate.wait()
            await until(lambda: state.models and len(state.models["global"].counting) == 3)
            await until(
                lambda: all(p.summary and p.summary.neighbours for p in state.peers.values())
            )
            seen.extend(state.peers.values())
            gate.open()

        return await watched({}, nest, start), nest

    seen = []
    (state, reports), nest = run(scenario())
    assert [(p.presence, p.summary.neighbour_count) for p in seen] == [("online", 2)] * 3
    assert set(seen[0].summary.neighbours) == {"a", "b", "c"} - {seen[0].name}
    assert seen[0].summary.models["global"].members == 3
    assert all(sum(p.summary.neighbour_bytes) == p.summary.sent_bytes for p in seen)
    assert held(reports) == injected(reports) == 3
    for peer in state.peers.values():
        assert (peer.round, peer.reason) == (4, "its training is over")
        assert (peer.summary.ended.kind, peer.accuracy) == ("finished", 1.0)
        assert peer.summary.sent_bytes > 0 < peer.summary.received_bytes
    kinds = {event.kind for event in state.timeline}
    assert kinds - {"counted"} == {"joined", "founded", "left"}  # a peer that found others first
    assert not [topic for topic in nest.broker.retained if "observer" in topic]


def test_who_is_killed_and_comes_back_says_so(run, tmp_path):
    async def scenario():
        nest, gate = Nest(quick(expect=("a", "b"), rounds=50)), Gate(2)

        async def start(state):
            nest.start("a", Still(make_learner("a"), 1.0, gate))
            lives = nest.start("b", Still(make_learner("b"), 2.0, gate), checkpoint=tmp_path / "b")
            await gate.wait()
            await until(lambda: state.models and len(state.models["global"].counting) == 2)
            # Its round is still trained on its thread, which a kill would have ended too.
            gate.limit = 3
            await until(lambda: lives.view.round >= 2)
            gate.limit = 2
            gate.open()
            await lives.crash()
            await until(lambda: state.peers["b"].presence == "offline")
            nest.start("b", Still(make_learner("b"), 2.0), checkpoint=tmp_path / "b")
            await until(lambda: state.peers["b"].presence == "online")
            await until(lambda: (s := state.peers["b"].summary) and s.last_end)

        return await watched({}, nest, start)

    state, _ = run(scenario())
    last = state.peers["b"].summary.last_end
    assert (last.kind, last.reason) == ("lost", "its process ended without a goodbye")
    kinds = [event.kind for event in state.timeline if event.peer == "b"]
    assert kinds.index("offline") < kinds.index("back")
    assert "restarted" in kinds


def test_with_trust_summaries_are_signed_and_checked(run, tmp_path):
    papers = Papers(tmp_path)
    names = papers.names("a", "b")

    async def scenario():
        nest = Nest(quick(expect=names, rounds=3))

        async def start(state):
            for label in ("a", "b"):
                nest.start(label, make_learner(label), papers.settings(label, nest.settings))
            await until(lambda: len(state.peers) == 2)

        return await watched({"owner": papers.owner.public}, nest, start)

    state, _ = run(scenario())
    for name in names:
        peer = state.peers[name]
        assert (peer.checked, peer.problem, peer.round) == ("member", "", 3)


def test_the_last_summary_of_a_peer_that_fails_says_that_it_leaves(run):
    async def scenario():
        nest = Nest(quick(expect=("nobody",), start_timeout=0.01))
        with pytest.raises(PeerError, match="nobody did not come online"):
            await nest.start("a").task
        return read_summary(nest.broker.retained[topics.summary("nest", "a")])

    summary = run(scenario())
    assert (summary.state, summary.ended.kind) == ("leaving", "failed")


def test_a_broker_with_small_packets_gets_short_summaries(run):
    async def scenario():
        nest = Nest(quick(rounds=1))
        nest.broker.max_packet = 1300
        await nest.start("a").task
        return nest.broker.retained[topics.summary("nest", "a")]

    assert len(run(scenario())) < 1300
