"""`gossamer forget`: an operator declares a peer dead, so that the others stop waiting for it."""

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

from ..errors import ConfigError
from . import console
from .options import Ca, PasswordFile, broker_password

if TYPE_CHECKING:
    from ...gossip import MqttTransport
    from ...gossip.security import Identity

_ANSWER_SECONDS = 5.0
"""Seconds in which a broker hands out a retained card and status."""
_PUBLISH_SECONDS = 15.0


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
            try:
                async with asyncio.timeout(_PUBLISH_SECONDS):
                    await transport.publish(topics.death(swarm, name), data, retain=True, qos=1)
            except TimeoutError:
                where = transport.address  # not the URL, which may have a password in it
                raise ConfigError(f"{where}: the broker did not take the notice in time") from None
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
