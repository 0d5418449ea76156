"""Sixteen processes that decide by themselves what they share, with two kills and a newcomer.

    PYTHONPATH=tests python tests/live/groups.py --peers 16 --rounds 80

Run by hand, not in CI: sixteen processes that load torch take minutes on two cores. The config is auto.toml:
three groups of peers whose labels contradict each other. One follower and the peer that makes plans are
killed with -9 and restarted from their checkpoints; the last peer joins when the others have decided.
Printed: the groups at the end, accuracy, messages that were dropped, and for every partial model that there
ever was, the weight held and on its way beside the weight injected. Exit code 1 unless all are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from swarm_kit import Watched
from waiting import until

from gossamer.experiments.config.examples import example_path
from gossamer.experiments.config.tables import load_config
from gossamer.experiments.live.layout import plan
from gossamer.gossip import ONE
from gossamer.peer import Broker, BrokerAddress, BrokerSettings, LocalSwarm


async def run(folder: Path, url: str, peers: int, rounds: int, topology: str | None) -> None:
    config = load_config(example_path("auto")).model_copy(
        update={"peers": peers, "rounds": rounds, "test_every": 5, "topology": topology}
    )
    tasks = [
        task.model_copy(update={"peers": [peer for peer in task.peers if peer < peers]})
        for task in config.tasks
        if not isinstance(task.peers, str | int)
    ]
    spec = plan(config.model_copy(update={"tasks": tasks}), folder, BrokerAddress(url))
    *first, late = spec.peers
    names = [peer.name for peer in first]
    first = [
        replace(peer, settings=peer.settings.updated(expect=tuple(names), settle_tolerance=1e-3))
        for peer in first
    ]
    late = replace(
        late, settings=late.settings.updated(expect=(), settle_tolerance=1e-3, rounds=rounds // 2)
    )
    watched = Watched(replace(spec, peers=first))
    task = asyncio.create_task(watched.run())
    await watched.reached(rounds // 8, *names)
    for name in (names[4], names[0]):  # the first in order makes the plans
        os.kill(watched.swarm.pids[name], signal.SIGKILL)
        await watched.returned(name)
    logs = [folder / f"host-{name}.log" for name in names]
    await until(
        lambda: task.done() or any("decides for the swarm" in log.read_text() for log in logs),
        "the swarm decided", patience=2400.0, pause=0.5,
    )  # fmt: skip
    newcomer = LocalSwarm(replace(spec, peers=[late]), on_event=print)
    await asyncio.gather(task, newcomer.run())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--topology", help="as in a config; all peers are neighbours if left out")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, Broker(BrokerSettings()) as broker:
        folder = Path(name)
        asyncio.run(run(folder, broker.url, options.peers, options.rounds, options.topology))
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.report.json"))]
        lines = [
            line.partition("decides for the swarm: ")[2]
            for log in folder.glob("host-*.log")
            for line in log.read_text().splitlines()
            if "decides for the swarm: " in line
        ]
    print(*lines, sep="\n")
    print("finished:", Counter(report["ended"] for report in reports))
    print("dropped:", dict(sum((Counter(report["dropped"]) for report in reports), Counter())))
    print(f"accuracy: {sum(report['accuracy'] for report in reports) / len(reports):.3f}")
    exact = len(reports) == options.peers
    weights: dict[str, list[int]] = {}
    for report in reports:
        for model, numbers in report["weight"].items():
            sums = weights.setdefault(model, [0, 0, 0])
            weights[model] = [a + b for a, b in zip(sums, numbers, strict=True)]
    for model, (held, on_its_way, injected) in sorted(weights.items()):
        exact &= held + on_its_way == injected
        members = [r["peer"] for r in reports if r["weight"].get(model, [0, 0, 0])[2]]
        print(
            f"{model}: {(held + on_its_way) / ONE:.6f} of {injected / ONE:.6f}, {len(members)} peers"
        )
    record = max(
        (r["sharing"] for r in reports if r.get("sharing")), key=lambda r: len(r["history"])
    )
    assignment = record["assignment"]
    for scheme, labels in enumerate(assignment["schemes"]):
        used = any(str(scheme) in cells for cells in assignment["cells"].values())
        if scheme > 1 and used:
            groups: dict[int, list[str]] = {}
            for peer, label in zip(assignment["peers"], labels, strict=True):
                groups.setdefault(label, []).append(peer)
            print("groups:", *sorted(groups.values(), key=len, reverse=True))
    print("weights are exact" if exact else "WEIGHTS DO NOT ADD UP")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
