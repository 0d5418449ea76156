"""Partial sharing of real networks: `gossamer paper networks-cifar` and `networks-hapt`.

Peers with unlike data train a convolutional or recurrent network, and differ in nothing but in what they
average: nothing, everything, everything but the outputs (FedPer), everything but batch norm (FedBN), or a
share of the cells of every hidden part. All schemes of a seed start from the same values, see the same
samples in the same order and are tested on the same samples, so that differences can be taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...models import NETWORKS, Anatomy, Buffers, SgdLearner, SlicedNetwork, discover, stream
from ..arena import Arena
from ..data import DataError, Dataset, Samples, load_once, partition
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import Paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "everyone"
"""The partial model that all peers implement."""


@dataclass(frozen=True)
class Scheme:
    """What peers average."""

    name: str
    share: float
    """Of the cells of every hidden part."""
    outputs: Literal["shared", "own"] = "own"
    buffers: Buffers = "recompute"
    """What is done with batch norm's statistics, where the network has any."""
    start: Literal["equal", "apart"] = "equal"
    """Whether cells that are a peer's own start alike on all peers."""

    def slices(self, output: str) -> dict[str, dict[str, float]]:
        """The shares of a network whose output part is called `output`."""
        if not self.share:
            return {}
        return {MODEL: {"*": self.share, output: float(self.outputs == "shared")}}


@dataclass(frozen=True)
class Setting:
    """All that decides a run, but the scheme and the seed.

    data
        A data set's name. Where it has natural groups, peers are groups; else classes are dealt out by
        Dirichlet draws of `alpha`.
    network, options
        A ready network's name, and its knobs.
    layout
        How a sample reaches the network: `images` as they are; `series`, time first; `channels`, time
        last. Images are read as series of their rows.
    samples, test
        Training samples per peer (on average, if dealt out by Dirichlet draws), and samples of the common
        test (per peer, where peers are groups).
    local_samples, rounds
        Samples that every peer learns from between two averagings, and how many averagings.
    """

    data: str
    network: str
    layout: Literal["images", "series", "channels"]
    options: Mapping[str, object] = field(default_factory=dict)
    peers: int = 8
    samples: int = 500
    test: int = 1000
    alpha: float = 0.5
    rounds: int = 15
    test_every: int = 3
    local_samples: int = 250
    batch: int = 25
    rate: float = 0.1

    @property
    def normed(self) -> bool:
        """Whether the network has batch norm, so that FedBN means something."""
        return self.network in ("cnn1d", "resnet") or bool(self.options.get("norm"))


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a network's setting under a scheme, whose name is the line, with a seed."""

    network: str
    setting: Setting
    scheme: Scheme
    seed: int


@dataclass(frozen=True, eq=False)
class Deal:
    """Who has which samples."""

    train: list[Samples]
    test: Samples
    """The common test."""
    own: Tensor
    """[peers, test samples]: how much a test sample counts in each peer's own test; rows sum to 1."""


def run_cell(cell: Cell, job: Job) -> Record:
    """Train, average, test now and then; accuracies are means over peers."""
    setting = cell.setting
    data = load_once(setting.data)
    dealt = deal(setting, data, cell.seed)
    learners = make_learners(cell, data.classes, dealt)
    arena = Arena(learners, threads=job.threads)
    by_round: list[tuple[int, float, float]] = []
    own = common = torch.empty(0)
    for index in range(1, setting.rounds + 1):
        arena.train()
        arena.average()
        if index % setting.test_every == 0 or index == setting.rounds:
            own, common = _accuracies(learners, dealt)
            by_round.append((index, float(own.mean()), float(common.mean())))
    network = learners[0].network
    shared = len(network.slicing.coordinates(MODEL)) if MODEL in network.owners else 0
    return {
        "line": cell.network, "scheme": cell.scheme.name, "seed": cell.seed,
        "own": float(own.mean()), "common": float(common.mean()), "worst": float(own.min()),
        "by_peer": own.tolist(), "by_round": by_round,
        "shared": shared / len(network.flat),
    }  # fmt: skip


