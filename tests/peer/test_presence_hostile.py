"""Cards and statuses that nobody's program would write: read as none, counted, and survived."""

from __future__ import annotations

import json
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.gossip.trust import Heard
from gossamer.peer.cards import Card, Status, read_card, read_status
from gossamer.peer.mail import _heed
from gossamer.peer.presence import Online, Roster

FIELDS = [("layer.weight (global)", [4, 3], "float32")]
DEEP = b"[" * 200_000
HUGE = "1" + "0" * 400  # no float is as large
CARD = Card("s1", 0.0, 1, {"global": FIELDS})  # type: ignore[arg-type]
STATUS = Status("left", "s1", "done", "", [["a", "b", "v", 1, "void"]])


def changed(whole: Card | Status, field: str, text: str) -> bytes:
    """As JSON, with one field put in as it is written here."""
    table = json.loads(whole.encode())
    assert field in table
    return json.dumps(table | {field: "<here>"}).replace('"<here>"', text).encode()


BAD_CARDS = [
    DEEP, b'{"vectors":' + DEEP,
    *(changed(CARD, "samples", text) for text in ("Infinity", "NaN", "1.5", '"1"', "-1", HUGE)),
    *(changed(CARD, "since", text) for text in ("Infinity", "NaN", '"0"', HUGE)),
    *(changed(CARD, "session", text) for text in ("3", "null", '""', r'"\ud800"', '"a b"', "[]")),
    *(
        changed(CARD, "vectors", f'{{"global": [{text}]}}')
        for text in (
            '["w", [Infinity], "float32"]', '["w", [1e999, 3], "float32"]', '["w", "43", "float32"]',
            '["w", [4.5], "float32"]', '[3, [4], "float32"]', '["w", [4], 32]', '["w", [4]]', "7",
        )
    ),
]  # fmt: skip
BAD_STATUSES = [
    DEEP, b'{"statement":' + DEEP,
    *(changed(STATUS, "session", text) for text in ("3", "null", '""', r'"\ud800"', "[]")),
    *(changed(STATUS, "reason", text) for text in ("3", "null", "[]")),
    *(changed(STATUS, field, text) for field in ("state", "phase") for text in ("{}", "[]", "3")),
    *(
        changed(STATUS, "statement", text)
        for text in (
            "{}", "3", "[3]", '["abcde"]', '[["a", "b", ["v"], 1, "credited"]]',
            '[["a", "b", "v", 1]]', '[["a", "b", "v", Infinity, "credited"]]',
            '[["a", "b", {}, 1, "credited"]]', '[["a", "b", "v", 1, null]]',
        )
    ),
]  # fmt: skip


def short(payload: bytes) -> str:
    return payload[:120].decode()


def test_the_sound_ones_are_read_as_they_were_written():
    assert read_card(CARD.encode()) == CARD
    assert read_status(STATUS.encode()) == STATUS


@pytest.mark.parametrize("payload", BAD_CARDS, ids=short)
def test_no_card(payload):
    assert read_card(payload) is None


@pytest.mark.parametrize("payload", BAD_STATUSES, ids=short)
def test_no_status(payload):
    assert read_status(payload) is None


def test_a_reason_cannot_forge_lines_of_the_log():
    status = read_status(Status("left", "s1", "done", "bye\npeer x\x1b[2J left").encode())
    assert status is not None
    assert status.reason == "byepeer x[2J left"


def test_what_cannot_be_read_is_counted_and_a_flood_does_not_flood_the_log(caplog):
    dropped: Counter[str] = Counter()
    roster = Roster("me", {"global": FIELDS}, dropped=dropped)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            assert roster.card("eve", DEEP) == []
            assert roster.status("eve", DEEP, 0.0) == []
    assert dropped == {"unreadable-card": 100, "unreadable-status": 100}
    assert len(caplog.records) == 14
    assert roster.card("eve", CARD.encode()) == []
    status = Status("online", "s1", "training").encode()
    assert roster.status("eve", status, 0.0) == [Online("eve", "s1", ("global",))]


def member() -> Any:
    """As much of a membership as mail needs to hear of itself."""
    found = SimpleNamespace(
        name="me", session="mine", born=True, events=[], own_status=None, contradicted=0,
        engine=SimpleNamespace(dropped=Counter()), roster=Roster("me", {}),
        asked=SimpleNamespace(set=lambda: None),
    )  # fmt: skip
    found.contradict = lambda: setattr(found, "contradicted", found.contradicted + 1)
    return found


@pytest.mark.parametrize("payload", BAD_STATUSES, ids=short)
def test_nonsense_under_our_own_name_is_counted(payload):
    me = member()
    _heed(me, [Heard("status", "me", payload)])
    assert me.engine.dropped == {"unreadable-status": 1}
    assert me.own_status is None
    assert me.contradicted == 0


def test_a_sound_status_under_our_own_name_is_heard():
    me = member()
    _heed(me, [Heard("status", "me", Status("offline", "other").encode())])
    assert (me.own_status.session, me.contradicted) == ("other", 1)
    assert not me.engine.dropped
