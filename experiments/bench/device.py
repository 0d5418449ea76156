"""Benchmark of a small device: CPU time of `gossamer join` until its first round is over, memory, idle load.

The device is that of the guide (docs/how-to/device.md), alone in its swarm. After its first round it only
sleeps, so that idle load can be measured. Bare imports of the packages that it needs are measured in the
same run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import Row, within_limit

MAX_START_SECONDS = 3.5
"""The most CPU seconds that a device may need from its start to the end of its first round."""
MAX_MEGABYTES = 290.0
"""The most resident memory of a device."""
MAX_PEER_MEGABYTES = 60.0
"""The most that each further peer in the same process may add."""
MAX_IDLE_CORES = 0.01
"""The largest share of a core that a waiting device may use."""
IDLE_SECONDS = 20.0
MANY_PEERS = 5
"""Peers in the larger of the two processes whose memory is compared; the other one has one peer."""
TIMEOUT = 120.0
"""Seconds after which a process that is not ready to be measured counts as failed."""
PAUSE = 600.0
"""Seconds that the device waits before its second training: longer than it is measured."""
BARE = "import numpy, torch, aiomqtt, msgpack, pydantic, safetensors.torch, typer, rich.console\n" \
    "from cryptography.hazmat.primitives.asymmetric import ed25519\n" \
    "input()\n"  # fmt: skip
"""Imports the packages that a device cannot do without, and waits."""
ENTRY = "gossamer.experiments.bench.device:make_learner"


def device() -> list[Row]:
    """Measure CPU seconds, memory and idle load of a device, and the memory of further peers."""
    if not Path("/proc/self/stat").exists():
        return [Row("device", "s", note="needs Linux: /proc is missing")]
    from ...peer import Broker, BrokerSettings

    name, start = "device that joined", "start and first round"
    with tempfile.TemporaryDirectory() as folder, Broker(BrokerSettings()) as broker:
        joined = MeasuredProcess(
            _join_command(Path(folder), broker.url), lambda: _has_records(Path(folder), 1)
        )
        idle = joined.load(IDLE_SECONDS)
        joined.kill()
        one_peer, many_peers = (
            _megabytes_of_peers(Path(folder), broker.url, count) for count in (1, MANY_PEERS)
        )
    bare = MeasuredProcess([sys.executable, "-c", BARE], None)
    bare.kill()
    further = (many_peers - one_peer) / (MANY_PEERS - 1)
    imports = "baseline: bare imports of the packages that it needs"
    return [
        within_limit(f"{name}, {start}", "CPU s", joined.seconds, MAX_START_SECONDS),
        Row(f"{name}, {start}", "CPU s", joined.seconds, bare.seconds, note=imports),
        within_limit(f"{name}, memory", "MB", joined.megabytes, MAX_MEGABYTES),
        Row(f"{name}, memory", "MB", joined.megabytes, bare.megabytes, note=imports),
        within_limit("each further peer in one process", "MB", further, MAX_PEER_MEGABYTES),
        within_limit(f"{name}, idle", "cores", idle, MAX_IDLE_CORES, f"over {IDLE_SECONDS:g} s"),
    ]


def make_learner(name: str = "anna"):
    """Return the learner of the guide's device, whose second training only sleeps."""
    from torch import nn

    from ...models import Metrics, SgdLearner, SlicedNetwork
    from ..data import load

    class TrainsOnce(SgdLearner):
        """Trains once; its second training waits first, for longer than the benchmark runs."""

        trained = False

        def train(self, steps: int = 1) -> Metrics:
            if self.trained:
                time.sleep(PAUSE)
            self.trained = True
            return super().train(steps)

    data = load("digits")
    assert data.test is not None
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    network = SlicedNetwork(net, {"all": 1.0}, example=data.train.x[:2], peer=name, seed=0)
    train = data.train.x[:100], data.train.y[:100]
    return TrainsOnce(network, train, (data.test.x, data.test.y), local_samples=100, rate=0.2)


def _join_command(folder: Path, url: str) -> list[str]:
    """Return the command of the device."""
    config = folder / "peer.toml"
    config.write_text(
        f'name = "peer-0"\nentry = "{ENTRY}"\nrounds = 100\nfounder = true\n', "utf-8"
    )
    join = [sys.executable, "-m", "gossamer", "join", "--broker", url, "--swarm", "device"]
    return [*join, "--config", str(config), "--out", str(folder / "1")]


def _megabytes_of_peers(folder: Path, url: str, count: int) -> float:
    """Return the megabytes of a process with some peers, after their first round."""
    from ...peer import BrokerAddress, PeerSpec, ProcessSpec, Settings

    out = folder / f"process-{count}"
    out.mkdir()
    settings = Settings(swarm=f"process-{count}", rounds=100, founder=True)
    peers = [
        PeerSpec(f"peer-{index}", ENTRY, {"name": f"peer-{index}"}, settings)
        for index in range(count)
    ]
    spec = out / "process.json"
    ProcessSpec(BrokerAddress(url), str(out), peers).write(spec)
    command = [sys.executable, "-m", "gossamer.peer", str(spec)]
    process = MeasuredProcess(command, lambda: _has_records(out, count))
    process.kill()
    return process.megabytes


def _has_records(folder: Path, peers: int) -> bool:
    """Return whether this many peers have written a record of a round."""
    return sum(file.stat().st_size > 0 for file in folder.rglob("*.jsonl")) >= peers


class MeasuredProcess:
    """A process that was started and is ready: the CPU seconds until then, and its resident megabytes.

    Raises RuntimeError, with the end of what the process wrote to stderr, if it ends before it is killed.

    is_ready: if it is None, the process is ready when it waits for input.
    """

    def __init__(self, command: Sequence[str], is_ready: Callable[[], bool] | None) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._name = " ".join(command[:4])
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `kill`
        self._process = subprocess.Popen(
            command, env=os.environ | one_thread, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=self._errors,
        )  # fmt: skip
        try:
            self._wait(is_ready)
            self.megabytes, self.seconds = self._resident(), self._cpu_seconds()
        except BaseException:
            self.kill()
            raise

    def load(self, seconds: float) -> float:
        """Return the share of a core that the process uses, measured over some seconds."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return (self._cpu_seconds() - before) / seconds

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _wait(self, is_ready: Callable[[], bool] | None) -> None:
        """Wait until the process is ready; raise RuntimeError after TIMEOUT seconds."""
        deadline = time.monotonic() + TIMEOUT
        before = -1.0
        while time.monotonic() < deadline:
            now = self._cpu_seconds()
            is_idle = now == before > 0  # no CPU time for half a second: it waits for input
            if is_idle if is_ready is None else is_ready():
                return
            before = now
            time.sleep(0.5 if is_ready is None else 0.02)
        raise RuntimeError(f"{self._name}: not ready after {TIMEOUT:g} s{self._last_errors()}")

    def _cpu_seconds(self) -> float:
        """Return the CPU time so far; raise RuntimeError if the process has ended."""
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"{self._name}: ended with exit code {status}{self._last_errors()}")
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _resident(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _last_errors(self) -> str:
        """Return the last lines that the process wrote to stderr, to end an error message with."""
        # Not with `seek` and `read`: the process writes at the same file offset.
        text = os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")
        return "".join(f"\n{line}" for line in text.splitlines()[-5:])