def make_learners(cell: Cell, classes: int, dealt: Deal) -> list[SgdLearner]:
    """A learner for every peer; the schemes of one seed start equal and draw alike."""
    setting, seed, test = cell.setting, cell.seed, dealt.test
    anatomy = discover(_module(setting, classes, test.x), test.x[:1])
    return [
        SgdLearner(
            cut(_module(setting, classes, test.x), anatomy, cell.scheme, str(peer), seed),
            (train.x, train.y), (test.x[:0], test.y[:0]),
            local_samples=setting.local_samples, batch=setting.batch, rate=setting.rate,
            seed=int(stream(seed, "order", peer).integers(2**31)),
        )
        for peer, train in enumerate(dealt.train)
    ]  # fmt: skip


def cut(module: nn.Module, anatomy: Anatomy, scheme: Scheme, peer: str, seed: int) -> SlicedNetwork:
    """A peer's network under a scheme, with its starting values."""
    if scheme.start == "equal":  # everybody's values, drawn as if everything were shared
        SlicedNetwork(module, {MODEL: 1.0}, anatomy=anatomy, seed=seed)
    slices = scheme.slices(anatomy.parts[-1].name)
    return SlicedNetwork(
        module, slices, anatomy=anatomy, peer=peer, buffers=scheme.buffers,
        seed=None if scheme.start == "equal" else seed,
    )  # fmt: skip


def deal(setting: Setting, data: Dataset, seed: int) -> Deal:
    """Everybody's training samples, and the test."""
    if data.test is None:
        return _by_group(setting, data, seed)
    wanted = stream(seed, "training samples").permutation(len(data.train))
    train = _shaped(setting, data.train.take(wanted[: setting.peers * setting.samples]))
    wanted = stream(seed, "test samples").permutation(len(data.test))
    test = _shaped(setting, data.test.take(wanted[: setting.test]))
    parts = partition.dirichlet(
        train.y, setting.peers, setting.alpha, stream(seed, "partition"), 2 * setting.batch
    )
    dealt = [train.take(part) for part in parts]
    # Every class counts as much as among the peer's own samples, whatever its number in the test.
    among = torch.stack([torch.bincount(own.y, minlength=data.classes) for own in dealt])
    there = torch.bincount(test.y, minlength=data.classes).clamp(min=1)
    counts = (among / there)[:, test.y]
    return Deal(dealt, test, counts / counts.sum(1, keepdim=True))


def _by_group(setting: Setting, data: Dataset, seed: int) -> Deal:
    """A group for each peer: the first half of each of its classes to learn from, the last to be tested on.

    Neighbouring windows of a recording overlap, so a random split would test on what was learned. The
    common test is everybody's.
    """
    whole = partition.by_group(data.train.group, setting.peers, None, stream(seed, "groups"))
    samples = _shaped(setting, data.train)
    train, test = [], []
    for peer, part in enumerate(whole):
        part = np.sort(part)  # the order of the recording
        labels = samples.y[part].numpy()
        halves = [np.array_split(part[labels == label], 2) for label in np.unique(labels)]
        for side, (found, wanted) in enumerate(((train, setting.samples), (test, setting.test))):
            pool = np.concatenate([half[side] for half in halves])
            if wanted > len(pool):
                raise DataError(
                    f"{data.name}: {wanted} samples were asked of half a group, which has {len(pool)}: "
                    "lower samples and test"
                )
            found.append(stream(seed, "half", side, peer).permutation(pool)[:wanted])
    own = torch.eye(setting.peers).repeat_interleave(setting.test, dim=1) / setting.test
    return Deal([samples.take(part) for part in train], samples.take(np.concatenate(test)), own)


@torch.no_grad()
def _accuracies(learners: Sequence[SgdLearner], dealt: Deal) -> tuple[Tensor, Tensor]:
    """Every peer's accuracy on its own test and on the common one."""
    right = []
    for learner in learners:
        network = learner.network
        if network.buffers == "recompute":
            network.recompute(learner.samples[0])
        network.module.eval()
        outputs = torch.cat([network(some) for some in dealt.test.x.split(250)])
        right.append((outputs.argmax(1) == dealt.test.y).float())
    found = torch.stack(right)
    return (found * dealt.own).sum(1), found.mean(1)


def _module(setting: Setting, classes: int, inputs: Tensor) -> nn.Module:
    given = {"channels": inputs.shape[-1 if setting.layout == "series" else 1], "classes": classes}
    if setting.layout == "images":
        given["size"] = inputs.shape[-1]
    return NETWORKS[setting.network](**given, **setting.options)


