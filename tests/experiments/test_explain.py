"""`gossamer explain` covers every key of every file; `gossamer examples` lists configs that run anywhere."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from cli_kit import runs
from pydantic import BaseModel

from gossamer.experiments.config.examples import examples
from gossamer.experiments.config.reference import explain, reference
from gossamer.experiments.config.tables import Config, load_config
from gossamer.experiments.federated import METHODS
from gossamer.experiments.federated.comparison import Comparison, load_comparison
from gossamer.experiments.live.device import JoinConfig

ROOT = Path(__file__).parents[2]
run = runs("explain")


def declared(table: Any) -> Iterator[tuple[str, str]]:
    """Yield class and name of every key below a table, found by its type hints alone."""
    if isinstance(table, type) and issubclass(table, BaseModel):
        for name, field in table.model_fields.items():
            yield table.__name__, name
            yield from declared(field.annotation)
    elif isinstance(table, type) and is_dataclass(table):
        hints = {field.name for field in fields(table)}
        yield from ((table.__name__, name) for name in hints)
    else:
        for argument in get_args(table):
            yield from declared(argument)


def test_every_key_of_every_file_has_a_text():
    roots = [Config, Comparison, JoinConfig, *METHODS.values()]
    names = {name for root in roots for _, name in declared(root)}
    explained = {key.name for table in reference() for key in table.keys}
    assert names <= explained
    assert len(names) > 100
    for table in reference():
        assert table.text
        for key in table.keys:
            assert len(key.text) > 10, table.full_name(key)
            assert key.values, table.full_name(key)
            tables, entries = explain(table.full_name(key))
            found = any(table in entry.tables for entry in entries)
            assert found or tables, table.full_name(key)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "gossip.mode",
            ["gossip.mode: [gossip] of the config of a swarm", '"async"', "never wait"],
        ),
        ("mode", ["mode: top level of the file of a device", 'default: "async"']),
        ("models.0.share", ["at least 0 and at most 1", "fraction of the cells"]),
        ("[[models]]", ["[[models]] of the config of a swarm", "depends", "required"]),
        ("trust.guards.outlier", ["median distance"]),
        ("matching.NAME.width", ["common starting values"]),
        ("matching.everyone.width", ["matching.NAME.width: ", "common starting values"]),
        ("[matching.everyone]", ["[matching.NAME] of the file of a device"]),
        ("methods", ["a table of tables; default: {fedavg = {}, gossamer = {}, local = {}}"]),
        ("models.layout", ["values: text; default: none (optional)"]),
        ("time", ["values: a list of tables; default: []"]),
        ("methods.fedprox", ["mu", "raise it when clients' data differ"]),
        ("dirichlet", ["data.partition", "split among the peers"]),
        ("forever", ["rounds: top level", "until they are told to leave"]),
        ("trust", ["identity", "of the file of a device", "of the config of a swarm"]),
    ],
)
def test_it_explains(run, name, words):
    result = run(name)
    assert result.code == 0
    text = " ".join(result.out.split())
    assert [word for word in words if word not in text] == []


def test_a_key_of_several_files_is_explained_once(run):
    assert run("lease").out.count("is given up") == 1


def test_without_a_key_all_are_listed_by_table_with_what_each_is(run):
    lines = run().out.splitlines()
    for table in reference():
        place = lines.index(table.place)
        listed = lines[place + 1 : place + 1 + len(table.keys)]
        assert [line.split()[0] for line in listed] == [key.name for key in table.keys]
        for line, key in zip(listed, table.keys, strict=True):
            assert line.split()[1] == key.text.split()[0].rstrip(".")
            assert len(line) <= 96


def test_no_text_sends_its_reader_to_a_source_file():
    for table in reference():
        for text in (table.text, *(key.text for key in table.keys)):
            assert not re.search(r"\.py\b|see the class|see `?[A-Z]", text), text


def test_an_unknown_key_gets_the_nearest(run):
    result = run("gossip.mod")
    assert result.code == 2
    assert "did you mean 'gossip.mode'?" in result.err
    for unlike_all in ("qqqqqqqqqqq", "0", "[]"):
        assert "gossamer explain lists all" in run(unlike_all).err


# --- examples -----------------------------------------------------------------------------------------

gossamer = runs()


def test_every_example_is_listed_with_what_it_shows(gossamer):
    text = " ".join(gossamer("examples").out.split())
    assert "gossamer simulate example:karate Zachary's karate club" in text
    assert "gossamer compare example:compare Ten clients" in text
    assert "gossamer sweep example:sweep" in text
    for name in examples():
        assert f"example:{name}" in text


def test_an_example_runs_from_any_folder(gossamer):
    result = gossamer("simulate", "example:karate", "--show-settings")
    assert result.code == 0
    assert "networkx:karate_club_graph" in result.out
    assert 'name = "karate"' in gossamer("examples", "karate").out


def test_no_key_is_all_keys(gossamer):
    assert gossamer("explain", "").out == gossamer("explain").out


def test_an_unknown_example_gets_the_nearest(gossamer):
    assert "did you mean 'karate'?" in gossamer("simulate", "example:karat").err


@pytest.mark.parametrize("like", examples())
def test_a_new_project_names_its_own_functions(gossamer, like):
    result = gossamer("new", "mine", "--like", like)
    assert result.code == 0, result.err
    path = Path("mine.toml")
    is_comparison = "run it: gossamer compare mine.toml" in result.out
    config = load_comparison(path) if is_comparison else load_config(path)
    assert (config.name, config.data.set) == ("mine", "mine:load_data")
    has_network = "mine:make_net" in path.read_text()
    assert ("def make_net" in Path("mine.py").read_text()) == has_network == (like == "cnn")
    assert "exists already" in gossamer("new", "mine").err


def test_a_project_that_cannot_be_a_module_is_refused(gossamer):
    assert "cannot be the name of a Python module" in gossamer("new", "my-swarm").err
    assert "numpy.py would hide Python's module numpy" in gossamer("new", "numpy").err
    assert not Path("numpy.py").exists()
    assert "did you mean 'karate'?" in gossamer("new", "mine", "--like", "karat").err


def test_the_wheel_has_the_examples():
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    assert "configs/*.toml" in data["gossamer.experiments"]
    assert {path.parent for path in examples().values()} == {ROOT / "experiments" / "configs"}
