"""A peer that learns for ever: its data change, it is killed, and its network answers all the time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from peer_kit import Clocks, Nest, held, injected, quick
from waiting import until

from gossamer.models import SgdLearner, SlicedNetwork, mlp
from gossamer.peer import NetworkFile, about_path, read_about

WINDOW = 120


def untrained(name: str) -> SlicedNetwork:
    return SlicedNetwork(mlp("4=12=2"), {"global": "4-12-2"}, peer=name, seed=0)


def make(name: str) -> SgdLearner:
    """A learner without samples: all of them come from its folder."""
    none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    return SgdLearner(untrained(name), none, none, local_samples=60, batch=5, rate=0.1)


def samples(feature: int, seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Samples whose class says whether one of the four inputs is positive."""
    x = np.random.default_rng([feature, seed]).normal(size=(count, 4))
    return x, (x[:, feature] > 0).astype(int)


class Reader:
    """Another program: it reads the written network again and again, and uses it."""

    def __init__(self, path: Path) -> None:
        self.network, self._path = untrained("reader"), path
        self.reads, self.failures = 0, list[Exception]()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _read(self) -> None:
        network = untrained("thread")
        while not self._ends.wait(0.002):
            try:
                network.load(self._path)
                read_about(self._path)
                assert torch.isfinite(network(torch.ones(1, 4))).all()
                self.reads += 1
            except Exception as error:
                self.failures.append(error)

    def accuracy(self, feature: int) -> float:
        self.network.load(self._path)
        x, y = samples(feature, seed=99, count=200)
        classes = self.network(torch.tensor(x, dtype=torch.float32)).argmax(1)
        return float((classes == torch.tensor(y)).double().mean())


def test_data_change_three_times_and_the_peer_is_killed_twice(run, tmp_path):
    settings = quick(rounds="forever", window=WINDOW, founder=True)
    path = tmp_path / "a.safetensors"

    def start(nest, name):
        inbox = tmp_path / name
        inbox.mkdir(exist_ok=True)
        return nest.start(
            name,
            make(name),
            settings.updated(samples_folder=str(inbox)),
            checkpoint=tmp_path / f"{name}.checkpoint",
            network_file=NetworkFile(tmp_path / f"{name}.safetensors", 0.01),
        )

    def correct(peer):
        x, y = samples(3, seed=5)
        return (peer.predict(torch.tensor(x, dtype=torch.float32)).numpy() == y).mean()

    async def swarm():
        nest = Nest(settings)
        lives = {name: start(nest, name) for name in "ab"}
        await until(path.exists)
        with Reader(path) as reader:
            for feature in range(4):
                for name in "ab":
                    for number in range(3):
                        file = tmp_path / name / f"{feature}-{number}.npz"
                        x, y = samples(feature, seed=10 * number + ord(name))
                        with file.with_suffix(".part").open("wb") as part:
                            np.savez(part, x=x, y=y)
                        file.with_suffix(".part").replace(file)
                if feature in (1, 2):
                    before = lives["a"].view.round
                    await lives["a"].crash()
                    lives["a"] = start(nest, "a")
                    await until(lambda r=before: lives["a"].peer.link and lives["a"].view.round > r)
                await until(lambda f=feature: reader.accuracy(f) > 0.9, f"learning of {feature}")
            await until(lambda: correct(lives["a"].peer) > 0.8, "answers of the peer itself")
        for life in lives.values():
            life.peer.leave()
        reports = [await life.task for life in lives.values()]
        return reader, reports, lives

    reader, reports, lives = run(swarm())
    assert reader.failures == []
    assert reader.reads > 0
    for life in lives.values():
        assert len(life.peer.learner.samples[1]) == WINDOW
    assert {report.ended for report in reports} == {"left"}
    assert held(reports) == injected(reports)
    assert "round" in about_path(path).read_text()


def test_a_peer_that_was_told_to_leave_continues_where_it_was(run, tmp_path):
    settings = quick(rounds="forever", founder=True)

    async def twice():
        records, reports = [], []
        for _ in range(2):
            nest, records = Nest(settings), []
            life = nest.start("a", checkpoint=tmp_path / "a.checkpoint", on_record=records.append)
            await until(lambda records=records: len(records) > 3)
            life.peer.leave()
            reports.append(await life.task)
        return reports[0].rounds, records[0]["round"]

    last, first = run(twice())
    assert first == last + 1


