"""The lab without a browser: set-ups as configs and graphs, their runs, and clicks on its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bokeh.document import Document
from bokeh.events import ButtonClick
from bokeh.models import Button, ColumnDataSource, Div, Select, Spinner, TextInput
from cli_kit import Run as Command
from cli_kit import runs
from waiting import wait_until

from gossamer.experiments.config.tables import load_config
from gossamer.experiments.page import Run, SetUp, build_lab, spread
from gossamer.experiments.page.setups import DATA, SHARING, TASKS
from gossamer.experiments.results import Results, read_records
from gossamer.topology import TopologyError

command = runs("simulate")


def records(folder: Path) -> list[dict[str, Any]]:
    return list(read_records(folder / "metrics.jsonl"))


def run(setup: SetUp, folder: Path) -> Run:
    """Run a set-up to its end."""
    started = Run(setup.config(), Results(folder, "simulate", exact=True))
    wait_until(lambda: started.done, "the run ends")
    return started


@pytest.mark.parametrize(
    "choices",
    [
        {"leave": 5.0, "lost": 10.0},
        {"tasks": list(TASKS)[1], "sharing": list(SHARING)[3], "data": list(DATA)[1]},
    ],
)
def test_the_downloaded_config_gives_the_same_numbers(
    tmp_path: Path, command: Command, choices: dict[str, Any]
) -> None:
    setup = SetUp("lab-a", "regular", peers=6, rounds=3, **choices)
    setup = setup.toggle(setup.load(), 0, next(iter(setup.load().graph[0])))
    ran = run(setup, tmp_path / "lab")
    assert ran.error == ""
    (tmp_path / "lab-a.toml").write_text(setup.toml())
    assert command("lab-a.toml", "--out", "command").code == 0
    assert records(tmp_path / "lab") == records(tmp_path / "command") != []


def test_every_choice_is_a_config(tmp_path: Path) -> None:
    for number, choice in enumerate((*SHARING, *TASKS, *DATA)):
        field = "sharing" if choice in SHARING else "tasks" if choice in TASKS else "data"
        (tmp_path / f"{number}.toml").write_text(SetUp("lab-a", **{field: choice}).toml())
        assert load_config(tmp_path / f"{number}.toml").topology == "ring"


def test_links_are_cut_and_added() -> None:
    ring = SetUp("lab-a", peers=4)
    cut = ring.toggle(ring.load(), 3, 0)
    assert cut.table()["topology"] == {"kind": "links", "links": [[0, 1], [1, 2], [2, 3]]}
    assert set(cut.load().graph.edges) == {(0, 1), (1, 2), (2, 3)}
    assert set(cut.toggle(cut.load(), 0, 3).load().graph.edges) == set(ring.load().graph.edges)
    arrows = SetUp("lab-a", "exponential", peers=4)
    arrows = arrows.toggle(arrows.load(), 0, 1)
    assert arrows.load().graph.is_directed()
    assert set(arrows.load().graph.edges) == {
        (0, 2),
        (1, 2),
        (1, 3),
        (2, 3),
        (2, 0),
        (3, 0),
        (3, 1),
    }
    changing = SetUp("lab-a", "rotating-rings", peers=6)
    with pytest.raises(TopologyError, match="rotating-rings changes in every step"):
        changing.toggle(changing.load(), 0, 1)


def test_a_file_becomes_part_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "club.edges").write_text("a b\nb c\n")
    setup = SetUp("lab-a", str(tmp_path / "club.edges"))
    assert len(setup.load().graph) == 3
    assert setup.table()["topology"] == {"kind": "links", "links": [[0, 1], [1, 2]]}


def test_a_value_spreads_until_all_have_the_average() -> None:
    path = SetUp("lab-a", "path", peers=3).load()
    estimates = spread(path, 0, 60)
    assert estimates[0] == [3.0, 0.0, 0.0]
    assert estimates[1][1] > 0
    assert estimates[1][2] == 0  # two hops away
    assert estimates[-1] == pytest.approx([1.0, 1.0, 1.0])


def test_a_run_is_stopped_and_keeps_its_records(tmp_path: Path) -> None:
    setup = SetUp("lab-a", peers=4, rounds=2000)
    started = Run(setup.config(), Results(tmp_path / "lab", "simulate", exact=True))
    wait_until(lambda: started.folder, "the first round")
    started.stop()
    wait_until(lambda: started.done, "the run ends")
    assert started.error == ""
    assert 0 < len(records(tmp_path / "lab")) < 4 * 2000
    assert not json.loads((tmp_path / "lab" / "run.json").read_text())["finished"]


def test_a_run_that_cannot_begin_says_why_in_one_line(tmp_path: Path) -> None:
    setup = SetUp("lab-a", "ring", peers=4, sharing=list(SHARING)[4], lost=10.0)
    failed = run(setup, tmp_path / "lab")
    assert "key 'sharing'" in failed.error
    assert "\n" not in failed.error
    assert not (tmp_path / "lab").exists()


class Column:
    """One column of a lab, as its user sees it."""

    def __init__(self, folder: Path):
        doc = Document()
        build_lab(doc, folder)
        self.root: Any = next(root for root in doc.roots if root.name == "a")

    def find(self, kind: Any, title: str | None = None) -> Any:
        widgets = self.root.select({"type": kind})
        return next(each for each in widgets if title in (None, each.title))

    def text(self) -> str:
        return " ".join(each.text for each in self.root.select({"type": Div}))

    def click(self, peer: int, other: int | None = None) -> None:
        """Click a peer, or the link between two."""
        sources = [each for each in self.root.references() if isinstance(each, ColumnDataSource)]
        clicks: Any = next(each for each in sources if "count" in each.column_names)
        count = clicks.data["count"][0] + 1
        clicks.data = {
            "a": [str(peer)],
            "b": ["" if other is None else str(other)],
            "count": [count],
        }


def test_the_page_follows_what_is_chosen(tmp_path: Path) -> None:
    lab = Column(tmp_path)
    assert "exchanges to 1e-06" in lab.text()
    lab.find(Select, "graph").value = "star"
    assert lab.find(TextInput).value == "star"
    assert "topology = &quot;star&quot;" in lab.text()
    lab.find(TextInput).value = "networkx:petersen_graph"
    assert lab.find(Spinner, "peers").value == 10
    lab.find(TextInput).value = "networkx:petersn_graph"
    assert "petersn_graph" in lab.text()


def test_clicks_on_the_page_cut_and_add_links(tmp_path: Path) -> None:
    lab = Column(tmp_path)
    lab.find(TextInput).value = "path"
    lab.click(4, 5)
    assert "path" in lab.text()
    assert "exchanges to 1e-06" not in lab.text()  # in two pieces
    lab.click(0)
    assert "peer 0: click another one" in lab.text()
    lab.click(15)
    assert "exchanges to 1e-06" in lab.text()
    assert "[0, 15]" in lab.text()


def test_a_click_on_a_peer_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    lab = Column(tmp_path)
    lab.click(15)
    lab.find(Spinner, "peers").value = 8
    lab.click(3)
    assert "peer 3: click another one" in lab.text()
    assert lab.find(Spinner, "peers").value == 8


def test_undo_leaves_all_choices_but_links(tmp_path: Path) -> None:
    lab = Column(tmp_path)
    lab.click(0, 1)
    lab.find(Spinner, "rounds").value = 7
    undo = next(each for each in lab.root.select({"type": Button}) if each.label == "undo")
    lab.root.document.callbacks.trigger_event(ButtonClick(undo))
    assert "topology = &quot;ring&quot;" in lab.text()
    assert "rounds = 7" in lab.text()
