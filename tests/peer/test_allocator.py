"""Memory is given back to the system, and not more often than allowed."""

import resource
import sys

import numpy as np
import pytest

from gossamer.peer.machine import HeapTrimmer, trim_heap


def test_memory_is_given_back_once_in_a_while():
    trimmed, now = [], 100.0
    trim = HeapTrimmer(lambda: trimmed.append(now), pause=0.5, clock=lambda: now)
    assert trim()
    assert not trim()
    now += 0.5
    assert trim()
    assert trimmed == [100.0, 100.5]


def test_without_glibc_nothing_happens():
    assert not HeapTrimmer(None)()


def test_the_trimmer_of_this_process_can_be_called():
    assert trim_heap() in (True, False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_burst_of_messages_maps_its_memory_once():
    trim_heap()
    pages_of_a_burst = 8 * (1 << 20) // resource.getpagesize()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        burst = [np.ones(1 << 17) for _ in range(8)]
        del burst
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 5 * pages_of_a_burst, "memory was returned and mapped again for each burst"
