"""`gossamer paper claims`: the claims of the papers, and whether the results on disk support them.

A claim is a sentence about the figure or table of one study, and a function that decides it from the values
in it. No verdict is written by hand. To add a claim, add an entry to `_TABLE` under its study; where a study
differs from the paper, say so in `DIFFERENCES`. Claims that cannot be measured here are in `UNAVAILABLE`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
NOT_RUN, CANNOT = "not measured", "cannot be measured here"
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

    summary: a table with a curve, an x, and a median in every row; with mean and deviation for `mean_text`.
    """

    def __init__(self, summary: Frame):
        line, x = summary.columns[:2]
        self._rows = {(str(row[line]), str(row[x])): row for _, row in summary.iterrows()}
        self._summary = summary
        self.line_label, self.x_label = str(line), str(x)
        self.lines = list(dict.fromkeys(line for line, _ in self._rows))
        self.xs = [x for x in dict.fromkeys(x for _, x in self._rows) if x != AUTO]

    def __getitem__(self, line_and_x: tuple[object, object]) -> float:
        """Return the median of a curve at an x; raises KeyError if it has none there."""
        line, x = line_and_x
        return float(self._rows[str(line), str(x)]["median"])

    def __contains__(self, line_and_x: tuple[str, str]) -> bool:
        """Return whether a curve has a point at an x."""
        return line_and_x in self._rows

    @property
    def paper_lines(self) -> list[str]:
        """The curves of the paper's levels or schemes, without those of peers that decide by themselves."""
        return [line for line in self.lines if not line.endswith(AUTO)]

    @property
    def fewest_seeds(self) -> int:
        """The seeds of the point that has the fewest."""
        return min(map(int, self._summary["runs"]))

    @property
    def most_seeds(self) -> int:
        """The seeds of the point that has the most."""
        return max(map(int, self._summary["runs"]))

    @property
    def seeds_text(self) -> str:
        """The number of seeds: "3 seeds", or "2 to 3 seeds" if some lines were run with fewer."""
        fewest, most = self.fewest_seeds, self.most_seeds
        return f"{most} seed{'s' * (most != 1)}" if fewest == most else f"{fewest} to {most} seeds"

    def xs_of(self, line: str) -> list[str]:
        """Return the x at which a curve has points."""
        return [x for x in self.xs if (line, x) in self]

    def find(self, *names: str) -> list[str]:
        """Return the curves with these names, in every panel if names are "PANEL: NAME"; "*" is all curves.

        Raises KeyError if a name has no curve.
        """
        curves = []
        for name in names:
            matches = [line for line in self.lines if line == name or line.endswith(f": {name}")]
            if not (matches := self.lines if name == "*" else matches):
                raise KeyError(name)
            curves += matches
        return curves

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
        known = deviation not in ("", None) and deviation == deviation
        return f"{amount(row['mean'])}" + (f" ± {amount(deviation)}" if known else "")


Decide = Callable[[Points], Finding]
"""A function that decides a claim from the medians of the study's figure. It raises KeyError or ValueError if
curves that the claim is about are missing."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim about the figure of a study, in our words, and the function that decides it."""

    text: str
    decide: Decide


def amount(value: Any) -> str:
    """Return a number as text: three decimals for accuracies, fewer digits for large numbers."""
    value = float(value)
    if abs(value) >= 10:
        return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.3f}".replace("0.", ".", 1)


# --- how claims are decided -------------------------------------------------------------------------------
# `wanted` is a condition: "> 0.02". `at` selects x: "" is all of them, "2 4" these two, "last" the last one,
# "not 10" all others, and ">= 500" those that meet the condition. `finding_of_cases` decides; other
# functions compute the values of a claim's cases: one for each x, curve or panel.

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def meets(value: float, wanted: str) -> bool:
    """Return whether a value meets a condition."""
    comparison, limit = wanted.split()
    return _OPERATORS[comparison](value, float(limit))


def select(names: Sequence[str], at: str) -> list[str]:
    """Return the names that `at` selects."""
    first, *rest = at.split() or [""]
    if first in _OPERATORS:
        return [name for name in names if meets(float(name), at)]
    if first == "not":
        return [name for name in names if name not in rest]
    return {"": [*names], "last": [*names[-1:]]}.get(at, at.split())


def finding_of_cases(cases: Mapping[str, bool], measured: str) -> Finding:
    """Return the finding: a claim holds if all cases are true, and in part if some are."""
    if not cases:
        raise ValueError("no case of the claim has been run")
    true_cases = sum(cases.values())
    verdict = HOLDS if true_cases == len(cases) else IN_PART if true_cases else FAILS
    count = f"{true_cases} of {len(cases)}: " if len(cases) > 1 else ""
    return Finding(verdict, count + measured)


