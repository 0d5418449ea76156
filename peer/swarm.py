"""Supervisor of a swarm of local processes: starts them, restarts crashed ones, and stops them cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..gossip import Transport, TransportError, topics
from ..gossip.security import Death, Identity, TrustError, sign_death
from .exits import ExitCode, PeerError
from .lifecycle import Record
from .spec import LOG_JSON, WITH_PARENT, BrokerAddress, PeerSpec, ProcessSpec, mqtt_transport
from .summary import label, read_record

_log = logging.getLogger(__name__)

# Matching uses numpy's matrix products: several threads in each of many processes would slow each other down.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

NOTICE_TIMEOUT = 15.0
"""Seconds in which the broker must accept a death notice."""


@dataclass(frozen=True)
class SwarmSpec:
    """A swarm on this machine.

    swarm: its name. folder: for the processes' results and logs.
    per_process: number of peers in one process. 1 is closest to real devices; more saves the memory
        and start-up time that torch costs per process.
    restarts: how many times each process is restarted after a crash.
    log_json: whether the lines of the processes' logs are JSON objects.
    """

    swarm: str
    broker: BrokerAddress
    folder: Path
    peers: Sequence[PeerSpec]
    per_process: int = 1
    restarts: int = 3
    log_json: bool = False


class LocalSwarm:
    """Runs the processes of a swarm.

    on_record: called with every metrics record that a peer of the swarm publishes.
    on_event: called with a line of text when a process ends or is restarted.
    python: the interpreter that runs `-m gossamer.peer`.
    restart_pause: seconds before a crashed process is started again, doubled each time.
    stop_grace: seconds for a process to exit, in addition to leave_timeout: for a round of training, and for
        writing its files.
    connect: makes the supervisor's own transport to the broker.
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
        """Per label: the peer's full name and its latest session, from its metrics records."""
        self._failure: PeerError | None = None

    @property
    def pids(self) -> dict[str, int]:
        """The process id of every running peer, by name."""
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
        """Ask every peer to hand over its mass and leave. A process that does not exit in time is killed."""
        self._stopping.set()
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()

    async def run(self) -> None:
        """Run until every process has exited; PeerError if one could not take part."""
        self.spec.folder.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.TaskGroup() as group:
                metrics = group.create_task(self.receive_records(), name="metrics")
                processes = [
                    group.create_task(self._supervise(index, peers), name=f"process {index}")
                    for index, peers in enumerate(self._groups())
                ]
                await asyncio.gather(*processes)
                metrics.cancel()
        except* (PeerError, TransportError) as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._kill_all()
        if self._failure is not None:
            raise self._failure

    def _groups(self) -> list[Sequence[PeerSpec]]:
        """Return the peers of each process, by its index."""
        size = self.spec.per_process
        peers = self.spec.peers
        return [peers[first : first + size] for first in range(0, len(peers), size)]

    async def _supervise(self, index: int, peers: Sequence[PeerSpec]) -> None:
        """Run one process, and restart it after crashes."""
        names = ", ".join(peer.name for peer in peers)
        folder = self.spec.folder
        path = folder / f"host-{index}.json"
        for attempt in range(self.spec.restarts + 1):
            if attempt and not all(peer.settings.checkpoint for peer in peers):
                # Without checkpoints the crashed session cannot continue: the new process replaces it.
                peers = [replace(p, settings=p.settings.updated(replace=True)) for p in peers]
            with _write_errors(path):
                ProcessSpec(self.spec.broker, str(folder), list(peers)).write(path)
            code, last_line = await self._run_once(index, path)
            if code == ExitCode.FINISHED or self._stopping.is_set():
                return
            if code in (ExitCode.CANNOT_TAKE_PART, ExitCode.REPLACED, ExitCode.NOT_REACHED):
                text = last_line.removeprefix("error: ") or f"peer {names} cannot take part"
                self._fail(PeerError(text))
                return
            reason = (
                f"was killed by signal {-code}"
                if code < 0
                else f"crashed (exit code {code}): {last_line}"
            )
            if index in self._not_restarted:
                self._on_event(f"peer {names} {reason}; it is not restarted")
                await self._declare_dead(peers, reason)
                return
            if attempt == self.spec.restarts:
                break
            self._on_event(f"peer {names} {reason}; it is restarted from its checkpoint")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._restart_pause * 2**attempt):
                    await self._stopping.wait()
                    return
        reason = f"crashed {self.spec.restarts + 1} times"
        await self._declare_dead(peers, reason)
        self._fail(PeerError(f"peer {names} {reason}; see {folder}/host-{index}.log"))

    def _fail(self, error: PeerError) -> None:
        """Stop all processes because one failed; `run` raises the error when they have exited."""
        self._failure = self._failure or error
        self.stop()

    def _transport(self, role: str) -> Transport:
        """Return a transport of the supervisor itself, not connected yet."""
        name = f"{role}-{time.time_ns()}"
        return self._connect(self.spec.broker, name, echo=topics.metrics(self.spec.swarm, name))

    async def _declare_dead(self, peers: Sequence[PeerSpec], reason: str) -> None:
        """Publish death notices for peers that are not restarted, so that no peer waits for their leases."""
        sessions = [self._sessions[label(p.name)] for p in peers if label(p.name) in self._sessions]
        owner_key = self.spec.folder / "trust" / "owner.key"
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT), self._transport("supervisor") as transport:
                for peer, session in sessions:
                    death = Death(session, reason, "its supervisor", time.time())
                    notice = death.encode()
                    if owner_key.exists():
                        notice = sign_death(Identity.load(owner_key), self.spec.swarm, peer, death)
                    topic = topics.death(self.spec.swarm, peer)
                    await transport.publish(topic, notice, retain=True)
        except (TimeoutError, TransportError, TrustError) as error:
            _log.warning(
                "could not declare these peers dead (others wait for their leases): %s: %s",
                ", ".join(peer for peer, _ in sessions), str(error) or "the broker does not answer",
            )  # fmt: skip

    async def _run_once(self, index: int, path: Path) -> tuple[int, str]:
        """Run one process with this spec file; return its exit code and the last error line of its log."""
        log = path.with_suffix(".log")
        with _write_errors(log):
            output = log.open("ab")
        try:
            with output:
                process = await asyncio.create_subprocess_exec(
                    self._python, "-m", "gossamer.peer", str(path), WITH_PARENT,
                    *([LOG_JSON] if self.spec.log_json else []),
                    stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
                    env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
                )  # fmt: skip
        except OSError as error:
            raise PeerError(
                f"the process of {path} cannot be started: {error.strerror or error}; if there are too many, "
                "raise gossip.per_process"
            ) from None
        self._processes[index] = process
        if self._stopping.is_set():
            process.terminate()
        try:
            code = await self._wait_for_exit(process, index)
        finally:
            _close_stdin(process)
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
        return code, _last_error_line(lines)

    async def _wait_for_exit(self, process: asyncio.subprocess.Process, index: int) -> int:
        """Return a process's exit code; kill the process if it does not exit in time after `stop`."""
        ended = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            peers = self._groups()[index]
            timeout = max(peer.settings.leave_timeout for peer in peers) + self._stop_grace
            if not ended.done():
                await asyncio.wait((ended,), timeout=timeout)
            if not ended.done():
                names = ", ".join(peer.name for peer in peers)
                self._on_event(f"peer {names} did not leave within {timeout:g} s; it is killed")
                process.kill()
            return await ended
        finally:
            ended.cancel()
            stopping.cancel()

    async def receive_records(self) -> None:
        """Receive the peers' metrics records and pass them to `on_record`, until cancelled; part of `run`."""
        swarm = self.spec.swarm
        async with self._transport("watcher") as transport:
            await transport.subscribe(topics.of_all(swarm, "metrics"))
            labels = {label(peer.name) for peer in self.spec.peers}
            async for topic, payload, _ in transport.messages():
                record = read_record(topic, bytes(payload), labels)
                if record is not None:  # invalid records are ignored: any client can publish there
                    self._sessions[label(record["peer"])] = record["peer"], record["session"]
                    self._on_record(record)

    async def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
            _close_stdin(process)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a PeerError that names the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise PeerError(
            f"{path}: cannot be written: {error.strerror or error}; free disk space or check access, and "
            "run again"
        ) from None


def _close_stdin(process: asyncio.subprocess.Process) -> None:
    """Close a process's standard input, which was open to show the process that its supervisor runs."""
    if process.stdin is not None:
        process.stdin.close()


def _last_error_line(lines: Sequence[str]) -> str:
    """Return the last line of a log that names an error, else the last line."""
    errors = [line for line in lines if re.match(r"[\s|]*(error|[\w.]*(Error|Exception)):", line)]
    return (errors or list(lines) or [""])[-1].lstrip(" |")
