"""Commands leave each other's results alone, whatever happens to them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from cli_kit import Result, Run, runner
from disk_kit import largest_file

from gossamer.experiments.arena import save_networks
from gossamer.experiments.build import Swarm
from gossamer.experiments.cli import console
from gossamer.experiments.config.tables import ConfigError, load_config, parse_config
from gossamer.experiments.live.run import run_live
from gossamer.experiments.results import Results, read_records
from gossamer.peer import BrokerAddress, CheckpointLock, ProcessSpec

torch.set_num_threads(1)

TINY = """
name = "tiny"
peers = 2
rounds = {rounds}
[data]
samples = 10
test = 20
[network]
layout = "64=4=10"
"""
URL = "mqtt://127.0.0.1:1"

Gossamer = Run


@pytest.fixture
def gossamer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gossamer:
    """Runs the command in this process, in a folder of its own."""
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=4))
    return runner(tmp_path, monkeypatch, capsys)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def only_line(result: Result) -> str:
    assert result.code == 2
    assert "Traceback" not in result.err
    line = result.err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def rounds_of(folder: Path) -> int:
    return max(record["round"] for record in read_records(folder / "metrics.jsonl"))


# --- simulate ---------------------------------------------------------------------------------------


def test_a_shorter_simulation_does_not_replace_a_longer_one(
    gossamer: Gossamer, tmp_path: Path
) -> None:
    assert gossamer("simulate", "tiny.toml").code == 0
    place = tmp_path / "results" / "tiny"
    before = contents(place / "001")
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=2))
    assert gossamer("simulate", "tiny.toml").code == 0
    assert contents(place / "001") == before
    assert (rounds_of(place / "002"), rounds_of(place / "latest")) == (2, 2)
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=3))
    result = gossamer("simulate", "tiny.toml", "--force")
    assert "wrote results/tiny/002/metrics.jsonl" in result.out
    assert contents(place / "001") == before
    assert rounds_of(place / "002") == 3
    assert {each.name for each in place.iterdir()} == {"001", "002", "latest"}


def test_a_named_folder_is_replaced_by_force_alone(gossamer: Gossamer, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=2))
    assert gossamer("simulate", "tiny.toml", "-o", "out").code == 0
    before = contents(tmp_path / "out")
    assert only_line(gossamer("simulate", "tiny.toml", "-o", "out")) == (
        "error: out: holds the results of gossamer simulate; name another folder, or replace them with "
        "--force"
    )
    assert contents(tmp_path / "out") == before
    assert gossamer("simulate", "tiny.toml", "-o", "out", "--force").code == 0


def test_a_simulation_that_finds_no_room_is_one_line_and_leaves_whole_files(
    gossamer: Gossamer, tmp_path: Path
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=80))
    with largest_file(8000):
        result = gossamer("simulate", "tiny.toml", "-o", "out", "--networks")
    line = only_line(result)
    assert "out/" in line
    assert "cannot be written" in line
    left = contents(tmp_path / "out")
    assert {"config.json", "metrics.jsonl", "run.json"} <= set(left)
    assert not [name for name in left if name.endswith(".part") or name == ".lock"]
    lines = left["metrics.jsonl"].decode().splitlines()
    assert left["metrics.jsonl"].endswith(b"\n")
    assert all(json.loads(line)["round"] for line in lines)
    assert 8000 - 200 < len(left["metrics.jsonl"]) <= 8000
    assert not json.loads(left["run.json"])["finished"]


def test_networks_are_whole_or_not_there(tmp_path: Path) -> None:
    table = {"peers": 2, "data": {"samples": 10}, "network": {"layout": "64=4=10"}}
    members = Swarm(parse_config(table)).members()
    with largest_file(500), pytest.raises(ConfigError, match=r"0\.safetensors: cannot be"):
        save_networks(members, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- two commands at one place ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "tiny.toml", "-o", "out"],
        ["swarm", "tiny.toml", "-o", "out", "--broker", URL],
        ["demo", "-o", "out", "--broker", URL],
        ["virtual", "--peers", "8", "-o", "out"],
        ["sweep", "tiny.toml", "-o", "out"],
        ["topology", "show", "ring", "-o", "out"],
        ["slices", "64=8=10", "-o", "out"],
        ["paper", "fednp-toy", "-o", "out"],
        ["paper", "averaging-level", "--quick", "-o", "out"],
    ],
    ids=" ".join,
)
def test_a_second_command_in_the_same_folder_is_refused_and_deletes_nothing(
    gossamer: Gossamer, tmp_path: Path, command: list[str]
) -> None:
    first = Results(tmp_path / "out", "swarm", exact=True)
    with first.run_folder() as folder:
        for name in ("0.checkpoint", "0.jsonl", "host-0.log", "metrics.jsonl", "config.json"):
            (folder / name).write_text("the first's")
        before = contents(folder)
        for options in ([], ["--force"]):
            assert only_line(gossamer(*command, *options)).startswith(
                "error: out: another gossamer command is writing its results there; wait"
            )
        assert contents(folder) == before


# --- sweeps -----------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The cells that were really run."""
    from gossamer.experiments.study import sweep

    seen: list[object] = []
    run = sweep.run_cells

    def noting(cells, job):
        seen.extend(cells)
        return run(cells, job)

    monkeypatch.setattr(sweep, "run_cells", noting)
    return seen


