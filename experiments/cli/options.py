"""What commands have in common: options for results and brokers, and torch with the threads of --threads.

A broker's password comes from a file or the environment: a command line, and so a URL in it, shows in the
list of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, urlsplit, urlunsplit

import typer

from ...peer import exit_on_interrupt
from ..errors import ConfigError
from ..results import Results

if TYPE_CHECKING:
    from ...peer import BrokerAddress

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="An empty folder for results; a new one below results/ if left out."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace the newest results, or those in --out, by this run's."),
]

OPTIONS = {"version": "mqtt", "url": "broker"}
"""Options whose settings have another name."""
Url = Annotated[
    str | None,
    typer.Option(
        "--broker",
        help="mqtt://, mqtts://, ws:// or wss:// address, or nats or mosquitto to start one (the default).",
    ),
]
Ca = Annotated[
    Path | None, typer.Option(help="The authority that signed the broker's certificate.")
]
Certificate = Annotated[Path | None, typer.Option(help="Our own certificate, if the broker asks.")]
Key = Annotated[Path | None, typer.Option(help="The key of our own certificate.")]
Mqtt = Annotated[str | None, typer.Option("--mqtt", help="Protocol version: 3.1.1 (default) or 5.")]
MaxPacket = Annotated[
    int | None,
    typer.Option(help="Bytes of the largest packet that the broker takes; found out if left out."),
]
Keepalive = Annotated[
    int | None,
    typer.Option(help="Seconds of silence before the link to the broker is tested."),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the password of the URL's user; else GOSSAMER_BROKER_PASSWORD is used."
    ),
]

VARIABLE = "GOSSAMER_BROKER_PASSWORD"


def results_for(out: Path | None, default: Path, command: str, *, force: bool) -> Results:
    """Where a command leaves its results: in the folder `out`, or in the next number below `default`."""
    return Results(out or default, command, exact=out is not None, force=force)


def broker_address(url: str, **options: object) -> BrokerAddress:
    """The broker that options name; those that are None were not given."""
    from pydantic import ValidationError

    from ...peer import BrokerAddress

    given = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in options.items()
        if value is not None
    }
    try:
        return BrokerAddress(url, **given)
    except ValidationError as error:
        mistake = error.errors()[0]
        option = OPTIONS.get(str(mistake["loc"][0]), str(mistake["loc"][0]).replace("_", "-"))
        raise ConfigError(f"--{option} {mistake['input']}: {mistake['msg']}") from None


def broker_password(
    url: str, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """The password that goes with a broker's URL: the file's first line, else the environment's.

    None where the URL has its own, or no user name: then the variable is meant for another broker.
    """
    from ...gossip import Address  # which loads what takes long

    address = Address.parse(url)
    if file is None:
        wanted = address.username is not None and address.password is None
        return environment.get(VARIABLE) or None if wanted else None
    if address.password is not None:
        raise ConfigError(f"{file}: the broker's URL has a password too; leave one of them out")
    if address.username is None:
        raise ConfigError(f"{file}: a password needs a user name: write it in the URL, NAME@host")
    try:
        password = file.read_text("utf-8").partition("\n")[0].rstrip("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: cannot be read: it is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if not password:
        raise ConfigError(f"{file}: there is no password in its first line")
    return password


def with_user(url: str, name: str) -> str:
    """Return a broker's URL with this user name, if it names no user itself."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"{quote(name, safe='')}@{parts.netloc}"))


class Torch:
    """Torch as commands load it. threads: how many one of its products may use, as --threads says."""

    threads = 1


def load_torch() -> None:
    """Import torch, with the threads of --threads.

    It takes two seconds, in which Ctrl-C ends the process without a word. A command calls this when it begins
    to compute: help and the news that a file is missing should not wait for it.
    """
    with exit_on_interrupt():
        import torch
    torch.set_num_threads(Torch.threads)
