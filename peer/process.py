"""A process that runs one or several peers: `python -m gossamer.peer SPEC.json`.

SIGTERM, SIGINT and SIGHUP make the peers hand over their mass and leave. With `--with-parent`, end of file on
standard input does the same, so that peers also leave when their supervisor is killed. Exit codes: see
exits.ExitCode; the reason of a failure is the last line on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gossamer.entry import call_entry
from gossamer.errors import GossamerError
from gossamer.files import RecordFile, write_atomically
from gossamer.logs import log_to_stderr

from ..gossip import TransportError
from ..models import Learner, make_callbacks
from .bootstrap import load_trained
from .exits import ExitCode, PeerError, first_error, report_alive, stop_signals
from .lifecycle import Connect, Peer, Report
from .machine import Machine, from_saved
from .membership import certificate_expiries
from .monitoring import serve_metrics, summary_families
from .settings import Limits
from .spec import LOG_JSON, WITH_PARENT, PeerSpec, ProcessSpec, mqtt_connect
from .store import NetworkFile

_log = logging.getLogger(__name__)

MAX_RECORDS_BYTES = 10_000_000
"""The size at which a peer begins a new file of records; it keeps one former file. A record has about 500
bytes: this is days of a peer that trains once in ten seconds."""


async def run_peer(
    spec: PeerSpec,
    connect: Connect,
    folder: Path,
    leaving: asyncio.Event,
    *,
    machine: Machine | None = None,
    limits: Limits | None = None,
    expiries: Mapping[str, float] | None = None,
    on_start: Callable[[Peer], None] = lambda _: None,
) -> Report:
    """Run one peer, and save its network, metrics and report in the folder.

    If the folder has the report of the finished peer, return that: a supervisor may restart a peer that was
    killed just after it finished.

    leaving: an event; once it is set, the peer hands over its mass and leaves.
    on_start: called with the peer before it runs.
    """
    if (finished := finished_report(folder, spec.name)) is not None:
        _log.info("peer %s has already finished its %d rounds", spec.name, finished.rounds)
        return finished
    learner = await asyncio.to_thread(call_entry, spec.entry, spec.arguments)
    if not isinstance(learner, Learner):
        raise PeerError(
            f"peer {spec.name}: {spec.entry} returned a {type(learner).__name__}, not a learner"
        )
    if spec.network is not None:
        await asyncio.to_thread(load_trained, learner.network, Path(spec.network))
    callbacks = await asyncio.to_thread(make_callbacks, spec.settings.callbacks, folder, spec.name)
    network_file = NetworkFile(
        folder / f"{spec.name}.safetensors", spec.settings.save_network_every,
        spec.entry, spec.arguments,
    )  # fmt: skip
    with RecordFile(folder / f"{spec.name}.jsonl", limit=MAX_RECORDS_BYTES) as metrics:
        peer = Peer(
            spec.name, learner, spec.settings, connect,
            samples=spec.samples, seed=spec.seed, on_record=metrics.write,
            machine=machine, limits=limits, network_file=network_file, keep_copy=False,
            expiries=expiries, callbacks=callbacks,
            checkpoint=folder / f"{spec.name}.checkpoint" if spec.settings.checkpoint else None,
            on_report=lambda report: _save_results(folder, spec, learner, network_file, report),
        )  # fmt: skip
        on_start(peer)
        leave_task = asyncio.create_task(_leave_when(leaving, peer), name=f"{spec.name} leave")
        try:
            return await peer.run()
        finally:
            leave_task.cancel()


def finished_report(folder: Path, name: str) -> Report | None:
    """Return the report of a peer that has trained all its rounds in this folder, if there is one."""
    if (folder / f"{name}.checkpoint").exists():
        return None
    try:
        report = from_saved(Report, json.loads((folder / f"{name}.report.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return report if report.ended == "finished" else None


def _save_results(
    folder: Path, spec: PeerSpec, learner: Learner, network_file: NetworkFile, report: Report
) -> None:
    """Write a peer's network and report; reports of its former sessions are kept under other names."""
    name = spec.name
    try:
        network_file.write(
            learner.network, time.time(), peer=report.peer, swarm=spec.settings.swarm,
            session=report.session, round=report.rounds, accuracy=report.accuracy,
        )  # fmt: skip
        _keep_former_report(folder / f"{name}.report.json", report.session)
        write_atomically(folder / f"{name}.report.json", json.dumps(asdict(report)))
    except (OSError, SafetensorError) as error:
        raise PeerError(
            f"peer {name}: cannot save its network and report in {folder}: {error}; free disk space or check "
            "permissions, and start it again: its checkpoint, if it has one, is kept"
        ) from None


