"""Which learners train together: equal networks and settings share a stack, the rest runs as it is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ...models import AssociativeLearner, Learner, SgdLearner
from . import plan
from .associative import AssociativeGroup
from .chain import Chain, read_chain
from .engines import ChainEngine, ModuleEngine
from .group import Group, LoopGroup, SgdGroup
from .rules import Rule, read_rule, steps_taken

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Kind:
    """Learners that may share a stack. `why_not` is set where learners have to run by themselves."""

    key: Hashable
    places: list[int] = field(default_factory=list)
    rule: Rule | None = None
    why_not: str = ""


def sort(learners: Sequence[Learner]) -> list[Kind]:
    """The learners by kind, in the order of each kind's first learner."""
    kinds: dict[Hashable, Kind] = {}
    for place, learner in enumerate(learners):
        kind = _kind(learner)
        kinds.setdefault(kind.key, kind).places.append(place)
    return list(kinds.values())


def form(kind: Kind, learners: Sequence[Learner], device: torch.device | None) -> Group:
    """Stack the learners of a kind, or leave them as they are."""
    chosen: list[Any] = [learners[place] for place in kind.places]
    if kind.why_not:
        return LoopGroup(kind.places, chosen)
    where = device or chosen[0].network.flat.device
    if isinstance(chosen[0], AssociativeLearner):
        return AssociativeGroup(kind.places, chosen, where)
    one: SgdLearner = chosen[0]
    assert kind.rule is not None
    chain = _chain(one)
    if chain is not None:
        return SgdGroup(kind.places, chosen, ChainEngine(chain, one.loss), kind.rule, where)
    inputs, labels = one.samples[0][:1].to(where), one.samples[1][:1].to(where)
    engine = ModuleEngine(one.network.module, one.loss, inputs, where)
    if engine.objection(one.network.flat[None].to(where), inputs[None], labels[None]):
        return LoopGroup(kind.places, chosen)
    return SgdGroup(kind.places, chosen, engine, kind.rule, where)


def _kind(learner: Learner) -> Kind:
    flat = learner.network.flat
    if type(learner) is AssociativeLearner:
        module = learner.module
        shape, threshold = tuple(module.hidden.shape), module.threshold
        settings = (learner.stretch, learner.rate, flat.dtype, flat.device)
        return Kind(("associative", shape, threshold, settings, learner.samples.dtype))
    if type(learner) is not SgdLearner:
        return Kind(
            ("loop", type(learner)), why_not=f"{type(learner).__name__} is not known to stack"
        )
    if not len(learner.samples[1]):
        return Kind("relay", why_not="it has no training samples")
    rule, count, module = read_rule(learner), steps_taken(learner), learner.network.module
    if rule is None or count is None:
        return Kind("optimizer", why_not="its optimizer has no stacked form")
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return Kind("frozen", why_not="some of its parameters are frozen")
    chain = _chain(learner)
    if chain is None and any(True for _ in module.buffers()):
        return Kind("buffers", why_not="its module has buffers")
    large = learner.batch * learner.samples[0][0].numel() > plan.LARGE_IMAGES
    if large and any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return Kind("images", why_not="its convolutions are faster one by one")
    what = chain if chain is not None else signature(module)
    key = (
        what, rule, count, learner.loss, learner.stretch, learner.batch, learner.reduction,
        flat.dtype, flat.device, tuple(learner.samples[0].shape[1:]), learner.held_out[0].dtype,
        learner.right, learner.samples[1].dtype, tuple(learner.samples[1].shape[1:]),
    )  # fmt: skip
    return Kind(key, rule=rule)


def _chain(learner: SgdLearner) -> Chain | None:
    """What its module computes, if batched products can do it and count what is right."""
    return None if learner.right else read_chain(learner.network.module, learner.loss)


def signature(module: nn.Module) -> Hashable:
    """What decides how a module computes, besides the values of its parameters."""
    found: list[Hashable] = []
    for name, part in module.named_modules():
        own = {key: _token(value) for key, value in vars(part).items() if key not in _OF_TORCH}
        own.pop("training", None)
        hooks = len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks)
        found.append((name, type(part), tuple(sorted(own.items())), id(part) if hooks else 0))
    shapes = tuple((name, tuple(value.shape)) for name, value in module.named_parameters())
    return tuple(found), shapes


def _token(value: Any) -> str:
    """Plain values by what they are, anything else by which object it is."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return repr([_token(item) for item in value])
    return f"{type(value).__qualname__} at {id(value)}"