def finding_of_values(values: Mapping[str, float], wanted: str, quantity: str) -> Finding:
    """Return the finding of a claim whose cases have these values, each of which should meet `wanted`."""
    if len(values) > 6:
        text = f"from {amount(min(values.values()))} to {amount(max(values.values()))}"
    else:
        text = ", ".join(f"{name}: {amount(value)}" for name, value in values.items())
    cases = {name: meets(value, wanted) for name, value in values.items()}
    return finding_of_cases(cases, f"{quantity}, wanted {wanted}; {text}")


def above(line: str, *others: str, wanted: str = "> 0", at: str = "", each: bool = False) -> Decide:
    """Decide by how much a curve is above the highest of others, in every panel and at every x.

    others: all other curves of the paper if left out. each: whether each distance is a case, not only that to
        the highest of them.
    """

    def decide(points: Points) -> Finding:
        gaps = {}
        for curve in points.find(line):
            panel = curve.removesuffix(line)
            rivals = [panel + other for other in others]
            rivals = rivals or [other for other in points.paper_lines if other != curve]
            for x in select(points.xs_of(curve) if panel else points.xs, at):
                by_rival = {rival: points[curve, x] - points[rival, x] for rival in rivals}
                gaps |= by_rival if each else {f"{panel}{x}": min(by_rival.values())}
        best = "each" if each else "the best" if len(others) != 1 else ""
        names = " of ".join(text for text in (best, ", ".join(others) or "the others") if text)
        return finding_of_values(gaps, wanted, f"{line} less {names}")

    return decide


def change(
    *lines: str, wanted: str, ends: tuple[int, int] | tuple[str, str] = (0, -1), ratio: bool = False
) -> Decide:
    """Decide by how much each curve changes between two x, by default the first and the last that it has.

    ends: the two x, or their places. ratio: divide the second value by the first instead of subtracting.
    """

    def decide(points: Points) -> Finding:
        changes, between = {}, ""
        for line in points.find(*lines):
            xs = points.xs_of(line)
            first, last = (end if isinstance(end, str) else xs[end] for end in ends)
            if lines == ("*",) and last not in xs:
                continue
            a, b = points[line, first], points[line, last]
            changes[line] = b / a if ratio else b - a
            between = f"at {last} {'divided by' if ratio else 'less'} at {first}"
        return finding_of_values(changes, wanted, between)

    return decide


def spread(*lines: str, wanted: str) -> Decide:
    """Decide how far the lowest and the highest point of each curve are apart."""

    def decide(points: Points) -> Finding:
        values = {line: [points[line, x] for x in points.xs] for line in lines}
        return finding_of_values(
            {k: max(v) - min(v) for k, v in values.items()}, wanted, "highest less lowest"
        )

    return decide


def apart(*lines: str, wanted: str) -> Decide:
    """Decide how far these curves, or all of the paper's, are apart where they are farthest apart."""

    def decide(points: Points) -> Finding:
        names = lines or points.paper_lines
        columns = [[points[line, x] for line in names] for x in points.xs]
        return finding_of_values(
            {"at most": max(max(c) - min(c) for c in columns)}, wanted, "distance"
        )

    return decide


def rank(place: int, *lines: str, at: str = "") -> Decide:
    """Decide whether one of `lines` has this place among the paper's curves: 1 is the best, -1 the last."""

    def decide(points: Points) -> Finding:
        index = place if place < 0 else place - 1
        at_place = {}
        for x in select(points.xs, at):
            at_place[x] = sorted(points.paper_lines, key=lambda line: -points[line, x])[index]
        text = ", ".join(f"at {x}: {line}" for x, line in at_place.items())
        ordinal = {1: "best", -1: "last"}.get(place, f"number {place}")
        return finding_of_cases(
            {x: line in lines for x, line in at_place.items()}, f"{ordinal} {text}"
        )

    return decide


def level(wanted: str, at: str = "", *, worst: bool = False) -> Decide:
    """Decide at which x curves are highest, or lowest if `worst`: at `wanted`, or "between" the ends.

    at: selects curves.
    """

    def decide(points: Points) -> Finding:
        extreme = min if worst else max
        level_of = {
            line: extreme(points.xs, key=lambda x: points[line, x])
            for line in select(points.lines, at)
        }
        inner = points.xs[1:-1] if wanted == "between" else [wanted]
        text = ", ".join(f"{line}: {x}" for line, x in level_of.items())
        return finding_of_cases(
            {line: x in inner for line, x in level_of.items()},
            f"{'worst' if worst else 'best'} level by curve {text}",
        )

    return decide


def ratio(line: str, *others: str, at: str, wanted: str = "< 1") -> Decide:
    """Decide how large the value of a line is, divided by those of others, at one x."""
    return lambda points: finding_of_values(
        {other: points[line, at] / points[other, at] for other in others},
        wanted,
        f"{line} divided by",
    )


