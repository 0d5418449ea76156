"""`gossamer paper claims`: the claims of the papers, and whether the results on disk support them.

A claim is a sentence about the figure or table of one study, and a function that decides it from the values
in it. No verdict is written by hand. To add a claim, add an entry to `CLAIMS` under its study; where a study
differs from the paper, say so in `DIFFERENCES`. Claims that cannot be measured here are in `UNAVAILABLE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import correlation
from typing import Any

from ..cli import console
from ..results import Record, find_run, read_records
from ..study import Frame, Study, frame_of
from . import PAPERS, StudyEntry

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"
NOT_RUN, CANNOT = "not measured", "cannot be had here"
"""The verdicts."""
AUTO = "auto"
"""The curve, or the x, of peers that decide by themselves what they share."""


@dataclass(frozen=True)
class Finding:
    """What was measured, and the verdict that follows."""

    verdict: str
    measured: str


class Points:
    """The medians of a figure: `points["80", 500]` is that of the curve "80" at x = 500.

    summary: a table with a curve, an x, and a median in every row; with mean and deviation for `spread_text`.
    """

    def __init__(self, summary: Frame):
        line, x = summary.columns[:2]
        rows = {(str(row[line]), str(row[x])): row for _, row in summary.iterrows()}
        self._rows, self._summary = rows, summary
        self.line_label, self.x_label = str(line), str(x)
        self._medians = {key: float(row["median"]) for key, row in rows.items()}
        self.lines = list(dict.fromkeys(line for line, _ in self._medians))
        self.xs = [x for x in dict.fromkeys(x for _, x in self._medians) if x != AUTO]

    def __getitem__(self, line_and_x: tuple[object, object]) -> float:
        """Return the median of a curve at an x."""
        line, x = line_and_x
        return self._medians[str(line), str(x)]

    def __contains__(self, line_and_x: tuple[str, str]) -> bool:
        """Return whether a curve has a point at an x."""
        return line_and_x in self._medians

    def get(self, line: object, x: object) -> float:
        """Return the median of a curve at an x; NaN if it has none there."""
        return self._medians.get((str(line), str(x)), nan)

    @property
    def paper_lines(self) -> list[str]:
        """The curves of the paper's levels or schemes, without those of peers that decide by themselves."""
        return [line for line in self.lines if not line.endswith(AUTO)]

    def best_x(self, line: object) -> str:
        """Return the x at which a curve is highest."""
        return max(self.xs, key=lambda x: self[line, x])

    def ranked(self, x: object, lines: Iterable[str] | None = None) -> list[str]:
        """Return the names of curves at x, the highest first."""
        return sorted(lines or self.paper_lines, key=lambda line: -self[line, x])

    def spread(self, line: object) -> float:
        """Return the difference between a curve's highest and lowest point."""
        values = [self[line, x] for x in self.xs]
        return max(values) - min(values)

    def curve_text(self, line: object) -> str:
        """Return the points of a curve as text."""
        return ", ".join(f"{x}: {number(self[line, x])}" for x in self.xs)

    @property
    def is_figure(self) -> bool:
        """Whether there are several x, all numbers, so that lines can be drawn."""
        return len(self.xs) > 1 and all(x.replace(".", "", 1).isdigit() for x in self.xs)

    def numbers(self) -> Frame:
        """Return the table of a figure, with numbers: line, x (NaN for `auto`), median, low and high.

        Lines about another measure, which their names end with, are left out.
        """
        frame = self._summary.rename(columns={self.line_label: "line", self.x_label: "x"})
        others = (", cells", ", parameters", ", accuracy")
        frame = frame[[not line.endswith(others) for line in frame["line"]]]
        columns = {name: frame[name].astype(float) for name in ("median", "low", "high")}
        x = [nan if value == AUTO else float(value) for value in frame["x"]]
        return frame_of({"line": frame["line"].astype(str), "x": x, **columns})

    def mean_text(self, line: str, x: str) -> str:
        """Return mean ± standard deviation of a curve at an x; "" if it has none there."""
        if (row := self._rows.get((line, x))) is None:
            return ""
        deviation = row["deviation"]
        spread = (
            "" if deviation in ("", None) or deviation != deviation else f" ± {amount(deviation)}"
        )
        return f"{amount(row['mean'])}{spread}"


Decide = Callable[[Points], Finding]
"""A function that decides a claim from the medians of the study's figure."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim about the figure of a study, in our words.

    decide: returns the verdict and what was measured, from the figure's medians.
    """

    text: str
    decide: Decide


def amount(value: Any) -> str:
    """Return a number as text: three decimals for accuracies, fewer digits for large numbers."""
    value = float(value)
    return (
        number(value)
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 1000
        else f"{value:.0f}"
    )


def number(value: float) -> str:
    """Return an accuracy, or a difference of accuracies, as text with three decimals."""
    return f"{value:.3f}".replace("0.", ".", 1)


def by_case(cases: Mapping[str, bool], measured: str) -> Finding:
    """Return the finding for a claim about several cases, each of which is true or not.

    The claim holds if all cases are true, and in part if some are.
    """
    true_cases = sum(cases.values())
    verdict = HOLDS if true_cases == len(cases) else IN_PART if true_cases else FAILS
    count = f"{true_cases} of {len(cases)}: " if len(cases) > 1 else ""
    return Finding(verdict, count + measured)


def _best_is_between(points: Points) -> Finding:
    """Decide whether each curve has its maximum between the lowest and the highest level."""
    best = {line: points.best_x(line) for line in points.lines}
    cases = {line: x not in (points.xs[0], points.xs[-1]) for line, x in best.items()}
    text = ", ".join(f"{line}: {x}" for line, x in best.items())
    return by_case(cases, f"best level by curve {text}")


def _best_is(level: str, lines: Callable[[str], bool] = lambda line: True) -> Decide:
    """Return a function that decides whether curves have their maximum at this level."""

    def decide(points: Points) -> Finding:
        best = {line: points.best_x(line) for line in points.lines if lines(line)}
        text = ", ".join(f"{line}: {x}" for line, x in best.items())
        return by_case({line: x == level for line, x in best.items()}, f"best level {text}")

    return decide


def _all_falls(points: Points) -> Finding:
    """Decide whether sharing all cells is at least .02 below the level before it, for each curve."""
    previous, last = points.xs[-2:]
    drops = {line: points[line, previous] - points[line, last] for line in points.lines}
    text = ", ".join(f"{line}: {number(drop)}" for line, drop in drops.items())
    return by_case(
        {line: drop >= 0.02 for line, drop in drops.items()},
        f"level {last} is below {previous} by {text}",
    )


