"""The README's program runs as printed, and its commands exist."""

import re
from pathlib import Path

import pytest
import torch
import typer.main

from gossamer.experiments.cli.app import app

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


@pytest.fixture
def library_example() -> str:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]


def test_the_library_example_is_thirty_lines_and_learns(library_example, capsys):
    torch.set_num_threads(1)
    assert len(library_example.splitlines()) <= 30
    sentence = re.search(r"It prints (.*?)outputs kept", README, re.DOTALL)
    assert sentence is not None
    printed = [float(number) for number in re.findall(r"\.\d+", sentence[1])]
    exec(compile(library_example, "README.md", "exec"), {})
    alone, everything, partial = (
        float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()
    )
    assert partial > alone + 0.03
    assert alone > everything  # nobody agrees on what the outputs mean
    for figure in (alone, everything, partial):
        assert abs(figure - min(printed, key=lambda one: abs(one - figure))) < 0.015


def test_every_command_of_the_readme_exists():
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`gossamer (\w+)", README))
    assert named <= commands
    assert commands - {"bench"} <= named | {"demo"}