def test_a_sweep_goes_on_in_its_folder_until_it_is_finished(
    gossamer: Gossamer, tmp_path: Path, ran: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "results" / "sweep" / "tiny"
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=1) + "[sweep]\nrounds = [1, 2]\n")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(console, "progress", stop)
        assert gossamer("sweep", "tiny.toml", "--on", "local:1").code == 130
    assert [each.name for each in place.glob("0*")] == ["001"]
    assert gossamer("sweep", "tiny.toml", "--on", "local:1").code == 0
    assert [each.name for each in place.glob("0*")] == ["001"]
    assert len(ran) == 2
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=1) + "[sweep]\nrounds = [1, 2, 3]\n")
    result = gossamer(
        "sweep", "tiny.toml", "--on", "local:1"
    )  # another sweep, which has two runs in common
    assert "2 of 3 runs are copied from results/sweep/tiny/001" in result.err
    assert len(ran) == 3
    assert len(list(read_records(place / "002" / "runs.jsonl"))) == 3
    assert len(list(read_records(place / "001" / "runs.jsonl"))) == 2
    assert (
        gossamer("sweep", "tiny.toml", "--on", "local:1", "--force").code == 0
    )  # all of them again
    assert len(ran) == 6
    assert [each.name for each in sorted(place.glob("0*"))] == ["001", "002"]


def test_a_torn_line_of_a_killed_sweep_is_run_again(
    gossamer: Gossamer, tmp_path: Path, ran: list[object]
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=1) + "\n[sweep]\nrounds = [1, 2]\n")
    assert gossamer("sweep", "tiny.toml", "--on", "local:1").code == 0
    run = tmp_path / "results" / "sweep" / "tiny" / "001"
    lines = (run / "runs.jsonl").read_text().splitlines()
    (run / "runs.jsonl").write_text(lines[0] + "\n" + lines[1][:20])
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"finished": False}))
    ran.clear()
    assert gossamer("sweep", "tiny.toml", "--on", "local:1").code == 0
    assert len(ran) == 1
    assert [record["accuracy"] for record in read_records(run / "runs.jsonl")] == [
        json.loads(line)["accuracy"] for line in lines
    ]


# --- live swarms ------------------------------------------------------------------------------------

LIVE = f"""{TINY.format(rounds=3)}
[[models]]
name = "all"
layout = "64-4-10"
[gossip]
per_process = 2
"""


def test_peers_keep_running_if_metrics_cannot_be_written(tmp_path: Path, empty_broker) -> None:
    (tmp_path / "live.toml").write_text(LIVE)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to("no such folder/metrics.jsonl")
    config, address = load_config(tmp_path / "live.toml"), BrokerAddress(empty_broker.url)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written: No such file"):
        run_live(config, folder, nullcontext(address), quiet=True)
    for peer in ("0", "1"):
        assert json.loads((folder / f"{peer}.report.json").read_text())["rounds"] == 3
        assert (folder / f"{peer}.safetensors").exists()
    (event,) = json.loads((folder / "outcome.json").read_text())["events"]
    assert event.endswith(
        "metrics.jsonl: cannot be written: No such file or directory; the peers keep running"
    )


def test_a_swarm_does_not_start_in_the_folder_of_another(tmp_path: Path) -> None:
    (tmp_path / "live.toml").write_text(LIVE)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "0.checkpoint").write_text("another's")
    before = contents(folder)
    with pytest.raises(ConfigError, match="out: holds the results of another swarm"):
        run_live(load_config(tmp_path / "live.toml"), folder, nullcontext(BrokerAddress(URL)))
    assert contents(folder) == before


# --- join -------------------------------------------------------------------------------------------