def _compare(
    higher: str, lower: str, xs: Callable[[str], bool] = lambda x: True, by: float = 0.0
) -> Decide:
    """Return a function that decides whether a curve is above another one, by more than `by`, at each x."""

    def decide(points: Points) -> Finding:
        gaps = {x: points[higher, x] - points[lower, x] for x in points.xs if xs(x)}
        text = ", ".join(f"at {x} by {gap:+.3f}" for x, gap in gaps.items())
        return by_case({x: gap > by for x, gap in gaps.items()}, text)

    return decide


def _rank(lines: Sequence[str], place: int, xs: Callable[[str], bool] = lambda x: True) -> Decide:
    """Return a function that decides whether one of `lines` has this place among the paper's curves.

    place: 0 for the best, −1 for the last.
    """

    def decide(points: Points) -> Finding:
        line_at = {x: points.ranked(x)[place] for x in points.xs if xs(x)}
        ordinal = "last" if place == -1 else "best" if place == 0 else f"number {place + 1}"
        text = ", ".join(f"at {x}: {line}" for x, line in line_at.items())
        return by_case({x: line in lines for x, line in line_at.items()}, f"{ordinal} {text}")

    return decide


def _flat(line: str, within: float = 0.01) -> Decide:
    """Return a function that decides whether a curve changes by no more than `within`."""

    def decide(points: Points) -> Finding:
        verdict = HOLDS if points.spread(line) <= within else FAILS
        return Finding(
            verdict, f"changes by {number(points.spread(line))}: {points.curve_text(line)}"
        )

    return decide


def _changes_less(line: str, other: str) -> Decide:
    """Return a function that decides whether a curve changes less than another one."""

    def decide(points: Points) -> Finding:
        verdict = HOLDS if points.spread(line) < points.spread(other) else FAILS
        spreads = " and ".join(number(points.spread(curve)) for curve in (line, other))
        return Finding(verdict, f"they change by {spreads}")

    return decide


def _rises(lines: Sequence[str], by: float = 0.0) -> Decide:
    """Return a function that decides whether curves end higher than they begin, by more than `by`."""

    def decide(points: Points) -> Finding:
        first, last = points.xs[0], points.xs[-1]
        rises = {line: points[line, last] - points[line, first] for line in lines}
        text = ", ".join(f"{line} {rise:+.3f}" for line, rise in rises.items())
        return by_case(
            {line: rise > by for line, rise in rises.items()}, f"from {first} to {last}: {text}"
        )

    return decide


def _loses(line: str, share: float) -> Decide:
    """Return a function that decides whether a curve loses at least this share of its first value."""

    def decide(points: Points) -> Finding:
        first, last = points[line, points.xs[0]], points[line, points.xs[-1]]
        verdict = HOLDS if first - last >= share * first else FAILS
        return Finding(
            verdict, f"falls from {number(first)} to {number(last)}, {1 - last / first:.0%}"
        )

    return decide


def _lose_at_most(lines: Sequence[str], amount: float) -> Decide:
    """Return a function that decides whether curves fall by no more than `amount`."""

    def decide(points: Points) -> Finding:
        falls = {line: points[line, points.xs[0]] - points[line, points.xs[-1]] for line in lines}
        text = ", ".join(f"{line}: {number(fall)}" for line, fall in falls.items())
        return by_case({line: fall <= amount for line, fall in falls.items()}, f"fall by {text}")

    return decide


def _gap_shrinks(points: Points) -> Finding:
    """Decide whether levels 60 and 80 gain less over no averaging at the last x than at the second."""
    early, late = points.xs[1], points.xs[-1]
    gaps = {
        line: (points[line, early] - points["0", early], points[line, late] - points["0", late])
        for line in ("60", "80")
    }
    text = ", ".join(f"{line}: {a:+.3f} to {b:+.3f}" for line, (a, b) in gaps.items())
    return by_case({line: b < a for line, (a, b) in gaps.items()}, f"gain over level 0 {text}")


def _size_matters_more_at_lower_levels(points: Points) -> Finding:
    """Decide whether the gain of larger training sets falls from each averaging level to the next."""
    first, last = points.xs[0], points.xs[-1]
    gains = {line: points[line, last] - points[line, first] for line in points.paper_lines}
    text = ", ".join(f"{line}: {gain:+.3f}" for line, gain in gains.items())
    pairs = list(zip(gains, list(gains)[1:], strict=False))
    return by_case(
        {f"{a}, {b}": gains[a] > gains[b] for a, b in pairs}, f"gain from {first} to {last} {text}"
    )


def _close(points: Points) -> Finding:
    """Decide whether the curves are never more than .05 apart."""
    widest = max(
        max(points[line, x] for line in points.paper_lines)
        - min(points[line, x] for line in points.paper_lines)
        for x in points.xs
    )
    return Finding(HOLDS if widest <= 0.05 else FAILS, f"at most {number(widest)} apart")


def _at_start(place: int, line: str) -> Decide:
    """Return a function that decides the rank of a curve at mini-batch 10, after the first averaging."""
    return _rank([line], place, lambda x: int(x) == 10)


def _at_end(place: int, line: str) -> Decide:
    """Return a function that decides the rank of a curve at the last x."""
    return lambda points: _rank([line], place, lambda x: x == points.xs[-1])(points)


def _partial_beats_layers(points: Points) -> Finding:
    """Decide whether sharing 250 and 80 hidden cells is above every scheme of whole layers."""
    last = points.xs[-1]
    (part,) = (line for line in points.paper_lines if "-250-80-" in line)
    gaps = {
        line: points[part, last] - points[line, last] for line in points.paper_lines if line != part
    }
    text = ", ".join(f"{line}: {gap:+.3f}" for line, gap in gaps.items())
    return by_case({line: gap > 0 for line, gap in gaps.items()}, f"{part} above {text}")


def _auto_is_best(points: Points) -> Finding:
    """Decide whether `sharing = "auto"` is within .005 of the best of the paper's schemes, at each x."""
    if AUTO in points.lines:
        gaps = {x: points[AUTO, x] - points[points.ranked(x)[0], x] for x in points.xs}
    else:  # x is the averaging level, and auto has no level
        gaps = {
            line: points[line, AUTO] - points[line, points.best_x(line)] for line in points.lines
        }
    text = ", ".join(f"{x}: {gap:+.3f}" for x, gap in gaps.items())
    return by_case({x: gap >= -0.005 for x, gap in gaps.items()}, f"auto less the best {text}")


