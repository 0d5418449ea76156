"""The roster: what follows from the cards and statuses of others."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field, fields

import pytest
from peer_kit import begin, delivered, make_learner, quick

from gossamer.gossip import topics
from gossamer.peer.engine import Engine
from gossamer.peer.presence import (
    MAX_KEPT_BYTES,
    RETURN_GRACE,
    SINCE,
    Card,
    Goodbye,
    Offline,
    Online,
    Roster,
    SessionEnded,
    Status,
    limit_goodbyes,
    read_card,
    read_presence,
    read_status,
)

FIELDS = [("layer.weight (global)", [4, 3], "float32")]
OTHER = [("layer.weight (global)", [5, 3], "float32")]


def roster(**options) -> Roster:
    return Roster("me", {"global": FIELDS}, lease=10.0, **options)


def come(r: Roster, session="s1", phase="training", now=0.0, fields=FIELDS, peer="bob", lease=10.0):
    events = r.receive_card(peer, Card(session, 0.0, 1, {"global": fields}, lease=lease).encode())
    return events + r.receive_status(peer, Status("online", session, phase).encode(), now)


def online(peer: str, session: str, **more) -> Online:
    """A peer that shares the global model with us in both directions."""
    return Online(peer, session, ("global",), models_pushed_to_us=("global",), **more)


def test_a_peer_counts_once_card_and_status_agree():
    r = roster()
    assert r.receive_status("bob", Status("online", "s1").encode(), 0.0) == []
    assert r.receive_card("bob", Card("s0", 0.0, 1, {"global": FIELDS}).encode()) == []
    card = Card("s1", 0.0, 1, {"global": FIELDS, "foreign": FIELDS}).encode()
    assert r.receive_card("bob", card) == [online("bob", "s1")]


@dataclass(frozen=True)
class LaterStatus(Status):
    """The status of a later version, which has one field more."""

    colour: str = field(default="grey", metadata={SINCE: "1.1"})


def test_a_field_that_was_added_later_has_its_default_where_it_is_missing():
    earlier, later = Status("online", "s1"), LaterStatus("online", "s1", colour="red")
    assert read_status(later.encode()) == earlier
    assert read_presence(LaterStatus, later.encode()) == later
    assert read_presence(LaterStatus, earlier.encode()) == LaterStatus("online", "s1")


@pytest.mark.parametrize("name", [each.name for each in fields(Card)])
def test_every_field_of_the_first_version_is_required(name: str):
    table = json.loads(Card("s1", 0.0, 1, {"global": FIELDS}).encode())
    assert read_card(json.dumps(table | {"colour": [1, {"a": 2}]}).encode()) is not None
    del table[name]
    assert read_card(json.dumps(table).encode()) is None


def test_a_peer_says_that_it_is_about_to_leave():
    r = roster()
    come(r)
    status = Status("online", "s1", "training", leaving=True).encode()
    assert r.receive_status("bob", status, 1.0) == [online("bob", "s1", leaving=True)]
    stays = Status("online", "s1", "training").encode()
    assert r.receive_status("bob", stays, 2.0) == [online("bob", "s1")]


def test_the_lease_is_counted_from_the_loss_and_ends_once():
    r = roster()
    come(r)
    assert r.receive_status("bob", Status("offline", "s1").encode(), 5.0) == [Offline("bob")]
    assert r.offline_unfinished() == ["bob"]
    assert r.tick(17.0) == []
    assert r.tick(17.6) == [SessionEnded("bob", "s1", None)]
    assert r.tick(99.0) == []
    assert r.offline_unfinished() == []


def test_a_fresh_session_ends_the_old_one_and_its_late_will_is_ignored():
    r = roster()
    come(r)
    assert come(r, "s2") == [SessionEnded("bob", "s1", None), online("bob", "s2")]
    assert r.receive_status("bob", Status("offline", "s1").encode(), 1.0) == []
    assert list(r.online()) == ["bob"]


def test_a_goodbye_hands_on_the_statement():
    r = roster()
    come(r)
    rows = [["me", "mine", "global", 3, "credited"]]
    goodbye = Status("left", "s1", "done", "enough", rows)
    assert r.receive_status("bob", goodbye.encode(), 1.0) == [SessionEnded("bob", "s1", rows)]
    assert r.online() == {}


def test_both_sessions_of_a_peer_that_came_back_and_left_while_we_were_away_have_ended():
    r = roster()
    come(r)
    r.reconnected(2.0, since=1.5)
    goodbye = Status("left", "s2", "done").encode()
    assert r.receive_status("bob", goodbye, 2.1) == [
        SessionEnded("bob", "s1", None),
        SessionEnded("bob", "s2", []),
    ]
    assert r.tick(99.0) == []


def test_a_peer_that_came_back_and_died_while_we_were_away_is_given_up():
    """All that is left of it is the will of a life that we never met."""
    r = roster()
    come(r)
    for later in (1.6, 2.1):  # before and after we noticed our own return
        assert r.receive_status("bob", Status("offline", "s2").encode(), later) == []
        r.reconnected(2.0, since=1.5)
    later = 2.0 + RETURN_GRACE + 1
    assert r.tick(later) == [Offline("bob"), SessionEnded("bob", "s1", None)]


def test_a_late_goodbye_does_not_end_the_life_that_followed():
    r = roster()
    come(r)
    come(r, "s2")
    assert r.receive_status("bob", Status("left", "s1", "done").encode(), 1.0) == []
    assert list(r.online()) == ["bob"]


def test_who_does_not_come_back_with_the_broker_is_offline():
    r = roster()
    come(r, peer="bob", lease=1e3)
    come(r, peer="eve", lease=1e3)
    later = 1.0  # however soon: what was heard over the old connection proves nothing
    r.reconnected(later, since=0.5)
    r.receive_status("eve", Status("online", "s1", "training").encode(), later + 1)
    assert r.tick(later + RETURN_GRACE - 1) == []
    assert Offline("bob") in r.tick(later + RETURN_GRACE + 1)
    assert list(r.online()) == ["eve"]


def test_nobody_is_said_to_be_offline_while_it_is_we_who_are(caplog):
    """The connection is lost again before the others could be heard."""
    r = roster()
    come(r, lease=1e3)
    r.reconnected(1.0, since=0.5)
    assert r.tick(2.0 + RETURN_GRACE, connected=False) == []
    assert caplog.text == ""
    assert r.tick(2.0 + RETURN_GRACE) == [Offline("bob")]


def test_who_came_back_while_we_were_away_is_heard_before_it_is_given_up():
    """Our own absence was longer than its lease, which it has kept."""
    r = roster()
    come(r, lease=100.0)
    r.receive_status("bob", Status("offline", "s1").encode(), 5.0)
    r.reconnected(500.0, since=499.5)
    r.note_delivery(500.1)  # the first of many retained messages
    assert r.tick(500.1) == []
    back = Status("online", "s1", "training").encode()
    assert r.receive_status("bob", back, 500.2, retained=True) == [
        online("bob", "s1", is_live=False)
    ]
    r.receive_status("bob", Status("offline", "s1").encode(), 501.0)
    r.reconnected(900.0, since=899.5)
    r.note_delivery(901.0 + RETURN_GRACE)
    assert r.tick(901.0 + RETURN_GRACE) == [SessionEnded("bob", "s1", None)]


def test_who_came_back_before_we_noticed_our_own_return_is_not_doubted():
    r = roster()
    come(r, now=10.0, lease=1e3)
    r.reconnected(10.5, since=9.5)
    assert r.tick(10.5 + 2 * RETURN_GRACE) == []


def test_neighbours_of_a_former_life_come_back_or_are_given_up(caplog):
    caplog.set_level(logging.INFO)
    r = roster()
    r.restore_neighbours({"bob": "s1", "eve": "s1"}, 0.0)
    assert come(r, peer="bob", now=12.0) == [online("bob", "s1")]
    assert "peer bob is still online" in caplog.text  # it is we who were away
    assert r.tick(13.0) == [SessionEnded("eve", "s1", None)]


def test_a_peer_that_says_nothing_for_longer_than_its_lease_is_given_up():
    """Its last will is lost if it dies while the broker is down, and its retained status says "online"."""
    r = roster()
    come(r)
    r.receive_status("bob", Status("online", "s1", "training").encode(), 8.0)
    assert r.tick(20.0) == []
    r.note_delivery(8.0)
    assert r.tick(30.0) == []  # nobody was heard: our own connection may be dead
    r.note_delivery(29.0)
    assert r.tick(30.0, connected=False) == []  # it is we who cannot hear it
    assert r.tick(30.0) == [SessionEnded("bob", "s1", None)]


def test_somebody_through_is_not_waited_for():
    r = roster()
    come(r, phase="done")
    r.receive_status("bob", Status("offline", "s1").encode(), 1.0)
    assert r.offline_unfinished() == []


def test_a_different_schema_is_named_and_not_averaged():
    r = roster()
    assert come(r, fields=OTHER) == [Online("bob", "s1", ())]
    assert "shape (4, 3) here and (5, 3) there" in r.mismatches["bob", "global"]


def test_only_neighbours_on_the_graph_are_pushed_to():
    r = roster(neighbours=["eve"])
    assert come(r, peer="bob") == [Online("bob", "s1", ())]
    assert come(r, peer="eve") == [online("eve", "s1")]


def test_the_lease_is_the_one_on_the_peers_own_card():
    r = roster()
    card = Card("s1", 0.0, 1, {"global": FIELDS}, lease=100.0)
    r.receive_card("bob", card.encode())
    r.receive_status("bob", Status("online", "s1").encode(), 0.0)
    r.receive_status("bob", Status("offline", "s1").encode(), 0.0)
    assert r.tick(124.0) == []
    assert r.tick(126.0) == [SessionEnded("bob", "s1", None)]


def test_a_session_declared_dead_has_ended_and_never_comes_back():
    r = roster()
    come(r)
    assert (
        r.receive_death("bob", b'{"session": "s0", "reason": "", "by": "", "time": 0}') == []
    )  # another one
    notice = b'{"session": "s1", "reason": "burnt", "by": "owner", "time": 0}'
    assert r.receive_death("bob", notice) == [SessionEnded("bob", "s1", None)]
    assert r.receive_death("bob", notice) == []
    assert come(r, "s1") == []
    assert come(r, "s2") == [online("bob", "s2")]


def test_who_comes_later_does_not_meet_a_session_that_was_declared_dead():
    r = roster()
    assert r.receive_death("bob", b'{"session": "s1", "reason": "", "by": "", "time": 0}') == []
    assert come(r) == []


ROWS = [["me", "mine", "global", 3, "credited"]], [["me", "mine", "global", 5, 7]]


def return_in_a_new_session(r: Roster, statement, reclaimed):
    former = Goodbye("s1", statement, reclaimed)
    r.receive_card("bob", Card("s2", 0.0, 1, {"global": FIELDS}, former=former).encode())
    return r.receive_status("bob", Status("online", "s2").encode(), 2.0)


def test_a_goodbye_that_a_new_session_has_replaced_at_the_broker_stands_on_its_card():
    r = roster()
    come(r)
    events = return_in_a_new_session(r, *ROWS)
    assert events == [SessionEnded("bob", "s1", *ROWS), online("bob", "s2")]
    assert r.receive_status("bob", Status("online", "s2").encode(), 3.0) == [online("bob", "s2")]


def test_a_goodbye_on_a_card_is_heard_by_those_who_had_given_the_session_up():
    r = roster()
    come(r)
    r.tick(100.0)
    events = return_in_a_new_session(r, *ROWS)
    assert events == [SessionEnded("bob", "s1", *ROWS), online("bob", "s2")]


def test_a_goodbye_on_a_card_is_nothing_to_those_whom_it_does_not_name():
    others = [["ann", "hers", "global", 3, "credited"]], []
    assert return_in_a_new_session(roster(), *others) == [online("bob", "s2")]


def test_news_of_a_device_that_was_replaced_are_ignored():
    r = roster()
    come(r)
    again = Card("s2", 0.0, 1, {"global": FIELDS}, generation=2)
    r.receive_card("bob", again.encode())
    events = r.receive_status("bob", Status("online", "s2", generation=2).encode(), 1.0)
    assert events == [SessionEnded("bob", "s1", None), online("bob", "s2")]
    for state in ("online", "offline", "left"):
        assert come(r, "s1") == []
        assert r.receive_status("bob", Status(state, "s1").encode(), 2.0) == []
    assert list(r.online()) == ["bob"]
    # The new device's last will was written before it knew its generation.
    assert r.receive_status("bob", Status("offline", "s2").encode(), 3.0) == [Offline("bob")]
    assert come(r, "s1") == []
    # Once it has gone, the name is anybody's.
    assert (
        r.receive_status("bob", Status("left", "s2", generation=2).encode(), 4.0)[-1].session
        == "s2"
    )
    assert come(r, "s3") == [online("bob", "s3")]


@pytest.mark.parametrize(
    "payload",
    [b"{", b"[]", b"null", b'{"state": "sleeping"}', b'{"models": 3}', b"\xff\xfe",
     b'{"state":"online","session":"s","phase":"nowhere","reason":"","statement":[]}',
     b'{"state":"left","session":"s","phase":"done","reason":"","statement":[3]}'],
)  # fmt: skip
def test_nonsense_is_ignored(payload):
    r = roster()
    come(r)
    assert r.receive_status("bob", payload, 1.0) == []
    assert r.receive_card("bob", payload) == []
    assert list(r.online()) == ["bob"]


def left(session: str, *, taken_back_from: str = "", credited_from: str = "") -> Status:
    """A goodbye that settles a transfer with one peer."""
    reclaimed = [[taken_back_from, "t1", "global", 3, 7]] if taken_back_from else []
    statement = [[credited_from, "t1", "global", 3, "credited"]] if credited_from else []
    return Status("left", session, statement=statement, reclaimed=reclaimed)


def test_a_kept_goodbye_ends_the_session_that_it_is_of():
    r = roster()
    come(r)
    goodbye = left("s1", taken_back_from="me")
    assert r.receive_kept_goodbye("bob", goodbye.encode()) == [
        SessionEnded("bob", "s1", [], goodbye.reclaimed)
    ]
    assert r.online() == {}


def test_a_kept_goodbye_says_nothing_of_a_later_session():
    r = roster()
    come(r, session="s2")
    goodbye = left("s1", credited_from="me")
    assert r.receive_kept_goodbye("bob", goodbye.encode()) == [
        SessionEnded("bob", "s1", goodbye.statement)
    ]
    assert set(r.online()) == {"bob"}
    assert r.receive_kept_goodbye("bob", left("s1", credited_from="eve").encode()) == []
    assert r.receive_kept_goodbye("bob", Status("online", "s1").encode()) == []
    assert r.receive_kept_goodbye("bob", b"nonsense") == []


def test_a_goodbye_is_worth_keeping_for_peers_that_are_away():
    r = roster()
    come(r)
    come(r, peer="eve")
    assert not r.goodbye_was_missed("bob")
    r.receive_status("bob", left("s1", credited_from="eve").encode(), 1.0)
    assert not r.goodbye_was_missed("bob")  # eve heard it
    r.receive_status("eve", Status("offline", "s1").encode(), 2.0)
    assert r.goodbye_was_missed("bob")
    come(r, peer="dan")
    r.receive_status("dan", left("s1", taken_back_from="bob").encode(), 3.0)
    assert r.goodbye_was_missed("dan")


def test_a_card_has_room_for_the_newest_goodbyes():
    goodbyes = {f"peer-{number}": "x" * (MAX_KEPT_BYTES // 4) for number in range(6)}
    assert list(limit_goodbyes(goodbyes)) == ["peer-2", "peer-3", "peer-4", "peer-5"]
    assert limit_goodbyes({"a": "x" * (MAX_KEPT_BYTES + 1)}) == {}
    card = read_card(Card("s", 0.0, 1, {"global": FIELDS}, goodbyes=goodbyes).encode())
    assert card is not None
    assert len(card.goodbyes) == 4


@pytest.mark.parametrize(("waiting_peer", "answers"), [("b", 1), ("c", 0)])
def test_on_a_directed_graph_the_peers_that_we_push_to_get_a_new_status_while_they_wait(
    waiting_peer, answers
):
    """The graph has the links c → a → b: b waits for a value from a, and c does not."""
    engine = begin(Engine("a", make_learner("a"), quick(neighbours=("b",), sources=("c",))))
    card = Card("s1", 0.0, 1, engine.schema_entries).encode()
    waiting = Status("online", "s1", "starting").encode()  # it counts in no model
    arrivals = [
        (topics.card("nest", waiting_peer), card),
        (topics.status("nest", waiting_peer), waiting),
    ]

    async def scenario() -> list[str]:
        link, published = await delivered(arrivals, joined=True, engine=engine)
        keep_status = asyncio.create_task(link.keep_status())
        for _ in range(10):
            await asyncio.sleep(0)
        keep_status.cancel()
        return [topic for topic, _ in published]

    assert asyncio.run(scenario()) == [topics.status("nest", "a")] * answers
