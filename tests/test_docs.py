"""Every snippet of README and docs works as it stands.

A page is a folder: blocks that begin with a file's name, `# garden.py`, are written there, and Python blocks
run in it one after the other. TOML blocks are loaded. Commands are parsed with their options; those of a
block after `<!-- run: … -->` run.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from docs_kit import ALL, PAGES, ROOT, Block, blocks, lines, name, with_language, write_files

from gossamer.experiments.cli.app import app
from gossamer.experiments.config.examples import PREFIX, example_path
from gossamer.experiments.config.tables import parse_config, parse_table
from gossamer.experiments.federated.comparison import parse_comparison
from gossamer.experiments.live.device import JoinConfig


def test_every_block_has_a_language_that_is_checked():
    known = {"python", "toml", "sh", "text", "{toctree}", "{include}"}
    assert {(name(b.page), b.language) for b in ALL if b.language not in known} == set()


def test_links_lead_to_files():
    """Sphinx checks those between pages of the site; these are read in the repository."""
    for page in (each for each in PAGES if each.parent == ROOT):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            assert (ROOT / target).exists(), f"{name(page)}: {target}"


def test_the_table_of_commands_names_all_of_them():
    text = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    commands = [*app.registered_commands, *app.registered_groups]
    assert [each.name for each in commands if f"`gossamer {each.name}`" not in text] == []


def test_the_page_of_the_python_interface_is_for_people(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    text = importlib.import_module("gossamer_reference").python()
    assert not re.search(r" at 0x|FieldInfo|Validator\(func|\*\*data: Any", text)
    assert "mu: float = 0.1," in text.partition("### FedProx\n")[2][:400]
    assert "Config(\n    *,\n    rounds: int | Literal['forever'] = 30," in text


# --- Python ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a page, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", with_language("python"), ids=name)
def test_python_runs_as_it_stands(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    write_files(page, folder)
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        if block.language == "python" and not block.runs:
            exec(compile(block.text, f"{name(page)}, block {number}", "exec"), space)
    printed = [float(each) for each in re.findall(r"\d*\.?\d+", capsys.readouterr().out)]
    for sentence in re.findall(r"It prints (.*?)(?:\.\s|:)", page.read_text("utf-8"), re.DOTALL):
        for figure in re.findall(r"(?<![\w.])\.?\d+", sentence):
            assert any(abs(float(figure) - each) < 0.015 for each in printed), (figure, printed)


def test_adapters_of_peft_are_shared_alone(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("peft", reason="needs peft and transformers")
    (block,) = [b for b in blocks(ROOT / "docs/how-to/adapters.md") if b.runs]
    exec(compile(block.text, "adapters.md, PEFT", "exec"), {"__name__": "__main__"})
    trained, shared, changed = capsys.readouterr().out.splitlines()
    assert trained.startswith("546 of 14356 ")
    assert shared.startswith("512 ")
    assert changed == "True 10 changed"


def test_the_readme_claims_that_partial_models_are_best():
    text = (ROOT / "README.md").read_text("utf-8")
    (sentence,) = re.findall(r"It prints (.*?)outputs kept", text, re.DOTALL)
    alone, everything, partial = map(float, re.findall(r"\.\d+", sentence))
    assert everything < alone < partial
    (block,) = [b for b in blocks(ROOT / "README.md") if b.language == "python"]
    assert len(block.text.splitlines()) <= 20


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900


# --- TOML -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [b for b in ALL if b.language == "toml"],
    ids=lambda b: f"{name(b.page)}-{b.text[:20]!r}",
)
def test_toml_is_a_config_or_a_device_file(block: Block):
    table = tomllib.loads(block.text)
    if "methods" in table:
        assert parse_comparison(table).methods
    elif "entry" in table or "index" in table:
        assert parse_table(JoinConfig, table, name(block.page))
    else:
        assert parse_config(table).model_fields_set


# --- commands -------------------------------------------------------------------------------------------


COMMANDS = [(block, words) for block in ALL if block.language == "sh" for words in lines(block)]


@pytest.mark.parametrize("words", [w for _, w in COMMANDS if w[0] == "gossamer"], ids=" ".join)
def test_commands_parse_with_their_options(words: list[str]):
    command: Any = typer.main.get_command(app)
    arguments = words[1:]
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments.pop(0)]
    for word in arguments:
        if word.startswith(PREFIX):
            example_path(word.removeprefix(PREFIX))
    command.make_context("gossamer", arguments)  # raises a usage error


def test_commands_in_sentences_exist():
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for page in PAGES:
        for called in re.findall(r"`gossamer ([a-z]+)", page.read_text("utf-8")):
            assert called in known, f"{name(page)}: gossamer {called}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for _, words in COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
