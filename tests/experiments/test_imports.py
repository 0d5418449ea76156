"""Imports point one way, experiments → peer → {models, gossip, topology}, and nothing unpickles."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BELOW = {
    "models": set(),
    "gossip": set(),
    "topology": set(),
    "peer": {"models", "gossip", "topology"},
    "experiments": {"peer", "models", "gossip", "topology"},
}
# Each of these can run a program that hides in what it reads.
UNSAFE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
SOURCES = sorted(path for folder in BELOW for path in (ROOT / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def imported(tree: ast.Module, path: Path) -> frozenset[str]:
    """The dotted names that a file imports, relative ones resolved from the repository's root."""
    package = ["gossamer", *path.parent.parts]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def forbidden(tree: ast.Module, path: Path) -> set[str]:
    """The folders of this repository that a file must not import."""
    folder = path.parts[0]
    known = {name.split(".")[1] for name in imported(tree, path) if name.startswith("gossamer.")}
    return (known & set(BELOW)) - BELOW[folder] - {folder}


def test_imports_point_down() -> None:
    found = {path: forbidden(parsed(path), path.relative_to(ROOT)) for path in SOURCES}
    assert {str(path): folders for path, folders in found.items() if folders} == {}
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(BELOW)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("gossip/wire.py", "from ..models import Layout", {"models"}),
        ("gossip/wire.py", "from .. import topology", {"topology"}),
        ("gossip/wire.py", "def f():\n    import gossamer.peer.broker", {"peer"}),
        ("models/a.py", "from gossamer.gossip.wire import x", {"gossip"}),
        ("peer/a.py", "from ..experiments.build import Swarm", {"experiments"}),
        (
            "experiments/papers/a.py",
            "from ...peer import broker\nfrom ..config import Config",
            set(),
        ),
        ("models/a.py", "import topology_of_others\nfrom .layout import Layout", set()),
    ],
)
def test_the_check_sees_every_way_to_import(path: str, source: str, expected: set[str]) -> None:
    assert forbidden(ast.parse(source), Path(path)) == expected


def test_pickle_is_imported_by_the_restricted_reader_of_cifar_and_the_runner_of_studies() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for name in imported(parsed(path), path.relative_to(ROOT))
        if name.split(".")[0] in UNSAFE
    }
    assert users == {"experiments/data/cifar.py", "experiments/study/workers.py"}


def test_the_runner_of_studies_uses_joblib_for_worker_processes_alone() -> None:
    tree = parsed(ROOT / "experiments/study/workers.py")
    uses = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "joblib"
    ]
    # Nothing of joblib that writes files: they would be pickles.
    assert sorted(uses) == ["Parallel", "delayed", "parallel_config"]


def test_cifar_uses_pickle_only_as_the_base_of_its_unpickler() -> None:
    tree = parsed(ROOT / "experiments/data/cifar.py")
    bases = [
        base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases
    ]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "pickle"]
    assert [ast.unparse(base) for base in bases] == ["pickle.Unpickler"]
    assert len(uses) == 1


def test_torch_files_are_never_loaded_as_pickles() -> None:
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("load", "save")
                and ast.unparse(node.func.value) == "torch"
            ):
                pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno}: use safetensors instead")
