"""Aligning by what cells answer: correlations on the peer's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from ..anatomy import Part
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
    if any(parameter.private for parameter in anatomy.parameters):
        raise ModelError(
            'align: by activations hears nothing through norms that are private (buffers="local"); align by '
            "weights"
        )
    chosen = [anatomy.parts[part] for part in parts]
    names = [part.name for part in chosen]
    flat = network.flat.double().cpu().numpy()
    own = _answers(_with_values(network, np.where(known, flat, 0.0)), chosen, inputs)
    theirs = _answers(_with_values(network, np.where(known, values, 0.0)), chosen, inputs)
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


def _with_values(network: SlicedNetwork, flat: np.ndarray) -> nn.Module:
    """A copy of the network's module with other values, ready to answer."""
    other = deepcopy(network.module).eval()
    anatomy = network.slicing.anatomy
    tensors: dict[str, Tensor] = dict(other.named_parameters()) | dict(other.named_buffers())
    for one in anatomy.parameters:
        first = anatomy.offsets[one.name]
        piece = torch.from_numpy(flat[first : first + one.size])
        tensors[one.name].data = piece.to(tensors[one.name]).view(one.shape)
    if anatomy.buffers:  # statistics of the peer's own do not fit other values: take the batch's
        for norm in other.modules():
            if isinstance(norm, _BatchNorm):
                norm.train()
    return other


@torch.no_grad()
def _answers(module: nn.Module, parts: Sequence[Part], inputs: Tensor) -> dict[str, np.ndarray]:
    """For every part its layer's outputs [answers, cells], standardised; silent cells give zeros."""
    layers = dict(module.named_modules())
    for part in parts:
        if not isinstance(layers.get(part.name), nn.Linear | _ConvNd):
            raise ModelError(
                "align: by activations needs parts named after a dense layer or a convolution, which "
                f"{part.name!r} is not; name those to align with parts=, or align by weights"
            )
    caught: dict[str, np.ndarray] = {}

    def catch(part: Part) -> RemovableHandle:
        def hook(layer: nn.Module, _: object, output: Tensor) -> None:
            channel = -1 if isinstance(layer, nn.Linear) else 1
            answers = output.movedim(channel, -1).flatten(0, -2).double().cpu().numpy()
            if answers.shape[1] != part.cells:
                raise ModelError(
                    f"align: layer {part.name!r} has {answers.shape[1]} outputs for {part.cells} cells, so "
                    "by activations does not say whose they are; align it by weights"
                )
            answers = answers - answers.mean(axis=0)
            length = np.linalg.norm(answers, axis=0)
            caught[part.name] = answers / np.where(length > 0, length, 1)

        return layers[part.name].register_forward_hook(hook)

    hooks = [catch(part) for part in parts]
    module(inputs)
    for hook in hooks:
        hook.remove()
    return caught