def _shaped(setting: Setting, samples: Samples) -> Samples:
    """Samples as the network reads them."""
    if setting.layout == "images":
        return samples
    series = samples.x.flatten(1, -2) if samples.x.ndim > 3 else samples.x
    if setting.layout == "channels":
        series = series.transpose(1, 2).contiguous()
    return replace(samples, x=series)


# --- the studies ------------------------------------------------------------------------------------

LOCAL = Scheme("local", 0.0)
FULL = Scheme("full averaging", 1.0, "shared", buffers="average")
FEDPER = Scheme("FedPer", 1.0)
"""A shared backbone under outputs of each peer's own."""
FEDBN = Scheme("FedBN", 1.0, "shared", buffers="local")
PARTIAL = Scheme("partial 0.8", 0.8)
APART = ", apart"
SCHEMES = (
    LOCAL, FULL, FEDPER, FEDBN, PARTIAL,
    Scheme("partial 0.5", 0.5),
    Scheme("partial 0.8 + outputs", 0.8, "shared"),
    replace(FEDPER, name=FEDPER.name + APART, start="apart"),
    replace(PARTIAL, name=PARTIAL.name + APART, start="apart"),
)  # fmt: skip
"""Statistics of batch norm are averaged where everything is, and taken anew from a peer's samples where it
has cells of its own: on the built-in digits each did better so than the other way."""
REFERENCES = (LOCAL.name, FULL.name, FEDPER.name)
"""What differences are taken to."""


_DIGITS = {
    "samples": 60, "test": 360, "rounds": 15, "test_every": 5, "local_samples": 100, "batch": 20,
}  # fmt: skip
_CIFAR = {
    "samples": 500, "test": 800, "rounds": 15, "test_every": 5, "local_samples": 250, "batch": 25,
}  # fmt: skip
_CNN, _LSTM, _CNN1D = "small CNN, batch norm", "LSTM", "1-D CNN, batch norm"
_HAPT = {
    "peers": 16, "samples": 40, "test": 50, "rounds": 20, "test_every": 5, "local_samples": 80, "batch": 20,
}  # fmt: skip


