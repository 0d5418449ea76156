"""What brokers are asked to be, and how each is told: their configs and command lines."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError

from .embedded_broker import write_passwords


class BrokerError(GossamerError, RuntimeError):
    """A broker that cannot be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class BrokerTls:
    """The broker's own certificate, and who may come in.

    With `require_client` (mosquitto only) clients must show a certificate signed by `ca`.
    """

    ca: Path
    certificate: Path
    key: Path
    require_client: bool = False


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What a broker is asked to be.

    host: the address to listen on; leave loopback only with `tls` and `users`.
    port, websocket_port: 0 takes a free one; websocket_port None means no websockets, and any other
        value the embedded broker.
    public_name: the name or address of this machine in the URLs that are shown for other devices; found
        out if left out.
    users: name to password; empty lets anybody in.
    password_file, acl_file: instead of users, files that say who may come in and do what (mosquitto);
        `peer.acl.write_rules` makes them for a swarm.
    max_packet: the largest packet accepted (mosquitto). Raise it for larger chunks; every client
        may make the broker hold one such packet per subscriber, so lower it on small machines.
    max_queued_messages, max_queued_bytes: what mosquitto keeps per slow subscriber at QoS 1.
    """

    host: str = "127.0.0.1"
    port: int = 0
    websocket_port: int | None = None
    tls: BrokerTls | None = None
    public_name: str | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    password_file: Path | None = None
    acl_file: Path | None = None
    max_packet: int = 16 * 1024 * 1024
    max_queued_messages: int = 1000
    max_queued_bytes: int = 64 * 1024 * 1024


def write_whole(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    """Write a file with these rights so that it is whole or not there at all; return its path."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as out:
        out.write(content.encode() if isinstance(content, str) else content)
    return part.replace(path)


def kept(command: list[str], folder: Path) -> list[str]:
    """The command that runs a broker under its keeper, in whose folder it works."""
    script = Path(__file__).with_name("broker_keeper.py")
    # -I -S: it needs the standard library alone, and is to start fast.
    return [sys.executable, "-I", "-S", str(script), str(folder), *command]


# --- mosquitto ---------------------------------------------------------------------------------------


def mosquitto_command(
    executable: str, settings: BrokerSettings, port: int, folder: Path
) -> list[str]:
    """Write mosquitto's config into the folder; return the command that runs it."""
    lines = [
        "persistence false",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        "set_tcp_nodelay true",
        f"max_packet_size {settings.max_packet}",
        f"max_queued_messages {settings.max_queued_messages}",
        f"max_queued_bytes {settings.max_queued_bytes}",
        f"allow_anonymous {'false' if settings.users or settings.password_file else 'true'}",
    ]
    if os.geteuid() == 0:
        # Started by root it becomes user "mosquitto", who cannot read a folder and keys of root's.
        lines.append("user root")
    if settings.users:
        hashed = "".join(f"{mosquitto_hash(*item)}\n" for item in settings.users.items())
        lines.append(f"password_file {write_whole(folder / 'passwords', hashed)}")
    if settings.password_file is not None:
        lines.append(f"password_file {Path(settings.password_file).resolve()}")
    if settings.acl_file is not None:
        lines.append(f"acl_file {Path(settings.acl_file).resolve()}")
    lines += [f"listener {port} {settings.host}", *_mosquitto_tls(settings.tls)]
    config = write_whole(folder / "mosquitto.conf", "\n".join(lines) + "\n")
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
    """A line of mosquitto's password file (PBKDF2-SHA512, its type 7)."""
    if not user or ":" in user or "\n" in user:
        raise BrokerError(f"the user name {user!r} is empty or has a colon or a line break in it")
    salt, rounds = secrets.token_bytes(12), 101
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, rounds)
    encoded = [base64.b64encode(part).decode() for part in (salt, digest)]
    return f"{user}:$7${rounds}${encoded[0]}${encoded[1]}"


# --- amqtt -------------------------------------------------------------------------------------------


def amqtt_command(
    settings: BrokerSettings, port: int, websocket_port: int | None, folder: Path
) -> list[str]:
    """Write the embedded broker's config into the folder; return the command that runs it."""
    listener: dict[str, Any] = {"type": "tcp", "bind": f"{settings.host}:{port}"}
    if settings.tls is not None:
        listener |= {
            "ssl": True,
            "certfile": str(Path(settings.tls.certificate).resolve()),
            "keyfile": str(Path(settings.tls.key).resolve()),
        }
    listeners = {"default": listener}
    if websocket_port is not None:
        address = f"{settings.host}:{websocket_port}"
        listeners["websockets"] = listener | {"type": "ws", "bind": address}
    plugins: dict[str, Any] = {}
    if settings.users:
        passwords = write_whole(folder / "passwords", "")
        write_passwords(passwords, dict(settings.users))
        plugins["amqtt.plugins.authentication.FileAuthPlugin"] = {"password_file": str(passwords)}
    else:
        plugins["amqtt.plugins.authentication.AnonymousAuthPlugin"] = {"allow_anonymous": True}
    config = write_whole(
        folder / "amqtt.json", json.dumps({"listeners": listeners, "plugins": plugins})
    )
    script = Path(__file__).with_name("embedded_broker.py")
    # -P: the script's folder is no place to import from.
    return [sys.executable, "-P", str(script), str(config)]
