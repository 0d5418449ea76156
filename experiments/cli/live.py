"""The commands of live swarms: `gossamer swarm`, `join`, `service`; and how commands connect to a broker."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.entry import ArgumentsError, import_from, require_module
from gossamer.errors import GossamerError
from gossamer.logs import log_to_stderr

from ..errors import ConfigError
from ..results import make_folder, require_folder, write_bytes
from . import console
from .console import (
    Out,
    Output,
    PortIfGiven,
    command,
    command_group,
    load_torch,
    report_interruption,
)

if TYPE_CHECKING:
    from ...peer import BrokerAddress, PeerSpec

_log = logging.getLogger(__name__)

OWN_BROKER = "mqtt://127.0.0.1"
"""A placeholder for the URL of the broker that the swarm would start, for --show-settings."""
PASSWORD_VARIABLE = "GOSSAMER_BROKER_PASSWORD"
"""The environment variable that `broker_password` reads."""


# --- the connection to a broker ---------------------------------------------------------------------


RETRY_SECONDS = 3.0
"""Seconds for which a command tries to connect to a broker: few, since a person waits for it."""


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Options of the connection to a broker.

    Args:
        ca: The certificate file of the authority (CA) that signed the broker's certificate.
        certificate: The file of this device's own certificate, for brokers that require one.
        key: The file of the private key of --certificate.
        mqtt: The version of MQTT: 3.1.1 (default) or 5.
        max_packet: The largest packet that the broker accepts, in bytes; if left out, it is found by trial.
        keepalive: Seconds without traffic before the connection to the broker is tested.
        password_file: A file with the password of the user in the broker's URL; if left out, the environment
            variable GOSSAMER_BROKER_PASSWORD is used.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    mqtt: str | None = None
    max_packet: int | None = None
    keepalive: int | None = None
    password_file: Path | None = None

    def given(self) -> dict[str, object]:
        """Return the options that are on the command line."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def address(self, url: str) -> BrokerAddress:
        """Return the address of the broker at a URL, with these options but without its password."""
        from pydantic import ValidationError

        from ...peer import BrokerAddress

        settings = {
            "version" if name == "mqtt" else name: str(value) if isinstance(value, Path) else value
            for name, value in self.given().items()
            if name != "password_file"
        }
        try:
            return BrokerAddress(url, **settings)
        except ValidationError as error:
            mistake = error.errors()[0]
            name = {"version": "mqtt", "url": "broker"}.get(key := str(mistake["loc"][0]), key)
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {mistake['input']}: {mistake['msg']}") from None

    def running_broker(self, url: str) -> BrokerAddress:
        """Return the address of a broker that should run already, with its password.

        A device waits longer for a broker, because both may have been started together.
        """
        address = self.address(url).updated(connect_timeout=RETRY_SECONDS)
        if password := broker_password(address.url, self.password_file):
            address = address.updated(password=password)
        return address


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Options of commands that serve figures to Prometheus.

    Args:
        metrics_port: Serve figures to Prometheus at this port, under /metrics; 0 chooses a free one. Needs
            gossamer[metrics].
        metrics_host: The address that --metrics-port listens on. Anyone who reaches it can read the figures.
    """

    metrics_port: PortIfGiven = None
    metrics_host: str = "127.0.0.1"


def broker_password(
    url: str, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the password of the user in a broker's URL: a file's first line, or an environment variable.

    Both are safer than a password in the URL, which other users of the machine see in the list of processes.
    Without a file, returns None if the URL contains a password, or no user name: then the variable may be
    meant for another broker.
    """
    from ...gossip import Address  # slow to import

    addresses = Address.parse_all(url)
    if file is None:
        lacks_password = any(each.username and each.password is None for each in addresses)
        return environment.get(PASSWORD_VARIABLE) or None if lacks_password else None
    if any(each.password is not None for each in addresses):
        raise ConfigError(f"{file}: the broker's URL has a password too; leave one of them out")
    if any(each.username is None for each in addresses):
        raise ConfigError(f"{file}: a password needs a user name: write it in the URL, NAME@host")
    try:
        password = file.read_text("utf-8").partition("\n")[0].rstrip("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: cannot be read: it is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if not password:
        raise ConfigError(f"{file}: there is no password in its first line")
    return password


# --- gossamer swarm and gossamer join ---------------------------------------------------------------


@command("swarm", slow=True)
def swarm_command(
    config: Path,
    *,
    broker: str | None = None,
    peers: str | None = None,
    watch: bool = False,
    connection: ConnectionOptions,
    log_json: bool = False,
    device: str | None = None,
    output: Output,
    show_settings: bool = False,
) -> None:
    """Run a swarm of live peers as processes on this machine, with a table of their progress.

    Every peer's network is saved as safetensors, its metrics as JSON lines. A peer that crashes is
    restarted. Every run gets its own folder: results/NAME-live/001, 002, … After Ctrl-C, each peer hands
    its values over to the others and leaves.

    Args:
        config: A TOML file; the same as for simulate.
        broker: The address of a running broker (mqtt://, mqtts://, ws:// or wss://), those of a cluster's
            nodes with commas between them, or nats or mosquitto to start one (the default).
        peers: Run only these peers of the config here, such as 0-31, and the others on other hosts, with the
            same file and --broker. Whoever runs the last peer collects all reports.
        log_json: Write each line of the peers' logs (host-0.log, …) as a JSON object.
        device: Where peers train, as in cuda; the key training.device of the config if left out.
    """
    from ...peer import broker_kind
    from ..config.tables import load_config
    from .views import require_bokeh

    if watch:
        require_bokeh()
    settings = load_config(config).on_device(device)
    console.note_defaults(config, settings)
    if settings.time is not None or settings.sweep:
        raise ConfigError(
            f"{config}: [time] and [sweep] are for gossamer simulate and gossamer sweep; leave them out "
            "for live peers"
        )
    local_peers: list[int] | None = None
    if peers is not None:
        from ..live.hosts import parse_peers

        local_peers = parse_peers(peers, settings.peers)
        if broker is None or broker_kind(broker) is not None:
            raise ConfigError("swarm: --peers needs --broker URL, which all hosts reach")
        if settings.trust.kind != "none":
            raise ConfigError(
                f"{config}: key 'trust.kind': --peers makes no keys that other hosts know; enrol devices "
                "with gossamer enrol, and start each with gossamer join"
            )
    address = None
    if broker is not None and broker_kind(broker) is None:
        address = connection.address(broker)
        if password := broker_password(address.url, connection.password_file):
            address = address.updated(password=password)
    elif unusable := [
        name for name in connection.given() if name not in ("max_packet", "keepalive")
    ]:
        option = unusable[0].replace("_", "-")
        raise ConfigError(f"--{option}: is for a broker named by --broker; leave it out")
    default_folder = Path("results") / f"{settings.name}-live"
    if show_settings:
        from .explain import show_swarm

        address = address or connection.address(OWN_BROKER)
        starts_broker = broker is None
        out = (output.out, default_folder)
        show_swarm(settings, str(config), address, starts_broker=starts_broker, out=out)
        return
    load_torch()  # after the config is checked: importing torch takes seconds
    from ..live.run import broker_for, draw_swarm, print_outcome, run_live

    results = output.results(default_folder, "swarm")
    # run_live starts a local broker only after it has checked the config.
    local_broker = broker_for(broker, address_of=connection.address)
    used_broker = local_broker if address is None else nullcontext(address)
    with results.opened() as folder:

        def begin() -> None:
            if settings.trust.kind == "none":
                results.begin()
                console.warn(
                    "trust is off: anyone who can connect to the broker can read and forge messages"
                )
            else:
                results.begin(keep=("trust",))  # keys were written while the config was checked
                console.warn(f"trust: temporary keys and invitations are in {folder / 'trust'}")

        with report_interruption(folder):
            outcome = run_live(
                settings,
                folder,
                used_broker,
                source=str(config),
                watch=watch,
                peers=local_peers,
                log_json=log_json,
                on_planned=begin,
            )
        print_outcome(settings, outcome)
        pictures = draw_swarm(settings, folder)
        console.print_written([outcome.records, folder / "outcome.json", *pictures])
    console.leave_report(folder)


@command("join", slow=True)
def join_command(
    enrolment: Annotated[Path | None, typer.Argument()] = None,
    *,
    broker: str | None = None,
    swarm: str | None = None,
    config: Path | None = None,
    entry: str | None = None,
    name: str | None = None,
    connection: ConnectionOptions,
    identity: Path | None = None,
    invitation: Path | None = None,
    owner: str | None = None,
    network: Path | None = None,
    replace: bool = False,
    metrics: MetricsOptions,
    log_json: bool = False,
    out: Out = None,
    again: bool = False,
    show_settings: bool = False,
) -> None:
    """Join a swarm as one peer on this device: train on its own data, gossip, save the network.

    After a crash, the same command in the same folder resumes from the peer's checkpoint. If the peer has
    finished, the command prints that and exits, so that a service manager may restart it at any time.

    Args:
        enrolment: The device's file NAME.gossamer, from the swarm's owner (gossamer enrol); it has broker,
            swarm, key, invitation and password.
        broker: Without such a file: the broker's address: mqtt://, mqtts://, ws:// or wss://; those of a
            cluster's nodes with commas between them.
        swarm: Without such a file: the swarm's name.
        config: The device's TOML file; not needed with an enrolment and --entry.
        entry: With an enrolment: module:function that makes the device's learner.
        name: The peer's name, if it is not in the file.
        identity: The peer's key file (see gossamer keygen), for a swarm with trust, in which peers are
            authenticated.
        invitation: The invitation or ticket that the swarm's owner sent, for a swarm with trust.
        owner: The public key of the swarm's owner, gossamer-ed25519:…
        network: A trained network (safetensors) whose values are averaged with those of the swarm.
        replace: Replace a peer of the same name that may still be running on another device.
        log_json: Write each log line as a JSON object: time, level, logger, message.
        out: The folder for the checkpoint and the results; results/SWARM-NAME if left out.
        again: Start from the beginning, even if the peer has finished.
    """
    from ...gossip import without_passwords
    from ..live.device import load_join
    from ..live.enrolment import Enrolment

    credentials = {
        "identity": identity and str(identity),
        "invitation": invitation and str(invitation),
        "owner": owner,
    }
    enrolled: Enrolment | None = None
    folder = out
    if enrolment is not None:
        enrolled_options = {"broker": broker, "swarm": swarm, "name": name, **credentials}
        enrolled_options |= {"ca": connection.ca, "password-file": connection.password_file}
        if unusable := [key for key, value in enrolled_options.items() if value is not None]:
            raise ConfigError(f"{enrolment}: has {unusable[0]} already: leave out --{unusable[0]}")
        enrolled = Enrolment.read(enrolment)
        swarm, broker = enrolled.swarm, enrolled.broker
        folder = out or Path("results") / f"{swarm}-{enrolled.label}"
        connection = dataclasses.replace(connection, ca=enrolled.paths(folder).get("ca"))
        if config is None and entry is None:
            raise ConfigError(
                f"{enrolment}: does not say what the device learns: give --entry module:function, or "
                "--config FILE"
            )
        if config is not None and entry is not None:
            raise ConfigError(
                "join: give either --entry or --config, which names an entry point too"
            )
        config = config or enrolment
    elif broker is None or swarm is None or config is None:
        raise ConfigError(
            "join: give the file that gossamer enrol wrote, NAME.gossamer, or --broker, --swarm and --config"
        )
    elif entry is not None:
        raise ConfigError("join: --entry is for an enrolment; write it into the file of --config")
    else:
        credentials["swarm"] = swarm
    import_from(config.parent)  # the file may name an entry point in a module beside it
    plan = load_join(
        config, connection.address(broker), entry=entry, enrolment=enrolled, folder=folder,
        name=name, network=network, password_file=connection.password_file,
        replace=replace or None, **credentials,
    )  # fmt: skip
    spec = plan.spec
    folder = folder or Path("results") / f"{swarm}-{spec.name}"
    if show_settings:
        from .explain import show_join

        show_join(plan, out=(out, folder))
        return
    require_folder(folder)
    require_module(spec.entry)
    make_folder(folder)
    if enrolled is not None:
        enrolled.unpack(folder)
    if not _may_start(folder, spec, again):
        return
    log_to_stderr(as_json=log_json)
    url = without_passwords(plan.broker.url)
    _log.info("peer %s: loading torch, then connecting to %s for swarm %s", spec.name, url, swarm)
    load_torch()
    from ...peer import ProcessSpec, run_guarded

    port = metrics.metrics_port
    metrics_address = None if port is None else (metrics.metrics_host, port)
    code = run_guarded(
        ProcessSpec(plan.broker, str(folder), [spec]),
        metrics=metrics_address,
        advice=partial(_advice, enrolment=enrolment, config=config),
    )
    if code:
        raise typer.Exit(code)
    suffixes = ("safetensors", "jsonl", "report.json")
    console.print_written([folder / f"{spec.name}.{suffix}" for suffix in suffixes])


def _advice(error: GossamerError, *, enrolment: Path | None, config: Path) -> str:
    """Return which file to mend, if that is where an error of a device comes from."""
    from ...gossip import TransportError

    if isinstance(error, ArgumentsError):
        return f" (key 'arguments' of {config})"
    if enrolment is not None and isinstance(error, TransportError) and error.is_refusal:
        return (
            f"; password and authority (CA) are those in {enrolment}: if they are wrong, the swarm's owner "
            "has the right ones"
        )
    return ""


def _may_start(folder: Path, spec: PeerSpec, again: bool) -> bool:
    """Return False, and print why, if the peer has finished. With --again, delete report and checkpoint."""
    report, checkpoint = folder / f"{spec.name}.report.json", folder / f"{spec.name}.checkpoint"
    if again:
        load_torch()
        from ...peer import CheckpointLock

        lock = CheckpointLock(checkpoint)
        lock.acquire()  # raises if the peer is running: its files must stay
        try:
            report.unlink(missing_ok=True)
            checkpoint.unlink(missing_ok=True)
        finally:
            lock.release()
        return True
    try:
        rounds = int(json.loads(report.read_text("utf-8"))["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        return True  # there is no report, or the peer was killed while it wrote it
    if checkpoint.exists():
        return True  # it was stopped before it had left, and has to publish its goodbye again
    if rounds >= spec.settings.last_round:
        console.say(
            f"peer {spec.name} has finished its {rounds} rounds (report: {report}); use --again to start "
            "from the beginning"
        )
        return False
    console.warn(
        f"peer {spec.name} left after {rounds} of {spec.settings.rounds} rounds (report: {report}); it "
        "starts from the beginning"
    )
    return True


# --- a device that systemd keeps running ------------------------------------------------------------

service_app = command_group(
    no_args_is_help=True,
    help="Keep a device's peer or a broker running, after crashes and reboots too.",
)


@command("install", of=service_app)
def install_command(
    device: Annotated[Path | None, typer.Argument()] = None,
    options: Annotated[list[str] | None, typer.Argument(metavar="OPTION")] = None,
    *,
    enrolled: Path | None = None,
    entry: str | None = None,
    broker: str | None = None,
    swarm: str | None = None,
    memory: str = "1G",
    user: str | None = None,
    out: Path | None = None,
) -> None:
    """Write a unit with which systemd runs `gossamer join` or `gossamer broker`, and print how to start it.

    systemd starts the peer at boot, again after a crash, if it gives no sign of life for two minutes, and
    if the broker was not there; it does not where a person must act first (exit code 2), nor where another
    device has replaced this one (exit code 4). It runs in the present folder, as `gossamer join` would
    here: run this where the device's module is; results are written there too. A broker is started at boot
    and again after any failure. Neither may write anywhere else, but for --out of gossamer join.

    Args:
        device: The device's file: NAME.gossamer of gossamer enrol, or a TOML file.
        options: Further options of gossamer join, or of gossamer broker, after two dashes, as in
            -- --config device.toml --metrics-port 9464 --log-json.
        enrolled: Instead of a device's file: run the broker for the devices that gossamer enrol has enrolled
            in this folder.
        entry: With NAME.gossamer: module:function that makes the device's learner.
        broker: With a TOML file: the broker's address.
        swarm: With a TOML file: the swarm's name.
        memory: The most memory that it may use, as in 512M or 2G; systemd kills it beyond that.
        user: The user who runs it; the present one if left out.
        out: The file to write; gossamer-NAME.service in this folder if left out, for a broker
            gossamer-broker-FOLDER.service.
    """
    from ...peer import unit_text

    if not re.fullmatch(r"[1-9]\d*[KMGT]?", memory):
        raise ConfigError(f"--memory {memory}: write a number with K, M, G or T, as in 512M")
    if enrolled is not None:
        options = [*([str(device)] if device else []), *(options or [])]
        given = {"--entry": entry, "--broker": broker, "--swarm": swarm}
        words, writes = _broker_service(enrolled, given, options)
        name, what = f"broker-{enrolled.resolve().name}", f"broker of {enrolled.resolve().name}"
    elif device is None:
        raise ConfigError(
            "service install: give the device's file, or --enrolled FOLDER to run its broker"
        )
    else:
        words, writes = _peer_service(device, entry, broker, swarm, options or [])
        name, what = device.stem, f"peer of {device.name}"
    user = user or getuser()
    unit = unit_text(
        f"Gossamer {what}",
        [sys.executable, "-m", "gossamer", *words],
        Path.cwd(),
        user=user,
        memory=memory,
        writes=writes,
        is_broker=enrolled is not None,
    )
    path = out or Path(f"gossamer-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.service")
    write_bytes(path, unit.encode())
    console.print_written([path])
    if user == "root":
        console.warn(f"{path}: runs as root, which it does not need: name another user with --user")
    start = f"sudo systemctl enable --now {path.stem}"
    console.say(f"start it with: sudo cp {path} /etc/systemd/system/ && {start}")
    console.say(f"its log: journalctl -u {path.stem} -f")


def _broker_service(
    folder: Path, given: Mapping[str, str | None], options: list[str]
) -> tuple[list[str], list[Path]]:
    """Return the words after `gossamer` that run a broker, and the folders that it writes to."""
    from .broker import settings_for_enrolled

    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"service install: leave out {option}, which is for a device's peer")
    settings_for_enrolled(folder, None, None, None)  # refuses what the broker would
    words = ["broker", "--enrolled", str(folder.resolve()), *options]
    _check_options("broker", words[1:])
    return words, [folder.resolve() / "broker"]  # in which it makes its store


def _peer_service(
    device: Path, entry: str | None, broker: str | None, swarm: str | None, options: list[str]
) -> tuple[list[str], list[Path]]:
    """Return the words after `gossamer` that run a device's peer, and further folders that it writes to."""
    from ..live.enrolment import ENDING

    if not device.is_file():
        raise ConfigError(f"{device}: there is no such file")
    if device.suffix == ENDING:
        required, refused = {"--entry": entry}, {"--broker": broker, "--swarm": swarm}
        if "--config" in options:  # that file names an entry point
            required, refused = {}, {"--entry": entry, **refused}
        file = [str(device.resolve())]
    else:
        required, refused = {"--broker": broker, "--swarm": swarm}, {"--entry": entry}
        file = ["--config", str(device.resolve())]
    for option, value in required.items():
        if value is None:
            raise ConfigError(f"{device}: {option} is missing, which gossamer join needs")
    for option, value in refused.items():
        if value is not None:
            raise ConfigError(
                f"{device}: leave out {option}, which gossamer join does not take here"
            )
    if entry is not None:
        import_from(device.parent)
        require_module(entry)
    words = ["join", *file, *(word for pair in required.items() for word in pair if word), *options]
    out = _check_options("join", words[1:]).get("out")
    if out is None or Path(out).resolve().is_relative_to(Path.cwd()):
        return words, []
    return words, [make_folder(Path(out)).resolve()]  # systemd starts nothing without the folder


def _check_options(name: str, words: list[str]) -> dict[str, Any]:
    """Return the values of a command's options; words that it would refuse are refused here."""
    commands: Any = typer.main.get_command(console.app)
    return commands.commands[name].make_context(f"gossamer {name}", list(words)).params
