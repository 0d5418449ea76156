"""`gossamer ban`: a device's own list of peers with which it exchanges nothing."""

from __future__ import annotations

import tomllib

import pytest
from cli_kit import runs

from gossamer.errors import GossamerError
from gossamer.experiments.live.device import change_bans

DEVICE = """# a device
name = "anna"
entry = "my_device:make_learner"

[trust]
identity = "anna.key"
"""


ban = runs("ban", peer=DEVICE)


def test_a_peer_is_banned_and_the_rest_of_the_file_stays(ban, tmp_path):
    file = tmp_path / "peer.toml"
    result = ban("eve@1234", "--file", "peer.toml")
    assert "banned: eve@1234; restart the device" in result.out + result.err
    ban("mallory@99", "--file", "peer.toml")
    assert tomllib.loads(file.read_text("utf-8")) == {
        "banned": ["eve@1234", "mallory@99"], **tomllib.loads(DEVICE)
    }  # fmt: skip
    ban("eve@1234", "--file", "peer.toml", "--lift")
    assert file.read_text("utf-8") == 'banned = ["mallory@99"]\n' + DEVICE


def test_mistakes_are_one_line(tmp_path):
    file = tmp_path / "peer.toml"
    file.write_text(DEVICE, "utf-8")
    with pytest.raises(GossamerError, match="eve is not banned; banned are: none"):
        change_bans(file, "eve", lift=True)
    change_bans(file, "eve")
    with pytest.raises(GossamerError, match="eve is banned already"):
        change_bans(file, "eve")
    quoted = '"banned" = ["eve"]\n' + DEVICE
    file.write_text(quoted, "utf-8")
    by_hand = r"""'banned' cannot be changed; write it by hand: banned = \["eve", "mallory"\]"""
    with pytest.raises(GossamerError, match=by_hand):
        change_bans(file, "mallory")
    assert file.read_text("utf-8") == quoted
