"""The example configs that are installed with the package: `example:karate` stands for the path of one."""

from __future__ import annotations

import keyword
import re
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from importlib.machinery import PathFinder
from itertools import dropwhile, takewhile
from pathlib import Path

from gossamer.errors import hint

from ..errors import ConfigError

PREFIX = "example:"
COMMAND_BY_KEY = {"methods": "compare", "sweep": "sweep"}
"""The gossamer commands for configs that have these keys; all other configs are simulated."""


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
    command = next((name for key, name in COMMAND_BY_KEY.items() if key in table), "simulate")
    lines = takewhile(
        lambda line: line.startswith("#") and "gossamer " not in line, text.splitlines()
    )
    return command, " ".join(line.removeprefix("#").strip() for line in lines)


# --- a project to start from --------------------------------------------------------------------------

_MODULE = """\
\"\"\"What the peers of {name}.toml learn: {contents}\"\"\"

from dataclasses import replace

{imports}from gossamer.experiments.data import Dataset, load


def load_data(seed: int) -> Dataset:
    \"\"\"Return the samples that are divided among the peers: here a built-in set, yours in its place.

    gossamer.experiments.data.samples(x, y) makes samples of arrays: Dataset("mine", samples(x, y),
    samples(test_x, test_y), classes=3).
    \"\"\"
    return replace(load("{set}", seed=seed), name="{name}")
"""
_NETWORK = """

def make_net() -> nn.Module:
    \"\"\"Return a network of one peer: any torch module. `gossamer slices {name}.toml` shows its parts.\"\"\"
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(),
        nn.Linear(32, 10),  # layer 6: its cells are each peer's own, says [[models]]
    )
"""


def write_project(name: str, example: str, folder: Path) -> list[Path]:
    """Write an example's config under a new name, and a module with the functions that it names.

    Returns the paths of both. Raises ConfigError if a file of that name exists, or the name is not one of a
    module.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a Python module: use letters, digits and _, as in my_swarm"
        )
    installed = [path for path in sys.path if path.endswith("-packages")]
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, installed) is not None:
        raise ConfigError(
            f"{name!r}: {name}.py would hide Python's module {name}; choose another name"
        )
    source = example_path(example)
    text = source.read_text("utf-8")
    paths = [folder / f"{name}.toml", folder / f"{name}.py"]
    if existing := [path for path in paths if path.exists()]:
        raise ConfigError(f"{existing[0]}: exists already; choose another name, or another folder")
    command, about = describe(source)
    body = "\n".join(dropwhile(lambda line: line.startswith("#") or not line, text.splitlines()))
    data = tomllib.loads(text)["data"]["set"]
    body = re.sub(r'^name = "[^"]*"', f'name = "{name}"', body, count=1, flags=re.MULTILINE)
    body = re.sub(r'^set = "[^"]*"', f'set = "{name}:load_data"', body, flags=re.MULTILINE)
    has_network = command != "compare" and 'name = "small-cnn"' in body
    if has_network:
        network = r'^name = "small-cnn".*\noptions = .*$'
        body = re.sub(network, f'entry = "{name}:make_net"', body, flags=re.MULTILINE)
    comments = [f"Made from example:{example}. {about}", f"Run it: gossamer {command} {name}.toml"]
    header = "".join(f"# {line}\n" for text in comments for line in textwrap.wrap(text, 96))
    module = _MODULE.format(
        name=name, set=data, imports="from torch import nn\n\n" if has_network else "",
        contents="their samples and their network." if has_network else "their samples.",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(f"{header}\n{body}\n", "utf-8")
    paths[1].write_text(module + (_NETWORK.format(name=name) if has_network else ""), "utf-8")
    return paths