# --- other papers: tables of methods, whose lines are "PANEL: METHOD" ---------------------------------


def _panels(points: Points, method: str) -> list[str]:
    """Return the panels that have a line of this method, each with the ": " that follows its name."""
    return [line.removesuffix(method) for line in points.lines if line.endswith(f": {method}")]


def _gaps_text(gaps: Mapping[str, float]) -> str:
    """Return differences as text; the lowest and the highest if they are many."""
    if len(gaps) <= 6:
        return ", ".join(f"{name}: {gap:+.3f}" for name, gap in gaps.items())
    return f"from {min(gaps.values()):+.3f} to {max(gaps.values()):+.3f}"


def _method_above(
    method: str, others: Sequence[str], by: float = 0.0, xs: Callable[[str], bool] = lambda x: True
) -> Decide:
    """Return a function that decides whether a method is above all others by more than `by`, in every panel.

    A negative `by` makes it a claim that the method is not much below the others.
    """

    def decide(points: Points) -> Finding:
        gaps = {
            f"{panel}{x}": points[panel + method, x] - max(points[panel + o, x] for o in others)
            for panel in _panels(points, method)
            for x in points.xs
            if xs(x) and (panel + method, x) in points
        }
        text = f"{method} less the best of {', '.join(others)} {_gaps_text(gaps)}"
        return by_case({name: gap > by for name, gap in gaps.items()}, text)

    return decide


def _method_changes(method: str, is_met: Callable[[float], bool]) -> Decide:
    """Return a function that decides whether a method's change, from the first x to the last, is as said."""

    def decide(points: Points) -> Finding:
        changes = {}
        for panel in _panels(points, method):
            xs = [x for x in points.xs if (panel + method, x) in points]
            changes[panel.removesuffix(": ")] = (
                points[panel + method, xs[-1]] - points[panel + method, xs[0]]
            )
        text = f"{method} changes by {_gaps_text(changes)}"
        return by_case({name: is_met(change) for name, change in changes.items()}, text)

    return decide


def _cells_below(method: str, limit: Callable[[float], float]) -> Decide:
    """Return a function that decides whether a fused network has at most limit(x) hidden cells."""
    line = f"{method}, cells"

    def decide(points: Points) -> Finding:
        cells = {
            f"{panel}{x}": (points[panel + line, x], limit(float(x)))
            for panel in _panels(points, line)
            for x in points.xs
        }
        text = ", ".join(
            f"{name}: {amount(found)} of {amount(most)}" for name, (found, most) in cells.items()
        )
        return by_case({name: found <= most for name, (found, most) in cells.items()}, text)

    return decide


def _parameters_by_lambda(points: Points) -> dict[str, dict[float, float]]:
    """Return the parameters of MAGI's networks by panel and λ; λ = 0 is PFNM."""
    return {
        line: {float(x): points[line, x] for x in points.xs}
        for line in points.lines
        if not line.endswith(", accuracy")
    }


def _shrinks_by(is_panel: Callable[[str], bool], factor: float) -> Decide:
    """Return a function that decides whether λ = 1 has at most 1/factor of PFNM's parameters."""

    def decide(points: Points) -> Finding:
        ratios = {
            panel: sizes[0.0] / sizes[1.0]
            for panel, sizes in _parameters_by_lambda(points).items()
            if is_panel(panel)
        }
        text = ", ".join(f"{panel}: {ratio:.1f} times fewer" for panel, ratio in ratios.items())
        return by_case({panel: ratio >= factor for panel, ratio in ratios.items()}, text)

    return decide


def _falls_with_lambda(points: Points) -> Finding:
    """Decide whether parameters fall with every step of λ."""
    by_panel = _parameters_by_lambda(points)
    falls = {
        panel: all(sizes[a] >= sizes[b] for a, b in pairwise(sorted(sizes)))
        and sizes[1.0] < sizes[0.0]
        for panel, sizes in by_panel.items()
    }
    text = "; ".join(
        f"{panel}: " + " → ".join(amount(sizes[weight]) for weight in sorted(sizes))
        for panel, sizes in by_panel.items()
    )
    return by_case(falls, f"parameters {text}")


def _falls_linearly(points: Points) -> Finding:
    """Decide whether λ and the parameters have a correlation of −0.95 or stronger."""
    correlations = {
        panel: correlation([*sizes], [*sizes.values()])
        for panel, sizes in _parameters_by_lambda(points).items()
    }
    text = ", ".join(f"{panel}: {value:.2f}" for panel, value in correlations.items())
    return by_case(
        {panel: value <= -0.95 for panel, value in correlations.items()}, f"correlation {text}"
    )


def _sensitivity(lines: Callable[[str], bool], panel: str, within: float) -> Decide:
    """Return a function that decides whether accuracies in a panel differ by at most `within`.

    lines: which lines are compared.
    """

    def decide(points: Points) -> Finding:
        values = {
            line.removeprefix(f"{panel}: "): points[line, points.xs[0]]
            for line in points.lines
            if line.startswith(f"{panel}: ") and "," not in line and lines(line)
        }
        spread = max(values.values()) - min(values.values())
        text = ", ".join(f"{name}: {number(value)}" for name, value in values.items())
        return Finding(HOLDS if spread <= within else FAILS, f"differ by {number(spread)}: {text}")

    return decide


def _smaller(line: str, other: str, x: str, share: float = 1.0) -> Decide:
    """Return a function that decides whether a value is below `share` of another one."""

    def decide(points: Points) -> Finding:
        a, b = points[line, x], points[other, x]
        text = f"{line}: {amount(a)}, {other}: {amount(b)}"
        return Finding(HOLDS if a < share * b else FAILS, text)

    return decide


_GRIDS = ("grid 100", "grid 1000", "grid 10000")


def _closed_form_is_faster(points: Points) -> Finding:
    """Decide whether the closed form takes less time than grids of the paper's sizes."""
    took = {line: points[line, "milliseconds"] for line in ("closed form", *_GRIDS)}
    text = ", ".join(f"{line}: {value:.2f}" for line, value in took.items())
    return by_case(
        {grid: took["closed form"] < took[grid] for grid in _GRIDS}, f"milliseconds {text}"
    )


def _bounds_hold(points: Points) -> Finding:
    """Decide whether no compressor loses more accuracy than its bound."""
    pairs = {
        line: (points[line, "loss"], points[line, "loss_bound"])
        for line in points.lines
        if (line, "loss") in points
    }
    text = ", ".join(f"{line}: {number(a)} of {number(b)}" for line, (a, b) in pairs.items())
    return by_case({line: a <= b for line, (a, b) in pairs.items()}, f"lost, of at most: {text}")


