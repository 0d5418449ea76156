"""Every method on one setting: what it makes of the same peers' networks, and how good that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from torch import Tensor

from ...models import stream
from ...models.matching import MAGI, Chain, MatchOptions, fuse
from .fusing_baselines import DISTILLED_WIDTH, answers, average, distill, dp_means
from .fusing_local import START_BIAS, accuracy, chain_of, fresh, logits, train
from .fusing_setting import Dealt, Setting, deal

SWEEPS = 5
PROXIMAL = 0.01


@dataclass(frozen=True)
class Outcome:
    """Accuracy on the common test samples; hidden cells and parameters of what answers."""

    accuracy: float
    cells: int
    parameters: int


class Peers:
    """A setting's peers. Networks are trained when a method first asks for them, and kept."""

    def __init__(self, setting: Setting):
        self.setting = setting

    @cached_property
    def dealt(self) -> Dealt:
        """Who has which samples."""
        return deal(self.setting)

    @cached_property
    def own(self) -> list[Chain]:
        """Trained from starts of their own."""
        return self._trained("own")

    @cached_property
    def own_wide(self) -> list[Chain]:
        """The same at the width that FedAvg is given."""
        return self._trained("own", self.setting.average_width)

    @cached_property
    def shared(self) -> list[Chain]:
        """Trained from one common start."""
        return self._trained("shared", self.setting.average_width)

    @cached_property
    def proximal(self) -> list[Chain]:
        """Trained from one common start and pulled back to it (FedProx)."""
        return self._trained("shared", self.setting.average_width, PROXIMAL)

    def _trained(self, start: str, width: int | None = None, proximal: float = 0.0) -> list[Chain]:
        if start == "own" and width in (None, self.setting.width) and "own" in self.__dict__:
            return self.own
        setting, found = self.setting, []
        for peer, share in enumerate(self.dealt.shares):
            begin = self._seed("start", *(["all"] if start == "shared" else [peer]))
            module = fresh(setting.layout(width), begin)
            order = self._seed("order", peer)
            train(module, share, epochs=setting.epochs, seed=order, proximal=proximal)
            found.append(chain_of(module, f"peer {peer}"))
        return found

    def _seed(self, *names: object) -> int:
        return int(stream(self.setting.seed, "matching", *names).integers(2**31))

    def outcome(self, outputs: Tensor, cells: int, parameters: int) -> Outcome:
        """Score answers to the test samples."""
        return Outcome(accuracy(outputs, self.dealt.test_y), cells, parameters)

    def score(self, chain: Chain) -> Outcome:
        """Score a network."""
        return self.outcome(logits(chain, self.dealt.test_x), sum(chain.widths[1:-1]), chain.size)

    def fused(self, options: MatchOptions) -> Outcome:
        """Match and score. The order of sweeps is the same for all options: comparisons are paired."""
        found = fuse(
            self.own,
            options,
            counts=self.dealt.counts,
            bias_mean=START_BIAS,
            seed=self._seed("sweeps"),
        )
        return self.score(found.chain)

    def ensemble(self, counts: np.ndarray | None) -> Outcome:
        """Score the ensemble, weighted by class if `counts` are given."""
        outputs = answers(self.own, self.dealt.test_x, counts)
        cells = sum(sum(chain.widths[1:-1]) for chain in self.own)
        return self.outcome(outputs, cells, sum(chain.size for chain in self.own))


def _local(peers: Peers) -> Outcome:
    each = [peers.score(chain) for chain in peers.own]
    return Outcome(
        float(np.mean([one.accuracy for one in each])), each[0].cells, each[0].parameters
    )


def _averaged(which: str) -> Callable[[Peers], Outcome]:
    def run(peers: Peers) -> Outcome:
        samples = peers.dealt.counts.sum(axis=1)
        return peers.score(average(getattr(peers, which), samples))

    return run


def _matched(**options: object) -> Callable[[Peers], Outcome]:
    chosen = MatchOptions(**{"sweeps": SWEEPS, **options})  # type: ignore[arg-type]
    return lambda peers: peers.fused(chosen)


def _distilled(peers: Peers) -> Outcome:
    setting = peers.setting
    layout = setting.layout(DISTILLED_WIDTH)
    seed = stream(setting.seed, "matching", "distil").integers(2**31)
    return peers.score(
        distill(peers.own, peers.dealt.shares, layout, epochs=setting.epochs, seed=int(seed))
    )


LAMBDAS = (0.0, MAGI, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


def magi(value: float, variance: float = 1.0) -> str:
    """The name of MAGI with one λ (and a σ², if not 1); at λ = 0 it is PFNM."""
    spread = "" if variance == 1 else f" σ²={variance:g}"
    return f"MAGI{spread} λ={value:g}" if value else f"PFNM{spread}"


METHODS: Mapping[str, Callable[[Peers], Outcome]] = MappingProxyType(
    {
        "local": _local,
        "FedAvg, own starts": _averaged("own_wide"),
        "FedAvg, shared start": _averaged("shared"),
        "FedProx, shared start": _averaged("proximal"),
        "DP-means": lambda peers: peers.score(dp_means(peers.own, peers.dealt.counts)),
        "PFNM": _matched(),
        "PFNM γ0=1e-5": _matched(mass=1e-5),
        "PFNM σ²=0.1": _matched(variance=0.1, limit=None),
        **{magi(value): _matched(kl=value) for value in LAMBDAS[1:]},
        **{magi(value, 0.1): _matched(kl=value, variance=0.1, limit=None) for value in LAMBDAS[1:]},
        "ensemble": lambda peers: peers.ensemble(None),
        "weighted ensemble": lambda peers: peers.ensemble(peers.dealt.counts),
        "distillation": _distilled,
    }
)
