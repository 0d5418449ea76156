"""The commands of a swarm's owner: `gossamer keygen`, `invite`, `revoke` and `forget`."""

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
from .live import broker_password

if TYPE_CHECKING:
    from ...gossip import MqttTransport
    from ...gossip.security import Identity

Written = Annotated[Path, typer.Option("--out", "-o")]

_ANSWER_SECONDS = 5.0
"""Seconds in which a broker hands out a retained card and status."""
_PUBLISH_SECONDS = 15.0


@command("keygen")
def keygen_command(label: str, *, out: Out = None) -> None:
    """Make an identity: a private key file that never leaves this device.

    Prints the name that the peer will have in its swarm, and the public key to send to the owner.

    Args:
        label: What people call this peer (or: owner).
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
    out: Written,
    peer: str | None = None,
    uses: AtLeastOneIfGiven = None,
    model: list[str] | None = None,
    days: float | None = None,
) -> None:
    """Invite one peer by its public key, or whoever is given an open ticket.

    An invitation may be sent in the open; a ticket is as good as a key: send it as you would one.

    Args:
        owner: The owner's key file (gossamer keygen owner).
        swarm: The swarm's name.
        out: Where to write the invitation.
        peer: The peer's public key with its label, as keygen printed it.
        uses: Instead of --peer: an open ticket for so many peers.
        model: A partial model it admits to; repeat. All if left out.
        days: How long it is valid: 365 days, an open ticket 7.
    """
    if (peer is None) == (uses is None):
        raise ConfigError("invite: give either --peer KEY or --uses N for an open ticket")
    from ...gossip import security

    key = security.Identity.load(owner)
    if peer is not None:
        labelled = security.read_labelled(peer)
        invitation = security.invite(key, swarm, *labelled, models=model, days=days or 365.0)
        security.save_invitation(out, invitation)
    else:
        assert uses is not None
        invitation, secret = security.open_ticket(
            key, swarm, uses=uses, models=model, days=days or 7.0
        )
        security.save_ticket(out, invitation, secret)
    claims = security.read_claims(invitation, key.public)
    admitted = "every model" if claims.models is None else ", ".join(sorted(claims.models))
    console.say(f"invitation  {claims.number} for {swarm}, admits to {admitted}")
    console.say(f"owner key   {security.public_text(key.public)}")
    console.print_written([out])


@command("revoke")
def revoke_command(
    *,
    owner: Path,
    swarm: str,
    peer: list[str] | None = None,
    paper: list[str] | None = None,
    file: Path | None = None,
    broker: str | None = None,
    ca: Path | None = None,
    password_file: Path | None = None,
) -> None:
    """Put peers or invitations out of the swarm: a signed list that only ever grows.

    Without --peer and --paper the list is published again as it is, after a broker lost it, say.

    Args:
        owner: The owner's key file (gossamer keygen owner).
        swarm: The swarm's name.
        peer: A peer's name (label@id) or id; repeat.
        paper: The number of an invitation or ticket; repeat.
        file: The list so far; SWARM.revocations beside the owner's key if left out.
        broker: Publish it there, retained; only written if left out.
    """
    from ...gossip.security import Identity, Revocations, revocation_topic

    transport = None if broker is None else _transport(broker, "owner", ca, password_file)
    path = file or owner.parent / f"{swarm}.revocations"
    key = Identity.load(owner)
    known = Revocations.load(path, key.public, swarm)
    new = known.add(peer or (), paper or ()) if peer or paper else known
    if new.number == 0:
        raise ConfigError("revoke: nothing to revoke: give --peer or --paper")
    data = new.sign(key, swarm)
    try:
        write_atomically(
            path, data
        )  # before it is published: a number must never be used for two lists
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    console.say(f"list {new.number}: {len(new.peers)} peers, {len(new.invitations)} invitations")
    console.print_written([path])
    if transport is not None:

        async def publish() -> None:
            async with transport:
                await _publish(transport, revocation_topic(swarm), data, "list")

        asyncio.run(publish())
        console.say(f"published at {revocation_topic(swarm)}")


def _transport(url: str, role: str, ca: Path | None, password_file: Path | None) -> MqttTransport:
    """A connection to a broker, not opened yet."""
    from ...gossip import MqttTransport, TlsFiles

    password = broker_password(url, password_file)
    client = f"gossamer-{role}-{secrets.token_hex(4)}"
    return MqttTransport(url, client, password=password, tls=None if ca is None else TlsFiles(ca))


async def _publish(transport: MqttTransport, topic: str, data: bytes, what: str) -> None:
    try:
        async with asyncio.timeout(_PUBLISH_SECONDS):
            await transport.publish(topic, data, retain=True, qos=1)
    except TimeoutError:
        where = transport.address  # not the URL, which may have a password in it
        raise ConfigError(f"{where}: the broker did not take the {what} in time") from None


@command("forget")
def forget_command(
    url: str,
    swarm: str,
    name: str,
    *,
    owner: Path | None = None,
    session: str | None = None,
    reason: str = "declared dead",
    force: bool = False,
    ca: Path | None = None,
    password_file: Path | None = None,
) -> None:
    """Declare a peer dead: the others take back what was on its way to it, and stop waiting for it.

    Only one session is declared over. If the peer lives after all, it returns with a new one.

    Args:
        url: The broker's address: mqtt://host:port.
        swarm: The swarm's name.
        name: The dead peer's whole name (label@id with trust).
        owner: The owner's key file, for a swarm with trust.
        session: The session that is over; the one at the broker if left out.
        reason: What the peers log.
        force: Also if the peer is online.
    """
    from ...gossip import topics
    from ...gossip.security import Death, Identity, sign_death

    for what, text in (("swarm", swarm), ("peer", name), ("session", session)):
        if text is not None:
            topics.check_name(what, text)
    transport = _transport(url, "forget", ca, password_file)
    key = None if owner is None else Identity.load(owner)

    async def declare() -> str:
        async with transport:
            found = await _look(transport, swarm, name)
            over = _choose_session(found, key, session, force=force)
            death = Death(over, reason, "operator" if key is None else key.name, time.time())
            data = death.encode() if key is None else sign_death(key, swarm, name, death)
            await _publish(transport, topics.death(swarm, name), data, "notice")
        return over

    over = asyncio.run(declare())
    console.say(f"{name} of swarm {swarm}: session {over} is declared dead")


@dataclass
class _Found:
    """What the broker keeps of a peer."""

    swarm: str
    name: str
    card: str | None = None
    """The session on its card."""
    status: str | None = None
    """The session of its last status."""
    state: str | None = None
    trusted: bool | None = None
    """Whether card and status are signed; None if there is neither."""
    invitation: bytes | None = None

    def read(self, kind: Literal["card", "status"], payload: bytes) -> None:
        """Take in a card or a status. What nobody can read counts as nothing."""
        from ...gossip.security import TrustError, read_published, signed

        head = {}
        if payload.startswith(signed.MAGIC):
            try:
                head, payload = read_published(self.swarm, self.name, kind, payload)
            except TrustError as error:
                raise ConfigError(f"forget: {self.name}: {error}") from None
        try:
            table = json.loads(payload)
            session, state = str(table["session"]), table.get("state")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        self.trusted = bool(head)
        if kind == "card":
            self.card, self.invitation = session, head.get("invitation")
        else:
            self.status, self.state = session, state


async def _look(transport: MqttTransport, swarm: str, name: str) -> _Found:
    """Read a peer's retained card and status, as far as there are any."""
    from ...gossip import topics

    found, card = _Found(swarm, name), topics.card(swarm, name)
    for topic in (card, topics.status(swarm, name)):
        await transport.subscribe(topic)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            async for message in transport.messages():
                if message.payload:
                    kind = "card" if message.topic == card else "status"
                    found.read(kind, bytes(message.payload))
                if found.state == "left" or (found.card and found.status):
                    break
    return found


