"""Partial sharing of real networks: `gossamer paper networks-cifar` and `networks-hapt`.

Peers with differently distributed data train a convolutional or recurrent network. The schemes differ only in
what the peers average: nothing, everything, everything but the outputs (FedPer), everything but batch norm
(FedBN), a share of the cells of every hidden layer, or what they decide by themselves. For one seed, all
schemes have the same initial values, training samples, sample order and test samples, so differences can be
computed seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...models import (
    NETWORKS,
    Anatomy,
    Buffers,
    Prior,
    SgdLearner,
    SlicedNetwork,
    discover,
    log_priors,
    seeded_rng,
)
from ..arena import Arena, AutoSharing
from ..data import DataError, Dataset, Samples, load_once, partition
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "everyone"
"""The partial model that all peers have."""


@dataclass(frozen=True)
class Scheme:
    """What the peers average, and how they are initialised."""

    name: str
    share: float
    """The share of the cells of every hidden layer that is averaged."""
    outputs: Literal["shared", "own"] = "own"
    """Whether the output layer is averaged, or private to each peer."""
    buffers: Buffers = "recompute"
    """What happens to the running statistics of batch norm, if the network has any."""
    init: Literal["same", "per peer"] = "same"
    """Whether private cells have the same initial values on all peers, or are drawn for each peer."""
    prior: Prior = "none"
    """Whether the log-prior of each peer's classes is added to the outputs; see `log_priors`."""
    auto: bool = False
    """Whether peers decide by themselves what they share, beginning with `share`."""

    def slices(self, output: str) -> dict[str, dict[str, float]]:
        """Return the slices of a network whose output layer is called `output`."""
        if not self.share:
            return {}
        return {MODEL: {"*": self.share, output: float(self.outputs == "shared")}}


@dataclass(frozen=True)
class Setting:
    """Everything that determines a run, except the scheme and the seed.

    data
        The name of a data set. If it has natural groups, each peer is a group; otherwise the samples of each
        class are split among the peers in Dirichlet proportions of parameter `alpha`.
    network, options
        Name of a built-in network and its constructor options.
    layout
        The shape of a sample: `images`, unchanged; `series`, time first; `channels`, time last. In the last
        two, an image becomes a series of its rows.
    samples, test
        Training samples per peer (the mean, if split in Dirichlet proportions), and samples of the common
        test (per peer, if peers are groups).
    local_samples, rounds
        Samples that every peer trains on before each averaging, and the number of averagings.
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
    def has_batch_norm(self) -> bool:
        """Whether the network has batch norm; without it, FedBN is full averaging."""
        return self.network in ("cnn1d", "resnet") or bool(self.options.get("norm"))


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a network and its setting, a scheme (whose name is `line`) and a seed."""

    network: str
    setting: Setting
    scheme: Scheme
    seed: int


@dataclass(frozen=True, eq=False)
class DataSplit:
    """The training samples of each peer, and the test samples."""

    train: list[Samples]
    test: Samples
    """The common test samples, on which all peers are tested."""
    own_test_weights: Tensor
    """[peers, test samples]: the weight of a test sample in each peer's own test; rows sum to 1."""


def run_cell(cell: Cell, job: Job) -> Record:
    """Train and average, and test every `test_every` rounds; return the accuracies, means over peers.

    own, common: accuracy on each peer's own test, and on the common test. worst: the lowest own accuracy.
    shared: the share of the parameters that all peers average at the end.
    """
    setting = cell.setting
    data = load_once(setting.data)
    split = split_data(setting, data, cell.seed)
    learners = make_learners(cell, data.classes, split)
    sharing = AutoSharing(seed=cell.seed) if cell.scheme.auto else None
    arena = Arena(learners, threads=job.threads, sharing=sharing)
    by_round: list[tuple[int, float, float]] = []
    own = common = torch.empty(0)
    for index, _ in enumerate(arena.run(setting.rounds), 1):
        if index % setting.test_every == 0 or index == setting.rounds:
            own, common = _accuracies(learners, split)
            by_round.append((index, float(own.mean()), float(common.mean())))
    network = learners[0].network
    model_of_all = "global" if sharing else MODEL
    shared = 0
    if model_of_all in network.averaged_models:
        shared = len(network.slicing.coordinates(model_of_all))
    return {
        "network": cell.network, "scheme": cell.scheme.name, "seed": cell.seed,
        "own": float(own.mean()), "common": float(common.mean()), "worst": float(own.min()),
        "by_peer": own.tolist(), "by_round": by_round,
        "shared": shared / len(network.flat),
        "decisions": [str(decision) for decision in sharing.decisions] if sharing else [],
    }  # fmt: skip


