"""The example configs that are installed with the package: `example:karate` stands for the path of one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from gossamer.names import hint

from ..errors import ConfigError

PREFIX = "example:"
RUN_BY = {"methods": "compare", "sweep": "sweep"}
"""The commands for configs that have these keys; all others are simulated."""


def examples() -> Mapping[str, Path]:
    """Return the paths of all example configs by name."""
    folder = Path(__file__).parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def example_path(name: str) -> Path:
    """Return the path of an example config; ConfigError if there is none of this name."""
    paths = examples()
    if name not in paths:
        raise ConfigError(
            f"no example is called {name!r}; {hint(name, paths, are='there are', cutoff=0.6)}"
        )
    return paths[name]


def describe(path: Path) -> tuple[str, str]:
    """Return the command that runs an example, and the sentences at its start, which say what it shows."""
    text = path.read_text("utf-8")
    table = tomllib.loads(text)
    command = next((name for key, name in RUN_BY.items() if key in table), "simulate")
    lines = takewhile(
        lambda line: line.startswith("#") and "gossamer " not in line, text.splitlines()
    )
    return command, " ".join(line.removeprefix("#").strip() for line in lines)
