"""The commands of a swarm's owner: `gossamer enrol`, `keygen`, `invite`, `revoke` and `forget`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gossamer.files import write_atomically

from ..errors import ConfigError
from ..results import require_folder
from . import console
from .console import AtLeastOneIfGiven, Out, command
from .live import ConnectionOptions

if TYPE_CHECKING:
    from ...gossip import MqttTransport
    from ...gossip.security import Identity
    from ..live.members import KnownMembers

RequiredOut = Annotated[Path, typer.Option("--out", "-o")]

_RETAINED_SECONDS = 5.0
"""Seconds to wait for a peer's retained messages, its card and its status, after subscribing to them."""
_PUBLISH_SECONDS = 15.0
"""Seconds to wait until the broker acknowledges a message."""


@command("enrol", slow=True)
def enrol_command(
    names: list[str],
    *,
    swarm: str,
    broker: str,
    folder: Path | None = None,
    model: list[str] | None = None,
    days: float = 365.0,
    rounds: str = "forever",
) -> None:
    """Write one file for each new device of a swarm: its settings, key, invitation, password, authority.

    At first use this makes the folder of the swarm, with the owner's key and the broker's certificate.
    Start the broker with `gossamer broker --enrolled FOLDER`; one that runs learns of new devices by
    itself. Bring each file to its device over a secure channel: whoever has it can join as that device.
    There, `gossamer join NAME.gossamer --entry module:function` is all.

    Args:
        names: The devices' names.
        swarm: The swarm's name.
        broker: The broker's address as the devices reach it: mqtts://broker.lan (mqtt:// without TLS); for a
            cluster, those of its 3 or 5 nodes with commas between them.
        folder: The owner's folder of the swarm; SWARM if left out.
        model: A partial model that the devices may share; repeat for more. All models if left out.
        days: Days until the invitations expire.
        rounds: How many rounds the devices train.
    """
    from ..live.enrolment import SwarmFolder

    if rounds != "forever" and not (rounds.isdecimal() and int(rounds) > 0):
        raise ConfigError(f'--rounds {rounds}: should be a number of rounds, or "forever"')
    settings = {"rounds": rounds if rounds == "forever" else int(rounds)}
    swarm_folder = SwarmFolder(require_folder(folder or Path(swarm)), swarm, broker)
    files = swarm_folder.enrol(names, models=model, days=days, settings=settings)
    console.print_written(files)
    for line in swarm_folder.next_steps():
        console.say(line)


@command("keygen")
def keygen_command(label: str, *, out: Out = None) -> None:
    """Create the key pair of a peer or of a swarm's owner, in a file that must stay on this device.

    Prints the name that the peer will have in its swarm, and the public key to send to the owner.

    Args:
        label: The first part of the peer's name, LABEL@ID; for an owner's key: owner.
        out: The new key file; LABEL.key if left out.
    """
    from ...gossip.security import Identity, public_text

    identity = Identity.generate(label)
    path = out or Path(f"{label}.key")
    require_folder(path.parent)
    identity.save(path)
    console.say(f"name        {identity.name}")
    console.say(f"public key  {public_text(identity.public, identity.label)}")
    console.print_written([path])


