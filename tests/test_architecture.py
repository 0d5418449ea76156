"""The pages on the architecture and on a peer's life say what the code says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from gossamer.peer.lifecycle import FINAL, TABLE, State

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LIFE = ROOT / "docs" / "explanation" / "life.md"


def drawn() -> str:
    """Return the life as a table: for every state, which event leads where."""
    lines = ["| state | event → next state |", "| --- | --- |"]
    for state in State:
        if state in FINAL:
            continue
        ways: dict[State, list[str]] = {}
        for (before, event), following in TABLE.items():
            if before is state and event.name != "ABORT":
                ways.setdefault(following, []).append(event.name.lower().replace("_", " "))
        text = "; ".join(f"{', '.join(events)} → **{to.name}**" for to, events in ways.items())
        lines.append(f"| {state.name} | {text} |")
    final = ", ".join(state.name for state in State if state in FINAL)
    return "\n".join(
        [*lines, "", f"*abort* leads from everywhere to **ABORTED**. Final states: {final}."]
    )


def test_the_life_on_the_page_is_the_table_in_the_code():
    text = LIFE.read_text("utf-8")
    assert f"<!-- life -->\n\n{drawn()}\n" in text, f"put this after <!-- life -->:\n\n{drawn()}"


def test_every_file_on_the_page_is_there():
    """Names without a folder belong to the folder that was named before them in the same line or cell."""
    folder = ""
    missing = []
    for name in re.findall(r"`([\w./-]+)`", PAGE.read_text("utf-8")):
        if "/" in name:
            folder = name if name.endswith("/") else f"{name.rpartition('/')[0]}/"
            path = ROOT / name
        elif name.endswith(".py"):
            path = ROOT / folder / name
        else:
            continue
        if not path.exists():
            missing.append(str(path.relative_to(ROOT)))
    assert not missing


def test_every_file_in_the_pictures_is_there():
    files = {path.name for path in ROOT.glob("*/**/*.py")}
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert files.issuperset(re.findall(r"\w+\.py", picture.read_text("utf-8"))), picture.name


def test_the_wheel_has_every_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(setuptools["package-dir"])
