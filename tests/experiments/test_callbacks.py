"""Callbacks are called in the same order in an arena, in virtual time, in a comparison and by a live peer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_kit import runs
from results_kit import Watch, at

from gossamer.errors import GossamerError
from gossamer.experiments import Swarm
from gossamer.experiments.arena import Arena, LearningSimulation, simulate_in_time
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.federated.comparison import Cell, parse_comparison, run
from gossamer.gossip import Hook, MemoryBroker, MemoryTransport, Will
from gossamer.models import (
    Callback,
    CallbackList,
    EarlyStopping,
    ModelError,
    PrintProgress,
    Progress,
    SaveNetworks,
)
from gossamer.peer import Peer, Report, Settings

ROUNDS, TEST_EVERY = 6, 2
TABLE: dict[str, Any] = {
    "name": "tiny", "peers": 3, "rounds": ROUNDS, "test_every": TEST_EVERY,
    "data": {"samples": 20, "test": 30}, "network": {"layout": "64=8=10"},
    "training": {"local_samples": 20},
}  # fmt: skip
MODELS = [{"name": "global", "layout": "64-6-10"}]


def config(**changes: Any) -> Config:
    return parse_config({**TABLE, "models": MODELS, **changes})


def in_arena(callback: Callback) -> int:
    """Run an arena; return the number of rounds."""
    learners = [member.learner for member in Swarm(config()).members()]
    return len(list(Arena(learners, test_every=TEST_EVERY).run(ROUNDS, [callback])))


def in_virtual_time(callback: Callback) -> int:
    """Run in virtual time, in which every peer trains for one second; return the seconds."""
    simulation = LearningSimulation(config(time={"training": 1, "delay": 0.1}))
    simulation.run([callback])
    return round(simulation.seconds)


def in_comparison(callback: Callback) -> int:
    """Run a method of a comparison; return the number of rounds."""
    comparison = parse_comparison({**TABLE, "methods": {"fedavg": {}}})
    record = run(Cell("fedavg", comparison, 0), [callback])
    return record["curve"][-1]["round"]


def live_report(callback: Callback) -> Report:
    """Run two live peers on a broker in memory, of which the first has the callback."""
    broker = MemoryBroker()

    def connect(client_id: str, will: Will, on_connect: Hook) -> MemoryTransport:
        return MemoryTransport(broker, client_id, will=will, on_connect=on_connect)

    settings = Settings(
        rounds=ROUNDS, test_every=TEST_EVERY, expect=("0", "1"), tick=0.01, mode="rounds"
    )

    async def both() -> Report:
        members = Swarm(config()).members()
        callbacks: list[list[Callback]] = [[callback], []]
        first, _ = await asyncio.gather(
            *(
                Peer(member.name, member.learner, settings, connect, callbacks=own).run()
                for member, own in zip(members[:2], callbacks, strict=True)
            )
        )
        return first

    return asyncio.run(both())


def live(callback: Callback) -> int:
    """Return the rounds of a live peer with the callback."""
    return live_report(callback).rounds


WORLDS = [in_arena, in_virtual_time, in_comparison, live]


@pytest.mark.parametrize("world", WORLDS)
def test_callbacks_are_called_in_order(world: Any) -> None:
    watch = Watch()
    assert world(watch) == ROUNDS
    rounds = [
        ("test", number // 2) if number % 2 else ("round", number // 2)
        for number in range(2, 2 * ROUNDS + 2)
    ]
    tested = [(name, n) for name, n in rounds if name == "round" or n % TEST_EVERY == 0]
    if world is in_virtual_time:  # the first test is known when the training after it has ended
        tested.remove(("test", TEST_EVERY))
    assert watch.order() == [("start", 0), *tested, ("end", ROUNDS)]
    assert all(told.rounds == ROUNDS for _, told in watch.calls)
    assert not any(told.tests for told in watch.told("round"))
    assert all(0 <= told.value("accuracy") <= 1 for told in watch.told("test"))
    assert watch.told("end")[0].tests == watch.told("test")[-1].tests
    if world in (in_arena, live):
        assert all(told.training for told in watch.told("round"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stop", [("round", 3), ("test", 4), ("start", 0)])
def test_a_callback_stops_a_run_by_returning_true(world: Any, stop: tuple[str, int]) -> None:
    watch = Watch(stop)
    assert world(watch) == stop[1]
    order = watch.order()
    assert order.count(stop) == 1
    assert order[-1] == ("end", stop[1])
    assert all(number <= stop[1] for _, number in order)


def test_a_stopped_round_is_tested() -> None:
    for world in WORLDS:
        watch = Watch(("round", 3))
        world(watch)
        assert watch.order()[-2:] == [("test", 3), ("end", 3)]


def test_a_stopped_peer_leaves_and_says_why() -> None:
    report = live_report(Watch(("test", 2)))
    assert (report.ended, report.reason) == ("left", "a callback stopped it")


@pytest.mark.parametrize("world", WORLDS)
def test_networks_have_the_values_of_now(world: Any) -> None:
    seen: list[torch.Tensor] = []

    class Keep(Callback):
        def round(self, progress: Progress) -> None:
            seen.append(progress.learners[0].network.flat.clone())

    world(Keep())
    assert len(seen) == ROUNDS
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))


def test_callbacks_do_not_change_virtual_time() -> None:
    table = {"time": {"training": "lognormal:1:0.5", "delay": 0.3}}
    # Arrays, which are not used with callbacks, round in another order.
    runs = [LearningSimulation(config(**table), arrays=False) for _ in range(2)]
    for simulation, callbacks in zip(runs, ([], [Watch()]), strict=True):
        simulation.run(callbacks)
    for one, other in zip(runs[0].members, runs[1].members, strict=True):
        assert torch.equal(one.network.flat, other.network.flat)
    assert runs[0].tests.by_peer == runs[1].tests.by_peer


def test_the_end_is_called_after_an_error_too() -> None:
    watch = Watch(interrupt_at=2)
    with pytest.raises(KeyboardInterrupt):
        in_arena(watch)
    assert watch.order()[-1] == ("end", 2)


def test_the_end_of_all_is_called_even_if_one_fails() -> None:
    class Faulty(Callback):
        def end(self, progress: Progress) -> None:
            raise ValueError("at the end")

    watch = Watch()
    followers = CallbackList([Faulty(), watch])
    followers.start(Progress(0, ROUNDS))
    with pytest.raises(ModelError, match="Faulty raised ValueError: at the end"):
        followers.end()
    assert watch.order() == [("start", 0), ("end", 0)]


@pytest.mark.parametrize("world", WORLDS)
def test_an_error_at_the_end_hides_no_earlier_one(world: Any, caplog: Any) -> None:
    class Faulty(Callback):
        def round(self, progress: Progress) -> None:
            raise ValueError("in the middle")

        def end(self, progress: Progress) -> None:
            raise ValueError("at the end")

    with pytest.raises(GossamerError, match="in the middle"):
        world(Faulty())
    assert "raised ValueError: at the end" in caplog.text


def told(round: int, accuracy: float) -> Progress:
    from gossamer.models import Metrics

    return Progress(round, 10, tests={"0": Metrics(1 - accuracy, accuracy * 100, 100)})


def test_early_stopping_waits_for_its_patience() -> None:
    early = EarlyStopping(patience=2)
    early.start(told(0, 0))
    stops = [early.test(told(n, a)) for n, a in enumerate([0.5, 0.7, 0.6, 0.8, 0.8, 0.8], 1)]
    assert stops == [False, False, False, False, False, True]
    assert (early.best, early.best_round) == (0.8, 4)
    losses = EarlyStopping(patience=1, metric="loss")
    assert [losses.test(told(n, a)) for n, a in enumerate([0.5, 0.7, 0.6], 1)] == [
        False, False, True,
    ]  # fmt: skip


def test_early_stopping_stops_an_arena() -> None:
    learners = [member.learner for member in Swarm(config()).members()]
    early = EarlyStopping(patience=3, least=1.0)  # nothing improves by 1
    assert len(list(Arena(learners).run(50, [early]))) == 4


def test_the_best_networks_are_saved(tmp_path: Path) -> None:
    members = Swarm(config()).members()
    save, arena = SaveNetworks(tmp_path), Arena([member.learner for member in members])
    save.test(Progress(1, 2, [members[0].learner], tests=told(1, 0.5).tests))
    best = members[0].network.flat.clone()
    list(arena.run(1))
    save.test(Progress(2, 2, [members[0].learner], tests=told(2, 0.4).tests))
    members[0].network.load(tmp_path / "0.safetensors")
    assert torch.equal(members[0].network.flat, best)


def test_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    in_arena(PrintProgress("accuracy", "loss"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["round", "2"], ["round", "4"], ["round", "6"]]
    assert "loss" in lines[0]


MODULE = """
from gossamer.models import Callback

