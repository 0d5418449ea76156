"""What outputs are measured by: metrics that add up over samples, metrics by name, and losses.

A *named metric* is a function of a network's outputs and the labels of all test samples of a peer. It returns
a number, or several by name. Each number has a weight, by default the number of samples: the metric of
several peers together is the weighted mean.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, nan
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import hint

from .errors import ModelError
from .optimizers import NameOrTable, call, find_class, read_name

Weighted: TypeAlias = tuple[float, float]
"""A number and its weight."""
Measured: TypeAlias = float | Weighted | Mapping[str, float | Weighted]
Metric: TypeAlias = Callable[[Tensor, Tensor], Measured]
"""A function of outputs [n, …] and labels [n, …]. Of a classifier with a single output, which predicts class
1 above a threshold, the output is given minus the threshold."""

RESERVED = frozenset({"accuracy", "loss", "training_loss", "alone_accuracy", "alone_loss"})
"""Names that records and summaries use for what every learner measures."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Metrics:
    """Totals over samples; `a + b` are the metrics of both sets of samples together.

    In regression, where samples are neither correct nor wrong, `correct` is NaN.

    named: other metrics by name, each a number and its weight: `{"f1": (0.8, 60)}`.
    """

    loss: float = 0.0
    correct: float = 0
    samples: int = 0
    named: Mapping[str, Weighted] = field(default_factory=dict)

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(
            self.loss + other.loss, self.correct + other.correct, self.samples + other.samples,
            _add(self.named, other.named) if self.named or other.named else self.named,
        )  # fmt: skip

    @property
    def accuracy(self) -> float:
        """The fraction of samples that were correct; NaN without samples, and in regression."""
        return self.correct / self.samples if self.samples else nan

    @property
    def mean_loss(self) -> float:
        """The loss per sample; NaN without samples."""
        return self.loss / self.samples if self.samples else nan

    @property
    def values(self) -> dict[str, float]:
        """The named metrics, without their weights."""
        return {name: value for name, (value, _) in self.named.items()}


def _add(a: Mapping[str, Weighted], b: Mapping[str, Weighted]) -> dict[str, Weighted]:
    """Return the weighted means of metrics in both `a` and `b`, and those that only one of them has."""
    combined = {**a, **b}
    for name in a.keys() & b.keys():
        (x, x_weight), (y, y_weight) = a[name], b[name]
        weight = x_weight + y_weight
        combined[name] = ((x * x_weight + y * y_weight) / weight if weight else nan, weight)
    return combined


def as_record(test: Metrics) -> dict[str, object]:
    """Return what a record says of a test: accuracy, loss and, if there are any, `metrics` by name."""
    named = {"metrics": test.values} if test.named else {}
    return {"accuracy": test.accuracy, "loss": test.mean_loss, **named}


