"""Help and mistakes answer at once: they load neither torch nor anything else that takes long."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import gossamer.experiments.simulate  # noqa: F401  (a module of the same name as a function)
from gossamer import experiments
from gossamer.experiments import cli, cli_slices, cli_topology
from gossamer.experiments.networks import READY
from gossamer.topology import Rule

HEAVY = (
    "gossamer.experiments.config",
    "matplotlib",
    "networkx",
    "numpy",
    "scipy",
    "sklearn",
    "torch",
)

# Runs commands one after the other, and says after each how it ended and what is loaded.
PROGRAM = """
import contextlib, io, json, sys
import typer.main
from gossamer.experiments import cli

def names(command, path):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from names(inner, [*path, name])

given, heavy = json.loads(sys.argv[1])
asked = given or [[*path, "-h"] for path in names(typer.main.get_command(cli.app), [])]
told = {}
for arguments in asked:
    sys.argv = ["gossamer", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    told[" ".join(arguments)] = [code, [name for name in heavy if name in sys.modules]]
json.dump(told, sys.stdout)
"""


def python(program: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(
    folder: Path, *commands: list[str], heavy: tuple[str, ...] = HEAVY
) -> dict[str, tuple[int, list[str]]]:
    """Exit code and what is loaded after each command, or after the help of all of them."""
    text = python(PROGRAM, json.dumps([commands, heavy]), folder=folder)
    return {command: (code, found) for command, (code, found) in json.loads(text).items()}


def test_help_loads_nothing_that_takes_long(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert {"-h", "simulate -h", "keygen -h", "topology -h", "topology show -h"} <= set(found)
    assert {f"{one.name} -h" for one in cli.app.registered_commands} <= set(found)
    assert found == dict.fromkeys(found, (0, []))


def test_bad_arguments_load_nothing_that_takes_long(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        ["simulatte"],
        ["--threads", "0", "data"],
        ["simulate"],
        ["simulate", "--no-such-option"],
        ["paper", "--runs", "many"],
        ["broker", "--user", "nobody"],
        ["broker", "--swarm", "mine"],
        ["invite", "--owner", "owner.key", "--swarm", "mine", "-o", "paper"],
        ["topology", "advise"],
    )
    assert found == dict.fromkeys(found, (2, []))


@pytest.mark.parametrize("text", [None, "pears = 3", "peers = 3\n[time]\npauses = 1"])
def test_a_bad_config_is_told_without_torch(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "wrong.toml").write_text(text)
    commands = [[name, "wrong.toml"] for name in ("simulate", "swarm", "sweep", "slices")]
    found = loaded(tmp_path, *commands, heavy=("matplotlib", "networkx", "scipy", "torch"))
    assert found == dict.fromkeys(found, (2, []))


def test_keys_are_made_without_torch(tmp_path: Path) -> None:
    found = loaded(tmp_path, ["keygen", "owner"], heavy=("matplotlib", "torch"))
    assert found == {"keygen owner": (0, [])}
    assert (tmp_path / "owner.key").exists()


@pytest.mark.parametrize(
    "module",
    [
        "gossamer.peer.__main__",
        "gossamer.peer.broker",
        "gossamer.experiments.entry",
        "gossamer.experiments.join",
    ],
)
def test_peers_and_brokers_draw_nothing(tmp_path: Path, module: str) -> None:
    program = f"import sys, {module}; print('matplotlib' in sys.modules)"
    assert python(program, folder=tmp_path) == "False\n"


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_has_the_threads_that_were_asked_for_when_it_is_loaded(
    tmp_path: Path, threads: int
) -> None:
    program = f"""
import importlib.util, sys
from gossamer.experiments.threads import use_threads
use_threads(3)
use_threads({threads})
assert importlib.util.find_spec("torch")  # who only looks for it does not load it
assert "torch" not in sys.modules
import torch
print(torch.get_num_threads())
use_threads(3)
print(torch.get_num_threads())
"""
    assert python(program, folder=tmp_path).split() == [str(threads), "3"]


@pytest.mark.parametrize(("module", "name"), cli.ERRORS)
def test_errors_of_users_are_where_they_are_said_to_be(module: str, name: str) -> None:
    found = pkgutil.resolve_name(f"{module}:{name}")
    assert issubclass(found, Exception)
    assert found.__module__ == module  # or it could be raised while this module is not loaded
    assert found in cli.users_errors()


def test_help_knows_the_networks_and_the_rules() -> None:
    assert cli_slices.READY == READY
    assert get_args(Rule) == cli_topology.RULES


def test_the_package_has_all_its_names() -> None:
    assert set(experiments.__all__) <= set(dir(experiments))
    for name in experiments.__all__:
        assert getattr(experiments, name).__name__ == name
    assert callable(experiments.simulate)  # not the module
    with pytest.raises(AttributeError, match="no attribute 'Arenas'"):
        _ = experiments.Arenas  # type: ignore[attr-defined]
