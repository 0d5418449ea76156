"""The MQTT topics of a swarm. The peer's name is in the path, so that broker ACLs can match it.

gossamer/v1/{swarm}/peer/{name}/card            retained: models, schema, public key
gossamer/v1/{swarm}/peer/{name}/status          retained: online, left, or the last will
gossamer/v1/{swarm}/peer/{name}/inbox/{model}   gossip messages to that peer; never retained
gossamer/v1/{swarm}/peer/{name}/metrics         telemetry
gossamer/v1/{swarm}/peer/{name}/summary         retained: how the peer is doing, for observers
gossamer/v1/{swarm}/peer/{name}/state           retained: a few values as plain JSON, for home automation
gossamer/v1/{swarm}/peer/{name}/death           retained: the owner declares a session over
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from gossamer.errors import GossamerError

Kind: TypeAlias = Literal["card", "status", "inbox", "metrics", "summary", "state", "death"]

ROOT: Final = "gossamer/v1"
_MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9._&@-]{{1,{_MAX_NAME}}}")
_CACHE_SIZE = 256
"""Topics that are cached after parsing or formatting: most messages use the same few."""
_KINDS_WITHOUT_MODEL: tuple[Kind, ...] = (
    "card", "status", "metrics", "summary", "state", "death",
)  # fmt: skip

_RETAINED = ("/card", "/status", "/summary", "/state", "/death", "/owner/revocations")


class TopicError(GossamerError, ValueError):
    """A name that cannot be part of a topic, or a topic that is not a Gossamer topic."""


@dataclass(frozen=True, slots=True)
class Topic:
    """The parts of one topic of a peer. Only inboxes have a `model`."""

    swarm: str
    peer: str
    kind: Kind
    model: str | None = None

    def __post_init__(self) -> None:
        check_name("swarm", self.swarm)
        check_name("peer", self.peer)
        if self.kind == "inbox":
            check_name("model", self.model or "")
        elif self.kind not in _KINDS_WITHOUT_MODEL or self.model is not None:
            raise TopicError(f"no topic of kind {self.kind!r} with model {self.model!r}")

    def __str__(self) -> str:
        path = f"{ROOT}/{self.swarm}/peer/{self.peer}/{self.kind}"
        return path if self.model is None else f"{path}/{self.model}"


def check_name(what: str, name: str) -> str:
    """Return `name` if it may be part of a topic; raise TopicError with the reason if not."""
    if _NAME.fullmatch(name):
        return name
    if not name:
        raise TopicError(f"the {what} name is empty")
    if len(name) > _MAX_NAME:
        raise TopicError(
            f"the {what} name {name[:20]!r}… has {len(name)} characters; limit {_MAX_NAME}"
        )
    wrong = next(char for char in name if not _NAME.fullmatch(char))
    raise TopicError(
        f"the {what} name {name!r} contains {wrong!r}: use letters, digits and any of . _ - & @"
    )


def card(swarm: str, peer: str) -> str:
    """Return the topic of a peer's card, which describes the peer (retained)."""
    return str(Topic(swarm, peer, "card"))


def status(swarm: str, peer: str) -> str:
    """Return the topic of a peer's status and last will (retained)."""
    return str(Topic(swarm, peer, "status"))


@lru_cache(maxsize=_CACHE_SIZE)
def inbox(swarm: str, peer: str, model: str) -> str:
    """Return the topic at which `peer` receives gossip messages about `model`."""
    return str(Topic(swarm, peer, "inbox", model))


def longest_inbox(swarm: str) -> str:
    """Return the longest inbox topic that is possible in a swarm, to compute the largest payload."""
    return inbox(swarm, "x" * _MAX_NAME, "x" * _MAX_NAME)


def metrics(swarm: str, peer: str) -> str:
    """Return the topic at which `peer` publishes its metrics."""
    return str(Topic(swarm, peer, "metrics"))


def summary(swarm: str, peer: str) -> str:
    """Return the topic at which `peer` publishes its summary, which only observers read (retained)."""
    return str(Topic(swarm, peer, "summary"))


def state(swarm: str, peer: str) -> str:
    """Return the topic of the values that `peer` publishes as JSON for home automation (retained)."""
    return str(Topic(swarm, peer, "state"))


def death(swarm: str, peer: str) -> str:
    """Return the topic at which the swarm's owner declares a session of `peer` over (retained)."""
    return str(Topic(swarm, peer, "death"))


def of_all(swarm: str, kind: Kind) -> str:
    """Return the topic filter for all peers' topics of a kind; for inboxes, of all models."""
    check_name("swarm", swarm)
    return f"{ROOT}/{swarm}/peer/+/{kind}" + ("/+" if kind == "inbox" else "")


def inboxes(swarm: str, peer: str) -> str:
    """Return the topic filter for all inboxes of one peer."""
    return f"{ROOT}/{check_name('swarm', swarm)}/peer/{check_name('peer', peer)}/inbox/+"


@lru_cache(maxsize=_CACHE_SIZE)
def parse(topic: str) -> Topic:
    """Parse a topic; raise TopicError if it is none of those at the top of this file."""
    levels = topic.split("/")
    if levels[:2] != ROOT.split("/") or len(levels) not in (6, 7) or levels[3] != "peer":
        raise TopicError(f"not a gossamer topic: {topic[:200]!r}")
    swarm, peer, kind = levels[2], levels[4], levels[5]
    if kind == "inbox" and len(levels) == 7:
        return Topic(swarm, peer, "inbox", levels[6])
    if kind in _KINDS_WITHOUT_MODEL and len(levels) == 6:
        return Topic(swarm, peer, kind)
    raise TopicError(f"not a gossamer topic: {topic[:200]!r}")


def is_retained_topic(topic: str) -> bool:
    """Return whether messages on a topic are retained (cards, status, summaries, deaths, revocations).

    Transports never drop these. All other messages may be dropped when a queue is full: the ledger repeats
    transfers, and metrics are telemetry.
    """
    return topic.endswith(_RETAINED) and not is_gossip(topic)


@lru_cache(maxsize=_CACHE_SIZE)
def is_gossip(topic: str) -> bool:
    """Return whether a topic is an inbox, to which gossip messages are sent.

    Only the sixth level counts: a swarm, a peer or a model may itself be called `inbox`.
    """
    levels = topic.split("/", 7)
    return len(levels) == 7 and levels[5] == "inbox"


@lru_cache(maxsize=_CACHE_SIZE)
def matches(pattern: str, topic: str) -> bool:
    """Return whether a topic matches an MQTT topic filter (`+` is one level, a final `#` the rest)."""
    filter_levels, levels = pattern.split("/"), topic.split("/")
    if topic.startswith("$") and filter_levels[0] in ("+", "#"):
        return False  # MQTT 4.7.2: wildcards at the start do not match the broker's own topics
    for index, level in enumerate(filter_levels):
        if level == "#":
            return True
        if index >= len(levels) or level not in ("+", levels[index]):
            return False
    return len(filter_levels) == len(levels)
