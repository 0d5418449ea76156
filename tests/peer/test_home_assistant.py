"""Home Assistant: the records by which a peer appears there, against what its documentation demands."""

from __future__ import annotations

import json
import re

from papers_kit import Papers
from peer_kit import Nest, quick

from gossamer.gossip import topics
from gossamer.peer.broker import write_rules
from gossamer.peer.summary import SENSORS, discovery_records, discovery_topics

# The keys of an MQTT sensor that are used here, with their types, and all keys of its device and origin, by
# the schemas of Home Assistant's mqtt component: it drops a record with any other key in these two.
KEYS = {
    "name": str, "unique_id": str, "state_topic": str, "value_template": str, "icon": str,
    "availability_topic": str, "availability_template": str, "payload_available": str,
    "payload_not_available": str, "expire_after": int, "state_class": str, "device": dict,
    "unit_of_measurement": str, "suggested_display_precision": int, "origin": dict,
}  # fmt: skip
DEVICE_KEYS = {
    "identifiers", "connections", "manufacturer", "model", "model_id", "name", "hw_version", "serial_number",
    "sw_version", "via_device", "suggested_area", "configuration_url",
}  # fmt: skip
ORIGIN_KEYS = {"name", "sw_version", "support_url"}
REQUIRED = {"state_topic", "unique_id", "value_template", "device", "origin", "availability_topic"}
TEMPLATE = re.compile(r"\{\{ value_json\.(\w+) \}\}")


def published(run, nest, start):
    async def scenario():
        await start().task
        return dict(nest.broker.retained)

    return run(scenario())


def check(retained, swarm, peer, lease):
    """The records of one peer, and the values that their templates give."""
    records = {
        topic: json.loads(payload)
        for topic, payload in retained.items()
        if topic.startswith("homeassistant/")
    }
    assert set(records) == set(discovery_topics(swarm, peer).values())
    values = json.loads(retained[topics.state(swarm, peer)])
    shown = {}
    for topic, record in records.items():
        prefix, component, node, sensor, end = topic.split("/")
        assert (prefix, component, end) == ("homeassistant", "sensor", "config")
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", node)
        assert record.keys() >= REQUIRED
        assert all(type(value) is KEYS[key] for key, value in record.items())
        assert record["state_topic"] == record["availability_topic"] == topics.state(swarm, peer)
        assert record.get("state_class") in (None, "measurement")
        assert record["device"].keys() <= DEVICE_KEYS
        assert record["device"].pop("identifiers") == [node]
        assert all(type(value) is str for value in record["device"].values())
        assert {"name"} <= record["origin"].keys() <= ORIGIN_KEYS
        assert all(value and type(value) is str for value in record["origin"].values())
        assert re.fullmatch(r"mdi:[a-z-]+", record["icon"])
        assert not {"+", "#"} & set(record["state_topic"]), "a topic without wildcards"
        assert record["expire_after"] == 1.25 * lease
        shown[sensor] = values[TEMPLATE.fullmatch(record["value_template"])[1]]
        (available,) = TEMPLATE.fullmatch(record["availability_template"]).groups()
        assert values[available] in (record["payload_available"], record["payload_not_available"])
    assert len({record["unique_id"] for record in records.values()}) == len(SENSORS)
    return shown, values["availability"]


def test_a_peer_appears_with_state_round_and_accuracy_and_says_that_it_left(run):
    nest = Nest(quick(rounds=2, discovery=True, asleep=3500.0))
    retained = published(run, nest, lambda: nest.start("a.b"))
    asleep_twice = nest.settings.lease + 7000.0  # it is available while it sleeps
    shown, availability = check(retained, "nest", "a.b", asleep_twice)
    assert shown.keys() == {"state", "round", "accuracy"}
    assert (shown["round"], availability) == (2, "offline")
    assert 0 <= shown["accuracy"] <= 100


def test_with_trust_too_if_it_is_asked_for_as_plain_json(run, tmp_path):
    papers, nest = Papers(tmp_path), Nest(quick(rounds=1, discovery=True))
    name = papers.invite("a")
    start = lambda: nest.start("a", settings=papers.settings("a", nest.settings))  # noqa: E731
    shown, _ = check(published(run, nest, start), "nest", name, nest.settings.lease)
    assert shown["round"] == 1


def test_nothing_of_it_is_published_unless_it_is_asked_for(run):
    nest = Nest(quick(rounds=1))
    retained = published(run, nest, lambda: nest.start("a"))
    assert not [t for t in retained if t.startswith("homeassistant") or t.endswith("/state")]


def test_two_swarms_and_names_do_not_share_an_id():
    ids = {
        json.loads(record)["unique_id"]
        for swarm, peer in (("x", "a"), ("x", "b"), ("y", "a"))
        for record in discovery_records(swarm, peer, 10.0).values()
    }
    assert len(ids) == 9


def test_access_rules_allow_it_only_if_told(tmp_path):
    topic = discovery_topics("nest", "anna")["round"]
    without = write_rules(tmp_path / "a", "nest", ["anna"], observers=["home"]).acl.read_text()
    rules = write_rules(
        tmp_path / "b", "nest", ["anna"], observers=["home"], discovery=True
    ).acl.read_text()
    assert topic not in without
    assert "/state" not in without
    anna, home = (
        rules.partition("user anna")[2].partition("user")[0],
        rules.partition("user home")[2],
    )
    assert f"topic write {topic}" in anna
    assert f"topic write {topics.state('nest', 'anna')}" in anna
    assert "topic read homeassistant/sensor/+/+/config" in home
