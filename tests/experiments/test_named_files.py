"""What a config names decides its result too: a sweep must notice when a file or module was changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch

from gossamer.experiments.config.named_files import entry_files, named_files
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.federated.comparison import Cell as Compared
from gossamer.experiments.federated.comparison import parse_comparison
from gossamer.experiments.federated.comparison import run_cells as run_compared
from gossamer.experiments.study import Job
from gossamer.experiments.study.sweep import Cell, run_cells

torch.set_num_threads(1)
OWN = """
import numpy as np
from gossamer.experiments.data import Dataset, samples
def make():
    data = samples(np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2)
    return Dataset("own", data, data, classes=2)
"""


def table(**changed: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "peers": 6,
        "rounds": 2,
        "data": {"samples": 20, "test": 30},
        "network": {"layout": "64=6=10"},
        "training": {"local_samples": 20},
        "models": [{"name": "global", "layout": "64-6-10"}],
    }
    return base | changed


def cell(folder: Path, **changed: Any) -> Cell:
    return Cell("", parse_config(table(**changed)), {}, str(folder / "config.toml"))


def graph(path: Path, made: nx.Graph) -> None:
    nx.write_graphml(made, path)


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content, "utf-8")

    return write


CASES: list[tuple[dict[str, Any], str, Callable[[Path], None], Callable[[Path], None]]] = [
    (
        {"topology": "mine.graphml"},
        "mine.graphml",
        lambda path: graph(path, nx.cycle_graph(6)),
        lambda path: graph(path, nx.complete_graph(6)),
    ),
    (
        {"topology": {"kind": "file", "path": "mine.graphml"}},
        "mine.graphml",
        lambda path: graph(path, nx.cycle_graph(6)),
        lambda path: graph(path, nx.complete_graph(6)),
    ),
    ({"topology": "own_graph:make"}, "own_graph.py", text("a = 1"), text("a = 2")),
    (
        {"time": {"churn": {"trace": "trace.csv"}}},
        "trace.csv",
        text("2,leave,5"),
        text("3,leave,5"),
    ),
    (
        {"network": {"entry": "own_net:make"}, "models": []},
        "own_net.py",
        text("a = 1"),
        text("a = 2"),
    ),
    (
        {"network": {"entry": "own_package.net:make"}, "models": []},
        "own_package/__init__.py",
        text("a = 1"),
        text("a = 2"),
    ),
    (
        {"network": {"layout": "64=6=10", "trained": "nets/{peer}.safetensors"}},
        "nets/5.safetensors",
        text("a"),
        text("b"),
    ),
    ({"data": {"set": "own_data:make"}}, "own_data.py", text("a = 1"), text("a = 2")),
]


@pytest.mark.parametrize(("changed", "name", "before", "after"), CASES)
def test_a_run_is_another_when_a_file_that_it_names_was_changed(
    changed: dict[str, Any],
    name: str,
    before: Callable[[Path], None],
    after: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "own_package").mkdir(exist_ok=True)
    (tmp_path / "own_package" / "net.py").write_text("from .layers import one\n", "utf-8")
    missing = cell(tmp_path, **changed).key
    before(file)
    first = cell(tmp_path, **changed).key
    assert file in named_files(cell(tmp_path, **changed).config, str(tmp_path / "config.toml"))
    assert first != missing
    assert first == cell(tmp_path, **changed).key
    after(file)
    assert first != cell(tmp_path, **changed).key


def test_modules_that_a_users_module_imports_count_too(tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text("from . import layers\nimport helpers, torch\n", "utf-8")
    (package / "layers.py").write_text("from .deep import deeper\n", "utf-8")
    (package / "deep.py").write_text("import own_package.net\n", "utf-8")  # in a circle, too
    (package / "apart.py").touch()
    (tmp_path / "helpers.py").touch()
    (tmp_path / "unused.py").touch()
    given = table(network={"entry": "own_package.net:make"}, models=[])
    found = named_files(parse_config(given), str(tmp_path / "config.toml"))
    assert {str(path.relative_to(tmp_path)) for path in found} == {
        *("own_package/__init__.py", "own_package/net.py", "own_package/layers.py"),
        *("own_package/deep.py", "helpers.py"),
    }


@pytest.mark.parametrize("topology", [None, "ring", "regular:4", "regulr:4", {"kind": "ring"}])
def test_names_that_are_no_files_are_none(topology: Any, tmp_path: Path) -> None:
    assert named_files(parse_config(table(topology=topology)), str(tmp_path / "config.toml")) == []


def test_a_file_that_is_changed_while_a_sweep_runs_ends_it(tmp_path: Path) -> None:
    graph(tmp_path / "mine.graphml", nx.cycle_graph(6))
    one = cell(tmp_path, topology="mine.graphml")
    assert run_cells([one], Job(tmp_path))[0]["key"] == one.key
    graph(tmp_path / "mine.graphml", nx.complete_graph(6))
    with pytest.raises(ConfigError, match="was changed while it ran"):
        run_cells([one], Job(tmp_path))
    assert run_cells([replace(one)], Job(tmp_path))[0]["key"] != one.key


def test_a_comparison_notices_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    methods = {"gossip-sgd": {"topology": "mine.graphml"}, "fedavg": {}}
    config = parse_comparison({"methods": methods, "data": {"set": "own_data:make"}})

    def keys() -> list[str]:
        return [Compared(name, config, 0).key for name in methods]

    before = keys()
    graph(tmp_path / "mine.graphml", nx.cycle_graph(10))
    after = keys()
    assert (before[0] != after[0], before[1] != after[1]) == (True, False)
    (tmp_path / "own_data.py").write_text("a = 1", "utf-8")
    assert not set(after) & set(keys())


def test_a_comparison_whose_files_change_meanwhile_ends(tmp_path: Path) -> None:
    (tmp_path / "own_data.py").write_text(OWN, "utf-8")
    tables = {"data": {"set": "own_data:make"}, "network": {"layout": "4=3=2"}, "rounds": 1}
    tables |= {"peers": 2}
    config = parse_comparison({"methods": {"local": {}}, **tables})
    one = Compared("local", config, 0, str(tmp_path / "config.toml"))
    assert run_compared([one], Job(tmp_path))[0]["key"] == one.key
    (tmp_path / "own_data.py").write_text(OWN + "# changed", "utf-8")
    with pytest.raises(ConfigError, match="was changed while it ran"):
        run_compared([one], Job(tmp_path))


def test_python_s_own_library_is_nobody_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder, or a container's root, may be above it."""
    monkeypatch.chdir("/")
    (tmp_path / "own_data.py").write_text("import json, logging, numpy\n", "utf-8")
    assert entry_files("own_data:make", tmp_path) == [tmp_path / "own_data.py"]
