"""The `gossamer` command: its entry point, and the commands for simulations and studies.

The other groups of commands are in the other modules of this package.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer import __version__
from gossamer.errors import GossamerError, hint

from ...peer import INTERRUPTED
from ..errors import ConfigError, Stopped
from ..papers import PAPERS, STUDIES, StudyEntry
from ..results import CHECKPOINT_FILE, Results, make_folder, require_folder, write_bytes, write_csv
from . import console
from .broker import broker_app
from .console import (
    AtLeastOne,
    AtLeastOneIfGiven,
    Output,
    Seed,
    Torch,
    YesOrNo,
    app,
    command,
    help_text,
    load_torch,
    report_interruption,
    with_options,
)
from .live import service_app
from .topology import topology_app

if TYPE_CHECKING:
    from ..arena import Mean, Round
    from ..arena.shards import RankGroup
    from ..config.tables import Config


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)]


HELP = """Peers learn together by gossip, with no server in charge.

A swarm is a set of peers that average parts of their neural networks over an MQTT broker. Such a part is
called a partial model; all peers share it, or only some. Cells are a network's neurons, channels or hidden
units."""


@app.callback(help=help_text(HELP))
@with_options
def _options(*, version: Version = False, debug: bool = False, threads: AtLeastOne = 1) -> None:
    """Set the options of all commands.

    Args:
        version: Print the version.
        debug: Show the traceback of an error.
        threads: Threads that torch uses in one operation. More threads seldom help: peers and runs
            are computed in parallel already.
    """
    Torch.threads = threads


@command("demo", slow=True)
def demo_command(
    *, broker: str | None = None, rounds: AtLeastOne = 80, watch: bool = False, output: Output
) -> None:
    """Run 16 live peers with 16 different tasks, four times, each time sharing something else.

    They share nothing, then everything, then what they decide by themselves, then given partial models.
    Prints and draws the accuracy of the four swarms.

    Args:
        broker: The address of a running broker, or nats or mosquitto to start one (the default).
        rounds: Rounds of each swarm; fewer take less time, and show less.
    """
    if watch:
        views.require_bokeh()
    load_torch()
    from ..live.run import broker_for, run_demo

    results = output.results("results/demo", "demo")
    with (
        broker_for(broker) as address,
        results.run_folder() as folder,
        report_interruption(folder),
    ):
        run_demo(folder, address, rounds=rounds, watch=watch)
    console.leave_report(folder)


@command("simulate", slow=True)
def simulate_command(
    config: Path,
    *,
    output: Output,
    networks: YesOrNo = False,
    checkpoint: AtLeastOneIfGiven = None,
    resume: Path | None = None,
    shards: AtLeastOne = 1,
    device: str | None = None,
    show_settings: bool = False,
) -> None:
    """Simulate a swarm in one process or several, and save its metrics, a summary and a plot.

    Every run gets its own folder: results/NAME/001, 002, …; results/NAME/latest is the last one.
    Ctrl-C stops the run; results so far are kept.

    Args:
        config: A TOML file, or example:NAME; see gossamer examples.
        networks: Save every peer's network as safetensors.
        checkpoint: Save the state of the whole swarm every so many rounds, for --resume.
        resume: The folder of a run with checkpoints, such as results/NAME/latest: continue it in a new
            folder, with the same results, bit for bit, as without the interruption. The config must be the
            same, except for rounds, which may be more.
        shards: Divide the peers among this many processes on this machine. For several machines, start
            the command by torchrun on each: torchrun … -m gossamer simulate CONFIG.
        device: Where peers train, as in cuda; the key training.device of the config if left out.
    """
    from ..config.tables import load_config

    with _ranks() as ranks:
        if ranks is not None and shards not in (1, ranks.count):
            raise ConfigError(f"--shards {shards}: torchrun has started {ranks.count} processes")
        settings = load_config(config).on_device(device)
        console.note_defaults(config, settings)
        if settings.sweep:
            raise ConfigError(f"{config}: key 'sweep': run it with gossamer sweep {config}")
        folder = Path("results") / settings.name
        saving = {"checkpoint": checkpoint, "resume": resume}
        if show_settings:
            from .explain import show_config

            options = {"networks": (networks, False), "shards": (shards, 1)}
            options |= {name: (value, None) for name, value in saving.items()}
            show_config(settings, str(config), out=(output.out, folder), **options)
            return
        is_divided = shards > 1 or ranks is not None
        refused = [f"--{name}" for name, value in saving.items() if value]
        if refused and (is_divided or settings.time is not None):
            where = "over several processes" if is_divided else "in virtual time ([time])"
            raise ConfigError(
                f"{config}: {refused[0]}: simulations {where} cannot be continued; leave the option out"
            )
        if resume and not (resume / CHECKPOINT_FILE).exists():
            raise ConfigError(
                f"--resume {resume}: there is no {CHECKPOINT_FILE}: only a run with --checkpoint N can be "
                "continued"
            )
        results = output.results(folder, "simulate")
        load_torch()  # after the config is checked: importing torch takes seconds
        if shards > 1 and ranks is None:
            from ..arena.shards import launch
            from ..config.needs import refuse_conflicts

            refuse_conflicts("shards", settings, str(config))
            launch(shards, sys.executable, "-m", "gossamer", *console.Invocation.arguments)
            return
        if settings.time is not None and ranks is None:
            files = _simulate_in_virtual_time(settings, str(config), results, networks)
        else:
            files = _simulate_in_lockstep(settings, str(config), results, networks, saving, ranks)
        if ranks is not None and ranks.rank:  # rank 0 has the results
            return
        from ..arena import read_gain

        if gain := read_gain(results.folder):
            console.say(f"what peers gain by taking part: {gain}")
        console.print_written([results.folder / "metrics.jsonl", *files])
        console.leave_report(results.folder)


def _ranks() -> AbstractContextManager[RankGroup | None]:
    """Return the processes that torchrun has started this one with; a context of None if it has not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return nullcontext()
    load_torch()
    from ..arena.shards import join_ranks

    return join_ranks()


