"""The queue of a job: policies by order, and the names of partitions."""

import pytest

from harness.config.registries import ORDERS
from harness.workers.dataflow import CRITIC_TRAINING, OF_VALUES, JobShape, iteration_of, partition_name, queue_spec

ROLES = ["rollout", "reference", "actor_fwd", "actor"]


def test_policies_follow_the_order_of_training() -> None:
    whenever = dict.fromkeys(("reward", "advantages", "record"), "ready")
    by_order = {
        "fifo": dict.fromkeys(ROLES, "fifo"),
        "completion": {"rollout": "fifo", "actor": ORDERS["completion"], "reference": "ready", "actor_fwd": "ready"},
    }
    for order, policies in by_order.items():
        tasks = queue_spec(JobShape(ROLES, training_ranks=1, capacity_rows=8, order=order)).tasks
        assert {name: task.policy for name, task in tasks.items()} == policies | whenever
    tasks = queue_spec(JobShape(ROLES, training_ranks=2, capacity_rows=8, order="completion", beside_actor=ROLES)).tasks
    assert {task.ranks for task in tasks.values()} == {1}


def test_ranks_share_what_is_beside_the_actor_by_tokens() -> None:
    shape = JobShape([*ROLES, "critic"], training_ranks=2, capacity_rows=8, beside_actor=ROLES[1:3], critic_ranks=2)
    tasks = queue_spec(shape).tasks.values()
    shared = {(task.split, task.weight, task.whole_groups) for task in tasks if task.ranks > 1}
    assert shared == {("balanced", ("prompt", "response"), True)}

    def ranks(*beside_actor: str) -> list[int]:
        tasks = queue_spec(JobShape(ROLES, training_ranks=4, capacity_rows=8, beside_actor=beside_actor)).tasks
        return [tasks[role].ranks for role in ("reference", "actor_fwd", "actor", "reward")]

    assert ranks() == [1, 1, 4, 1]
    assert ranks("reference", "actor_fwd") == [4, 4, 4, 1]


def test_critics_and_token_baselines_read_what_they_need() -> None:
    ranks, read = {"training_ranks": 2, "critic_ranks": 4}, ("loss_mask", "values")
    spec = queue_spec(JobShape([*ROLES, "critic"], capacity_rows=8, advantages_read=read, **ranks))
    assert [spec.tasks[task].ranks for task in ("actor", "critic", CRITIC_TRAINING)] == [2, 4, 4]
    assert spec.tasks[CRITIC_TRAINING].columns == OF_VALUES and spec.columns["advantage"].ragged
    read = ("loss_mask", "gradient_squares")
    spec = queue_spec(JobShape([*ROLES, "actor_fwd"], training_ranks=1, capacity_rows=8, advantages_read=read))
    assert spec.tasks["advantages"].columns == ("reward", *read) and spec.columns["advantage"].ragged
    assert "gradient_squares" not in spec.tasks["actor"].columns and "returns" not in spec.columns


def test_a_partition_names_its_iteration() -> None:
    assert [iteration_of(partition_name(i)) for i in (0, 7, 120)] == [0, 7, 120]
    for name in ("a", "train_", "train_-1", "7"):
        with pytest.raises(ValueError, match=f"partition '{name}' holds no batch"):
            iteration_of(name)
