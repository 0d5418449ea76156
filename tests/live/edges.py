"""The edges of a life on a real broker, with kill -9.

    PYTHONPATH=tests python tests/live/edges.py --seeds 0-49

Each seed is one scenario of real processes: devices that start in any order (founding), are killed in their
last seconds (ending), die for good (death), or are replaced while they are only cut off (replace). The runner
plays the service manager, and at the end adds up what the reports say: held + open - injected must be 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import let_run, wait_until

HERE = Path(__file__).parent
GROUPS: dict[str, tuple[str, ...]] = {
    "a": ("global", "red"), "b": ("global", "red"), "c": ("global", "blue"), "d": ("global", "blue"),
}  # fmt: skip
KINDS = ("founding", "ending", "death", "replace")
SETTLE, LEASE, SILENCE = 5.0, 20.0, 5.0
PATIENCE = 240.0
"""Seconds to wait for anything; a machine may be slow, but nothing may hang."""


def make_learner(name: str, models: list[str], pause: float) -> Any:
    """Return a tiny learner whose rounds take `pause` seconds: the entry point of every device."""
    import torch

    from gossamer.models import ModelGraph, SgdLearner, SlicedNetwork, mlp

    torch.set_num_threads(1)
    slices = {model: "4-2-2" if model == "global" else "0-2-0" for model in models}
    graph = ModelGraph({model: [] if model == "global" else ["global"] for model in models})
    network = SlicedNetwork(mlp("4=6=2"), slices, graph=graph, peer=name, seed=0)
    rng = torch.Generator().manual_seed(sum(name.encode()))
    x, y = torch.randn(20, 4, generator=rng), torch.randint(0, 2, (20,), generator=rng)

    class Paced(SgdLearner):
        def train(self, steps: int) -> Any:
            let_run(pause)
            return super().train(steps)

    return Paced(network, (x, y), (x, y), local_samples=10, batch=5, rate=0.05, seed=1)


@dataclass
class Device:
    """One device: its folder, and the process that runs on it, if one does."""

    name: str
    folder: Path
    url: str
    settings: dict[str, Any]
    rounds: int
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)

    def start(self, **changes: Any) -> None:
        from gossamer.peer import BrokerAddress, PeerSpec, ProcessSpec, Settings

        self.folder.mkdir(parents=True, exist_ok=True)
        settings = Settings(rounds=self.rounds, **{**self.settings, **changes})
        arguments = {"name": self.name, "models": list(GROUPS[self.name]), "pause": 0.05}
        peer = PeerSpec(self.name, "edges:make_learner", arguments, settings)
        spec = self.folder / "host.json"
        ProcessSpec(BrokerAddress(self.url), str(self.folder), [peer]).write(spec)
        with (self.folder / "host.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gossamer.peer", str(spec)],
                cwd=HERE, env=os.environ | {"PYTHONPATH": str(HERE.parent)},
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def log(self) -> str:
        path = self.folder / "host.log"
        return path.read_text("utf-8", errors="replace") if path.exists() else ""

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        if self.running():
            assert self.process is not None
            self.process.send_signal(number)

    def kill(self) -> bool:
        """Kill -9; False if the process had ended before."""
        if not self.running():
            return False
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        return True

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.folder.glob("*.report*.json")]


@dataclass
class Scenario:
    """One seed."""

    seed: int
    url: str
    folder: Path
    restart_broker: Callable[[], None]
    devices: dict[str, Device] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    retired: list[Device] = field(default_factory=list)
    """Devices that were killed for good, or replaced."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.kind = KINDS[self.seed % len(KINDS)]
        self.swarm = f"edges-{self.seed}-{os.getpid()}"

    def run(self) -> list[str]:
        """Play the scenario; returns what went wrong."""
        rng = self.rng
        names = list(GROUPS)
        rng.shuffle(names)
        settings: dict[str, Any] = {
            "swarm": self.swarm, "settle_timeout": SETTLE, "lease": LEASE, "silence": SILENCE,
            "start_timeout": PATIENCE, "leave_timeout": 10.0, "save_every": 1.0,
        }  # fmt: skip
        if rng.random() < 0.5:
            settings["expect"] = tuple(sorted(GROUPS))
        rounds = 60 if self.kind == "ending" else 200
        for name in names:
            self.devices[name] = Device(name, self.folder / name, self.url, settings, rounds)
        gap = rng.choice((0.0, 0.2, 2.0))
        self.note(
            f"{self.kind}: order {' '.join(names)}, gap {gap} s, expect {'expect' in settings}"
        )
        try:
            for name in names:
                self.devices[name].start()
                let_run(gap)
            wrong = getattr(self, f"_{self.kind}")(names)
            return wrong + self._check()
        finally:
            for device in (*self.devices.values(), *self.retired):
                device.signal(signal.SIGCONT)
                device.kill()

    def note(self, text: str) -> None:
        self.notes.append(text)

    # --- scenarios ------------------------------------------------------------------------------

    def _founding(self, names: list[str]) -> list[str]:
        """Kill and restart one while they come together: in the end every one counts."""
        victim = self.devices[self.rng.choice(names)]
        let_run(self.rng.uniform(1.0, 8.0))
        if victim.kill():
            let_run(self.rng.choice((0.0, 1.0, 3.0)))
            victim.start()
        self.note(f"killed {victim.name} while they came together")
        return self._all_count(names) + self._all_end()

    def _ending(self, names: list[str]) -> list[str]:
        """Kill some in the last seconds, whatever they are doing then, and start them again."""
        first = self.rng.choice(("has trained all its rounds", "left swarm"))
        self.wait(lambda: any(first in d.log for d in self.devices.values()), first)
        for _ in range(self.rng.choice((1, 2, 3))):
            let_run(self.rng.uniform(0.0, 3.0))
            victim = self.devices[self.rng.choice(names)]
            killed = victim.kill()
            self.note(f"killed {victim.name}: {killed}")
            if self.rng.random() < 0.3:
                self.restart_broker()
                self.note("restarted the broker")
            let_run(self.rng.uniform(0.0, 2.0))
            if killed:
                victim.start()
        return self._all_end()

    def _death(self, names: list[str]) -> list[str]:
        """One dies for good: the others end without it, and leave nothing open."""
        victim = self.devices[self.rng.choice(names)]
        self.wait(lambda: "members count" in victim.log, f"{victim.name} takes part")
        let_run(self.rng.uniform(0.0, 5.0))
        victim.kill()
        self.note(f"{victim.name} died for good")
        self.retired.append(self.devices.pop(victim.name))
        return self._all_end()

    def _replace(self, names: list[str]) -> list[str]:
        """One is only cut off (frozen) while another device takes its name; then it comes back."""
        old = self.devices[self.rng.choice(names)]
        self.wait(lambda: "members count" in old.log, f"{old.name} takes part")
        let_run(self.rng.uniform(0.0, 4.0))
        old.signal(signal.SIGSTOP)
        self.retired.append(old)
        new = Device(old.name, self.folder / f"{old.name}-new", old.url, old.settings, old.rounds)
        new.start()
        self.wait(lambda: not new.running() or "joins swarm" in new.log, "the new device")
        refused = "--replace" in new.log and not new.running()
        new.start(replace=True)
        self.devices[old.name] = new
        self.wait(lambda: "joins swarm" in new.log, "the new device with --replace")
        let_run(self.rng.uniform(0.0, 5.0))
        old.signal(signal.SIGCONT)
        self.wait(lambda: not old.running(), "the old device stops")
        assert old.process is not None
        wrong = [] if refused else [f"{new.name} was not refused without --replace"]
        if old.process.returncode != 4:
            wrong.append(f"the replaced device ended with {old.process.returncode}, not 4")
        return wrong + self._all_end()

    # --- laws -----------------------------------------------------------------------------------

    def _all_count(self, names: list[str]) -> list[str]:
        """Wait until every device counts in each of its models, as its own records say."""

        def counts(device: Device) -> bool:
            path = device.folder / f"{device.name}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            records = [json.loads(line) for line in lines if line.endswith("}")]
            return bool(records) and records[-1]["counts"] is True

        began = time.monotonic()
        self.wait(lambda: all(counts(self.devices[name]) for name in names), "all count")
        self.note(f"all counted {time.monotonic() - began:.1f} s after the last start")
        return []

    def _all_end(self) -> list[str]:
        wrong = []
        for device in self.devices.values():
            for _ in range(5):
                self.wait(lambda d=device: not d.running(), f"{device.name} ends")
                assert device.process is not None
                code = device.process.returncode
                device.codes.append(code)
                if code != 3:
                    break
                device.start()  # to hand in
            if device.codes[-1] != 0:
                wrong.append(f"{device.name} ended with {device.codes}: {device.log[-300:]}")
            if (device.folder / f"{device.name}.checkpoint").exists():
                wrong.append(f"{device.name} left its checkpoint behind")
        return wrong

    def _check(self) -> list[str]:
        """Add up the weights of all reports, and of checkpoints that retired devices left."""
        wrong = []
        sums: dict[str, list[int]] = {}
        sessions: list[str] = []
        rows: list[tuple[str, str, list[Any]]] = []
        abandoned: list[dict[str, Any]] = []

        def add(weight: Mapping[str, list[int]]) -> None:
            for model, row in weight.items():
                total = sums.setdefault(model, [0, 0, 0])
                for index in range(3):
                    total[index] += row[index]

        for device in self.devices.values():
            for report in device.reports():
                sessions.append(report["session"])
                add(report["weight"])
                abandoned += report["abandoned"]
                rows += [(report["peer"], report["session"], row) for row in report["reclaimed"]]
                if any(row[1] for row in report["weight"].values()):
                    wrong.append(f"{device.name} left {report['open']} open")
        if len(set(sessions)) != len(sessions):
            wrong.append(f"a session has two reports: {sessions}")
        slack = self._add_retired(add, rows, abandoned)
        for (
            former
        ) in abandoned:  # away for longer than its lease, as a start takes on a busy machine
            add(former["weight"])
            taken_back = [row for *_, row in rows if row[1] == former["session"]]
            for _, _, model, _, amount in (*former["open"], *taken_back):
                slack[model] = slack.get(model, 0) + amount
        for model, (held, open_, injected) in sorted(sums.items()):
            if model.startswith("local-"):
                continue
            diff = held + open_ - injected
            self.note(f"{model}: diff {diff / 2**32:.6f} (slack {slack.get(model, 0) / 2**32:.6f})")
            if not 0 <= diff <= slack.get(model, 0):
                wrong.append(f"model {model}: diff {diff / 2**32:.6f}")
        return wrong

    def _add_retired(
        self,
        add: Callable[[Mapping[str, list[int]]], None],
        rows: list[tuple[str, str, list[Any]]],
        abandoned: list[dict[str, Any]],
    ) -> dict[str, int]:
        """Count dead sessions as their last checkpoint has them; returns what may be counted twice.

        What a living peer took back from the dead, and the dead had credited, is taken off exactly. What
        was on its way from the dead may have been credited or not: nobody is left to say. Sessions that
        the dead had abandoned itself are added to `abandoned`: of those only the sums are known.
        """
        from gossamer.peer import load_checkpoint

        slack: dict[str, int] = {}
        for device in self.retired:
            tree = load_checkpoint(device.folder / f"{device.name}.checkpoint")
            if tree is None:
                continue
            vault, ledger = tree["gossip"]["vault"], tree["gossip"]["ledger"]
            credited = {
                (sender, session, vector, sequence)
                for sender, session, vector, sequence, verdict in ledger["seen"]
                if verdict == "credited"
            }
            weight = {m: [w, 0, vault["injected"][m]] for m, w in vault["weights"].items()}
            for peer, session, (_, its_session, vector, sequence, amount) in rows:
                taken = (peer, session, vector, sequence) in credited
                if its_session == ledger["session"] and taken:
                    weight[vector][0] -= amount
            for row in ledger["open"]:
                weight[row[0]][1] += row[4]
                slack[row[0]] = slack.get(row[0], 0) + row[4]
            add(weight)
            abandoned += tree["books"]["abandoned"]
        return slack

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what, patience=PATIENCE, pause=0.05)
        except AssertionError as error:
            logs = "\n".join(f"--- {d.name}\n{d.log[-1500:]}" for d in self.devices.values())
            raise TimeoutError(f"{error}\n{logs}") from None


def play(
    seed: int, url: str, restart_broker: Callable[[], None], keep: Path | None = None
) -> tuple[list[str], list[str]]:
    """Run one seed on a broker; returns what went wrong, and notes. keep: where to leave its files."""
    with contextlib.ExitStack() as stack:
        if keep is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edges-"))
        else:
            folder = keep / str(seed)
        scenario = Scenario(seed, url, Path(folder), restart_broker)
        try:
            return scenario.run(), scenario.notes
        except TimeoutError as error:
            return [str(error)], scenario.notes


def main() -> int:
    """Run the seeds of the command line on a broker of our own."""
    from gossamer.peer import Broker

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-3", help="as in 0-49")
    parser.add_argument("--keep", type=Path, help="leave the devices' files in this folder")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    failed = 0
    with Broker() as broker:
        for seed in range(int(first), int(last or first) + 1):
            wrong, notes = play(seed, broker.url, broker.restart, options.keep)
            failed += bool(wrong)
            print(f"seed {seed}: {'; '.join(notes)}", flush=True)
            for each in wrong:
                print(f"  WRONG: {each}", flush=True)
    print(f"{failed} seeds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
