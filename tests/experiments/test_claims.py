"""Claims of papers: each is decided by a function of the results, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gossamer.experiments.papers import PAPERS, claims
from gossamer.experiments.papers.claims import CLAIMS, FAILS, HOLDS, NOT_RUN, Points
from gossamer.experiments.results import RecordFile, read_records
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


def curves(
    xs: tuple[int, ...], values: Mapping[str, Callable[[int], float]]
) -> dict[tuple[str, object], float]:
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
                "no averaging": constant(0.55),
                f"784-250-80-{classes}": constant(0.7),
                "784-300-100-0": constant(0.6),
                "auto": constant(0.7),
            },
        )
        for v, classes in (("a", 62), ("m", 47), ("d", 10))
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
        | {("auto", 64): 0.67}
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
            NONE: constant(0.52),
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
            "4 layers: auto": constant(0.95),
            "5 layers: auto": constant(0.9),
        },
    ),
    "vsn": by_level((100, 400), (0, 7, 15, 30, 40, 50)),
    "associative": {
        ("10", 0): 0.6, ("10", 300): 0.8, ("10", 400): 0.5,
        ("20", 0): 0.6, ("20", 300): 0.8, ("20", 400): 0.5,
        ("30", 0): 0.6, ("30", 300): 0.8, ("30", 400): 0.5,
    },
}  # fmt: skip


def panels(xs: tuple[object, ...], values: Mapping[str, tuple[float, ...]]) -> Figure:
    """Lines of both panels of paper 000, with a value for each x."""
    return {
        (f"{panel}: {line}", x): value
        for panel in ("homogeneous", "Dirichlet 0.2")
        for line, of_line in values.items()
        for x, value in zip(xs, of_line, strict=True)
    }


def table(columns: tuple[str, ...], values: Mapping[str, tuple[float, ...]]) -> Figure:
    """A table by line and column."""
    return {
        (line, column): value
        for line, of_line in values.items()
        for column, value in zip(columns, of_line, strict=True)
    }


FEDAVG, AVERAGED = "FedAvg, shared start", "FedAvg, own starts"
MEANS = ("10", "50", "100")
BOTH_KINDS: dict[str, tuple[Figure, Figure]] = {
    "pfnm-figure2": (
        panels((2, 30), {
            "local": (0.8, 0.6), AVERAGED: (0.5, 0.2), FEDAVG: (0.8, 0.3), "DP-means": (0.7, 0.6),
            "PFNM": (0.95, 0.93), "downpour SGD": (0.9, 0.5), "PFNM, cells": (150, 600),
            "PFNM γ0=1e-5, cells": (100, 101),
            "ensemble": (0.96, 0.94), "weighted ensemble": (0.96, 0.95),
        }),
        panels((2, 30), {
            "local": (0.98, 0.97), AVERAGED: (0.5, 0.2), FEDAVG: (0.3, 0.8), "DP-means": (0.7, 0.6),
            "PFNM": (0.85, 0.83), "downpour SGD": (0.9, 0.9), "PFNM, cells": (201, 3000),
            "PFNM γ0=1e-5, cells": (200, 301),
            "ensemble": (0.96, 0.84), "weighted ensemble": (0.96, 0.95),
        }),
    ),
    "pfnm-figure4": (
        panels((1, 6), {"PFNM": (0.9, 0.9), "ensemble": (0.9, 0.91), "weighted ensemble": (0.9, 0.9),
                        FEDAVG: (0.8, 0.7), "downpour SGD": (0.7, 0.6)}),
        panels((1, 6), {"PFNM": (0.6, 0.5), "ensemble": (0.9, 0.91), "weighted ensemble": (0.9, 0.9),
                        FEDAVG: (0.8, 0.7), "downpour SGD": (0.9, 0.9)}),
    ),
    "pfnm-sensitivity": (
        panels((25,), {"PFNM": (0.9,), "PFNM σ0²=1": (0.905,), "PFNM γ0=10": (0.895,), "PFNM σ²=2": (0.9,),
                       "PFNM σ0²=100": (0.9,), "PFNM γ0=0.1": (0.9,), "PFNM σ²=0.5": (0.9,)}),
        panels((25,), {"PFNM": (0.9,), "PFNM σ0²=1": (0.5,), "PFNM γ0=10": (0.89,), "PFNM σ²=2": (0.4,),
                       "PFNM σ0²=100": (0.9,), "PFNM γ0=0.1": (0.9,), "PFNM σ²=0.5": (0.9,)}),
    ),
    "pfnm-table": (
        panels((10,), {"local": (0.6,), AVERAGED: (0.4,), FEDAVG: (0.6,), "PFNM": (0.8,),
                       "weighted ensemble": (0.82,), "MAGI λ=0.1": (0.83,)}),
        panels((10,), {"local": (0.9,), AVERAGED: (0.4,), FEDAVG: (0.45,), "PFNM": (0.7,),
                       "weighted ensemble": (0.82,), "MAGI λ=0.1": (0.6,)}),
    ),
    "magi-table1": (
        table(("15", "30"), {
            "1 hidden: local": (0.7, 0.6), f"1 hidden: {FEDAVG}": (0.75, 0.7),
            "1 hidden: FedProx, shared start": (0.75, 0.7), "1 hidden: PFNM": (0.83, 0.8),
            "1 hidden: MAGI λ=0.1": (0.86, 0.85),
        }),
        table(("15", "30"), {
            "1 hidden: local": (0.7, 0.8), f"1 hidden: {FEDAVG}": (0.85, 0.87),
            "1 hidden: FedProx, shared start": (0.85, 0.87), "1 hidden: PFNM": (0.83, 0.84),
            "1 hidden: MAGI λ=0.1": (0.80, 0.81),
        }),
    ),
    "magi-figure2": (
        table(("0", "0.5", "1"), {"1 hidden": (8000, 4500, 1000), "2 hidden": (9000, 6000, 3000),
                                  "3 hidden": (9000, 6000, 3000), "1 hidden, accuracy": (0.8, 0.8, 0.8)}),
        table(("0", "0.5", "1"), {"1 hidden": (8000, 9000, 8500), "2 hidden": (9000, 9500, 9400),
                                  "3 hidden": (9000, 9500, 9400)}),
    ),
    "fednp-toy": (
        table(("error",), {"FedAvg": (116.0,), "FedNP": (72.0,), "FedNP, z frozen": (90.0,)}),
        table(("error",), {"FedAvg": (30.0,), "FedNP": (31.0,), "FedNP, z frozen": (29.0,)}),
    ),
    "fednp-moments": (
        table(("milliseconds", "mse", "mean_error"), {
            "closed form": (0.1, 24.0, 0.5), "Gauss–Hermite 20": (0.11, 24.0, 0.01),
            "Gauss–Hermite 100": (0.3, 24.0, 1e-6), "grid 100": (0.3, 24.0, 1e-9),
            "grid 1000": (2.0, 24.0, 1e-9), "grid 10000": (60.0, 24.0, 1e-9),
        }),
        table(("milliseconds", "mse", "mean_error"), {
            "closed form": (1.0, 34.0, 0.01), "Gauss–Hermite 20": (3.0, 24.0, 0.1),
            "Gauss–Hermite 100": (0.3, 24.0, 1e-6), "grid 100": (0.3, 24.0, 1e-9),
            "grid 1000": (0.4, 24.0, 1e-9), "grid 10000": (0.5, 24.0, 1e-9),
        }),
    ),
    "fednp-cifar": (
        table(MEANS, {"FedAvg": (0.6, 0.5, 0.4), "FedProx": (0.59, 0.49, 0.39), "MOON": (0.61, 0.51, 0.42),
                      "SCAFFOLD": (0.5, 0.4, 0.3), "FedNP": (0.65, 0.55, 0.45)}),
        table(MEANS, {"FedAvg": (0.6, 0.6, 0.61), "FedProx": (0.61, 0.61, 0.62), "MOON": (0.12, 0.13, 0.14),
                      "SCAFFOLD": (0.7, 0.71, 0.72), "FedNP": (0.4, 0.41, 0.42)}),
    ),
    "multitask": (
        table(MEANS, {"separate": (0.6, 0.7, 0.8), "pooled": (0.7, 0.7, 0.7), "MOCHA": (0.8, 0.8, 0.9)}),
        table(MEANS, {"separate": (0.6, 0.7, 0.8), "pooled": (0.7, 0.7, 0.7), "MOCHA": (0.5, 0.6, 0.6)}),
    ),
    "compressed-updates": (
        {**table(("accuracy",), {"none": (0.9,), "alone": (0.5,)}),
         **table(("loss", "loss_bound"), {"int8": (0.01, 0.02), "mask:0.5": (0.03, 0.04)})},
        {**table(("accuracy",), {"none": (0.4,), "alone": (0.5,)}),
         **table(("loss", "loss_bound"), {"int8": (-0.01, -0.02)}),
         **table(("loss", "loss_bound"), {"mask:0.5": (-0.1, -0.2)})},
    ),
}  # fmt: skip


def points_of(figure: Figure, change: Callable[[float], float] = lambda value: value) -> Points:
    rows = [{"line": a, "x": str(x), "median": f"{change(y):.6f}"} for (a, x), y in figure.items()]
    return Points(frame_of(rows))


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_hold_for_results_as_in_the_paper(name: str) -> None:
    points = points_of(BOTH_KINDS[name][0] if name in BOTH_KINDS else AS_IN_THE_PAPER[name])
    for claim in CLAIMS[name]:
        assert claim.decide(points).verdict == HOLDS, claim.text


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_claims_about_methods_do_not_hold_for_other_results(name: str) -> None:
    for claim in CLAIMS[name]:
        verdict = claim.decide(points_of(BOTH_KINDS[name][1])).verdict
        if (
            claim.text
            != "(The slides ask for a bound.) The bound is small enough to be useful (.05)"
        ):
            assert verdict != HOLDS, claim.text


def test_a_bound_that_says_nothing_is_not_useful() -> None:
    figure = table(("loss_bound",), {"int8": (0.01,), "int2": (0.4,)})
    *_, claim = CLAIMS["compressed-updates"]
    assert claim.decide(points_of(figure)).verdict == "holds in part"


@pytest.mark.parametrize("name", AS_IN_THE_PAPER)
def test_claims_do_not_hold_for_the_opposite(name: str) -> None:
    """Every curve is turned upside down, and ten times as steep: nothing is flat, near or higher."""
    points = points_of(AS_IN_THE_PAPER[name], lambda value: 10 * (1 - value))
    flat = {
        "has no effect",
        "is not affected",
        "affected by",
        "hardly affected",
        "severely affected",
        "(Control.)",
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


def test_peers_that_decide_are_compared_with_the_schemes_of_their_own_network() -> None:
    """With five layers .9 is the best of all schemes, though one of four layers reaches .95."""
    *_, claim = CLAIMS["layouts"]
    found = claim.decide(points_of({**AS_IN_THE_PAPER["layouts"], ("4 layers: auto", 0): 0.9}))
    assert found.verdict == "holds in part"
    assert found.measured.startswith("5 of 6: auto less the best of the others")


def test_a_curve_counts_when_all_its_points_of_a_seed_were_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unfinished study says for how many seeds its lines were run, and a curve never ends too early."""
    cells = [cell for cell in PAPERS["associative"].study().cells if cell.config.seed < 2]
    with RecordFile(tmp_path / "associative.jsonl") as file:
        for cell in cells[:-1]:  # the last level of the last curve is missing
            accuracy = 0.5 + 0.1 * cell.config.seed
            record = {"key": cell.key, "line": cell.line, "settings": dict(cell.settings)}
            file.write({**record, "seed": cell.config.seed, "accuracy": accuracy})
    (row, *_) = (row for row in claims.rows([tmp_path]) if row.entry.name == "associative")
    assert "5 records of associative are not used yet" in " ".join(capsys.readouterr().err.split())
    assert row.differences.endswith("; 1 to 2 seeds, not 100")
    assert row.points is not None
    assert row.points["40", 0] == 0.5, "of the unfinished seed nothing is used"
    assert row.points["30", 0] == pytest.approx(0.55)
    assert row.minutes == 2 * PAPERS["associative"].minutes
    assert "`gossamer paper associative --runs 2`: 1 to 2 seeds, a minute." in claims.page([row])


