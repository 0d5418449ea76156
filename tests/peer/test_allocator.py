"""Memory is given back, and not more often than allowed."""

import sys
import threading

import pytest

from gossamer.peer import allocator


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be asked")
def test_memory_is_given_back_once_in_a_while(monkeypatch):
    asked = []

    class Library:
        def malloc_trim(self, kept: int) -> None:
            asked.append(kept)

    now = 100.0
    monkeypatch.setattr(allocator, "_glibc", Library)
    monkeypatch.setattr(allocator, "_last", float("-inf"))
    monkeypatch.setattr(allocator, "_guard", threading.Lock())
    monkeypatch.setattr(allocator.time, "monotonic", lambda: now)
    assert allocator.give_back()
    assert not allocator.give_back()
    now += allocator.SECONDS_BETWEEN
    assert allocator.give_back()
    assert asked == [0, 0]


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    assert not allocator.give_back()