def value(*lines: str, wanted: str, at: str = "") -> Decide:
    """Decide how large the value of each line is at each x."""

    def decide(points: Points) -> Finding:
        values = {}
        for line in points.find(*lines):
            for x in (x for x in select(points.xs, at) if (line, x) in points):
                values[f"{line} at {x}"] = points[line, x]
        return finding_of_values(values, wanted, "values")

    return decide


def auto_is_best(points: Points) -> Finding:
    """Decide whether `sharing = "auto"` is within .005 of the best of the paper's schemes, at each x.

    In every panel, if lines are named "PANEL: NAME".
    """
    gaps = {}
    for curve in (line for line in points.lines if line.endswith(AUTO)):
        panel = curve.removesuffix(AUTO)
        rivals = [line for line in points.paper_lines if line.startswith(panel)]
        for x in points.xs_of(curve):
            best = max(points[rival, x] for rival in rivals)
            gaps[f"{panel}{x}"] = points[curve, x] - best
    if not gaps:  # x is the averaging level, and auto has no level
        for line in points.lines:
            gaps[line] = points[line, AUTO] - max(points[line, x] for x in points.xs)
    return finding_of_values(gaps, ">= -0.005", "auto less the best of the others")


def gain_shrinks(points: Points) -> Finding:
    """Decide whether levels 60 and 80 gain less over no averaging at the last x than at the second."""
    early, late = points.xs[1], points.xs[-1]
    changes = {
        line: points[line, late] - points["0", late] - points[line, early] + points["0", early]
        for line in ("60", "80")
    }
    return finding_of_values(changes, "< 0", f"gain over level 0 at {late} less that at {early}")


def rises_less_and_less(points: Points) -> Finding:
    """Decide whether each curve rises less than the one before it."""
    rises = [
        points[line, points.xs[-1]] - points[line, points.xs[0]] for line in points.paper_lines
    ]
    names = [f"{a}, {b}" for a, b in pairwise(points.paper_lines)]
    differences = [a - b for a, b in pairwise(rises)]
    return finding_of_values(
        dict(zip(names, differences, strict=True)), "> 0", "rises of two levels, their difference"
    )


def changes_less(line: str, other: str) -> Decide:
    """Decide whether a curve changes less than another one."""

    def decide(points: Points) -> Finding:
        curves = [[points[name, x] for x in points.xs] for name in (line, other)]
        a, b = (max(curve) - min(curve) for curve in curves)
        return finding_of_values({f"{amount(a)} less {amount(b)}": a - b}, "< 0", "their changes")

    return decide


def cells(method: str, most: Callable[[float], float]) -> Decide:
    """Decide whether a fused network has at most most(x) hidden cells."""

    def decide(points: Points) -> Finding:
        lines = points.find(f"{method}, cells")
        shares = {
            f"{line} {x}": points[line, x] / most(float(x)) for line in lines for x in points.xs
        }
        return finding_of_values(shares, "<= 1", "cells divided by the most that the claim allows")

    return decide


def _parameters_by_lambda(points: Points) -> dict[str, list[float]]:
    """Return the parameters of MAGI's networks by panel, for every λ; λ = 0 is PFNM."""
    lines = (line for line in points.lines if not line.endswith(", accuracy"))
    return {line: [points[line, x] for x in points.xs] for line in lines}


def falls_with_lambda(points: Points) -> Finding:
    """Decide whether parameters fall with every step of λ."""
    sizes = _parameters_by_lambda(points)
    text = "; ".join(f"{panel}: {' → '.join(map(amount, by_x))}" for panel, by_x in sizes.items())
    cases = {
        panel: all(a >= b for a, b in pairwise(by_x)) and by_x[-1] < by_x[0]
        for panel, by_x in sizes.items()
    }
    return finding_of_cases(cases, f"parameters {text}")


def falls_linearly(points: Points) -> Finding:
    """Decide whether parameters fall linearly with λ: their correlation is close to -1."""
    weights, sizes = [float(x) for x in points.xs], _parameters_by_lambda(points)
    correlations = {panel: correlation(weights, by_x) for panel, by_x in sizes.items()}
    return finding_of_values(correlations, "<= -0.95", "correlation")


# --- the claims -------------------------------------------------------------------------------------------

_LOCAL, _OWN, _SHARED, _FEDPROX = (
    "local",
    "FedAvg, own starts",
    "FedAvg, shared start",
    "FedProx, shared start",
)
_ENSEMBLES, _MAGI, _QUADRATURE = ("ensemble", "weighted ensemble"), "MAGI λ=0.1", "Gauss–Hermite 20"
_PRIORS = ("PFNM", "PFNM σ0²=1", "PFNM σ0²=100", "PFNM γ0=0.1", "PFNM γ0=10")
_VARIANCES = ("PFNM", "PFNM σ²=0.5", "PFNM σ²=2")
_EVEN, _UNEVEN = "homogeneous: {}".format, "Dirichlet 0.2: {}".format
_PARTIAL = ("15", "30", "60", "80")
_PART, _ALL, _PER_TASK = "global 80", "global 100", "100 per task"
_TASKS, _TASKS_APART = (
    "global 80 + 20 per task, dependency",
    "global 80 + 20 per task, no dependency",
)
_PAIRS = "global 70 + 30 or 15 per pair, dependency"
_PAIRS_APART = "global 70 + 30 or 15 per pair, no dependency"
_ALL_4, _ALL_5 = "4 layers: 784-300-100-10", "5 layers: 784-300-100-10-10"
_BODY_4, _BODY_5 = "4 layers: 784-300-100-0", "5 layers: 784-300-100-10-0"
_AUTO_CLAIM = {
    "(Not in the paper.) Peers that decide by themselves what to share reach the paper's best scheme":
    auto_is_best,
}  # fmt: skip


