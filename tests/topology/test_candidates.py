import pytest

from gossamer.topology import (
    SCHEDULES,
    TopologyError,
    advise,
    build,
    build_schedule,
    check_models,
    contraction,
    mixing_matrix,
    parse,
    spectral_gap,
)


def test_candidates_keep_the_budget_and_are_what_they_say() -> None:
    advice = advise(64, 4)
    names = [one.topology for one in advice.ranked]
    assert names[0] == "one-peer-exponential"
    assert names.index("regular:4") < names.index("torus") < names.index("ring")
    for one in advice.ranked:
        assert 1 <= one.sends <= 4
        assert one.reason
        if parse(one.topology)[0] not in SCHEDULES:
            matrix = mixing_matrix(build(one.topology, 64))
            assert one.rate == pytest.approx(1 - spectral_gap(matrix), abs=1e-9)
    assert [one.exchanges for one in advice.ranked] == sorted(o.exchanges for o in advice.ranked)
    refused = dict(advice.refused)
    assert refused["hypercube"] == "its busiest peer has 6 links, the budget is 4"


def test_schedules_are_rated_over_a_period() -> None:
    found = {one.topology: one for one in advise(16, 2).ranked}
    exact = found["one-peer-exponential"]
    assert (exact.rate, exact.exchanges, exact.messages) == (0, 4, 4)
    rings = found["rotating-rings:16"]
    measured = contraction(build_schedule("rotating-rings:16", 16).matrix, 320, seed=1)
    assert measured == pytest.approx(rings.rate, rel=0.05)


def test_groups_must_hold_together() -> None:
    groups = {f"g{i}": list(range(8 * i, 8 * i + 8)) for i in range(4)}
    advice = advise(32, 5, members=groups)
    assert advice.ranked
    for one in advice.ranked:
        if parse(one.topology)[0] in SCHEDULES:
            continue
        graph = build(one.topology, 32)
        graph.add_edges_from(one.added)
        assert all(len(parts) == 1 for parts in check_models(graph, groups).values())
        assert max(d for _, d in graph.degree()) <= 5
    assert any(one.topology.startswith("clusters:4") for one in advice.ranked)
    assert any("never meets" in reason for _, reason in advice.refused)


def test_a_byte_budget_ranks_by_what_is_left() -> None:
    advice = advise(64, budget=40e3, message=4e3)  # ten messages each
    left = [one.error for one in advice.ranked]
    assert None not in left
    assert left == sorted(left)  # type: ignore[type-var]
    found = {one.topology: one for one in advice.ranked}
    assert found["one-peer-exponential"].error == 0  # six exchanges of one message
    assert found["clique"].error == 1  # sixty-three messages: not one exchange
    regular = found["regular:6"]
    assert regular.error == pytest.approx(regular.rate)  # one exchange of six


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peers": 1}, "at least 2 peers, not 1"),
        ({"peers": 8, "degree": 0}, "1 or more, not 0"),
        ({"peers": 8, "budget": 10.0, "message": 100.0}, "less than one message"),
    ],
)
def test_bad_questions(arguments: dict, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        advise(**arguments)