def make_learners(cell: Cell, classes: int, split: DataSplit) -> list[SgdLearner]:
    """Return a learner for every peer; for one seed, all schemes have the same initial values and samples."""
    setting, seed, test = cell.setting, cell.seed, split.test
    # The layers are the same for all peers, so they are discovered once.
    anatomy = discover(_module(setting, classes, test.x), test.x[:1])
    counts = [torch.bincount(train.y, minlength=classes).tolist() for train in split.train]
    priors = log_priors(counts, cell.scheme.prior)
    return [
        SgdLearner(
            make_network(_module(setting, classes, test.x), anatomy, cell.scheme, str(peer), seed),
            (train.x, train.y), (test.x[:0], test.y[:0]),
            local_samples=setting.local_samples, batch=setting.batch, rate=setting.rate,
            seed=int(seeded_rng(seed, "order", peer).integers(2**31)),
            log_prior=None if priors is None else torch.tensor(priors[peer], dtype=torch.float32),
        )
        for peer, train in enumerate(split.train)
    ]  # fmt: skip


def make_network(
    module: nn.Module, anatomy: Anatomy, scheme: Scheme, peer: str, seed: int
) -> SlicedNetwork:
    """Return a peer's network under a scheme, with its initial values."""
    if scheme.init == "same":
        # Constructing it with a seed initialises `module` in place; with everything shared, the values are
        # the same on all peers.
        SlicedNetwork(module, {MODEL: 1.0}, anatomy=anatomy, seed=seed)
    slices = scheme.slices(anatomy.parts[-1].name)
    return SlicedNetwork(
        module, slices, anatomy=anatomy, peer=peer, buffers=scheme.buffers,
        seed=None if scheme.init == "same" else seed,
    )  # fmt: skip


def split_data(setting: Setting, data: Dataset, seed: int) -> DataSplit:
    """Split a data set into training samples for each peer, and test samples."""
    if data.test is None:
        return _split_by_group(setting, data, seed)
    order = seeded_rng(seed, "training samples").permutation(len(data.train))
    train = _reshape_samples(setting, data.train.take(order[: setting.peers * setting.samples]))
    order = seeded_rng(seed, "test samples").permutation(len(data.test))
    test = _reshape_samples(setting, data.test.take(order[: setting.test]))
    indices_by_peer = partition.dirichlet(
        train.y, setting.peers, setting.alpha, seeded_rng(seed, "partition"), 2 * setting.batch
    )
    train_by_peer = [train.take(indices) for indices in indices_by_peer]
    # Weight test samples so that classes are as frequent as in the peer's training data.
    train_counts = torch.stack(
        [torch.bincount(samples.y, minlength=data.classes) for samples in train_by_peer]
    )
    test_counts = torch.bincount(test.y, minlength=data.classes).clamp(min=1)
    weights = (train_counts / test_counts)[:, test.y]
    return DataSplit(train_by_peer, test, weights / weights.sum(1, keepdim=True))


def _split_by_group(setting: Setting, data: Dataset, seed: int) -> DataSplit:
    """Give each peer one group: the first half of each class is for training, the second half for testing.

    Neighbouring windows of a recording overlap, so after a random split the test samples would overlap with
    training samples. The common test is the union of all peers' test halves.
    """
    groups = partition.by_group(data.train.group, setting.peers, None, seeded_rng(seed, "groups"))
    samples = _reshape_samples(setting, data.train)
    train: list[np.ndarray] = []  # sample indices by peer
    test: list[np.ndarray] = []
    for peer, group in enumerate(groups):
        indices = np.sort(group)  # the order of the recording
        labels = samples.y[indices].numpy()
        halves = [np.array_split(indices[labels == label], 2) for label in np.unique(labels)]
        uses = (
            (train, setting.samples, "training", "samples"),
            (test, setting.test, "test", "test"),
        )
        for half, (indices_by_peer, count, use, option) in enumerate(uses):
            available = np.concatenate([halves_of_class[half] for halves_of_class in halves])
            if count > len(available):
                raise DataError(
                    f"{data.name}: peer {peer}'s {use} half has only {len(available)} samples, {count} "
                    f"requested: lower {option}"
                )
            order = seeded_rng(seed, "half", half, peer).permutation(available)
            indices_by_peer.append(order[:count])
    weights = torch.eye(setting.peers).repeat_interleave(setting.test, dim=1) / setting.test
    return DataSplit(
        [samples.take(indices) for indices in train], samples.take(np.concatenate(test)), weights
    )


