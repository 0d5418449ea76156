"""The commands of brokers: `gossamer broker`, `gossamer broker config`, `gossamer broker check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ..results import require_folder
from . import console
from .console import (
    AtLeastOneIfGiven,
    Port,
    PortIfGiven,
    command,
    command_group,
    command_help,
    with_options,
)
from .live import ConnectionOptions

if TYPE_CHECKING:
    from ...peer import BrokerSettings, BrokerTls, RuleFiles

STORE = "store"
"""The folder of retained messages in that of a swarm's rules: a revocation must outlive the broker."""

broker_app = command_group(invoke_without_command=True)


def broker_command(
    context: typer.Context,
    *,
    host: str | None = None,
    port: PortIfGiven = None,
    websockets: PortIfGiven = None,
    kind: str | None = None,
    cluster: AtLeastOneIfGiven = None,
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
    messages to other peers. `gossamer broker config` writes the files of a cluster on several machines, and
    `gossamer broker check` tests whether peers can work with a broker.

    Args:
        host: The address to listen on; 127.0.0.1 if left out, or as the devices of --enrolled need it.
        port: The port to listen on, 1883 if left out; 0 chooses a free one.
        websockets: Also listen for websockets on this port (nats).
        kind: nats or mosquitto; if left out, the first one that is installed.
        cluster: Run so many nats-servers as one cluster on this machine, 3 or 5, to try it out; their
            URLs are printed once QoS 1 works on each.
        embedded: The same as --kind nats.
        tls: Use TLS, with the certificate authority in this folder, which is created at the first start.
        tls_name: With --tls: another name or address by which devices reach this machine, for the
            certificate; repeat for more. The machine's own names and addresses are always included.
        user: NAME:PASSWORD of a user that may connect; repeat for more.
        acl: Write access rules and passwords for a swarm into this folder, and enforce them. Retained
            messages are kept there too, in store.
        swarm: With --acl: the swarm's name.
        peer: With --acl: a peer's full name (label@id); repeat for more.
        observer: With --acl: the name of a user that may only read; repeat for more.
        discovery: With --acl: peers with `discovery = true` may appear in Home Assistant; name its user with
            --observer.
        enrolled: Serve the devices that gossamer enrol has enrolled in this folder, with their passwords
            and with TLS; devices that are enrolled later may connect without a restart. Retained messages,
            the list of revoked devices among them, are kept in its folder broker/store.
    """
    if context.invoked_subcommand is not None:
        return
    from ...peer import BROKER_KINDS, BrokerSettings, broker_kind, serve

    if embedded and kind not in (None, "nats"):
        raise ConfigError(f"broker: --embedded means --kind nats: leave it or --kind {kind} out")
    program = broker_kind("nats" if embedded else kind)
    if kind is not None and program is None:
        raise ConfigError(f"broker: --kind {kind}: write {' or '.join(BROKER_KINDS)}")
    if cluster is not None:
        refused = {
            "--kind mosquitto": kind == "mosquitto", "--websockets": websockets is not None,
            "--host": host, "--tls": tls, "--tls-name": tls_name, "--acl": acl, "--swarm": swarm,
            "--peer": peer, "--observer": observer, "--discovery": discovery, "--enrolled": enrolled,
        }  # fmt: skip
        if options := [option for option, given in refused.items() if given]:
            raise ConfigError(
                "broker: --cluster runs nats-servers on this machine without TLS and rules: leave "
                f"{options[0]} out, or use gossamer broker config"
            )
        from ...peer import serve_cluster  # slow to import

        users = dict(map(_user, user or []))
        if code := serve_cluster(cluster, BrokerSettings(port=port or 0, users=users)):
            raise typer.Exit(code)
        return
    if enrolled is not None:
        if tls or user or acl or swarm or peer or observer or tls_name or discovery:
            raise ConfigError(
                "broker: --enrolled has users and certificates of its own: leave out --tls, --tls-name, "
                "--user, --acl, --swarm, --peer, --observer and --discovery"
            )
        settings = settings_for_enrolled(enrolled, host, port, websockets)
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
            store=acl and acl / STORE,
        )
    if code := serve(settings, kind=program):
        raise typer.Exit(code)


broker_app.callback(help=command_help(broker_command))(with_options(broker_command))


@command("config", of=broker_app)
def config_command(
    *,
    nodes: str,
    swarm: str,
    peer: list[str],
    observer: list[str] | None = None,
    port: Port = 8883,
    out: Path = Path("cluster"),
) -> None:
    """Write the configuration of nats-servers on several machines that are one cluster, with TLS and rules.

    Every node gets a folder of its own with nats.conf and its certificate; copy it there, and start the node
    in it with `nats-server -c nats.conf`. Nodes reach each other at port 6222.

    Args:
        nodes: The names or addresses of the machines, as devices reach them: 3 or 5, with commas between
            them.
        swarm: The swarm's name.
        peer: A peer's full name (label@id); repeat for more.
        observer: The name of a user that may only read; repeat for more.
        port: The port for MQTT with TLS.
        out: The folder to write to; authority and passwords in it are kept.
    """
    from ...peer import write_cluster

    hosts = [each.strip() for each in nodes.split(",")]
    folders = write_cluster(
        require_folder(out), hosts, port=port, swarm=swarm, peers=peer, observers=observer or []
    )
    for host, folder in zip(hosts, folders, strict=True):
        console.say(f"{host}: copy {folder} there, and run in it: nats-server -c nats.conf")
    urls = ",".join(f"mqtts://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts)
    console.say(f"peers need: --broker {urls} --ca {folders[0] / 'ca.pem'}")
    console.say(f"passwords: {out / 'rules' / 'secrets'}; give each peer only its own")


@command("check", of=broker_app, slow=True)
def check_command(
    urls: Annotated[list[str], typer.Argument(metavar="URL…")],
    *,
    swarm: str | None = None,
    name: str = "check",
    connection: ConnectionOptions,
) -> None:
    """Test whether peers can work with a broker, and print what to change; the exit code is 1 if they cannot.

    It connects as a peer of a swarm that does not exist, sends some 40 MB, and clears what it has published.
    On a broker with access rules, give a swarm and a peer in them that is not running, and the peer's
    password. Several URLs are those of a cluster's nodes.

    Args:
        urls: The address of the broker: mqtt://, mqtts://, ws:// or wss://; for a cluster, of its nodes.
        swarm: The swarm's name, if access rules name it.
        name: The peer's name, if access rules name it.
    """
    import asyncio
    import secrets

    from ...peer import check_broker

    address = connection.running_broker(",".join(urls))
    findings = asyncio.run(
        check_broker(address, swarm or f"check-{secrets.token_hex(4)}", name, console.warn)
    )
    rows = [(each.subject, each.result, each.verdict, each.setting) for each in findings]
    console.table(
        "What peers need of a broker", ["what", "found", "verdict", "what to change"], rows
    )
    if any(each.verdict == "fails" for each in findings):
        console.say("peers cannot work with this broker as it is")
        raise typer.Exit(1)


def settings_for_enrolled(
    folder: Path, host: str | None, port: int | None, websockets: int | None
) -> BrokerSettings:
    """Return the settings of a broker for the devices that were enrolled in a folder."""
    from ...gossip import Address
    from ...peer import BrokerSettings, BrokerTls, is_loopback, read_rules
    from ..live.enrolment import read_description

    address, *others = Address.parse_all(read_description(folder)["broker"])
    if others:
        raise ConfigError(
            f"broker: --enrolled {folder}: its devices are enrolled for a cluster; start each node in its "
            f"own folder, such as {folder / address.host}, with nats-server -c nats.conf"
        )
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
        store=files / STORE,
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
    """Split a value of --user into name and password; ConfigError if one is missing."""
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise ConfigError(f"--user {text!r}: write NAME:PASSWORD")
    return name, password