@command("invite")
def invite_command(
    *,
    owner: Path,
    swarm: str,
    out: RequiredOut,
    peer: str | None = None,
    uses: AtLeastOneIfGiven = None,
    model: list[str] | None = None,
    days: float | None = None,
) -> None:
    """Invite one peer by its public key, or write an open ticket with which several peers may join.

    An invitation is useless without the peer's private key, so it need not be kept secret. A ticket admits
    anyone who has it: send it only over a secure channel.

    Args:
        owner: The owner's key file (gossamer keygen owner).
        swarm: The swarm's name.
        out: The file for the invitation or ticket.
        peer: The peer's public key with its label, as gossamer keygen printed it.
        uses: Instead of --peer: write an open ticket for this number of peers.
        model: A partial model that the peer may share; repeat for more. All models if left out. A pattern
            such as 'group*' admits to every model whose name begins like that. Peers with sharing = "auto"
            begin models while they run: give them 'global*', 'group*' and 'statistics-*'.
        days: Days until it expires; if left out, 365 for an invitation and 7 for a ticket.
    """
    if (peer is None) == (uses is None):
        raise ConfigError("invite: give either --peer KEY or --uses N for an open ticket")
    from ...gossip import security

    key = security.Identity.load(owner)
    if peer is not None:
        label, public = security.read_labelled_key(peer)
        invitation = security.invite(
            key, swarm, label, public, models=model, days=365.0 if days is None else days
        )
        security.save_invitation(out, invitation)
    else:
        assert uses is not None
        invitation, secret = security.open_ticket(
            key, swarm, uses=uses, models=model, days=7.0 if days is None else days
        )
        security.save_ticket(out, invitation, secret)
    claims = security.read_claims(invitation, key.public)
    admitted = "every model" if claims.models is None else ", ".join(sorted(claims.models))
    console.say(f"invitation  {claims.number} for {swarm}, admits to {admitted}")
    console.say(f"owner key   {security.public_text(key.public)}")
    console.print_written([out])