def _simulate_in_lockstep(
    settings: Config,
    source: str,
    results: Results,
    networks: bool,
    saving: Mapping[str, Any],
    ranks: RankGroup | None,
) -> list[Path]:
    """Simulate a config without a [time] table; return the files that were written.

    saving: the values of --checkpoint and --resume. ranks: if this process is one of several.
    """
    from ..arena import Simulation, simulate

    simulation = Simulation.of(settings, source, ranks=ranks)
    last: Round | None = None
    with console.progress("rounds") as bar:
        task = bar.add_task(settings.name, total=settings.round_count, latest="")

        def show(round: Round) -> None:
            nonlocal last
            bar.update(task, completed=round.index)
            if round.tests:
                last = round
                is_nan = isnan(round.accuracy)  # a regression has none
                latest = f"loss {round.loss:.4g}" if is_nan else f"accuracy {round.accuracy:.3f}"
                bar.update(task, latest=latest)

        try:
            files = simulate(
                simulation, results, networks=networks, on_round=show, source=source,
                checkpoint_every=saving["checkpoint"], resume=saving["resume"],
            )  # fmt: skip
        except KeyboardInterrupt:
            raise Stopped(_how_to_continue(source, results.folder)) from None
    if last is not None:
        console.say(_describe_round(last))
    return files


def _how_to_continue(source: str, folder: Path) -> str:
    """Return what an interrupted simulation says at its end."""
    if (folder / CHECKPOINT_FILE).exists():
        return f"interrupted; continue with gossamer simulate {source} --resume {folder}"
    return f"interrupted; results so far are kept in {folder}; a run with --checkpoint N can be continued"


def _describe_round(round: Round) -> str:
    """Return a sentence: mean, worst and best accuracy (loss if there is none) of peers in a tested round."""
    name = "loss" if isnan(round.accuracy) else "accuracy"
    tests = [test for test in round.tests if test.samples]
    values = [test.mean_loss if name == "loss" else test.accuracy for test in tests]
    worst, best = sorted((min(values), max(values)), reverse=name == "loss")
    return (
        f"{name} {sum(values) / len(values):.3f} after round {round.index}: the mean over {len(values)} "
        f"peers, from {worst:.3f} to {best:.3f}"
    )


def _simulate_in_virtual_time(
    settings: Config, source: str, results: Results, networks: bool
) -> list[Path]:
    """Simulate a config with a [time] table; return the files that were written."""
    from ..arena import simulate_in_time

    last: Mean | None = None

    def show(mean: Mean, seconds: float) -> None:
        nonlocal last
        last = mean
        latest = f"accuracy {mean.accuracy:.3f}" if mean.peers else "no peers present"
        bar.update(task, total=round(seconds), completed=round(mean.time), latest=latest)

    with console.progress("seconds") as bar:
        task = bar.add_task(settings.name, total=None, latest="")
        files = simulate_in_time(
            settings,
            results,
            source,
            networks=networks,
            threads=os.cpu_count() or 1,
            on_mean=show,
        )
    if last is not None and last.peers:
        console.say(
            f"accuracy {last.accuracy:.3f}: the mean over the {last.peers} of {settings.peers} "
            "peers that are present at the end"
        )
    else:
        console.say("no accuracy: all peers have left by the end")
    return files


