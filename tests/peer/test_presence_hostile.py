"""Cards and statuses that nobody's program would write: read as none, counted, and survived."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter

import pytest
from peer_kit import delivered

from gossamer.gossip import topics
from gossamer.gossip.security import Death, TrustError
from gossamer.peer.link import Link
from gossamer.peer.presence import Card, Online, Roster, Status, read_card, read_status

FIELDS = [("layer.weight (global)", [4, 3], "float32")]
DEEP = b"[" * 200_000
HUGE = "1" + "0" * 400  # no float is as large
CARD = Card("s1", 0.0, 1, {"global": FIELDS})  # type: ignore[arg-type]
STATUS = Status(
    "left", "s1", "done", "", [["a", "b", "v", 1, "void"]],
    counts={"v": 3}, generation=2, reclaimed=[["a", "b", "v", 2, 1 << 40]],
)  # fmt: skip
DEATH = Death("s1", "the battery burnt", "the owner", 0.0)


def changed(whole: Card | Status | Death, field: str, text: str) -> bytes:
    """As JSON, with one field put in as it is written here."""
    table = json.loads(whole.encode())
    assert field in table
    return json.dumps(table | {field: "<here>"}).replace('"<here>"', text).encode()


BAD_CARDS = [
    DEEP, b'{"models":' + DEEP,
    *(changed(CARD, "samples", text) for text in ("Infinity", "NaN", "1.5", '"1"', "-1", HUGE)),
    *(changed(CARD, "since", text) for text in ("Infinity", "NaN", '"0"', HUGE)),
    *(changed(CARD, "session", text) for text in ("3", "null", '""', r'"\ud800"', '"a b"', "[]")),
    *(changed(CARD, "generation", text) for text in ("0", "-1", "1.5", '"2"', "true", HUGE)),
    *(changed(CARD, "lease", text) for text in ("NaN", "Infinity", '"9"', "null", HUGE)),
    *(changed(CARD, "agree", text) for text in ("[]", "3", '{"mode": 3}')),
    *(changed(CARD, "starts", text) for text in ("[]", "3", '{"global": null}')),
    *(
        changed(CARD, "models", f'{{"global": [{text}]}}')
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
    *(changed(STATUS, "generation", text) for text in ("0", "1.5", '"2"', "null", HUGE)),
    *(changed(STATUS, "counts", text) for text in ("[3]", "3", '{"v": -1}', '{"v": 1.5}')),
    *(
        changed(STATUS, "reclaimed", text)
        for text in (
            "{}", "3", "[3]", '[["a", "b", "v", 1]]', '[["a", "b", "v", 1, -1]]',
            '[["a", "b", "v", 1.5, 1]]', '[["a", "b", 3, 1, 1]]', f'[["a", "b", "v", 1, {HUGE}]]',
        )
    ),
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
    assert Death.decode(DEATH.encode()) == DEATH


@pytest.mark.parametrize("payload", BAD_CARDS, ids=short)
def test_no_card(payload):
    assert read_card(payload) is None


@pytest.mark.parametrize("payload", BAD_STATUSES, ids=short)
def test_no_status(payload):
    assert read_status(payload) is None


BAD_DEATHS = [
    DEEP, b"null", b"[]",
    *(changed(DEATH, "session", text) for text in ("3", "null", '""', '"a b"')),
    *(changed(DEATH, field, text) for field in ("reason", "by") for text in ("3", "null", "[]")),
]  # fmt: skip


@pytest.mark.parametrize("payload", BAD_DEATHS, ids=short)
def test_no_death_notice(payload):
    with pytest.raises(TrustError):
        Death.decode(payload)
    dropped: Counter[str] = Counter()
    assert Roster("me", {}, dropped=dropped).receive_death("eve", payload) == []
    assert dropped == {"unreadable-death-notice": 1}


def test_a_reason_cannot_forge_lines_of_the_log():
    status = read_status(Status("left", "s1", "done", "bye\npeer x\x1b[2J left").encode())
    assert status is not None
    assert status.reason == "byepeer x[2J left"


def test_what_cannot_be_read_is_counted_and_a_flood_does_not_flood_the_log(caplog):
    dropped: Counter[str] = Counter()
    roster = Roster("me", {"global": FIELDS}, dropped=dropped)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            assert roster.receive_card("eve", DEEP) == []
            assert roster.receive_status("eve", DEEP, 0.0) == []
    assert dropped == {"unreadable-card": 100, "unreadable-status": 100}
    assert len(caplog.records) == 14
    assert roster.receive_card("eve", CARD.encode()) == []
    status = Status("online", "s1", "training").encode()
    assert roster.receive_status("eve", status, 0.0) == [
        Online("eve", "s1", ("global",), models_pushed_to_us=("global",))
    ]


def heard(payload: bytes) -> tuple[Link, list[bytes]]:
    """A peer that hears this on its own status topic, and what it publishes there in answer."""

    async def scenario() -> tuple[Link, list[bytes]]:
        status = topics.status("nest", "a")
        link, said = await delivered([(status, payload)], joined=True)
        answering = asyncio.create_task(link.keep_status())
        for _ in range(10):
            await asyncio.sleep(0)
        answering.cancel()
        return link, [each for topic, each in said if topic == status]

    return asyncio.run(scenario())


@pytest.mark.parametrize("payload", BAD_STATUSES, ids=short)
def test_nonsense_under_our_own_name_is_counted(payload):
    link, said = heard(payload)
    assert link.dropped == {"unreadable-status": 1}
    assert link.status_under_our_name is None
    assert not said


def test_a_sound_status_under_our_own_name_is_answered():
    link, said = heard(Status("offline", "other").encode())
    assert link.status_under_our_name is not None
    assert link.status_under_our_name.session == "other"
    assert not link.dropped
    (answer,) = map(read_status, said)
    assert answer is not None
    assert (answer.state, answer.session) == ("online", link.session)
