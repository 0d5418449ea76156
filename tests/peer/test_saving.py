"""When checkpoints are written: before anything is told, now and then, and as long as the disk lets us."""

from __future__ import annotations

import logging
import math
import os
import stat

import pytest
from peer_kit import Clocks, Nest, Still, begin, held, injected, make_learner, quick
from safetensors import SafetensorError
from waiting import until

from gossamer.gossip import ONE, ReleasePlan
from gossamer.peer.engine import Engine
from gossamer.peer.exits import NotSaved
from gossamer.peer.machine import Files, load_checkpoint
from gossamer.peer.presence import Online
from gossamer.peer.settings import Limits

ROOM = 1 << 20
FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
PAIR = ("a", "b")


EAGER = Limits(save_share=math.inf)
"""However long a save takes, on whatever machine, the next one need not wait for it."""
GIVES_UP = Limits(save_retry=0.0)


def make_engine(path, machine=None, limits=None, **settings) -> Engine:
    learner = Still(make_learner("a"), 1.0)
    return begin(
        Engine("a", learner, quick(**settings), checkpoint=path, machine=machine, limits=limits)
    )


def saved_round(path) -> int:
    tree = load_checkpoint(path)
    assert tree is not None
    return tree["books"]["round"]


def turn(engine: Engine, *events, now: float = 0.0):
    return engine.turn([], events, now, ROOM)


class Disk(Files):
    """Counts what is written, and can be full; a save may take long by a machine's clock."""

    def __init__(self, machine: Clocks):
        self.full, self.saves, self.takes = False, 0, 0.0
        self._machine = machine

    def save(self, path, tree, *, sync) -> None:
        if self.full:
            raise FULL
        self.saves += 1
        super().save(path, tree, sync=sync)
        self._machine.ahead += self.takes


@pytest.fixture
def machine():
    """A machine whose files are a Disk."""
    made = Clocks()
    made.files = Disk(made)
    return made


@pytest.fixture
def disk(machine):
    return machine.files


def test_who_trains_alone_saves_now_and_then(tmp_path):
    path = tmp_path / "a.checkpoint"
    engine = make_engine(path, limits=EAGER, save_every=0.0)
    for number in range(1, 4):
        engine.train()
        turn(engine)
        assert saved_round(path) == number


def test_it_does_not_save_all_the_time(tmp_path, machine, disk):
    engine = make_engine(tmp_path / "a", machine, EAGER, save_every=1e9)
    engine.train()
    turn(engine)
    assert disk.saves == 1
    engine = make_engine(tmp_path / "b", machine, EAGER, save_every=0.0)
    engine.train()
    turn(engine)
    turn(engine)  # nothing was trained since
    assert disk.saves == 3


def test_what_takes_long_to_save_is_saved_less_often(tmp_path, machine, disk):
    disk.takes = 10.0
    engine = make_engine(tmp_path / "a", machine, Limits(save_share=0.1), save_every=0.0)
    assert disk.saves == 1
    machine.frozen = machine.monotonic() - machine.ahead
    for passed, saves in ((90.0, 1), (11.0, 2)):  # ten times as long as a save takes
        machine.ahead += passed
        engine.train()
        turn(engine)
        assert disk.saves == saves


def test_what_is_only_repeated_is_not_saved_again(tmp_path, machine, disk):
    engine = make_engine(tmp_path / "a.checkpoint", machine, save_every=1e9)
    before = disk.saves
    engine.train()
    sent = turn(engine, Online("b", "b-1", ("global",), counting_rounds={"global": 1}))
    engine.train()
    sent = turn(engine)
    assert sent
    assert disk.saves == before + 1
    repeated = turn(engine, now=1e6)
    assert repeated
    assert disk.saves == before + 1
    back = Engine(
        "a",
        Still(make_learner("a"), 0.0),
        quick(),
        checkpoint=tmp_path / "a.checkpoint",
        machine=machine,
    )
    assert back.restored
    mine, its = (each.gossiper.ledger.open["b", "global"].give for each in (engine, back))
    assert (mine.sequence, mine.weight) == (its.sequence, its.weight)


def test_nothing_is_sent_that_could_not_be_saved(tmp_path, machine, disk, caplog):
    path = tmp_path / "a.checkpoint"
    engine = make_engine(path, machine, GIVES_UP)
    turn(engine, Online("b", "b-1", ("global",), counting_rounds={"global": 1}))
    engine.train()
    disk.full = True
    with pytest.raises(NotSaved) as found:
        turn(engine)
    text = str(found.value)
    assert text.startswith(f"peer a: its checkpoint {path} cannot be written: ")
    for word in ("No space left on device", "free disk space", "within its lease of 600 s"):
        assert word in text
    assert caplog.text.count("cannot write its checkpoint") == 1