@pytest.mark.parametrize(
    ("name", "line"), [("convergence", "0"), ("semi-local", NONE), ("femnist-scheme-a", NONE)]
)
def test_a_control_tells_that_networks_have_not_learnt_yet(name: str, line: str) -> None:
    low = {key: 0.2 if key[0] == line else y for key, y in AS_IN_THE_PAPER[name].items()}
    (control,) = (claim for claim in CLAIMS[name] if claim.text.startswith("(Control.)"))
    assert control.decide(points_of(low)).verdict == FAILS


def test_there_are_forty_claims_about_studies_that_exist() -> None:
    assert set(CLAIMS) <= set(PAPERS)
    assert sum(map(len, CLAIMS.values())) >= 40


def test_claims_of_results_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of another version are named, kept and not used, and missing curves make no verdict."""
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
    said = " ".join(capsys.readouterr().err.split())
    assert f"1 of {len(records) + 1} records are not used" in said
    assert len(list(read_records(tmp_path / "associative.jsonl"))) == len(records) + 1
    by_study = {row.entry.name: row for row in table}
    assert by_study["associative"].differences.endswith("; 2 seeds, not 100")
    assert by_study["associative"].command == "gossamer paper associative --runs 2"
    assert by_study["vsn"].finding.verdict == NOT_RUN
    files = claims.draw_overview(tmp_path / "papers", table)
    assert [file.name for file in files] == ["papers.png", "papers.svg"]
    assert claims.draw_overview(tmp_path / "papers", []) == []
    assert [file.name for file in claims.draw_figures(tmp_path, table)] == ["003-V.5.png"]
    page = claims.page(table, ["papers/003-V.5.png"])
    assert "![figures of 003-V.5](papers/003-V.5.png)" in page
    # What differs is said once, above the claims, and values are folded.
    assert (
        page.count("starting weights, which the paper does not give, uniform in [−0.3, 0.3]") == 1
    )
    assert "a minute. Differs from the paper: starting weights" in page
    folded = page.partition("<details><summary>Values</summary>\n\n")[2].partition(
        "\n\n</details>"
    )[0]
    assert "| 10 | .500 ± .000 | .500 ± .000 |" in folded
    assert "| the corpus needs a licence |" in page
    assert "best level by curve 10: 300, 20: 300, 30: 300, 40: 300" in page
    assert f"{len(table) - 2} have not been measured" in page
    not_run = page.partition("## Not run yet")[2]
    assert "(003, V.4, figure 26): `gossamer paper vsn`, about 2 minutes of one core" in not_run


def test_panels_of_a_single_x_are_columns() -> None:
    values = {"even: local": 0.5, "uneven: local": 0.4, "even: PFNM": 0.9, "uneven: PFNM": 0.8}
    measured = {"deviation": 0.01, "runs": 3}
    frame = frame_of(
        {"line": line, "x": 10, "median": mean, "mean": mean, **measured}
        for line, mean in values.items()
    )
    found = claims.Finding(HOLDS, "")
    row = claims.Row(PAPERS["pfnm-table"], CLAIMS["pfnm-table"][0], found, Points(frame))
    table = claims.page([row]).partition("| x = 10 | even | uneven |\n")[2]
    assert "| local | .500 ± .010 | .400 ± .010 |" in table
    assert "| PFNM | .900 ± .010 | .800 ± .010 |" in table


def test_every_claim_s_study_says_how_long_it_takes() -> None:
    assert [name for name in CLAIMS if not PAPERS[name].minutes] == []