def _choose_session(
    found: _Found, key: Identity | None, session: str | None, *, force: bool
) -> str:
    """The session to declare over; ConfigError says why there is none, or why not."""
    from ...gossip.security import TrustError, read_claims

    name, swarm = found.name, found.swarm
    if found.trusted and key is None:
        raise ConfigError(
            f"forget: swarm {swarm} believes its owner alone: give --owner with the owner's key file"
        )
    if found.trusted is False and key is not None:
        raise ConfigError(f"forget: swarm {swarm} has no trust: leave out --owner")
    if key is not None and isinstance(found.invitation, bytes):
        try:
            read_claims(found.invitation, key.public)
        except TrustError:
            raise ConfigError(
                f"forget: {key.name} is not the owner that invited {name}: give the key file of "
                f"swarm {swarm}'s owner"
            ) from None
    over = session or found.status or found.card
    if over is None:
        raise ConfigError(
            f"forget: the broker keeps no card or status of {name} in swarm {swarm}: check the names, "
            "or give the session with --session"
        )
    if found.status == over and found.state == "left":
        raise ConfigError(f"forget: {name} has left by itself: there is nothing to forget")
    if found.status == over and found.state == "online" and not force:
        raise ConfigError(
            f"forget: {name} is online in session {over}: stop it first, or add --force"
        )
    return over
