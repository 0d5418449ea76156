"""Learners, which train the network of a peer: the protocol, and gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from math import ceil, inf, nan
from numbers import Integral, Real
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import hint_arguments

from .discovery import run_once
from .errors import ModelError, check_choice, check_number
from .metrics import (
    LOSS_EXAMPLE,
    LOSSES,
    IsCorrect,
    Loss,
    Metric,
    Metrics,
    check_loss,
    check_metrics,
    cross_entropy,
    decision_threshold,
    find_loss,
    find_metrics,
    measure,
)
from .network import SlicedNetwork, naming_single_samples
from .optimizers import (
    NameOrTable,
    OptimizerFactory,
    RuleOptimizer,
    Scheduler,
    SchedulerFactory,
    Sgd,
    find_optimizer,
    find_scheduler,
)


@runtime_checkable
class Learner(Protocol):
    """An object that trains the network of a peer.

    A learner trains in *learner steps*, each of many gradient steps; the paper calls one a mini-batch. Values
    are averaged after every learner step, or after several (`every` in a config). `state` and `restore` save
    what a restart needs besides the network itself. A learner that takes new samples while it runs is a
    SampleTaker too.
    """

    network: SlicedNetwork

    def train(self, steps: int) -> Metrics:
        """Train for `steps` learner steps, and return metrics of the samples trained on."""
        ...

    def test(self) -> Metrics:
        """Measure the network on the peer's own test data, without changing it."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizer, the position in the data and the random state.

        It consists of numbers, text, lists, dicts and tensors, so that a checkpoint can hold it.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, so that training continues from there."""
        ...


NewSamples = tuple[Tensor, Tensor]
"""The inputs, of shape [n, …], and the labels, of shape [n], of new samples."""


@runtime_checkable
class SampleTaker(Protocol):
    """A learner that takes new samples while it runs."""

    data: Callable[[], NewSamples | None] | None
    """A live peer calls this function between two rounds, on the thread that trains. It returns new samples,
    or None if there are none; it may also call `add_samples` itself. If it raises, that is logged, and the
    peer trains on with what it has."""
    window: int | None
    """How many training samples are kept, the newest; None for all."""

    def add_samples(self, inputs: Tensor, labels: Tensor) -> None:
        """Add training samples, and forget the oldest beyond `window`."""
        ...


@runtime_checkable
class WeightAware(Protocol):
    """A learner that uses its peer's push-sum weights; the peer or simulator sets `weight_of`."""

    weight_of: Callable[[str], float]
    """Returns the peer's current push-sum weight of a partial model, in units of what a peer starts with."""


@runtime_checkable
class PeerCountAware(Protocol):
    """A learner that uses the number of peers; the peer or simulator sets `peers_seen`."""

    peers_seen: Callable[[], float]
    """Returns how many peers of the swarm the peer has discovered so far, itself included."""


@runtime_checkable
class Scorer(Protocol):
    """A learner that can test the values of other peers on its own samples.

    Steady gossip (gossamer.gossip.robust) gives values with a high loss less influence.
    """

    def score(self, values: Mapping[str, Tensor | np.ndarray[Any, Any]]) -> float:
        """Return the mean loss of the peer's network, on a few training samples, with these values in it.

        values: by partial model; the other parameters stay the peer's own. The network has its own values
        again when the method returns. NaN without samples.
        """
        ...


SCORED_SAMPLES = 64
"""Training samples with which a learner scores values. With more, scores have less noise and take longer."""
SCORE_EVERY = 10
"""In steady gossip, one training sample in so many is not trained on, and scores values instead. A lower
number makes scores less noisy, and leaves peers fewer samples to learn from."""
MIN_SCORED = 10
"""The fewest samples to set aside for scoring: with fewer to spare, a peer scores with training samples."""


