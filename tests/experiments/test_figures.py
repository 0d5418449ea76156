"""Figures: both files, legible in full, and the same bytes for the same results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gossamer.experiments.study import frame_of
from gossamer.experiments.study.figures import (
    canvas,
    draw_lines,
    place_legend,
    plot_lines,
    save,
)

LINES = frame_of(
    [
        ("none", x, y, low, high)
        for x, y, low, high in [(50, 0.6, 0.55, 0.7), (0, 0.5, 0.4, 0.6), (100, 0.55, 0.5, 0.6)]
    ]
    + [("80 + 20 per class, dependency", 0, 0.7, 0.7, 0.7)],
    columns=["scheme", "x", "y", "low", "high"],
)
COLUMNS = ("scheme", "x", "y", "low", "high")


def draw(path: Path, caption: str = "first line\nsecond line") -> list[Path]:
    return draw_lines(
        path, LINES, COLUMNS, title="A title", x_label="level", caption=caption, legend="scheme"
    )


def test_png_and_svg_with_every_word(tmp_path: Path) -> None:
    png, svg = draw(tmp_path / "figure")
    assert png.read_bytes().startswith(b"\x89PNG")
    # letters are drawn as paths, their text stays in comments
    words = set(re.findall(r"<!-- (.*?) -->", svg.read_text()))
    assert {"A title", "level", "accuracy", "scheme", "first line", "second line"} <= words
    assert set(LINES["scheme"]) <= words


def test_equal_results_are_equal_files(tmp_path: Path) -> None:
    one, two = draw(tmp_path / "one"), draw(tmp_path / "two")
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
    assert b"dc:date" not in one[1].read_bytes()


def test_error_bars_reach_the_ends_given() -> None:
    _, axes = canvas()
    plot_lines(axes, LINES, *COLUMNS)
    bars, _ = axes.collections
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]  # type: ignore[attr-defined]
    expected = [[0.4, 0.6], [0.55, 0.7], [0.5, 0.6]]  # in the order of x
    assert ends == [pytest.approx(pair) for pair in expected]
    _, plain = canvas()
    plot_lines(plain, LINES, *COLUMNS[:3])
    assert not plain.collections


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_the_caption_is_inside_the_figure_and_below_the_axis_label(lines: int) -> None:
    caption = "\n".join(["sixteen peers with 3500 digits each, 8 and 9 swapped; " * 4] * lines)
    figure, axes = canvas(caption)
    axes.plot([0, 1], [0, 1], label="a label")
    axes.set(xlabel="averaging level", title="title")
    place_legend(axes, "legend")
    figure.draw_without_rendering()
    (text,) = figure.texts
    box, label = text.get_window_extent(), axes.xaxis.label.get_window_extent()
    legend = axes.get_legend()
    assert legend is not None
    assert box.y0 >= 0
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert text.get_text().split() == caption.split()
    assert box.y1 <= label.y0
    assert legend.get_window_extent().x1 <= figure.bbox.width


def test_names_with_a_dot_keep_it(tmp_path: Path) -> None:
    figure, _ = canvas()
    assert [file.name for file in save(figure, tmp_path / "rate-0.1")] == [
        "rate-0.1.png",
        "rate-0.1.svg",
    ]
