"""Simulated devices: clocks, disks, kills and the worker."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from pathlib import Path

import pytest
import torch

from gossamer.peer import PeerError

from .loop import SimLoop
from .world import Device, Entropy, Process

FILE = Path("checkpoint")


def device(**options):
    return Device("ann", SimLoop(random.Random(0)), random.Random(0), **options)


def run(device, main):
    with Entropy("test"):
        return device.loop.run_until_complete(main)


def test_a_disk_keeps_copies_and_outlives_the_process():
    ann = device()
    first, values = Process(ann), torch.zeros(2)
    first.files.save(FILE, {"values": values, "pair": (1, 2)}, sync=False)
    values += 1
    first.kill()
    second = Process(ann)
    tree = second.files.load(FILE)
    assert tree is not None
    assert tree["values"].tolist() == [0, 0]
    assert tree["pair"] == [1, 2]  # as the JSON of a checkpoint has it
    with pytest.raises(TypeError, match="cannot hold a set"):
        second.files.save(FILE, {"x": {1}}, sync=False)


def test_a_killed_process_cannot_write_and_loses_its_lock():
    ann = device()
    first, second = Process(ann), Process(ann)
    first.files.lock(FILE).acquire()
    with pytest.raises(PeerError, match="another process uses it"):
        second.files.lock(FILE).acquire()
    first.kill()
    first.files.save(FILE, {"x": 1}, sync=True)
    second.files.lock(FILE).acquire()
    assert second.files.load(FILE) is None


def test_a_full_disk_refuses():
    ann = device()
    ann.full_until = 5.0
    with pytest.raises(OSError, match="No space left") as caught:
        Process(ann).files.save(FILE, {"x": 1}, sync=False)
    assert caught.value.errno == errno.ENOSPC


def test_a_power_cut_undoes_what_was_not_synced_and_begins_a_new_boot():
    ann = device()
    process, boots = Process(ann), ann.boot_id()
    process.files.save(FILE, {"x": 0}, sync=True)
    for number in (1, 2):
        process.files.save(FILE, {"x": number}, sync=False)
    process.kill()
    seen = set()
    for _ in range(30):
        writes = list(ann.disk[FILE])
        ann.cut_power()
        seen.add(ann.disk[FILE][-1].tree["x"])
        ann.disk[FILE] = writes
    assert seen == {0, 1, 2}
    assert ann.boot_id() != boots


def test_work_that_sleeps_takes_virtual_time_and_a_kill_undoes_its_later_writes():
    ann = device()
    process = Process(ann)

    def job():
        process.files.save(FILE, {"x": "early"}, sync=False)
        time.sleep(10)
        process.files.save(FILE, {"x": "late"}, sync=False)
        return process.monotonic()

    async def whole():
        async with process.worker("ann") as worker:
            return await worker.run(job), ann.loop.time()

    assert run(ann, whole()) == (10, 10)

    async def cut_short():
        process.start(whole())
        await asyncio.sleep(3)
        process.kill()
        await asyncio.wait((process.task,))

    run(ann, cut_short())
    assert Process(ann).files.load(FILE) == {"x": "early"}


def test_jobs_run_in_order_and_one_that_began_is_not_cancelled():
    ann = device()
    process, done = Process(ann), []

    def job(number):
        time.sleep(1)
        done.append(number)

    async def main():
        async with process.worker("ann") as worker:
            jobs = []
            for number in range(3):
                jobs.append(asyncio.ensure_future(worker.run(job, number)))
                await asyncio.sleep(0.1)  # or the seed decides which is asked for first
            jobs[0].cancel()
            jobs[1].cancel()
            await jobs[2]
        return ann.loop.time()

    assert run(ann, main()) == 2
    assert done == [0, 2]


def test_sleeping_on_the_event_loop_is_an_error():
    async def main():
        time.sleep(1)  # noqa: ASYNC251

    with pytest.raises(AssertionError, match="would block every task"):
        run(device(), main())