def cifar(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of a small CNN on CIFAR-10."""
    options = {"widths": (8, 16), "hidden": 32 if quick else 64, "norm": True}
    data, sizes = ("digits", _DIGITS) if quick else ("cifar10", _CIFAR)
    setting = Setting(data, "small-cnn", "images", options, **sizes)
    return networks_study(paper, {_CNN: setting}, seeds)


def hapt(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of an LSTM and a 1-D CNN on HAPT, whose peers are people."""
    data, sizes = ("digits", _DIGITS) if quick else ("hapt-raw", _HAPT)
    wide = {"widths": (16, 32), "kernel": 3} if quick else {"widths": (16, 32)}
    settings = {
        _LSTM: Setting(data, "lstm", "series", {"hidden": 32}, rate=0.5, **sizes),
        _CNN1D: Setting(data, "cnn1d", "channels", wide, **sizes),
    }
    return networks_study(paper, settings, seeds)


def networks_study(paper: Paper, settings: Mapping[str, Setting], seeds: range) -> Study[Cell]:
    """Return the study of some networks under all schemes; FedBN only where there is a norm."""
    cells = [
        Cell(scheme.name, network, setting, scheme, seed)
        for seed in seeds
        for network, setting in settings.items()
        for scheme in SCHEMES
        if scheme is not FEDBN or setting.normed
    ]
    return Study(
        paper.name, cells, EachCell(run_cell), table,
        lambda folder, records: draw(folder / "figure", paper.title, settings, records),
        latest=lambda record: f"{record['scheme']}: {record['own']:.3f}",
    )  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return means over seeds, network by network, and differences to other schemes, paired by seed."""
    frame = frame_of(records, ordered=["line"]).sort_values("line", kind="stable")
    found = frame.groupby(["line", "scheme"], sort=False, observed=True).agg(
        seeds=("seed", "size"), shared=("shared", "first"), own=("own", "mean"),
        common=("common", "mean"), worst=("worst", "mean"),
    )  # fmt: skip
    by_seed = frame.pivot(index=["line", "seed"], columns="scheme", values="own")
    for reference in REFERENCES:
        found[f"− {reference}"] = [
            _difference(by_seed.loc[network], scheme, reference) for network, scheme in found.index
        ]
    formats = {"shared": ".0%", **dict.fromkeys(("own", "common", "worst"), ".3f")}
    return {"summary": as_text(found.reset_index(names=["network", "scheme"]), formats)}


def _difference(by_seed: Frame, scheme: str, reference: str) -> str:
    """Mean and standard error over the seeds that both schemes have; no error of a single one."""
    if scheme == reference or reference not in by_seed:
        return ""
    paired = (by_seed[scheme] - by_seed[reference]).dropna()
    if not len(paired):
        return ""
    error = "" if len(paired) == 1 else f" ± {paired.sem():.3f}"
    return f"{paired.mean():+.3f}{error}"


def caption(settings: Sequence[Setting]) -> str:
    """What a reader must know."""
    one = settings[0]
    if one.data == "hapt-raw":
        dealt = (
            f"{one.peers} people of HAPT as peers, each with {one.samples} windows of 128×6 to learn from "
            f"(out of the first half of each activity's recording) and {one.test} out of the second half; "
            "own test: the peer's of these, common test: everybody's"
        )
    else:
        dealt = (
            f"{one.data}: {one.peers} peers, {one.samples} samples on average, classes by Dirichlet "
            f"{one.alpha:g}; common test: {one.test} samples; own test: the same, classes weighted as among "
            "the peer's own samples"
        )
    rates = ", ".join(f"{s.network} {s.rate:g}" for s in settings)
    return (
        f"{dealt}. {one.rounds} rounds of {one.local_samples} samples in batches of {one.batch}, plain SGD "
        f"(rate: {rates}), exact averages, all peers the same weight. Means over peers and seeds, bars: "
        "standard error over seeds (seeds differ alike for all: see the paired differences of the table). "
        "Partial: that share of the cells of every hidden part is averaged; outputs are own unless "
        "named; weights between own and shared cells stay with the peer, under either order of dependence. "
        "FedPer: all but the outputs. All peers start equal, own cells too, but 'apart' (dotted) draws own "
        "cells peer by peer. Batch statistics: averaged with full averaging, kept with their norms under "
        "FedBN, taken anew from own samples otherwise."
    )


def draw(
    path: Path, title: str, settings: Mapping[str, Setting], records: Sequence[Record]
) -> list[Path]:
    """Draw accuracy over rounds: a row for every network, own test left, common test right."""
    from ..study.figures import panels, save

    networks = [name for name in settings if any(r["line"] == name for r in records)]
    note = caption([settings[name] for name in networks])
    figure, grid = panels(len(networks), 2, note, 11.5, 3.6 * len(networks) + 0.3, sharex=True)
    for row, network in zip(grid, networks, strict=True):
        mine = [r for r in records if r["line"] == network]
        for axes, place, what in zip(row, (1, 2), ("own test", "common test"), strict=True):
            _curves(axes, mine, place)
            axes.set(title=f"{network}: {what}", ylabel="accuracy")
    for axes in grid[-1]:
        axes.set_xlabel("rounds")
    fullest = max(
        (row[0] for row in grid), key=lambda axes: len(axes.get_legend_handles_labels()[0])
    )
    figure.legend(
        *fullest.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
    )
    figure.suptitle(title)
    return save(figure, path)


def _curves(axes: Axes, records: Sequence[Record], place: int) -> None:
    from ..study.figures import COLOURS, MARKERS

    looks = [scheme.name for scheme in SCHEMES if APART not in scheme.name]
    for scheme in dict.fromkeys(r["scheme"] for r in records):
        curves = np.array([r["by_round"] for r in records if r["scheme"] == scheme])
        values = curves[:, :, place]
        error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        look = looks.index(scheme.removesuffix(APART))  # dotted beside its twin
        axes.errorbar(
            curves[0, :, 0], values.mean(0), yerr=error, label=scheme, capsize=2, linewidth=1.5,
            markersize=5, color=COLOURS[look], marker=MARKERS[look],
            linestyle=":" if APART in scheme else "-",
        )  # fmt: skip
    axes.set_xticks([at for at, *_ in records[0]["by_round"]])
