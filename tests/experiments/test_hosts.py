"""Parts of a swarm on several hosts: which peers run where, and whether the configs are equal."""

from __future__ import annotations

import pytest

from gossamer.experiments.config.tables import ConfigError, differing_key
from gossamer.experiments.live.hosts import parse_peers


@pytest.mark.parametrize(
    ("text", "peers"),
    [("0-3", [0, 1, 2, 3]), ("7", [7]), ("0-1,4, 6-7", [0, 1, 4, 6, 7]), ("2-3,3-4", [2, 3, 4])],
)
def test_indices_of_peers_are_read(text, peers):
    assert parse_peers(text, 8) == peers


@pytest.mark.parametrize("text", ["", "a", "0-", "3-1", "0-8", "-1", "1--2"])
def test_wrong_indices_are_one_line(text):
    with pytest.raises(ConfigError, match="--peers") as error:
        parse_peers(text, 8)
    assert "\n" not in str(error.value)


def test_the_differing_key_is_named():
    one = {"peers": 4, "data": {"set": "digits", "samples": 40}, "models": [{"name": "a"}]}
    assert differing_key(one, one) is None
    assert differing_key(one, one | {"peers": 5}) == "peers"
    assert differing_key(one, one | {"data": {"set": "digits", "samples": 41}}) == "data.samples"
    assert differing_key(one, one | {"models": [{"name": "b"}]}) == "models.0.name"
    assert differing_key(one, one | {"rounds": 3}) == "rounds"