def _bounds_are_small(points: Points) -> Finding:
    """Decide whether bounds are below .05."""
    bounds = {
        line: points[line, "loss_bound"] for line in points.lines if (line, "loss_bound") in points
    }
    text = ", ".join(f"{line}: {number(bound)}" for line, bound in bounds.items())
    return by_case({line: bound < 0.05 for line, bound in bounds.items()}, f"bounds {text}")


def _lossy(points: Points) -> Finding:
    """Decide whether every compressor loses accuracy."""
    losses = {line: points[line, "loss"] for line in points.lines if (line, "loss") in points}
    return by_case({line: loss > 0 for line, loss in losses.items()}, f"lost {_gaps_text(losses)}")


def _all_fall(points: Points) -> Finding:
    """Decide whether every curve is lower at the last x than at the first."""
    first, last = points.xs[0], points.xs[-1]
    falls = {line: points[line, last] - points[line, first] for line in points.lines}
    return by_case(
        {line: fall < 0 for line, fall in falls.items()}, f"{first} to {last}: {_gaps_text(falls)}"
    )


_AVERAGES = ("local", "FedAvg, own starts", "FedAvg, shared start")
_OTHER_CLAIMS: dict[str, list[Claim]] = {
    "pfnm-figure2": [
        Claim(
            "PFNM is the best of the methods that communicate once and make one network",
            _method_above("PFNM", (*_AVERAGES, "DP-means")),
        ),
        Claim(
            "FedAvg, even from a shared start, loses accuracy quickly with more networks",
            _method_changes("FedAvg, shared start", lambda change: change < -0.05),
        ),
        Claim(
            "PFNM's network is much smaller than all networks together (at most half)",
            _cells_below("PFNM", lambda peers: 50 * peers if peers > 2 else 200),
        ),
        Claim(
            "With γ0 = 1e-5 it is hardly larger than one peer's network",
            _cells_below("PFNM γ0=1e-5", lambda peers: 110),
        ),
        Claim(
            "PFNM is comparable to the ensembles (within .03)",
            _method_above("PFNM", ("ensemble", "weighted ensemble"), by=-0.03),
        ),
        Claim(
            "PFNM outperforms downpour SGD with ten exchanges",
            _method_above("PFNM", ("downpour SGD",)),
        ),
        Claim(
            "Ensembles hardly lose accuracy as networks become more and weaker",
            _method_changes("ensemble", lambda change: change > -0.05),
        ),
    ],
    "pfnm-figure4": [
        Claim(
            "PFNM is comparable to the ensembles (within .03) for one to six hidden layers",
            _method_above("PFNM", ("ensemble", "weighted ensemble"), by=-0.03),
        ),
        Claim("and outperforms downpour SGD", _method_above("PFNM", ("downpour SGD",))),
        Claim(
            "(Not in the paper.) PFNM is above FedAvg from a shared start",
            _method_above("PFNM", ("FedAvg, shared start",)),
        ),
    ],
    "pfnm-sensitivity": [
        Claim(
            "PFNM is robust to σ0² and γ0 (within .02), classes split evenly",
            _sensitivity(lambda line: "σ²" not in line, "homogeneous", 0.02),
        ),
        Claim("and not", _sensitivity(lambda line: "σ²" not in line, "Dirichlet 0.2", 0.02)),
        Claim(
            "σ² has almost no effect if classes are split evenly (within .02)",
            _sensitivity(lambda line: "σ0²" not in line and "γ0" not in line, "homogeneous", 0.02),
        ),
        Claim(
            "and more if they are not, but every value is competitive (within .1)",
            _sensitivity(lambda line: "σ0²" not in line and "γ0" not in line, "Dirichlet 0.2", 0.1),
        ),
    ],
    "pfnm-table": [
        Claim(
            "(000) PFNM is above averaging, from own and shared starts",
            _method_above("PFNM", _AVERAGES),
        ),
        Claim(
            "(000) PFNM is comparable to the weighted ensemble (within .03)",
            _method_above("PFNM", ("weighted ensemble",), by=-0.03),
        ),
        Claim(
            "(002) Averaging from own starts is much worse than from a shared start (by .1)",
            _method_above("FedAvg, shared start", ("FedAvg, own starts",), by=0.1),
        ),
        Claim(
            "(002) MAGI (λ = 0.1) is more accurate than PFNM",
            _method_above("MAGI λ=0.1", ("PFNM",)),
        ),
    ],
    "magi-table1": [
        Claim(
            "MAGI is the best method in every row",
            _method_above("MAGI λ=0.1", (*_AVERAGES[::2], "PFNM")),
        ),
        Claim(
            "With one hidden layer it is 3 % above PFNM (2 % or more)",
            lambda points: _method_above("MAGI λ=0.1", ("PFNM",), 0.02, lambda x: x != "10")(
                points
            ),
        ),
        Claim(
            "Averaging loses to PFNM and MAGI",
            _method_above("PFNM", ("FedAvg, shared start", "FedProx, shared start")),
        ),
        Claim(
            "More clients make every method less accurate",
            lambda points: by_case(
                (
                    falls := {
                        method: points[f"1 hidden: {method}", "30"]
                        < points[f"1 hidden: {method}", "15"]
                        for method in ("local", "FedAvg, shared start", "PFNM", "MAGI λ=0.1")
                    }
                ),
                "falls from 15 to 30 clients: "
                + (", ".join(m for m, met in falls.items() if met) or "none"),
            ),
        ),
    ],
    "magi-figure2": [
        Claim("The larger λ, the smaller MAGI's network (λ = 0 is PFNM)", _falls_with_lambda),
        Claim("It shrinks almost linearly", _falls_linearly),
        Claim(
            "With λ near 1 and one hidden layer it has almost 8 times fewer parameters (6 or more)",
            _shrinks_by(lambda panel: panel == "1 hidden", 6),
        ),
        Claim(
            "With more hidden layers, close to 3 times fewer (2.5 or more)",
            _shrinks_by(lambda panel: panel != "1 hidden", 2.5),
        ),
    ],
    "fednp-toy": [
        Claim("FedNP's error is below FedAvg's", _smaller("FedNP", "FedAvg", "error")),
        Claim(
            "by more than a third (72.4 against 116.5)", _smaller("FedNP", "FedAvg", "error", 0.67)
        ),
        Claim(
            "(Control.) Its estimate of all data helps: the error is 5 % below that with z frozen",
            _smaller("FedNP", "FedNP, z frozen", "error", 0.95),
        ),
    ],
    "fednp-moments": [
        Claim(
            "The closed form is faster than quadratures of 100, 1000 and 10,000 nodes",
            _closed_form_is_faster,
        ),
        Claim(
            "and the model as accurate: the toy's error is within 2 % of that with exact moments",
            lambda points: _smaller("closed form", "Gauss–Hermite 100", "mse", 1.02)(points),
        ),
        Claim(
            "(Not in the paper.) Gauss–Hermite with 20 nodes is more exact than the closed form",
            _smaller("Gauss–Hermite 20", "closed form", "mean_error"),
        ),
        Claim(
            "(Not in the paper.) and takes less than twice its time",
            _smaller("Gauss–Hermite 20", "closed form", "milliseconds", 2.0),
        ),
    ],
    "fednp-cifar": [
        Claim("FedNP is best with 10 clients", _rank(["FedNP"], 0, lambda x: x == "10")),
        Claim("and with 50 and 100", _rank(["FedNP"], 0, lambda x: x != "10")),
        Claim(
            "FedNP is about 2 % above FedAvg (1 % or more)", _compare("FedNP", "FedAvg", by=0.01)
        ),
        Claim("FedProx is below FedAvg", _compare("FedAvg", "FedProx")),
        Claim("SCAFFOLD is far below FedAvg (by .02)", _compare("FedAvg", "SCAFFOLD", by=0.02)),
        Claim("All methods lose accuracy with more clients", _all_fall),
        Claim(
            "With 100 clients, FedNP and MOON are first",
            _rank(["FedNP", "MOON"], 0, lambda x: x == "100"),
        ),
        Claim("and second", _rank(["FedNP", "MOON"], 1, lambda x: x == "100")),
    ],
    "multitask": [
        Claim(
            "Related models (MOCHA) are more accurate than separate ones",
            _compare("MOCHA", "separate"),
        ),
        Claim("and than one model for all", _compare("MOCHA", "pooled")),
    ],
    "compressed-updates": [
        Claim(
            "Averaging the clients' weights (FedAvg) makes a better model than a client has alone",
            lambda points: _smaller("alone", "none", "accuracy")(points),
        ),
        Claim("Compressed updates lose accuracy", _lossy),
        Claim(
            "(The slides ask for a bound.) No compressor loses more accuracy than the bound that follows "
            "from the distortion of its messages",
            _bounds_hold,
        ),
        Claim(
            "(The slides ask for a bound.) The bound is small enough to be useful (.05)",
            _bounds_are_small,
        ),
    ],
}

