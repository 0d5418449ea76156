"""Partial sharing of real networks, the runs of `gossamer paper networks-cifar` and `networks-hapt`.

Peers with unlike data train a convolutional or recurrent network, and differ in nothing but in what they
average: nothing, everything, everything but the outputs (FedPer), everything but batch norm (FedBN), or a
share of the cells of every hidden part. All schemes of a seed start from the same values, see the same
samples in the same order and are tested on the same samples, so that differences can be taken seed by seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...models import NETWORKS, Anatomy, Buffers, SgdLearner, SlicedNetwork, discover, stream
from ..arena import Arena
from ..data import DataError, Dataset, Samples, partition
from ..federated.deal import load_once
from ..results import Record

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
    stretch, rounds
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
    stretch: int = 250
    batch: int = 25
    rate: float = 0.1

    @property
    def normed(self) -> bool:
        """Whether the network has batch norm, so that FedBN means something."""
        return self.network in ("cnn1d", "resnet") or bool(self.options.get("norm"))


@dataclass(frozen=True)
class Cell:
    """One run: a setting under a scheme, with a seed."""

    line: str
    setting: Setting
    scheme: Scheme
    seed: int

    @property
    def key(self) -> str:
        """Names the run by all that decides its result."""
        text = json.dumps([asdict(self.setting), asdict(self.scheme), self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Deal:
    """Who has which samples."""

    train: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    """The common test."""
    own: Tensor
    """[peers, test samples]: how much a test sample counts in each peer's own test; rows sum to 1."""


def run_cells(cells: list[Cell], threads: int = 1) -> list[Record]:
    """A worker's job: the records of some runs."""
    return [run(cell, threads) for cell in cells]


def run(cell: Cell, threads: int = 1) -> Record:
    """Train, average, test now and then; accuracies are means over peers."""
    setting = cell.setting
    data = load_once(setting.data)
    dealt = deal(setting, data, cell.seed)
    learners = make_learners(cell, data.classes, dealt)
    arena = Arena(learners, threads=threads)
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
        "key": cell.key, "line": cell.line, "scheme": cell.scheme.name, "seed": cell.seed,
        "own": float(own.mean()), "common": float(common.mean()), "worst": float(own.min()),
        "by_peer": own.tolist(), "by_round": by_round,
        "shared": shared / len(network.flat),
    }  # fmt: skip


def make_learners(cell: Cell, classes: int, dealt: Deal) -> list[SgdLearner]:
    """A learner for every peer; the schemes of one seed start equal and draw alike."""
    setting, seed = cell.setting, cell.seed
    example = dealt.test[0][:1]
    anatomy = discover(_module(setting, classes, example), example)
    learners = []
    for peer, train in enumerate(dealt.train):
        module = _module(setting, classes, example)
        network = cut(module, anatomy, cell.scheme, str(peer), seed)
        learner = SgdLearner(
            network, train, (dealt.test[0][:0], dealt.test[1][:0]),
            stretch=setting.stretch, batch=setting.batch, reduction="mean", rate=setting.rate,
            loss="cross-entropy", seed=int(stream(seed, "order", peer).integers(2**31)),
        )  # fmt: skip
        learners.append(learner)
    return learners


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
    train = data.train.take(wanted[: setting.peers * setting.samples])
    wanted = stream(seed, "test samples").permutation(len(data.test))[: setting.test]
    test = data.test.take(wanted)
    parts = partition.dirichlet(
        train.y, setting.peers, setting.alpha, stream(seed, "partition"), 2 * setting.batch
    )
    there = torch.bincount(test.y, minlength=data.classes)
    own = []
    for part in parts:
        # Every class counts as much as among the peer's own samples, whatever its number in the test.
        among = torch.bincount(train.y[part], minlength=data.classes)
        own.append((among / there.clamp(min=1))[test.y])
    counts = torch.stack(own)
    return Deal(
        [(_inputs(setting, train.take(part)), train.y[part]) for part in parts],
        (_inputs(setting, test), test.y),
        counts / counts.sum(1, keepdim=True),
    )


def _by_group(setting: Setting, data: Dataset, seed: int) -> Deal:
    """A group for each peer: the first half of each of its classes to learn from, the last to be tested on.

    Neighbouring windows of a recording overlap, so a random split would test on what was learned. The
    common test is everybody's.
    """
    whole = partition.by_group(data.train.group, setting.peers, None, stream(seed, "groups"))
    train, test = [], []
    for peer, part in enumerate(whole):
        part = np.sort(part)  # the order of the recording
        labels = data.train.y[part].numpy()
        halves = [np.array_split(part[labels == label], 2) for label in np.unique(labels)]
        for side, (found, wanted) in enumerate(((train, setting.samples), (test, setting.test))):
            pool = np.concatenate([half[side] for half in halves])
            if wanted > len(pool):
                raise DataError(
                    f"{data.name}: {wanted} samples were asked of half a group, which has {len(pool)}: "
                    "lower samples and test"
                )
            found.append(stream(seed, "half", side, peer).permutation(pool)[:wanted])
    held = data.train.take(np.concatenate(test))
    own = torch.eye(setting.peers).repeat_interleave(setting.test, dim=1) / setting.test
    return Deal(
        [(_inputs(setting, data.train.take(part)), data.train.y[part]) for part in train],
        (_inputs(setting, held), held.y),
        own,
    )


@torch.no_grad()
def _accuracies(learners: Sequence[SgdLearner], dealt: Deal) -> tuple[Tensor, Tensor]:
    """Every peer's accuracy on its own test and on the common one."""
    inputs, labels = dealt.test
    right = []
    for learner in learners:
        network = learner.network
        if network.buffers == "recompute":
            network.recompute(learner.samples[0])
        network.module.eval()
        outputs = torch.cat([network(some) for some in inputs.split(250)])
        right.append((outputs.argmax(1) == labels).float())
    found = torch.stack(right)
    return (found * dealt.own).sum(1), found.mean(1)


def _module(setting: Setting, classes: int, example: Tensor) -> nn.Module:
    channels = example.shape[-1] if setting.layout == "series" else example.shape[1]
    given = {"channels": channels, "classes": classes}
    if setting.layout == "images":
        given["size"] = example.shape[-1]
    return NETWORKS[setting.network](**given, **setting.options)


def _inputs(setting: Setting, samples: Samples) -> Tensor:
    if setting.layout == "images":
        return samples.x
    series = samples.x.flatten(1, -2) if samples.x.ndim > 3 else samples.x
    return series if setting.layout == "series" else series.transpose(1, 2).contiguous()
