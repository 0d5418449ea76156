"""The commands of live swarms: `gossamer swarm`, `gossamer join`, `gossamer broker`."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ..results import make_folder, require_folder
from . import console
from .console import Out, Output, command, load_torch, report_interruption

if TYPE_CHECKING:
    from ...peer import BrokerAddress, BrokerTls, PeerSpec, RuleFiles

OWN_BROKER = "mqtt://127.0.0.1"
"""Stands for the broker that a swarm starts for itself, where its settings are shown alone."""
VARIABLE = "GOSSAMER_BROKER_PASSWORD"

Port = Annotated[int, typer.Option(min=0, max=65535)]
PortIfGiven = Annotated[int | None, typer.Option(min=0, max=65535)]


# --- how to reach a broker --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Link:
    """Options of the connection to a broker.

    Args:
        certificate: Our own certificate, if the broker asks.
        key: The key of our own certificate.
        mqtt: Protocol version: 3.1.1 (default) or 5.
        max_packet: Bytes of the largest packet that the broker takes; found out if left out.
        keepalive: Seconds of silence before the connection to the broker is tested.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    mqtt: str | None = None
    max_packet: int | None = None
    keepalive: int | None = None
    password_file: Path | None = None

    def given(self) -> dict[str, object]:
        """Return the options that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def address(self, url: str) -> BrokerAddress:
        """Return the broker at a URL, reached with these options but without its password."""
        from pydantic import ValidationError

        from ...peer import BrokerAddress

        given = {
            "version" if name == "mqtt" else name: str(value) if isinstance(value, Path) else value
            for name, value in self.given().items()
            if name != "password_file"
        }
        try:
            return BrokerAddress(url, **given)
        except ValidationError as error:
            mistake = error.errors()[0]
            name = {"version": "mqtt", "url": "broker"}.get(key := str(mistake["loc"][0]), key)
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {mistake['input']}: {mistake['msg']}") from None


def broker_password(
    url: str, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """The password that goes with a broker's URL: the file's first line, else the environment's.

    None where the URL has its own, or no user name: then the variable is meant for another broker. A command
    line, and so a URL in it, shows in the list of processes.
    """
    from ...gossip import Address  # which loads what takes long

    address = Address.parse(url)
    if file is None:
        wanted = address.username is not None and address.password is None
        return environment.get(VARIABLE) or None if wanted else None
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
    link: Link,
    output: Output,
    show_settings: bool = False,
) -> None:
    """Run a swarm of live peers as processes of this machine, and watch it in one table.

    Every peer's network is left as safetensors, its metrics as JSON lines; crashed peers are
    restarted. Every run has a folder of its own: results/NAME-live/001, 002, … Ctrl-C lets the peers
    hand over and leave.

    Args:
        config: A TOML file; the same as for simulate.
        broker: mqtt://, mqtts://, ws:// or wss:// address, or nats or mosquitto to start one (the
            default).
    """
    from ...peer import broker_kind
    from ..config.tables import load_config

    settings = load_config(config)
    console.note_defaults(config, settings)
    if settings.time is not None or settings.sweep:
        raise ConfigError(
            f"{config}: [time] and [sweep] are for gossamer simulate and gossamer sweep; leave them out "
            "for live peers"
        )
    address = None
    if broker is not None and broker_kind(broker) is None:
        address = link.address(broker)
        if password := broker_password(address.url, link.password_file):
            address = address.updated(password=password)
    elif needless := [name for name in link.given() if name not in ("max_packet", "keepalive")]:
        option = needless[0].replace("_", "-")
        raise ConfigError(f"--{option}: is for a broker named by --broker; leave it out")
    default = Path("results") / f"{settings.name}-live"
    if show_settings:
        from .show_settings import show_swarm

        shown = address or link.address(OWN_BROKER)
        starts_one = broker is None
        show_swarm(settings, str(config), shown, starts_one=starts_one, out=(output.out, default))
        return
    load_torch()  # only now, so that a mistake in the config is told without waiting for it
    from ..live.run import broker_for, draw_swarm, print_outcome, run_live

    results = output.results(default, "swarm")
    with results.opened() as folder:
        kept: tuple[str, ...] = ()
        if settings.trust.kind == "none":
            console.warn("trust is off: whoever reaches the broker can read and forge")
        else:
            kept = ("trust",)  # made before the swarm begins
            console.warn(f"trust: throw-away keys and invitations in {folder / 'trust'}")
        with report_interruption(folder), broker_for(broker) as own:
            outcome = run_live(
                settings,
                folder,
                address or link.address(own.url),
                source=str(config),
                on_planned=lambda: results.begin(keep=kept),
            )
        print_outcome(settings, outcome)
        pictures = draw_swarm(settings, folder)
        console.print_written([outcome.records, folder / "outcome.json", *pictures])


@command("join")
def join_command(
    *,
    broker: str,
    swarm: str,
    config: Path,
    name: str | None = None,
    link: Link,
    identity: Path | None = None,
    invitation: Path | None = None,
    owner: str | None = None,
    network: Path | None = None,
    replace: bool = False,
    out: Out = None,
    again: bool = False,
    show_settings: bool = False,
) -> None:
    """Join a swarm from this device: train on its own data, gossip, take the network home.

    Started again in the same folder after a crash, the peer goes on from its checkpoint. A peer that has
    finished says so and ends at once, so that a service manager may restart it at will.

    Args:
        broker: mqtt://, mqtts://, ws:// or wss:// address.
        swarm: The swarm's name.
        config: The peer's TOML file.
        name: The peer's name, if not in the file.
        identity: Our key file (gossamer keygen): the swarm has trust.
        invitation: The invitation or ticket that the owner sent.
        owner: The owner's public key, gossamer-ed25519:…
        network: A network trained before (safetensors): what it knows counts too.
        replace: Take the place of a device of this name that may still be alive.
        out: The device's folder; results/SWARM-NAME if left out.
        again: Begin anew, though the peer has finished.
    """
    from ...peer import HostSpec, run_guarded
    from ..live.layout import load_join

    sys.path.insert(0, str(config.parent.resolve()))  # an entry point may stand beside its file
    plan = load_join(
        config, link.address(broker), name=name, network=network, password_file=link.password_file,
        swarm=swarm, identity=identity and str(identity), invitation=invitation and str(invitation),
        owner=owner, replace=replace or None,
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
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    code = run_guarded(HostSpec(plan.broker, str(folder), [spec]))
    if code:
        raise typer.Exit(code)
    endings = ("safetensors", "jsonl", "report.json")
    console.print_written([folder / f"{spec.name}.{ending}" for ending in endings])


def _may_start(folder: Path, spec: PeerSpec, again: bool) -> bool:
    """Return False, and say so, if the peer has finished. --again removes its report and checkpoint."""
    report, checkpoint = (folder / f"{spec.name}.{end}" for end in ("report.json", "checkpoint"))
    if again:
        from ...peer import CheckpointLock

        lock = CheckpointLock(checkpoint)
        lock.acquire()  # a running peer keeps its files
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
        return True  # its goodbye is said again
    if rounds >= spec.settings.rounds:
        console.say(
            f"peer {spec.name} has finished its {rounds} rounds (report: {report}); start it with --again "
            "to begin anew"
        )
        return False
    console.warn(
        f"peer {spec.name} left after {rounds} of {spec.settings.rounds} rounds (report: {report}); it "
        "begins anew"
    )
    return True


# --- gossamer broker --------------------------------------------------------------------------------


@command("broker")
def broker_command(
    *,
    host: str = "127.0.0.1",
    port: Port = 1883,
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
) -> None:
    """Run a broker until Ctrl-C: nats-server, which is installed with gossamer, or mosquitto.

    With --acl every peer has a password, writes under its own name alone and reads its own mail.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        websockets: Also listen for websockets on this port (nats).
        kind: nats or mosquitto; if left out, the first that is found.
        embedded: The same as --kind nats.
        tls: Use TLS, with the certificate authority in this folder; made at the first start.
        tls_name: --tls: a name or address by which devices reach this machine; repeat for more. Its own
            names and addresses are always covered.
        user: NAME:PASSWORD that may come in; repeat for more.
        acl: Write a swarm's rules and passwords into this folder, and keep to them.
        swarm: --acl: the swarm's name.
        peer: --acl: a peer's whole name (label@id); repeat.
        observer: --acl: somebody who may only watch; repeat.
    """
    from ...peer import KINDS, BrokerSettings, broker_kind, serve

    if embedded and kind not in (None, "nats"):
        raise ConfigError(f"broker: --embedded is --kind nats: leave it or --kind {kind} out")
    chosen = broker_kind("nats" if embedded else kind)
    if kind is not None and chosen is None:
        raise ConfigError(f"broker: --kind {kind}: write {' or '.join(KINDS)}")
    rules = _rules(acl, swarm, peer or [], observer or [], bool(user), port)
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
    if code := serve(settings, kind=chosen):
        raise typer.Exit(code)


def _certificates(folder: Path | None, host: str, names: list[str]) -> BrokerTls | None:
    """Find or make the broker's certificates, and say what devices need of them."""
    if folder is None:
        if names:
            raise ConfigError("broker: --tls-name needs --tls FOLDER")
        return None
    from ...peer import EVERYWHERE, Authority, BrokerTls, is_host, is_loopback, machine_names

    for name in names:
        if not is_host(name):
            raise ConfigError(
                f"broker: --tls-name {name!r} is neither a host name nor an address: write "
                "broker.lan or 192.168.1.5, without a port"
            )
    authority = Authority.open(require_folder(folder))
    listening = [host] if is_host(host) and host not in EVERYWHERE else []
    wanted = [*machine_names(), *listening, *names]
    if reason := authority.why_renew_server(wanted):
        authority.issue_server(wanted)
        console.say(f"new server certificate: {reason}")
    if is_loopback(host):
        console.say(f"listens on {host} alone: --host 0.0.0.0 lets other devices connect")
    console.say(f"peers need: --ca {authority.certificate} (copy it to other devices)")
    return BrokerTls(authority.certificate, authority.server.certificate, authority.server.key)


def _rules(
    folder: Path | None,
    swarm: str | None,
    peers: list[str],
    observers: list[str],
    users: bool,
    port: int,
) -> RuleFiles | None:
    """Write the rules that were asked for, and say where each password is."""
    if folder is None:
        if swarm or peers or observers:
            raise ConfigError("broker: --swarm, --peer and --observer need --acl FOLDER")
        return None
    if users:
        raise ConfigError("broker: --acl makes passwords of its own; leave --user out")
    if swarm is None or not peers:
        raise ConfigError("broker: --acl needs --swarm NAME and at least one --peer NAME")
    from ...peer import write_rules

    files = write_rules(folder, swarm, peers, observers=observers, port=port)
    for name, path in files.secrets.items():
        console.say(f"password of {name}: {path}")
    return files


def _user(text: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise ConfigError(f"--user {text!r}: write NAME:PASSWORD")
    return name, password
