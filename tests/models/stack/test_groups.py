"""Groups of learners train as the learners would by themselves, with no arena around them."""

from __future__ import annotations

import pytest
import torch

from gossamer.models import Learner, Metrics, SgdLearner, SlicedNetwork, mlp
from gossamer.models.stack import Workers, form_group, group_learners


def learners(momentum: float) -> list[Learner]:
    """Three alike, and one of another width in their midst."""
    made: list[Learner] = []
    for index, layout in enumerate(("6=8=4", "6=8=4", "6=5=4", "6=8=4")):
        generator = torch.Generator().manual_seed(index)
        own = torch.rand(20, 6, generator=generator), torch.arange(20) % 4
        network = SlicedNetwork(
            mlp(layout), {"all": layout.replace("=", "-")}, peer=str(index), seed=1
        )
        made.append(
            SgdLearner(
                network, own, own, local_samples=9, batch=4, seed=index,
                optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=momentum),
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_groups_do_what_their_learners_would(momentum: float) -> None:
    mine, plain = learners(momentum), learners(momentum)
    groups = [form_group(spec, mine, None) for spec in group_learners(mine)]
    assert [list(group.indices) for group in groups] == [[0, 1, 3], [2]]
    workers = Workers(2)
    for group in groups:
        rows = range(len(group.indices))
        for tasks, wanted in (
            (group.train(rows, repeats=2), lambda learner: learner.train(2)),
            (group.test(rows), lambda learner: learner.test()),
        ):
            found = dict(pair for pairs in workers.run(tasks) for pair in pairs)
            assert sorted(found) == list(group.indices)
            for index, metrics in found.items():
                expected = wanted(plain[index])
                assert (metrics.correct, metrics.samples) == (expected.correct, expected.samples)
                assert metrics.loss == pytest.approx(expected.loss, rel=1e-4)
    for group in groups:
        group.release()
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)
        assert a.network.flat.untyped_storage().nbytes() == a.network.flat.nbytes


def run(tasks) -> dict[int, Metrics]:
    return dict(pair for task in tasks for pair in task())


def test_samples_that_a_learner_gets_later_are_trained_and_tested_on() -> None:
    mine, plain = learners(0.0)[:2], learners(0.0)[:2]
    (spec,) = group_learners(mine)
    group = form_group(spec, mine, None)
    for repeats in (1, 6):
        run(group.train([0, 1], repeats))
        for learner in plain:
            learner.train(repeats)
        for learner in (mine[0], plain[0]):
            assert isinstance(learner, SgdLearner)
            learner.add_samples(torch.full((30, 6), 0.5), torch.arange(30) % 4)
            learner.held_out = learner.samples
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)
    assert run(group.test([0, 1]))[0].samples == plain[0].test().samples == 80


def test_a_hook_of_the_whole_network_is_called_in_a_stack_too() -> None:
    mine, plain = learners(0.0)[:1], learners(0.0)[:1]
    for learner in (*mine, *plain):
        learner.network.module.register_forward_hook(lambda *args: 3 * args[2])
    (spec,) = group_learners(mine)
    run(form_group(spec, mine, None).train([0], 2))
    plain[0].train(2)
    torch.testing.assert_close(mine[0].network.flat, plain[0].network.flat)


@pytest.mark.parametrize("tests", [torch.zeros(0), torch.zeros(5, 3, 2)])
def test_learners_with_tests_of_another_shape_have_stacks_of_their_own(tests) -> None:
    mine = learners(0.0)[:2]
    assert isinstance(mine[0], SgdLearner)
    mine[0].held_out = tests, torch.zeros(len(tests), dtype=torch.int64)
    assert len(group_learners(mine)) == 2


def test_the_first_error_of_a_task_is_raised_and_later_tasks_still_run() -> None:
    workers = Workers(1)

    def fail() -> int:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        workers.run([lambda: 1, fail, lambda: 2])
    assert workers.run([lambda: 3, lambda: 4]) == [3, 4]
