"""The command as a person meets it: exit codes, one-line errors, files where they were said to be."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from cli_kit import Run, runs

from gossamer.experiments.cli import app as cli
from gossamer.experiments.cli import console
from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.data import descriptions, names
from gossamer.experiments.live import run as watch
from gossamer.experiments.papers import PAPERS

torch.set_num_threads(1)

TINY = """
name = "tiny"
peers = 2
rounds = 2
[data]
samples = 10
test = 20
[network]
layout = "64=4=10"
"""


gossamer = runs(tiny=TINY)


def commands() -> list[str]:
    return [command.name or "" for command in cli.app.registered_commands]


def test_help_lists_every_command(gossamer: Run) -> None:
    result = gossamer("--help")
    assert result.code == 0
    assert {"demo", "simulate", "paper", "data"} <= set(commands())
    for name in commands():
        assert f" {name} " in result.out
    assert "--debug" in result.out


@pytest.mark.parametrize("name", commands())
def test_help_of_every_command_is_readable(gossamer: Run, name: str) -> None:
    result = gossamer(name, "-h")  # --help: test_help_lists_every_command
    assert (result.code, result.err) == (0, "")
    assert f"Usage: gossamer {name}" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    (command,) = [one for one in cli.app.registered_commands if one.name == name]
    summary = (command.help or "").split()[:5]
    assert summary
    assert " ".join(summary) in " ".join(result.out.split())


def test_every_option_says_what_it_is_for() -> None:
    def silent(command: Any, path: str) -> Iterator[str]:
        yield from (f"{path} {one.name}" for one in command.params if not one.help)
        for name, inner in getattr(command, "commands", {}).items():
            yield from silent(inner, f"{path} {name}")

    assert list(silent(typer.main.get_command(cli.app), "gossamer")) == []


def all_commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the command line, with the words that call it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from all_commands(inner, *path, name)


@pytest.mark.parametrize(
    ("words", "command"),
    [*all_commands(typer.main.get_command(cli.app))],
    ids=lambda each: str(each),
)
def test_help_prints_all_that_was_written_and_nothing_about_types_of_flags(
    gossamer: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], command: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # so that no text is wrapped
    shown = gossamer(*words, "-h").out
    texts = [*(command.help or "").split("\n\n"), *(one.help for one in command.params)]
    for text in texts:
        assert text.replace("\\[", "[") in shown
        assert "\n" not in text or "\n " in text or "\n-" in text
    assert "<bool>" not in shown
    assert not re.search(r"│[ *]+--\w.* <list", shown)


def test_the_extra_that_an_option_needs_is_named(gossamer: Run) -> None:
    for name in ("join", "status"):
        assert "gossamer[metrics]" in gossamer(name, "--help").out


def test_help_leaves_the_texts_of_options_most_of_a_narrow_terminal(
    gossamer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (line,) = (
        each for each in gossamer("join", "-h").out.splitlines() if "│ --metrics-port" in each
    )
    assert line.index("Serve") <= 36


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_port_that_does_not_exist_is_refused(gossamer: Run, port: str) -> None:
    result = gossamer("broker", f"--port={port}")
    assert result.code == 2
    assert f"{port} is not a port, 0 to 65535" in result.err


def test_help_lists_commands_by_what_they_are_for(gossamer: Run) -> None:
    shown = gossamer("--help").out
    places = [
        shown.index(word)
        for panel, names in cli.PANELS.items()
        for word in (f"╭─ {panel} ", *(f"│ {name} " for name in names if name in commands()))
    ]
    assert places == sorted(places)


def test_without_a_command_help_is_shown(gossamer: Run) -> None:
    result = gossamer()
    assert "Usage: gossamer" in result.out + result.err


def test_simulate_says_which_files_it_wrote(gossamer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REPORT_AFTER", 1e9)  # however slow the machine is
    result = gossamer("simulate", "tiny.toml", "--networks")
    assert result.code == 0
    outcome, *lines, offer = result.out.splitlines()
    assert outcome == "accuracy 0.125 after round 2: the mean over 2 peers, from 0.100 to 0.150"
    assert offer == "a page of these results: gossamer report results/tiny/001"
    written = [line.removeprefix("wrote ") for line in lines]
    assert written == [
        f"results/tiny/001/{name}"
        for name in (
            "metrics.jsonl",
            "summary.csv",
            "accuracy.png",
            "accuracy.svg",
            "0.safetensors",
            "1.safetensors",
        )
    ]
    assert all(Path(file).exists() for file in written)


def test_out_chooses_the_folder(gossamer: Run) -> None:
    assert gossamer("simulate", "tiny.toml", "-o", "else/where").code == 0
    assert json.loads(Path("else/where/config.json").read_text())["name"] == "tiny"
    assert not Path("results").exists()


def test_a_study_without_its_data_says_what_runs_without(
    gossamer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    result = gossamer("paper", "vsn", "--runs", "1", "--only", "0", "--on", "local:1")
    assert result.code == 2
    said = " ".join(result.err.split())
    assert "hapt_fft100.npz" in said
    assert "GOSSAMER_DATA" in said
    assert said.endswith("gossamer paper vsn --quick needs no files")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("simulate", "none.toml"), "none.toml: there is no such file"),
        (("simulate", "wrong.toml"), "wrong.toml: unknown key 'pears'; did you mean 'peers'?"),
        (("simulate", "misfit.toml"), "misfit.toml: key 'network.layout': the first layer has 63"),
        (
            ("paper", "semilocal"),
            "no reproduction is called 'semilocal'; did you mean 'semi-local'?",
        ),
        (
            ("paper", "semi-local", "--only", "global 80", "--only", "nothing"),
            "semi-local has no line 'nothing'; lines are 'no averaging', 'global 100', ",
        ),
        (("data", "minst"), "no data set is called 'minst': did you mean 'mnist'?"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_code_2(
    gossamer: Run, arguments: tuple[str, ...], text: str
) -> None:
    Path("wrong.toml").write_text("pears = 3")
    Path("misfit.toml").write_text('peers = 2\nnetwork.layout = "63=4=10"')
    result = gossamer(*arguments)
    assert result.code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert text in line


def test_a_folder_that_cannot_be_written_is_named(gossamer: Run) -> None:
    result = gossamer("simulate", "tiny.toml", "-o", "tiny.toml/x")
    assert result.code == 2
    assert (
        result.err == "error: tiny.toml/x: cannot be a folder: tiny.toml is a file; name another\n"
    )


def test_square_brackets_in_an_error_are_shown(gossamer: Run) -> None:
    """rich would take [red] for a colour and swallow it."""
    assert "[red].toml" in gossamer("simulate", "[red].toml").err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        cli.main(["--debug", "simulate", "none.toml"])


@pytest.mark.parametrize("option", [("--runs", "0"), ("--on", "local:0"), ("--runs", "many")])
def test_bad_options_are_refused(gossamer: Run, option: tuple[str, str]) -> None:
    result = gossamer("paper", "semi-local", *option)
    assert result.code == 2
    assert option[0] in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("arguments", [("paper",), ("paper", "list"), ("paper", "LIST")])
def test_paper_list(gossamer: Run, arguments: tuple[str, ...]) -> None:
    result = gossamer(*arguments)
    assert result.code == 0
    for entry in PAPERS.values():
        assert entry.name in result.out
        assert entry.origin in result.out
    assert "per seed" in result.out


def test_data_lists_names_and_describes_one(gossamer: Run) -> None:
    listed = [line.split()[0] for line in gossamer("data").out.splitlines() if line.strip()]
    assert [name for name in listed if name in names()] == list(names())
    result = gossamer("data", "digits")
    assert result.code == 0
    for value in ("1437", "360", "1×8×8", "10"):
        assert value in result.out


@pytest.mark.parametrize("command", [("swarm", "tiny.toml", "-o", "out"), ("demo", "-o", "out")])
def test_an_interrupted_live_swarm_says_that_the_next_run_starts_anew(
    gossamer: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "run_live", stop)
    result = gossamer(*command, "--broker", "mqtt://127.0.0.1")
    assert result.code == 130
    assert result.err.splitlines()[-1] == (
        "interrupted; records, networks and reports are kept in out; the next run starts anew"
    )
    assert "Traceback" not in result.err


def test_the_installed_command_ends_with_one_line(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "gossamer"
    done = subprocess.run(
        [command, "simulate", "none.toml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.toml: there is no such file\n"


def test_ctrl_c_keeps_what_was_computed(gossamer: Run, tmp_path: Path) -> None:
    """The real signal, in the second of many rounds; while modules load, see test_interrupts.py."""
    (tmp_path / "pressing.py").write_text(
        "import signal\n"
        "from gossamer.models import Callback\n"
        "class CtrlC(Callback):\n"
        "    def round(self, progress):\n"
        "        if progress.round == 2:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "        return False\n"
    )
    text = TINY.replace("rounds = 2", 'rounds = 1000000\ncallbacks = ["pressing:CtrlC"]')
    (tmp_path / "long.toml").write_text(text)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background ignores it
    try:
        result = gossamer("simulate", "long.toml", "-o", "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.code == 130
    assert result.err.splitlines()[-1] == (
        "interrupted; results so far are kept in out; a run with --checkpoint N can be continued"
    )
    assert "Traceback" not in result.err
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) in (2, 4)
    assert len((tmp_path / "out" / "summary.csv").read_text().splitlines()) == 1 + 2
    assert (tmp_path / "out" / "accuracy.png").exists()


@pytest.mark.parametrize("table", ["[time]", "[sweep]\nseed = [0, 1]"])
def test_live_peers_refuse_what_is_for_simulations(gossamer, tmp_path: Path, table: str):
    (tmp_path / "live.toml").write_text(f"{TINY}\n{table}\n")
    found = gossamer("swarm", "live.toml")
    assert found.code == 2
    assert "[time] and [sweep] are for gossamer simulate and gossamer sweep" in " ".join(
        found.err.split()
    )


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        ("rounds = 2", 'rounds = 2\ntopology = "torus:rows=3"', "key 'topology'"),
        ("[data]\nsamples = 10", 'sharing = "auto"\n[data]\nsamples = 9', "key 'sharing'"),
    ],
)
def test_a_swarm_is_refused_before_its_broker_starts(
    gossamer: Run, tmp_path: Path, old: str, new: str, refusal: str
) -> None:
    (tmp_path / "live.toml").write_text(TINY.replace(old, new))
    found = gossamer("swarm", "live.toml", "-o", "out")
    assert found.code == 2
    assert "broker" not in found.err
    assert f"error: live.toml: {refusal}" in found.err
    assert not (tmp_path / "out").exists()


def test_a_demo_whose_broker_cannot_be_leaves_no_folder(gossamer: Run, tmp_path: Path) -> None:
    found = gossamer("demo", "--broker", "garden", "-o", "out")
    assert found.code == 2
    assert "a broker's URL starts with one of mqtt://" in found.err
    assert not (tmp_path / "out").exists()


def test_data_sets_are_listed_with_what_they_are(gossamer: Run) -> None:
    lines = gossamer("data").out.splitlines()
    for name, (text, folder) in descriptions().items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert text in line
        assert line.rstrip().endswith(folder)