@torch.no_grad()
def _accuracies(learners: Sequence[SgdLearner], split: DataSplit) -> tuple[Tensor, Tensor]:
    """Return every peer's accuracy on its own test, and on the common test."""
    correct_by_peer = []
    for learner in learners:
        network = learner.network
        if network.buffers == "recompute":
            network.recompute(learner.samples[0])
        network.module.eval()
        outputs = torch.cat(
            [learner.add_prior(network(batch)) for batch in split.test.x.split(250)]
        )
        correct_by_peer.append((outputs.argmax(1) == split.test.y).float())
    correct = torch.stack(correct_by_peer)  # 1 or 0 by peer and test sample
    return (correct * split.own_test_weights).sum(1), correct.mean(1)


def _module(setting: Setting, classes: int, inputs: Tensor) -> nn.Module:
    """Return a new network for inputs of this shape."""
    shape = {"channels": inputs.shape[-1 if setting.layout == "series" else 1], "classes": classes}
    if setting.layout == "images":
        shape["size"] = inputs.shape[-1]
    return NETWORKS[setting.network](**shape, **setting.options)


def _reshape_samples(setting: Setting, samples: Samples) -> Samples:
    """Return samples in the shape that the network expects; see `layout` of Setting."""
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
"""All layers are averaged, except the outputs, which are private."""
FEDBN = Scheme("FedBN", 1.0, "shared", buffers="local")
PARTIAL = Scheme("partial 0.8", 0.8)
PER_PEER_SUFFIX = ", per-peer init"
"""Ends the name of a scheme whose private cells have different initial values on each peer."""
PRIOR_SUFFIX = ", prior"
"""Ends the name of a scheme with a log-prior."""
SCHEMES = (
    LOCAL, FULL, FEDPER, FEDBN, PARTIAL,
    Scheme("partial 0.5", 0.5),
    Scheme("partial 0.8 + outputs", 0.8, "shared"),
    replace(FEDPER, name=FEDPER.name + PER_PEER_SUFFIX, init="per peer"),
    replace(PARTIAL, name=PARTIAL.name + PER_PEER_SUFFIX, init="per peer"),
    replace(FULL, name=FULL.name + PRIOR_SUFFIX, prior="auto"),
    replace(FEDPER, name=FEDPER.name + PRIOR_SUFFIX, prior="auto"),
    replace(FULL, name="auto", prior="auto", auto=True),
)  # fmt: skip
"""The schemes that are compared. With full averaging, the running statistics of batch norm are averaged too;
with private cells, each peer recomputes them from its own samples. On the built-in digits, the other choice
was less accurate in both cases."""
BASELINES = (LOCAL.name, FULL.name, FEDPER.name)
"""The table shows every scheme's difference to each of these schemes."""


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


