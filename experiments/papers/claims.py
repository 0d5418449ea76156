"""`gossamer paper claims`: the claims of the papers, and whether the results on disk support them.

A claim is a sentence about the figure of one study, and a function that decides it from the study's summary
table. No verdict is written by hand. To add a claim, add an entry to `CLAIMS` under its study.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from ..results import Record, find_run, read_records
from ..study import Frame, Study
from . import PAPERS, StudyEntry

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"
NOT_RUN = "not measured"
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

    summary: the first table of a study with a curve, an x, and a median in every row.
    """

    def __init__(self, summary: Frame):
        line, x = summary.columns[:2]
        self._medians = {
            (str(row[line]), str(row[x])): float(row["median"]) for _, row in summary.iterrows()
        }
        self.lines = list(dict.fromkeys(line for line, _ in self._medians))
        self.xs = [x for x in dict.fromkeys(x for _, x in self._medians) if x != AUTO]

    def __getitem__(self, line_and_x: tuple[object, object]) -> float:
        """Return the median of a curve at an x."""
        line, x = line_and_x
        return self._medians[str(line), str(x)]

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


Decide = Callable[[Points], Finding]
"""A function that decides a claim from the medians of the study's figure."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim about the figure of a study, in our words.

    decide: returns the verdict and what was measured, from the figure's medians.
    """

    text: str
    decide: Decide


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


def _compare(higher: str, lower: str, xs: Callable[[str], bool] = lambda x: True) -> Decide:
    """Return a function that decides whether a curve is above another one at each x."""

    def decide(points: Points) -> Finding:
        gaps = {x: points[higher, x] - points[lower, x] for x in points.xs if xs(x)}
        text = ", ".join(f"at {x} by {gap:+.3f}" for x, gap in gaps.items())
        return by_case({x: gap > 0 for x, gap in gaps.items()}, text)

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
    """One row of the table of claims."""

    entry: StudyEntry
    claim: Claim
    finding: Finding
    runs: int

    @property
    def command(self) -> str:
        """The command that measured it, or would measure it."""
        runs = f" --runs {self.runs}" if 0 < self.runs != self.entry.runs else ""
        return f"gossamer paper {self.entry.name}{runs}"


def rows(folders: Sequence[Path]) -> list[Row]:
    """Return a row for every claim, decided from the results of its study.

    folders: where results are looked for; for each study the first folder that has any is used. Results are
        in `NAME/`, as `gossamer paper NAME` writes them, or in `NAME.jsonl`.
    """
    table = []
    for name, claims in CLAIMS.items():
        entry = PAPERS[name]
        records, study = records_of(entry, folders)
        points = Points(study.table(records)["summary"]) if records else None
        runs = len({record["seed"] for record in records})
        for claim in claims:
            table.append(Row(entry, claim, _decide(claim, points), runs))
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
    """Return the records of a study's runs at full size, and the study; records of other runs are ignored."""
    study = entry.study()
    keys = {cell.key for cell in study.cells}
    for folder in folders:
        path = folder / f"{entry.name}.jsonl"
        if not path.is_file():
            path = find_run(folder / entry.name) / "runs.jsonl"
        records = [record for record in read_records(path) if record.get("key") in keys]
        if records:
            return records, study
    return [], study


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
        points = Points(study.table(records)["summary"])
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


def page(table: Sequence[Row]) -> str:
    """Return the page of claims, in Markdown: tables of studies that were run, and a list of the others."""
    counts = Counter(row.finding.verdict for row in table)
    decided = ", ".join(f"{verdict}: {counts[verdict]}" for verdict in (HOLDS, IN_PART, FAILS))
    lines = [
        "# The papers' claims, and what was measured here",
        "",
        "`gossamer paper claims` writes this page from results on disk, and a function decides every "
        f"verdict. Of {len(table)} claims, {counts[NOT_RUN]} have not been measured at the paper's size "
        f"yet; of the others, {decided}. Numbers are medians over seeds.",
    ]
    not_run: list[str] = []
    for name in dict.fromkeys(row.entry.name for row in table):
        study_rows = [row for row in table if row.entry.name == name]
        entry, first = study_rows[0].entry, study_rows[0]
        if not first.runs:
            not_run.append(f"- {entry.title} ({entry.origin}): `{first.command}`")
            continue
        lines += [
            "",
            f"## {entry.title} ({entry.origin})",
            "",
            f"`{first.command}`: {first.runs} seeds.",
            "",
            "| claim | verdict | measured |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {row.claim.text} | {row.finding.verdict} | {row.finding.measured} |"
            for row in study_rows
        ]
    if not_run:
        lines += ["", "## Not run yet at the paper's size", "", *not_run]
    return "\n".join(lines) + "\n"
