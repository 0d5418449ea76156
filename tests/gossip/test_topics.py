from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.gossip import TopicError, topics
from gossamer.gossip.topics import Topic

names = st.from_regex(r"[A-Za-z0-9._&@-]{1,64}", fullmatch=True)


def test_topics_are_these():
    assert topics.card("lab", "ann") == "gossamer/v1/lab/peer/ann/card"
    assert topics.status("lab", "ann") == "gossamer/v1/lab/peer/ann/status"
    assert topics.metrics("lab", "ann") == "gossamer/v1/lab/peer/ann/metrics"
    assert topics.inbox("lab", "ann", "A&B") == "gossamer/v1/lab/peer/ann/inbox/A&B"


@settings(max_examples=40)
@given(names, names, names)
def test_parse_undoes_str_and_patterns_match(swarm, peer, vector):
    for topic in [
        Topic(swarm, peer, "card"),
        Topic(swarm, peer, "status"),
        Topic(swarm, peer, "metrics"),
        Topic(swarm, peer, "summary"),
        Topic(swarm, peer, "inbox", vector),
    ]:
        assert topics.parse(str(topic)) == topic
        assert topics.matches(topics.of_all(swarm, topic.kind), str(topic))
        assert topics.matches(topics.inboxes(swarm, peer), str(topic)) == (topic.kind == "inbox")
        assert topics.is_retained_topic(str(topic)) == (topic.kind in ("card", "status", "summary"))


@given(st.text(max_size=80))
def test_parse_takes_nothing_else(text):
    with pytest.raises(TopicError):
        topics.parse(text)


@pytest.mark.parametrize(
    "topic",
    [
        "gossamer/v2/lab/peer/ann/card",
        "gossamer/v1/lab/peer/ann",
        "gossamer/v1/lab/peer/ann/inbox",
        "gossamer/v1/lab/peer/ann/card/v",
        "gossamer/v1/lab/peer/ann/secret",
        "gossamer/v1/lab/server/ann/card",
        "gossamer/v1/lab/peer/a+n/card",
        "gossamer/v1//peer/ann/card",
        "gossamer/v1/lab/peer/ann/inbox/v/w",
        "gossamer/v1/lab/peer/ann/card\n",
    ],
)
def test_near_misses_are_refused(topic):
    with pytest.raises(TopicError):
        topics.parse(topic)


def test_errors_name_the_offender():
    with pytest.raises(TopicError, match=r"peer name 'a/b' contains '/'"):
        topics.card("lab", "a/b")
    with pytest.raises(TopicError, match="swarm name is empty"):
        topics.of_all("", "card")
    with pytest.raises(TopicError, match="65 characters"):
        topics.inbox("lab", "ann", "v" * 65)
    with pytest.raises(TopicError, match="contains 'é'"):
        topics.inboxes("lab", "andré")


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/+", "a/b", True),
        ("a/+", "a/b/c", False),
        ("a/+", "a", False),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("#", "a", True),
        ("#", "$SYS/load", False),
        ("+/load", "$SYS/load", False),
        ("+/+", "/a", True),
        ("a/+/c", "a/b/d", False),
    ],
)
def test_patterns_match_as_mqtt_says(pattern, topic, expected):
    assert topics.matches(pattern, topic) == expected


def test_no_inbox_is_longer_than_the_longest():
    name = "n" * 64
    assert len(topics.inbox("garden", name, name)) == len(topics.longest_inbox("garden"))
    with pytest.raises(topics.TopicError, match="limit 64"):
        topics.inbox("garden", name + "n", "global")


@pytest.mark.parametrize("swarm", ["inbox", "peer", "status"])
@pytest.mark.parametrize("name", ["inbox", "card", "status", "death"])
def test_names_that_are_also_levels_are_not_taken_for_them(swarm, name):
    for topic in (topics.card(swarm, name), topics.status(swarm, name), topics.death(swarm, name)):
        assert topics.is_retained_topic(topic)
        assert not topics.is_gossip(topic)
    assert topics.is_gossip(topics.inbox(swarm, name, name))
    assert not topics.is_retained_topic(topics.inbox(swarm, name, name))