@command("compare", slow=True)
def compare_command(
    config: Path,
    *,
    only: list[str] | None = None,
    on: str | None = None,
    output: Output,
    show_settings: bool = False,
) -> None:
    """Compare methods of federated learning: accuracy per client, bytes and time, with a plot.

    After an interruption, the same command continues where it stopped. If the config was changed, a new
    folder is used, and results of runs that did not change are copied; --force runs all of them again.

    Args:
        config: A TOML file, or example:compare.
        only: Run only this method of the config; repeat for more.
    """
    from ..federated.comparison import choose, comparison_study, load_comparison
    from ..study import run_study

    settings = choose(load_comparison(config), only)
    folder = Path("results/compare") / settings.name
    if show_settings:
        from .explain import show_config

        options = {"out": (output.out, folder), "only": (only, None), "on": (on, None)}
        show_config(settings, str(config), **options)
        return
    load_torch()  # after the config is checked: importing torch takes seconds
    study = comparison_study(settings, str(config))
    run_study(study, output.results(folder, "compare"), on=on)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of `gossamer paper` and `gossamer study`.

    Args:
        quick: A small version on the built-in digits, which takes seconds or a few minutes.
        runs: Seeds per point of the figure; if left out, as many as the paper or the study has.
        only: Compute only this line of the figure; repeat for more.
    """

    quick: bool = False
    runs: AtLeastOneIfGiven = None
    on: str | None = None
    only: list[str] | None = None

    def given(self) -> list[str]:
        """Return the names of the options that are on the command line."""
        return [name for name, value in asdict(self).items() if value]


@command("paper", slow=True)
def paper_command(name: str = "list", *, options: StudyOptions, output: Output) -> None:
    """Reproduce an experiment of a paper: writes records, a summary table and the paper's figure.

    Most experiments take long at the paper's size; after an interruption, the same command continues
    where it stopped. Runs that an earlier call has finished are copied; --force runs them again.
    `gossamer paper claims` compares the results on disk with what the papers say.

    Args:
        name: The experiment's name; list to print all names; or claims, to decide the papers' claims.
    """
    if name == "claims":
        _decide_claims(options, output)
    else:
        _run_or_list("paper", PAPERS, name, options, output)


def _decide_claims(options: StudyOptions, output: Output) -> None:
    """Print the papers' claims with their verdicts, and write a page about them: `gossamer paper claims`."""
    if given := options.given():
        raise ConfigError(
            f"claims does not take --{given[0]}; it takes --out, a folder for papers.md"
        )
    load_torch()
    from ..papers import claims

    results = Path("results/paper")
    out = require_folder(output.out or results)
    rows = claims.rows([results, Path("docs/papers")])
    console.table(
        "the papers' claims",
        ["where", "claim", "verdict", "measured", "differs from the paper"],
        [
            (r.entry.origin, r.claim.text, r.finding.verdict, r.finding.measured, r.differences)
            for r in rows
        ]
        + [(each.origin, each.text, claims.CANNOT, each.reason, "") for each in claims.UNAVAILABLE],
    )
    folder = make_folder(out)
    pictures = claims.draw_overview(make_folder(folder / "papers") / "overview", rows)[:1]
    pictures += claims.draw_figures(folder / "papers", rows)
    text = claims.page(rows, [picture.relative_to(folder).as_posix() for picture in pictures])
    write_bytes(folder / "papers.md", text.encode())
    console.print_written([folder / "papers.md", *pictures])


@command("study", slow=True)
def study_command(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(STUDIES)}, or list to print what they measure.")
    ] = "list",
    *,
    options: StudyOptions,
    output: Output,
) -> None:
    """Measure what private averaging costs, what attacks do, or whether swarms know what to share."""
    _run_or_list("study", STUDIES, name, options, output)


@command("sweep", slow=True)
def sweep_command(config: Path, *, on: str | None = None, output: Output) -> None:
    """Simulate every combination of the values in a config's sweep table, and print a table of results.

    After an interruption, the same command continues where it stopped. If the config was changed, a new
    folder is used, and results of runs that did not change are copied; --force runs all of them again.

    Args:
        config: A TOML file with a sweep table, or example:sweep.
    """
    from ..config.tables import load_config

    settings = load_config(config)
    load_torch()  # after the config is checked: importing torch takes seconds
    from ..study import run_study
    from ..study.sweep import sweep_study

    study = sweep_study(settings, str(config))
    results = output.results(Path("results/sweep") / settings.name, "sweep")
    run_study(study, results, on=on)


