"""The table of all studies: reproductions of the papers' experiments, and studies of our own.

To add a study, write a function `make(paper, quick, seeds)` that returns a `Study`, in a file of this folder,
and add a line to the table. Importing the table imports neither torch nor the studies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..study import Study

ALL = frozenset({"quick", "runs", "jobs", "only"})
SEEDS = ALL - {"quick"}
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Paper:
    """One experiment: `gossamer paper NAME`, or `gossamer study NAME`.

    section: the section or figure in the paper, with the paper's number in this project.
    make: module:function of this package, called as `make(paper, quick, seeds)`; returns a `Study`.
    runs, quick_runs: seeds per point, at the paper's size and with --quick.
    takes: the command's options that this study supports.
    """

    name: str
    section: str
    make: str
    title: str
    runs: int = 1
    quick_runs: int = 3
    takes: frozenset[str] = ALL

    def study(self, *, quick: bool = False, runs: int | None = None) -> Study[Any]:
        """Make the study; its summary has the paper's title unless it sets another. Imports torch."""
        module, _, function = self.make.partition(":")
        make = getattr(import_module(f".{module}", __name__), function)
        study = make(self, quick, range(runs or (self.quick_runs if quick else self.runs)))
        return replace(
            study,
            titles={"summary": f"{self.title} ({self.section})", **study.titles},
            about={"study.json": {"name": self.name, "section": self.section, "quick": quick}},
        )


_PAPERS = (
    Paper("averaging-level", "003, V.3.a, figure 17", "partial_models:averaging_level",
          "Averaging level: accuracy by cells in the global model", 10),
    Paper("semi-local", "003, V.3.d, figure 20", "partial_models:semi_local",
          "Semi-local models: one model per group of like peers", 20),
    Paper("semi-local-and-local", "003, V.3.e, figure 21", "partial_models:semi_local_and_local",
          "Global, semi-local and local models together", 20),
    Paper("associative", "003, V.5, figure 27", "partial_models:associative",
          "Associative network: accuracy by averaged hidden cells", 100),
    Paper("associative-starts", "003, V.5, 10 mini-batches", "partial_models:associative_starts",
          "Associative network: which starting weights show the paper's curve", 20),
    Paper("pfnm-table", "reference table", "matching:pfnm_table",
          "PFNM and MAGI against averaging and the ensemble, ten peers", 5, 5),
    Paper("pfnm-figure2", "000, figures 2 and 3", "matching:pfnm_figure2",
          "PFNM: accuracy and size by the number of peers", 10, 2),
    Paper("pfnm-figure4", "000, figure 4", "matching:pfnm_figure4",
          "PFNM: accuracy and size by the number of hidden layers", 10, 2),
    Paper("pfnm-streaming", "000, supplement, figure 3b", "matching:pfnm_streaming",
          "PFNM streaming: posterior becomes prior", 10, 5),
    Paper("magi-table1", "002, table 1, rows of MNIST", "matching:magi_table1",
          "MAGI: accuracy on MNIST", 5),
    Paper("magi-figure2", "002, figure 2", "matching:magi_figure2",
          "MAGI: size of the fused network by λ", 5),
    Paper("newcomers", "live", "live:newcomers",
          "separately trained peers join a swarm, aligned or not", takes=NONE),
    Paper("widths", "live", "live:widths",
          "peers of three widths in one partial model", takes=NONE),
    Paper("fednp-toy", "004, figure 1 and table 4", "fednp:toy",
          "FedNP on three stretches of a parabola, with z frozen as a control", 5, takes=SEEDS),
    Paper("multitask", "001, federated multi-task learning", "multitask:multitask",
          "MOCHA against separate and pooled linear models", 5, takes=SEEDS),
    Paper("networks-cifar", "003, other networks", "networks:cifar",
          "Partial sharing of a small CNN, CIFAR-10", 3),
    Paper("networks-hapt", "003, other networks", "networks:hapt",
          "Partial sharing of an LSTM and a 1-D CNN, HAPT", 3),
    Paper("compression", "001, compressed updates", "live:compression",
          "Accuracy and bytes of live peers, by compressor", takes=frozenset({"quick", "only"})),
)  # fmt: skip
_STUDIES = (
    Paper("auto", "which cells to share", "sharing:auto",
          "A swarm that decides by itself what to share, against fixed schemes", 5, 2),
    Paper("private", "masked averaging", "security:private",
          "What masks hide from a curious neighbour, and what they cost",
          takes=frozenset({"quick", "jobs"})),
    Paper("byzantine", "guards", "security:byzantine",
          "What hostile members can do, with and without guards",
          takes=frozenset({"quick", "jobs", "only"})),
)  # fmt: skip
PAPERS: Mapping[str, Paper] = MappingProxyType({paper.name: paper for paper in _PAPERS})
STUDIES: Mapping[str, Paper] = MappingProxyType({paper.name: paper for paper in _STUDIES})
