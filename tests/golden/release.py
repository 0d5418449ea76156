"""Files of one release, which every later one reads: what peers publish, send, save and are enrolled with.

Folders are named by release. `python -m tests.golden.make release` writes that of the version in use: once,
when a version that changes a format is released. Folders of former releases are never written again.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from gossamer import __version__
from gossamer.experiments.live.enrolment import SwarmFolder
from gossamer.gossip.security import Identity, invite, members
from gossamer.peer import Ended, ModelSummary, PeerEvent, Status, Summary
from gossamer.peer.presence import Card, Goodbye

from . import checkpoint, dialogue, vectors

HERE = Path(__file__).parent
FOLDERS = sorted(HERE.glob("[0-9]*.[0-9]*"))
SWARM, ISSUED = "garden", 1_800_000_000.0
SESSION = "a1b2c3d4e5f60718"
STATEMENT = [["ben", "0123456789abcdef", "all", 3, "credited"]]
RECLAIMED = [["ben", "0123456789abcdef", "all", 2, 1 << 31]]


def card() -> Card:
    """A card with something in every field."""
    return Card(
        SESSION, ISSUED, 60, {"all": [("hidden.weight (all)", [1, 2], "float32")]},
        generation=2, lease=900.0, agree={"mode": "async", "weights": "peers"},
        starts={"all": "00112233445566ff"}, former=Goodbye("fedcba9876543210", STATEMENT, RECLAIMED),
        goodbyes={"cat": "e30="}, plan={"by": "ann", "version": 1, "plan": None, "like": None},
        asleep=300.0,
    )  # fmt: skip


def statuses() -> dict[str, Status]:
    """An online status and a goodbye."""
    goodbye = Status(
        "left", SESSION, "done", "finished", STATEMENT, False, {"all": 9}, 2, RECLAIMED, (3, 2)
    )
    return {"online": Status("online", SESSION, "training", counts={"all": 4}), "left": goodbye}


def summary() -> Summary:
    """A summary with something in every field."""
    return Summary(
        SESSION, ISSUED + 60, ISSUED, "training", "training", 7, 30, "1.0.0", ISSUED + 55,
        {"all": ModelSummary(True, 7, 3, 4, 0.01, 1.25)}, 0,
        {"accuracy": 0.875, "loss": 0.4, "f1": 0.8}, ("ben",), (2048,), 1, 2048, 9, 1024, 8,
        {"eve": "mode is 'rounds' there"}, Ended("left", "stopped", ISSUED + 60),
        Ended("lost", "killed", ISSUED - 9), (PeerEvent(ISSUED, "founded", "founds all", "ann"),),
    )  # fmt: skip


def published() -> dict[str, Any]:
    """Every message as plain JSON, and signed by a member of a swarm with trust."""
    owner, ann = (Identity.from_secret(name, secrets.token_bytes(32)) for name in ("owner", "ann"))
    invitation = invite(owner, SWARM, "ann", ann.public, days=3650)
    incarnation = secrets.token_bytes(16)
    card_head = members.CardHead(
        ISSUED, incarnation, 1, secrets.token_bytes(32), secrets.token_bytes(32), SESSION, ISSUED,
        frozenset({"all"}), invitation, b"",
    )  # fmt: skip
    plain = {"card": card().encode(), "summary": (encoded := summary().encode()) or b""}
    plain |= {name: each.encode() for name, each in statuses().items()}
    assert encoded is not None
    signed = {
        "card": members.sign_card(ann, SWARM, card_head, plain["card"]),
        "summary": members.sign_summary(
            ann, SWARM, members.SummaryHead(ISSUED + 60, incarnation, 1), plain["summary"]
        ),
    }
    for number, name in enumerate(statuses(), 1):
        head = members.StatusHead(incarnation, number, 0, issued=ISSUED, invitation=invitation)
        signed[name] = members.sign_status(ann, SWARM, head, plain[name])
    return {
        "swarm": SWARM, "peer": ann.name, "owner": owner.public.hex(),
        "plain": {name: data.decode() for name, data in plain.items()},
        "signed": {name: data.hex() for name, data in signed.items()},
    }  # fmt: skip


def write(scratch: Path) -> None:
    """Write the folder of the version in use."""
    folder = HERE / ".".join(__version__.split(".")[:2])
    if folder.exists():
        raise SystemExit(f"error: {folder} exists: what a release has written stays as it is")
    folder.mkdir()
    (folder / "published.json").write_text(json.dumps(published(), indent=1) + "\n", "utf-8")
    shutil.copy(dialogue.FILE, folder / "dialogue.json")
    shutil.copy(vectors.FILE, folder / "vectors.json")
    checkpoint.write(scratch, folder / "checkpoint")
    swarm = SwarmFolder(scratch / "owner", SWARM, "mqtts://127.0.0.1:8883")
    (device,) = swarm.enrol(["ann"], models=["all"], days=3650, settings={"rounds": "forever"})
    shutil.copy(device, folder / "ann.gossamer")