def test_a_disk_that_is_full_for_a_while_only_holds_things_up(tmp_path, machine, disk, caplog):
    engine = make_engine(tmp_path / "a.checkpoint", machine)
    turn(engine, Online("b", "b-1", ("global",), counting_rounds={"global": 1}))
    engine.train()
    disk.full = True
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert not turn(engine)
            machine.ahead += 5.0
        disk.full = False
        assert turn(engine)  # the very messages that had to wait
    assert caplog.text.count("cannot write its checkpoint") == 1
    assert "can write its checkpoint again" in caplog.text


def test_who_has_nobody_to_tell_goes_on_without_room(tmp_path, machine, disk, caplog):
    path = tmp_path / "a.checkpoint"
    engine = make_engine(path, machine, EAGER, save_every=0.0)
    disk.full = True
    for _ in range(3):
        engine.train()
        turn(engine)
    assert caplog.text.count("cannot write its checkpoint") == 1
    assert saved_round(path) == 0
    disk.full = False
    turn(engine)
    assert saved_round(path) == 3


def test_a_peer_without_room_ends_as_if_killed_and_goes_on_where_it_was(run, tmp_path):
    """Nobody was told what was not saved, so nothing is lost: with room again, it returns in its session."""

    class FullOnce(Disk):
        def save(self, path, tree, *, sync) -> None:
            try:
                super().save(path, tree, sync=sync)
            except SafetensorError:
                self.full = False  # there is room again at once, and yet no goodbye
                raise

    machine = Clocks()
    machine.files = disk = FullOnce(machine)

    async def swarm():
        nest = Nest(quick(rounds=10**9, expect=PAIR, founder=True), limits=GIVES_UP)
        one = nest.start("a", checkpoint=tmp_path / "a.checkpoint")
        two = nest.start("b", checkpoint=tmp_path / "b.checkpoint", machine=machine)
        await until(lambda: two.counts() and two.peer.link.view.round > 2)
        session = two.peer.link.session
        disk.full = True
        with pytest.raises(NotSaved):
            await two.task
        two.crashed = True
        status = nest.broker.retained["gossamer/v1/nest/peer/b/status"]
        assert b'"offline"' in status  # its last will, no goodbye
        again = nest.start("b", checkpoint=tmp_path / "b.checkpoint", machine=machine)
        await until(again.trains)
        assert again.peer.link.session == session
        for life in (one, again):
            life.go_on_for(3)
        return await nest.all()

    reports = run(swarm())
    assert held(reports) == injected(reports) == 2
    assert [r.weight["global"][2] for r in reports] == [ONE, ONE]


def forced(monkeypatch) -> list[str]:
    """What is forced to the disk: files, or the names in a folder."""
    kinds: list[str] = []

    def sync(file: int) -> None:
        kinds.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")

    monkeypatch.setattr("gossamer.files.os.fsync", sync)
    return kinds


@pytest.mark.parametrize(
    ("boot", "plan", "expected"),
    [
        ("some boot", None, []),
        (None, None, ["file", "folder"]),
        ("some boot", ReleasePlan(clip=1.0, noise=1.0, delta=1e-5), ["file", "folder"]),
    ],
    ids=["boots have names", "they have none", "what is released is counted"],
)
def test_what_must_outlive_a_power_cut_is_forced_to_the_disk(
    tmp_path, monkeypatch, boot, plan, expected
):
    kinds = forced(monkeypatch)
    make_engine(tmp_path / "a.checkpoint", Clocks(boot), dp=plan)
    assert kinds == expected


def test_who_is_in_touch_without_a_new_round_says_so_in_its_file(tmp_path):
    """Else a peer that waits for others for a lease, and crashes, would believe that it was away so long."""
    machine = Clocks()
    machine.frozen = 1000.0
    engine = make_engine(tmp_path / "a", machine, EAGER, lease=600.0, save_every=10.0)
    before = (tmp_path / "a").read_bytes()
    machine.ahead += 100.0
    engine.turn([], [], 0.0, ROOM, last_contact=machine.uptime())
    assert (tmp_path / "a").read_bytes() == before
    machine.ahead += 100.0
    engine.turn([], [], 0.0, ROOM, last_contact=machine.uptime())
    assert (tmp_path / "a").read_bytes() != before
