"""The lab: a page on which two swarms are put together, drawn, simulated and compared.

What it shows about a graph is what `gossamer topology show` prints, a run is that of `gossamer simulate`, and
its figures are those of pages and reports. Every browser window has two set-ups of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape
from math import ceil, isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from bokeh import layouts

from gossamer.errors import GossamerError

from ...topology import TopologyError
from ..cli.console import Invocation
from ..errors import ConfigError
from ..graphs.show import examine
from ..results import Results
from .figures import Panels
from .folders import Playback, RunFolder, read_folders
from .history import History, Observation
from .peer_map import Links, Names, Positions, place_by_hops
from .setups import DATA, GRAPHS, SHARING, TASKS, Link, Run, SetUp, disagreement, spread
from .style import (
    TEMPLATE,
    WIDGET_STYLE,
    Section,
    bk,
    html_table,
    line_columns,
    named_lines,
    refill,
    static,
    variables,
)

LAB_POLL_SECONDS = 0.25
PLAY_SECONDS = 8.0
"""How long it takes to draw a run that is simulated faster than that."""
READ_SECONDS = 1.0
"""Seconds between two reads of the records of a running simulation."""
MOST_PEERS = 1000
MOST_EXCHANGES = 300
"""The most exchanges for which the spread of a value is shown."""
INTRODUCTION = (
    "Two swarms beside each other. <b>Pick a graph</b>, or name any other. <b>Click two peers</b> to link "
    "them or to cut their link; a click on a link cuts it too. <b>Run</b> simulates the swarm: its peers "
    "learn to read digits, and average with their neighbours. The config repeats the run on the command line."
)
HINT = "click two peers to link or unlink them, or a link to cut it"


class LabColumn:
    """One column of the lab: a form, the graph, its facts, and the run.

    results: the folder below which runs are written. on_change: called when a figure about both columns has
    to be drawn again.
    """

    def __init__(self, letter: str, setup: SetUp, results: Path, on_change: Callable[[], None]):
        self.letter, self.setup = letter, setup
        self._results, self._on_change = results, on_change
        self._undo_stack: list[tuple[tuple[Link, ...] | None, bool]] = []
        self._first_clicked: int | None = None
        self._places: Positions = {}
        self._run: Run | None = None
        self._run_folder: RunFolder | None = None
        self._playback: Playback | None = None
        self._position, self._polled, self._read_at = 0.0, 0.0, 0.0
        self.history = History(setup.name, "round")
        self.predicted: list[float] = []
        self._spreads: list[list[float]] = []
        self._make_form()
        self._make_controls()
        self.panels = Panels(self.history, height=360, place=self._place, spread=True)
        self._make_map()
        self.root = bk.Column(
            children=[
                bk.Div(text=f"<b>Set-up {letter}</b>", stylesheets=[WIDGET_STYLE]),
                *(_wrapped(*row) for row in self._form_rows()),
                _wrapped(self._run_button, self._undo, self._download),
                self._problem, self.panels.roots["graph"],
                _wrapped(self.panels.map.colours, self._play, self._slider),
                self._hint, self._facts, self.panels.headline, self.panels.roots["curves"], self._config,
            ],
            sizing_mode="stretch_width",
        )  # fmt: skip
        self._show_setup(new_places=True)

    # --- making the column ---------------------------------------------------------------------------

    def _make_form(self) -> None:
        setup = self.setup
        self._form: dict[str, Any] = {
            "pick": _widget(bk.Select, "graph", setup.graph, 190, options=list(GRAPHS)),
            "peers": _number("peers", setup.peers, 2, MOST_PEERS),
            "exchanges": _number("exchanges per round", setup.exchanges, 1, 100, width=130),
            "rounds": _number("rounds", setup.rounds, 1, 2000),
            "seed": _number("seed", setup.seed, 0, 10**6),
            "data": _widget(bk.Select, "data", setup.data, 270, options=list(DATA)),
            "tasks": _widget(bk.Select, "tasks", setup.tasks, 270, options=list(TASKS)),
            "sharing": _widget(bk.Select, "what is shared", setup.sharing, 400, options=list(SHARING)),
            "leave": _number("% of peers leaving per s", setup.leave, 0, 100, 0.5, 150),
            "lost": _number("% of messages lost", setup.lost, 0, 90, 5, 130),
        }  # fmt: skip
        self._graph_input = _widget(
            bk.TextInput, "or type one: regular:6, club.graphml, …", setup.graph, 320
        )
        self._filling = False
        for name, widget in self._form.items():
            widget.on_change("value", self._changed if name != "pick" else self._picked)
        self._graph_input.on_change("value", self._changed)

    def _form_rows(self) -> Iterator[list[Any]]:
        rows = ("pick", ""), ("peers", "exchanges", "rounds", "seed"), ("data", "tasks")
        for names in (*rows, ("sharing",), ("leave", "lost")):
            yield [self._form.get(name, self._graph_input) for name in names]

    def _make_controls(self) -> None:
        self._run_button = _button("run", self._run_or_stop, "primary")
        self._undo = _button("undo", self._undo_link)
        self._download = _button("download the config")
        self._config = bk.Div(stylesheets=[WIDGET_STYLE], sizing_mode="stretch_width")
        self._download.js_on_click(
            bk.CustomJS(
                args={"config": self._config, "name": f"{self.setup.name}.toml"},
                code=static("lab-download.js"),
            )
        )
        self._problem = bk.Div(
            stylesheets=[":host { color: var(--bad); }"], sizing_mode="stretch_width"
        )
        self._hint = bk.Div(stylesheets=[":host { color: var(--dim); }"])
        self._facts = bk.Div(
            stylesheets=[WIDGET_STYLE, static("facts.css")], sizing_mode="stretch_width"
        )
        self._play = bk.Toggle(label="spread a value", width=120, stylesheets=[WIDGET_STYLE])
        self._play.on_change("active", self._switch_play)
        self._slider = bk.Slider(
            start=0, end=1, value=0, step=1, title="exchanges", width=190, stylesheets=[WIDGET_STYLE]
        )  # fmt: skip
        self._slider.on_change("value", self._move)

    def _make_map(self) -> None:
        clicks = bk.ColumnDataSource({"a": [""], "b": [""], "count": [0]})
        clicks.on_change("data", self._clicked)
        plot, panels = self.panels.roots["graph"], self.panels
        arguments = {
            "plot": plot,
            "peers": panels.peers,
            "links": panels.map.links,
            "clicks": clicks,
        }
        plot.js_on_event("tap", bk.CustomJS(args=arguments, code=static("lab-click.js")))

    # --- what the user does --------------------------------------------------------------------------

    def _picked(self, _attribute: str, _old: str, graph: str) -> None:
        self._graph_input.value = graph

    def _changed(self, _attribute: str, _old: Any, _new: Any) -> None:
        if self._filling:
            return
        values = {name: widget.value for name, widget in self._form.items() if name != "pick"}
        if any(value is None for value in values.values()):
            return  # a number is being typed
        chosen = replace(self.setup, graph=self._graph_input.value.strip(), **values)
        # Links that were added and cut by hand stay, unless the graph that they change is replaced.
        is_new_graph = any(
            getattr(chosen, key) != getattr(self.setup, key) for key in ("graph", "peers", "seed")
        )
        self.setup = replace(chosen, links=None, directed=False) if is_new_graph else chosen
        self._undo_stack = [] if is_new_graph else self._undo_stack
        self._show_setup(new_places=is_new_graph)

    def _clicked(self, _attribute: str, _old: Any, data: Any) -> None:
        a, b = data["a"][0], data["b"][0]
        if b:
            self._toggle(int(a), int(b))
        elif self._first_clicked is None or self._first_clicked == int(a):
            self._first_clicked = int(a)
            self._spread_from(int(a))
            self._hint.text = f"peer {a}: click another one to link or unlink the two"
        else:
            self._toggle(self._first_clicked, int(a))

    def _toggle(self, a: int, b: int) -> None:
        self._first_clicked = None
        self.panels.peers.selected.indices = []
        try:
            changed = self.setup.toggle(self.graph, a, b)
        except TopologyError as error:
            self._show_problem(error)
            return
        self._undo_stack.append((self.setup.links, self.setup.directed))
        self.setup = changed
        self._show_setup()

    def _undo_link(self) -> None:
        if self._undo_stack:
            links, directed = self._undo_stack.pop()
            self.setup = replace(self.setup, links=links, directed=directed)
            self._show_setup()

    def _run_or_stop(self) -> None:
        if self.running:
            self.stop()
        else:
            self.start()

    def start(self) -> None:
        """Simulate the set-up; what is wrong with it is shown above the graph."""
        if self.running:
            return
        self._show_problem("")
        details = {"arguments": ["simulate", f"{self.setup.name}.toml"]}
        try:
            results = Results(
                self._results / self.setup.name, "simulate",
                details=lambda: Invocation.details() | details,
            )  # fmt: skip
            self._run = Run(self.setup.config(), results)
        except GossamerError as error:
            self._show_problem(error)
            return
        self._playback, self._run_folder, self._position = None, None, 0.0
        self._play.active = False
        self.panels.map.colours.active = 0
        self._run_button.label = "stop"

    def stop(self) -> None:
        """Stop a run; what it has recorded is shown at once."""
        if self._run is not None:
            self._run.stop()
            self._position = float("inf")

    @property
    def running(self) -> bool:
        """Whether a simulation is running, or its records are still being played back."""
        return self._run is not None

    # --- drawing -------------------------------------------------------------------------------------

    def _show_setup(self, *, new_places: bool = False) -> None:
        """Draw the set-up's graph, facts and config, and stop the run of the set-up before its change."""
        if self._run is not None:
            self._run.stop()
            self._finish()
        try:
            self.graph = self.setup.load()
            if len(self.graph.graph) > MOST_PEERS:
                raise ConfigError(
                    f"{self.setup.graph}: the lab takes up to {MOST_PEERS} peers; gossamer topology show and "
                    "gossamer simulate take more"
                )
            self.setup = replace(self.setup, peers=len(self.graph.graph))
            text = self.setup.toml()
        except GossamerError as error:
            self._show_problem(error)
            return
        self._fill(peers=self.setup.peers)
        self._show_problem("")
        try:
            rows = examine(self.graph).rows
            steps = self.graph.pace(tolerance=0.01).exchanges
        except TopologyError as error:  # the graph is disconnected
            self._show_problem(error)
            rows, steps = [("peers", len(self.graph.graph))], 60.0
        steps = min(ceil(steps) if isfinite(steps) else MOST_EXCHANGES, MOST_EXCHANGES)
        self.predicted = disagreement(self.graph, MOST_EXCHANGES)
        self._facts.text = html_table(["graph", self.setup.graph], rows)
        self._config.update(text=_config_html(self.setup.name, text), tags=[text])
        self._play.active = False
        self._slider.update(end=max(steps, 2), value=0)
        self._undo.disabled = not self._undo_stack
        self._hint.text, self._first_clicked = HINT, None
        if new_places:
            self._places = {}
        self.history = _history_before_run(self.setup, self.graph.graph)
        self._spread_from(0)

    def _fill(self, **values: Any) -> None:
        """Set widgets of the form to values by name, without the reaction to a user's change."""
        self._filling = True
        for name, value in values.items():
            self._form[name].value = value
        self._filling = False

    def _place(self, names: Names, links: Links) -> Positions:
        """Peers keep their places while links are cut and added."""
        if self._places.keys() != names:
            self._places = place_by_hops(names, links)
        return self._places

    def _spread_from(self, origin: int) -> None:
        self._spreads = spread(self.graph, origin, int(self._slider.end))
        self._slider.title = f"exchanges; the value of peer {origin}"
        self._draw_spread()

    def _move(self, _attribute: str, _old: float, _new: float) -> None:
        self.panels.map.colours.active = 2
        self._draw_spread()

    def _draw_spread(self) -> None:
        values = self._spreads[min(int(self._slider.value), len(self._spreads) - 1)]
        for name, peer in self.history.peers.items():
            peer.spread = values[int(name)]
        self._draw()

    def _draw(self) -> None:
        self.panels.update(self.history)
        self.panels.roots["curves"].visible = bool(self.history.mean_accuracy.y)
        self._on_change()

    def _switch_play(self, _attribute: str, _old: bool, playing: bool) -> None:
        if playing:
            self.panels.map.colours.active = 2
            self._slider.value = 0

    def _show_problem(self, problem: object) -> None:
        self._problem.text = escape(str(problem))

    # --- time ----------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Go on with the run and with the spread of a value."""
        passed, self._polled = now - self._polled, now
        if self._play.active:
            end = int(self._slider.end)
            self._slider.value = min(int(self._slider.value) + max(1, end // 30), end)
            self._play.active = self._slider.value < end
        if self._run is not None:
            self._follow(self._run, now, passed)

    def _follow(self, run: Run, now: float, passed: float) -> None:
        """Play back what a run has recorded, and no faster than the whole run in PLAY_SECONDS."""
        done = run.done
        if run.folder is not None and (now - self._read_at > READ_SECONDS or done):
            if self._run_folder is None or not self._run_folder.info.get("finished"):
                self._read_records(run.folder)
            self._read_at = now
        if self._playback is not None:
            end = self._playback.run.end
            self._position = min(self._position + passed * run.length / PLAY_SECONDS, end)
            self.history = self._playback.advance(self._position)
            self._draw_spread()
        if done and (self._playback is None or self._position >= self._playback.run.end):
            self._show_problem(run.error)
            self._finish()

    def _read_records(self, folder: Path) -> None:
        try:
            (run_folder,) = read_folders([folder])
        except ConfigError:
            return  # nothing is recorded yet
        assert isinstance(run_folder, RunFolder)
        self._run_folder, self._playback = run_folder, Playback(run_folder)

    def _finish(self) -> None:
        self._run = None
        self._run_button.label = "run"


def build_lab(doc: Any, results: Path) -> Callable[[], None]:
    """Fill a Bokeh document with the lab; returns the function that brings it up to date.

    results: the folder below which runs are written.
    """
    predicted, accuracy = (bk.ColumnDataSource(line_columns("set-up", {})) for _ in range(2))
    columns: list[LabColumn] = []
    rounds = bk.Range1d(start=0, end=60)

    def draw_comparison() -> None:
        if len(columns) < 2:
            return
        by_title = {f"{column.letter}: {column.setup.graph}": column for column in columns}
        means = {title: column.history.mean_accuracy for title, column in by_title.items()}
        rounds.end = max(max(column.setup.rounds, column.history.now) for column in columns)
        for source, lines in (
            (predicted, {t: (range(len(c.predicted)), c.predicted) for t, c in by_title.items()}),
            (accuracy, {t: (curve.x, curve.y) for t, curve in means.items()}),
        ):
            refill(source, line_columns("set-up", lines))

    for letter, graph in (("A", "ring"), ("B", "regular")):
        setup = SetUp(f"lab-{letter.lower()}", graph)
        columns.append(LabColumn(letter, setup, results, draw_comparison))
    draw_comparison()
    curves = [column.panels.roots["curves"] for column in columns]
    curves[1].y_range = curves[0].y_range

    def run_both() -> None:
        for column in columns:
            column.start()

    top = bk.Column(
        children=[
            bk.Div(text=INTRODUCTION, stylesheets=[WIDGET_STYLE], sizing_mode="stretch_width"),
            _button("run both", run_both, "primary"),
        ],
        sizing_mode="stretch_width",
    )
    section = Section("")
    section.place({"top": top, "a": columns[0].root, "b": columns[1].root})
    section.place(
        {
            "predicted": named_lines(
                predicted, "set-up", "predicted disagreement after each exchange", 260,
                x_label="exchange", y_axis_type="log", y_range=bk.Range1d(start=1e-6, end=1.0),
                x_range=bk.Range1d(start=0, end=100),
            ),
            "accuracy": named_lines(
                accuracy, "set-up", "mean accuracy of all peers", 260, x_range=rounds,
                x_label="round, or virtual second", y_range=bk.Range1d(start=0, end=1),
            ),
        }
    )  # fmt: skip
    section.roots["top"] = "bare wide"
    doc.title, doc.template = "lab", TEMPLATE
    doc.template_variables.update(variables("two swarms side by side", [section]))
    for root in section.models.values():
        doc.add_root(root)

    def poll() -> None:
        for column in columns:
            column.poll(monotonic())

    def stop(_context: object) -> None:
        for column in columns:
            column.stop()

    doc.on_session_destroyed(stop)
    return poll


def _history_before_run(setup: SetUp, graph: Any) -> History:
    """The history of a swarm that has not begun: its peers and links."""
    history = History(setup.name, "round")
    for peer in graph:
        history.apply(Observation(str(peer), 0.0, state="not started"))
        history.connect(str(peer), [str(other) for other in graph[peer]])
    return history


def _widget(kind: Any, title: str, value: Any, width: int, **options: Any) -> Any:
    return kind(title=title, value=value, width=width, stylesheets=[WIDGET_STYLE], **options)


def _number(
    title: str, value: float, low: float, high: float, step: float = 1, width: int = 80
) -> Any:
    return _widget(bk.Spinner, title, value, width, low=low, high=high, step=step)


def _button(label: str, on_click: Callable[[], None] | None = None, kind: str = "default") -> Any:
    button = bk.Button(
        label=label, button_type=kind, width=12 + 9 * len(label), stylesheets=[WIDGET_STYLE]
    )
    if on_click is not None:
        button.on_click(on_click)
    return button


def _wrapped(*children: Any) -> Any:
    row: Any = layouts.row(*children, sizing_mode="stretch_width", styles={"flex-wrap": "wrap"})
    return row


def _config_html(name: str, text: str) -> str:
    return (
        f"<details><summary>the config, {name}.toml: gossamer simulate {name}.toml repeats the run"
        f'</summary><pre style="overflow-x: auto">{escape(text)}</pre></details>'
    )
