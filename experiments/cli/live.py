"""The commands of live swarms: `gossamer swarm`, `gossamer join`, `gossamer broker`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.logs import log_to_stderr

from ..errors import ConfigError
from ..results import make_folder, require_folder
from . import console
from .console import Out, Output, command, load_torch, report_interruption

if TYPE_CHECKING:
    from ...peer import BrokerAddress, BrokerSettings, BrokerTls, PeerSpec, RuleFiles
    from ..live.layout import JoinConfig

OWN_BROKER = "mqtt://127.0.0.1"
"""A placeholder for the URL of the broker that the swarm would start, for --show-settings."""
PASSWORD_VARIABLE = "GOSSAMER_BROKER_PASSWORD"
"""The environment variable that `broker_password` reads."""

Port = Annotated[int, typer.Option(min=0, max=65535)]
PortIfGiven = Annotated[int | None, typer.Option(min=0, max=65535)]


# --- the connection to a broker ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Options of the connection to a broker.

    Args:
        certificate: The file of this device's own certificate, for brokers that require one.
        key: The file of the private key of --certificate.
        mqtt: The version of MQTT: 3.1.1 (default) or 5.
        max_packet: The largest packet that the broker accepts, in bytes; if left out, it is found by trial.
        keepalive: Seconds without traffic before the connection to the broker is tested.
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

    address = Address.parse(url)
    if file is None:
        lacks_password = address.username is not None and address.password is None
        return environment.get(PASSWORD_VARIABLE) or None if lacks_password else None
    if address.password is not None:
        raise ConfigError(f"{file}: the broker's URL has a password too; leave one of them out")
    if address.username is None:
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


@command("swarm")
def swarm_command(
    config: Path,
    *,
    broker: str | None = None,
    watch: bool = False,
    connection: ConnectionOptions,
    output: Output,
    show_settings: bool = False,
) -> None:
    """Run a swarm of live peers as processes on this machine, with a table of their progress.

    Every peer's network is saved as safetensors, its metrics as JSON lines. A peer that crashes is
    restarted. Every run gets its own folder: results/NAME-live/001, 002, … After Ctrl-C, each peer hands
    its values over to the others and leaves.

    Args:
        config: A TOML file; the same as for simulate.
        broker: The address of a running broker (mqtt://, mqtts://, ws:// or wss://), or nats or mosquitto
            to start one (the default).
    """
    from ...peer import broker_kind
    from ..config.tables import load_config
    from .page import require_bokeh

    if watch:
        require_bokeh()
    settings = load_config(config)
    console.note_defaults(config, settings)
    if settings.time is not None or settings.sweep:
        raise ConfigError(
            f"{config}: [time] and [sweep] are for gossamer simulate and gossamer sweep; leave them out "
            "for live peers"
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
    default = Path("results") / f"{settings.name}-live"
    if show_settings:
        from .show_settings import show_swarm

        address = address or connection.address(OWN_BROKER)
        starts_one = broker is None
        show_swarm(settings, str(config), address, starts_one=starts_one, out=(output.out, default))
        return
    load_torch()  # after the config is checked: importing torch takes seconds
    from ..live.run import broker_for, draw_swarm, print_outcome, run_live

    results = output.results(default, "swarm")
    with results.opened() as folder:
        to_keep: tuple[str, ...] = ()
        if settings.trust.kind == "none":
            console.warn(
                "trust is off: anyone who can connect to the broker can read and forge messages"
            )
        else:
            to_keep = ("trust",)  # written before results.begin, which deletes all other files
            console.warn(f"trust: temporary keys and invitations are in {folder / 'trust'}")
        with report_interruption(folder), broker_for(broker) as used_broker:
            outcome = run_live(
                settings,
                folder,
                address or connection.address(used_broker.url),
                source=str(config),
                watch=watch,
                on_planned=lambda: results.begin(keep=to_keep),
            )
        print_outcome(settings, outcome)
        pictures = draw_swarm(settings, folder)
        console.print_written([outcome.records, folder / "outcome.json", *pictures])
        console.offer_report(folder)


@command("join")
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
        broker: Without such a file: the broker's address: mqtt://, mqtts://, ws:// or wss://.
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
    from ...peer import ProcessSpec, run_guarded
    from ..live.enrolment import Enrolment
    from ..live.layout import device_of, load_join

    credentials = {
        "identity": identity and str(identity),
        "invitation": invitation and str(invitation),
        "owner": owner,
    }
    device: JoinConfig | None = None
    if enrolment is not None:
        given = {"--broker": broker, "--swarm": swarm, "--name": name, **credentials}
        given |= {"--ca": connection.ca, "--password-file": connection.password_file}
        if unusable := [key for key, value in given.items() if value is not None]:
            raise ConfigError(
                f"{enrolment}: has {unusable[0].strip('-')} already: leave out --{unusable[0].strip('-')}"
            )
        enrolled = Enrolment.read(enrolment)
        swarm, broker = enrolled.swarm, enrolled.broker
        out = out or Path("results") / f"{swarm}-{enrolled.label}"
        files = enrolled.unpack(require_folder(out))
        connection = dataclasses.replace(
            connection, ca=files.get("ca"), password_file=files["password"]
        )
        credentials = {
            "identity": str(files["identity"]),
            "invitation": str(files["invitation"]),
            "owner": enrolled.owner,
        }
        if config is None:
            device, config = device_of(enrolled, entry, enrolment), enrolment
        elif entry is not None:
            raise ConfigError(
                "join: give either --entry or --config, which names an entry point too"
            )
    elif broker is None or swarm is None or config is None:
        raise ConfigError(
            "join: give the file that gossamer enrol wrote, NAME.gossamer, or --broker, --swarm and --config"
        )
    elif entry is not None:
        raise ConfigError("join: --entry is for an enrolment; write it into the file of --config")
    # The file may name an entry point in a module beside it.
    sys.path.insert(0, str(config.parent.resolve()))
    plan = load_join(
        config, connection.address(broker), join=device, name=name, network=network,
        password_file=connection.password_file, swarm=swarm, replace=replace or None, **credentials,
    )  # fmt: skip
    spec = plan.spec
    default = Path("results") / f"{swarm}-{spec.name}"
    if show_settings:
        from .show_settings import show_join

        show_join(plan, out=(out, default))
        return
    load_torch()
    folder = make_folder(out or default)
    if not _may_start(folder, spec, again):
        return
    log_to_stderr(as_json=log_json)
    port = metrics.metrics_port
    served = None if port is None else (metrics.metrics_host, port)
    code = run_guarded(ProcessSpec(plan.broker, str(folder), [spec]), metrics=served)
    if code:
        raise typer.Exit(code)
    suffixes = ("safetensors", "jsonl", "report.json")
    console.print_written([folder / f"{spec.name}.{suffix}" for suffix in suffixes])


def _may_start(folder: Path, spec: PeerSpec, again: bool) -> bool:
    """Return False, and print why, if the peer has finished. With --again, delete report and checkpoint."""
    report, checkpoint = folder / f"{spec.name}.report.json", folder / f"{spec.name}.checkpoint"
    if again:
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
        return (
            True  # it was stopped before it had left: it publishes its goodbye (last status) again
        )
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


# --- gossamer broker --------------------------------------------------------------------------------


@command("broker")
def broker_command(
    *,
    host: str | None = None,
    port: PortIfGiven = None,
    websockets: PortIfGiven = None,
    kind: str | None = None,
    embedded: bool = False,
    tls: Path | None = None,
    tls_name: list[str] | None = None,
    user: list[str] | None = None,
    acl: Path | None = None,
    swarm: str | None = None,
    peer: list[str] | None = None,
    observer: list[str] | None = None,
    discovery: bool = False,
    enrolled: Path | None = None,
) -> None:
    """Run an MQTT broker until Ctrl-C: nats-server, which is installed with gossamer, or mosquitto.

    With --acl every peer has a password, cannot publish under another peer's name, and cannot read
    messages to other peers.

    Args:
        host: The address to listen on; 127.0.0.1 if left out, or as the devices of --enrolled need it.
        port: The port to listen on, 1883 if left out; 0 chooses a free one.
        websockets: Also listen for websockets on this port (nats).
        kind: nats or mosquitto; if left out, the first one that is installed.
        embedded: The same as --kind nats.
        tls: Use TLS, with the certificate authority in this folder, which is created at the first start.
        tls_name: With --tls: another name or address by which devices reach this machine, for the
            certificate; repeat for more. The machine's own names and addresses are always included.
        user: NAME:PASSWORD of a user that may connect; repeat for more.
        acl: Write access rules and passwords for a swarm into this folder, and enforce them.
        swarm: With --acl: the swarm's name.
        peer: With --acl: a peer's full name (label@id); repeat for more.
        observer: With --acl: the name of a user that may only read; repeat for more.
        discovery: With --acl: peers with `discovery = true` may appear in Home Assistant; name its user with
            --observer.
        enrolled: Serve the devices that gossamer enrol has enrolled in this folder, with their passwords
            and with TLS; devices that are enrolled later may connect without a restart.
    """
    from ...peer import BROKER_KINDS, BrokerSettings, broker_kind, serve

    if embedded and kind not in (None, "nats"):
        raise ConfigError(f"broker: --embedded means --kind nats: leave it or --kind {kind} out")
    program = broker_kind("nats" if embedded else kind)
    if kind is not None and program is None:
        raise ConfigError(f"broker: --kind {kind}: write {' or '.join(BROKER_KINDS)}")
    if enrolled is not None:
        if tls or user or acl or swarm or peer or observer or tls_name or discovery:
            raise ConfigError(
                "broker: --enrolled has users and certificates of its own: leave others out"
            )
        settings = _settings_for_enrolled(enrolled, host, port, websockets)
    else:
        host, port = host or "127.0.0.1", 1883 if port is None else port
        rules = _rules(
            acl, swarm, peer or [], observer or [], bool(user), port, discovery=discovery
        )
        names = tls_name or []
        settings = BrokerSettings(
            host=host,
            port=port,
            websocket_port=websockets,
            users=dict(map(_user, user or [])),
            tls=_certificates(tls, host, names),
            public_name=names[0] if names else None,
            rules=rules,
        )
    if code := serve(settings, kind=program):
        raise typer.Exit(code)


def _settings_for_enrolled(
    folder: Path, host: str | None, port: int | None, websockets: int | None
) -> BrokerSettings:
    """Return the settings of a broker for the devices that were enrolled in a folder."""
    from ...gossip import Address
    from ...peer import BrokerSettings, BrokerTls, is_loopback, read_rules
    from ..live.enrolment import read_described

    address = Address.parse(read_described(folder)["broker"])
    files = folder / "broker"
    tls = None
    if address.tls:
        tls = BrokerTls(files / "ca.pem", files / "server.pem", files / "server.key")
    return BrokerSettings(
        host=host or ("127.0.0.1" if is_loopback(address.host) else "0.0.0.0"),
        port=address.port if port is None else port,
        websocket_port=websockets,
        tls=tls,
        public_name=address.host,
        rules=read_rules(files),
    )


def _certificates(folder: Path | None, host: str, names: list[str]) -> BrokerTls | None:
    """Load or create the broker's certificates, and print which file peers need.

    host: the address to listen on. names: further names and addresses for the certificate.
    """
    if folder is None:
        if names:
            raise ConfigError("broker: --tls-name needs --tls FOLDER")
        return None
    from ...peer import (
        WILDCARD_ADDRESSES,
        Authority,
        BrokerTls,
        is_host,
        is_loopback,
        machine_names,
    )

    for name in names:
        if not is_host(name):
            raise ConfigError(
                f"broker: --tls-name {name!r} is neither a host name nor an address: write "
                "broker.lan or 192.168.1.5, without a port"
            )
    authority = Authority.open(require_folder(folder))
    listen_names = [host] if is_host(host) and host not in WILDCARD_ADDRESSES else []
    all_names = [*machine_names(), *listen_names, *names]
    if reason := authority.why_renew_server(all_names):
        authority.issue_server(all_names)
        console.say(f"new server certificate: {reason}")
    if is_loopback(host):
        console.say(f"listens only on {host}: use --host 0.0.0.0 to let other devices connect")
    console.say(f"peers need: --ca {authority.certificate} (copy it to other devices)")
    return BrokerTls(authority.certificate, authority.server.certificate, authority.server.key)


def _rules(
    folder: Path | None,
    swarm: str | None,
    peers: list[str],
    observers: list[str],
    users: bool,
    port: int,
    *,
    discovery: bool,
) -> RuleFiles | None:
    """Write the access rules of --acl, and print where each password is; None without --acl.

    users: whether --user was given, which cannot be combined with --acl.
    """
    if folder is None:
        if swarm or peers or observers or discovery:
            raise ConfigError(
                "broker: --swarm, --peer, --observer and --discovery need --acl FOLDER"
            )
        return None
    if users:
        raise ConfigError("broker: --acl creates its own passwords; leave --user out")
    if swarm is None or not peers:
        raise ConfigError("broker: --acl needs --swarm NAME and at least one --peer NAME")
    from ...peer import write_rules

    files = write_rules(folder, swarm, peers, observers=observers, port=port, discovery=discovery)
    for name, path in files.secrets.items():
        console.say(f"password of {name}: {path}")
    return files


def _user(text: str) -> tuple[str, str]:
    """Split a value of --user into name and password."""
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise ConfigError(f"--user {text!r}: write NAME:PASSWORD")
    return name, password
