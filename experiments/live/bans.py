"""Changes the list of banned peers in a device's file, and leaves the rest of the file as it is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from gossamer.files import write_atomically

from ..errors import ConfigError
from .device import read_join

_LINE = re.compile(r"^banned\s*=\s*\[[^\]]*\][^\n]*\n?", re.MULTILINE)


def change_bans(path: Path, name: str, *, lift: bool = False) -> list[str]:
    """Add a peer to `banned` in a device's file, or remove it; return the new list.

    Raises ConfigError if the file is no device's file, and if the list would stay as it is.
    """
    banned = list(read_join(path).banned)
    if lift and name not in banned:
        raise ConfigError(
            f"{path}: {name} is not banned; banned are: {', '.join(banned) or 'none'}"
        )
    if not lift and name in banned:
        raise ConfigError(f"{path}: {name} is banned already")
    banned = [each for each in banned if each != name] if lift else [*banned, name]
    text = path.read_text("utf-8")
    line = f"banned = {json.dumps(banned)}\n"  # also a list of TOML
    # A key of the file itself must come before the first table.
    changed = _LINE.sub(line, text, count=1) if _LINE.search(text) else line + text
    if tomllib.loads(changed).get("banned") != banned:
        raise ConfigError(
            f"{path}: its key 'banned' cannot be changed; write it by hand: {line.strip()}"
        )
    write_atomically(path, changed.encode())
    return banned
