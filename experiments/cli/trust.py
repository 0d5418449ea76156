"""The commands of a swarm's owner: `gossamer keygen`, `invite`, `revoke` and `forget`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gossamer.files import write_whole

from ..errors import ConfigError
from ..results import require_folder
from . import console
from .options import Ca, PasswordFile, broker_password

if TYPE_CHECKING:
    from ...gossip import MqttTransport
    from ...gossip.security import Identity

Owner = Annotated[Path, typer.Option(help="The owner's key file (gossamer keygen owner).")]
SwarmName = Annotated[str, typer.Option("--swarm", help="The swarm's name.")]

_ANSWER_SECONDS = 5.0
"""Seconds in which a broker hands out a retained card and status."""
_PUBLISH_SECONDS = 15.0


def keygen_command(
    label: Annotated[str, typer.Argument(help="What people call this peer (or: owner).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The new key file; LABEL.key if left out.")
    ] = None,
) -> None:
    """Make an identity: a private key file that never leaves this device.

    Prints the name that the peer will have in its swarm, and the public key to send to the owner.
    """
    from ...gossip.security import Identity, public_text

    with _one_line():
        identity = Identity.generate(label)
        path = out or Path(f"{label}.key")
        require_folder(path.parent)
        identity.save(path)
    console.out.print(f"name        {identity.name}", soft_wrap=True)
    console.out.print(f"public key  {public_text(identity.public, identity.label)}", soft_wrap=True)
    console.print_written([path])


def invite_command(
    owner: Owner,
    swarm: SwarmName,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the invitation.")],
    peer: Annotated[
        str | None, typer.Option(help="The peer's public key with its label, as keygen printed it.")
    ] = None,
    uses: Annotated[
        int | None, typer.Option(min=1, help="Instead of --peer: an open ticket for so many peers.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A partial model it admits to; repeat. All if left out."),
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="How long it is valid: 365 days, an open ticket 7.")
    ] = None,
) -> None:
    """Invite one peer by its public key, or whoever is given an open ticket.

    An invitation may be sent in the open; a ticket is as good as a key: send it as you would one.
    """
    if (peer is None) == (uses is None):
        raise ConfigError("invite: give either --peer KEY or --uses N for an open ticket")
    from ...gossip.security import (
        Identity,
        invite,
        open_ticket,
        public_text,
        read_claims,
        read_labelled,
        save_invitation,
        save_ticket,
    )

    with _one_line():
        key = Identity.load(owner)
        if peer is not None:
            paper = invite(key, swarm, *read_labelled(peer), models=model, days=days or 365.0)
            save_invitation(out, paper)
        else:
            assert uses is not None
            paper, secret = open_ticket(key, swarm, uses=uses, models=model, days=days or 7.0)
            save_ticket(out, paper, secret)
        claims = read_claims(paper, key.public)
    admitted = "every model" if claims.models is None else ", ".join(sorted(claims.models))
    console.out.print(
        f"invitation  {claims.number} for {swarm}, admits to {admitted}", soft_wrap=True
    )
    console.out.print(f"owner key   {public_text(key.public)}", soft_wrap=True)
    console.print_written([out])


def revoke_command(
    owner: Owner,
    swarm: SwarmName,
    peer: Annotated[
        list[str] | None, typer.Option(help="A peer's name (label@id) or id; repeat.")
    ] = None,
    paper: Annotated[
        list[str] | None, typer.Option(help="The number of an invitation or ticket; repeat.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="The list so far; SWARM.revocations beside the owner's key if left out."),
    ] = None,
    broker: Annotated[
        str | None, typer.Option(help="Publish it there, retained; only written if left out.")
    ] = None,
    ca: Ca = None,
    password_file: PasswordFile = None,
) -> None:
    """Put peers or invitations out of the swarm: a signed list that only ever grows.

    Without --peer and --paper the list is published again as it is, after a broker lost it, say.
    """
    from ...gossip import MqttTransport, TlsFiles
    from ...gossip.security import Identity, Revocations, revocation_topic

    password = None if broker is None else broker_password(broker, password_file)

    async def publish(url: str) -> None:
        tls = None if ca is None else TlsFiles(ca)
        client = f"gossamer-owner-{data[8:16].hex()}"
        async with MqttTransport(url, client, password=password, tls=tls) as transport:
            await _publish(transport, revocation_topic(swarm), data, "list")

    path = file or owner.parent / f"{swarm}.revocations"
    with _one_line():
        key = Identity.load(owner)
        known = Revocations.load(path, key.public, swarm)
        new = known.add(peer or (), paper or ()) if peer or paper else known
        if new.number == 0:
            raise ConfigError("revoke: nothing to revoke: give --peer or --paper")
        data = new.sign(key, swarm)
    try:
        write_whole(path, data)  # before it is published: a number must never be used for two lists
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    console.out.print(
        f"list {new.number}: {len(new.peers)} peers, {len(new.invitations)} invitations",
        soft_wrap=True,
    )
    console.print_written([path])
    if broker is not None:
        asyncio.run(publish(broker))
        console.out.print(f"published at {revocation_topic(swarm)}", soft_wrap=True)


async def _publish(transport: MqttTransport, topic: str, data: bytes, what: str) -> None:
    try:
        async with asyncio.timeout(_PUBLISH_SECONDS):
            await transport.publish(topic, data, retain=True, qos=1)
    except TimeoutError:
        where = transport.address  # not the URL, which may have a password in it
        raise ConfigError(f"{where}: the broker did not take the {what} in time") from None


def forget_command(
    url: Annotated[str, typer.Argument(help="The broker's address: mqtt://host:port.")],
    swarm: Annotated[str, typer.Argument(help="The swarm's name.")],
    name: Annotated[str, typer.Argument(help="The dead peer's whole name (label@id with trust).")],
    owner: Annotated[
        Path | None, typer.Option(help="The owner's key file, for a swarm with trust.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(help="The session that is over; the one at the broker if left out."),
    ] = None,
    reason: Annotated[str, typer.Option(help="What the peers log.")] = "declared dead",
    force: Annotated[bool, typer.Option("--force", help="Also if the peer is online.")] = False,
    ca: Ca = None,
    password_file: PasswordFile = None,
) -> None:
    """Declare a peer dead: the others take back what was on its way to it, and stop waiting for it.

    Only one session is declared over. If the peer lives after all, it returns with a new one.
    """
    from ...gossip import MqttTransport, TlsFiles, topics
    from ...gossip.security import Death, Identity, TrustError, sign_death

    topics.check_name("swarm", swarm)
    topics.check_name("peer", name)
    if session is not None:
        topics.check_name("session", session)
    password = broker_password(url, password_file)
    try:
        key = None if owner is None else Identity.load(owner)
    except TrustError as error:
        raise ConfigError(str(error)) from None

    async def declare() -> str:
        tls = None if ca is None else TlsFiles(ca)
        client = f"gossamer-forget-{secrets.token_hex(4)}"
        async with MqttTransport(url, client, password=password, tls=tls) as transport:
            found = await _look(transport, swarm, name)
            over = _choose_session(found, key, session, force=force)
            death = Death(over, reason, "operator" if key is None else key.name, time.time())
            data = death.encode() if key is None else sign_death(key, swarm, name, death)
            await _publish(transport, topics.death(swarm, name), data, "notice")
        return over

    over = asyncio.run(declare())
    console.out.print(f"{name} of swarm {swarm}: session {over} is declared dead", soft_wrap=True)


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

    found = _Found(swarm, name)
    kinds: dict[str, Literal["card", "status"]] = {
        topics.card(swarm, name): "card",
        topics.status(swarm, name): "status",
    }
    for topic in kinds:
        await transport.subscribe(topic)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            async for message in transport.messages():
                if message.payload:
                    found.read(kinds[message.topic], bytes(message.payload))
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


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("keygen")(keygen_command)
    app.command("invite")(invite_command)
    app.command("revoke")(revoke_command)
    app.command("forget")(forget_command)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """What trust refuses is a mistake of the user's here: one line and exit code 2."""
    from ...gossip.security import TrustError

    try:
        yield
    except TrustError as error:
        raise ConfigError(str(error)) from None