DIFFERENCES: Mapping[str, str] = {
    **{f"femnist-{kind}-{v}": "characters by style, not by writer" for kind in ("level", "scheme", "peers")
       for v in "am"},
    **{f"femnist-{kind}-d": "MNIST's writers, not FEMNIST's" for kind in ("level", "scheme", "peers")},
    "vsn": "people who sit or stand, not vehicles; 50 test samples, not 200; two outputs, not one",
    "associative": "starting weights, which the paper does not give, uniform in [−0.3, 0.3]",
    "pfnm-figure2": "no CIFAR-10",
    "pfnm-figure4": "no CIFAR-10",
    "pfnm-sensitivity": "test accuracy, not training accuracy; the values, which the paper does not give; no "
    "CIFAR-10",
    "pfnm-table": "4000 digits of MNIST or 1400 of scikit-learn's, and 10 peers; the papers have 60,000",
    "magi-table1": "Dirichlet 0.5, which the paper does not give; λ = 0.1; FedProx µ = 0.01",
    "magi-figure2": "4000 digits, Dirichlet 0.5, no CIFAR-10",
    "fednp-toy": "5 epochs, 20 rounds, rate 0.3, x/4; the paper has 1, 10, 0.01, x",
    "fednp-moments": "200 random cavities and the toy, on a processor; the paper has CIFAR-100 on a GPU",
    "fednp-cifar": "CIFAR-10, 3000 samples, a CNN of 8 and 16 channels, 1 epoch, 20 rounds, rate 0.1, "
    "batches of 20; the paper has CIFAR-100, 50,000, ResNet18, 10, 100, 0.01, 128",
    "multitask": "the slides name no data; sitting against standing of 30 people",
    "compressed-updates": "the slides name no data; softmax regression on 4000 digits of 10 clients",
}  # fmt: skip
"""What differs from the paper in a study at its full size; of other studies, nothing is known to differ."""


@dataclass(frozen=True)
class Unavailable:
    """A claim that cannot be measured here, and why."""

    origin: str
    text: str
    reason: str


_ONE_CORE = "the data is not here, and training it takes a graphics processor"
UNAVAILABLE = (
    Unavailable(
        "000, figure 3c, d", "On CIFAR-10 PFNM falls behind ensembles when classes are split unevenly",
        "thirty perceptrons on all of CIFAR-10, ten times over, take days of two cores",
    ),
    Unavailable(
        "002, table 1, CIFAR-10", "MAGI fuses ConvNets 2 % better than PFNM",
        "matching here is defined for chains of linear layers, not for convolutions",
    ),
    Unavailable(
        "002, table 1, CIMC", "MAGI fuses U-Nets 6 % better than PFNM",
        "the Carvana images are not here, and matching is defined for chains of linear layers",
    ),
    Unavailable("004, table 1", "FedNP is best on CIFAR-100 and TinyImageNet with ResNet18", _ONE_CORE),
    Unavailable("004, table 1", "FedNP is above FedPA and FedLA", "neither method is implemented here"),
    Unavailable("004, table 2", "FedNP lowers the word error rate on CHiME-5", "the corpus needs a licence"),
    Unavailable(
        "004, table 4", "FedNP's error on the toy is below that of FedProx, SCAFFOLD and FedPA",
        "the toy is run with FedAvg and FedNP only",
    ),
)  # fmt: skip
"""Claims that cannot be measured here."""

_AUTO_CLAIM = Claim(
    "(Not in the paper.) Peers that decide by themselves what to share reach the paper's best scheme",
    _auto_is_best,
)
_PARTIAL_LEVELS = ("15", "30", "60", "80")
_GLOBAL_80, _GLOBAL_100, _PER_TASK = "global 80", "global 100", "100 per task"
_DEPENDENT = "global 80 + 20 per task, dependency"
_INDEPENDENT = "global 80 + 20 per task, no dependency"
_PAIRS = "global 70 + 30 or 15 per pair, dependency"
_INDEPENDENT_PAIRS = "global 70 + 30 or 15 per pair, no dependency"