def _femnist_claims(variant: str, classes: int) -> dict[str, dict[str, Decide]]:
    """Return the claims about a variant of FEMNIST, by study."""
    return {
        f"femnist-level-{variant}": {
            "Sharing some cells is best, whatever the number of mini-batches": level("between"),
            "The best averaging level is 80": level("80"),
            **_AUTO_CLAIM,
        },
        f"femnist-scheme-{variant}": {
            "Sharing a part of every layer beats sharing whole layers":
            above(f"784-250-80-{classes}", at="last", each=True),
            "(Control.) By the end, networks that average nothing have learnt (accuracy above .5)":
            value("no averaging", at="last", wanted="> 0.5"),
            **_AUTO_CLAIM,
        },
        f"femnist-peers-{variant}": {
            "Without averaging, the number of peers has no effect": spread("0", wanted="<= 0.01"),
            "Sharing everything loses accuracy as the number of peers grows": change("100", wanted="< 0"),
            "At level 80, more peers give a higher accuracy": change("80", wanted="> 0"),
            **_AUTO_CLAIM,
        },
    }  # fmt: skip


_TABLE: Mapping[str, Mapping[str, Decide]] = {
    "pfnm-figure2": {
        "PFNM is the best of the methods that communicate once and make one network":
        above("PFNM", _LOCAL, _OWN, _SHARED, "DP-means"),
        "FedAvg, even from a shared start, loses accuracy quickly with more networks":
        change(_SHARED, wanted="< -0.05"),
        "PFNM's network is much smaller than all networks together (at most half)":
        cells("PFNM", lambda peers: 50 * peers if peers > 2 else 200),
        "With γ0 = 1e-5 it is hardly larger than one peer's network":
        cells("PFNM γ0=1e-5", lambda peers: 110),
        "PFNM is comparable to the ensembles (within .03)": above("PFNM", *_ENSEMBLES, wanted="> -0.03"),
        "PFNM outperforms downpour SGD with ten exchanges": above("PFNM", "downpour SGD"),
        "Ensembles hardly lose accuracy as networks become more and weaker":
        change("ensemble", wanted="> -0.05"),
    },
    "pfnm-figure4": {
        "PFNM is comparable to the ensembles (within .03) for one to six hidden layers":
        above("PFNM", *_ENSEMBLES, wanted="> -0.03"),
        "and outperforms downpour SGD": above("PFNM", "downpour SGD"),
        "(Not in the paper.) PFNM is above FedAvg from a shared start": above("PFNM", _SHARED),
    },
    "pfnm-sensitivity": {
        "PFNM is robust to σ0² and γ0 (within .02), classes split evenly":
        apart(*map(_EVEN, _PRIORS), wanted="<= 0.02"),
        "and split unevenly": apart(*map(_UNEVEN, _PRIORS), wanted="<= 0.02"),
        "σ² has almost no effect if classes are split evenly (within .02)":
        apart(*map(_EVEN, _VARIANCES), wanted="<= 0.02"),
        "and more if they are split unevenly, but every value is competitive (within .1)":
        apart(*map(_UNEVEN, _VARIANCES), wanted="<= 0.1"),
    },
    "pfnm-table": {
        "(000) PFNM is above averaging, from own and shared starts": above("PFNM", _LOCAL, _OWN, _SHARED),
        "(000) PFNM is comparable to the weighted ensemble (within .03)":
        above("PFNM", _ENSEMBLES[1], wanted="> -0.03"),
        "(002) Averaging from own starts is much worse than from a shared start (by .1)":
        above(_SHARED, _OWN, wanted="> 0.1"),
        "(002) MAGI (λ = 0.1) is more accurate than PFNM": above(_MAGI, "PFNM"),
    },
    "magi-table1": {
        "MAGI is the best method in every row": above(_MAGI, _LOCAL, _SHARED, "PFNM"),
        "With one hidden layer it is 3 % above PFNM (2 % or more)":
        above(_MAGI, "PFNM", wanted="> 0.02", at="not 10"),
        "Averaging loses to PFNM and MAGI": above("PFNM", _SHARED, "FedProx, shared start"),
        "More clients make every method less accurate":
        change(*(f"1 hidden: {name}" for name in (_LOCAL, _SHARED, "PFNM", _MAGI)), wanted="< 0"),
    },
    "magi-figure2": {
        "The larger λ, the smaller MAGI's network (λ = 0 is PFNM)": falls_with_lambda,
        "It shrinks almost linearly": falls_linearly,
        "With λ near 1 and one hidden layer it has almost 8 times fewer parameters (6 or more)":
        change("1 hidden", wanted="<= 0.1667", ratio=True),
        "With more hidden layers, close to 3 times fewer (2.5 or more)":
        change("2 hidden", "3 hidden", wanted="<= 0.4", ratio=True),
    },
    "fednp-toy": {
        "FedNP's error is below FedAvg's": ratio("FedNP", "FedAvg", at="error"),
        "by more than a third (72.4 against 116.5)": ratio("FedNP", "FedAvg", at="error", wanted="< 0.67"),
        "(Control.) Its estimate of all data helps: the error is 5 % below that with z frozen":
        ratio("FedNP", "FedNP, z frozen", at="error", wanted="< 0.95"),
    },
    "fednp-moments": {
        "The closed form is faster than quadratures of 100, 1000 and 10,000 nodes":
        ratio("closed form", "grid 100", "grid 1000", "grid 10000", at="milliseconds"),
        "and the model as accurate: the toy's error is within 2 % of that with exact moments":
        ratio("closed form", "Gauss–Hermite 100", at="mse", wanted="< 1.02"),
        "(Not in the paper.) Gauss–Hermite with 20 nodes is more exact than the closed form":
        ratio(_QUADRATURE, "closed form", at="mean_error"),
        "(Not in the paper.) and takes less than twice its time":
        ratio(_QUADRATURE, "closed form", at="milliseconds", wanted="< 2"),
    },
    "fednp-cifar": {
        "FedNP is best with 10 clients": rank(1, "FedNP", at="10"),
        "and with 50 and 100": rank(1, "FedNP", at="not 10"),
        "FedNP is about 2 % above FedAvg (1 % or more)": above("FedNP", "FedAvg", wanted="> 0.01"),
        "FedProx is below FedAvg": above("FedAvg", "FedProx"),
        "SCAFFOLD is far below FedAvg (by .02)": above("FedAvg", "SCAFFOLD", wanted="> 0.02"),
        "All methods lose accuracy with more clients": change("*", wanted="< 0"),
        "With 100 clients, FedNP and MOON are first": rank(1, "FedNP", "MOON", at="100"),
        "and second": rank(2, "FedNP", "MOON", at="100"),
        "(Control.) Every method has learnt (accuracy above .15, where chance is .1)":
        value("*", wanted="> 0.15"),
    },
    "multitask": {
        "Related models (MOCHA) are more accurate than separate ones": above("MOCHA", "separate"),
        "and than one model for all": above("MOCHA", "pooled"),
    },
    "compressed-updates": {
        "Averaging the clients' weights (FedAvg) makes a better model than a client has alone":
        above("none", "alone", at="accuracy"),
        "Compressed updates lose accuracy": value("*", at="loss", wanted="> 0"),
        "(The slides ask for a bound.) No compressor loses more accuracy than the bound that follows from "
        "the distortion of its messages": change("*", ends=("loss", "loss_bound"), wanted=">= 0"),
        "(The slides ask for a bound.) The bound is small enough to be useful (.05)":
        value("*", at="loss_bound", wanted="< 0.05"),
    },
    **_femnist_claims("a", 62),
    **_femnist_claims("m", 47),
    **_femnist_claims("d", 10),
    "averaging-level": {
        "Sharing some cells is best, whatever the mini-batch size": level("between"),
        "For large mini-batches the best averaging level is 80": level("80", ">= 500"),
        "Sharing everything loses much accuracy, since one network has one task":
        change("*", ends=(-2, -1), wanted="<= -0.02"),
        **_AUTO_CLAIM,
    },
    "convergence": {
        "At the beginning, no averaging leads": rank(1, "0", at="10"),
        "At the beginning, level 80 is last": rank(-1, "80", at="10"),
        "At the end, level 80 is first": rank(1, "80", at="last"),
        "At the end, sharing everything is last": rank(-1, "100", at="last"),
        "The three curves stay close together": apart(wanted="<= 0.05"),
        "(Control.) By the end, networks that average nothing have learnt (accuracy above .5)":
        value("0", at="last", wanted="> 0.5"),
    },
    "number-of-peers": {
        "Without averaging, the number of peers has no effect": spread("0", wanted="<= 0.01"),
        "At levels 60 and 80, more peers give a higher accuracy": change("60", "80", wanted="> 0.005"),
        "Sharing everything gains from more peers too": change("100", wanted="> 0"),
        "but stays below level 80": above("80", "100"),
        **_AUTO_CLAIM,
    },
    "semi-local": {
        "No averaging is the worst": rank(-1, "no averaging"),
        "Sharing everything is below sharing it with the same task": above(_PER_TASK, _ALL),
        "Sharing everything is below level 80": above(_PART, _ALL),
        "A global and a semi-local model together are best": rank(1, _TASKS, _TASKS_APART),
        "A dependency between them gains more": above(_TASKS, _TASKS_APART),
        "(Control.) Networks that average nothing have learnt (accuracy above .5)":
        value("no averaging", wanted="> 0.5"),
        **_AUTO_CLAIM,
    },
    "semi-local-and-local": {
        "Sharing everything is the worst": rank(-1, _ALL),
        "Level 80 is better than no averaging": above(_PART, "no averaging"),
        "With large mini-batches, sharing everything per task beats level 80":
        above(_PER_TASK, _PART, at=">= 400"),
        "Global, semi-local and local models together are best": rank(1, _PAIRS, _PAIRS_APART),
        "A dependency between them gains more": above(_PAIRS, _PAIRS_APART),
        **_AUTO_CLAIM,
    },
    "difference-rate": {
        "Without a difference between tasks, sharing everything is best": rank(1, "100", at="0"),
        "With all ten labels rotated, it loses more than half of its accuracy":
        change("100", wanted="<= 0.5", ratio=True),
        "No other level is severely affected": change("0", *_PARTIAL, wanted=">= -0.1"),
        "Levels 60 and 80 are best for low difference rates": rank(1, "60", "80", at="2 4"),
        "Their gain shrinks as the difference rate grows": gain_shrinks,
        "At rate 10, level 80 is no better than no averaging": above("80", "0", wanted="<= 0.005", at="10"),
        **_AUTO_CLAIM,
    },
    "permuted-peers": {
        "Sharing everything is best if all peers have one task": rank(1, "100", at="0"),
        "and third with two other peers": rank(3, "100", at="2"),
        "and last with four to eight": rank(-1, "100", at=">= 4"),
        "No averaging is not affected by their number": spread("0", wanted="<= 0.01"),
        "Partial averaging is hardly affected": change(*_PARTIAL, wanted=">= -0.02"),
        **_AUTO_CLAIM,
    },
    "training-size": {
        "The lower the averaging level, the more the training set's size matters": rises_less_and_less,
        "With 250 samples sharing everything is best": rank(1, "100", at="250"),
        "From 500 samples on level 80 is best": rank(1, "80", at=">= 500"),
        "and 60 is second": rank(2, "60", at=">= 500"),
        "From 2000 samples on sharing everything is last": rank(-1, "100", at=">= 2000"),
        **_AUTO_CLAIM,
    },
    "layouts": {
        "Sharing everything falls severely, with four layers": change(_ALL_4, wanted="<= 0.7", ratio=True),
        "and with five": change(_ALL_5, wanted="<= 0.7", ratio=True),
        "Without averaging, five layers are less accurate than four":
        above("4 layers: no averaging", "5 layers: no averaging"),
        "Sharing all but the output layer of four is best wherever tasks differ":
        rank(1, _BODY_4, at="not 0"),
        "and is less affected by the difference rate than level 80":
        changes_less(_BODY_4, "4 layers: 784-250-80-10"),
        "Sharing all but the output layer of five beats no averaging of four":
        above(_BODY_5, "4 layers: no averaging"),
        **_AUTO_CLAIM,
    },
    "vsn": {
        "Sharing some cells is best, whatever the number of mini-batches": level("between"),
        "The best level is at about 80 % (40 of 50 cells)": level("40"),
        **_AUTO_CLAIM,
    },
    "associative": {
        "Sharing some hidden cells is best, whatever the number of mini-batches": level("between"),
        "Sharing all hidden cells is the worst with 10 to 30 mini-batches":
        level("400", "10 20 30", worst=True),
    },
}  # fmt: skip
CLAIMS: Mapping[str, Sequence[Claim]] = {
    study: [Claim(text, decide) for text, decide in claims.items()]
    for study, claims in _TABLE.items()
}
"""The papers' claims by study."""

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
    Unavailable(
        "004, table 1", "FedNP is best on CIFAR-100 and TinyImageNet with ResNet18",
        "the data is not here, and training it takes a graphics processor",
    ),
    Unavailable("004, table 1", "FedNP is above FedPA and FedLA", "neither method is implemented here"),
    Unavailable("004, table 2", "FedNP lowers the word error rate on CHiME-5", "the corpus needs a licence"),
    Unavailable(
        "004, table 4", "FedNP's error on the toy is below that of FedProx, SCAFFOLD and FedPA",
        "the toy is run with FedAvg and FedNP only",
    ),
)  # fmt: skip
"""Claims that cannot be measured here."""


