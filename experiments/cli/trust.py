"""The commands of trust: `gossamer keygen`, `invite` and `revoke`.

`gossamer forget` is in cli_forget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gossamer.files import write_whole

from ..errors import ConfigError
from ..results import require_folder
from . import console
from .forget import forget_command
from .options import Ca, PasswordFile, broker_password

Owner = Annotated[Path, typer.Option(help="The owner's key file (gossamer keygen owner).")]
SwarmName = Annotated[str, typer.Option("--swarm", help="The swarm's name.")]

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
    console.wrote([path])


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
    console.wrote([out])


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
    from ...gossip.security import Identity, Revocations, revocation_topic

    password = None if broker is None else broker_password(broker, password_file)
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
    console.wrote([path])
    if broker is not None:
        asyncio.run(_publish(broker, password, ca, revocation_topic(swarm), data))
        console.out.print(f"published at {revocation_topic(swarm)}", soft_wrap=True)


async def _publish(
    url: str, password: str | None, ca: Path | None, topic: str, data: bytes
) -> None:
    from ...gossip import MqttTransport, TlsFiles

    tls = None if ca is None else TlsFiles(ca)
    name = f"gossamer-owner-{data[8:16].hex()}"
    async with MqttTransport(url, name, password=password, tls=tls) as transport:
        try:
            async with asyncio.timeout(_PUBLISH_SECONDS):
                await transport.publish(topic, data, retain=True, qos=1)
        except TimeoutError:
            where = transport.address  # not the URL, which may have a password in it
            raise ConfigError(f"{where}: the broker did not take the list in time") from None


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("keygen")(keygen_command)
    app.command("invite")(invite_command)
    app.command("revoke")(revoke_command)
    app.command("forget")(forget_command)


@contextmanager
def _one_line() -> Iterator[None]:
    """What trust refuses is a mistake of the user's here: one line and exit code 2."""
    from ...gossip.security import TrustError

    try:
        yield
    except TrustError as error:
        raise ConfigError(str(error)) from None
