"""Results folders written by hand, so that tests of pages need neither training nor torch."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

VERSIONS = {"gossamer": "0.1.0", "python": "3.11"}


def write_run(
    folder: Path,
    *,
    name: str = "garden",
    peers: int = 4,
    rounds: int = 5,
    finished: bool = True,
    links: list[list[str]] | None = None,
    **config: Any,
) -> Path:
    """Write what `gossamer simulate` leaves: two tasks, accuracy .1 better every round and peer."""
    folder.mkdir(parents=True)
    info = {
        "command": "simulate", "key": None, "finished": finished, "versions": VERSIONS,
        "arguments": ["simulate", f"{name}.toml"], "warnings": ["trust is off: <anyone> may listen"],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.json").write_text(json.dumps({"name": name, "peers": peers, **config}))
    table = [
        {
            "name": str(i),
            "task": "plain" if i % 2 else "swapped",
            "models": ["global", f"local-{i}"],
        }
        for i in range(peers)
    ]
    (folder / "peers.json").write_text(json.dumps({"peers": table, "links": links}))
    with (folder / "metrics.jsonl").open("w") as file:
        for round in range(1, rounds + 1):
            for peer in table:
                accuracy = round / 10 + int(peer["name"]) / 100
                record = {"round": round, "peer": peer["name"], "task": peer["task"]}
                file.write(json.dumps(record | {"accuracy": accuracy, "loss": 1 - accuracy}) + "\n")
    return folder


def write_live(
    folder: Path,
    *,
    peers: int = 4,
    seconds: int = 6,
    here: range | None = None,
    start: float = 1000.0,
) -> Path:
    """Write what `gossamer swarm` leaves: peer 1 was killed, peer 2 left early, the others finished.

    here: the peers of this host, if the swarm ran on several.
    """
    folder.mkdir(parents=True)
    info = {"command": "swarm", "key": None, "finished": True, "versions": VERSIONS}
    part = [] if here is None else ["--peers", f"{here[0]}-{here[-1]}"]
    (folder / "run.json").write_text(
        json.dumps(info | {"arguments": ["swarm", "live.toml", *part]})
    )
    (folder / "config.json").write_text(json.dumps({"name": "live", "peers": peers}))
    names = [str(i) for i in range(peers)]
    table = [{"name": name, "task": "plain", "models": ["global"]} for name in names]
    links = [[a, b] for a, b in pairwise(names)]
    (folder / "peers.json").write_text(json.dumps({"peers": table, "links": links}))
    with (folder / "metrics.jsonl").open("w") as file:
        for second in range(seconds):
            for name in names if here is None else [names[index] for index in here]:
                if name in ("1", "2") and second > 3:
                    continue
                record = {
                    "peer": name, "session": f"s{name}", "time": start + second, "round": second + 1,
                    "phase": "training", "accuracy": 0.5 + second / 20 + int(name) / 100,
                    "disagreement": {"global": 0.1 / (second + 1)}, "received": second,
                    "packets": second, "bytes": 1000 * second, "neighbours": 2,
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
    if here is None or 1 in here:
        death = {"time": start + 4, "text": "peer 1 was killed by signal 9; it is not restarted"}
        (folder / "events.jsonl").write_text(json.dumps(death) + "\n")
    for name, ended, reason in (("0", "finished", "over"), ("2", "left", "it was asked to leave")):
        if here is not None and int(name) not in here:
            continue
        report = {"peer": name, "ended": ended, "reason": reason, "accuracy": 0.7}
        (folder / f"{name}.report.json").write_text(json.dumps(report))
    return folder
