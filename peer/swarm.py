"""A swarm of local processes: start them, watch them, restart what crashes, end them cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..gossip import Transport, TransportError, topics
from ..gossip.security import Death, Identity, TrustError, sign_death
from .exits import ExitCode, PeerError
from .host import WITH_PARENT, BrokerAddress, HostSpec, PeerSpec, mqtt_transport
from .lifecycle import Record
from .records import label, read_record

_log = logging.getLogger(__name__)

# Matching multiplies with numpy: a team of threads per process would only get in each other's way.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

NOTICE_TIMEOUT = 15.0
"""Seconds that the broker has to take a death notice."""


@dataclass(frozen=True)
class SwarmSpec:
    """A swarm on this machine.

    per_process: peers that share one process. 1 is closest to real devices; more saves the memory
        and start-up time that torch costs per process.
    restarts: how often a crashed process is started again, each.
    """

    swarm: str
    broker: BrokerAddress
    folder: Path
    peers: Sequence[PeerSpec]
    per_process: int = 1
    restarts: int = 3


class LocalSwarm:
    """Runs the processes of a swarm.

    on_record is called with every metrics record that a peer of the swarm publishes, on_event with lines
    about processes that ended or were restarted.

    python: what runs `-m gossamer.peer`. restart_pause: seconds before a crashed process is started again,
    twice as many each time. stop_grace: seconds beyond leave_timeout that a process has to end, for a round
    of training and for its files. connect: makes the supervisor's own transport to the broker.
    """

    def __init__(
        self,
        spec: SwarmSpec,
        *,
        on_record: Callable[[Record], None] = lambda _: None,
        on_event: Callable[[str], None] = lambda _: None,
        python: str = sys.executable,
        restart_pause: float = 0.5,
        stop_grace: float = 30.0,
        connect: Callable[..., Transport] = mqtt_transport,
    ):
        self.spec = spec
        self._python, self._connect = python, connect
        self._restart_pause, self._stop_grace = restart_pause, stop_grace
        self._on_record, self._on_event = on_record, on_event
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._not_restarted: set[int] = set()
        self._sessions: dict[str, tuple[str, str]] = {}
        """Per label: the peer's whole name and its latest session, as it published them."""
        self._failure: PeerError | None = None

    @property
    def pids(self) -> dict[str, int]:
        """The process of every peer that runs now."""
        return {
            peer.name: process.pid
            for index, process in self._processes.items()
            if process.returncode is None
            for peer in self._groups()[index]
        }

    def disable_restart(self, name: str) -> None:
        """Do not restart this peer's process when it crashes."""
        for index, group in enumerate(self._groups()):
            if any(peer.name == name for peer in group):
                self._not_restarted.add(index)

    def stop(self) -> None:
        """Ask every peer to hand over and leave. Who takes far too long is killed."""
        self._stopping.set()
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()

    async def run(self) -> None:
        """Run until every process has ended; PeerError if one could not take part."""
        self.spec.folder.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.TaskGroup() as group:
                listener = group.create_task(self.listen(), name="metrics")
                keepers = [
                    group.create_task(self._keep(index, peers), name=f"process {index}")
                    for index, peers in enumerate(self._groups())
                ]
                await asyncio.gather(*keepers)
                listener.cancel()
        except* (PeerError, TransportError) as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._kill_all()
        if self._failure is not None:
            raise self._failure

    def _groups(self) -> list[Sequence[PeerSpec]]:
        size = self.spec.per_process
        peers = self.spec.peers
        return [peers[first : first + size] for first in range(0, len(peers), size)]

    async def _keep(self, index: int, peers: Sequence[PeerSpec]) -> None:
        """Run one process, again after a crash."""
        names = ", ".join(peer.name for peer in peers)
        folder = self.spec.folder
        path = folder / f"host-{index}.json"
        for attempt in range(self.spec.restarts + 1):
            if attempt and not all(peer.settings.checkpoint for peer in peers):
                # Nothing of the session that has just died can come back: its name is free.
                peers = [replace(p, settings=p.settings.updated(replace=True)) for p in peers]
            with _writing(path):
                HostSpec(self.spec.broker, str(folder), list(peers)).write(path)
            code, last_line = await self._run_once(index, path)
            if code == ExitCode.FINISHED or self._stopping.is_set():
                return
            if code in (ExitCode.CANNOT_TAKE_PART, ExitCode.REPLACED):
                text = last_line.removeprefix("error: ") or f"peer {names} cannot take part"
                self._fail(PeerError(text))
                return
            why = (
                f"was killed by signal {-code}"
                if code < 0
                else f"crashed (exit code {code}): {last_line}"
            )
            if index in self._not_restarted:
                self._on_event(f"peer {names} {why}; it is not restarted")
                await self._declare_dead(peers, why)
                return
            if attempt == self.spec.restarts:
                break
            self._on_event(f"peer {names} {why}; it is restarted from its checkpoint")
            await asyncio.sleep(self._restart_pause * 2**attempt)
        why = f"crashed {self.spec.restarts + 1} times"
        await self._declare_dead(peers, why)
        self._fail(PeerError(f"peer {names} {why}; see {folder}/host-{index}.log"))

    def _fail(self, error: PeerError) -> None:
        """Let the others hand over and leave; `run` raises the error when they have."""
        self._failure = self._failure or error
        self.stop()

    def _transport(self, role: str) -> Transport:
        """Return a connection of the supervisor's own, not opened yet."""
        name = f"{role}-{time.time_ns()}"
        return self._connect(self.spec.broker, name, echo=topics.metrics(self.spec.swarm, name))

    async def _declare_dead(self, peers: Sequence[PeerSpec], why: str) -> None:
        """Tell the others that these peers never come back, so that nobody waits for their leases."""
        known = [self._sessions[label(p.name)] for p in peers if label(p.name) in self._sessions]
        owner = self.spec.folder / "trust" / "owner.key"
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT), self._transport("supervisor") as transport:
                for peer, session in known:
                    death = Death(session, why, "its supervisor", time.time())
                    notice = death.encode()
                    if owner.exists():
                        notice = sign_death(Identity.load(owner), self.spec.swarm, peer, death)
                    topic = topics.death(self.spec.swarm, peer)
                    await transport.publish(topic, notice, retain=True)
        except (TimeoutError, TransportError, TrustError) as error:
            _log.warning("could not declare %s dead: %s", known, error or "the broker is away")

    async def _run_once(self, index: int, path: Path) -> tuple[int, str]:
        log = path.with_suffix(".log")
        with _writing(log):
            output = log.open("ab")
        with output:
            process = await asyncio.create_subprocess_exec(
                self._python, "-m", "gossamer.peer", str(path), WITH_PARENT,
                stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
                env={**os.environ, **dict.fromkeys(_THREADS, "1")},
            )  # fmt: skip
        self._processes[index] = process
        if self._stopping.is_set():
            process.terminate()
        try:
            code = await self._end_of(process, index)
        finally:
            _let_go(process)
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
        return code, _last_error_line(lines)

    async def _end_of(self, process: asyncio.subprocess.Process, index: int) -> int:
        """A process's exit code. Once all are asked to leave, it has its time to leave and no more."""
        ended = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            peers = self._groups()[index]
            patience = max(peer.settings.leave_timeout for peer in peers) + self._stop_grace
            if not ended.done():
                await asyncio.wait((ended,), timeout=patience)
            if not ended.done():
                names = ", ".join(peer.name for peer in peers)
                self._on_event(f"peer {names} did not leave within {patience:g} s; it is killed")
                process.kill()
            return await ended
        finally:
            ended.cancel()
            stopping.cancel()

    async def listen(self) -> None:
        """Hand on what peers publish about themselves, for as long as the broker is there; `run` does it."""
        swarm = self.spec.swarm
        async with self._transport("watcher") as transport:
            await transport.subscribe(topics.every(swarm, "metrics"))
            names = {label(peer.name) for peer in self.spec.peers}
            async for topic, payload, _ in transport.messages():
                record = read_record(topic, bytes(payload), names)
                if record is not None:  # anybody can publish anything there
                    self._sessions[label(record["peer"])] = record["peer"], record["session"]
                    self._on_record(record)

    async def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
            _let_go(process)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a file that cannot be written into a PeerError."""
    try:
        yield
    except OSError as error:
        raise PeerError(
            f"{path}: cannot be written: {error.strerror or error}; make room and run again"
        ) from None


def _let_go(process: asyncio.subprocess.Process) -> None:
    """Close our end of a process's standard input, which told it that we live."""
    if process.stdin is not None:
        process.stdin.close()


def _last_error_line(lines: Sequence[str]) -> str:
    """The line of a log that says what went wrong: the last that names an error, else the last."""
    named = [line for line in lines if re.match(r"[\s|]*(error|[\w.]*(Error|Exception)):", line)]
    return (named or list(lines) or [""])[-1].lstrip(" |")
