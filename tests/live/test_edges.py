"""The edges of a life with real processes and kill -9: see edges.py, which runs more seeds by hand."""

from __future__ import annotations

import pytest
from edges import KINDS, play

pytestmark = pytest.mark.live


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(len(KINDS)), ids=KINDS)
def test_nothing_is_lost_at_the_edges_of_a_life(mosquitto, seed):
    wrong, notes = play(seed, mosquitto.url, lambda: None)
    assert not wrong, "\n".join([*wrong, *notes])
