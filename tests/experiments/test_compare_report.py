"""A comparison's table and picture: no spread where there is one run, no heap of labels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gossamer.experiments.federated.comparison import label_bytes, standings, table
from gossamer.experiments.results import Record


def records(seeds: int) -> list[Record]:
    return [
        {
            "method": "fedavg",
            "seed": seed,
            "bound": False,
            "curve": [
                {"round": 3, "bytes": 10**6, "seconds": 1.0, "accuracy": [0.5 + seed / 10, 0.5]}
            ],
        }
        for seed in range(seeds)
    ]


def test_one_seed_has_no_deviation() -> None:
    one, two = (standings(records(seeds))["deviation"][0] for seeds in (1, 2))
    assert np.isnan(one)
    assert two == pytest.approx(0.05 / 2**0.5)
    shown = [table(records(seeds))["summary"]["± sd"][0] for seeds in (1, 2)]
    assert shown == ["", "0.035"]


@pytest.mark.parametrize("ends", [(1.0, 1.2), (0.15, 8.0), (0.3, 70.0), (0.001, 20_000.0)])
def test_labelslabel_bytes_have_room(ends: tuple[float, float]) -> None:
    figure = Figure(figsize=(14, 5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    _, axes, _ = figure.subplots(1, 3)
    axes.plot(ends, (0.1, 0.9))
    label_bytes(axes, None)
    canvas.draw()
    shown = axes.get_window_extent()
    boxes = [
        label.get_window_extent()
        for label in [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
        if label.get_text()
    ]
    inside = sorted((box.x0, box.x1) for box in boxes if shown.x0 <= box.x0 and box.x1 <= shown.x1)
    assert len(inside) >= 3
    assert all(right < left for (_, right), (left, _) in pairwise(inside))
