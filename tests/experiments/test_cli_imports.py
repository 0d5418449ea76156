"""Help and mistakes answer at once: they load neither torch nor anything else that takes long."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from gossamer import experiments
from gossamer import peer as peer_package
from gossamer.experiments import data
from gossamer.experiments.cli import app as cli
from gossamer.experiments.cli import topology as cli_topology
from gossamer.experiments.papers import PAPERS, STUDIES, StudyEntry
from gossamer.topology import Rule

HEAVY = (
    "gossamer.experiments.config.tables",
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
from gossamer.experiments.cli import app as cli

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


def test_a_bad_config_is_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "unknown.toml").write_text("pears = 3")
    (tmp_path / "inner.toml").write_text("peers = 3\n[time]\npauses = 1")
    commands = [
        [name, file]
        for name in ("simulate", "swarm", "sweep", "slices")
        for file in ("missing.toml", "unknown.toml", "inner.toml")
    ]
    found = loaded(tmp_path, *commands, heavy=("matplotlib", "networkx", "scipy", "torch"))
    assert found == dict.fromkeys(found, (2, []))


SLOW = ("matplotlib", "scipy", "sklearn", "torch")


def test_keys_and_papers_are_made_without_torch(tmp_path: Path) -> None:
    trust = ["--owner", "owner.key", "--swarm", "mine"]
    found = loaded(
        tmp_path,
        ["keygen", "owner"],
        ["invite", *trust, "--uses", "2", "-o", "ticket"],
        ["revoke", *trust, "--paper", "7"],
        heavy=SLOW,
    )
    assert found == dict.fromkeys(found, (0, []))
    assert {file.name for file in tmp_path.iterdir()} == {"owner.key", "ticket", "mine.revocations"}


def test_lists_are_printed_without_torch(tmp_path: Path) -> None:
    found = loaded(tmp_path, ["paper", "list"], ["paper"], ["study", "list"], ["data"], heavy=SLOW)
    assert found == dict.fromkeys(found, (0, []))


def test_unknown_names_are_told_without_torch(tmp_path: Path) -> None:
    commands = ["paper", "tables"], ["data", "numbers"], ["study", "hard"]
    found = loaded(tmp_path, *commands, ["paper", "widths", "--quick"], heavy=SLOW)
    assert found == dict.fromkeys(found, (2, []))


def test_a_broker_starts_without_torch(tmp_path: Path) -> None:
    rules = ["--acl", "rules", "--swarm", "mine", "--peer", "anna@abc"]
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that it does not stay
        port = ["--port", str(taken.getsockname()[1])]
        found = loaded(
            tmp_path,
            ["broker", *port],
            ["broker", *port, "--embedded", "--user", "anna:secret"],
            ["broker", *port, "--tls", "certificates"],
            ["broker", *port, *rules],
            heavy=SLOW,
        )
    assert found == dict.fromkeys(found, (2, []))
    assert (tmp_path / "certificates").exists()
    assert (tmp_path / "rules").exists()


@pytest.mark.parametrize("entry", [*PAPERS.values(), *STUDIES.values()], ids=lambda one: one.name)
def test_every_entry_has_a_study(entry: StudyEntry) -> None:
    for quick in {False, "quick" in entry.options}:
        study = entry.study(quick=quick, runs=1)
        assert study.name == entry.name
        assert study.cells


def test_peers_and_brokers_draw_nothing_and_have_their_names_at_first_use(tmp_path: Path) -> None:
    program = """
import importlib, sys
from gossamer import peer
from gossamer.experiments import data
for package in (peer, data):
    assert all(hasattr(package, name) for name in package.__all__), package
from gossamer.peer import *
from gossamer.experiments.data import *
print(Peer.__name__, LocalSwarm.__name__, partition.__name__, Dataset.__name__)
for module in ("peer.__main__", "peer.broker", "experiments.build", "experiments.live.layout"):
    importlib.import_module(f"gossamer.{module}")
    assert "matplotlib" not in sys.modules, module
"""
    told = python(program, folder=tmp_path).split()
    assert told == ["Peer", "LocalSwarm", "gossamer.experiments.data.partition", "Dataset"]


def test_every_command_runs_torch_with_the_threads_that_were_asked_for(tmp_path: Path) -> None:
    # Neighbours in the list differ: a command that leaves torch as the last one had it is noticed.
    commands = [
        ["--threads", "3", "simulate", "tiny.toml"],
        ["data", "digits"],
        ["--threads", "2", "sweep", "tiny.toml", "--jobs", "1"],
        ["--threads", "3", "slices", "64=4=10"],
        ["compare", "tiny.toml", "--only", "local", "--jobs", "1", "--show-settings"],
    ]
    program = f"""
import sys
from gossamer.experiments.cli.app import main
assert "torch" not in sys.modules
for command in {commands!r}:
    sys.argv = ["gossamer", *command]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, command
    import torch
    print("threads", torch.get_num_threads())
"""
    (tmp_path / "tiny.toml").write_text(
        'peers = 2\nrounds = 1\ndata.samples = 10\nnetwork.layout = "64=4=10"\n'
    )
    told = python(program, folder=tmp_path).splitlines()
    assert [line for line in told if line.startswith("threads")] == [
        f"threads {count}" for count in (3, 1, 2, 3, 1)
    ]


def test_help_knows_the_rules() -> None:
    assert get_args(Rule) == cli_topology.RULES


@pytest.mark.parametrize("package", [experiments, peer_package, data])
def test_a_package_has_all_its_names(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="attribute Arenas"):
        _ = package.Arenas