class SgdLearner:
    """Trains a network by gradient descent on the peer's own samples.

    network
        The peer's sliced network.
    train, test
        Inputs [n, …] and integer labels [n]; with your own loss function also float targets [n, …]. They are
        moved to the network's device. A peer without training samples does not train, but still averages;
        without test samples its accuracy is NaN, and means over peers leave it out.
    local_samples
        Samples per learner step, after which values are averaged: the paper's mini-batch size. Raise it to
        communicate less often; lower it when the peers' values move apart while they train.
    batch
        Samples per gradient step. 1 is the paper's per-sample descent; 10 with `reduction="sum"` learns
        about as well in a tenth of the steps.
    reduction
        How the losses of a batch are combined: `mean`, or `sum` as in the paper, which makes a step as long
        as the steps of its samples together.
    rate, optimizer
        Plain SGD with learning rate `rate`, or another optimizer: `momentum`, `adam`, the name of one in
        torch.optim (`AdamW`), a table of name and arguments (`{"name": "SGD", "nesterov": True, …}`), or a
        function, as in `lambda p: Adam(p, 1e-3)`. Rate 0 turns learning off, for comparison.
    scheduler
        Changes the learning rate after each call of `train`, which is each round: the name of a class in
        torch.optim.lr_scheduler, a table of name and arguments (`{"name": "StepLR", "step_size": 30}`), or a
        function of the optimizer. It needs an optimizer of torch; `sgd`, `momentum` and `adam` are
        torch's then. ReduceLROnPlateau follows the mean loss of the samples trained on.
    proximal
        μ of FedProx's penalty for moving away from the last average (Li et al. 2020):

            h(w) = F(w) + μ/2 · ‖w − w_t‖²,    w_t: the values when training began

        Raise it when peers' data differ and their models diverge, lower it to learn faster. F is the mean
        loss of a batch, also if `reduction` is `sum`. In `server` mode with one model of all cells this is
        FedProx; in the other modes, and with partial models, w_t are the values after the last gossip.
    loss
        `cross-entropy` (the outputs are logits), `squared`, the name of a loss in torch.nn (`HuberLoss`), a
        table of name and arguments, or a function of (outputs, labels) that returns one number per sample.
    right
        A function of (outputs, labels) that returns for each sample whether it is correct, for accuracy. By
        default the largest output is the predicted class; a single output predicts class 1 above 0.5, or
        above 0 with `cross-entropy` and `BCEWithLogitsLoss`. For your own loss of a logit, use
        `right=lambda out, y: (out[:, 0] > 0) == y`. Without it, accuracy is NaN for float targets.
    metrics
        What a test measures besides accuracy and loss: names of METRICS (`f1`, `auc`, `class-accuracy`; for
        regression `mae`, `mse`, `rmse`, `r2`), or functions of (outputs, labels) that return a number, or
        several by name. See models/metrics.py.
    log_prior
        The logarithms of the peer's class shares, one for each output; they are added to the network's
        outputs in training and in tests, before `loss` and `right`. If peers differ only in how frequent
        their classes are, one network then serves them all: see models/prior.py. The network itself stays
        without it: add it to the outputs wherever the peer uses the network. For `cross-entropy` with two
        outputs or more.
    seed
        Seeds the order of the samples. Every epoch has a new permutation; training continues in it where the
        last training stopped.
    data, window
        For live peers that take new samples while they run: see SampleTaker. A test is still on `test`; to
        follow a change of the data, let `data` replace the attribute `held_out`.
    score_every
        One training sample in `score_every` is not trained on, but used to score other peers' values. Set it
        in steady gossip (SCORE_EVERY was found by measurement): samples that a network was trained on say
        little about values of others. By default (0), and if fewer than MIN_SCORED samples can be set aside,
        values are scored with training samples.
    """

    @hint_arguments
    def __init__(
        self,
        network: SlicedNetwork,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        *,
        local_samples: int = 500,
        batch: int = 10,
        reduction: Literal["sum", "mean"] = "mean",
        rate: float = 0.1,
        optimizer: OptimizerFactory | NameOrTable | None = None,
        scheduler: SchedulerFactory | NameOrTable | None = None,
        proximal: float = 0.0,
        loss: NameOrTable | Loss = "cross-entropy",
        right: IsCorrect | None = None,
        metrics: Sequence[str | Metric] = (),
        log_prior: Tensor | None = None,
        seed: int = 0,
        data: Callable[[], NewSamples | None] | None = None,
        window: int | None = None,
        score_every: int = 0,
    ):
        if not isinstance(network, SlicedNetwork):
            raise ModelError(
                f"a learner trains a SlicedNetwork, not a {type(network).__name__}; wrap the module first: "
                "SlicedNetwork(module, slices)"
            )
        for name, count in (("local_samples", local_samples), ("batch", batch), ("window", window)):
            if count is not None and (not isinstance(count, Integral) or count < 1):
                raise ModelError(f"{name} is {count!r}; it must be a whole number, at least 1")
        if score_every < 0 or score_every == 1:
            raise ModelError(
                f"score_every is {score_every}; give 0 for none, or 2 or more: 1 leaves no sample to train on"
            )
        check_choice("reduction", reduction, ("mean", "sum"))
        if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate < inf:
            raise ModelError(
                f"rate {rate!r}: give a number of at least 0 (0 learns nothing), as in 0.1"
            )
        check_number("the proximal term's strength", proximal, least=0)
        for samples in (train, test):
            if not isinstance(samples, tuple | list):
                raise ModelError(
                    f"peer {network.peer!r}: give samples as a pair of tensors, inputs and labels, not a "
                    f"{type(samples).__name__}; LoaderLearner takes a Dataset or DataLoader of torch"
                )
        if len(train[0]) != len(train[1]):
            raise ModelError(
                f"peer {network.peer!r}: {len(train[0])} training inputs with {len(train[1])} labels; "
                "give one label for each input"
            )
        train, test = self._on_device(network, train), self._on_device(network, test)
        if optimizer is None and scheduler is not None:
            optimizer = "sgd"
        if isinstance(optimizer, str | Mapping):
            in_torch = scheduler is not None
            optimizer = find_optimizer(optimizer, float(rate), in_torch=in_torch)
        if isinstance(scheduler, str | Mapping):
            scheduler = find_scheduler(scheduler)
        for kind, factory in (("optimizer", optimizer), ("scheduler", scheduler)):
            if factory is not None and not callable(factory):
                raise ModelError(f"{kind} {factory!r}: give a name, a table, or a function")
        self.loss: Loss = find_loss(loss) if isinstance(loss, str | Mapping) else loss
        # How many outputs the network has per sample; None without samples, or if outputs are not a matrix.
        self._output_count: int | None = None
        for purpose, (inputs, labels) in (("training", train), ("test", test)):
            self._check(network, purpose, inputs, labels)
        self.network = network
        self.score_every, self._samples_received = score_every, 0
        self.scored = train[0][:0], train[1][:0]
        """The samples that are not trained on, but used by `score`."""
        self.samples, self.held_out = self._set_aside(*train), test
        self.local_samples, self.batch, self.reduction = local_samples, batch, reduction
        self.proximal = proximal
        self.right, self.metrics = right, find_metrics(metrics)
        check_metrics(network.peer, self.metrics, test[1], self._output_count)
        self.threshold = decision_threshold(self.loss)
        parameters = list(network.parameters.values())
        if not any(parameter.requires_grad for parameter in parameters):
            raise ModelError(
                f"peer {network.peer!r}: all parameters of the network are frozen (requires_grad=False), so "
                "gradient descent trains nothing; leave those to train unfrozen"
            )
        self._frozen_digest = network.frozen_digest()
        self.optimizer = optimizer(parameters) if optimizer else Sgd(parameters, float(rate))
        if scheduler is not None and isinstance(self.optimizer, RuleOptimizer):
            raise ModelError(
                f"peer {network.peer!r}: a scheduler needs an optimizer of torch, not "
                f"{type(self.optimizer).__name__} of gossamer.models: write optimizer='SGD', for example"
            )
        self.scheduler: Scheduler | None = None
        self._make_scheduler = scheduler
        if scheduler is not None:
            self.scheduler = scheduler(cast("torch.optim.Optimizer", self.optimizer))
        self.generator = torch.Generator().manual_seed(seed)
        self.order = np.empty(0, np.int64)  # an array, because slices of it are taken much faster
        self.log_prior = log_prior
        self.data, self.window = data, window

    @property
    def log_prior(self) -> Tensor | None:
        """The values that are added to the network's outputs, one for each class; None for none.

        Setting it changes the next training and test. Raises ModelError for values that do not fit.
        """
        return self._log_prior

    @log_prior.setter
    def log_prior(self, values: Tensor | None) -> None:
        if values is not None:
            _check_log_prior(self.network.peer, values, self.loss, self._output_count)
            values = values.detach().to(self.network.flat)
        self._log_prior = values

    @staticmethod
    def _on_device(network: SlicedNetwork, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return samples on the network's device; anything but tensors as it is, for `_check` to refuse."""
        if not all(isinstance(tensor, Tensor) for tensor in samples):
            return samples
        inputs, labels = samples
        return inputs.to(network.flat.device), labels.to(network.flat.device)

    def _check(self, network: SlicedNetwork, purpose: str, inputs: Tensor, labels: Tensor) -> None:
        """Raise ModelError for samples that do not fit the network and the loss."""
        custom_loss = None if self.loss in LOSSES.values() else self.loss
        outputs = _check_samples(network, purpose, inputs, labels, custom_loss)
        if outputs is not None and outputs.ndim == 2:
            self._output_count = outputs.shape[1]

    def add_samples(self, inputs: Tensor, labels: Tensor) -> None:
        """Add training samples, and forget the oldest beyond `window`; a new epoch begins.

        Numbers of another precision than the network's are converted. Raises ModelError, and changes nothing,
        for samples that do not fit the network or the samples it has.
        """
        dtype = self.network.flat.dtype
        if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
            self._check(self.network, "new", inputs, labels)  # raises
        inputs, labels = self._on_device(self.network, (inputs, labels))
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        labels = labels.to(dtype if labels.is_floating_point() else torch.int64)
        self._check(self.network, "new", inputs, labels)
        old_inputs, old_labels = self.samples
        differ = inputs.shape[1:] != old_inputs.shape[1:] or inputs.dtype != old_inputs.dtype
        if len(old_labels) and differ:
            raise ModelError(
                f"peer {self.network.peer!r}, new samples: inputs are {inputs.dtype} of shape "
                f"{tuple(inputs.shape[1:])}, those before were {old_inputs.dtype} of shape "
                f"{tuple(old_inputs.shape[1:])}"
            )
        inputs, labels = self._set_aside(inputs, labels)
        if len(old_labels):
            inputs, labels = torch.cat([old_inputs, inputs]), torch.cat([old_labels, labels])
        if self.window is not None and len(labels) > self.window:
            # Cloned: a view would keep the forgotten samples in memory.
            inputs, labels = inputs[-self.window :].clone(), labels[-self.window :].clone()
        self.samples, self.order = (inputs, labels), self.order[:0]

    def _set_aside(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Set one of `score_every` new samples aside for `score`, and return the others.

        At most SCORED_SAMPLES are set aside; when newer ones come, the oldest are forgotten.
        """
        self._samples_received += (count := len(labels))
        if not self.score_every or self._samples_received < MIN_SCORED * self.score_every:
            return inputs, labels
        every = max(self.score_every, ceil(count / SCORED_SAMPLES))
        last = self._samples_received
        is_set_aside = torch.arange(last - count, last, device=labels.device) % every == every - 1
        self.scored = tuple(
            torch.cat([old, new[is_set_aside]])[-SCORED_SAMPLES:]
            for old, new in zip(self.scored, (inputs, labels), strict=True)
        )
        return inputs[~is_set_aside], labels[~is_set_aside]

    def add_prior(self, outputs: Tensor) -> Tensor:
        """Return outputs of the network, [n, classes], with the log-prior added if there is one."""
        return outputs if self._log_prior is None else outputs + self._log_prior

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample; the log-prior is added to `outputs`, which the network returned."""
        return self.loss(self.add_prior(outputs), labels)

    def train(self, steps: int = 1) -> Metrics:
        """Train on `local_samples` samples, `steps` times.

        Returns metrics of the samples, each by the network's outputs just before the step that used them.
        """
        if not len(self.samples[1]):
            return Metrics()
        if not self.proximal:
            return self._train(steps)
        start = self.network.flat.detach().clone()
        strength = self.proximal * (self.batch if self.reduction == "sum" else 1)
        with adding_to_gradient(self, lambda w: strength * (w - start)):
            return self._train(steps)

    def _train(self, steps: int) -> Metrics:
        """Train as `train` does, but without adding a proximal term."""
        self.network.set_training()
        loss, correct, remaining = 0.0, 0.0, steps * self.local_samples
        while remaining:
            # A batch never spans two learner steps, because peers average between them.
            remaining_in_step = (remaining - 1) % self.local_samples + 1
            inputs, labels = self._next_batch(min(self.batch, remaining_in_step))
            with naming_single_samples(self.network.peer, inputs):
                outputs = self.add_prior(self.network.module(inputs))
            losses = self.loss(outputs, labels)
            self.optimizer.zero_grad(set_to_none=True)
            (losses.sum() if self.reduction == "sum" else losses.mean()).backward()
            self.optimizer.step()
            loss += float(losses.detach().sum())
            correct += float(self._are_correct(outputs, labels).sum())
            remaining -= len(labels)
        metrics = Metrics(loss, correct, steps * self.local_samples)
        self.advance_schedule(metrics)
        return metrics

    def _next_batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of the next training samples, at most `count`, and advance past them."""
        drawn = self.draw(count)
        return self.samples[0][drawn], self.samples[1][drawn]

    def _held_out_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and labels of all held-out samples, 1000 at a time."""
        inputs, labels = self.held_out
        for first in range(0, len(labels), 1000):
            yield inputs[first : first + 1000], labels[first : first + 1000]

    def advance_schedule(self, metrics: Metrics, *, stacked: bool = False) -> None:
        """Let the scheduler set the rate of the next round; metrics: of the samples just trained on.

        stacked: the steps were taken by a stack, not by the optimizer itself.
        """
        if self.scheduler is None:
            return
        if stacked:
            # A step without gradients, which changes nothing: a scheduler warns if no step came before.
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.step()
        try:
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(metrics.mean_loss)
            else:
                self.scheduler.step()
        except ValueError as error:  # of a schedule with an end
            raise ModelError(
                f"peer {self.network.peer!r}: the scheduler cannot set another rate: {error}; give it as "
                "many steps as there are rounds"
            ) from error

    def test(self) -> Metrics:
        """Measure accuracy and loss on the held-out samples.

        With `buffers="recompute"`, batch norm statistics are first recomputed from the training samples,
        because averaging has changed the weights since.
        """
        total, kept = Metrics(), list[tuple[Tensor, Tensor]]()
        for losses, correct, outputs, labels in self._test_batches():
            total += Metrics(float(losses.sum()), float(correct.sum()), len(losses))
            kept += [(outputs, labels)] if self.metrics else []
        if not kept:
            return total
        all_outputs, all_labels = (torch.cat(batches) for batches in zip(*kept, strict=True))
        return replace(total, named=self.measure(all_outputs, all_labels))

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, tuple[float, float]]:
        """Return the named metrics of all test samples; outputs: with the log-prior."""
        is_single = not labels.is_floating_point() and outputs.ndim == 2 and outputs.shape[1] == 1
        return measure(self.metrics, outputs - self.threshold if is_single else outputs, labels)

    def score(self, values: Mapping[str, Tensor | np.ndarray[Any, Any]]) -> float:
        """Return the mean loss with these values, on at most SCORED_SAMPLES of its samples; see Scorer.

        The samples are those that `score_every` keeps from training, else training samples. Every call uses
        the same, evenly spaced ones, so that all classes are among them even if samples are sorted by class.
        Every class counts equally: otherwise a peer with few samples of a class would not notice values that
        are bad at that class only.
        """
        inputs, labels = self.scored if len(self.scored[1]) >= MIN_SCORED else self.samples
        count = len(labels)
        if not count:
            return nan
        chosen = torch.arange(min(count, SCORED_SAMPLES)) * count // min(count, SCORED_SAMPLES)
        own_values = {model: self.network.read(model) for model in values}
        for model, value in values.items():
            # Copied: torch warns about arrays that are not writable.
            self.network.write(model, value if isinstance(value, Tensor) else torch.tensor(value))
        try:
            self.network.module.eval()
            with torch.no_grad():
                outputs = self.network.module(inputs[chosen])
                losses = self.losses(outputs, labels[chosen])
                return float(losses @ _class_weights(labels[chosen]).to(losses))
        finally:
            for model, value in own_values.items():
                self.network.write(model, value)

    def test_samples(self) -> tuple[Tensor, Tensor]:
        """Return the loss of each held-out sample, and whether it is correct (1, 0, or NaN in regression)."""
        batches = list(self._test_batches())
        if not batches:
            return self.network.flat.new_empty(0), self.network.flat.new_empty(0)
        losses, correct, *_ = zip(*batches, strict=True)
        return torch.cat(losses), torch.cat(correct).to(losses[0].dtype)

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield losses, whether samples are correct, outputs and labels of held-out samples, in batches."""
        if self.network.buffers == "recompute" and len(self.held_out[1]) and len(self.samples[1]):
            self.network.recompute(self.samples[0])
        self.network.module.eval()
        for inputs, labels in self._held_out_batches():
            with torch.no_grad():
                outputs = self.add_prior(self.network.module(inputs))
                losses, correct = self.loss(outputs, labels), self._are_correct(outputs, labels)
            yield losses, correct, outputs, labels

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state, the order of the samples left in this epoch, and the random state.

        Buffers that are not in the network's flat tensor are included too.
        """
        state: dict[str, Any] = {
            "optimizer": _deep_copy(self.optimizer.state_dict()),
            "order": torch.tensor(self.order.tolist(), dtype=torch.int64),
            "generator": self.generator.get_state(),
        }
        if self.scheduler is not None:
            items = self.scheduler.state_dict().items()
            state["scheduler"] = {
                key: _deep_copy(value) for key, value in items if _is_plain(value)
            }
        if frozen := self._frozen_digest:
            state["frozen"] = frozen
        if buffers := self.network.own_buffers():
            state["buffers"] = {name: value.clone() for name, value in buffers.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises ModelError if the frozen parameters are not those of the network that the state is from.
        """
        if state.get("frozen", "") != self._frozen_digest:
            raise ModelError(
                f"peer {self.network.peer!r}: the network's frozen parameters are not those that it was "
                "trained with: load the same values into them as before, or begin without the saved state"
            )
        if self.scheduler is not None and self._make_scheduler is not None:
            # Made anew, because one that was copied does not notice the optimizer's steps.
            self.scheduler = self._make_scheduler(self.scheduler.optimizer)
        # A copy: torch's optimizers go on with the tensors that they are given.
        self.optimizer.load_state_dict(_deep_copy(state["optimizer"]))
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        self.order = state["order"].numpy().copy()
        if len(self.order) and int(self.order.max()) >= self.sample_count:
            self.order = self.order[:0]  # samples added while it ran are not restored
        self.generator.set_state(state["generator"])
        for name, value in self.network.own_buffers().items():
            if name in state.get("buffers", {}):
                value.copy_(state["buffers"][name])

    @property
    def sample_count(self) -> int:
        """How many training samples an epoch has."""
        return len(self.samples[1])

    def draw(self, count: int) -> Tensor:
        """Return the indices of the next `count` samples, and advance past them.

        Every epoch has a new permutation; a batch may span two epochs.
        """
        order = self.order
        if len(order) < count:
            samples = self.sample_count
            new_epochs = ceil((count - len(order)) / samples)
            epochs = (torch.randperm(samples, generator=self.generator) for _ in range(new_epochs))
            order = np.concatenate([order, *(epoch.numpy() for epoch in epochs)])
        self.order = order[count:]
        return torch.from_numpy(order[:count])

    def _are_correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return for each sample whether it is correct, or NaN in regression; see the argument `right`."""
        if self.right is not None:
            return self.right(outputs, labels)
        if labels.is_floating_point():
            return torch.full((len(labels),), nan, device=labels.device)
        if outputs.shape[1] == 1:
            return (outputs[:, 0] > self.threshold) == (labels > 0)
        return outputs.argmax(dim=1) == labels


def predicted_classes(learner: object, outputs: Tensor) -> Tensor:
    """Return the class of each row of a network's outputs, as the learner of the network decides it.

    The largest output is the class; of a single output, 1 above the learner's threshold and 0 below. With a
    log-prior, which only some learners have, it is added first.
    """
    sgd = learner if isinstance(learner, SgdLearner) else None
    if outputs.shape[1] == 1:
        return (outputs[:, 0] > (0.5 if sgd is None else sgd.threshold)).to(torch.int64)
    return (outputs if sgd is None else sgd.add_prior(outputs)).argmax(dim=1)


def predicted_scores(learner: object, outputs: Tensor) -> Tensor:
    """Return for each row of outputs how sure the network is of its class.

    A probability if the learner's loss is cross-entropy, or BCEWithLogitsLoss of a single output; else the
    class's output (the only one, if there is one).
    """
    sgd = learner if isinstance(learner, SgdLearner) else None
    if sgd is not None and outputs.shape[1] == 1 and not sgd.threshold:
        return torch.sigmoid(outputs[:, 0].abs())
    if sgd is not None and sgd.loss is cross_entropy:
        return torch.softmax(sgd.add_prior(outputs), dim=1).amax(dim=1)
    return outputs.amax(dim=1)


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint can hold a value; a scheduler has functions too, which it makes anew."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _deep_copy(value: Any) -> Any:
    """Copy deeply, like `deepcopy`, which would copy the whole storage behind a tensor that is a view."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_deep_copy(item) for item in value)
    return deepcopy(value)


@torch.no_grad()
def _check_samples(
    network: SlicedNetwork, purpose: str, inputs: Tensor, labels: Tensor, loss: Loss | None
) -> Tensor | None:
    """Raise, naming the peer, for samples on which torch would fail in the first training step.

    loss: the user's own loss function, if there is one; only then float targets are allowed.
    Returns the outputs for the first samples; None if there are no samples.
    """
    peer = f"peer {network.peer!r}, {purpose} samples"
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        raise ModelError(f"{peer}: give inputs and labels as torch tensors")
    count, dtype, is_regression = len(inputs), network.flat.dtype, labels.is_floating_point()
    # Integer inputs are tokens for an embedding, and need not have the network's dtype.
    if inputs.is_floating_point() and inputs.dtype != dtype:
        raise ModelError(f"{peer}: inputs are {inputs.dtype}, the network is {dtype}")
    actual = f"not {labels.dtype} of shape {tuple(labels.shape)}"
    if is_regression and loss is not None:
        if labels.dtype != dtype or labels.ndim < 1 or len(labels) != count:
            raise ModelError(
                f"{peer}: targets must be {dtype}, as the network is, and {count}, one for each input, "
                f"{actual}"
            )
    elif labels.dtype != torch.int64 or labels.shape != (count,):
        hint = f"; targets that are not classes need a loss of your own, as in {LOSS_EXAMPLE}"
        raise ModelError(
            f"{peer}: labels must be int64 of shape ({count},), {actual}{hint if is_regression else ''}"
        )
    if not count:
        return None
    try:
        outputs: Any = run_once(network.module, inputs[:2])
    except Exception as error:  # the user's module may raise anything
        raise ModelError(
            f"{peer}: inputs of shape {tuple(inputs.shape[1:])} do not fit the network: {error}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise ModelError(
            f"{peer}: the network returns a {type(outputs).__name__}; wrap it in a module that returns one "
            "tensor, the outputs to learn"
        )
    if loss is not None:
        check_loss(peer, loss, outputs, labels[:2])
    if is_regression:
        return outputs
    if outputs.ndim < 2:
        raise ModelError(
            f"{peer}: the network's outputs have the shape {tuple(outputs.shape)} for {len(outputs)} "
            "samples; to classify, it must return one row of outputs for each sample"
        )
    low, high, classes = int(labels.min()), int(labels.max()), max(outputs.shape[1], 2)
    if low < 0 or high >= classes:
        raise ModelError(
            f"{peer}: labels run from {low} to {high}, but the network's {outputs.shape[1]} outputs allow 0 "
            f"to {classes - 1}"
        )
    return outputs


def _check_log_prior(peer: str, values: Tensor, loss: Loss, outputs: int | None) -> None:
    """Raise, naming the peer, for a log-prior that cannot be added to a network's outputs."""
    peer = f"peer {peer!r}, log_prior"
    if loss is not cross_entropy:
        raise ModelError(
            f"{peer}: is added to logits, so the loss must be 'cross-entropy'; use that, or no prior"
        )
    if outputs == 1:
        raise ModelError(
            f"{peer}: needs one output for each class, and the network has a single output for two classes: "
            "give it two outputs, or use no prior"
        )
    if not isinstance(values, Tensor) or values.ndim != 1 or len(values) < 2:
        raise ModelError(
            f"{peer}: give a torch tensor with one value for each class, not {values!r}"
        )
    if outputs is not None and len(values) != outputs:
        raise ModelError(f"{peer}: has {len(values)} values, but the network has {outputs} outputs")
    if not bool(torch.isfinite(values).all()):
        raise ModelError(
            f"{peer}: all values must be finite; count a class without samples as rare, not as impossible"
        )


def _class_weights(labels: Tensor) -> Tensor:
    """Return a weight for each sample, with which all classes count equally; equal ones for float targets."""
    if labels.is_floating_point() or labels.ndim > 1:
        return torch.full((len(labels),), 1.0 / len(labels))
    _, class_of, counts = labels.unique(return_inverse=True, return_counts=True)
    return 1.0 / (len(counts) * counts[class_of])


GradientTerm = Callable[[Tensor], Tensor]
"""A function of a network's flat parameters that returns the term to add to their gradient."""


class CorrectedOptimizer:
    """Wraps an optimizer and changes the gradients before each of its steps."""

    def __init__(self, optimizer: Any, change_gradients: Callable[[], None]):
        self._optimizer, self._change_gradients = optimizer, change_gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """Change the gradients, then step."""
        self._change_gradients()
        self._optimizer.step()


@contextmanager
def adding_to_gradient(learner: SgdLearner, term: GradientTerm) -> Iterator[None]:
    """Make every step of the learner, inside the context, descend along gradient + term(parameters)."""
    optimizer, network = learner.optimizer, learner.network

    @torch.no_grad()
    def add_terms() -> None:
        terms = network.slicing.anatomy.views(term(network.flat))
        for name, parameter in network.parameters.items():
            gradient, summand = parameter.grad, terms[name]
            parameter.grad = summand.clone() if gradient is None else gradient + summand

    learner.optimizer = CorrectedOptimizer(optimizer, add_terms)  # type: ignore[assignment]
    try:
        yield
    finally:
        learner.optimizer = optimizer
