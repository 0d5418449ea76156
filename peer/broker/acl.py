"""Permissions for a broker that peers share: a password each, and no writing under another's name.

    files = write_rules(folder, "garden", ["anna@…", "ben@…"], observers=["watch"])

leaves the same rules for both brokers in a folder (`passwords`, `acl` and `mosquitto.conf`; `nats.conf`), and
every user's password in `secrets/`. What a user may do follows from its name, so names should be the peers'
whole ones (`label@id`):

- write its own card, status and metrics, and nothing under another peer's name;
- write into anybody's inbox, because that is where gossip goes (packets prove their sender themselves);
- read cards, statuses, death notices and revocations of all, and its own inbox, nobody else's.

The owner alone writes revocations and death notices. The broker is still not trusted: these rules keep
peers honest towards each other's topics, and spare them traffic; sealing does not depend on them.

One difference: mosquitto accepts any subscription and delivers what may be read; nats-server refuses a
subscription that covers more than what may be read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...gossip import ROOT, check_name
from ...gossip.security import revocation_topic
from .config import (
    MAX_PACKET,
    BrokerError,
    RuleFiles,
    mosquitto_hash,
    nats_config,
    nats_text,
    nats_users,
    write_private,
)


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