def _run_or_list(
    command: str,
    entries: Mapping[str, StudyEntry],
    name: str,
    options: StudyOptions,
    output: Output,
) -> None:
    """Run the study of one entry, or list all entries: the body of `gossamer paper` and `gossamer study`."""
    if name.lower() == "list":
        rows = [
            (e.name, e.origin, e.title, f"{e.minutes:g}" if e.minutes else "")
            for e in entries.values()
        ]
        header = ["name", "where", "what", "minutes per seed"]
        console.table(f"gossamer {command} NAME", header, rows)
        return
    if name not in entries:
        what = "reproduction" if command == "paper" else command
        raise ConfigError(
            f"no {what} is called {name!r}; {hint(name, entries, are='there are', cutoff=0.6)}"
        )
    entry = entries[name]
    if unusable := [option for option in options.given() if option not in entry.options]:
        options_text = ", ".join(f"--{each}" for each in sorted(entry.options))
        options_text = options_text or "no options but --out and --force"
        raise ConfigError(f"{name} does not take --{unusable[0]}; it takes {options_text}")
    folder = f"{name}-quick" if options.quick and command == "paper" else name
    results = output.results(f"results/{command}/{folder}", f"{command} {name}")
    load_torch()
    study = entry.study(quick=options.quick, runs=options.runs).only(options.only)
    from ..data import DataError
    from ..study import run_study

    try:
        run_study(study, results, on=options.on)
    except (ConfigError, DataError) as error:
        needs_data = isinstance(error, DataError) or "key 'data.set'" in str(error)
        if needs_data and "quick" in entry.options and not options.quick:
            remedy = f"gossamer {command} {name} --quick needs no files"
            raise type(error)(f"{error}; {remedy}") from None
        raise


