"""MQTT topics. Identity is in the path, so that broker ACLs can match it.

gossamer/v1/{swarm}/peer/{id}/card             retained: models, schema, public key
gossamer/v1/{swarm}/peer/{id}/status           retained: birth, or the last will
gossamer/v1/{swarm}/peer/{id}/inbox/{model}   gossip for that peer; never retained
gossamer/v1/{swarm}/peer/{id}/metrics          telemetry
gossamer/v1/{swarm}/peer/{id}/death            retained: the owner declares a session over
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from gossamer.errors import GossamerError

Kind: TypeAlias = Literal["card", "status", "inbox", "metrics", "death"]

ROOT: Final = "gossamer/v1"
_LONGEST = 64
_NAME = re.compile(rf"[A-Za-z0-9._&@-]{{1,{_LONGEST}}}")
_REMEMBERED = 256  # topics taken apart or put together lately: most messages go the same few ways
_PLAIN_KINDS: tuple[Kind, ...] = ("card", "status", "metrics", "death")


class TopicError(GossamerError, ValueError):
    """A name that cannot be part of a topic, or a topic that is not one of ours."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic of a peer, taken apart. `model` is set for inboxes alone."""

    swarm: str
    peer: str
    kind: Kind
    model: str | None = None

    def __post_init__(self) -> None:
        check_name("swarm", self.swarm)
        check_name("peer", self.peer)
        if self.kind == "inbox":
            check_name("model", self.model or "")
        elif self.kind not in _PLAIN_KINDS or self.model is not None:
            raise TopicError(f"no topic of kind {self.kind!r} with model {self.model!r}")

    def __str__(self) -> str:
        path = f"{ROOT}/{self.swarm}/peer/{self.peer}/{self.kind}"
        return path if self.model is None else f"{path}/{self.model}"


def check_name(what: str, name: str) -> str:
    """`name` itself, if it may stand in a topic; else a TopicError that names the offender."""
    if _NAME.fullmatch(name):
        return name
    if not name:
        raise TopicError(f"the {what} name is empty")
    if len(name) > _LONGEST:
        raise TopicError(
            f"the {what} name {name[:20]!r}… has {len(name)} characters; limit {_LONGEST}"
        )
    wrong = next(char for char in name if not _NAME.fullmatch(char))
    raise TopicError(
        f"the {what} name {name!r} contains {wrong!r}: use letters, digits and any of . _ - & @"
    )


def card(swarm: str, peer: str) -> str:
    """Return the topic of a peer's card: what it can do (retained)."""
    return str(Topic(swarm, peer, "card"))


def status(swarm: str, peer: str) -> str:
    """Return the topic of a peer's birth message and last will (retained)."""
    return str(Topic(swarm, peer, "status"))


@lru_cache(maxsize=_REMEMBERED)
def inbox(swarm: str, peer: str, model: str) -> str:
    """Return the topic on which others send `peer` gossip about `model`."""
    return str(Topic(swarm, peer, "inbox", model))


def longest(swarm: str) -> str:
    """An inbox as long as any in the swarm can be: what packets must leave room for."""
    return inbox(swarm, "x" * _LONGEST, "x" * _LONGEST)


def metrics(swarm: str, peer: str) -> str:
    """Return the topic on which `peer` publishes its measurements."""
    return str(Topic(swarm, peer, "metrics"))


def death(swarm: str, peer: str) -> str:
    """Return the topic on which the swarm's owner declares a session of `peer` over (retained)."""
    return str(Topic(swarm, peer, "death"))


def every(swarm: str, kind: Kind) -> str:
    """Return the pattern of every peer's topic of that kind in the swarm (of all models, for inboxes)."""
    check_name("swarm", swarm)
    return f"{ROOT}/{swarm}/peer/+/{kind}" + ("/+" if kind == "inbox" else "")


def inboxes(swarm: str, peer: str) -> str:
    """Return the pattern of all inboxes of one peer."""
    return f"{ROOT}/{check_name('swarm', swarm)}/peer/{check_name('peer', peer)}/inbox/+"


@lru_cache(maxsize=_REMEMBERED)
def parse(topic: str) -> Topic:
    """Take a topic apart. Raises TopicError for anything that is not exactly one of ours."""
    levels = topic.split("/")
    if levels[:2] != ROOT.split("/") or len(levels) not in (6, 7) or levels[3] != "peer":
        raise TopicError(f"not a gossamer topic: {topic[:200]!r}")
    swarm, peer, kind = levels[2], levels[4], levels[5]
    if kind == "inbox" and len(levels) == 7:
        return Topic(swarm, peer, "inbox", levels[6])
    if len(levels) == 6:
        for known in _PLAIN_KINDS:
            if kind == known:
                return Topic(swarm, peer, known)
    raise TopicError(f"not a gossamer topic: {topic[:200]!r}")


def is_retained_topic(topic: str) -> bool:
    """Return whether messages on a topic are retained (cards, status, deaths, revocations).

    Transports never drop these. All other messages may be dropped when a queue is full: the ledger repeats
    transfers, and metrics are telemetry.
    """
    return topic.endswith(("/card", "/status", "/death", "/owner/revocations"))


def is_gossip(topic: str) -> bool:
    """Return whether a topic is somebody's inbox: where parameters travel."""
    return "/inbox/" in topic


@lru_cache(maxsize=_REMEMBERED)
def matches(pattern: str, topic: str) -> bool:
    """Return whether an MQTT subscription pattern (`+` one level, a final `#` the rest) covers a topic."""
    wanted, levels = pattern.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in ("+", "#"):
        return False  # MQTT 4.7.2: wildcards at the start do not see the broker's own topics
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index >= len(levels) or level not in ("+", levels[index]):
            return False
    return len(wanted) == len(levels)