@dataclass(frozen=True)
class Row:
    """One row of the table of claims; points: the values of its study, None if it has no results."""

    entry: StudyEntry
    claim: Claim
    finding: Finding
    points: Points | None = None

    @property
    def command(self) -> str:
        """The command that measured it, or would measure it."""
        runs = self.points.most_seeds if self.points else self.entry.runs
        return f"gossamer paper {self.entry.name}" + f" --runs {runs}" * (runs != self.entry.runs)

    @property
    def minutes(self) -> float | None:
        """About how many minutes of one core the command takes."""
        seeds = self.points.most_seeds if self.points else self.entry.runs
        return None if self.entry.minutes is None else seeds * self.entry.minutes

    @property
    def differences(self) -> str:
        """What differs from the paper: the setting, and the number of seeds."""
        texts = [DIFFERENCES.get(self.entry.name, "")]
        if self.points is not None and self.points.fewest_seeds < self.entry.runs:
            texts.append(f"{self.points.seeds_text}, not {self.entry.runs}")
        return "; ".join(text for text in texts if text)


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
        for claim in claims:
            table.append(Row(entry, claim, _decide(claim, points), points))
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
    warning says how many there are in which file; the file is not changed. Of a study that is not finished,
    the records of a line and a seed are used only if there are all of them: a curve would end too early.
    """
    study = entry.study()
    keys = {cell.key for cell in study.cells}
    cells_per_seed = len(study.cells) // entry.runs  # cells are listed seed by seed
    keys_by_curve: dict[tuple[str, int], set[str]] = {}
    for index, cell in enumerate(study.cells):
        keys_by_curve.setdefault((cell.line, index // cells_per_seed), set()).add(cell.key)
    for folder in folders:
        path = folder / f"{entry.name}.jsonl"
        if not path.is_file():
            path = find_run(folder / entry.name) / "runs.jsonl"
        all_records = list(read_records(path))
        records = [record for record in all_records if record.get("key") in keys]
        if others := len(all_records) - len(records):
            console.warn(
                f"{path}: {others} of {len(all_records)} records are not used, since they are of another "
                f"version of {entry.name} or of other settings; the file stays as it is, and gossamer paper "
                f"{entry.name} runs what is missing"
            )
        finished = {record["key"] for record in records}
        complete = {key for curve in keys_by_curve.values() if curve <= finished for key in curve}
        if unfinished := len(finished - complete):
            console.warn(
                f"{path}: {unfinished} records of {entry.name} are not used yet, since other runs of their "
                f"line and seed are missing; gossamer paper {entry.name} runs those"
            )
        if complete:
            return [record for record in records if record["key"] in complete], study
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


def draw_overview(path: Path, table: Sequence[Row]) -> list[Path]:
    """Draw the paper's figure 7 from other studies' results: each task with no, partial and full averaging.

    Tasks that have not been run are left out; without any, nothing is drawn. Returns the files.
    """
    bars: dict[str, list[float]] = {}
    points_of = {row.entry.name: row.points for row in table}
    for study_name, (task, curve, levels) in OVERVIEW.items():
        if (points := points_of.get(study_name)) is None:
            continue
        with suppress(KeyError):  # this curve has not been run
            bars[task] = [points[curve, level] for level in levels]
            has_auto = (curve, AUTO) in points
            bars[task].append(points[curve, AUTO] if has_auto else nan)
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
    axes.set_xticks(range(len(bars)), [task.replace(" ", "\n") for task in bars])
    axes.set(title="Summary of the paper's tasks", ylabel="accuracy")
    place_legend(axes)
    return save(figure, path)


_LABELS = {
    "magi-figure2": ("λ", "parameters"),
    "multitask": ("training samples per subject", "accuracy"),
    "pfnm-figure2": ("number of peers", "accuracy"),
    "pfnm-figure4": ("hidden layers", "accuracy"),
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

        drawings = [(row, *panel) for row in studies.values() for panel in _panels_of(row)]
        columns = min(3, len(drawings))
        grid_rows = -(-len(drawings) // columns)
        figure, grid = panels(
            grid_rows, columns,
            _PARTIAL_MODELS_NOTE if section.startswith("003") else _NOTE,
            5.2 * columns, 3.6 * grid_rows,
        )  # fmt: skip
        all_axes = [axes for row_of_axes in grid for axes in row_of_axes]
        for axes, (row, panel, numbers) in zip(all_axes, drawings, strict=False):
            assert row.points is not None
            plot_lines(axes, numbers, "line", "x", "median", "low", "high")
            _, _, place = row.entry.origin.partition(", ")  # section and figure of the paper
            title = f"{row.entry.name} ({place or row.entry.origin})" + f", {panel}" * bool(panel)
            axes.set_title(title, fontsize=9)
            x_label, y_label = _LABELS.get(row.entry.name, (row.points.x_label, "accuracy"))
            axes.set_xlabel(x_label, fontsize=8)
            axes.set_ylabel(y_label, fontsize=8)
            axes.legend(fontsize=6, frameon=False)
        for axes in all_axes[len(drawings) :]:
            axes.set_visible(False)
        files += save(figure, folder / section, dpi=80)[:1]
    return files


MOST_LINES = 8
"""The most curves in one panel of a figure."""


def _panels_of(row: Row) -> list[tuple[str, Frame]]:
    """Return the panels of a study's figure: a title and a table of numbers for each.

    Curves called "PANEL: NAME" get a panel for each PANEL if there are too many for one; else there is one
    panel, without a title.
    """
    assert row.points is not None
    numbers = row.points.numbers()
    parts = numbers["line"].str.partition(": ")
    if numbers["line"].nunique() <= MOST_LINES or not parts[1].all():
        return [("", numbers)]
    own_names = numbers.assign(line=parts[2])
    return [(str(panel), rows) for panel, rows in own_names.groupby(parts[0], sort=False)]


MOST_COLUMNS = 8
"""The most x in a table of the page; of longer curves, only some x are shown."""


def page(table: Sequence[Row], pictures: Sequence[str] = ()) -> str:
    """Return the page of claims, in Markdown: tables of studies that were run, and a list of the others.

    pictures: addresses of pictures, which are shown at the top.
    """
    counts = Counter(row.finding.verdict for row in table)
    decided = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in (HOLDS, IN_PART, FAILS))
    measured = {row.entry.name: row for row in table if row.points is not None}
    hours = sum(row.minutes or 0 for row in measured.values()) / 2 / 60
    missing = f"All {len(table)} claims have been measured at full size; "
    if number := counts[NOT_RUN]:
        missing = f"Of {len(table)} claims, {number} have not been measured at full size yet; of the others, "
    lines = [
        "# The papers' claims, and what was measured here",
        "",
        "`gossamer paper claims` writes this page from results on disk, and a function decides every "
        f"verdict. {missing}{decided}. Verdicts are about medians over seeds; tables have means ± standard "
        f"deviations. With the extra `fast`, what was measured takes about {hours:.1f} hours on two cores. A "
        "command that was interrupted continues where it stopped.",
        *(f"\n![figures of {Path(picture).stem}]({picture})" for picture in pictures),
    ]
    not_run: list[str] = []
    for name in dict.fromkeys(row.entry.name for row in table):
        study_rows = [row for row in table if row.entry.name == name]
        entry, first = study_rows[0].entry, study_rows[0]
        if first.points is None:
            not_run.append(
                f"- {entry.title} ({entry.origin}): `{first.command}`{_time_text(first)}"
            )
            continue
        lines += [
            "",
            f"## {entry.title} ({entry.origin})",
            "",
            f"`{first.command}`: {first.points.seeds_text}{_time_text(first)}."
            + (f" Differs from the paper: {first.differences}." if first.differences else ""),
            "",
            "| claim | verdict | measured |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {row.claim.text} | {row.finding.verdict} | {row.finding.measured} |"
            for row in study_rows
        ]
        # HTML that GitHub and Sphinx both fold; the empty lines make Markdown of what is inside.
        lines += ["", "<details><summary>Values</summary>", "", *_means_table(first.points)]
        lines += ["", "</details>"]
    if not_run:
        lines += ["", "## Not run yet at full size", "", *not_run]
    lines += [
        "",
        f"## What {CANNOT}",
        "",
        "| where | claim | reason |",
        "| --- | --- | --- |",
        *(f"| {claim.origin} | {claim.text} | {claim.reason} |" for claim in UNAVAILABLE),
    ]
    return "\n".join(lines) + "\n"


def _time_text(row: Row) -> str:
    """Return how long a row's command takes, after a comma."""
    if row.minutes is None:
        return ""
    return f", about {row.minutes:.0f} minutes of one core" if row.minutes > 1.5 else ", a minute"


def _means_table(points: Points) -> list[str]:
    """Return a table in Markdown of mean ± standard deviation: a row for each line, a column for each x.

    With a single x and lines named "PANEL: NAME", a row for each name and a column for each panel.
    """
    step = -(-len(points.xs) // MOST_COLUMNS)
    xs = points.xs[::-step][::-1]  # the last x is always shown
    if any((line, AUTO) in points for line in points.lines):
        xs = [*xs, AUTO]
    shown = [line for line in points.lines if not line.endswith(", parameters")]
    if len(xs) == 1 and all(": " in line for line in shown):
        split = [line.split(": ", 1) for line in shown]
        columns = list(dict.fromkeys(panel for panel, _ in split))
        cells = {
            name: [points.mean_text(f"{panel}: {name}", xs[0]) for panel in columns]
            for _, name in split
        }
        label = f"{points.x_label} = {xs[0]}"
    else:
        columns = xs
        cells = {line: [points.mean_text(line, x) for x in xs] for line in shown}
        label = points.line_label
    return [
        f"| {label} | {' | '.join(columns)} |",
        f"| --- {'| --- ' * len(columns)}|",
        *(f"| {name} | {' | '.join(texts)} |" for name, texts in cells.items()),
    ]
