"""A soak: peers learn for ever, one of them in a process that is watched for memory and open files.

    PYTHONPATH=tests python tests/live/soak.py --minutes 30

Run by hand, not in CI. Three processes on a broker of their own: the one that is watched takes new samples
from a folder; another one is killed and started again every two minutes; the third one leaves and comes back.
The bars: after minute 5, resident memory grows by at most 5 MB, and open files by none. Exit code 1 if a bar
is missed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from waiting import let_run

from gossamer.peer import Broker, BrokerSettings

MEGABYTES, FILES = 5.0, 0
"""How much resident memory and the number of open files may grow."""
SETTLED = 5.0
"""Minutes after which growth is measured."""

DEVICE = """
name = "{name}"
entry = "soak:make_learner"
arguments = {{name = "{name}"}}
rounds = "forever"
test_every = 10
samples_folder = "{name}"
window = 500
save_network_every = 5
lease = 30
"""


def make_learner(name: str):
    """Return the learner of a device: an entry point, which the device's file names."""
    import torch

    from gossamer.models import SgdLearner, SlicedNetwork, mlp

    class Paced(SgdLearner):
        def train(self, steps: int):
            let_run(0.1)
            return super().train(steps)

    network = SlicedNetwork(mlp("64=100=10"), {"global": "64-80-10"}, peer=name, rest=name, seed=0)
    none = torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64)
    return Paced(network, none, none, local_samples=100)


def join(folder: Path, name: str, url: str) -> subprocess.Popen[bytes]:
    """Start a device."""
    (folder / name).mkdir(exist_ok=True)
    device = folder / f"{name}.toml"
    device.write_text(DEVICE.format(name=name))
    command = [
        sys.executable, "-m", "gossamer", "join", "--broker", url, "--swarm", "soak", "--config",
        str(device), "--out", str(folder / "out" / name),
    ]  # fmt: skip
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    log = (folder / f"{name}.log").open("ab")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def resident(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files(process: subprocess.Popen[bytes]) -> int:
    """Return how many files and sockets a process has open."""
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def new_samples(folder: Path, number: int) -> None:
    """Give every device a file, and remove the old ones."""
    random = np.random.default_rng(number)
    for name in ("watched", "killed", "leaving"):
        x = random.normal(size=(50, 64)).astype(np.float32)
        part = folder / name / "new.part"
        with part.open("wb") as file:
            np.savez(file, x=x, y=x[:, :10].argmax(1))
        part.replace(folder / name / f"{number}.npz")
        (folder / name / f"{number - 20}.npz").unlink(missing_ok=True)


def soak(minutes: float) -> bool:
    """Run, print a line every half minute, and return whether the bars were kept."""
    with tempfile.TemporaryDirectory() as temporary, Broker(BrokerSettings()) as broker:
        folder = Path(temporary)
        peers = {name: join(folder, name, broker.url) for name in ("watched", "killed", "leaving")}
        start, number = time.monotonic(), 0
        rows: list[tuple[float, float, int]] = []
        try:
            while (passed := (time.monotonic() - start) / 60) < minutes:
                number += 1
                new_samples(folder, number)
                if number % 12 == 0:  # every two minutes
                    peers["killed"].kill()
                    peers["killed"].wait()
                    peers["killed"] = join(folder, "killed", broker.url)
                if number % 18 == 6:
                    peers["leaving"].send_signal(signal.SIGTERM)
                    peers["leaving"].wait()
                    peers["leaving"] = join(folder, "leaving", broker.url)
                let_run(10)
                if peers["watched"].poll() is not None:
                    print((folder / "watched.log").read_text()[-3000:])
                    raise SystemExit(
                        f"the watched peer ended with code {peers['watched'].returncode}"
                    )
                rows.append((passed, resident(peers["watched"]), open_files(peers["watched"])))
                if number % 3 == 0:
                    print("minute {:5.1f}: {:6.1f} MB, {} open files".format(*rows[-1]), flush=True)
        finally:
            for peer in peers.values():
                peer.terminate()
                peer.wait()
    settled = [row for row in rows if row[0] >= min(SETTLED, minutes / 2)]
    third = max(1, len(settled) // 3)
    memory = [max(row[1] for row in part) for part in (settled[:third], settled[-third:])]
    files = [max(row[2] for row in part) for part in (settled[:third], settled[-third:])]
    grown, opened = memory[1] - memory[0], files[1] - files[0]
    print(
        f"memory grew by {grown:.1f} MB (at most {MEGABYTES}), open files by {opened} (at most {FILES})"
    )
    return grown <= MEGABYTES and opened <= FILES


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Watch memory and open files of a peer that learns for ever."
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    sys.exit(0 if soak(parser.parse_args().minutes) else 1)
