"""`gossamer service install`: keep a device's peer running with systemd."""

from __future__ import annotations

import re
import sys
from getpass import getuser
from pathlib import Path

import typer

from ..errors import ConfigError
from ..results import write_bytes
from . import console
from .console import command

service_app = typer.Typer(
    no_args_is_help=True,
    help="Keep a device's peer running, after crashes and reboots too.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@command("install", of=service_app)
def install_command(
    device: Path,
    *,
    entry: str | None = None,
    broker: str | None = None,
    swarm: str | None = None,
    memory: str = "1G",
    user: str | None = None,
    out: Path | None = None,
) -> None:
    """Write a unit with which systemd runs `gossamer join` on this device, and print how to start it.

    systemd starts the peer at boot, again after a crash, and if it gives no sign of life for two minutes;
    it does not where a person must act first (exit code 2), nor where another device has replaced this
    one (exit code 4). The peer's results are in the folder of its file.

    Args:
        device: The device's file: NAME.gossamer of gossamer enrol, or a TOML file.
        entry: With NAME.gossamer: module:function that makes the device's learner.
        broker: With a TOML file: the broker's address.
        swarm: With a TOML file: the swarm's name.
        memory: The most memory that the peer may use, as in 512M or 2G; systemd kills it beyond that.
        user: The user who runs the peer; the present one if left out.
        out: The file to write; gossamer-NAME.service in this folder if left out.
    """
    from ...peer import unit_text
    from ..live.enrolment import ENDING

    if not device.is_file():
        raise ConfigError(f"{device}: there is no such file")
    if not re.fullmatch(r"[1-9]\d*[KMGT]?", memory):
        raise ConfigError(f"--memory {memory}: write a number with K, M, G or T, as in 512M")
    if device.suffix == ENDING:
        needs, not_used = {"--entry": entry}, {"--broker": broker, "--swarm": swarm}
        file = [str(device.resolve())]
    else:
        needs, not_used = {"--broker": broker, "--swarm": swarm}, {"--entry": entry}
        file = ["--config", str(device.resolve())]
    for option, value in needs.items():
        if value is None:
            raise ConfigError(f"{device}: {option} is missing, which gossamer join needs")
    for option, value in not_used.items():
        if value is not None:
            raise ConfigError(
                f"{device}: leave out {option}, which gossamer join does not take here"
            )
    options = [word for option, value in needs.items() if value for word in (option, value)]
    unit = unit_text(
        f"Gossamer peer of {device.name}",
        [sys.executable, "-m", "gossamer", "join", *file, *options],
        device.resolve().parent,
        user=user or getuser(),
        memory=memory,
    )
    path = out or Path(f"gossamer-{re.sub(r'[^A-Za-z0-9_.-]', '_', device.stem)}.service")
    write_bytes(path, unit.encode())
    console.print_written([path])
    start = f"sudo systemctl enable --now {path.stem}"
    console.say(f"start it with: sudo cp {path} /etc/systemd/system/ && {start}")
    console.say(f"its log: journalctl -u {path.stem} -f")
