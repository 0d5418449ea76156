"""Panels side by side, in the style of the other figures."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def panels(
    count: int, caption: str, width: float = 3.6, height: float = 3.4
) -> tuple[Figure, list[Axes]]:
    """A row of axes that share y, with a wrapped caption below."""
    letters = int(14.5 * width * count)
    caption = textwrap.fill(caption, letters)
    room = 0.17 * (caption.count("\n") + 1)
    figure = Figure(figsize=(width * count, height + room), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8, color="#444444", x=0.02, ha="left")
    return figure, axes
