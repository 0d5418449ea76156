"""Claims of papers: each is decided by a function of the results, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gossamer.experiments.papers import PAPERS, claims
from gossamer.experiments.papers.claims import CLAIMS, FAILS, HOLDS, NOT_RUN, Points
from gossamer.experiments.results import RecordFile
from gossamer.experiments.study import frame_of

Figure = Mapping[tuple[str, object], float]
LEVELS = (0, 15, 30, 60, 80, 100)


def by_level(lines: tuple[object, ...], levels: tuple[int, ...]) -> Figure:
    """Curves that rise to the last level but one, and fall at the last."""
    rising = {
        (str(line), level): 0.7 + 0.02 * place
        for line in lines
        for place, level in enumerate(levels[:-1])
    }
    return {
        **rising,
        **{(str(line), levels[-1]): 0.6 for line in lines},
        **{(str(line), "auto"): 0.8 for line in lines},
    }


def curves(xs: tuple[int, ...], values: Mapping[str, Callable[[int], float]]) -> Figure:
    """Curves by the function of x that they show."""
    return {(line, x): value(x) for line, value in values.items() for x in xs}


def constant(value: float) -> Callable[[int], float]:
    return lambda x: value


NONE, ALL, EACH, PART = "no averaging", "global 100", "100 per task", "global 80"
AS_IN_THE_PAPER: dict[str, Figure] = {
    **{f"femnist-level-{v}": by_level((50, 1000), LEVELS) for v in "amd"},
    **{
        f"femnist-scheme-{v}": curves(
            (100, 200),
            {
                "no averaging": constant(0.5),
                "784-250-80-62": constant(0.7),
                "784-300-100-0": constant(0.6),
                "auto": constant(0.7),
            },
        )
        for v in "amd"
    },
    **{
        f"femnist-peers-{v}": curves(
            (4, 64),
            {
                "0": constant(0.5),
                "80": lambda x: 0.6 + x / 1000,
                "100": lambda x: 0.6 - x / 1000,
            },
        )
        for v in "amd"
    },
    "averaging-level": by_level((50, 500, 1500), LEVELS),
    "convergence": curves(
        (1, 10, 30),
        {
            "0": lambda x: 0.53 if x < 30 else 0.71,
            "80": lambda x: 0.51 if x < 30 else 0.72,
            "100": lambda x: 0.52 if x < 30 else 0.7,
        },
    ),
    "number-of-peers": curves(
        (4, 16),
        {
            "0": constant(0.8),
            "60": lambda x: 0.8 + x / 1000,
            "80": lambda x: 0.81 + x / 1000,
            "100": lambda x: 0.7 + x / 1000,
            "auto": constant(0.9),
        },
    ),
    "semi-local": curves(
        (25, 150),
        {
            NONE: constant(0.5),
            ALL: constant(0.55),
            EACH: constant(0.6),
            PART: constant(0.61),
            "global 80 + 20 per task, no dependency": constant(0.62),
            "global 80 + 20 per task, dependency": constant(0.65),
            "auto": constant(0.65),
        },
    ),
    "semi-local-and-local": curves(
        (100, 400, 800),
        {
            NONE: constant(0.5),
            ALL: constant(0.4),
            EACH: constant(0.7),
            PART: constant(0.6),
            "global 70 + 30 or 15 per pair, no dependency": constant(0.72),
            "global 70 + 30 or 15 per pair, dependency": constant(0.75),
            "auto": constant(0.75),
        },
    ),
    "difference-rate": curves(
        (0, 2, 4, 10),
        {
            "0": constant(0.8),
            "15": constant(0.805),
            "30": constant(0.81),
            "60": lambda x: 0.86 - x / 200,
            "80": lambda x: 0.87 - x / 140,
            "100": lambda x: 0.9 if not x else 0.8 - x / 20,
            "auto": constant(0.9),
        },
    ),
    "permuted-peers": curves(
        (0, 2, 4, 8),
        {
            "0": constant(0.8),
            "15": constant(0.81),
            "30": constant(0.82),
            "60": constant(0.84),
            "80": lambda x: 0.86 - x / 1000,
            "100": lambda x: {0: 0.9, 2: 0.83}.get(x, 0.7),
            "auto": constant(0.9),
        },
    ),
    "training-size": curves(
        (250, 500, 2000, 3500),
        {
            "0": lambda x: 0.5 + x / 20_000,
            "60": lambda x: 0.6 + x / 30_000,
            "80": lambda x: 0.62 + x / 35_000,
            "100": lambda x: {250: 0.65, 500: 0.55}.get(x, 0.5),
            "auto": constant(0.9),
        },
    ),
    "layouts": curves(
        (0, 2, 10),
        {
            "4 layers: no averaging": constant(0.7),
            "4 layers: 784-300-100-10": lambda x: 0.95 - x / 20,
            "4 layers: 784-250-80-10": lambda x: 0.85 - x / 100,
            "4 layers: 784-300-100-0": constant(0.88),
            "5 layers: no averaging": constant(0.6),
            "5 layers: 784-300-100-10-10": lambda x: 0.9 - x / 20,
            "5 layers: 784-300-100-10-0": constant(0.75),
        },
    ),
    "vsn": by_level((100, 400), (0, 7, 15, 30, 40, 50)),
    "associative": {
        ("10", 0): 0.6, ("10", 300): 0.8, ("10", 400): 0.5,
        ("20", 0): 0.6, ("20", 300): 0.8, ("20", 400): 0.5,
        ("30", 0): 0.6, ("30", 300): 0.8, ("30", 400): 0.5,
    },
}  # fmt: skip


def points_of(figure: Figure, change: Callable[[float], float] = lambda value: value) -> Points:
    rows = [{"line": a, "x": str(x), "median": f"{change(y):.4f}"} for (a, x), y in figure.items()]
    return Points(frame_of(rows))


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_hold_for_results_as_in_the_paper(name: str) -> None:
    points = points_of(AS_IN_THE_PAPER[name])
    for claim in CLAIMS[name]:
        assert claim.decide(points).verdict == HOLDS, claim.text


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_do_not_hold_for_the_opposite(name: str) -> None:
    """Every curve is turned upside down, and ten times as steep: nothing is flat, near or higher."""
    points = points_of(AS_IN_THE_PAPER[name], lambda value: 10 * (1 - value))
    flat = {
        "has no effect",
        "is not affected",
        "affected by",
        "hardly affected",
        "severely affected",
    }
    for claim in CLAIMS[name]:
        if not any(words in claim.text for words in flat):
            assert claim.decide(points).verdict != HOLDS, claim.text


def test_an_effect_is_seen_where_a_claim_says_that_there_is_none() -> None:
    figure = {**AS_IN_THE_PAPER["permuted-peers"], ("0", 8): 0.7, ("15", 8): 0.7}
    verdicts = {c.text: c.decide(points_of(figure)).verdict for c in CLAIMS["permuted-peers"]}
    assert verdicts["No averaging is not affected by their number"] == FAILS
    assert verdicts["Partial averaging is hardly affected"] == "holds in part"
    figure = {**AS_IN_THE_PAPER["layouts"], ("4 layers: 784-300-100-0", 10): 0.6}
    verdicts = {c.text: c.decide(points_of(figure)).verdict for c in CLAIMS["layouts"]}
    assert verdicts["and is less affected by the difference rate than level 80"] == FAILS


def test_there_are_forty_claims_about_studies_that_exist() -> None:
    assert set(CLAIMS) <= set(PAPERS)
    assert sum(map(len, CLAIMS.values())) >= 40


def test_claims_of_results_on_disk(tmp_path: Path) -> None:
    """Records of another version are ignored, and missing curves make no verdict."""
    study = PAPERS["associative"].study()
    records: list[dict[str, Any]] = [
        {
            "key": cell.key,
            "line": cell.line,
            "settings": dict(cell.settings),
            "seed": cell.config.seed,
            "accuracy": 0.9 if cell.settings["x"] == 300 else 0.5,
        }
        for cell in study.cells
        if cell.config.seed < 2
    ]
    with RecordFile(tmp_path / "associative.jsonl") as file:
        file.write({**records[0], "key": "of an earlier version", "accuracy": 5.0})
        for record in records:
            file.write(record)
    table = claims.rows([tmp_path / "no results here", tmp_path])
    by_study = {row.entry.name: row for row in table}
    assert by_study["associative"].runs == 2
    assert by_study["associative"].command == "gossamer paper associative --runs 2"
    assert by_study["vsn"].finding.verdict == NOT_RUN
    files = claims.draw_overview(tmp_path / "papers", [tmp_path])
    assert [file.name for file in files] == ["papers.png", "papers.svg"]
    assert claims.draw_overview(tmp_path / "papers", [tmp_path / "no results here"]) == []
    page = claims.page(table)
    assert "best level by curve 10: 300, 20: 300, 30: 300, 40: 300" in page
    assert f"{len(table) - 2} have not been measured" in page
    assert "(003, V.4, figure 26): `gossamer paper vsn`" in page.partition("## Not run yet")[2]
