"""Entry points: `module:function` names, and what is said when they lead nowhere."""

from __future__ import annotations

import re
import sys

import pytest

from gossamer.entry import ArgumentsError, EntryError, call_entry, load_entry, require_module


def test_a_function_of_an_installed_module():
    from gossamer.models import mlp

    assert load_entry("gossamer.models:mlp") is mlp


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_entry_device.py").write_text("def make(size): return size + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert load_entry("my_entry_device:make")(2) == 3
    assert sys.path.count(str(tmp_path)) == 1
    load_entry("my_entry_device:make")
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"sise": 1}, "make has no argument 'sise'; did you mean 'size'?"),
        ({}, "make: missing a required argument: 'size'"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_named(
    arguments, reason, tmp_path, monkeypatch
):
    (tmp_path / "sized_entry_device.py").write_text("def make(size, seed=0): return size\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentsError, match=re.escape(reason)):
        call_entry("sized_entry_device:make", arguments)


@pytest.mark.parametrize("name", ["", "module", "module:", ":function"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(EntryError, match=r"is not an entry point: write module:function"):
        load_entry(name)


def test_a_module_that_is_not_there_is_named_and_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = re.escape(str(tmp_path))
    for load in (load_entry, require_module):
        with pytest.raises(EntryError, match=f"no module 'no_such_module_here' in {places}"):
            load("no_such_module_here:make")


def test_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "slow_entry_device.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    require_module("slow_entry_device:make")
    assert "slow_entry_device" not in sys.modules


def test_a_module_that_needs_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "needy_entry_device.py").write_text("import not_installed_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EntryError, match="not_installed_at_all"):
        load_entry("needy_entry_device:make")


@pytest.mark.parametrize("name", ["nothing", "MAX"])
def test_what_is_no_function_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "plain_entry_device.py").write_text("MAX = 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EntryError, match=f"'plain_entry_device' has no function or class '{name}'"):
        load_entry(f"plain_entry_device:{name}")


def test_a_misspelt_name_gets_the_nearest_of_the_modules_own(tmp_path, monkeypatch):
    (tmp_path / "spelt_entry_device.py").write_text(
        "from pathlib import Path as Neat\n\n\nclass Net: ...\n\n\ndef make(): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EntryError, match=r"or class 'Nett'; did you mean 'Net'\?$"):
        load_entry("spelt_entry_device:Nett")
    with pytest.raises(EntryError, match=r"or class 'xyz'; it has Net, make$"):
        load_entry("spelt_entry_device:xyz")


def test_what_a_function_raises_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "raising_entry_device.py").write_text("def make():\n    raise KeyError('sensor')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EntryError, match=r"_device:make raised KeyError: 'sensor', at .*\.py:2$"):
        call_entry("raising_entry_device:make", {})


def test_errors_of_ours_pass_as_they_are():
    from gossamer.models import ModelError

    with pytest.raises(ModelError, match="layout"):
        call_entry("gossamer.models:mlp", {"layout": "nonsense"})


def test_what_a_module_does_when_it_is_imported_is_told(tmp_path, monkeypatch):
    (tmp_path / "broken_entry_device.py").write_text("\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EntryError, match=r"broken_entry_device raised ZeroDivisionError.*\.py:2$"):
        load_entry("broken_entry_device:make")