@command("revoke", slow=True)
def revoke_command(
    *,
    owner: Path,
    swarm: str,
    peer: list[str] | None = None,
    invitation: Annotated[list[str] | None, typer.Option("--invitation", "--paper")] = None,
    file: Path | None = None,
    broker: str | None = None,
    force: bool = False,
    connection: ConnectionOptions,
) -> None:
    """Exclude peers or invitations from the swarm: adds them to a signed list, and publishes the list.

    Entries cannot be removed from the list. Without --peer and --invitation the list is published unchanged,
    for example after the broker has lost its retained messages. Names are looked up in the folder of gossamer
    enrol in which the owner's key is, and on the cards at the broker.

    Args:
        owner: The owner's key file (gossamer keygen owner).
        swarm: The swarm's name.
        peer: A peer's name (label@id); its id, or its label if one known peer has it; repeat for more.
        invitation: The number of an invitation or ticket; repeat for more.
        file: The file of the list; SWARM.revocations in the folder of the owner's key if left out.
        broker: The address of the broker to which the list is published; if left out, the list is only
            written to the file.
        force: Revoke full names and invitations that nobody knows too, and publish to a broker that has no
            card of the swarm.
    """
    from ...gossip import topics
    from ...gossip.security import Identity, Revocations, revocation_topic

    topics.check_name("swarm", swarm)
    path = file or owner.parent / f"{swarm}.revocations"
    key = Identity.load(owner)
    revocations = Revocations.load(path, key.public, swarm)
    if revocations.number == 0 and not peer and not invitation:
        raise ConfigError("revoke: nothing to revoke: give --peer or --invitation")
    known = asyncio.run(_known_members(owner, key, swarm, broker, connection, force=force))
    names = [known.check_peer(each, force=force) for each in peer or ()]
    numbers = [known.check_invitation(each, force=force) for each in invitation or ()]
    if names or numbers:
        revocations = revocations.add(names, numbers)
    data = revocations.sign(key, swarm)
    try:
        # The file is written before the list is published: its number must never be used for another list.
        write_atomically(path, data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    lengths = {"peer": len(revocations.peers), "invitation": len(revocations.invitations)}
    listed = ", ".join(f"{length} {what}{'s' * (length != 1)}" for what, length in lengths.items())
    console.say(f"list {revocations.number}: {listed}")
    for what, each in (*(("peer", name) for name in names), *(("invitation", n) for n in numbers)):
        console.say(f"revoked: {what} {each}")
        if each not in known.names | known.invitations:
            console.warn(f"{what} {each}: nobody knows it here, so check that it is the one meant")
    console.print_written([path])
    if broker is None:
        console.warn("not published: peers learn of it when the command is repeated with --broker")
        return

    async def publish(url: str) -> None:
        async with _transport(url, "owner", connection) as transport:
            await _publish(transport, revocation_topic(swarm), data, "list")
        await _read_back(_transport(url, "owner", connection), revocation_topic(swarm), data)

    asyncio.run(publish(broker))
    console.say(f"published at {revocation_topic(swarm)}; the broker holds it")


async def _known_members(
    owner: Path,
    key: Identity,
    swarm: str,
    broker: str | None,
    connection: ConnectionOptions,
    *,
    force: bool = False,
) -> KnownMembers:
    """Return who is known of a swarm. force: also if the folder or the broker knows of no such swarm."""
    from ..live.members import KnownMembers

    known = KnownMembers(swarm)
    with contextlib.suppress(*((ConfigError,) if force else ())):
        known.add_enrolled(owner)
    if broker is not None:
        async with _transport(broker, "owner", connection) as transport:
            with contextlib.suppress(*((ConfigError,) if force else ())):
                await known.add_cards(transport, key.public, _RETAINED_SECONDS)
    return known


async def _read_back(transport: MqttTransport, topic: str, data: bytes) -> None:
    """Wait until the broker gives a retained message to a new client; ConfigError if it does not."""
    try:
        async with asyncio.timeout(_PUBLISH_SECONDS), transport:
            await transport.subscribe(topic)
            async for message in transport.messages():
                if message.retain and message.payload == data:
                    return
    except TimeoutError:
        raise ConfigError(
            f"{transport.address}: acknowledged the list, but does not hold it: connect as the user that may "
            "publish it (with gossamer enrol: owner), and see gossamer broker check"
        ) from None


@command("ban")
def ban_command(name: str, *, file: Path, lift: bool = False) -> None:
    """Let a device exchange nothing with a peer from its next start on, or lift that with --lift.

    The peer is added to `banned` in the device's file. This is the decision of one device: an owner excludes
    a member from the whole swarm with gossamer revoke.

    Args:
        name: The peer's name, or the id after its @.
        file: The device's file, as for gossamer join --config.
        lift: Remove the peer from the list instead.
    """
    from ..live.device import change_bans

    banned = change_bans(file, name, lift=lift)
    console.print_written([file])
    console.say(f"banned: {', '.join(banned) or 'nobody'}; restart the device to apply it")


def _transport(url: str, role: str, connection: ConnectionOptions) -> MqttTransport:
    """Return a transport that is not connected yet; role: part of the MQTT client id."""
    from ...peer import mqtt_transport

    client = f"gossamer-{role}-{secrets.token_hex(4)}"
    return mqtt_transport(connection.running_broker(url), client)


async def _publish(transport: MqttTransport, topic: str, data: bytes, what: str) -> None:
    """Publish a retained message, and wait for the broker's acknowledgement; what: its name in the error."""
    try:
        async with asyncio.timeout(_PUBLISH_SECONDS):
            await transport.publish(topic, data, retain=True, qos=1)
    except TimeoutError:
        where = transport.address  # not the URL, which may contain a password
        raise ConfigError(
            f"{where}: the broker did not acknowledge the {what} within {_PUBLISH_SECONDS:g} s"
        ) from None


@command("forget", slow=True)
def forget_command(
    url: str,
    swarm: str,
    name: str,
    *,
    owner: Path | None = None,
    session: str | None = None,
    reason: str = "declared dead",
    force: bool = False,
    connection: ConnectionOptions,
) -> None:
    """Declare a peer dead: the other peers take back their unfinished transfers to it and stop waiting.

    Only one session of the peer ends. If the peer is still running, it continues in a new session.

    Args:
        url: The broker's address: mqtt://host:port.
        swarm: The swarm's name.
        name: The dead peer's name; with trust its full name, label@id, or with --owner its label.
        owner: The owner's key file, for a swarm with trust.
        session: The session to end; if left out, the one in the peer's retained status or card.
        reason: The reason that the other peers write to their logs.
        force: Declare the peer dead even if its status is online.
    """
    from ...gossip import topics
    from ...gossip.security import Death, Identity, sign_death

    for what, text in (("swarm", swarm), ("peer", name), ("session", session)):
        if text is not None:
            topics.check_name(what, text)
    transport = _transport(url, "forget", connection)
    key, peer = None if owner is None else Identity.load(owner), name

    async def declare() -> tuple[str, str]:
        name = peer
        if key is not None and owner is not None and "@" not in peer:
            known = await _known_members(owner, key, swarm, url, connection, force=True)
            name = known.of_label(peer) or peer
        async with transport:
            retained = await _read_retained(transport, swarm, name)
            dead_session = _choose_session(retained, key, session, force=force)
            author = "operator" if key is None else key.name
            death = Death(dead_session, reason, author, time.time())
            data = death.encode() if key is None else sign_death(key, swarm, name, death)
            await _publish(transport, topics.death(swarm, name), data, "death notice")
        return name, dead_session

    name, dead_session = asyncio.run(declare())
    console.say(f"{name} of swarm {swarm}: session {dead_session} is declared dead")


@dataclass
class _RetainedPeer:
    """The content of a peer's retained card and status; None for what is missing."""

    swarm: str
    name: str
    card_session: str | None = None
    status_session: str | None = None
    state: str | None = None
    """The state in the status, such as "online" or "left"."""
    trusted: bool | None = None
    """Whether card and status are signed."""
    invitation: bytes | None = None

    def read(self, message: Literal["card", "status"], payload: bytes) -> None:
        """Store the content of a card or a status; one that is no JSON or has no session is ignored.

        Raises ConfigError if it is signed and its signature is wrong.
        """
        from ...gossip.security import TrustError, read_published, signed

        head = {}
        if payload.startswith(signed.MAGIC):
            try:
                head, payload = read_published(self.swarm, self.name, message, payload)
            except TrustError as error:
                raise ConfigError(f"forget: {self.name}: {error}") from None
        try:
            table = json.loads(payload)
            session, state = str(table["session"]), table.get("state")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        self.trusted = bool(head)
        if message == "card":
            self.card_session, self.invitation = session, head.get("invitation")
        else:
            self.status_session, self.state = session, state


async def _read_retained(transport: MqttTransport, swarm: str, name: str) -> _RetainedPeer:
    """Receive a peer's retained card and status from the broker."""
    from ...gossip import topics

    retained, card_topic = _RetainedPeer(swarm, name), topics.card(swarm, name)
    for topic in (card_topic, topics.status(swarm, name)):
        await transport.subscribe(topic)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RETAINED_SECONDS):
            async for message in transport.messages():
                if message.payload:
                    which = "card" if message.topic == card_topic else "status"
                    retained.read(which, bytes(message.payload))
                if retained.state == "left" or (retained.card_session and retained.status_session):
                    break
    return retained