def measure(metrics: Iterable[Metric], outputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
    """Return all numbers that metrics give for a peer's test samples, with their weights.

    A number of weight 0 is left out. Raises ModelError if a metric returns something else than numbers, or
    gives one a name that is taken.
    """
    named: dict[str, Weighted] = {}
    for metric in metrics if len(labels) else ():
        name = getattr(metric, "__name__", type(metric).__name__)
        measured = metric(outputs, labels)
        table = measured if isinstance(measured, Mapping) else {name: measured}
        for key, value in table.items():
            pair = value if isinstance(value, tuple) else (value, len(labels))
            try:
                number, weight = map(float, pair)
            except (TypeError, ValueError):
                raise ModelError(
                    f"metric {key!r} of {name} is {pair!r:.80}: return a number, or (number, weight)"
                ) from None
            if not isfinite(weight) or weight < 0 or not _NAME.fullmatch(key):
                raise ModelError(
                    f"metric {key!r:.80} of {name}, weight {weight:g}: a name has up to 64 letters, digits, "
                    "and _ . - and a weight is 0 or more"
                )
            if key in named or key in RESERVED:
                raise ModelError(f"two metrics are called {key!r}: give one another name")
            if weight:
                named[key] = number, weight
    return named


def less_is_better(metric: str) -> bool:
    """Return whether a metric is a loss or an error, by its name."""
    return "loss" in metric or "error" in metric or metric in ("mae", "mse", "rmse")


def find_metrics(metrics: Sequence[str | Metric]) -> tuple[Metric, ...]:
    """Return metrics as functions, those given by name from METRICS; raise ModelError for an unknown name."""
    functions: list[Metric] = []
    for metric in metrics:
        if not isinstance(metric, str):
            if not callable(metric):
                raise ModelError(
                    f"metric {metric!r:.80}: give a name or a function of outputs and labels"
                )
            functions.append(metric)
        elif metric in METRICS:
            functions.append(METRICS[metric])
        else:
            raise ModelError(f"unknown metric {metric!r}; {hint(metric, METRICS, are='there are')}")
    return tuple(functions)


# --- ready metrics ------------------------------------------------------------------------------------


def predicted(outputs: Tensor) -> Tensor:
    """Return the class of each row of outputs: of the largest one, or 1 for a single output above 0."""
    return (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(dim=1)


def _class_count(outputs: Tensor) -> int:
    """Return the number of classes: a single output stands for two."""
    return max(2, outputs.shape[1])


def f1(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of F1 = 2TP / (2TP + FP + FN).

    Classes that no sample has, and that are not predicted, are left out.
    """
    classes, predictions = _class_count(outputs), predicted(outputs)
    hits = torch.bincount(labels[predictions == labels], minlength=classes).double()
    total = torch.bincount(torch.cat([labels, predictions]), minlength=classes)  # 2TP + FP + FN
    return float((2 * hits / total)[total > 0].mean())


def auc(outputs: Tensor, labels: Tensor) -> Weighted:
    """Return the area under the ROC curve; of several classes, the mean of each against all others.

    A class needs samples that have it and samples that do not; without any such class the weight is 0.
    """
    if outputs.shape[1] <= 2:
        scores = {1: outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0)}
    else:
        scores = dict(enumerate(outputs.softmax(dim=1).unbind(dim=1)))
    areas = []
    for label, score in scores.items():
        has_label = labels == label
        positive, negative = int(has_label.sum()), int((~has_label).sum())
        if positive and negative:
            # Mann and Whitney: by the ranks of those that have the class; equal scores have their mean rank.
            _, value_index, counts = score.unique(return_inverse=True, return_counts=True)
            ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[value_index]
            above = float(ranks[has_label].sum()) - positive * (positive + 1) / 2
            areas.append(above / (positive * negative))
    return (sum(areas) / len(areas), len(labels)) if areas else (nan, 0)


def class_accuracy(outputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
    """Return the accuracy on the samples of each class, `accuracy_0` and so on, weighted by their number."""
    classes = _class_count(outputs)
    counts = torch.bincount(labels, minlength=classes).tolist()
    hits = torch.bincount(labels[predicted(outputs) == labels], minlength=classes).tolist()
    pairs = enumerate(zip(hits, counts, strict=True))
    return {f"accuracy_{label}": (hit / count, count) for label, (hit, count) in pairs if count}


def _errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return outputs minus targets; a single output and a plain target are one number each."""
    targets = labels.to(outputs.dtype)
    return (outputs.flatten(1) - targets.reshape(len(targets), -1)).double()


def mae(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean absolute error."""
    return float(_errors(outputs, labels).abs().mean())


def mse(outputs: Tensor, labels: Tensor) -> float:
    """Return the mean squared error."""
    return float(_errors(outputs, labels).square().mean())


def rmse(outputs: Tensor, labels: Tensor) -> float:
    """Return the root of the mean squared error."""
    return mse(outputs, labels) ** 0.5


def r2(outputs: Tensor, labels: Tensor) -> Weighted:
    """Return the share of the targets' variance that is explained; without variance the weight is 0."""
    targets = labels.double().reshape(len(labels), -1)
    variance = float((targets - targets.mean(dim=0)).square().sum())
    error = float(_errors(outputs, labels).square().sum())
    return (1 - error / variance, len(labels)) if variance else (nan, 0)


METRICS: dict[str, Metric] = {
    "f1": f1, "auc": auc, "class-accuracy": class_accuracy,
    "mae": mae, "mse": mse, "rmse": rmse, "r2": r2,
}  # fmt: skip
"""The metrics that a name stands for, in configs and in `SgdLearner`."""


def check_metrics(
    peer: str, metrics: Iterable[Metric], labels: Tensor, output_count: int | None
) -> None:
    """Raise ModelError for a metric of METRICS that is not for these labels and so many outputs."""
    for name in [name for name, metric in METRICS.items() if metric in metrics and len(labels)]:
        is_of_classes = METRICS[name] in (f1, auc, class_accuracy)
        if is_of_classes and labels.is_floating_point():
            raise ModelError(
                f"peer {peer!r}: metric {name!r} is for classes, and the targets are numbers; take mae, mse, "
                "rmse or r2"
            )
        if not is_of_classes and not labels.is_floating_point() and output_count not in (1, None):
            raise ModelError(
                f"peer {peer!r}: metric {name!r} is for targets that are numbers, and labels are classes; "
                "take f1, auc or class-accuracy"
            )


# --- losses --------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs [n, classes] and labels [n] that returns one number per sample."""
IsCorrect = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and labels that returns, for each sample, whether the output is correct."""


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return half the squared distance to the one-hot label, summed over outputs: the paper's loss.

    A network with one output is a binary classifier whose target is the label itself.
    """
    return 0.5 * (outputs - _one_hot(outputs, labels)).square().sum(dim=1)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the softmax cross-entropy; for a network with one output, the logistic loss of its logit."""
    if outputs.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(
            outputs[:, 0], labels.to(outputs.dtype), reduction="none"
        )
    return F.cross_entropy(outputs, labels, reduction="none")


LOSSES: dict[str, Loss] = {"squared": squared_error, "cross-entropy": cross_entropy}
"""The losses that a name stands for, in configs and in `SgdLearner`."""
_LOSSES_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "MultiLabelMarginLoss")
"""Losses of torch whose targets are integers; all others get floats."""


@dataclass(frozen=True)
class TorchLoss:
    """A loss of torch.nn by its name: one number per sample, the mean over a sample's outputs.

    A network with one output gives [n, 1]; for targets [n] the outputs are taken as [n]. options: the loss's
    arguments, in pairs. Losses of equal name and options are equal, so that learners can share a stack.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        if self.name not in _LOSSES_OF_CLASSES:
            labels = labels.to(outputs.dtype)
        if outputs.ndim == labels.ndim + 1 and outputs.shape[-1] == 1:
            outputs = outputs[..., 0]
        if self.name not in _LOSSES_OF_CLASSES and outputs.shape != labels.shape:
            raise ValueError(f"{self.name} compares outputs with targets of the same shape")
        losses = _criterion(self, outputs.dtype, outputs.device)(outputs, labels)
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


@lru_cache(maxsize=64)
def _criterion(loss: TorchLoss, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the module that computes a loss; numbers in a list, such as class weights, become a tensor."""
    options = {
        key: torch.tensor(value, dtype=dtype, device=device) if isinstance(value, tuple) else value
        for key, value in loss.options
    }
    return call("loss", loss.name, getattr(nn, loss.name), reduction="none", **options)


def decision_threshold(loss: Loss) -> float:
    """Return above which value a single output predicts class 1: 0 if the loss takes logits, else 0.5."""
    of_logits = isinstance(loss, TorchLoss) and loss.name == "BCEWithLogitsLoss"
    return 0.0 if of_logits or loss is cross_entropy else 0.5


def find_loss(name_or_table: NameOrTable) -> Loss:
    """Return the loss of this name: cross-entropy, squared, or a loss of torch.nn such as HuberLoss."""
    name, options = read_name("loss", name_or_table)
    if not options and name in (*LOSSES, "CrossEntropyLoss"):
        return LOSSES.get(name, cross_entropy)
    loss_class = find_class("loss", name, nn.modules.loss, nn.Module, list(LOSSES))
    parameters = inspect.signature(loss_class).parameters
    known = [key for key in parameters if key not in ("reduction", "size_average", "reduce")]
    if unknown := [key for key in options if key not in known]:
        raise ModelError(
            f"loss {name!r} has no argument {unknown[0]!r}; {hint(unknown[0], known, are='it has')}"
        )
    if "reduction" not in parameters or len(inspect.signature(loss_class.forward).parameters) != 3:
        raise ModelError(
            f"loss {name!r} does not compare outputs with targets, sample by sample; give a function"
        )
    pairs = sorted(options.items())
    torch_loss = TorchLoss(
        name, tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in pairs)
    )
    _criterion(
        torch_loss, torch.float32, torch.device("cpu")
    )  # raises for arguments of a wrong type
    return torch_loss


def _one_hot(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return labels as the outputs that they ask for: one-hot, or as they are for a single output."""
    if outputs.shape[1] == 1:
        return labels.to(outputs.dtype)[:, None]
    return F.one_hot(labels, outputs.shape[1]).to(outputs.dtype)


LOSS_EXAMPLE = "loss=lambda out, y: (out[:, 0] - y).square()"
"""A loss for regression, which error messages show as an example of a user's own loss."""


def check_loss(peer: str, loss: Loss, outputs: Tensor, labels: Tensor) -> None:
    """Raise ModelError, which begins with `peer`, if a loss does not return one number for each sample."""
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(labels.shape)}"
    try:
        losses: Any = loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{peer}: the loss failed on {shapes}: {' '.join(str(error).split())}"
        ) from error
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (len(labels),):
        raise ModelError(
            f"{peer}: a loss must return one number for each sample, so shape ({len(labels)},) for {shapes}, "
            f"not {shape}; as in {LOSS_EXAMPLE}, or a torch loss with reduction='none'"
        )
