"""Commands for virtual time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..results import Results, write_csv
from . import console
from .options import Force, Out, results_for

if TYPE_CHECKING:
    from ..config.tables import Config


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("virtual")(virtual_command)


def simulate_in_virtual_time(
    settings: Config, source: str, results: Results, *, networks: bool
) -> None:
    """What `gossamer simulate` does with a config that has a [time] table."""
    from ..arena import Mean, simulate_in_time

    last: list[Mean] = []

    def show(mean: Mean) -> None:
        last[:] = [mean]
        latest = f"accuracy {mean.accuracy:.3f}" if mean.peers else "nobody there"
        bar.update(task, completed=round(mean.time), latest=latest)

    with console.progress("seconds") as bar:
        task = bar.add_task(settings.name, total=None, latest="")
        files = simulate_in_time(
            settings,
            results,
            source,
            networks=networks,
            threads=os.cpu_count() or 1,
            on_start=lambda seconds: bar.update(task, total=round(seconds)),
            on_mean=show,
        )
    if last and last[0].peers:
        console.out.print(
            f"accuracy {last[0].accuracy:.3f}: the mean over the {last[0].peers} of {settings.peers} peers "
            "that are there at the end"
        )
    else:
        console.out.print("no accuracy: all peers have left by the end")
    console.wrote([results.folder / "metrics.jsonl", *files])


def virtual_command(
    peers: Annotated[int, typer.Option(min=2, help="Peers.")] = 1000,
    coordinates: Annotated[int, typer.Option(min=1, help="Numbers that each of them has.")] = 100,
    seconds: Annotated[float, typer.Option(help="Virtual seconds.")] = 60.0,
    topology: Annotated[str, typer.Option(help="Who may talk to whom.")] = "regular:4",
    pause: Annotated[
        str, typer.Option(help="Time between two pushes: exponential:1, uniform:0.5:1.5, …")
    ] = "exponential:1",
    delay: Annotated[str, typer.Option(help="Time that a message takes.")] = "exponential:0.5",
    stragglers: Annotated[float, typer.Option(help="Share of peers ten times slower.")] = 0.0,
    loss: Annotated[float, typer.Option(help="Share of messages that are lost.")] = 0.0,
    fanout: Annotated[int, typer.Option(min=1, help="Neighbours that share in a push.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads; the result is the same.")] = 1,
    seed: Annotated[int, typer.Option(help="The seed of everything random.")] = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Average random numbers by push-sum in virtual time, with peers that learn nothing.

    Prints how far estimates are from the average, and what the simulation cost.
    """
    import numpy as np

    from ...topology import build
    from ..arena import Conditions, TimeError, VectorisedPushSum, parse, peak_memory
    from ..study.figures import canvas, save

    if not 0 < seconds < float("inf"):
        raise TimeError(f"--seconds is {seconds:g}, it must be positive")
    conditions = Conditions(
        parse(pause, "--pause"), parse(delay, "--delay"), stragglers=stragglers, loss=loss
    )
    graph = build(topology, peers, seed)
    results = results_for(out, Path("results/virtual"), "virtual", force=force)
    with results.opened() as folder:
        values = np.random.default_rng(seed).standard_normal((peers, coordinates))
        swarm = VectorisedPushSum(
            values, graph, conditions, fanout=fanout, seed=seed, threads=threads
        )
        before, started = swarm.total(), time.perf_counter()
        samples = []
        with console.progress("virtual seconds") as bar:
            task = bar.add_task("push-sum", total=round(seconds), latest="")
            for sample in swarm.run(seconds, seconds / 20):
                samples.append(sample)
                bar.update(task, completed=round(sample.time), latest=f"error {sample.error:.2e}")
        taken = time.perf_counter() - started
        results.begin()
        rows = [(f"{s.time:g}", f"{s.error:.4g}", s.events) for s in samples]
        write_csv(folder / "error.csv", ["time", "error", "events"], rows)
        figure, axes = canvas(
            f"{peers} peers, {topology}; pause {pause}, delay {delay}, loss {loss:g}"
        )
        axes.semilogy([s.time for s in samples], [s.error for s in samples], marker="o")
        axes.set(title="push-sum in virtual time", xlabel="virtual time", ylabel="consensus error")
        files = save(figure, folder / "error")
    drift = np.abs(swarm.total()[0] - before[0]).max() / np.abs(before[0]).max()
    facts = [
        ("peers × coordinates", f"{peers} × {coordinates}"),
        ("events", f"{swarm.events}"),
        ("events per second", f"{swarm.events / taken:.0f}"),
        ("microseconds per event", f"{1e6 * taken / max(swarm.events, 1):.2f}"),
        ("error at the end", f"{samples[-1].error:.3g}"),
        ("weight gained or lost", f"{swarm.total()[1] - before[1]}"),
        ("sum gained or lost, relative", f"{drift:.1g}"),
        ("peak memory of the process", f"{peak_memory() / 1e6:.0f} MB"),
    ]
    console.table("push-sum in virtual time", ["what", "value"], facts)
    console.wrote([folder / "error.csv", *files])