def _femnist_claims(variant: str) -> dict[str, list[Claim]]:
    """Return the claims about a variant of FEMNIST, by study."""
    return {
        f"femnist-level-{variant}": [
            Claim(
                "Sharing some cells is best, whatever the number of mini-batches", _best_is_between
            ),
            Claim("The best averaging level is 80", _best_is("80")),
            _AUTO_CLAIM,
        ],
        f"femnist-scheme-{variant}": [
            Claim(
                "Sharing a part of every layer beats sharing whole layers", _partial_beats_layers
            ),
            _AUTO_CLAIM,
        ],
        f"femnist-peers-{variant}": [
            Claim("Without averaging, the number of peers has no effect", _flat("0")),
            Claim(
                "Sharing everything loses accuracy as the number of peers grows",
                lambda points: by_case(
                    {"100": points["100", points.xs[-1]] < points["100", points.xs[0]]},
                    points.curve_text("100"),
                ),
            ),
            Claim("At level 80, more peers give a higher accuracy", _rises(["80"])),
        ],
    }


CLAIMS: Mapping[str, Sequence[Claim]] = {
    **_OTHER_CLAIMS,
    **_femnist_claims("a"),
    **_femnist_claims("m"),
    **_femnist_claims("d"),
    "averaging-level": [
        Claim("Sharing some cells is best, whatever the mini-batch size", _best_is_between),
        Claim(
            "For large mini-batches the best averaging level is 80",
            _best_is("80", lambda line: int(line) >= 500),
        ),
        Claim("Sharing everything loses much accuracy, since one network has one task", _all_falls),
        _AUTO_CLAIM,
    ],
    "convergence": [
        Claim("At the beginning, no averaging leads", _at_start(0, "0")),
        Claim("At the beginning, level 80 is last", _at_start(-1, "80")),
        Claim("At the end, level 80 is first", _at_end(0, "80")),
        Claim("At the end, sharing everything is last", _at_end(-1, "100")),
        Claim("The three curves stay close together", _close),
    ],
    "number-of-peers": [
        Claim("Without averaging, the number of peers has no effect", _flat("0")),
        Claim(
            "At levels 60 and 80, more peers give a higher accuracy", _rises(["60", "80"], by=0.005)
        ),
        Claim("Sharing everything gains from more peers too", _rises(["100"])),
        Claim("but stays below level 80", _compare("80", "100")),
        _AUTO_CLAIM,
    ],
    "semi-local": [
        Claim("No averaging is the worst", _rank(["no averaging"], -1)),
        Claim(
            "Sharing everything is below sharing it with the same task",
            _compare(_PER_TASK, _GLOBAL_100),
        ),
        Claim("Sharing everything is below level 80", _compare(_GLOBAL_80, _GLOBAL_100)),
        Claim(
            "A global and a semi-local model together are best",
            _rank([_DEPENDENT, _INDEPENDENT], 0),
        ),
        Claim("A dependency between them gains more", _compare(_DEPENDENT, _INDEPENDENT)),
        _AUTO_CLAIM,
    ],
    "semi-local-and-local": [
        Claim("Sharing everything is the worst", _rank([_GLOBAL_100], -1)),
        Claim("Level 80 is better than no averaging", _compare(_GLOBAL_80, "no averaging")),
        Claim(
            "With large mini-batches, sharing everything per task beats level 80",
            _compare(_PER_TASK, _GLOBAL_80, lambda x: int(x) >= 400),
        ),
        Claim(
            "Global, semi-local and local models together are best",
            _rank([_PAIRS, _INDEPENDENT_PAIRS], 0),
        ),
        Claim("A dependency between them gains more", _compare(_PAIRS, _INDEPENDENT_PAIRS)),
        _AUTO_CLAIM,
    ],
    "difference-rate": [
        Claim(
            "Without a difference between tasks, sharing everything is best",
            _rank(["100"], 0, lambda x: x == "0"),
        ),
        Claim(
            "With all ten labels rotated, it loses more than half of its accuracy",
            _loses("100", 0.5),
        ),
        Claim("No other level is severely affected", _lose_at_most(("0", *_PARTIAL_LEVELS), 0.1)),
        Claim(
            "Levels 60 and 80 are best for low difference rates",
            _rank(["60", "80"], 0, lambda x: x in ("2", "4")),
        ),
        Claim("Their gain shrinks as the difference rate grows", _gap_shrinks),
        Claim(
            "At rate 10, level 80 is no better than no averaging",
            lambda points: by_case(
                {"10": points["80", 10] - points["0", 10] <= 0.005},
                f"level 80 {number(points['80', 10])}, level 0 {number(points['0', 10])}",
            ),
        ),
        _AUTO_CLAIM,
    ],
    "permuted-peers": [
        Claim(
            "Sharing everything is best if all peers have one task",
            _rank(["100"], 0, lambda x: x == "0"),
        ),
        Claim("and third with two other peers", _rank(["100"], 2, lambda x: x == "2")),
        Claim("and last with four to eight", _rank(["100"], -1, lambda x: int(x) >= 4)),
        Claim("No averaging is not affected by their number", _flat("0")),
        Claim("Partial averaging is hardly affected", _lose_at_most(_PARTIAL_LEVELS, 0.02)),
        _AUTO_CLAIM,
    ],
    "training-size": [
        Claim(
            "The lower the averaging level, the more the training set's size matters",
            _size_matters_more_at_lower_levels,
        ),
        Claim(
            "With 250 samples sharing everything is best", _rank(["100"], 0, lambda x: x == "250")
        ),
        Claim("From 500 samples on level 80 is best", _rank(["80"], 0, lambda x: int(x) >= 500)),
        Claim("and 60 is second", _rank(["60"], 1, lambda x: int(x) >= 500)),
        Claim(
            "From 2000 samples on sharing everything is last",
            _rank(["100"], -1, lambda x: int(x) >= 2000),
        ),
        _AUTO_CLAIM,
    ],
    "layouts": [
        Claim(
            "Sharing everything falls severely, with four layers",
            _loses("4 layers: 784-300-100-10", 0.3),
        ),
        Claim("and with five", _loses("5 layers: 784-300-100-10-10", 0.3)),
        Claim(
            "Without averaging, five layers are less accurate than four",
            _compare("4 layers: no averaging", "5 layers: no averaging"),
        ),
        Claim(
            "Sharing all but the output layer of four is best wherever tasks differ",
            _rank(["4 layers: 784-300-100-0"], 0, lambda x: x != "0"),
        ),
        Claim(
            "and is less affected by the difference rate than level 80",
            _changes_less("4 layers: 784-300-100-0", "4 layers: 784-250-80-10"),
        ),
        Claim(
            "Sharing all but the output layer of five beats no averaging of four",
            _compare("5 layers: 784-300-100-10-0", "4 layers: no averaging"),
        ),
    ],
    "vsn": [
        Claim("Sharing some cells is best, whatever the number of mini-batches", _best_is_between),
        Claim("The best level is at about 80 % (40 of 50 cells)", _best_is("40")),
        _AUTO_CLAIM,
    ],
    "associative": [
        Claim(
            "Sharing some hidden cells is best, whatever the number of mini-batches",
            _best_is_between,
        ),
        Claim(
            "Sharing all hidden cells is the worst with 10 to 30 mini-batches",
            lambda points: by_case(
                {
                    line: points[line, 400] == min(points[line, x] for x in points.xs)
                    for line in ("10", "20", "30")
                },
                "; ".join(f"{line}: {points.curve_text(line)}" for line in ("10", "20", "30")),
            ),
        ),
    ],
}


