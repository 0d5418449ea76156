"""The tables of all studies: reproductions of papers' experiments, and studies of our own.

Papers are named by their numbers in this project:

000  Probabilistic Federated Neural Matching: PFNM, which matches the neurons of separately trained networks
001  Wang, Federated Learning: System and Algorithm (slides): FedAvg, compressed updates, multi-task (MOCHA)
002  Xiao et al., Probabilistic Fusion of Neural Networks that Incorporates Global Information: MAGI
003  Bouchra Pilet, Frey and Taïani, Simple, Efficient and Convenient Decentralized Multi-Task Learning for
     Neural Networks: partial models, Gossamer's own method
004  Wu et al., FedNP: Towards Non-IID Federated Learning via Federated Neural Propagation: FedNP

To add a study, write a function `make(entry, quick, seeds)` that returns a `Study`, in a file of this folder,
and add an entry to `_PAPERS` (`gossamer paper`: reproductions, and studies of our own about the methods of
these papers) or `_STUDIES` (`gossamer study`: about what none of the papers has, such as security).
Importing this module imports neither torch nor the studies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..study import Study

ALL_OPTIONS = frozenset({"quick", "runs", "on", "only"})
"""The options of `gossamer paper` and `gossamer study` that a study may support; see StudyEntry."""
NO_OPTIONS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StudyEntry:
    """One experiment: `gossamer paper NAME`, or `gossamer study NAME`.

    origin: where it is from: number, section and figure of a paper; for our own, what it is about.
    make: module:function of this package, called as `make(entry, quick, seeds)`; returns a `Study`.
    runs, quick_runs: how many seeds each setting is run with: `runs` at the paper's full size, where one run
        may take long, `quick_runs` with --quick. The default of `runs` is for studies without seeds.
    options: the command's options that this study supports: quick, runs (seeds), on (where to compute) and
        only (the lines of the figure to compute).
    variant: which of several data sets it is about, if `make` makes a study for each of them.
    minutes: about how many minutes of one core a seed takes at full size, with the extra `fast`; None if that
        was not measured. Of long studies only a few runs were timed, and some figures are estimates.
    """

    name: str
    origin: str
    make: str
    title: str
    runs: int = 1
    quick_runs: int = 3
    options: frozenset[str] = ALL_OPTIONS
    variant: str = ""
    minutes: float | None = None

    def study(self, *, quick: bool = False, runs: int | None = None) -> Study[Any]:
        """Return the study (imports torch); its first table has the entry's title unless the study sets one.

        runs: the number of seeds; by default `runs`, or `quick_runs` if `quick`.
        """
        module, _, function = self.make.partition(":")
        make = getattr(import_module(f".{module}", __name__), function)
        seeds = range(runs or (self.quick_runs if quick else self.runs))
        study = make(self, quick, seeds)
        return replace(
            study,
            titles={"summary": f"{self.title} ({self.origin})", **study.titles},
            json_files={"study.json": {"name": self.name, "section": self.origin, "quick": quick}},
        )


def _femnist(
    kind: str, section: str, figures: int, title: str, minutes: tuple[float, float, float]
) -> tuple[StudyEntry, ...]:
    """Return the entries of an experiment on FEMNIST's variants: A has all characters, M fewer, D digits."""
    return tuple(
        StudyEntry(f"femnist-{kind}-{variant.lower()}", f"003, {section}, figure {figures + number}",
                   f"natural_tasks:femnist_{kind}", f"FEMNIST-{variant}: {title}", 10,
                   variant=variant, minutes=minutes[number])
        for number, variant in enumerate("AMD")
    )  # fmt: skip