def test_answers_are_of_one_round_while_the_peer_learns(run):
    """A network with one value everywhere: an answer from two rounds would mix two of them."""

    class Counting(SgdLearner):
        def train(self, steps):
            with torch.no_grad():
                self.network.flat.add_(1.0)
            return super().train(steps)

    none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    network = SlicedNetwork(torch.nn.Linear(4, 2000), {}, peer="a", rest="own", seed=0)
    network.flat.fill_(0.0)
    learner = Counting(network, none, none)
    seen = set()

    async def alone():
        nest = Nest(quick(rounds="forever", founder=True))
        life = nest.start("a", learner)
        ends = threading.Event()

        def ask():
            while not ends.wait(0.0005):
                seen.add(tuple(torch.unique(life.peer.network(torch.ones(1, 4))).tolist()))

        thread = threading.Thread(target=ask)
        thread.start()
        await until(lambda: life.peer.link and life.view.round > 30)
        ends.set()
        thread.join()
        life.peer.leave()
        await life.task

    run(alone())
    assert len(seen) > 1
    assert all(len(values) == 1 and values[0] % 5 == 0 for values in seen)


@pytest.mark.parametrize(("rounds", "least", "most"), [(40, 40, 40), ("forever", 4, 7)])
def test_the_log_of_a_peer_that_learns_for_ever_is_quiet(run, caplog, rounds, least, most):
    """Rounds take ten seconds each: a run with an end logs all of them, one without ever fewer."""
    clocks = Clocks()

    class Slow(SgdLearner):
        def train(self, steps):
            clocks.ahead += 10.0
            return super().train(steps)

    none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    learner = Slow(untrained("a"), none, none)
    caplog.set_level("INFO")

    async def alone():
        nest = Nest(quick(rounds=rounds, founder=True))
        records = []
        life = nest.start("a", learner, machine=clocks, on_record=records.append)
        if rounds == "forever":
            await until(lambda: len(records) >= 40)
            life.peer.leave()
        await life.task

    run(alone())
    lines = [r.getMessage() for r in caplog.records if ", accuracy" in r.getMessage()]
    assert least <= len(lines) <= most, lines


def test_a_peer_whose_rounds_are_over_goes_on_writing_its_network(run, tmp_path):
    """It stays with others that learn for ever, and averages: its file must not stay as it was."""
    path, never = tmp_path / "a.safetensors", 1e9

    def round_in_file() -> int:
        return read_about(path)["round"] if path.exists() else 0

    async def ended(pause: float) -> None:
        nest = Nest(quick(rounds="forever", founder=True))
        nest.start("b")
        few = quick(rounds=2, founder=True, save_network_every=min(pause, 0.01))
        nest.start("a", settings=few, network_file=NetworkFile(path, pause))
        await until(lambda: round_in_file() == 2, "the file of its last round")
        if pause != never:
            before = path.stat().st_mtime_ns
            await until(lambda: path.stat().st_mtime_ns > before, "a file written while it settles")
            assert round_in_file() == 2
        for life in nest.lives:
            life.peer.leave()
        await nest.all()
        path.unlink()

    run(ended(never))
    run(ended(0.01))


def test_the_first_pauses_between_writings_are_shorter(tmp_path):
    file = NetworkFile(tmp_path / "a.safetensors", 320.0)
    about = {"peer": "a", "swarm": "s", "session": "x", "accuracy": 0.5}
    written = []
    for now in range(0, 2000, 10):
        file.write_if_due(untrained("a"), float(now), 1e9, round=now, **about)
        if not written or written[-1] != read_about(file.path)["round"]:
            written.append(now)
    assert written == [0, 10, 30, 70, 150, 310, 630, 950, 1270, 1590, 1910]


def test_a_peer_may_pause_between_rounds_and_still_average(run):
    settings = quick(rounds="forever", founder=True)

    async def swarm():
        nest = Nest(settings)
        slow = nest.start("a", settings=settings.updated(round_every=1e6))
        fast = nest.start("b")
        await until(lambda: slow.peer.link and slow.view.round == 1, "the first round")
        before = slow.peer.learner.network.flat.clone()
        await until(lambda: fast.view.round > 5)
        await until(lambda: not torch.equal(before, slow.peer.learner.network.flat), "an average")
        assert slow.view.round == 1
        for life in nest.lives:
            life.peer.leave()  # at once, not after the pause
        return await nest.all()

    assert {report.ended for report in run(swarm())} == {"left"}