@dataclass(frozen=True)
class Row:
    """One row of the table of claims.

    runs: the seeds that it was measured with, 0 for none. points: the values of its study.
    """

    entry: StudyEntry
    claim: Claim
    finding: Finding
    runs: int
    points: Points | None = None

    @property
    def command(self) -> str:
        """The command that measured it, or would measure it."""
        runs = f" --runs {self.runs}" if 0 < self.runs != self.entry.runs else ""
        return f"gossamer paper {self.entry.name}{runs}"

    @property
    def differences(self) -> str:
        """What differs from the paper: the setting, and the number of seeds."""
        setting = DIFFERENCES.get(self.entry.name, "")
        fewer = (
            f"{self.runs} seeds, not {self.entry.runs}" if 0 < self.runs < self.entry.runs else ""
        )
        return "; ".join(text for text in (setting, fewer) if text)


def rows(folders: Sequence[Path]) -> list[Row]:
    """Return a row for every claim, decided from the results of its study.

    folders: where results are looked for; for each study the first folder that has any is used. Results are
        in `NAME/`, as `gossamer paper NAME` writes them, or in `NAME.jsonl`.
    """
    table = []
    for name, claims in CLAIMS.items():
        entry = PAPERS[name]
        records, study = records_of(entry, folders)
        points = Points(summary_of(entry, study, records)) if records else None
        runs = len({record["seed"] for record in records})
        for claim in claims:
            table.append(Row(entry, claim, _decide(claim, points), runs, points))
    return table


def _decide(claim: Claim, points: Points | None) -> Finding:
    """Return the finding of a claim; points: None if its study has no results."""
    if points is None:
        return Finding(NOT_RUN, "")
    try:
        return claim.decide(points)
    except (KeyError, ValueError):  # some curves have not been run yet
        return Finding(NOT_RUN, "the results lack some of the curves that the claim is about")


def records_of(entry: StudyEntry, folders: Sequence[Path]) -> tuple[list[Record], Study[Any]]:
    """Return the records of a study's runs at full size, and the study.

    Records of other runs are not used: those of another version, or with more seeds than the paper has. A
    warning says how many there are in which file; the file is not changed.
    """
    study = entry.study()
    keys = {cell.key for cell in study.cells}
    for folder in folders:
        path = folder / f"{entry.name}.jsonl"
        if not path.is_file():
            path = find_run(folder / entry.name) / "runs.jsonl"
        found = list(read_records(path))
        records = [record for record in found if record.get("key") in keys]
        if others := len(found) - len(records):
            console.warn(
                f"{path}: {others} of {len(found)} records are not used, since they are of another version "
                f"of {entry.name} or of other settings; the file stays as it is, and gossamer paper "
                f"{entry.name} runs what is missing"
            )
        if records:
            return records, study
    return [], study


def summary_of(entry: StudyEntry, study: Study[Any], records: Sequence[Record]) -> Frame:
    """Return a row for every line and x: runs, median, low, high, mean and deviation over seeds."""
    read = _READERS.get(entry.name) or _READERS.get(entry.make.partition(":")[0])
    if read is None or "settings" in records[0]:
        summary = study.table(records)["summary"]
        return summary.rename(columns={"second quintile": "low", "third quintile": "high"})
    rows = [
        {"line": line, "x": x, "value": value}
        for record in records
        for line, x, value in read(record)
        if value is not None
    ]
    values = frame_of(rows, ordered=["line", "x"]).groupby(["line", "x"], observed=True)["value"]
    columns = {
        "runs": values.size(), "median": values.median(), "low": values.min(), "high": values.max(),
        "mean": values.mean(), "deviation": values.std(),
    }  # fmt: skip
    return frame_of(columns).reset_index().astype({"line": str, "x": str})


Values = Iterator[tuple[str, object, float | None]]
"""Line, x and value of each measure of a record."""


def _matching_values(record: Record) -> Values:
    for outcome in record["outcomes"]:
        line = f"{record['panel']}: {outcome['method']}"
        yield line, f"{outcome['x']:g}", outcome["accuracy"]
        yield f"{line}, cells", f"{outcome['x']:g}", outcome["cells"]
        yield f"{line}, parameters", f"{outcome['x']:g}", outcome["parameters"]


def _magi_values(record: Record) -> Values:
    for outcome in record["outcomes"]:
        weight = outcome["method"].partition("λ=")[2] or "0"
        yield record["panel"], weight, outcome["parameters"]
        yield f"{record['panel']}, accuracy", weight, outcome["accuracy"]


def _measures(record: Record) -> Values:
    for name, value in record.items():
        if isinstance(value, float):
            yield record["line"], name, value


def _fednp_values(record: Record) -> Values:
    if "method" in record:
        yield record["method"], "error", record["mse"]
    else:
        yield from _measures(record)


def _multitask_values(record: Record) -> Values:
    yield record["method"], record["samples"], record["accuracy"]


_READERS: Mapping[str, Callable[[Record], Values]] = {
    "matching": _matching_values,
    "fednp": _fednp_values,
    "multitask": _multitask_values,
    "updates": _measures,
    "magi-figure2": _magi_values,
}
"""How the values of a record are read, by the study or its module; other studies have them in their table."""


OVERVIEW = {
    "femnist-level-a": ("FEMNIST-A", "1000", ("0", "80", "100")),
    "femnist-level-m": ("FEMNIST-M", "1000", ("0", "80", "100")),
    "femnist-level-d": ("FEMNIST-D", "1000", ("0", "80", "100")),
    "averaging-level": ("modified MNIST", "1500", ("0", "80", "100")),
    "vsn": ("VSN", "400", ("0", "40", "50")),
    "associative": ("associative", "40", ("0", "300", "400")),
}
"""The studies in the paper's figure 7: a name, the curve that is shown, and the levels at which peers share
nothing, most cells, and everything."""


