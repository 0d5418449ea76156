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
import torch
from cli_kit import Run, runs

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

given, heavy, with_help = json.loads(sys.argv[1])
helps = [[*path, "-h"] for path in names(typer.main.get_command(cli.app), [])]
asked = [*(helps if with_help else []), *given]
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


def loaded(
    folder: Path, *commands: list[str], heavy: tuple[str, ...], with_help: bool = False
) -> dict[str, tuple[int, list[str]]]:
    """Exit code and what is loaded after each command, and before them after the help of all of them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([commands, heavy, with_help])],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {command: (code, found) for command, (code, found) in json.loads(done.stdout).items()}


def test_help_and_bad_arguments_load_nothing_that_takes_long(tmp_path: Path) -> None:
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
        heavy=HEAVY,
        with_help=True,
    )
    assert {"-h", "simulate -h", "keygen -h", "topology -h", "topology show -h"} <= set(found)
    assert {f"{one.name} -h" for one in cli.app.registered_commands} <= set(found)
    assert found == {command: (0 if command.endswith("-h") else 2, []) for command in found}


def test_lists_keys_brokers_and_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    trust = ["--owner", "owner.key", "--swarm", "mine"]
    lists = ["paper", "list"], ["paper"], ["study", "list"], ["data"]
    explained = [["explain", *key] for key in ([], ["gossip.mode"], ["methods.fedprox"], ["rate"])]
    keys = (
        ["keygen", "owner"],
        ["invite", *trust, "--uses", "2", "-o", "ticket"],
        ["revoke", *trust, "--paper", "0123456789abcdef"],
    )
    (tmp_path / "unknown.toml").write_text("pears = 3")
    (tmp_path / "inner.toml").write_text("peers = 3\n[time]\npauses = 1")
    configs = [
        [name, file]
        for name in ("simulate", "swarm", "sweep", "slices", "compare")
        for file in ("missing.toml", "unknown.toml", "inner.toml")
    ]
    names = (
        ["paper", "tables"],
        ["data", "numbers"],
        ["study", "hard"],
        ["paper", "widths", "--quick"],
        ["status", "mqtt://127.0.0.1:1", "garden"],
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that no broker stays
        broker = ["broker", "--port", str(taken.getsockname()[1])]
        brokers = (
            broker,
            [*broker, "--embedded", "--user", "anna:secret"],
            [*broker, "--tls", "certificates"],
            [*broker, "--acl", "rules", "--swarm", "mine", "--peer", "anna@abc"],
        )
        slow = ("matplotlib", "networkx", "scipy", "sklearn", "torch")
        good, bad = (*lists, *explained, *keys), (*configs, *names, *brokers)
        found = loaded(tmp_path, *good, *bad, heavy=slow)
    for commands, code in ((good, 0), (bad, 2)):
        for command in commands:
            assert found[" ".join(command)] == (code, []), command
    made = {"owner.key", "ticket", "mine.revocations", "certificates", "rules"}
    assert made <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("entry", [*PAPERS.values(), *STUDIES.values()], ids=lambda one: one.name)
def test_every_entry_has_a_study(entry: StudyEntry) -> None:
    for quick in {False, "quick" in entry.options}:
        study = entry.study(quick=quick, runs=1)
        assert study.name == entry.name
        assert study.cells


tiny = runs(
    tiny='peers = 2\nrounds = 1\ndata.samples = 10\nnetwork.layout = "64=4=10"\n',
    small="peers = 2\nrounds = 1\nseeds = 1\ndata.samples = 10\n[methods.local]\n",
)


def test_every_command_runs_torch_with_the_threads_that_were_asked_for(tiny: Run) -> None:
    # Neighbours in the list differ: a command that leaves torch as the last one had it is noticed.
    commands = [
        (3, ["--threads", "3", "simulate", "tiny.toml"]),
        (1, ["data", "digits"]),
        (2, ["--threads", "2", "sweep", "tiny.toml", "--on", "local:1"]),
        (3, ["--threads", "3", "slices", "64=4=10"]),
        (1, ["compare", "small.toml", "--on", "local:1"]),
    ]
    try:
        for threads, command in commands:
            assert not tiny(*command).code, command
            assert torch.get_num_threads() == threads, command
    finally:
        torch.set_num_threads(1)


def test_help_knows_the_rules() -> None:
    assert get_args(Rule) == cli_topology.RULES


@pytest.mark.parametrize("package", [experiments, peer_package, data])
def test_a_package_has_all_its_names(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="attribute Arenas"):
        _ = package.Arenas


# Runs commands on a terminal until they load something heavy, and says what they had printed by then.
UNTIL_HEAVY = """
import contextlib, importlib.abc, io, json, sys
import typer.main
from gossamer.experiments.cli import app as cli

