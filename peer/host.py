"""A process that runs one or several peers: `python -m gossamer.peer SPEC.json`.

SIGTERM, SIGINT and SIGHUP make its peers hand over their mass and leave. So does, with `--with-parent`,
the end of standard input: a supervisor that was killed cannot ask them. Exit codes: see
exits.ExitCode; the reason is the last line on stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError

from gossamer.entry import call_entry
from gossamer.errors import GossamerError
from gossamer.files import replacing, write_whole

from ..gossip import (
    Hook,
    LinkSettings,
    MqttOptions,
    MqttTransport,
    TlsFiles,
    Transport,
    Will,
    topics,
)
from ..models import Learner
from .bootstrap import load_trained
from .exits import ExitCode, PeerError, first_error, stop_signals
from .lifecycle import Connect, Peer, Report
from .machine import Machine
from .records import RecordFile
from .settings import Limits, Settings

_log = logging.getLogger(__name__)

WITH_PARENT = "--with-parent"
"""Ends a process with the one that holds its standard input. Not for peers that a person or an init
system starts: their standard input may be closed from the start."""

ECHO = "@echo"
"""The inbox in which a peer listens for itself; no vector has this name."""


class BrokerAddress(MqttOptions):
    """How to reach a broker: its address, who we are to it, and the options of the connection."""

    url: str
    """Where it is: an address that starts with mqtt://, mqtts://, ws:// or wss://."""
    ca: str | None = None
    """The authority that signed the broker's certificate, a file."""
    certificate: str | None = None
    """Our own certificate, if the broker asks for one, a file."""
    key: str | None = None
    """The key of our own certificate, a file."""
    password: str | None = Field(default=None, repr=False)
    """Of the user that the URL names, if it is not in the URL."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(**{"url": url, **options})

    def with_defaults(self, link: LinkSettings) -> BrokerAddress:
        """Return a copy that takes from `link` what is stated there and not here."""
        stated = link.model_fields_set & LinkSettings.model_fields.keys()
        return self.updated(**{key: getattr(link, key) for key in stated - self.model_fields_set})


@dataclass(frozen=True)
class PeerSpec:
    """One peer of a process: its name, how to build its learner, and what it starts from.

    name: also the start of its files' names; with trust, the label of its key.
    entry: names a function that is called with `arguments` and returns a Learner.
    samples: how much the peer counts with weights = "samples".
    seed: of its random choices, as of whom to push to; another one on every peer.
    network: a safetensors file whose values the learner's network starts from: one trained before, if
        `settings.trained`.
    """

    name: str
    entry: str
    arguments: dict[str, Any]
    settings: Settings
    samples: int = 1
    seed: int = 0
    network: str | None = None


@dataclass(frozen=True)
class HostSpec:
    """A process: its peers, its broker, its folder."""

    broker: BrokerAddress
    folder: str
    peers: list[PeerSpec] = field(default_factory=list)
    threads: int = 1

    def write(self, path: Path) -> None:
        """Write it as JSON that only this user can read: the broker's password may be in it."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), 0o600)  # whatever the rights of a file that was there
            out.write(TypeAdapter(HostSpec).dump_json(self, indent=1))

    @classmethod
    def read(cls, path: Path) -> HostSpec:
        """Read what `write` wrote."""
        return TypeAdapter(cls).validate_json(path.read_bytes())


def mqtt_connect(broker: BrokerAddress) -> Connect:
    """Transports for peers of one broker. Each listens for itself in an inbox of its own."""

    def connect(client_id: str, will: Will, on_connect: Hook) -> Transport:
        where = topics.parse(will.topic)
        echo = topics.inbox(where.swarm, where.peer, ECHO)
        return mqtt_transport(broker, client_id, will=will, on_connect=on_connect, echo=echo)

    return connect


def mqtt_transport(
    broker: BrokerAddress,
    client_id: str,
    *,
    will: Will | None = None,
    on_connect: Hook | None = None,
    echo: str | None = None,
) -> MqttTransport:
    """A connection to a broker, not opened yet; see MqttTransport."""
    tls = None
    if broker.ca or broker.certificate:
        tls = TlsFiles(_path(broker.ca), _path(broker.certificate), _path(broker.key))
    return MqttTransport(
        broker.url, client_id, password=broker.password,
        will=will, tls=tls, options=broker, on_connect=on_connect, echo=echo,
    )  # fmt: skip