def _choose_session(
    retained: _RetainedPeer, key: Identity | None, session: str | None, *, force: bool
) -> str:
    """Return the session to declare dead; ConfigError if there is none, or if the peer must not be declared.

    key: the owner's. session: the value of --session.
    """
    from ...gossip.security import TrustError, read_claims

    name, swarm = retained.name, retained.swarm
    if retained.trusted and key is None:
        raise ConfigError(
            f"forget: swarm {swarm} has trust, so only its owner can do this: give --owner with the owner's "
            "key file"
        )
    if retained.trusted is False and key is not None:
        raise ConfigError(f"forget: swarm {swarm} has no trust: leave out --owner")
    if key is not None and isinstance(retained.invitation, bytes):
        try:
            read_claims(retained.invitation, key.public)
        except TrustError:
            raise ConfigError(
                f"forget: {key.name} is not the owner that invited {name}: give the key file of "
                f"swarm {swarm}'s owner"
            ) from None
    chosen = session or retained.status_session or retained.card_session
    if chosen is None:
        raise ConfigError(
            f"forget: the broker has no card or status of {name} in swarm {swarm}: check the names"
            f"{'' if '@' in name else ' (with trust: NAME@ID, and --owner)'}, or give the session with "
            "--session"
        )
    if retained.status_session == chosen and retained.state == "left":
        raise ConfigError(f"forget: {name} has left by itself: there is nothing to forget")
    if retained.status_session == chosen and retained.state == "online" and not force:
        raise ConfigError(
            f"forget: {name} is online in session {chosen}: stop it first, or add --force"
        )
    return chosen
