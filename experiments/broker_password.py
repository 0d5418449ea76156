"""The password for a broker, from where other users of the machine cannot read it.

A command line, and so a URL in it, shows in the list of processes. A file and the environment do not.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from .errors import ConfigError

VARIABLE = "GOSSAMER_BROKER_PASSWORD"


def broker_password(url: str, file: Path | None = None) -> str | None:
    """The password that goes with a broker's URL: the file's first line, else the environment's.

    None where the URL has its own, or no user name: then the variable is meant for another broker.
    """
    from ..gossip import Address  # which loads what takes long

    address = Address.parse(url)
    if file is None:
        wanted = address.username is not None and address.password is None
        return os.environ.get(VARIABLE) or None if wanted else None
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