def draw_overview(path: Path, folders: Sequence[Path]) -> list[Path]:
    """Draw the paper's figure 7 from results on disk: every task alone, with partial and with full averaging.

    Tasks that have not been run are left out; without any, nothing is drawn. Returns the files.
    """
    bars: dict[str, list[float]] = {}
    for study_name, (task, curve, levels) in OVERVIEW.items():
        records, study = records_of(PAPERS[study_name], folders)
        if not records:
            continue
        points = Points(summary_of(PAPERS[study_name], study, records))
        with suppress(KeyError):  # this curve has not been run
            bars[task] = [points[curve, level] for level in levels]
            bars[task].append(points.get(curve, AUTO))
    if not bars:
        return []
    from ..study.figures import COLOURS, canvas, place_legend, save

    figure, axes = canvas(
        "003, figure 7: medians over seeds. Some cells: 80 % of them (associative: 75 %). auto: peers decide "
        "by themselves what they share."
    )
    for number, (scheme, colour) in enumerate(
        zip(("alone", "some cells shared", "all cells shared", AUTO), COLOURS, strict=False)
    ):
        places = [place + 0.2 * (number - 1.5) for place in range(len(bars))]
        axes.bar(places, [bar[number] for bar in bars.values()], 0.18, color=colour, label=scheme)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set(title="Summary of the paper's tasks", ylabel="accuracy")
    place_legend(axes)
    return save(figure, path)


_LABELS = {
    "magi-figure2": ("λ", "parameters"),
    "multitask": ("training samples per subject", "accuracy"),
}
"""Labels of the axes, if they are not the x of the study's table and the accuracy."""


_NOTE = "Points: medians over seeds; bars: lowest to highest."
_PARTIAL_MODELS_NOTE = (
    "Points: medians over seeds; bars: quantiles 0.4 to 0.6. Dashed, or called auto: peers decide by "
    "themselves what they share."
)


def draw_figures(folder: Path, table: Sequence[Row]) -> list[Path]:
    """Draw the figures of each paper, or of each section of 003, side by side; return the PNG files.

    A study whose x are not numbers has no figure here.
    """
    by_section: dict[str, dict[str, Row]] = {}
    for row in table:
        if row.points is not None and row.points.is_figure:
            paper, _, rest = row.entry.origin.partition(", ")
            section = f"{paper}-{rest[:3]}" if rest.startswith("V.") else paper
            section = section if paper.isdigit() else "own"
            by_section.setdefault(section, {}).setdefault(row.entry.name, row)
    files = []
    for section, studies in by_section.items():
        from ..study.figures import panels, plot_lines, save

        columns = min(3, len(studies))
        lines = -(-len(studies) // columns)
        figure, grid = panels(
            lines, columns,
            _PARTIAL_MODELS_NOTE if section.startswith("003") else _NOTE,
            5.2 * columns, 3.6 * lines,
        )  # fmt: skip
        all_axes = [axes for row_of_axes in grid for axes in row_of_axes]
        for axes, row in zip(all_axes, studies.values(), strict=False):
            assert row.points is not None
            plot_lines(axes, row.points.numbers(), "line", "x", "median", "low", "high")
            _, _, where = row.entry.origin.partition(", ")
            axes.set_title(f"{row.entry.name} ({where or row.entry.origin})", fontsize=9)
            x_label, y_label = _LABELS.get(row.entry.name, (row.points.x_label, "accuracy"))
            axes.set_xlabel(x_label, fontsize=8)
            axes.set_ylabel(y_label, fontsize=8)
            axes.legend(fontsize=6, frameon=False)
        for axes in all_axes[len(studies) :]:
            axes.set_visible(False)
        files += save(figure, folder / section, dpi=80)[:1]
    return files


MOST_COLUMNS = 8
"""The most x in a table of the page; of longer curves, only some x are shown."""


def page(table: Sequence[Row], pictures: Sequence[str] = ()) -> str:
    """Return the page of claims, in Markdown: tables of studies that were run, and a list of the others.

    pictures: addresses of pictures, which are shown at the top.
    """
    counts = Counter(row.finding.verdict for row in table)
    decided = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in (HOLDS, IN_PART, FAILS))
    lines = [
        "# The papers' claims, and what was measured here",
        "",
        "`gossamer paper claims` writes this page from results on disk, and a function decides every "
        f"verdict. Of {len(table)} claims, {counts[NOT_RUN]} have not been measured at full size "
        f"yet; of the others, {decided}. Verdicts are about medians over seeds; tables have means ± standard "
        "deviations.",
        *(f"\n![figures of {Path(picture).stem}]({picture})" for picture in pictures),
    ]
    not_run: list[str] = []
    for name in dict.fromkeys(row.entry.name for row in table):
        study_rows = [row for row in table if row.entry.name == name]
        entry, first = study_rows[0].entry, study_rows[0]
        if first.points is None:
            not_run.append(f"- {entry.title} ({entry.origin}): `{first.command}`")
            continue
        lines += [
            "",
            f"## {entry.title} ({entry.origin})",
            "",
            f"`{first.command}`: {first.runs} seeds.",
            "",
            "| claim | verdict | measured | differs from the paper |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row.claim.text} | {row.finding.verdict} | {row.finding.measured} | {row.differences} |"
            for row in study_rows
        ]
        lines += ["", *_means_table(first.points)]
    if not_run:
        lines += ["", "## Not run yet at full size", "", *not_run]
    lines += [
        "",
        f"## What {CANNOT.replace('be had', 'be measured')}",
        "",
        "| where | claim | reason |",
        "| --- | --- | --- |",
        *(f"| {each.origin} | {each.text} | {each.reason} |" for each in UNAVAILABLE),
    ]
    return "\n".join(lines) + "\n"


def _means_table(points: Points) -> list[str]:
    """Return a table in Markdown of mean ± standard deviation by line and x."""
    every = -(-len(points.xs) // MOST_COLUMNS)
    xs = points.xs[::-every][::-1]
    if any((line, AUTO) in points for line in points.lines):
        xs = [*xs, AUTO]
    return [
        f"| {points.line_label} | {' | '.join(xs)} |",
        f"| --- {'| --- ' * len(xs)}|",
        *(
            f"| {line} | {' | '.join(points.mean_text(line, x) for x in xs)} |"
            for line in points.lines
            if not line.endswith(", parameters")
        ),
    ]