class Log(Callback):
    def __init__(self, folder, name):
        self.file = folder / f"{name}.log"
    def round(self, progress):
        with self.file.open("a") as out:
            print(progress.round, file=out)
        return progress.round == 2

def make(folder, name):
    return Log(folder, name)

def wrong():
    return 3
"""


def written(folder: Path, **changes: Any) -> Config:
    (folder / "my_callbacks.py").write_text(MODULE, "utf-8")
    return config(callbacks=["my_callbacks:make"], **changes)


@pytest.mark.parametrize("time", [False, True])
def test_a_config_names_callbacks(
    time: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = written(tmp_path, **({"time": {}} if time else {}))
    source = str(tmp_path / "config.toml")
    if time:
        simulate_in_time(settings, at(tmp_path / "out"), source)
    else:
        from gossamer.experiments.arena import Simulation, simulate

        simulate(Simulation.of(settings, source), at(tmp_path / "out"))
    assert (tmp_path / "out" / "tiny.log").read_text().split() == ["1", "2"]
    after = r"after \S+ virtual seconds" if time else f"after round 2 of {ROUNDS}"
    assert re.search(f"stopped by callback Log {after}", capsys.readouterr().err)


compare = runs("compare")


def test_gossamer_compare_makes_new_callbacks_for_every_run(compare: Any, tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "compare.toml"
    path.write_text(
        'name = "tiny"\ncallbacks = ["my_callbacks:make"]\npeers = 3\nrounds = 4\nseeds = 2\n'
        "data = {total = 60, test = 30}\n[methods.fedavg]\n[methods.local]\n",
        "utf-8",
    )
    out = tmp_path / "out"
    result = compare(str(path), "--out", str(out), "--on", "local:1")
    assert result.code == 0, result.err
    logs = {file.name: file.read_text().split() for file in out.glob("*.log")}
    names = [f"{method}-{seed}.log" for method in ("fedavg", "local") for seed in (0, 1)]
    assert logs == {name: ["1", "2"] for name in names}
    told = "fedavg: stopped by callback Log: seed 0 after round 2, seed 1 after round 2"
    assert told in result.err
    assert told in json.loads((out / "run.json").read_text())["warnings"]
    assert "after at most 4 rounds" in result.out


def test_wrong_callbacks_are_refused_in_one_line(tmp_path: Path) -> None:
    written(tmp_path)
    source = str(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"key 'callbacks': .*no function or class 'absent'"):
        Swarm(config(callbacks=["my_callbacks:absent"]), source)
    with pytest.raises(ModelError, match=r"my_callbacks:wrong returned int instead of a gossamer"):
        simulate_in_time(
            config(callbacks=["my_callbacks:wrong"], time={}), at(tmp_path / "out"), source
        )
    with pytest.raises(ModelError, match="not an object of a subclass"):
        in_arena("TensorBoard")  # pyright: ignore[reportArgumentType]


def test_an_error_in_a_callback_names_its_line() -> None:
    class Broken(Callback):
        def test(self, progress: Progress) -> None:
            raise ValueError("no such place")

    with pytest.raises(
        ModelError, match=r"Broken raised ValueError: no such place, at .*, in 'test'"
    ):
        in_arena(Broken())


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="it is installed")
def test_without_tensorboard_one_line_says_what_to_install() -> None:
    from gossamer.models import TensorBoard

    with pytest.raises(ModelError, match=r'pip install "gossamer\[tensorboard\]"'):
        TensorBoard()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_files_have_the_means(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gossamer.models import TensorBoard

    watch = Watch()
    learners = [member.learner for member in Swarm(config()).members()]
    list(Arena(learners).run(3, [TensorBoard(tmp_path, "mine"), watch]))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "mine"))
    events.Reload()
    assert [event.value for event in events.Scalars("test/accuracy")] == pytest.approx(
        [told.value("accuracy") for told in watch.told("test")]
    )


class Recorder(ModuleType):
    """Stands for mlflow and wandb: notes the names of what is called, and the steps that are logged."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.called: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Recorder:
            self.called.append((name, options["step"]) if "step" in options else name)
            return self

        return call


@pytest.mark.parametrize(
    ("module", "callback", "expected"),
    [
        ("mlflow", "MLflow", ["start_run", *(("log_metrics", n) for n in (2, 4, 6)), "end_run"]),
        ("wandb", "WeightsAndBiases", ["init", *(("log", n) for n in (2, 4, 6)), "finish"]),
    ],
)
def test_the_documented_callbacks_log_every_test(
    module: str, callback: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "callbacks.md"
    block = page.read_text("utf-8").rpartition("```python\n")[2].partition("```")[0]
    space: dict[str, Any] = {"Callback": Callback}
    exec(block, space)
    recorder = Recorder(module)
    monkeypatch.setitem(sys.modules, module, recorder)
    in_arena(space[callback]())
    assert recorder.called == expected
