"""Memory is given back to the system, and not more often than allowed."""

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
