"""Studies on clusters: Dask and Ray, each started here for the test. `make test-engines` installs both."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_study import CELLS, STUDY, in_worker, keys, results
from typer.testing import CliRunner

from gossamer.experiments.cli.app import app
from gossamer.experiments.errors import ConfigError
from gossamer.experiments.results import Record, find_run
from gossamer.experiments.study import Job, StudyCell, run_study

REQUIRED = "GOSSAMER_REQUIRE_ENGINES" in os.environ
SWEEP = """
name = "tiny"
peers = 4
rounds = 2
data.set = "digits"
network.layout = "64=8=10"
models = [{ name = "global", layout = "64-8-10" }]

[sweep]
seed = [0, 1]
"training.rate" = [0.05, 0.1]
"""


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """The address of a Dask scheduler with two workers."""
    if not REQUIRED:
        pytest.importorskip("distributed", reason="needs Dask: make test-engines installs it")
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield f"dask:{cluster.scheduler_address}"


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """The address of a Ray cluster with two processors."""
    if not REQUIRED:
        pytest.importorskip("ray", reason="needs Ray: make test-engines installs it")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    yield f"ray:{cluster.address}"
    cluster.shutdown()


@pytest.fixture(params=["dask", "ray"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    # The workers import the functions of these tests.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return request.getfixturevalue(request.param)


def kill_once(cells: list[StudyCell], job: Job) -> list[Record]:
    """Kill the worker the first time that it computes the third run."""
    mark = job.folder / "killed"
    if cells[0].key == CELLS[2].key and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return in_worker(cells, job)  # type: ignore[arg-type]


@pytest.mark.engines
def test_a_killed_workers_run_is_computed_again(tmp_path: Path, place: str) -> None:
    run_study(replace(STUDY, run=kill_once), results(tmp_path), on=place)
    assert sorted(keys(tmp_path)) == sorted(cell.key for cell in CELLS)


@pytest.mark.engines
def test_a_sweep_has_the_same_table(tmp_path: Path, place: str) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP, "utf-8")
    tables = []
    for on in ("local:1", place):
        arguments = ["sweep", str(tmp_path / "tiny.toml"), "-o", str(tmp_path / on[:4]), "--on", on]
        ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
        tables.append((find_run(tmp_path / on[:4]) / "summary.csv").read_text())
    assert tables[0] == tables[1]
    assert tables[0].count("\n") > 2


@pytest.mark.engines
@pytest.mark.parametrize("on", ["dask:tcp://127.0.0.1:1", "ray:127.0.0.1:1"])
def test_an_address_where_nothing_answers(tmp_path: Path, on: str) -> None:
    if not REQUIRED:
        pytest.importorskip("ray" if "ray" in on else "distributed", reason="make test-engines")
    with pytest.raises(ConfigError, match=f"--on {on}: no (scheduler|cluster) answers there"):
        run_study(STUDY, results(tmp_path), on=on)


@pytest.mark.parametrize(("on", "module"), [("dask:tcp://h:1", "distributed"), ("ray:auto", "ray")])
def test_a_missing_engine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = on.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"is not installed: pip install 'gossamer\[{extra}\]'"):
        run_study(STUDY, results(tmp_path), on=on)
