"""Aligning by what cells answer: correlations on the peer's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from ..network import SlicedNetwork


def by_activations(
    network: SlicedNetwork,
    values: np.ndarray,
    known: np.ndarray,
    models: Sequence[str],
    parts: Sequence[int],
    inputs: Tensor | None,
) -> tuple[np.ndarray, list[float]]:
    """Correlate what the cells of both networks answer to the same inputs.

    What the reference does not give is silent in both, or private cells would be compared with
    nothing. Returns as `by_weights` does.
    """
    if inputs is None or len(inputs) < 2:
        raise ModelError(
            "align: by activations needs inputs, at least two of the peer's own samples"
        )
    slicing = network.slicing
    anatomy = slicing.anatomy
    names = [anatomy.parts[part].name for part in parts]
    flat = network.flat.double().cpu().numpy()
    own = _answers(_with_values(network.module, np.where(known, flat, 0.0)), names, inputs)
    theirs = _answers(_with_values(network.module, np.where(known, values, 0.0)), names, inputs)
    take = np.arange(int(anatomy.firsts[-1]))
    before = after = 0.0
    for part, name in zip(parts, names, strict=True):
        for model in models:
            cells = slicing.cells[model][part]
            if not len(cells):
                continue
            score = own[name][:, cells].T @ theirs[name][:, cells]
            _, best = linear_sum_assignment(-score.T)
            before += float(np.trace(score))
            after += float(score[best, np.arange(len(cells))].sum())
            first = anatomy.firsts[part]
            take[first + cells] = first + cells[best]
    return take, [before, after]


def _with_values(module: nn.Module, flat: np.ndarray) -> nn.Module:
    """A copy of a module with other values."""
    other = deepcopy(module)
    offset = 0
    for parameter in other.parameters():
        piece = torch.from_numpy(flat[offset : offset + parameter.numel()])
        parameter.data = piece.to(parameter).view(parameter.shape)
        offset += parameter.numel()
    return other


@torch.no_grad()
def _answers(module: nn.Module, names: Sequence[str], inputs: Tensor) -> dict[str, np.ndarray]:
    """For every named layer its outputs [samples, cells], standardised; silent cells give zeros."""
    layers = dict(module.named_modules())
    if unknown := [name for name in names if name not in layers]:
        raise ModelError(
            f"align: by activations needs parts named after layers; there is no layer {unknown[0]!r}"
        )
    caught: dict[str, np.ndarray] = {}

    def catch(name: str) -> RemovableHandle:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            answers = output.double().cpu().numpy()
            answers = answers - answers.mean(axis=0)
            length = np.linalg.norm(answers, axis=0)
            caught[name] = answers / np.where(length > 0, length, 1)

        return layers[name].register_forward_hook(hook)

    hooks = [catch(name) for name in names]
    module.eval()(inputs)
    for hook in hooks:
        hook.remove()
    return caught
