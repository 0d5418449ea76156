"""Assignments that grow by peers which join late, and the values of groups that these peers try."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gossamer.models import SlicedNetwork, mlp
from gossamer.models.sharing import OWN, Assignment, GroupValues

PEERS = ("anna", "ben", "carl", "dora")


def grouped() -> Assignment:
    """Hidden cells in two groups, one output in two others, another one each peer's own."""
    network = SlicedNetwork(mlp("4=3=2"), {"all": 1.0}, peer="anna", rest=None)
    anatomy = network.slicing.anatomy
    hidden, outputs = anatomy.names[-2:]
    shared = Assignment.shared(anatomy, PEERS)
    changed = shared.change(hidden, range(3), (0, 1, 0, 1)).change(outputs, [0], (0, 0, 0, 1))
    return changed.change(outputs, [1], OWN).named()


def test_others_keep_their_models_when_peers_are_added_or_join_groups() -> None:
    before = grouped()
    added = before.with_peers(["emil", "fay"])
    models = [added.model(scheme, peer) for peer in ("emil", "fay") for scheme in added.groupings]
    assert len(set(models)) == 4, "newcomers are alone"
    joined = added.joined("emil", "carl")
    for scheme in joined.groupings:
        assert joined.model(scheme, "emil") == joined.model(scheme, "carl")
        assert joined.model(scheme, "fay") not in {joined.model(scheme, peer) for peer in PEERS}
    for peer in PEERS:
        assert before.slices(peer)[0] == added.slices(peer)[0] == joined.slices(peer)[0]
    read = Assignment.from_record(joined.anatomy, joined.as_record())
    assert read.slices("fay")[0] == joined.slices("fay")[0]


def test_a_newcomer_reads_the_mean_of_any_peers_groups() -> None:
    assignment = grouped().with_peers(["emil"])
    groups = GroupValues(assignment, ["emil"])
    examples = groups.examples_for("emil")
    assert examples == ["anna", "ben", "dora"], "carl is in the same groups as anna"
    generator = np.random.default_rng(0)
    rows = generator.random((len(PEERS) + 1, assignment.anatomy.size)).astype(np.float32)
    packed = [groups.pack(peer, row) for peer, row in zip(assignment.peers, rows, strict=True)]
    assert not packed[-1].any()
    mean = np.mean(packed, axis=0)
    every = np.arange(rows.shape[1])
    averaged = grouped().average(rows[:-1], every)
    in_groups = np.isin(
        assignment.codes, [c for c in assignment.codes if c != 1 and not c >> OWN & 1]
    )
    for example in examples:
        values = groups.values_in_groups_of(example, mean, rows[-1])
        assert values is not None
        place = PEERS.index(example)
        assert values[in_groups] == pytest.approx(averaged[place, in_groups], rel=1e-5)
        assert np.array_equal(values[~in_groups], rows[-1][~in_groups])
    assert groups.values_in_groups_of("dora", np.mean(packed[:3], axis=0), rows[-1]) is None


def test_a_newcomer_tries_the_groups_of_peers_with_the_same_models_by_hand() -> None:
    hidden_by_hand = replace(
        grouped(), given=OWN + 2
    )  # the first two schemes, and that of hidden cells
    added = hidden_by_hand.with_peers(["emil", "fay"])
    assignment = added.joined("emil", "ben", [OWN + 1])
    assert assignment.formed == (OWN + 2,)
    groups = GroupValues(assignment, ["emil", "fay"])
    assert groups.examples_for("emil") == ["ben", "dora"]
    assert groups.examples_for("fay") == ["fay"], "nobody has the models that it was given"
