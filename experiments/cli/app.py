"""The `gossamer` command.

Help and mistakes should answer at once, so this module and the other cli modules import what a command
needs inside the command: torch alone takes two seconds, matplotlib and scipy another.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from gossamer import __version__
from gossamer.errors import GossamerError

from ...peer import INTERRUPTED
from ..errors import ConfigError, Stopped
from ..results import write_csv
from . import console
from . import fuse as cli_fuse
from . import papers as cli_papers
from . import slices as cli_slices
from .live import ShowSettings, register, report_interruption
from .options import Force, Out, Torch, load_torch, results_for
from .topology import register as register_topology
from .trust import register as register_trust

if TYPE_CHECKING:
    from ..arena import Round
    from ..config.tables import Config
    from ..results import Results

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Peers learn together by gossip, with no server in charge.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="Threads inside one matrix product; runs go side by side instead."
        ),
    ] = 1,
) -> None:
    Torch.threads = threads


@app.command("demo")
def demo_command(
    broker: Annotated[
        str | None,
        typer.Option(help="A broker's address, or nats or mosquitto to start one (the default)."),
    ] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Sixteen live peers, sixteen tasks: alone, everything averaged, partial models. With a picture."""
    load_torch()
    from ..live.run import run_demo

    results = results_for(out, Path("results/demo"), "demo", force=force)
    with results.begun() as folder, report_interruption(folder):
        run_demo(folder, broker)


@app.command("simulate")
def simulate_command(
    config: Annotated[
        Path, typer.Argument(help="A TOML file; examples are in experiments/configs.")
    ],
    out: Out = None,
    force: Force = False,
    networks: Annotated[
        bool, typer.Option(help="Keep every peer's network as safetensors.")
    ] = False,
    show_settings: ShowSettings = False,
) -> None:
    """Run a swarm in one process and leave its metrics, summary and picture in a folder.

    Every run has a folder of its own: results/NAME/001, 002, …; results/NAME/latest is the last one.
    Ctrl-C stops it and keeps what was computed.
    """
    from ..config.tables import load_config

    settings = load_config(config)
    console.note_defaults(config, settings)
    if settings.sweep:
        raise ConfigError(f"{config}: key 'sweep': run it with gossamer sweep {config}")
    if show_settings:
        from .show_settings import show_config

        stated = {key for key, value in (("out", out), ("networks", networks)) if value}
        folder = out or Path("results") / settings.name
        show_config(settings, str(config), {"out": folder, "networks": networks}, stated)
        return
    results = results_for(out, Path("results") / settings.name, "simulate", force=force)
    load_torch()
    if settings.time is not None:
        _simulate_in_virtual_time(settings, str(config), results, networks=networks)
        return
    # Only now, so that a mistake in the config is told without waiting for torch.
    from ..arena import Simulation, simulate

    simulation = Simulation.of(settings, str(config))
    with console.progress("rounds") as bar:
        task = bar.add_task(settings.name, total=settings.rounds, latest="")

        def show(round: Round) -> None:
            bar.advance(task)
            if round.tests:
                bar.update(task, latest=f"accuracy {round.accuracy:.3f}")

        files = simulate(simulation, results, networks=networks, on_round=show)
    console.print_written([results.folder / "metrics.jsonl", *files])


@app.command("compare")
def compare_command(
    config: Annotated[
        Path, typer.Argument(help="A TOML file; experiments/configs/compare.toml is one.")
    ],
    only: Annotated[
        list[str] | None, typer.Option(help="Only this method of the file; repeat for more.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; one per core if left out.")
    ] = None,
    out: Out = None,
    force: Force = False,
    show_settings: ShowSettings = False,
) -> None:
    """Compare methods of learning together: accuracy per client, bytes and time, with a picture.

    Interrupted, it goes on where it stopped. A changed config gets a new folder, to which runs that it
    has in common with earlier ones are copied; --force runs them all again.
    """
    load_torch()
    from ..federated.comparison import choose, comparison_study, load_comparison
    from ..study import run_study

    settings = choose(load_comparison(config), only)
    folder = Path("results/compare") / settings.name
    if show_settings:
        from .show_settings import show_config

        given = {"out": out or folder, "only": only, "jobs": jobs}
        stated = {key for key, value in (("out", out), ("only", only), ("jobs", jobs)) if value}
        show_config(settings, str(config), given, stated)
        return
    study = comparison_study(settings, str(config))
    run_study(study, results_for(out, folder, "compare", force=force), jobs=jobs)


def _simulate_in_virtual_time(
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
    console.print_written([results.folder / "metrics.jsonl", *files])


@app.command("virtual")
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
    console.print_written([folder / "error.csv", *files])


@app.command("data")
def data_command(
    name: Annotated[str | None, typer.Argument(help="A data set to load and describe.")] = None,
) -> None:
    """List the data sets, or load one and say what is in it.

    Files are found through the environment variable GOSSAMER_DATA or the cache folder.
    """
    from ..data import load, names

    if name is None:
        console.out.print("\n".join(names()))
        return
    if name in names() or ":" in name:
        load_torch()
    found = load(name)
    groups = "none" if found.train.group is None else len(found.train.group.unique())
    rows = [
        ("training samples", len(found.train)),
        ("test samples", len(found.test) if found.test else "kept back by each peer"),
        ("shape", "×".join(map(str, found.train.x.shape[1:]))),
        ("classes", found.classes),
        ("natural groups", groups),
    ]
    console.table(found.name, ["what", "value"], rows)
    if found.note:
        console.out.print(found.note)


@app.command("bench")
def bench_command(
    only: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks to run; all of them if left out.")
    ] = None,
) -> None:
    """Measure speed and memory as ratios against baselines run beside them (minutes)."""
    load_torch()
    from ..bench import main_bench

    main_bench(only)


register(app)
cli_fuse.register(app)
cli_papers.register(app)
cli_slices.register(app)
register_topology(app)
register_trust(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2.

    arguments: those of the command line if left out.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given, prog_name="gossamer")
    except Stopped as stop:
        console.err.print(str(stop), markup=False, soft_wrap=True)
        sys.exit(INTERRUPTED)
    except GossamerError as error:
        if "--debug" in given:
            raise
        console.err.print("[bold red]error:[/]", escape(str(error)), soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        if "--debug" in given or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}no space left on its disk; free some and run again"
        console.err.print("[bold red]error:[/]", escape(text), soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer has turned Ctrl-C into an exit code
            console.err.print("interrupted; what was computed is kept")
        raise
    except BaseException as error:
        if not _comes_from_interrupt(error):
            raise
        sys.exit(INTERRUPTED)


def _comes_from_interrupt(error: BaseException | None) -> bool:
    """Return True for Ctrl-C, and for an error that it became on its way, as in an import of an enum."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
