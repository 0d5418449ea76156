"""Rules for a mosquitto that peers share: a password each, and no writing under another's name.

    files = write_rules(folder, "garden", ["anna@…", "ben@…"], observers=["watch"])

leaves `passwords`, `acl` and `mosquitto.conf` in a folder, and every user's password in `secrets/`. What a
user may do follows from its name, so names should be the peers' whole ones (`label@id`):

- write its own card, status and metrics, and nothing under another peer's name;
- write into anybody's inbox, because that is where gossip goes (packets prove their sender themselves);
- read cards, statuses, death notices and revocations of all, and its own inbox, nobody else's.

The owner alone writes revocations and death notices. The broker is still not trusted: these rules keep
peers honest towards each other's topics, and spare them traffic; sealing does not depend on them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..gossip import ROOT, check_name
from ..gossip.trust import revocation_topic
from .broker_config import BrokerError, mosquitto_hash, write_whole


@dataclass(frozen=True, slots=True)
class RuleFiles:
    """Where the rules are: hand every peer its own password file, and nobody the others."""

    passwords: Path
    acl: Path
    config: Path
    secrets: dict[str, Path]


def acl_text(
    swarm: str, peers: Iterable[str], owner: str = "owner", observers: Iterable[str] = ()
) -> str:
    """The ACL file of a swarm. Whoever is not named may do nothing."""
    base = f"{ROOT}/{check_name('swarm', swarm)}"
    lines = [f"# The peers of swarm {swarm}; everything that is not allowed here is refused.", ""]
    for peer in _names(peers):
        lines += [
            f"user {peer}",
            *(f"topic write {base}/peer/{peer}/{kind}" for kind in ("card", "status", "metrics")),
            f"topic write {base}/peer/+/inbox/+",
            *(f"topic read {base}/peer/+/{kind}" for kind in ("card", "status", "death")),
            f"topic read {base}/peer/{peer}/inbox/+",
            f"topic read {revocation_topic(swarm)}",
            "",
        ]
    lines += [
        f"user {check_name('user', owner)}",
        f"topic readwrite {revocation_topic(swarm)}",
        *(f"topic read {base}/peer/+/{kind}" for kind in ("card", "status")),
        f"topic write {base}/peer/+/death",
        "",
    ]
    for observer in _names(observers):
        lines += [
            f"user {observer}",
            *(f"topic read {base}/peer/+/{kind}" for kind in ("card", "status", "metrics")),
            "",
        ]
    return "\n".join(lines)


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
    try:
        (folder / "secrets").mkdir(parents=True, exist_ok=True)
        words = {user: _password(folder / "secrets" / user) for user in (*peers, owner, *observers)}
        passwords = write_whole(
            folder / "passwords", "".join(f"{mosquitto_hash(*word)}\n" for word in words.items())
        )
        acl = write_whole(folder / "acl", acl_text(swarm, peers, owner, observers))
        config = write_whole(folder / "mosquitto.conf", _config(port, passwords, acl))
    except OSError as error:
        raise BrokerError(f"{folder}: rules cannot be written: {error}") from None
    return RuleFiles(passwords, acl, config, {user: folder / "secrets" / user for user in words})


def _names(users: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(check_name("user", user) for user in users))


def _password(path: Path) -> str:
    if path.exists():
        return path.read_text("utf-8").strip()
    word = secrets.token_urlsafe(24)
    write_whole(path, word + "\n")
    return word


def _config(port: int, passwords: Path, acl: Path) -> str:
    lines = [
        "# Copy what you need into your own configuration, and add TLS before leaving this machine.",
        f"listener {port} 127.0.0.1",
        "allow_anonymous false",
        f"password_file {passwords.resolve()}",
        f"acl_file {acl.resolve()}",
        f"max_packet_size {16 * 1024 * 1024}",
        "persistence false",
    ]
    if os.geteuid() == 0:
        # Started by root it becomes user "mosquitto", who cannot read files of root's.
        lines.append("user root")
    return "\n".join(lines) + "\n"