async def run_peer(
    spec: PeerSpec,
    connect: Connect,
    folder: Path,
    leaving: asyncio.Event,
    *,
    machine: Machine | None = None,
    limits: Limits | None = None,
) -> Report:
    """Run one peer and leave its network, metrics and report in the folder.

    One that has finished there already does not begin anew: whoever restarts processes that were killed
    may have been a moment too late.
    """
    if (finished := finished_report(folder, spec.name)) is not None:
        _log.info("peer %s has finished its %d rounds already", spec.name, finished.rounds)
        return finished
    learner = await asyncio.to_thread(call_entry, spec.entry, spec.arguments)
    if not isinstance(learner, Learner):
        raise PeerError(
            f"peer {spec.name}: {spec.entry} returned a {type(learner).__name__}, not a learner"
        )
    if spec.network is not None:
        await asyncio.to_thread(load_trained, learner.network, Path(spec.network))
    with RecordFile(folder / f"{spec.name}.jsonl") as metrics:
        peer = Peer(
            spec.name, learner, spec.settings, connect,
            samples=spec.samples, seed=spec.seed, on_record=metrics.write,
            machine=machine, limits=limits,
            checkpoint=folder / f"{spec.name}.checkpoint" if spec.settings.checkpoint else None,
            on_report=lambda report: _leave_behind(folder, spec.name, learner, report),
        )  # fmt: skip
        watch = asyncio.create_task(_leave_when(leaving, peer), name=f"{spec.name} watch")
        try:
            return await peer.run()
        finally:
            watch.cancel()


def finished_report(folder: Path, name: str) -> Report | None:
    """Return the report of a peer that has trained all its rounds in this folder, if there is one."""
    if (folder / f"{name}.checkpoint").exists():
        return None
    try:
        report = Report(**json.loads((folder / f"{name}.report.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return report if report.ended == "finished" else None


def _leave_behind(folder: Path, name: str, learner: Learner, report: Report) -> None:
    """Write what a peer takes home; reports of its former sessions keep files of their own."""
    try:
        with replacing(folder / f"{name}.safetensors") as part:
            learner.network.save(part)
        _keep_former_report(folder / f"{name}.report.json", report.session)
        write_whole(folder / f"{name}.report.json", json.dumps(asdict(report)))
    except (OSError, SafetensorError) as error:
        raise PeerError(
            f"peer {name}: cannot write what it learnt to {folder}: {error}; make room, and start it again: "
            "its checkpoint, if it has one, is kept"
        ) from None


def _keep_former_report(path: Path, session: str) -> None:
    """Move the report of another session aside, under the name of that session."""
    try:
        former = json.loads(path.read_text("utf-8"))["session"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if former != session:
        path.replace(path.with_name(path.name.replace(".report.", f".report-{former}.")))


async def run_host(
    spec: HostSpec,
    *,
    parent: int | None = None,
    machine: Machine | None = None,
    limits: Limits | None = None,
) -> list[Report]:
    """Run all peers of a process side by side; the first that fails ends the others.

    parent: a descriptor that a supervisor holds open, usually standard input; when it ends, all leave.
    machine, limits: of its peers; see Peer.
    """
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, leaving.set)
    if parent is not None:
        _follow_parent(parent, leaving)
    folder = Path(spec.folder)
    connect = mqtt_connect(spec.broker)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                run_peer(peer, connect, folder, leaving, machine=machine, limits=limits),
                name=peer.name,
            )
            for peer in spec.peers
        ]
    return [task.result() for task in tasks]


def main(arguments: Sequence[str]) -> int:
    """Run the process that a spec file describes."""
    spec = HostSpec.read(Path(arguments[0]))
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(spec.threads)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    parent = sys.stdin.fileno() if WITH_PARENT in arguments[1:] else None
    return run_guarded(spec, parent=parent)


def run_guarded(spec: HostSpec, **options: Any) -> int:
    """Run a process's peers; what ends one is one line on stderr and an exit code.

    options: of `run_host`.
    """
    try:
        asyncio.run(run_host(spec, **options))
    except BaseExceptionGroup as errors:
        error = first_error(errors)
        if not isinstance(error, GossamerError):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", ExitCode.CANNOT_TAKE_PART)
    return ExitCode.FINISHED


def _follow_parent(descriptor: int, leaving: asyncio.Event) -> None:
    """Leave when nobody holds the other end of this descriptor any more."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        try:
            ended = not os.read(descriptor, 1024)
        except OSError:
            ended = True
        if ended:
            loop.remove_reader(descriptor)
            leaving.set()

    loop.add_reader(descriptor, look)


async def _leave_when(leaving: asyncio.Event, peer: Peer) -> None:
    await leaving.wait()
    peer.leave("it was told to stop")


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
