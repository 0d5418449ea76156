"""The commands of live swarms: `gossamer swarm`, `gossamer join`, `gossamer broker`."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, Stopped
from ..results import make_folder, require_folder
from . import console
from .options import (
    OPTIONS,
    Ca,
    Certificate,
    Force,
    Keepalive,
    Key,
    MaxPacket,
    Mqtt,
    Out,
    PasswordFile,
    Url,
    broker_address,
    broker_password,
    load_torch,
    results_for,
)

if TYPE_CHECKING:
    from ...peer import BrokerTls, PeerSpec, RuleFiles

PORTS = 65535
"""The largest number that a port can have."""
OWN_BROKER = "mqtt://127.0.0.1"
"""Stands for the broker that a swarm starts for itself, where its settings are shown alone."""

ShowSettings = Annotated[
    bool,
    typer.Option(
        "--show-settings", help="Print every setting and where it comes from, and stop there."
    ),
]


def swarm_command(
    config: Annotated[Path, typer.Argument(help="A TOML file; the same as for simulate.")],
    broker: Url = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    mqtt: Mqtt = None,
    max_packet: MaxPacket = None,
    keepalive: Keepalive = None,
    password_file: PasswordFile = None,
    out: Out = None,
    force: Force = False,
    show_settings: ShowSettings = False,
) -> None:
    """Run a swarm of live peers as processes of this machine, and watch it in one table.

    Every peer's network is left as safetensors, its metrics as JSON lines; crashed peers are
    restarted. Every run has a folder of its own: results/NAME-live/001, 002, … Ctrl-C lets the peers
    hand over and leave.
    """
    from ..config.tables import load_config

    settings = load_config(config)
    console.note_defaults(config, settings)
    if settings.time is not None or settings.sweep:
        raise ConfigError(
            f"{config}: [time] and [sweep] are for gossamer simulate and gossamer sweep; leave them out "
            "for live peers"
        )
    named = {"ca": ca, "certificate": certificate, "key": key, "version": mqtt}
    from ...peer import broker_kind

    starts_own = broker is None or broker_kind(broker) is not None
    if starts_own:
        for option, value in {**named, "password-file": password_file}.items():
            if value is not None:
                option = OPTIONS.get(option, option)
                raise ConfigError(f"--{option}: is for a broker named by --broker; leave it out")
    given = {**named, "max_packet": max_packet, "keepalive": keepalive}
    address = None if starts_own else broker_address(str(broker), **given)
    if address is not None and (password := broker_password(address.url, password_file)):
        address = address.updated(password=password)
    folder = out or Path("results") / f"{settings.name}-live"
    if show_settings:
        from .show_settings import show_swarm

        stated = {key for key, value in (("broker", broker), ("out", out)) if value is not None}
        shown = address or broker_address(OWN_BROKER, **given)
        show_swarm(settings, str(config), folder, shown, stated)
        return
    load_torch()  # only now, so that a mistake in the config is told without waiting for it
    from ..live.run import broker_for, draw_swarm, print_outcome, run_live

    results = results_for(out, Path("results") / f"{settings.name}-live", "swarm", force=force)
    with results.opened() as folder:
        kept: tuple[str, ...] = ()
        if settings.trust.kind == "none":
            console.err.print("trust is off: whoever reaches the broker can read and forge")
        else:
            kept = ("trust",)  # made before the swarm begins
            console.err.print(f"trust: throw-away keys and invitations in {folder / 'trust'}")
        with report_interruption(folder), broker_for(broker) as own:
            address = address or broker_address(own.url, **given)
            outcome = run_live(
                settings,
                folder,
                address,
                source=str(config),
                on_planned=lambda: results.begin(keep=kept),
            )
        print_outcome(settings, outcome)
        console.print_written(
            [outcome.records, folder / "outcome.json", *draw_swarm(settings, folder)]
        )


@contextlib.contextmanager
def report_interruption(folder: Path) -> Iterator[None]:
    """A live swarm that is interrupted is over: its peers have left, and cannot go on another time."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted; records, networks and reports are kept in {folder}; the next run starts anew"
        ) from None