_PAPERS = (
    *_femnist("level", "V.2.a", 8, "accuracy by cells in the global model", (3, 2, 2)),
    *_femnist("scheme", "V.2.b", 11, "sharing a part of every layer, or whole layers", (1, 1, 0.6)),
    *_femnist("peers", "V.2.c", 14, "accuracy by the number of peers that share a model", (9, 9, 6)),
    StudyEntry("averaging-level", "003, V.3.a, figure 17", "partial_models:averaging_level",
               "Averaging level: accuracy by cells in the global model", 10, minutes=5),
    StudyEntry("convergence", "003, V.3.b, figure 18", "partial_models:convergence",
               "Convergence: accuracy over time by averaging level", 10, minutes=0.3),
    StudyEntry("number-of-peers", "003, V.3.c, figure 19", "partial_models:number_of_peers",
               "Number of peers: accuracy by averaging level", 10, minutes=1.5),
    StudyEntry("semi-local", "003, V.3.d, figure 20", "partial_models:semi_local",
               "Semi-local models: one model per group of similar peers", 20, minutes=1.5),
    StudyEntry("semi-local-and-local", "003, V.3.e, figure 21", "partial_models:semi_local_and_local",
               "Global, semi-local and local models together", 20, minutes=0.5),
    StudyEntry("difference-rate", "003, V.3.f, figure 22", "partial_models:difference_rate",
               "Difference rate: accuracy by averaging level", 10, minutes=3),
    StudyEntry("permuted-peers", "003, V.3.g, figure 23", "partial_models:permuted_peers",
               "Peers with another task: accuracy by averaging level", 20, minutes=2.5),
    StudyEntry("training-size", "003, V.3.h, figure 24", "partial_models:training_size",
               "Training set size: accuracy by averaging level", 10, minutes=2.5),
    StudyEntry("layouts", "003, V.3.i, figure 25", "partial_models:layouts",
               "Layouts: sharing a part of every layer, or whole layers", 10, minutes=8),
    StudyEntry("vsn", "003, V.4, figure 26", "natural_tasks:vsn",
               "Sensors: accuracy by cells in the global model", 10, minutes=0.2),
    StudyEntry("associative", "003, V.5, figure 27", "partial_models:associative",
               "Associative network: accuracy by averaged hidden cells", 100, minutes=0.1),
    # With 10 mini-batches of training per peer.
    StudyEntry("associative-starts", "003, V.5, 10 mini-batches", "partial_models:associative_starts",
               "Associative network: which starting weights show the paper's curve", 20),
    StudyEntry("pfnm-table", "our own reference table", "matching:pfnm_table",
               "PFNM and MAGI against averaging and the ensemble, ten peers", 5, 5, minutes=0.4),
    StudyEntry("pfnm-figure2", "000, figures 2 and 3", "matching:pfnm_figure2",
               "PFNM: accuracy and size by the number of peers", 10, 2, minutes=28),
    StudyEntry("pfnm-figure4", "000, figure 4", "matching:pfnm_figure4",
               "PFNM: accuracy and size by the number of hidden layers", 10, 2, minutes=20),
    StudyEntry("pfnm-sensitivity", "000, supplement, figures 4 and 5", "matching:pfnm_sensitivity",
               "PFNM: accuracy by its parameters", 10, 2, minutes=2),
    StudyEntry("pfnm-streaming", "000, supplement, figure 3b", "matching:pfnm_streaming",
               "PFNM streaming: the posterior of a step is the prior of the next", 10, 5),
    StudyEntry("magi-table1", "002, table 1, rows of MNIST", "matching:magi_table1",
               "MAGI: accuracy on MNIST", 5, minutes=5),
    StudyEntry("magi-figure2", "002, figure 2", "matching:magi_figure2",
               "MAGI: size of the fused network by λ, the weight of its KL penalty", 5, minutes=0.3),
    # Aligned: the newcomers' cells are first permuted to match those of the swarm.
    StudyEntry("newcomers", "our own, live peers", "live:newcomers",
               "separately trained peers join a swarm, aligned or not", options=NO_OPTIONS),
    StudyEntry("widths", "our own, live peers", "live:widths",
               "peers of three widths in one partial model", options=NO_OPTIONS),
    StudyEntry("fednp-toy", "004, figure 1 and table 4", "fednp:toy",
               "FedNP on three ranges of a parabola; control: its estimate of all data (z) is frozen", 5,
               options=ALL_OPTIONS - {"quick"}, minutes=0.1),
    StudyEntry("fednp-moments", "004, table 6", "fednp:moments",
               "FedNP: closed forms and quadratures of its moments, their errors and times", 5,
               options=ALL_OPTIONS - {"quick"}, minutes=0.3),
    StudyEntry("fednp-cifar", "004, tables 1 and 5", "fednp:by_clients",
               "FedNP against other methods on CIFAR-10, by the number of clients", 3, 1, minutes=7),
    StudyEntry("multitask", "001, federated multi-task learning", "multitask:multitask",
               "MOCHA against separate and pooled linear models", 5, minutes=0.1),
    StudyEntry("compressed-updates", "001, structured and sketched updates", "updates:compressed_updates",
               "FedAvg with lossy updates: the accuracy lost, and a bound on it", 5, minutes=0.1),
    # "Other networks": the partial models of 003, with convolutional and recurrent networks.
    StudyEntry("networks-cifar", "003, other networks", "networks:cifar",
               "Partial sharing of a small CNN, CIFAR-10", 3),
    StudyEntry("networks-hapt", "003, other networks", "networks:hapt",
               "Partial sharing of an LSTM and a 1-D CNN, HAPT", 3),
    StudyEntry("compression", "001, compressed updates", "live:compression",
               "Accuracy and bytes of live peers, by compressor", options=frozenset({"quick", "only"})),
)  # fmt: skip
_STUDIES = (
    StudyEntry("auto", "which cells to share", "sharing:auto",
               "A swarm that decides by itself what to share, against fixed schemes", 5, 2),
    StudyEntry("private", "masked averaging", "security:private",
               "What masks hide from a curious neighbour, and what they cost",
               options=frozenset({"quick", "on"})),
    StudyEntry("hostile", "hostile members", "hostile:hostile",
               "What hostile members do to a swarm, by mode", 5, 1),
)  # fmt: skip
PAPERS: Mapping[str, StudyEntry] = MappingProxyType({entry.name: entry for entry in _PAPERS})
"""The experiments of `gossamer paper`, by name."""
STUDIES: Mapping[str, StudyEntry] = MappingProxyType({entry.name: entry for entry in _STUDIES})
"""The experiments of `gossamer study`, by name."""
