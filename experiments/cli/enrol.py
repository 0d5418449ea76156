"""`gossamer enrol`: one file for each device of a swarm with trust, TLS and passwords."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from . import console
from .console import command


@command("enrol")
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
        broker: The broker's address as the devices reach it: mqtts://broker.lan (mqtt:// without TLS).
        folder: The owner's folder of the swarm; SWARM if left out.
        model: A partial model that the devices may share; repeat for more. All models if left out.
        days: Days until the invitations expire.
        rounds: How many rounds the devices train.
    """
    from ..live.enrolment import SwarmFolder

    if rounds != "forever" and not (rounds.isdecimal() and int(rounds) > 0):
        raise ConfigError(f'--rounds {rounds}: should be a number of rounds, or "forever"')
    settings = {"rounds": rounds if rounds == "forever" else int(rounds)}
    owned = SwarmFolder(folder or Path(swarm), swarm, broker)
    files = owned.enrol(names, models=model, days=days, settings=settings)
    console.print_written(files)
    for line in owned.next_steps():
        console.say(line)
