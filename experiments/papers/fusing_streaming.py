"""PFNM's streaming experiment: samples come in steps, the posterior of one is the next one's prior."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ...models import stream
from ...models.matching import Chain, Fusion, MatchOptions, Past, fuse
from .fusing_baselines import answers
from .fusing_local import START_BIAS, accuracy, chain_of, fresh, logits, train
from .fusing_methods import SWEEPS, Outcome
from .fusing_setting import Setting, Share, deal

NEW_CELLS = 1  # γ0 of the paper: cells of a peer's next network that start without a model
NOISE = 0.05


def run_stream(setting: Setting, steps: int) -> dict[int, dict[str, Outcome]]:
    """Outcomes by step and method. Ensembles go on training the networks that they have."""
    if setting.layers != 1:
        raise ValueError("the streaming experiment has one hidden part")
    dealt = deal(setting)
    rng = stream(setting.seed, "matching", "stream")
    pieces = [np.array_split(rng.permutation(len(share.y)), steps) for share in dealt.shares]
    modules = [_start(setting, rng) for _ in dealt.shares]
    kept = [_start(setting, rng) for _ in dealt.shares]
    seen = np.zeros_like(dealt.counts)
    fused, past = None, None
    found: dict[int, dict[str, Outcome]] = {}
    for step in range(steps):
        shares = [
            Share(share.x[mine[step]], share.y[mine[step]])
            for share, mine in zip(dealt.shares, pieces, strict=True)
        ]
        counts = np.stack([share.counts for share in shares])
        seen += counts
        if fused is not None:
            modules = [_next(setting, fused, peer, rng) for peer in range(setting.peers)]
        for module, other, share in zip(modules, kept, shares, strict=True):
            seed = int(rng.integers(2**31))
            for each in (module, other):
                if len(share.y):
                    train(each, share, epochs=setting.epochs, seed=seed)
        fused, past = _fuse([chain_of(module) for module in modules], counts, past, rng)
        ensemble = [chain_of(module) for module in kept]
        size = sum(chain.size for chain in ensemble)
        cells = sum(chain.widths[1] for chain in ensemble)
        x, y = dealt.test_x, dealt.test_y
        found[step + 1] = {
            "PFNM streaming": Outcome(
                accuracy(logits(fused.chain, x), y), fused.chain.widths[1], fused.chain.size
            ),
            "ensemble": Outcome(accuracy(answers(ensemble, x), y), cells, size),
            "weighted ensemble": Outcome(accuracy(answers(ensemble, x, seen), y), cells, size),
            "local": Outcome(
                float(np.mean([accuracy(logits(chain, x), y) for chain in ensemble])),
                ensemble[0].widths[1],
                ensemble[0].size,
            ),
        }
    return found


def _fuse(
    chains: list[Chain], counts: np.ndarray, past: Past | None, rng: np.random.Generator
) -> tuple[Fusion, Past]:
    options = MatchOptions(sweeps=SWEEPS)
    seed = int(rng.integers(2**31))
    found = fuse(chains, options, counts=counts, bias_mean=START_BIAS, past=past, seed=seed)
    return found, found.past


def _start(setting: Setting, rng: np.random.Generator) -> nn.Sequential:
    return fresh(setting.layout(), int(rng.integers(2**31)))


def _next(setting: Setting, fused: Fusion, peer: int, rng: np.random.Generator) -> nn.Sequential:
    """A peer's next start: fused cells drawn by how often it used them, a new one, some noise."""
    _, uses = fused.past.parts[0]
    weights = uses[peer] + 1e-9  # those that it never used come last
    count = setting.width - NEW_CELLS
    chosen = rng.choice(uses.shape[1], size=count, replace=False, p=weights / weights.sum())
    first, last = fused.chain.layers

    def grown(values: np.ndarray) -> np.ndarray:
        empty = np.zeros((NEW_CELLS, *values.shape[1:]))
        return np.concatenate([values[chosen], empty])

    chain = Chain(
        (
            replace(
                first,
                weight=grown(first.weight),
                own={name: grown(value) for name, value in first.own.items()},
            ),
            replace(last, weight=grown(last.weight.T).T),
        )
    )
    module = _start(setting, rng)
    state = {
        name: torch.from_numpy(value + NOISE * rng.normal(size=value.shape)).float()
        for name, value in chain.state(np.float64).items()
    }
    module.load_state_dict(state)
    return module
