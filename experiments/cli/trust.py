"""The commands of trust: `gossamer keygen`, `invite`, `revoke`, and `study` of what it hides and bears.

`gossamer forget` is in cli_forget.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gossamer.files import write_whole

from ..broker_password import broker_password
from ..errors import ConfigError
from ..results import require_folder, write_json
from . import console
from .forget import forget_command
from .results import Force, Out, results_for

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
    from ...gossip.trust import Identity, public_text

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
    from ...gossip.trust import (
        Identity,
        invite,
        open_ticket,
        public_text,
        read_labelled,
        read_terms,
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
        terms = read_terms(paper, key.public)
    admitted = "every model" if terms.models is None else ", ".join(sorted(terms.models))
    console.out.print(
        f"paper       {terms.number} for {swarm}, admits to {admitted}", soft_wrap=True
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
    ca: Annotated[
        Path | None, typer.Option(help="The authority that signed the broker's certificate.")
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(help="A file with the password of the URL's user; else the environment's."),
    ] = None,
) -> None:
    """Put peers or papers out of the swarm: a signed list that only ever grows.

    Without --peer and --paper the list is published again as it is, after a broker lost it, say.
    """
    from ...gossip.trust import Identity, Revocations, revocation_topic

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
        f"list {new.number}: {len(new.peers)} peers, {len(new.papers)} papers", soft_wrap=True
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


def study_command(
    name: Annotated[str, typer.Argument(help="private (what masks hide) or byzantine (attacks).")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller: seconds, not minutes.")] = False,
    out: Out = None,
    force: Force = False,
) -> None:
    """Measure trust: what private averaging hides and costs, or what guards make of attacks."""
    studies = {"private": _study_private, "byzantine": _study_byzantine}
    if name not in studies:
        raise ConfigError(f"no study is called {name!r}; there are {' and '.join(studies)}")
    results = results_for(out, Path("results/study") / name, f"study {name}", force=force)
    with results.opened() as folder:
        rows = studies[name](quick)
        results.begin()
        write_json(folder / f"{name}.json", rows)
    console.wrote([folder / f"{name}.json"])


def _study_private(quick: bool) -> list[dict[str, object]]:
    from ...gossip import MaskPlan
    from ..papers.private_study import Setting, accuracy, study

    setting = Setting(peers=32, trials=4000, exchanges=60) if quick else Setting()
    findings, floor = study(setting)
    rounds = 5 if quick else 20
    plain, few, more = (
        accuracy(each, plan, rounds)
        for each, plan in ((6, None), (6, MaskPlan(16.0)), (20, MaskPlan(16.0)))
    )
    console.table(
        f"private averaging: {setting.peers} peers of degree {setting.degree}, masks up to "
        f"{setting.scale:g} standard deviations",
        ["protocol", "first message", "everything seen", "exchanges to 1e-6", "error of the mean"],
        [
            (f.protocol, f"{f.first:.3f}", f"{f.everything:.3f}", f.exchanges, f"{f.error:.1e}")
            for f in findings
        ],
    )
    console.out.print(
        "Columns 2 and 3: correlation of a curious neighbour's linear estimate with the true value. The "
        f"average itself, which everybody is meant to learn, gives {floor:.3f}; a best estimate from "
        "everything is at least that, but one fitted to many messages has noise and may fall below.",
        soft_wrap=True,
    )
    console.table(
        f"digits, 12 peers on a ring of degree 4, {rounds} rounds",
        ["averaging", "exchanges", "accuracy"],
        [
            ("plain", 6, f"{plain:.3f}"),
            ("private", 6, f"{few:.3f}"),
            ("private", 20, f"{more:.3f}"),
        ],
    )
    rows: list[dict[str, object]] = [vars(finding) for finding in findings]
    return [*rows, {"average_alone": floor, "plain_6": plain, "private_6": few, "private_20": more}]


def _study_byzantine(quick: bool) -> list[dict[str, object]]:
    from ..papers.byzantine_study import Setting, study

    setting = Setting(rounds=12) if quick else Setting()
    log = logging.getLogger("gossamer.gossip.trust.guards")
    level = log.level
    log.setLevel(logging.ERROR)  # hundreds of quarantines are what the study is about
    try:
        findings = study(setting, on_run=lambda run: console.err.print(f"attack: {run} …"))
    finally:
        log.setLevel(level)
    console.table(
        f"{setting.hostile} of {setting.peers} peers hostile, digits, {setting.rounds} rounds: accuracy "
        "of the honest",
        ["they send", "nobody attacks", "no guards", "guards", "within 0.02", "wronged"],
        [
            (
                f.attack, f"{f.clean:.3f}", f"{f.unguarded:.3f}", f"{f.guarded:.3f}",
                "yes" if f.covered else "NO", f.wronged,
            )
            for f in findings
        ],
    )  # fmt: skip
    return [{**vars(finding), "covered": finding.covered} for finding in findings]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("keygen")(keygen_command)
    app.command("invite")(invite_command)
    app.command("revoke")(revoke_command)
    app.command("forget")(forget_command)
    app.command("study")(study_command)


@contextmanager
def _one_line() -> Iterator[None]:
    """What trust refuses is a mistake of the user's here: one line and exit code 2."""
    from ...gossip.trust import TrustError

    try:
        yield
    except TrustError as error:
        raise ConfigError(str(error)) from None
