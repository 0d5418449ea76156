"""The program gives what it gave before: metrics, bytes on the wire, checkpoints. See tests/golden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden import checkpoint, dialogue, simulated

from gossamer.peer import FORMAT, PeerError, load_checkpoint

REMEDY = "if that is meant: python -m tests.golden.make, and say in the commit why"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", simulated.TOLERANCES)
def test_a_run_gives_the_metrics_that_it_gave(name: str, tmp_path: Path) -> None:
    now = records(simulated.simulate(name, tmp_path))
    moved = simulated.differences(name, now, records(simulated.metrics(name)))
    assert not moved, "\n".join([*moved[:10], f"{len(moved)} figures moved; {REMEDY}"])


def test_a_difference_names_round_peer_and_metric() -> None:
    before = records(simulated.metrics("ring"))
    assert simulated.differences("ring", before, before) == []
    now = [dict(record) for record in before]
    now[7]["loss"] *= 1 + 1e-5
    now[8]["accuracy"] += 0.01
    found = simulated.differences("ring", now[:-1], before)
    assert [line.split(" is ")[0] for line in found[1:]] == [
        "ring, record 8 (round 2, peer 2): loss",
        "ring, record 9 (round 2, peer 3): accuracy",
    ]
    assert found[0] == "ring: 19 records, there were 20"


@pytest.mark.parametrize("name", dialogue.SCENES)
def test_gossipers_send_the_bytes_that_they_sent(name: str) -> None:
    before, now = dialogue.read()[name], dialogue.SCENES[name](dialogue.packets)
    for number, (new, old) in enumerate(zip(now["lines"], before["lines"], strict=True), 1):
        assert new["header"] == old["header"], f"header of message {number}; {REMEDY}"
        assert new == old, f"message {number} ({old['header']['kind']}); {REMEDY}"
    assert now["held"] == before["held"]


@pytest.mark.parametrize("name", dialogue.SCENES)
def test_gossipers_understand_the_bytes_that_they_sent(name: str) -> None:
    """A sender of the kept version talks to receivers of this one."""
    before = dialogue.read()[name]
    now = dialogue.SCENES[name](dialogue.instead(before["lines"]))
    assert now["held"] == before["held"]


def test_the_dialogue_has_what_the_wire_can_carry() -> None:
    lines = [line for scene in dialogue.read().values() for line in scene["lines"]]
    headers = [line["header"] for line in lines]
    assert {header["kind"] for header in headers} == {"give", "ack", "recall"}
    assert {header["verdict"] for header in headers if "verdict" in header} == {"credited", "void"}
    assert {header.get("dtype") for header in headers} >= {"float32", "float64", "packed"}
    assert [0, 1] in [header.get("tag") for header in headers]
    assert max(len(line["packets"]) for line in lines) > 3


@pytest.mark.parametrize("path", checkpoint.FILES, ids=lambda path: path.name)
def test_a_checkpoint_is_read_or_refused_as_one_of_another_version(path: Path) -> None:
    if path.name == FORMAT:
        assert checkpoint.plain(load_checkpoint(path)) == checkpoint.content(path)
        return
    with pytest.raises(PeerError) as refused:
        load_checkpoint(path)
    told = str(refused.value)
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    assert "version" in told


def test_a_checkpoint_of_a_former_version_is_kept() -> None:
    assert "gossamer-checkpoint-2" in [path.name for path in checkpoint.FILES]