HEAVY = {
    "torch", "scipy", "networkx", "matplotlib", "bokeh", "gossamer.experiments.config.tables",
    "gossamer.peer.observer", "gossamer.peer.broker.check",  # which would wait for a broker
}

class Loads(BaseException):
    pass

class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in HEAVY:
            raise Loads(name)

def names(command, path):
    inner = getattr(command, "commands", {})
    for name in inner:
        yield from names(inner[name], [*path, name])
    if not inner:
        yield " ".join(path)

sys.meta_path.insert(0, Stop())
printed = {}
for arguments in json.loads(sys.argv[1]):
    err, loads = io.StringIO(), None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            cli.app(arguments, prog_name="gossamer", standalone_mode=False)
        except Loads as heavy:
            loads = str(heavy)
        except Exception as error:
            err.write(str(error))
    printed[" ".join(arguments)] = [loads, err.getvalue()]
json.dump([list(names(typer.main.get_command(cli.app), [])), printed], sys.stdout)
"""


def test_commands_say_that_they_have_begun_before_they_load_what_takes_long(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text('peers = 2\nrounds = 1\nnetwork.layout = "64=4=10"\n')
    (tmp_path / "peer.toml").write_text('name = "anna"\nentry = "my_device:make"\nrounds = 2\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    url = "mqtt://127.0.0.1:1"
    loading = [
        ["simulate", "tiny.toml"],
        ["swarm", "tiny.toml"],
        ["compare", "tiny.toml"],
        ["sweep", "tiny.toml"],
        ["join", "--broker", url, "--swarm", "garden", "--config", "peer.toml"],
        ["slices", "64=4=10"],
        ["paper", "widths"],
        ["study", "hostile"],
        ["bench", "codec"],
        ["demo"],
        ["virtual"],
        ["data", "digits"],
        ["explain"],
        ["assignment", "run"],
        ["fuse", "a.safetensors", "b.safetensors", "-o", "both"],
        ["report", "run"],
        ["watch", url, "garden"],
        ["lab"],
        ["predict", "a.safetensors", "1"],
        ["status", url, "garden"],
        ["forget", url, "a/b", "anna"],  # no such name, or it would wait for a broker
        ["broker", "check", url],
        ["topology", "show", "ring"],
        ["topology", "compare", "ring", "clique"],
        ["topology", "stress", "ring"],
        ["topology", "advise", "--peers", "8"],
    ]
    owner = ["--owner", "owner.key", "--swarm", "garden"]
    quick = [
        ["keygen", "owner"],
        ["invite", *owner, "--uses", "2", "-o", "ticket"],
        ["revoke", *owner, "--paper", "0123456789abcdef"],
        ["ban", "anna", "--config", "peer.toml"],
        ["enrol", "--swarm", "garden", "--broker", "mqtts://broker.lan", "anna"],
        ["examples"],
        ["new", "mine"],
        ["broker", "config", "--nodes", "a,b,c", "--swarm", "garden", "--peer", "anna@abc"],
        ["service", "install", "anna.gossamer"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_HEAVY, json.dumps([*loading, *quick])],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"FORCE_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    known, printed = json.loads(done.stdout)
    for name in known:
        assert any(line.startswith(name) for line in printed), f"{name} is not tested here"
    for command in loading:
        _, text = printed[" ".join(command)]
        assert ": loading" in text, f"{command}: {text}"
    for command in quick:
        loads, text = printed[" ".join(command)]
        assert not loads, f"{command}: {text}"
    assert sum(loads is not None for loads, _ in printed.values()) > len(loading) / 2