def cifar(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of a small CNN on CIFAR-10."""
    options = {"widths": (8, 16), "hidden": 32 if quick else 64, "norm": True}
    data, sizes = ("digits", _DIGITS) if quick else ("cifar10", _CIFAR)
    setting = Setting(data, "small-cnn", "images", options, **sizes)
    return networks_study(entry, {_CNN: setting}, seeds)


def hapt(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of an LSTM and a 1-D CNN on HAPT; each peer has one person's recordings."""
    data, sizes = ("digits", _DIGITS) if quick else ("hapt-raw", _HAPT)
    cnn_options = {"widths": (16, 32), "kernel": 3} if quick else {"widths": (16, 32)}
    settings = {
        _LSTM: Setting(data, "lstm", "series", {"hidden": 32}, rate=0.5, **sizes),
        _CNN1D: Setting(data, "cnn1d", "channels", cnn_options, **sizes),
    }
    return networks_study(entry, settings, seeds)


def networks_study(entry: StudyEntry, settings: Mapping[str, Setting], seeds: range) -> Study[Cell]:
    """Return the study of these networks under all schemes; FedBN only for networks with batch norm."""
    cells = [
        Cell(scheme.name, network, setting, scheme, seed)
        for seed in seeds
        for network, setting in settings.items()
        for scheme in SCHEMES
        if scheme is not FEDBN or setting.has_batch_norm
    ]
    return Study(
        entry.name, cells, EachCell(run_cell), table,
        lambda folder, records: draw(folder / "figure", entry.title, settings, records),
        latest=lambda record: f"{record['scheme']}: {record['own']:.3f}",
    )  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return means over seeds by network and scheme, and differences to the baselines, paired by seed."""
    frame = frame_of(records, ordered=["network"]).sort_values("network", kind="stable")
    summary = frame.groupby(["network", "scheme"], sort=False, observed=True).agg(
        seeds=("seed", "size"), shared=("shared", "first"), own=("own", "mean"),
        common=("common", "mean"), worst=("worst", "mean"),
    )  # fmt: skip
    by_seed = frame.pivot(index=["network", "seed"], columns="scheme", values="own")
    for baseline in BASELINES:
        summary[f"− {baseline}"] = [
            _difference(by_seed.loc[network], scheme, baseline) for network, scheme in summary.index
        ]
    formats = {"shared": ".0%", **dict.fromkeys(("own", "common", "worst"), ".3f")}
    return {"summary": as_text(summary.reset_index(names=["network", "scheme"]), formats)}


def _difference(by_seed: Frame, scheme: str, baseline: str) -> str:
    """Return the mean difference and its standard error, over the seeds that both schemes have, as text."""
    if scheme == baseline or baseline not in by_seed:
        return ""
    paired = (by_seed[scheme] - by_seed[baseline]).dropna()
    if not len(paired):
        return ""
    error = "" if len(paired) == 1 else f" ± {paired.sem():.3f}"
    return f"{paired.mean():+.3f}{error}"


def caption(settings: Sequence[Setting]) -> str:
    """Return the figure's caption: data, training, and what each scheme averages."""
    first = settings[0]  # settings of one study have the same data and rounds
    if first.data == "hapt-raw":
        data = (
            f"{first.peers} people of HAPT as peers, each with {first.samples} training windows of 128×6 "
            f"(from the first half of each activity's recording) and {first.test} test windows (from the "
            "second half); own test: the peer's test windows; common test: the test windows of all peers"
        )
    else:
        data = (
            f"{first.data}: {first.peers} peers, {first.samples} samples on average, classes split in "
            f"Dirichlet({first.alpha:g}) proportions; common test: {first.test} samples; own test: the same "
            "samples, weighted so that classes are as frequent as in the peer's training data"
        )
    rates = ", ".join(f"{s.network} {s.rate:g}" for s in settings)
    return (
        f"{data}. {first.rounds} rounds of {first.local_samples} samples in batches of {first.batch}, plain "
        f"SGD (rate: {rates}), exact averages, all peers the same weight. Means over peers and seeds after "
        "the last round; small dots: after earlier ones; bars: standard error over seeds (seed-to-seed "
        "variation affects all schemes alike, so compare the paired differences of the table). Partial: that "
        "share of the cells of every hidden layer is averaged; "
        "outputs are private unless the scheme says '+ outputs'; weights between private and shared cells "
        "are never averaged. FedPer: all but the outputs are averaged. All peers have the same initial "
        "values, in private cells too, except with 'per-peer init'. "
        "Statistics of batch norm: averaged with full averaging, private with FedBN, recomputed from the "
        "peer's own samples otherwise. "
        "Prior: where class shares differ more than by chance, each peer adds the log of its own to the "
        "outputs. Auto: prior, and peers decide by themselves what they share, beginning with everything."
    )


def draw(
    path: Path, title: str, settings: Mapping[str, Setting], records: Sequence[Record]
) -> list[Path]:
    """Draw a dot for every scheme: a row of panels for every network, own test left, common test right."""
    from ..study.figures import panels, save

    networks = [name for name in settings if any(r["network"] == name for r in records)]
    note = caption([settings[name] for name in networks])
    schemes = len({r["scheme"] for r in records})
    height = (0.24 * schemes + 1.0) * len(networks) + 0.3
    figure, grid = panels(len(networks), 2, note, 11.5, height)
    for row, network in zip(grid, networks, strict=True):
        of_network = [r for r in records if r["network"] == network]
        for axes, column, test in zip(row, (1, 2), ("own test", "common test"), strict=True):
            _draw_dots(axes, of_network, column)
            axes.set_title(f"{network}: {test}", fontsize=10)
        row[1].set_yticklabels([])
    for axes in grid[-1]:
        axes.set_xlabel("accuracy")
    figure.suptitle(title)
    return save(figure, path)


def _draw_dots(axes: Axes, records: Sequence[Record], column: int) -> None:
    """Draw a row for every scheme: a dot after the last round, and small ones after earlier rounds.

    column: that of `by_round` with the accuracy.
    """
    from ..study.figures import BLUE, GREY

    names = list(dict.fromkeys(r["scheme"] for r in records))[::-1]  # the first one is on top
    for row, scheme in enumerate(names):
        curves = np.array([r["by_round"] for r in records if r["scheme"] == scheme])
        values = curves[:, :, column]
        means = values.mean(0)
        error = values[:, -1].std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        axes.plot(means, [row] * len(means), color=GREY, linewidth=0.8, alpha=0.5, zorder=1)
        axes.scatter(means[:-1], [row] * (len(means) - 1), s=9, color=GREY, zorder=2)
        axes.errorbar(
            [means[-1]], [row], xerr=error, fmt="o", color=BLUE, markersize=6, capsize=2.5, zorder=3
        )
        axes.annotate(
            f"{means[-1]:.3f}", (means[-1], row), xytext=(0, 6), textcoords="offset points",
            ha="center", fontsize=7, color="#222222",
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(-0.6, len(names) - 0.2)
