"""The `gossamer` command: simulations and studies here, other groups of commands in modules beside it."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer import __version__
from gossamer.errors import GossamerError
from gossamer.names import hint

from ...peer import INTERRUPTED
from ..errors import ConfigError, Stopped
from ..papers import PAPERS, STUDIES, Paper
from ..results import write_csv
from . import console
from .console import (
    AtLeastOne,
    AtLeastOneIfGiven,
    Output,
    Torch,
    YesOrNo,
    app,
    command,
    load_torch,
    report_interruption,
    with_options,
)
from .topology import topology_app

if TYPE_CHECKING:
    from ..arena import Mean, Round
    from ..config.tables import Config
    from ..results import Results


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)]


@app.callback(help="Peers learn together by gossip, with no server in charge.")
@with_options
def _options(*, version: Version = False, debug: bool = False, threads: AtLeastOne = 1) -> None:
    """Set what holds for all commands.

    Args:
        version: Print the version.
        debug: Show the traceback of an error.
        threads: Threads inside one matrix product; runs go side by side instead.
    """
    Torch.threads = threads


@command("demo")
def demo_command(*, broker: str | None = None, output: Output) -> None:
    """Sixteen live peers, sixteen tasks: alone, everything averaged, partial models. With a picture.

    Args:
        broker: A broker's address, or nats or mosquitto to start one (the default).
    """
    load_torch()
    from ..live.run import run_demo

    results = output.results("results/demo", "demo")
    with results.begun() as folder, report_interruption(folder):
        run_demo(folder, broker)


@command("simulate")
def simulate_command(
    config: Path,
    *,
    output: Output,
    networks: YesOrNo = False,
    show_settings: bool = False,
) -> None:
    """Run a swarm in one process and leave its metrics, summary and picture in a folder.

    Every run has a folder of its own: results/NAME/001, 002, …; results/NAME/latest is the last one.
    Ctrl-C stops it and keeps what was computed.

    Args:
        config: A TOML file; examples are in experiments/configs.
        networks: Keep every peer's network as safetensors.
    """
    from ..config.tables import load_config

    settings = load_config(config)
    console.note_defaults(config, settings)
    if settings.sweep:
        raise ConfigError(f"{config}: key 'sweep': run it with gossamer sweep {config}")
    folder = Path("results") / settings.name
    if show_settings:
        from .show_settings import show_config

        show_config(settings, str(config), out=(output.out, folder), networks=(networks, False))
        return
    results = output.results(folder, "simulate")
    load_torch()  # only now, so that a mistake in the config is told without waiting for torch
    simulate = _in_lockstep if settings.time is None else _in_virtual_time
    files = simulate(settings, str(config), results, networks)
    console.print_written([results.folder / "metrics.jsonl", *files])


def _in_lockstep(settings: Config, source: str, results: Results, networks: bool) -> list[Path]:
    from ..arena import Simulation, simulate

    simulation = Simulation.of(settings, source)
    with console.progress("rounds") as bar:
        task = bar.add_task(settings.name, total=settings.rounds, latest="")

        def show(round: Round) -> None:
            bar.advance(task)
            if round.tests:
                bar.update(task, latest=f"accuracy {round.accuracy:.3f}")

        return simulate(simulation, results, networks=networks, on_round=show)


def _in_virtual_time(settings: Config, source: str, results: Results, networks: bool) -> list[Path]:
    """Simulate a config that has a [time] table."""
    from ..arena import simulate_in_time

    last: Mean | None = None

    def show(mean: Mean) -> None:
        nonlocal last
        last = mean
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
    if last and last.peers:
        console.say(
            f"accuracy {last.accuracy:.3f}: the mean over the {last.peers} of {settings.peers} peers "
            "that are there at the end"
        )
    else:
        console.say("no accuracy: all peers have left by the end")
    return files


@command("compare")
def compare_command(
    config: Path,
    *,
    only: list[str] | None = None,
    jobs: AtLeastOneIfGiven = None,
    output: Output,
    show_settings: bool = False,
) -> None:
    """Compare methods of learning together: accuracy per client, bytes and time, with a picture.

    Interrupted, it goes on where it stopped. A changed config gets a new folder, to which runs that it
    has in common with earlier ones are copied; --force runs them all again.

    Args:
        config: A TOML file; experiments/configs/compare.toml is one.
        only: Only this method of the file; repeat for more.
    """
    load_torch()
    from ..federated.comparison import choose, comparison_study, load_comparison
    from ..study import run_study

    settings = choose(load_comparison(config), only)
    folder = Path("results/compare") / settings.name
    if show_settings:
        from .show_settings import show_config

        options = {"out": (output.out, folder), "only": (only, None), "jobs": (jobs, None)}
        show_config(settings, str(config), **options)
        return
    study = comparison_study(settings, str(config))
    run_study(study, output.results(folder, "compare"), jobs=jobs)


@command("paper")
def paper_command(
    name: str = "list",
    *,
    quick: bool = False,
    runs: AtLeastOneIfGiven = None,
    jobs: AtLeastOneIfGiven = None,
    only: list[str] | None = None,
    output: Output,
) -> None:
    """Run a paper's experiment: JSON lines, a summary table and the figure in the paper's form.

    Most take long at the paper's size; interrupted, they go on where they stopped. Runs that an earlier
    one has in common are copied from its folder; --force runs them all again.

    Args:
        name: A reproduction's name, or LIST to see them.
        quick: A minute or two on the built-in digits.
        runs: Seeds per point; the paper's if left out.
        only: Only this line of the figure; repeat for more.
    """
    given = {"quick": quick, "runs": runs, "jobs": jobs, "only": only}
    _run("paper", PAPERS, name, given, output)


@command("study")
def study_command(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(STUDIES)}, or LIST to see what they measure.")
    ] = "list",
    *,
    quick: bool = False,
    jobs: AtLeastOneIfGiven = None,
    only: list[str] | None = None,
    output: Output,
) -> None:
    """Measure trust: what private averaging hides and costs, or what guards make of attacks.

    Args:
        quick: Smaller: seconds, not minutes.
        only: Only this line of the figure; repeat for more.
    """
    _run("study", STUDIES, name, {"quick": quick, "jobs": jobs, "only": only}, output)


@command("sweep")
def sweep_command(config: Path, *, jobs: AtLeastOneIfGiven = None, output: Output) -> None:
    """Run every combination of a config's sweep table, side by side, and tabulate them.

    Interrupted, it goes on where it stopped. A changed config gets a new folder, to which runs that it
    has in common with earlier ones are copied; --force runs them all again.

    Args:
        config: A TOML file with a sweep table.
    """
    from ..config.tables import load_config

    settings = load_config(config)
    load_torch()  # only now, so that a mistake in the config is told without waiting for it
    from ..study import run_study
    from ..study.sweep import sweep_study

    study = sweep_study(settings, str(config))
    results = output.results(Path("results/sweep") / settings.name, "sweep")
    run_study(study, results, jobs=jobs)


def _run(
    command: str,
    known: Mapping[str, Paper],
    name: str,
    given: Mapping[str, Any],
    output: Output,
) -> None:
    if name.lower() == "list":
        rows = [(one.name, one.section, one.title) for one in known.values()]
        console.table(f"gossamer {command} NAME", ["name", "where", "what"], rows)
        return
    if name not in known:
        what = "reproduction" if command == "paper" else command
        raise ConfigError(
            f"no {what} is called {name!r}; {hint(name, known, are='there are', cutoff=0.6)}"
        )
    paper = known[name]
    for option, value in given.items():
        if value and option not in paper.takes:
            takes = ", ".join(f"--{one}" for one in sorted(paper.takes))
            takes = takes or "no options but --out and --force"
            raise ConfigError(f"{name} does not take --{option}; it takes {takes}")
    folder = f"{name}-quick" if given["quick"] and command == "paper" else name
    results = output.results(f"results/{command}/{folder}", f"{command} {name}")
    load_torch()
    study = paper.study(quick=given["quick"], runs=given.get("runs")).only(given["only"])
    from ..study import run_study

    run_study(study, results, jobs=given["jobs"])


@command("virtual")
def virtual_command(
    *,
    peers: Annotated[int, typer.Option(min=2)] = 1000,
    coordinates: AtLeastOne = 100,
    seconds: float = 60.0,
    topology: str = "regular:4",
    pause: str = "exponential:1",
    delay: str = "exponential:0.5",
    stragglers: float = 0.0,
    loss: float = 0.0,
    fanout: AtLeastOne = 1,
    threads: AtLeastOne = 1,
    seed: int = 0,
    output: Output,
) -> None:
    """Average random numbers by push-sum in virtual time, with peers that learn nothing.

    Prints how far estimates are from the average, and what the simulation cost.

    Args:
        peers: Peers.
        coordinates: Numbers that each of them has.
        seconds: Virtual seconds.
        topology: Who may talk to whom.
        pause: Time between two pushes: exponential:1, uniform:0.5:1.5, …
        delay: Time that a message takes.
        stragglers: Share of peers ten times slower.
        loss: Share of messages that are lost.
        fanout: Neighbours that share in a push.
        threads: Threads; the result is the same.
        seed: The seed of everything random.
    """
    import numpy as np

    from ...topology import build
    from ..arena import Conditions, TimeError, VectorisedPushSum, parse, peak_memory
    from ..study.figures import canvas, save

    if not 0 < seconds < float("inf"):
        raise TimeError(f"--seconds is {seconds:g}, it must be positive")
    durations = parse(pause, "--pause"), parse(delay, "--delay")
    conditions = Conditions(*durations, stragglers=stragglers, loss=loss)
    graph = build(topology, peers, seed)
    results = output.results("results/virtual", "virtual")
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
        title = f"{peers} peers, {topology}; pause {pause}, delay {delay}, loss {loss:g}"
        figure, axes = canvas(title)
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


@command("data")
def data_command(name: str | None = None) -> None:
    """List the data sets, or load one and say what is in it.

    Files are found through the environment variable GOSSAMER_DATA or the cache folder.

    Args:
        name: A data set to load and describe.
    """
    from ..data import load, names

    if name is None:
        console.say("\n".join(names()))
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
        console.say(found.note)


@command("bench")
def bench_command(only: list[str] | None = None) -> None:
    """Measure speed and memory as ratios against baselines run beside them (minutes).

    Args:
        only: Benchmarks to run; all of them if left out.
    """
    load_torch()
    from ..bench import main_bench

    main_bench(only)


# The other groups add their commands when they are imported; help lists them in this order.
from . import fuse, live, slices, trust  # noqa: E402, F401

app.add_typer(topology_app, name="topology")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2.

    arguments: those of the command line if left out.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given, prog_name="gossamer")
    except Stopped as stop:
        console.warn(str(stop))
        sys.exit(INTERRUPTED)
    except (GossamerError, OSError) as error:
        text = _in_one_line(error)
        if text is None or "--debug" in given:
            raise
        console.err.print("[bold red]error:[/]", escape(text), soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer has turned Ctrl-C into an exit code
            console.warn("interrupted; what was computed is kept")
        raise
    except BaseException as error:
        if not _comes_from_interrupt(error):
            raise
        sys.exit(INTERRUPTED)


def _in_one_line(error: GossamerError | OSError) -> str | None:
    """What to tell the user of an error; None if it is none that a user can mend."""
    if isinstance(error, GossamerError):
        return str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}no space left on its disk; free some and run again"


def _comes_from_interrupt(error: BaseException | None) -> bool:
    """Return True for Ctrl-C, and for an error that it became on its way, as in an import of an enum."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