@pytest.fixture
def join(gossamer: Gossamer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `gossamer join … -o out`; `join.started` are the processes that it would run."""
    started: list[ProcessSpec] = []
    # At the package's door, which remembers what it has once looked up in its module.
    monkeypatch.setattr("gossamer.peer.run_guarded", lambda spec, **_: started.append(spec) or 0)
    (tmp_path / "anna.toml").write_text('name = "anna"\nentry = "m:f"\nrounds = 5\n')
    (tmp_path / "m.py").write_text("")
    (tmp_path / "out").mkdir()

    def run(*options: str) -> Result:
        where = ("--broker", URL, "--swarm", "s", "--config", "anna.toml", "-o", "out")
        return gossamer("join", *where, *options)

    run.started = started  # type: ignore[attr-defined]
    return run


def report(folder: Path, text: str) -> Path:
    path = folder / "anna.report.json"
    path.write_text(text)
    return path


def test_a_finished_peer_does_not_start_from_scratch(join, tmp_path: Path) -> None:
    report(tmp_path / "out", '{"peer": "anna", "rounds": 5}')
    before = contents(tmp_path / "out")
    result = join()
    assert result.code == 0
    assert result.out == (
        "peer anna has finished its 5 rounds (report: out/anna.report.json); use --again to start from the "
        "beginning\n"
    )
    assert join.started == []
    assert contents(tmp_path / "out") == before


def test_a_finished_peer_with_a_checkpoint_says_goodbye_again(join, tmp_path: Path) -> None:
    """It was killed before its connection was closed, and its last will has replaced its goodbye."""
    report(tmp_path / "out", '{"peer": "anna", "rounds": 5}')
    (tmp_path / "out" / "anna.checkpoint").write_text("holds the ending")
    assert join().code == 0
    assert len(join.started) == 1


def test_again_begins_anew(join, tmp_path: Path) -> None:
    report(tmp_path / "out", '{"peer": "anna", "rounds": 5}')
    (tmp_path / "out" / "anna.checkpoint").write_text("left over")
    (tmp_path / "out" / "anna.safetensors").write_text("what it learnt")
    assert join("--again").code == 0
    assert len(join.started) == 1
    assert set(contents(tmp_path / "out")) == {"anna.safetensors"}
    assert join().code == 0  # there is no report, as after a kill
    assert len(join.started) == 2


def test_again_leaves_a_running_peer_alone(join, tmp_path: Path) -> None:
    checkpoint = tmp_path / "out" / "anna.checkpoint"
    checkpoint.write_text("in use")
    lock = CheckpointLock(checkpoint)
    lock.acquire()
    try:
        assert "peer anna runs here already" in only_line(join("--again"))
    finally:
        lock.release()
    assert checkpoint.read_text() == "in use"
    assert join.started == []


@pytest.mark.parametrize("text", ["", '{"rou', "[]", "{}", '{"rounds": null}'])
def test_an_invalid_report_does_not_keep_a_peer_from_starting(
    join, tmp_path: Path, text: str
) -> None:
    report(tmp_path / "out", text)
    assert join().code == 0
    assert len(join.started) == 1


def test_a_peer_that_left_early_says_that_it_begins_anew(join, tmp_path: Path) -> None:
    report(tmp_path / "out", '{"peer": "anna", "rounds": 2}')
    result = join()
    assert (
        "peer anna left after 2 of 5 rounds (report: out/anna.report.json); it starts from the beginning"
        in result.err
    )
    assert len(join.started) == 1
    (tmp_path / "out" / "anna.checkpoint").write_text("it came back since")
    assert "starts from the beginning" not in join().err


# --- readers ----------------------------------------------------------------------------------------


def test_fuse_takes_a_run_or_the_latest_run_of_a_folder(gossamer: Gossamer, tmp_path: Path) -> None:
    for _ in range(2):
        assert gossamer("simulate", "tiny.toml", "--networks", "--checkpoint", "1").code == 0
    assert (tmp_path / "results" / "tiny" / "001" / "checkpoint.safetensors").exists()  # no network
    (tmp_path / "results" / "tiny" / "001" / "0.safetensors").unlink()
    latest = gossamer("fuse", "results/tiny", "-o", "a.safetensors")
    assert latest.code == 0, latest.err
    assert "results/tiny/latest/0.safetensors" in latest.out
    first = gossamer("fuse", "results/tiny/001", "-o", "b.safetensors")
    assert "results/tiny/001/1.safetensors" in first.out
    assert "001/0.safetensors" not in first.out
