"""The script that counts the house counts what it says, on a house small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import house
import pytest
import walks

FILES = {
    "pyproject.toml": """
        [tool.setuptools.package-dir]
        gossamer = "common"
        "gossamer.gossip" = "gossip"
        "gossamer.gossip.trust" = "gossip/trust"
        "gossamer.experiments" = "experiments"
    """,
    "common/__init__.py": "",
    "common/errors.py": '''
        """Errors."""


        class GossamerError(Exception):
            """The root."""


        class Stray(ValueError, KeyError): ...
    ''',
    "gossip/__init__.py": "from .wire import encode as encode",
    "gossip/wire.py": '''
        """Bytes.

        In three lines, and a comment.
        """

        from ..errors import GossamerError

        # Not code.
        class WireError(GossamerError):
            size: int = 1
            """Not code either."""


        def encode(text):
            return """two
            lines"""  # code
    ''',
    "gossip/trust/__init__.py": "from ..wire import WireError as WireError",
    "experiments/__init__.py": "",
    "experiments/run.py": """
        import os
        from typing import Any, cast

        import msgpack

        from gossamer.gossip import encode

        from ..gossip import trust
        from ..gossip.wire import WireError


        class Runner:
            def __init__(self, given: msgpack.Packer):
                self._given = cast(Any, given)
                self._own = encode("x")

            def run(self):
                from ..gossip import wire
                from ..gossip.trust import WireError as One, WireError as Two

                self._given._own, self._own._hidden, os._exit
                return trust, wire, WireError, One, Two
    """,
    "experiments/notes.txt": "",
    "tests/test_run.py": """
        from time import sleep
        from unittest import mock


        def test_it(runner, monkeypatch):
            monkeypatch.setattr(runner, "x", 1)
            monkeypatch.setenv("WHERE", "here")
            monkeypatch.undo()
            sleep(1)
            sleep(0)
            with mock.patch.object(runner, "y", 1):
                assert runner._own._deep


        class TestIt:
            def test_more(self):
                assert self._fine
    """,
    "tests/waiting.py": "import time; time.sleep(1)",
    "tests/lives/world.py": "import time; time.sleep(1); world._hidden",
    "tests/lives/mutants.py": "mock.patch.object(world, '_hidden', world._shown)",
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return tmp_path


def test_a_small_house(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["--counts", "--json"], small) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {name: figure["number"] for name, figure in figures.items()} == {
        "code": 2 + 1 + 6 + 1 + 15,
        "lines": 8 + 1 + 16 + 1 + 22,
        "files": 7,
        "one importer": 3,
        "past a door": 1,
        "in functions": 3,
        "private names": 1,
        "tests: private": 3,
        "tests: patches": 2,
        "tests: sleeps": 1,
        "error roots": 2,
        "entries of experiments": 2,
    }
    assert figures["one importer"]["names"] == [
        "gossamer.errors",
        "gossamer.gossip",
        "gossamer.gossip.trust",
    ]
    assert figures["past a door"]["names"] == [
        "gossamer.experiments.run imports gossamer.gossip.wire"
    ]
    assert figures["past a door"]["note"] == "of 4 cross-package imports"
    assert figures["private names"]["names"] == {"msgpack": {"_own": ["experiments/run.py:21"]}}
    assert figures["tests: sleeps"]["names"] == ["tests/test_run.py:9"]
    assert figures["error roots"]["names"] == [
        "gossamer.errors.GossamerError",
        "gossamer.errors.Stray",
    ]


def test_every_file_of_the_program_is_counted() -> None:
    found = house.sources().values()
    folders = {source.path.relative_to(house.ROOT).parts[0] for source in found}
    there = {path for folder in folders for path in (house.ROOT / folder).rglob("*.py")}
    assert {source.path for source in found} == there


def test_every_figure_has_a_goal(small: Path) -> None:
    assert {*house.count(small), *walks.WALKS} == set(house.GOALS)
    assert walks.GO.keys() == walks.WALKS.keys()


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["--jsno"]) == 2
    assert capsys.readouterr().err == "error: --jsno: use --json or --counts\n"


# --- laws of this house -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules() -> dict[str, house.Source]:
    return house.sources()


def test_packages_are_entered_by_their_doors(modules) -> None:
    across, past = house.cross_imports(modules, house.imports(modules))
    assert across
    assert past == set()


def test_errors_are_one_family(modules) -> None:
    assert house.error_roots(modules) == ["gossamer.errors.GossamerError"]
