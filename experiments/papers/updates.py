"""`gossamer paper compressed-updates`: FedAvg with lossy updates, and a bound on the accuracy that they cost.

The slides (001) say of low rank, masks, subsampling and quantization: they lose accuracy, one needs a model
trained without them to know how much, and a bound would be better. Here is one, for softmax regression, whose
loss is convex. It needs nothing but what a client knows when it sends its update.

Let w be the server's model with lossy updates, v the model without, and d = ‖w − v‖, which is 0 at first.
Every local step (on the same samples in both runs) subtracts η (∇ℓ(w) + μ w). The loss of inputs with ‖x‖ ≤ 1
has a second derivative of at most ½, so for η ≤ 2 / (½ + 2 μ) a step brings w and v nearer, by the factor
1 − η μ. A client k with n_k of n samples takes s_k steps, and sends its change Δ_k with a relative distortion
δ_k, that is, with an error of δ_k ‖Δ_k‖. So a round changes the distance to at most

    d ← Σ_k n_k/n · ( (1 − η μ)^s_k · d + δ_k ‖Δ_k‖ )

A difference of two outputs changes by √2 d at most. So v is right about a sample that w gets wrong only if w
prefers the wrong class by no more than √2 d: the share of such test samples bounds the accuracy that was
lost. Test samples that nobody trains on suffice to compute it; v is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...gossip.compress import distortion, roundtrip
from ...models import seeded_rng
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry
from .matching_methods import DataSplit, Setting, split_data

NONE, ALONE, POOLED = "none", "alone", "pooled"
"""Lines that are no compressors: uncompressed updates, clients on their own, and all samples in one place."""
COMPRESSORS = (
    "low-rank:1", "low-rank:5", "mask:0.1", "mask:0.5", "subsample:0.1", "subsample:0.5", "int2", "int4",
    "int8", "float16",
)  # fmt: skip
"""The slides' four: low rank and masks (structured updates), subsampling and quantization (sketched)."""
RATE, DECAY, BATCH = 1.0, 0.001, 20
"""η, μ, and the samples of a local step (B)."""
SMOOTHNESS = 0.5
"""The largest second derivative of the loss of an input of length 1 or less."""


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run; `line` is the compressor, or one of `NONE`, `ALONE` and `POOLED`."""

    setting: Setting
    rounds: int


@dataclass(frozen=True)
class MessageStatistics:
    """What is measured of the messages of a run.

    distortions: the relative distortion of every message. bound: on the distance from the model without
    compression. bytes: of all messages.
    """

    distortions: list[float]
    bound: float
    bytes: int


def unit_inputs(x: Tensor, split: DataSplit) -> Tensor:
    """Return inputs of length 1: less the mean of all training samples, with a last feature for the bias."""
    sizes = torch.tensor([float(len(share.x)) for share in split.shares])
    mean = sizes @ torch.stack([share.x.mean(0) for share in split.shares]) / sizes.sum()
    return torch.cat([F.normalize(x - mean), torch.ones(len(x), 1)], dim=1) / sqrt(2)


def client_update(w: Tensor, x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, int]:
    """Train one epoch from w by plain SGD; return the new values and the number of steps."""
    w = w.clone()
    batches = torch.from_numpy(rng.permutation(len(y))).split(BATCH)
    for batch in batches:
        inputs, labels = x[batch], y[batch]
        error = torch.softmax(inputs @ w.T, dim=1) - F.one_hot(labels, len(w))
        w -= RATE * (error.T @ inputs / len(batch) + DECAY * w)
    return w, len(batches)


def federated_averaging(
    split: DataSplit, rounds: int, seed: int, compressor: str = NONE
) -> tuple[Tensor, MessageStatistics]:
    """Run FedAvg (Algorithm 1 of the slides' second paper, with C = E = 1); return model and measures.

    Compressors other than `NONE` compress what a client has changed; the error is lost.
    """
    data = [(unit_inputs(share.x, split), share.y) for share in split.shares]
    w = torch.zeros(10, data[0][0].shape[1])
    shares = np.array([len(y) for _, y in data]) / sum(len(y) for _, y in data)
    distance, sent_bytes, distortions = 0.0, 0, []
    for round_number in range(rounds):
        change, next_distance = torch.zeros_like(w), 0.0
        for k, (x, y) in enumerate(data):
            trained, steps = client_update(w, x, y, seeded_rng(seed, "order", k, round_number))
            update = (trained - w).numpy().ravel()
            arrived, length = update, update.nbytes
            if compressor != NONE:
                rng = seeded_rng(seed, "compressor", k, round_number)
                arrived, length = roundtrip(compressor, update, rng, [tuple(w.shape)])
            relative_error = distortion(update, arrived)
            distortions.append(relative_error)
            sent_bytes += length
            change += float(shares[k]) * torch.from_numpy(arrived).view_as(w)
            next_distance += shares[k] * (
                (1 - RATE * DECAY) ** steps * distance
                + relative_error * float(np.linalg.norm(update))
            )
        w, distance = w + change, next_distance
    return w, MessageStatistics(distortions, float(distance), sent_bytes)


@lru_cache(maxsize=1)
def without_compression(setting: Setting, rounds: int) -> tuple[Tensor, MessageStatistics]:
    """Return the model without compression, which is computed once for all compressors of a seed."""
    return federated_averaging(split_data(setting), rounds, setting.seed)


def alone(split: DataSplit, rounds: int, seed: int) -> list[Tensor]:
    """Return each client's model, trained on its own samples only, with as many steps as with FedAvg."""
    models = []
    for k, share in enumerate(split.shares):
        x = unit_inputs(share.x, split)
        w = torch.zeros(10, x.shape[1])
        for round_number in range(rounds):
            w, _ = client_update(w, x, share.y, seeded_rng(seed, "order", k, round_number))
        models.append(w)
    return models


def run_cell(cell: Cell, job: Job) -> Record:
    """Run FedAvg with one compressor; beside it the run without, to measure what the bound is about."""
    setting, split = cell.setting, split_data(cell.setting)
    test_x, test_y = unit_inputs(split.test.x, split), split.test.y

    def accuracy(w: Tensor) -> float:
        return float(((test_x @ w.T).argmax(1) == test_y).double().mean())

    record: Record = {"line": cell.line, "seed": setting.seed}
    if cell.line == ALONE:
        models = alone(split, cell.rounds, setting.seed)
        return {**record, "accuracy": float(np.mean([accuracy(w) for w in models]))}
    if cell.line == POOLED:
        w, _ = federated_averaging(pooled_split(split), cell.rounds, setting.seed)
        return {**record, "accuracy": accuracy(w)}
    exact, sent = without_compression(setting, cell.rounds)
    if cell.line == NONE:
        return {**record, "accuracy": accuracy(exact), "bytes": sent.bytes}
    w, sent = federated_averaging(split, cell.rounds, setting.seed, cell.line)
    outputs = test_x @ w.T
    preference = outputs.amax(dim=1) - outputs.gather(1, test_y[:, None])[:, 0]
    undecided = (preference > 0) & (preference <= sqrt(2) * sent.bound)
    return {
        **record, "accuracy": accuracy(w), "bytes": sent.bytes,
        "distortion": float(np.mean(sent.distortions)), "worst": max(sent.distortions),
        "distance": float((w - exact).norm()), "distance_bound": sent.bound,
        "loss": accuracy(exact) - accuracy(w), "loss_bound": float(undecided.double().mean()),
    }  # fmt: skip


def pooled_split(split: DataSplit) -> DataSplit:
    """Return the samples of all clients as those of one."""
    first, *others = split.shares
    everything = [torch.cat([getattr(s, name) for s in (first, *others)]) for name in ("x", "y")]
    return DataSplit((type(first)(*everything),), split.test)


def compressed_updates(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of compressors."""
    data, rounds = ("digits", 10) if quick else ("mnist-5k", 20)
    lines = (NONE, ALONE, POOLED, *COMPRESSORS)
    cells = [
        Cell(line, Setting(data, 10, 0, 0, 0.5, epochs=1, seed=seed), rounds)
        for seed in seeds
        for line in lines
    ]
    caption = (
        f"001, compressed updates: softmax regression on {data}, 10 clients, Dirichlet 0.5, {rounds} rounds "
        f"of FedAvg with one epoch, batches of {BATCH}, rate {RATE:g}, weight decay {DECAY:g}, inputs "
        "less their mean and of length 1. The bound is computed from the distortion of the messages, without "
        "the run that has none."
    )
    return Study(
        entry.name, cells, EachCell(run_cell), table,
        lambda folder, records: draw(folder / "figure", records, entry.title, caption),
        latest=lambda record: f"{record['line']}: {record['accuracy']:.3f}",
    )  # fmt: skip


MEASURES = ("accuracy", "bytes", "distortion", "worst", "distance", "distance_bound", "loss",
            "loss_bound")  # fmt: skip
"""What a record may have, in the order of the table."""


def means(records: Sequence[Record]) -> Frame:
    """Return the means over seeds by line; measures that a line does not have are missing."""
    rows = [{"line": r["line"], **{name: r.get(name) for name in MEASURES}} for r in records]
    frame = frame_of(rows, ordered=["line"]).astype(dict.fromkeys(MEASURES, float))
    return frame.groupby("line", observed=True).mean().reset_index().astype({"line": str})


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the table: distortion, distance and accuracy by compressor, beside their bounds."""
    frame = means(records)
    frame["bytes"] /= 1e6
    formats = dict.fromkeys(MEASURES, ".4f") | {"bytes": ".3f", "distortion": ".3f", "worst": ".3f"}
    titles = {
        "line": "updates", "bytes": "MB sent", "distortion": "mean distortion",
        "worst": "worst distortion", "distance": "distance from the exact model",
        "distance_bound": "its bound", "loss": "accuracy lost", "loss_bound": "bound on it",
    }  # fmt: skip
    return {"summary": as_text(frame, formats).rename(columns=titles)}


def draw(path: Path, records: Sequence[Record], title: str, caption: str) -> list[Path]:
    """Draw bars of the accuracy that was lost, and of its bound, by compressor."""
    from ..study.figures import BLUE, ORANGE, canvas, place_legend, save

    if not (compressed := [record for record in records if "loss" in record]):
        return []
    lossy = means(compressed)
    figure, axes = canvas(f"{caption} Mean over seeds.")
    places = range(len(lossy))
    for shift, name, label, colour in (
        (-0.2, "loss", "measured", BLUE), (0.2, "loss_bound", "bound", ORANGE),
    ):  # fmt: skip
        axes.bar([place + shift for place in places], lossy[name], 0.38, label=label, color=colour)
    axes.set_xticks(list(places), list(lossy["line"]), rotation=30, ha="right")
    axes.set(title=title, ylabel="accuracy lost")
    place_legend(axes)
    return save(figure, path)
