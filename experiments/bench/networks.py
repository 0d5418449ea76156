"""What partial models cost on a large network: gathering and scattering against training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...models import SlicedNetwork, resnet
from .harness import Row, alternate

BATCH = 32
LEVEL = 0.8
"""The share of every hidden part that is averaged."""
WANTED = 0.05
"""The most that reading and writing may take of one step."""
REPEATS = 3
"""A step of ResNet-18 takes seconds."""


@dataclass(frozen=True)
class Work:
    """The two things that are timed, and what they work on."""

    exchange: Callable[[], object]
    step: Callable[[], object]
    values: int
    shared: int


def prepare(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2) -> Work:
    """A residual network for 32×32 images, most of whose cells are global; ResNet-18 by default."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    module = resnet(widths=widths, blocks=blocks)
    network = SlicedNetwork(module, {"global": LEVEL}, example=images[:1], seed=0, check=False)
    module.train()

    def exchange() -> None:
        """What one averaging asks of a network: its values out, other values in."""
        network.write("global", network.read("global"))

    def step() -> None:
        """One step of plain descent."""
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(images), labels).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)

    return Work(exchange, step, len(network.flat), len(network.slicing.coordinates("global")))


def networks() -> list[Row]:
    """Read and write a partial model at level 80 beside one training step of batch 32, one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work = prepare()
        taken, step = alternate(work.exchange, work.step, repeats=REPEATS)
    finally:
        torch.set_num_threads(threads)
    name = f"read and write {work.shared / 1e6:.1f} of {work.values / 1e6:.1f} million values"
    note = f"ResNet-18 at level {LEVEL:.0%}; baseline: one training step of {BATCH} images of 32×32"
    return [Row(name, "s", taken, step, taken / step, WANTED, "at most", note)]
