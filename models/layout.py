"""The paper's notation: `784=300=100=10` is a network, `784-250-80-10` a slice of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ModelError


@dataclass(frozen=True)
class Layout:
    """Cells per part, in order.

    `Layout.network("784=300=100=10")` reads a whole network, `Layout.slice("784-250-80-10")` the
    share of it that belongs to one partial model. Only a slice may have parts with no cell.
    """

    cells: tuple[int, ...]

    @classmethod
    def network(cls, text: str) -> Layout:
        """Read `784=300=100=10`: at least two parts, none of them empty."""
        layout = cls(_numbers(text, "="))
        if len(layout.cells) < 2:
            raise ModelError(
                f"network layout {text!r} has one part; write at least two, as in 64=32=10"
            )
        for part, count in enumerate(layout.cells):
            if count == 0:
                raise ModelError(f"network layout {text!r}: part {part} has no cells")
        return layout

    @classmethod
    def slice(cls, text: str) -> Layout:
        """Read `784-250-80-10`: the cells of one partial model in every part, zeros allowed."""
        return cls(_numbers(text, "-"))

    def as_network(self) -> str:
        """Write the layout as a network's."""
        return "=".join(map(str, self.cells))

    def as_slice(self) -> str:
        """Write the layout as a slice's."""
        return "-".join(map(str, self.cells))


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    if not re.fullmatch(rf"\d+(?:{separator}\d+)*", text):
        kind, example = (
            ("network", "784=300=100=10") if separator == "=" else ("slice", "784-250-80-10")
        )
        raise ModelError(
            f"{text!r} is not a {kind} layout: write whole numbers joined by {separator!r}, as in {example}"
        )
    return tuple(int(number) for number in text.split(separator))
