"""`gossamer fuse`: several networks become one, their cells matched instead of averaged by place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from . import console

if TYPE_CHECKING:
    from ...models.matching import Chain, Fusion
    from ..fusing.files import NetworkFile

ACTIVATIONS = ("relu", "sigmoid", "tanh", "none")


def fuse_command(
    files: Annotated[
        list[Path],
        typer.Argument(help="Networks as safetensors, of one depth; or a swarm's results folder."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The fused network.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    variance: Annotated[
        list[float] | None,
        typer.Option(help="σ²: one, or one per network. Lower it for larger networks."),
    ] = None,
    prior_variance: Annotated[float, typer.Option(help="σ0² of the prior.")] = 10.0,
    mass: Annotated[float, typer.Option(help="γ0: raise it for more cells.")] = 1.0,
    kind: Annotated[
        str, typer.Option(help="The prior on sizes: printed (the paper's), set or efpf.")
    ] = "printed",
    kl: Annotated[
        float, typer.Option("--kl", help="MAGI's λ from 0 to 1: raise it for fewer cells.")
    ] = 0.0,
    limit: Annotated[
        int, typer.Option(help="Cells per part, at most; the widest network always fits.")
    ] = 700,
    sweeps: Annotated[int, typer.Option(help="Passes over the networks, at most.")] = 20,
    shrink: Annotated[
        bool, typer.Option(help="Let the prior shrink what few networks agree on.")
    ] = True,
    bias_mean: Annotated[float, typer.Option(help="What biases started from.")] = 0.0,
    counts: Annotated[
        Path | None,
        typer.Option(help="JSON: samples per class, one list per network. Weighs the outputs."),
    ] = None,
    within_models: Annotated[
        bool, typer.Option("--within-models", help="Match only inside the same partial model.")
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(help="NAME,NAME,…: the layers as they run, for files that do not say it."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Report accuracies on this data set; see gossamer data.")
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="With --data: relu, sigmoid, tanh or none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Orders the sweeps.")] = 0,
) -> None:
    """Fuse networks whose cells are in another order, or of other widths, into one.

    Cells of different networks that do the same become one cell; the others are kept. The files may
    come from `gossamer swarm`, `gossamer join`, or from any torch network of dense layers. A folder
    stands for all networks in it, or in the latest of its runs: a finished swarm becomes one network. Files
    of gossamer say in which order their layers run; for others it follows from shapes and numbers, or
    --order says it.
    """
    from ...models.matching import MatchOptions, fuse
    from ..fusing.files import (
        check_target,
        model_groups,
        network_files,
        read_counts,
        read_network,
        write_network,
    )

    check_target(out, force=force)
    files = network_files(files, out)
    given = variance or [1.0]
    options = MatchOptions(
        variance=given[0] if len(given) == 1 else 1.0,
        prior_variance=prior_variance,
        mass=mass,
        kind=kind,  # type: ignore[arg-type]  (MatchOptions refuses others by name)
        kl=kl,
        limit=limit,
        sweeps=sweeps,
        shrink=shrink,
    )
    layers = None if order is None else [name.strip() for name in order.split(",")]
    networks = [read_network(path, layers) for path in files]
    chains = [network.chain for network in networks]
    fused = fuse(
        chains,
        options,
        variances=given if len(given) > 1 else None,
        counts=read_counts(counts) if counts else None,
        bias_mean=bias_mean,
        groups=model_groups(networks) if within_models else None,
        names=[network.name for network in networks],
        seed=seed,
    )
    scores = _scores(data, activation, networks, fused.chain) if data else None
    dtype = networks[0].dtype
    write_network(out, fused.chain, dtype, {"fusion": json.dumps(_summary(fused, files, scores))})
    _report(fused, networks, scores)
    console.wrote([out])


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("fuse")(fuse_command)


def _summary(
    fused: Fusion, files: Sequence[Path], scores: Sequence[float] | None
) -> dict[str, object]:
    """What the file says about where it comes from."""
    return {
        "files": [path.name for path in files],
        "widths": list(fused.chain.widths),
        "objective": fused.objective,
        "accuracy": scores[-1] if scores else None,
    }


def _report(fused: Fusion, networks: Sequence[NetworkFile], scores: Sequence[float] | None) -> None:
    from ...models.matching import part_names

    rows = []
    for index, (name, part) in enumerate(zip(part_names(fused.chain), fused.parts, strict=True)):
        inputs = sum(len(cells) for cells in part.assignments)
        widest = max(len(cells) for cells in part.assignments)
        rows.append(
            (
                name, inputs, fused.chain.widths[index + 1], part.matched,
                fused.chain.widths[index + 1] - widest, f"{part.objective[-1]:.1f}",
                f"{part.ended}, {part.sweeps}",
            )
        )  # fmt: skip
    # created: beyond the widest network; matched: given cells that share theirs with another network's
    header = ["part", "given", "fused", "matched", "created", "objective", "ended, sweeps"]
    if rows:
        console.table("cells, part by part", header, rows)
    sizes = [
        (network.name, "=".join(map(str, network.chain.widths)), network.chain.size)
        for network in networks
    ]
    total = sum(network.chain.size for network in networks)
    sizes.append(("fused", "=".join(map(str, fused.chain.widths)), fused.chain.size))
    if scores:
        console.table(
            "networks",
            ["network", "layout", "parameters", "accuracy"],
            [(*row, f"{score:.3f}") for row, score in zip(sizes, scores, strict=True)],
        )
    else:
        console.table("networks", ["network", "layout", "parameters"], sizes)
    console.out.print(f"fused size: {fused.chain.size / total:.1%} of all networks together")


def _scores(
    data: str, activation: str | None, networks: Sequence[NetworkFile], fused: Chain
) -> list[float]:
    """Accuracy of every network, the fused one last."""
    from ...models import ModelError
    from ..data import load
    from ..papers.fusing_local import accuracy, has_slopes, logits

    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"--activation {activation}: there are {', '.join(ACTIVATIONS)}")
    if activation is None and fused.hidden and not has_slopes(fused):
        raise ConfigError(
            "--data needs --activation as well, for files do not say what hidden cells compute: "
            f"{', '.join(ACTIVATIONS)}"
        )
    found = load(data)
    samples = found.test or found.train
    inputs, outputs = fused.widths[0], fused.widths[-1]
    x = samples.flat()
    if x.shape[1] != inputs or found.classes > max(outputs, 2):
        raise ModelError(
            f"--data {data}: has {x.shape[1]} inputs and {found.classes} classes, the networks have "
            f"{inputs} inputs and {outputs} outputs"
        )
    return [
        accuracy(logits(chain, x, activation or "relu"), samples.y)
        for chain in [*(network.chain for network in networks), fused]
    ]