def _keep_former_report(path: Path, session: str) -> None:
    """Rename the report of another session to NAME.report-SESSION.json, so that it is not overwritten."""
    try:
        former = json.loads(path.read_text("utf-8"))["session"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if former != session:
        path.replace(path.with_name(path.name.replace(".report.", f".report-{former}.")))


async def run_process(
    spec: ProcessSpec,
    *,
    parent: int | None = None,
    machine: Machine | None = None,
    limits: Limits | None = None,
    metrics: tuple[str, int] | None = None,
) -> list[Report]:
    """Run all peers of a process concurrently; if one fails, the others are cancelled.

    parent: a file descriptor that a supervisor holds open, usually standard input; at end of file all peers
        leave.
    machine, limits: passed to each Peer.
    metrics: the host and port at which the peers' figures are served to Prometheus.
    """
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, leaving.set)
    if parent is not None:
        _follow_parent(parent, leaving)
    folder = Path(spec.folder)
    connect, expiries = mqtt_connect(spec.broker), certificate_expiries(spec.broker)
    started: list[Peer] = []
    with contextlib.ExitStack() as stack:
        watchdog = asyncio.create_task(report_alive(), name="systemd watchdog")
        stack.callback(watchdog.cancel)
        if metrics is not None:
            host, port = metrics
            swarm = spec.peers[0].settings.swarm
            port = stack.enter_context(serve_metrics(lambda: _figures(started), swarm, port, host))
            _log.info("figures for Prometheus: http://%s:%d/metrics", host, port)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    run_peer(
                        peer, connect, folder, leaving, machine=machine, limits=limits,
                        expiries=expiries, on_start=started.append,
                    ),
                    name=peer.name,
                )
                for peer in spec.peers
            ]  # fmt: skip
    return [task.result() for task in tasks]


def _figures(peers: Sequence[Peer]) -> Iterable[Any]:
    """Return the figures of the peers' last summaries, for Prometheus."""
    links = [peer.link for peer in peers if peer.link is not None]
    return summary_families(
        {link.name: link.last_summary for link in links if link.last_summary is not None}
    )


def main(arguments: Sequence[str]) -> int:
    """Run the peers of a spec file, until they finish or are told to leave; return the exit code."""
    try:
        if not arguments:
            raise PeerError(
                "usage: python -m gossamer.peer SPEC.json (or gossamer join, for one device)"
            )
        spec = ProcessSpec.read(Path(arguments[0]))
        try:
            Path(spec.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PeerError(f"{spec.folder}: cannot be made: {error.strerror}") from None
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    torch.set_num_threads(spec.threads)
    log_to_stderr(as_json=LOG_JSON in arguments[1:])
    parent = sys.stdin.fileno() if WITH_PARENT in arguments[1:] else None
    return run_guarded(spec, parent=parent)


def run_guarded(
    spec: ProcessSpec, *, advice: Callable[[GossamerError], str] = lambda _: "", **options: Any
) -> int:
    """Call `run_process` and return the exit code; a GossamerError is printed as one line on stderr.

    advice: what to add to that line. options: of `run_process`. Other exceptions are bugs: they propagate
    with their traceback.
    """
    try:
        asyncio.run(run_process(spec, **options))
    except (BaseExceptionGroup, GossamerError) as errors:
        error = first_error(errors) if isinstance(errors, BaseExceptionGroup) else errors
        if not isinstance(error, GossamerError):
            raise
        print(f"error: {error}{advice(error)}", file=sys.stderr, flush=True)
        if isinstance(error, TransportError) and error.is_outage:
            return ExitCode.NOT_REACHED
        return getattr(error, "exit_code", ExitCode.CANNOT_TAKE_PART)
    return ExitCode.FINISHED


def _follow_parent(descriptor: int, leaving: asyncio.Event) -> None:
    """Set `leaving` at end of file on this descriptor: the supervisor has closed it or has died."""
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        try:
            end_of_file = not os.read(descriptor, 1024)
        except OSError:
            end_of_file = True
        if end_of_file:
            loop.remove_reader(descriptor)
            leaving.set()

    loop.add_reader(descriptor, on_readable)


async def _leave_when(leaving: asyncio.Event, peer: Peer) -> None:
    """Let a peer leave as soon as the event is set."""
    await leaving.wait()
    peer.leave("it was told to stop")
