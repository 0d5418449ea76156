"""`gossamer report`: what results folders become, and what is said of folders that are not complete."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_kit import write_live, write_run

from gossamer.experiments import ConfigError
from gossamer.experiments.cli import console
from gossamer.experiments.cli.app import main
from gossamer.experiments.cli.views import require_bokeh
from gossamer.experiments.config.tables import parse_config
from gossamer.experiments.federated.comparison import parse_comparison
from gossamer.experiments.page import History, Observation, read_folders, write_report
from gossamer.experiments.page.history import MOST_POINTS, Curve, Event, group_peers


def report(tmp_path: Path, *folders: Path) -> tuple[str, list[str]]:
    out = tmp_path / "report.html"
    problems = write_report(folders, out)
    return out.read_text("utf-8"), problems


def test_report_of_a_simulation(tmp_path: Path) -> None:
    html, problems = report(tmp_path, write_run(tmp_path / "run", links=[["0", "1"], ["1", "2"]]))
    assert not problems
    assert "gossamer simulate garden.toml" in html
    assert "python 3.11" in html
    assert "trust is off: &lt;anyone&gt; may listen" in html
    for text in ("swapped", "plain", "0.515", "0.500"):  # tasks, the mean, the worst peer
        assert text in html


def test_a_report_lists_the_settings_that_were_changed_and_have_an_effect(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "rounds": 5,
        "data": {"partition": "successive", "alpha": 0.1, "samples": 30},
        "gossip": {"lease": 99.0, "mode": "async"},
        "models": [{"name": "all", "share": 1.0, "matching": "none"}],
    }
    folder = write_run(tmp_path / "run")
    config = parse_config({"name": "garden", "peers": 4, **given})
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    html, _ = report(tmp_path, folder)
    table = html.partition("what is not at its default")[2].partition("</table>")[0]
    rows = re.findall(r"<td>([^<]*)</td>", table)
    assert dict(zip(rows[::2], rows[1::2], strict=True)) == {
        "name": "garden", "peers": "4", "rounds": "5", "data.samples": "30", "models.0.name": "all",
        "models.0.share": "1.0",
    }  # fmt: skip


def test_nothing_of_a_report_is_fetched(tmp_path: Path) -> None:
    html, _ = report(tmp_path, write_run(tmp_path / "run"))
    named: list[str] = []

    class Addresses(HTMLParser):  # it does not look into scripts, which mention tags as text
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named.extend(f"{tag} {value}" for name, value in attrs if name in ("src", "href"))

    Addresses().feed(html)
    assert named == ["link data:,"]


def test_runs_side_by_side(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", name="ring", topology="ring", seed=1),
        write_run(tmp_path / "b", name="star", topology="star", seed=1, rounds=3),
    ]
    html, _ = report(tmp_path, *folders)
    differing = html.partition("what differs between the runs")[2].partition("</table>")[0]
    assert re.findall(r"<td>(\w+)</td>", differing) == ["topology", "ring", "star"]
    assert "mean accuracy of all runs, by round" in html


def test_runs_of_one_config_have_names_of_their_own(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "garden" / "001"),
        write_run(tmp_path / "garden-live" / "001"),
        write_run(tmp_path / "garden" / "002"),
    ]
    folders = read_folders([*paths, paths[0]])
    names = [str(paths[0]), str(paths[1]), "garden 002"]
    assert [folder.name for folder in folders] == names


def test_live_run_shows_who_was_killed_and_who_left(tmp_path: Path) -> None:
    (run,) = read_folders([write_live(tmp_path / "run")])
    history = run.history()
    states = {name: (peer.state, peer.reason) for name, peer in history.peers.items()}
    assert states["0"][0] == states["3"][0] == "done"
    assert states["1"] == ("dead", "peer 1 was killed by signal 9; it is not restarted")
    assert states["2"] == ("left", "it was asked to leave")
    assert set(history.accuracies()) == {"0", "3"}
    assert history.links == {("0", "1"), ("1", "2"), ("2", "3")}
    assert history.disagreement["global"].y[-1] == pytest.approx(0.1 / 6)
    assert [event.kind for event in history.events].count("joined") == 4


def test_peers_that_were_stopped_together_did_not_leave(tmp_path: Path) -> None:
    """The run was interrupted: what they had reached is its result."""
    folder = write_live(tmp_path / "run")
    for name in ("0", "3"):
        report = {"peer": name, "ended": "left", "reason": "it was told to stop", "accuracy": 0.7}
        (folder / f"{name}.report.json").write_text(json.dumps(report))
    (run,) = read_folders([folder])
    history = run.history()
    assert set(history.accuracies()) == {"0", "3"}
    assert [event.peer for event in history.events if event.kind == "left"] == ["2"]


def test_history_up_to_a_moment(tmp_path: Path) -> None:
    (run,) = read_folders([write_live(tmp_path / "run")])
    history = run.history(until=2.0)
    assert history.peers["1"].round == 3
    assert not any(peer.gone for peer in history.peers.values())
    assert history.mean_accuracy.y[-1] == pytest.approx(0.6 + 0.015)


def test_study_folders(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "run.json").write_text('{"command": "sweep", "key": "k", "finished": true}')
    (folder / "summary.csv").write_text("rate,runs,mean\n0.1,2,0.55\n")
    runs = [
        {"settings": {"training.rate": 0.1, "seed": s}, "accuracy": 0.5 + s / 10} for s in (0, 1)
    ]
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    html, problems = report(tmp_path, folder)
    assert "a dot for every seed" in html
    assert "0.55" in html
    assert [("older version" in problem) for problem in problems] == [True]


def test_a_study_lists_the_keys_that_have_an_effect_in_a_run(tmp_path: Path) -> None:
    configs = {
        "sweep": parse_config(
            {
                "rounds": 20, "test_every": 4, "gossip": {"per_process": 2},
                "data": {"partition": "shards", "shards": 3},
                "sweep": {"data": {"partition": ["iid", "shards"]}},
            }
        ),
        "compare": parse_comparison({"rounds": 20, "metric": "loss", "methods": {"local": {}}}),
    }  # fmt: skip
    for command, config in configs.items():
        (tmp_path / command).mkdir()
        (tmp_path / command / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
        (tmp_path / command / "run.json").write_text(json.dumps({"command": command}))
        (tmp_path / command / "runs.jsonl").write_text("{}\n")
    sweep, comparison = read_folders([tmp_path / command for command in configs])
    assert set(sweep.changed) == {"rounds", "data.partition", "data.shards", "sweep.data.partition"}
    assert set(comparison.changed) == {"rounds", "metric"}


def test_methods_of_a_comparison_become_curves(tmp_path: Path) -> None:
    folder = tmp_path / "compare"
    folder.mkdir()
    (folder / "run.json").write_text('{"command": "compare", "key": "k", "finished": true}')
    curve = [{"round": r, "bytes": 100 * r, "seconds": r, "accuracy": [0.1, 0.3]} for r in (0, 1)]
    records = [
        {"method": "local", "seed": 0, "bound": True, "curve": [p | {"bytes": 0} for p in curve]},
        {"method": "fedavg", "seed": 0, "bound": False, "curve": curve},
    ]
    (folder / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    html, _ = report(tmp_path, folder)
    assert "mean accuracy by round" in html
    assert '"LogScale"' in html  # of the bytes, which begin after the start, when none were sent
    assert re.findall(r'\["xs",\[(\[[^]]*\])', html) == ["[0.0,1.0]", "[0.0001]"]
    lines = re.findall(r'\["method",(\[[^]]*\])', html)
    assert lines == ['["fedavg","local"]', '["fedavg"]']  # by rounds; by bytes, without the bound


def test_unfinished_run_is_drawn_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "peer": "0", "ta')  # killed while it wrote
    html, problems = report(tmp_path, folder)
    assert problems == [f"{folder}: the run was not finished; this is what it had written"]
    assert "was not finished" in html


def test_folder_of_an_older_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "run.json").write_text('{"command": "simulate", "key": null, "finished": true}')
    (folder / "peers.json").unlink()
    html, (problem,) = report(tmp_path, folder)
    assert "older version" in problem
    assert "swapped" in html


@pytest.mark.parametrize("files", [[], ["notes.txt"], ["run.json"]])
def test_folders_without_results_are_refused_in_one_line(tmp_path: Path, files: list[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match=str(folder)) as refused:
        write_report([folder], tmp_path / "report.html")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="no such folder"):
        write_report([tmp_path / "elsewhere"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_command_writes_beside_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    main_exit(["report", str(folder)])
    assert f"wrote {folder / 'report.html'}" in capsys.readouterr().out.replace("\n", "")
    assert (folder / "report.html").stat().st_size > 500_000


def main_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def test_missing_bokeh_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"gossamer\[page\]"):
        require_bokeh(lambda name: None)


def test_curves_stay_bounded_and_keep_their_ends() -> None:
    curve = Curve()
    for x in range(10 * MOST_POINTS):
        curve.add(float(x), x / 2)
        assert len(curve.x) <= MOST_POINTS
        assert curve.x[-1] == x
    assert curve.x[0] < 100
    assert all(y == x / 2 for x, y in zip(curve.x, curve.y, strict=True))


def test_mean_is_over_the_peers_that_take_part() -> None:
    history = History("garden")
    for name, accuracy in (("a", 0.2), ("b", 0.8)):
        history.apply(Observation(name, 1.0, accuracy=accuracy, state="training", group=name))
    history.sample(1.0)
    history.add(Event(2.0, "left", "b", "was asked to leave"))
    history.sample(2.0)
    assert history.mean_accuracy.y == [0.5, 0.2]
    assert history.peers["b"].reason == "was asked to leave"
    history.apply(Observation("b", 3.0, state="training"))
    assert (history.peers["b"].state, history.peers["b"].reason) == ("training", "")


def test_groups_are_tasks_or_semi_local_models() -> None:
    names = ["a", "b", "c"]
    own_tasks = {name: name for name in names}
    models = {"a": ["global", "north"], "b": ["global", "north"], "c": ["global"]}
    assert group_peers(own_tasks, models) == {"a": "north", "b": "north", "c": "no group"}
    tasks = {"a": "x", "b": "x", "c": "y"}
    assert group_peers(tasks, models) == tasks
    assert set(group_peers(own_tasks, {name: ["global"] for name in names}).values()) == {
        "all peers"
    }


def test_paper_shows_its_own_figure(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"command": "paper figure-1", "finished": True}))
    run = {"settings": {"x": 3}, "line": "shared", "accuracy": 0.5}
    (folder / "runs.jsonl").write_text(json.dumps(run) + "\n")
    (folder / "figure.png").write_bytes(b"a picture")
    html, _ = report(tmp_path, folder)
    assert 'alt="figure" src="data:image/png;base64,' in html
    assert "a dot for every seed" not in html


def test_only_a_long_run_leaves_a_report_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    console.leave_report(folder, seconds=console.REPORT_AFTER - 1)
    assert f"gossamer report {folder}" in capsys.readouterr().out.replace("\n", "")
    assert not (folder / "report.html").exists()
    console.leave_report(folder, seconds=console.REPORT_AFTER, find=lambda name: None)
    assert "pip install 'gossamer[page]', then gossamer report" in capsys.readouterr().out
    console.leave_report(folder, seconds=console.REPORT_AFTER)
    assert f"wrote {folder / 'report.html'}" in capsys.readouterr().out.replace("\n", "")
    assert (folder / "report.html").exists()
    console.leave_report(tmp_path, seconds=console.REPORT_AFTER)  # what cannot be read ends nothing
    assert "no page of these results" in capsys.readouterr().err.replace("\n", " ")


def test_folders_of_several_hosts_are_one_run(tmp_path: Path) -> None:
    first = write_live(tmp_path / "first", here=range(2))
    second = write_live(tmp_path / "second", here=range(2, 4), start=1002.0)
    (run,) = read_folders([second, first])
    history = run.history()
    assert {name: peer.round for name, peer in history.peers.items()} == {
        "0": 6, "1": 4, "2": 4, "3": 6,
    }  # fmt: skip
    assert {peer.curve.x[0] for peer in history.peers.values()} == {0.0, 2.0}
    assert {event.peer for event in run.events if event.kind in ("dead", "left")} == {"1", "2"}
    assert run.problems == []
    assert run.repeat == (
        "gossamer swarm live.toml --peers 2-3 and gossamer swarm live.toml --peers 0-1"
    )


def test_parts_of_other_runs_are_not_joined(tmp_path: Path) -> None:
    first = write_live(tmp_path / "first", here=range(2))
    again = write_live(tmp_path / "again", here=range(2))
    later = write_live(tmp_path / "later", here=range(2, 4), start=9000.0)
    runs = read_folders([first, again, later])
    assert [run.path.name for run in runs] == ["first", "again", "later"]
    assert runs[0].problems == [
        f"{first}: peers 2, 3 ran on other hosts; name the folders of those too"
    ]


@pytest.mark.parametrize("name", ["run.json", "config.json", "peers.json", "metrics.jsonl"])
def test_damaged_file_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text((folder / name).read_text()[:-3])
    (run,) = read_folders([folder])
    damaged = f"{folder}: {name} is damaged, perhaps half written; what cannot be read is left out"
    assert damaged in run.problems
    assert not any("older version" in line for line in run.problems)