def join_command(
    broker: Annotated[str, typer.Option(help="mqtt://, mqtts://, ws:// or wss:// address.")],
    swarm: Annotated[str, typer.Option(help="The swarm's name.")],
    config: Annotated[Path, typer.Option(help="The peer's TOML file.")],
    name: Annotated[str | None, typer.Option(help="The peer's name, if not in the file.")] = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    mqtt: Mqtt = None,
    max_packet: MaxPacket = None,
    keepalive: Keepalive = None,
    password_file: PasswordFile = None,
    identity: Annotated[
        Path | None, typer.Option(help="Our key file (gossamer keygen): the swarm has trust.")
    ] = None,
    invitation: Annotated[
        Path | None, typer.Option(help="The invitation or ticket that the owner sent.")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(help="The owner's public key, gossamer-ed25519:…")
    ] = None,
    network: Annotated[
        Path | None,
        typer.Option(help="A network trained before (safetensors): what it knows counts too."),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Take the place of a device of this name that may still be alive."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The device's folder; results/SWARM-NAME if left out."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Begin anew, though the peer has finished.")
    ] = False,
    show_settings: ShowSettings = False,
) -> None:
    """Join a swarm from this device: train on its own data, gossip, take the network home.

    Started again in the same folder after a crash, the peer goes on from its checkpoint. A peer that has
    finished says so and ends at once, so that a service manager may restart it at will.
    """
    from ...peer import HostSpec, run_guarded
    from ..live.join import load_join

    sys.path.insert(0, str(config.parent.resolve()))  # an entry point may stand beside its file
    address = broker_address(
        broker, ca=ca, certificate=certificate, key=key, version=mqtt,
        max_packet=max_packet, keepalive=keepalive,
    )  # fmt: skip
    plan = load_join(
        config, address, name=name, network=network, password_file=password_file, swarm=swarm,
        identity=identity and str(identity), invitation=invitation and str(invitation), owner=owner,
        replace=replace or None,
    )  # fmt: skip
    spec = plan.spec
    folder = out or Path("results") / f"{swarm}-{spec.name}"
    if show_settings:
        from .show_settings import show_join

        show_join(plan, folder, () if out is None else ("out",))
        return
    load_torch()
    folder = make_folder(folder)
    if not _may_start(folder, spec, again):
        return
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    code = run_guarded(HostSpec(plan.broker, str(folder), [spec]))
    if code:
        raise typer.Exit(code)
    console.print_written(
        [folder / f"{spec.name}.{ending}" for ending in ("safetensors", "jsonl", "report.json")]
    )


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
    if rounds >= spec.settings.rounds and not checkpoint.exists():  # else its goodbye is said again
        console.out.print(
            f"peer {spec.name} has finished its {rounds} rounds (report: {report}); start it with --again "
            "to begin anew",
            soft_wrap=True,
        )
        return False
    if not checkpoint.exists():
        console.err.print(
            f"peer {spec.name} left after {rounds} of {spec.settings.rounds} rounds (report: {report}); it "
            "begins anew",
            soft_wrap=True,
        )
    return True


def broker_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=PORTS, help="Port; 0 takes a free one.")] = 1883,
    websockets: Annotated[
        int | None,
        typer.Option(min=0, max=PORTS, help="Also listen for websockets on this port (nats)."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="nats or mosquitto; if left out, the first that is found.")
    ] = None,
    embedded: Annotated[bool, typer.Option("--embedded", help="The same as --kind nats.")] = False,
    tls: Annotated[
        Path | None,
        typer.Option(
            help="Use TLS, with the certificate authority in this folder; made at the first start."
        ),
    ] = None,
    tls_name: Annotated[
        list[str] | None,
        typer.Option(
            help="--tls: a name or address by which devices reach this machine; repeat for more. "
            "Its own names and addresses are always covered."
        ),
    ] = None,
    user: Annotated[
        list[str] | None, typer.Option(help="NAME:PASSWORD that may come in; repeat for more.")
    ] = None,
    acl: Annotated[
        Path | None,
        typer.Option(
            help="Write a swarm's rules and passwords into this folder, and keep to them."
        ),
    ] = None,
    swarm: Annotated[str | None, typer.Option(help="--acl: the swarm's name.")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="--acl: a peer's whole name (label@id); repeat.")
    ] = None,
    observer: Annotated[
        list[str] | None, typer.Option(help="--acl: somebody who may only watch; repeat.")
    ] = None,
) -> None:
    """Run a broker until Ctrl-C: nats-server, which is installed with gossamer, or mosquitto.

    With --acl every peer has a password, writes under its own name alone and reads its own mail.
    """
    from ...peer import KINDS, BrokerError, BrokerSettings, broker_kind, serve

    if embedded and kind not in (None, "nats"):
        raise ConfigError(f"broker: --embedded is --kind nats: leave it or --kind {kind} out")
    chosen = broker_kind("nats" if embedded else kind)
    if kind is not None and chosen is None:
        raise ConfigError(f"broker: --kind {kind}: write {' or '.join(KINDS)}")
    rules = _rules(acl, swarm, peer or [], observer or [], bool(user), port)
    users = dict(_user(each) for each in user or [])
    names = tls_name or []
    files = _certificates(tls, host, names)
    settings = BrokerSettings(
        host=host,
        port=port,
        websocket_port=websockets,
        tls=files,
        public_name=names[0] if names else None,
        users=users,
        rules=rules,
    )
    try:
        code = serve(settings, kind=chosen)
    except BrokerError as error:
        raise ConfigError(str(error)) from None
    if code:
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
        console.out.print(f"new server certificate: {reason}", soft_wrap=True, markup=False)
    if is_loopback(host):
        console.out.print(
            f"listens on {host} alone: --host 0.0.0.0 lets other devices connect", soft_wrap=True
        )
    console.out.print(
        f"peers need: --ca {authority.certificate} (copy it to other devices)",
        soft_wrap=True,
        markup=False,
    )
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
        console.out.print(f"password of {name}: {path}", soft_wrap=True)
    return files


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("swarm")(swarm_command)
    app.command("join")(join_command)
    app.command("broker")(broker_command)


def _user(text: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise ConfigError(f"--user {text!r}: write NAME:PASSWORD")
    return name, password
