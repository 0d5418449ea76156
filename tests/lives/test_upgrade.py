"""A swarm is upgraded peer by peer: versions gossip with each other, and every sum stays exact."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgpack
import pytest

from gossamer.gossip import wire
from gossamer.gossip.security import signed
from gossamer.peer import Status
from gossamer.peer.presence import Card

from .broker import Network
from .history import Event, History, Member, Mode, Plan, Stage
from .laws import check
from .loop import OWNER
from .world import SimFiles

DEVICES = ("ann", "ben", "cat", "dan")
NEWS: dict[str, Any] = {"colour": "red", "later": [1, 2]}
"""Fields that the present version does not know."""


def is_upgraded() -> bool:
    """Return whether the process that runs now is the second one of its device."""
    return OWNER.get().endswith("#1")


def with_news(table: dict[str, Any]) -> dict[str, Any]:
    return table | NEWS if is_upgraded() else table


class NewMsgpack:
    """Encodes the header of a message, with fields that a later version adds."""

    packb = staticmethod(lambda value: msgpack.packb(with_news(value)))
    unpackb = staticmethod(msgpack.unpackb)


@contextlib.contextmanager
def a_later_version() -> Iterator[None]:
    """Let upgraded processes add fields to all that they publish, send, sign and save."""

    def encode_with_news(encode: Any) -> Any:
        def new_encode(self: Any) -> bytes:
            return json.dumps(with_news(json.loads(encode(self)))).encode()

        return new_encode

    head_of, save = signed.head_of, SimFiles.save

    def new_save(self: SimFiles, path: Any, tree: dict[str, Any], *, sync: bool) -> None:
        tables = {key: with_news(tree[key]) for key in ("books", "gossip", "store")}
        save(self, path, with_news(tree | tables), sync=sync)

    with contextlib.ExitStack() as stack:
        for kind in (Card, Status):
            patch = mock.patch.object(kind, "encode", encode_with_news(kind.encode))
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(wire, "msgpack", NewMsgpack))
        stack.enter_context(
            mock.patch.object(signed, "head_of", lambda value: with_news(head_of(value)))
        )
        stack.enter_context(mock.patch.object(SimFiles, "save", new_save))
        yield


def play(mode: Mode, *, trust: bool) -> History:
    """Four peers train; one after the other is stopped and started again, as the later version.

    The first of them goes back to the earlier version after that.
    """
    members = tuple(
        Member(name, ("global",), 0.0, float(i), step=1.0, slowness=0.003, lease=40.0)
        for i, name in enumerate(DEVICES)
    )
    upgrades = [Event(5.0 + 5.0 * i, "kill", name, 1.0) for i, name in enumerate(DEVICES)]
    plan = Plan(
        seed=0, mode=mode, start="expect", equal=False, trust=trust, rounds=40, lease=40.0,
        network=Network(), members=members, events=(*upgrades, Event(28.0, "kill", "ann", 1.0)),
    )  # fmt: skip
    with a_later_version():
        return Stage(plan).play()


@pytest.mark.parametrize(
    ("mode", "trust"),
    [
        ("async", True),
        pytest.param("async", False, marks=pytest.mark.lives),
        pytest.param("rounds", False, marks=pytest.mark.lives),
    ],
)
def test_a_swarm_that_is_upgraded_peer_by_peer_keeps_its_sums(mode: Mode, trust: bool) -> None:
    history = play(mode, trust=trust)
    assert check(history) == []
    reports = [each.report for each in history.endings if each.report]
    assert len(reports) == len(DEVICES)
    assert all(report.abandoned == [] for report in reports)  # each has continued its session
    dropped = {cause for report in reports for cause in report.dropped}
    unreadable = {"garbage", "version", "malformed", "unreadable-card", "unreadable-status"}
    assert dropped.isdisjoint(unreadable), dropped
    held, moving, injected = (
        sum(report.weight["global"][i] for report in reports) for i in range(3)
    )
    assert (held, moving) == (injected, 0)
    assert injected == len(DEVICES) << 32
    # The news were there: in what the upgraded processes published, and in what they saved.
    told = [data for topic, data in history.retained.items() if topic.endswith("/status")]
    assert sum(b"colour" in data for data in told) == len(DEVICES) - 1
    assert {save.device.name for save in history.saves if "colour" in save.tree} == {*DEVICES}
    processes = {each.process.owner for each in history.endings}
    assert processes == {f"{name}#{i}" for name in DEVICES for i in (0, 1)} | {"ann#2"}
