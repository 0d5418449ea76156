"""Averaging schemes that several of 003's experiments share."""

from __future__ import annotations

from ..config.tables import Model, Network, Training

# Cells of the second hidden layer in the global model, and of the first one that go with them.
LEVELS = {0: 0, 15: 50, 30: 100, 60: 200, 80: 250, 100: 300}


def network(quick: bool) -> Network:
    """The paper's `784=300=100=10` of sigmoid cells; the quick one reads the built-in digits.

    There hidden cells are tanh: sigmoid ones spend a quick run's few rounds on the plateau where they
    start, and a figure of that says nothing.
    """
    if quick:
        return Network(layout="64=300=100=10", activation="tanh", output="sigmoid")
    return Network(layout="784=300=100=10", activation="sigmoid")


def training(quick: bool, size: int) -> Training:
    """Mini-batches of `size` samples at the paper's rate; tanh cells want half of it."""
    return Training(stretch=size, rate=0.05 if quick else 0.1)


def level(inputs: int, level: int, outputs: int = 10) -> list[Model]:
    """The paper's averaging level: `784-250-80-10` for 80; nothing shared for 0."""
    if level == 0:
        return []
    return [Model(name="global", layout=f"{inputs}-{LEVELS[level]}-{level}-{outputs}")]


def per_class(inputs: int, outputs: int = 10) -> list[Model]:
    """Everything averaged, among peers with the same task only."""
    return [Model(name="{task}", layout=f"{inputs}-300-100-{outputs}")]
