"""The benchmark of large networks times what it says: values out and in, and a step that learns."""

from __future__ import annotations

import torch

from gossamer.experiments.bench import models
from gossamer.experiments.bench.models import prepare

torch.set_num_threads(1)


def test_what_is_timed() -> None:
    work = prepare(widths=(8, 16), blocks=1)
    assert (
        0.5 * work.values < work.shared < 0.8 * work.values
    )  # a weight is shared if both ends are
    work.exchange()
    work.step()


def test_the_ratio_is_of_the_exchange_to_the_step() -> None:
    small = prepare(widths=(4,), blocks=1)
    threads: list[int] = []

    def alternate(exchange: object, step: object, *, repeats: int) -> tuple[float, float]:
        assert (exchange, step) == (small.exchange, small.step)
        threads.append(torch.get_num_threads())
        return 0.02, 1.0

    (row,) = models.networks(lambda: small, alternate)
    assert (row.ratio, row.met, threads) == (0.02, True, [1])
