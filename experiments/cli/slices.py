"""`gossamer slices`: what a network is made of, and who shares which cells of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models import READY
from ..errors import ConfigError
from . import console
from .options import Force, Out, load_torch, results_for

if TYPE_CHECKING:
    from ...models import SlicedNetwork, SliceSpec

CLASSES = 10


def slices_command(
    module: Annotated[
        str,
        typer.Argument(
            help=f"A ready network ({', '.join(READY)}), a layout (64=32=10), module:function, or a "
            "config file.",
        ),
    ],
    give: Annotated[
        list[str] | None,
        typer.Option(
            help="MODEL=SHARE or MODEL=LAYOUT: global=0.8, 'global=*:0.8,head:0', group=0-8-10; repeat for "
            "more. global=0.8 if left out."
        ),
    ] = None,
    depends: Annotated[
        list[str] | None, typer.Option(help="MODEL=OTHER: the first depends on the second.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="The shape of one sample, as in 3x32x32.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the network's function: hidden=64, 'widths=[8, 16]'."),
    ] = None,
    buffers: Annotated[
        str, typer.Option(help="Batch statistics: average, local or recompute.")
    ] = "average",
    peer: Annotated[int, typer.Option(min=0, help="Of a config: whose network to show.")] = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Print the parts of a network, whose cells they are and who averages what, and draw it.

    A module that cannot be traced is an error that says which call is to blame.
    """
    if module.endswith(".toml"):
        given = {"--give": give, "--depends": depends, "--input": shape, "--option": option}
        if extra := [name for name, value in given.items() if value]:
            raise ConfigError(f"{extra[0]}: the config {module} says that already; leave it out")
        network, name = _of_config(Path(module), peer)
    else:
        network, name = _of_name(module, give or ["global=0.8"], depends, shape, option, buffers)
    file = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    results = results_for(out, Path("results/slices") / file, "slices", force=force)
    from .slice_pictures import table

    header, rows = table(network.slicing)
    console.table(f"{name}: {len(network.flat):,} values", header, rows)
    from .slice_pictures import draw_slices  # after the table: matplotlib takes a second

    with results.begun() as folder:
        title = f"{name}, {len(network.flat):,} values"
        console.print_written(draw_slices(network.slicing, folder / file, title))


def _of_config(path: Path, peer: int) -> tuple[SlicedNetwork, str]:
    from ..config.tables import load_config

    config = load_config(path)
    if peer >= config.peers:
        raise ConfigError(f"--peer {peer}: peers of {path} are 0 to {config.peers - 1}")
    load_torch()
    from ..build import Swarm

    return Swarm(config, str(path)).member(peer).network, config.name


def _of_name(
    name: str,
    give: Sequence[str],
    depends: Sequence[str] | None,
    shape: str | None,
    option: Sequence[str] | None,
    buffers: str,
) -> tuple[SlicedNetwork, str]:
    slices = {model: _spec(text, f"--give {model}") for model, text in _pairs(give, "--give")}
    order: dict[str, list[str]] = {model: [] for model in slices}
    for model, other in _pairs(depends or (), "--depends"):
        order.setdefault(model, []).append(other)
    load_torch()
    import torch

    from ...models import ModelGraph, SlicedNetwork, discover, mlp
    from ..networks import example_input, find_function, make_module, oriented

    if "=" in name:
        if shape or option:
            raise ConfigError("--input and --option: a layout says it all; leave them out")
        example, built = None, mlp(name)
    else:
        usual = READY[name].sample if name in READY else (3, 32, 32)
        size = _shape(shape) if shape else usual
        options = {key: _value(text, key) for key, text in _pairs(option or (), "--option")}
        built = make_module(name, find_function(name), size, CLASSES, options)
        example = oriented(name, example_input(size))
    torch.manual_seed(0)
    network = SlicedNetwork(
        built,
        slices,
        graph=ModelGraph(order),
        peer="peer",
        rest="local",
        anatomy=discover(built, example),
        buffers=buffers,  # type: ignore[arg-type]
    )
    return network, name


def _pairs(texts: Sequence[str], option: str) -> list[tuple[str, str]]:
    found = [text.partition("=") for text in texts]
    for text, (name, sign, value) in zip(texts, found, strict=True):
        if not (name and sign and value):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE")
    return [(name.strip(), value.strip()) for name, _, value in found]


def _spec(text: str, option: str) -> SliceSpec:
    """`0.8`, `*:0.8,head:0` or a layout."""
    if ":" in text:
        fractions: dict[str, float] = {}
        for entry in text.split(","):
            part, _, share = entry.rpartition(":")
            fractions[part.strip()] = _number(share, option)
        return fractions
    return text if "-" in text else _number(text, option)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{option}: {text.strip()!r} is not a share; write 0.8, '*:0.8,head:0', or a layout such as "
            "64-24-10"
        ) from None


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.replace("×", "x").split("x")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input {text!r}: write the shape of one sample, as in 3x32x32")
    return tuple(int(size) for size in sizes)


def _value(text: str, name: str) -> Any:
    """A value as a config would have it; what is no number, list or table is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[A-Za-z][\w.-]*", text):
            return text
        raise ConfigError(f"--option {name}={text}: {text!r} is not a value of TOML") from None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("slices")(slices_command)