@command("virtual", slow=True)
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
    seed: Seed = 0,
    output: Output,
) -> None:
    """Simulate push-sum averaging of random numbers, without learning: for many thousand peers.

    Prints the error of the peers' estimates of the average, and the time and memory that were used.

    Args:
        peers: The number of peers.
        coordinates: How many numbers each peer has, that is, the length of the averaged vectors.
        seconds: The simulated (virtual) time in seconds.
        topology: The graph of peers that may push to each other; see gossamer topology show --help.
        pause: Virtual seconds between two pushes of a peer: exponential:1, uniform:0.5:1.5, …
        delay: Virtual seconds that a message takes to arrive, in the same form.
        stragglers: The share of peers that are ten times slower.
        loss: The share of messages that are lost.
        fanout: How many neighbours a peer pushes to at a time.
        threads: Threads of the simulation; they do not affect the result.
        seed: The seed of all random choices.
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
        (first_sum, first_weight), started = swarm.total(), time.perf_counter()
        samples = []
        with console.progress("virtual seconds") as bar:
            task = bar.add_task("push-sum", total=round(seconds), latest="")
            for sample in swarm.run(seconds, seconds / 20):
                samples.append(sample)
                bar.update(task, completed=round(sample.time), latest=f"error {sample.error:.2e}")
        elapsed = time.perf_counter() - started
        results.begin()
        rows = [(f"{s.time:g}", f"{s.error:.4g}", s.events) for s in samples]
        write_csv(folder / "error.csv", ["time", "error", "events"], rows)
        title = f"{peers} peers, {topology}; pause {pause}, delay {delay}, loss {loss:g}"
        figure, axes = canvas(title)
        axes.semilogy([s.time for s in samples], [s.error for s in samples], marker="o")
        axes.set(title="push-sum in virtual time", xlabel="virtual time", ylabel="consensus error")
        files = save(figure, folder / "error")
    last_sum, last_weight = swarm.total()  # conserved, except for rounding
    sum_change = np.abs(last_sum - first_sum).max() / np.abs(first_sum).max()
    facts = [
        ("peers × coordinates", f"{peers} × {coordinates}"),
        ("events", f"{swarm.events}"),
        ("events per second", f"{swarm.events / elapsed:.0f}"),
        ("microseconds per event", f"{1e6 * elapsed / max(swarm.events, 1):.2f}"),
        ("error at the end", f"{samples[-1].error:.3g}"),
        ("weight gained or lost", f"{last_weight - first_weight}"),
        ("sum gained or lost, relative", f"{sum_change:.1g}"),
        ("peak memory of the process", f"{peak_memory() / 1e6:.0f} MB"),
    ]
    console.table("push-sum in virtual time", ["what", "value"], facts)
    console.print_written([folder / "error.csv", *files])


@command("data", slow=True)
def data_command(name: str | None = None) -> None:
    """List the data sets, or load one and print its sizes.

    Files are searched for in the folder that the environment variable GOSSAMER_DATA names, and in the
    cache folder.

    Args:
        name: A data set to load and describe; if left out, all names are listed.
    """
    from ..data import descriptions, load, names

    if name is None:
        rows = [(each, text, folder) for each, (text, folder) in descriptions().items()]
        console.table("data sets", ["name", "what it is", "its folder in GOSSAMER_DATA"], rows)
        return
    if name in names() or ":" in name:
        load_torch()
    dataset = load(name)
    train, test = dataset.train, dataset.test
    rows = [
        ("training samples", len(train)),
        ("test samples", len(test) if test else "none: each peer holds out some training samples"),
        ("shape", "×".join(map(str, train.x.shape[1:]))),
        ("classes", dataset.classes),
        ("natural groups", "none" if train.group is None else len(train.group.unique())),
    ]
    console.table(dataset.name, ["what", "value"], rows)
    if dataset.note:
        console.say(dataset.note)


@command("bench", slow=True)
def bench_command(
    only: list[str] | None = None,
    *,
    pfl: Path | None = None,
    flower: Path | None = None,
    gossipy: Path | None = None,
) -> None:
    """Measure speed and memory, as ratios to baselines measured in alternation. Takes minutes.

    Args:
        only: The benchmarks to run; all of them if left out.
        pfl: For the benchmark `peers`: the Python of an environment with pfl-research.
        flower: The same, with Flower's simulation.
        gossipy: The same, with gossipy-dfl.
    """
    load_torch()
    from ..bench import run_benchmarks

    pythons = {"pfl": pfl, "flower": flower, "gossipy": gossipy}
    environments = {name: path for name, path in pythons.items() if path is not None}
    results = Results(Path("results/bench"), "bench")
    run_benchmarks(only or (), results, options={"peers": {"environments": environments}})


# These modules add their commands to `app` when they are imported.
from . import assignment, explain, fuse, live, predict, slices, trust, views  # noqa: E402, F401

app.add_typer(broker_app, name="broker")
app.add_typer(topology_app, name="topology")
app.add_typer(service_app, name="service")

PANELS = {
    "Live swarms": ("demo", "swarm", "join", "service", "broker"),
    "Members of live swarms": ("enrol", "keygen", "invite", "revoke", "ban", "forget"),
    "Look at swarms and results": ("status", "watch", "report", "assignment", "topology", "lab"),
    "Networks": ("predict", "slices", "fuse"),
    "Simulations": ("simulate", "sweep", "compare", "new", "examples", "explain", "data"),
    "Research": ("paper", "study", "virtual", "bench"),
}
"""The commands as help lists them: in these panels, in this order."""


def _arrange_help() -> None:
    """Sort the commands into the panels and the order of PANELS."""
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    order = [*panels]
    for commands in (app.registered_commands, app.registered_groups):
        commands.sort(key=lambda info: order.index(str(info.name)))
        for info in commands:
            info.rich_help_panel = panels[str(info.name)]


_arrange_help()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. For invalid input it prints one line to stderr and exits with code 2.

    arguments: if left out, those of the process's command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console.Invocation.begin(arguments)
    try:
        app([_example_path(argument) for argument in arguments], prog_name="gossamer")
    except Stopped as stop:
        console.warn(str(stop))
        sys.exit(INTERRUPTED)
    except (GossamerError, OSError) as error:
        text = _message_for_user(error)
        if text is None or "--debug" in arguments:
            raise
        console.err.print("[bold red]error:[/]", escape(text), soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer has turned Ctrl-C into an exit code
            console.warn("interrupted; results so far are kept")
        raise
    except BaseException as error:
        if not _comes_from_interrupt(error):
            raise
        sys.exit(INTERRUPTED)


def _example_path(argument: str) -> str:
    """Return the path of an example config for `example:NAME`; any other argument as it is."""
    from ..config.examples import PREFIX, example_path

    if not argument.startswith(PREFIX):
        return argument
    return str(example_path(argument.removeprefix(PREFIX)))


def _message_for_user(error: GossamerError | OSError) -> str | None:
    """Return a one-line message for an error that the user can fix; None for one that needs a traceback."""
    if isinstance(error, GossamerError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on its disk; free some and run again"
    return f"{where}{error.strerror}" if where else None


def _comes_from_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C (KeyboardInterrupt), or was raised while one was being handled.

    The second happens if Ctrl-C interrupts an import, which then raises an error of its own.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
