"""The program gives what it gave before: metrics, bytes on the wire, checkpoints. See tests/golden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden import checkpoint, dialogue, release, simulated, vectors

from gossamer.experiments.live.enrolment import Enrolment
from gossamer.gossip import Reassembler, decode
from gossamer.gossip.security import Admission, Identity, check, members, read_public
from gossamer.peer import Machine, PeerError, load_checkpoint, read_summary, save_checkpoint
from gossamer.peer.engine import Engine
from gossamer.peer.presence import read_card, read_status

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


# --- files of former releases, which are read for ever ------------------------------------------------

releases = pytest.mark.parametrize("folder", release.FOLDERS, ids=lambda folder: folder.name)


def test_files_of_the_first_release_are_kept() -> None:
    assert "1.0" in [folder.name for folder in release.FOLDERS]


def published(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "published.json").read_text("utf-8"))


@releases
def test_cards_statuses_and_summaries_of_a_release_are_read(folder: Path) -> None:
    plain = {name: text.encode() for name, text in published(folder)["plain"].items()}
    card, online = read_card(plain["card"]), read_status(plain["online"])
    assert card is not None
    assert online is not None
    assert (card.session, card.generation, card.asleep) == (release.SESSION, 2, 300.0)
    assert card.former is not None
    assert card.former.statement == release.STATEMENT
    assert (online.session, online.counts) == (card.session, {"all": 4})
    goodbye, summary = read_status(plain["left"]), read_summary(plain["summary"])
    assert goodbye is not None
    assert summary is not None
    assert (goodbye.state, goodbye.reclaimed, goodbye.hops) == ("left", release.RECLAIMED, (3, 2))
    assert summary.metrics == {"accuracy": 0.875, "loss": 0.4, "f1": 0.8}
    assert summary.models["all"].weight == 1.25


@releases
def test_signed_cards_statuses_and_summaries_of_a_release_are_valid(folder: Path) -> None:
    told = published(folder)
    signed = {name: bytes.fromhex(data) for name, data in told["signed"].items()}
    register = members.Register(told["swarm"], bytes.fromhex(told["owner"]))
    member, body = register.read_card(told["peer"], signed["card"], release.ISSUED)
    register.add(member)
    assert body.decode() == told["plain"]["card"]
    assert member.models == {"all"}
    for name in release.statuses():
        head, body = register.read_status(told["peer"], signed[name], release.ISSUED)
        assert body.decode() == told["plain"][name]
        assert head.incarnation == member.incarnation
    _, body = members.read_published(told["swarm"], told["peer"], "summary", signed["summary"])
    assert body.decode() == told["plain"]["summary"]


@releases
@pytest.mark.parametrize("name", dialogue.SCENES)
def test_transfers_of_a_release_are_credited(folder: Path, name: str) -> None:
    """A sender of the release talks to receivers of this version."""
    then = json.loads((folder / "dialogue.json").read_text("utf-8"))[name]
    now = dialogue.SCENES[name](dialogue.instead(then["lines"]))
    assert now["held"] == then["held"]


@releases
def test_packets_of_a_release_are_read(folder: Path) -> None:
    known = json.loads((folder / "vectors.json").read_text("utf-8"))
    for vector in known["chunks"]:
        reassembler = Reassembler()
        *_, whole = [reassembler.add(bytes.fromhex(packet)) for packet in vector["packets"]]
        assert whole == bytes.fromhex(vector["message"])
    for vector in known["messages"]:
        message = decode(bytes.fromhex(vector["bytes"])).message
        assert (message.sender, message.sequence) == (vector["header"]["from"], 7)
    # Sealing has no way but one: the same keys and numbers give the same bytes as then.
    assert vectors.make()["sealed"] == known["sealed"]


class ThatMachine(Machine):
    """The machine on which a captured checkpoint was written, one second later."""

    def __init__(self, written: dict[str, Any]) -> None:
        super().__init__()
        self._written = written

    def boot_id(self) -> str:
        return self._written["boot"]

    def uptime(self) -> float:
        return self._written["clock"] + 1.0

    def wall(self) -> float:
        return self._written["wall"] + 1.0


@releases
@pytest.mark.parametrize("later", [False, True], ids=["as-it-was", "with-unknown-keys"])
def test_a_peer_continues_from_the_checkpoint_of_a_release(
    folder: Path, later: bool, tmp_path: Path
) -> None:
    tree = load_checkpoint(folder / "checkpoint")
    assert tree is not None
    assert checkpoint.plain(tree) == checkpoint.content(folder / "checkpoint")
    if later:
        for table in (tree, tree["books"], tree["gossip"], tree["gossip"]["ledger"], tree["store"]):
            table["colour"] = "red"
    path = tmp_path / "ann.checkpoint"
    save_checkpoint(path, tree)
    machine = ThatMachine(tree["in_touch"])
    engine = Engine(
        "ann", checkpoint.learner(0), checkpoint.settings(), checkpoint=path, machine=machine
    )
    ledger, vault = tree["gossip"]["ledger"], tree["gossip"]["vault"]
    assert engine.restored
    assert (engine.session, engine.view.round) == (ledger["session"], 2)
    assert engine.gossiper.weight("global") == vault["weights"]["global"]
    assert engine.network.flat.tolist() == tree["network"].tolist()
    engine.train()
    assert engine.view.round == 3


@releases
def test_a_device_joins_with_the_enrolment_file_of_a_release(folder: Path, tmp_path: Path) -> None:
    table = json.loads((folder / "ann.gossamer").read_text("utf-8"))
    path = tmp_path / "ann.gossamer"
    for added in ({}, {"colour": "red"}):
        path.write_text(json.dumps(table | added), "utf-8")
        path.chmod(0o600)
        enrolment = Enrolment.read(path)
        files = enrolment.unpack(tmp_path)
        assert (enrolment.swarm, enrolment.label) == ("garden", "ann")
        assert enrolment.settings == {"rounds": "forever"}
        identity = Identity.load(files["identity"])
        admission = Admission.load(files["invitation"], identity)
        owner, now = read_public(enrolment.owner), 1_795_000_000.0  # within its ten years
        claims = check(admission, owner, "garden", identity.name, identity.public, now)
        assert claims.admits("all")


def test_a_checkpoint_of_a_version_before_the_first_release_is_refused() -> None:
    with pytest.raises(PeerError) as refused:
        load_checkpoint(checkpoint.REFUSED)
    told = str(refused.value)
    assert told.startswith(f"{checkpoint.REFUSED}: ")
    assert "\n" not in told
    assert "version" in told
