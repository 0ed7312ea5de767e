"""In which order rows go out: each policy against a model that sorts everything on every request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.transfer_queue import ColumnSpec, LocalQueue, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.control.policies import POLICIES
from tests.support.local_queue import ids, queue

UNITS = 12


class Model:
    """Every unit's state, and what the policy's order is made of."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.come: set[int] = set()
        self.waiting: set[int] = set()
        self.out: set[int] = set()
        self.tick: dict[int, int] = {}
        self.weight: dict[int, int] = {}

    def order(self, unit: int) -> tuple[int, int]:
        keys = {"completion": self.tick.get(unit, 0), "longest_first": -self.weight.get(unit, 0)}
        return keys.get(self.policy, 0), unit

    def take(self, least: int, most: int, limit: int) -> list[int] | None:
        if self.policy == "fifo":
            limit = min(limit, next(unit for unit in range(UNITS + 1) if unit not in self.come))
        units = sorted((unit for unit in self.waiting if unit < limit), key=self.order)[:most]
        if len(units) < least:
            return None
        self.waiting -= set(units)
        self.out |= set(units)
        return units


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data())
def test_a_policy_hands_out_what_its_model_does(name: str, data: st.DataObject) -> None:
    policy, model = POLICIES[name](UNITS), Model(name)
    for tick in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["add", "add", "take", "take", "put_back", "remove"]))
        if what == "take":
            most = data.draw(st.integers(1, 4))
            least, limit = data.draw(st.integers(1, most)), data.draw(st.sampled_from([3, 7, 10, UNITS, UNITS]))
            taken = policy.take(least, most, limit)
            assert (None if taken is None else taken.tolist()) == model.take(least, most, limit)
        else:
            pool = {"add": set(range(UNITS)) - model.come, "put_back": model.out, "remove": model.waiting}[what]
            units = data.draw(st.lists(st.sampled_from(sorted(pool)), max_size=4, unique=True)) if pool else []
            array = np.array(units, np.int64)
            if what == "add":
                weights = [data.draw(st.integers(0, 3)) for _ in units]
                policy.add(array, tick, np.array(weights, np.int64))
                model.tick |= dict.fromkeys(units, tick)
                model.weight |= dict(zip(units, weights, strict=True))
                model.come |= set(units)
            elif what == "put_back":
                policy.put_back(array)
                model.out -= set(units)
            else:
                policy.remove(np.sort(array))
                model.out |= set(units)
            model.waiting = model.waiting - set(units) if what == "remove" else model.waiting | set(units)
        assert len(policy) == len(model.waiting)
        ready = sorted(model.waiting)
        assert policy.in_order(np.array(ready, np.int64)).tolist() == sorted(ready, key=model.order)
        if policy.takes_turns:
            turns = [model.order(unit)[0] for unit in ready if unit < 7]
            assert policy.turn(7, None) == min(turns, default=np.iinfo(np.int64).max)


def test_what_comes_back_again_and_again_takes_no_more_memory() -> None:
    policy = POLICIES["completion"](8)
    policy.add(np.arange(8), 1)
    for _ in range(100):
        assert policy.take(1, 8, 4) is not None
        policy.put_back(np.arange(4))
    assert all(len(heap) <= 24 for heap in policy._heaps.values())  # type: ignore[attr-defined]
    taken = policy.take(1, 16, 8)
    assert taken is not None and taken.tolist() == list(range(8))


# -- weights


def lengths(*sizes: int) -> Ragged:
    return Ragged.from_rows([np.arange(size) for size in sizes], np.int64)


async def weighed(task: TaskSpec, sizes: list[int], group_size: int = 1) -> LocalQueue:
    q = queue(train=task)
    await q.create_partition("a", range(len(sizes)), group_size)
    await q.put("a", range(len(sizes)), {"tokens": lengths(*sizes)})
    return q


async def test_longest_first_hands_out_the_heaviest_rows_and_of_equal_ones_the_first() -> None:
    q = await weighed(TaskSpec(("tokens",), policy="longest_first", weight="tokens"), [3, 9, 1, 9, 4])
    assert [ids(await q.get("train", 2)) for _ in range(3)] == [[1, 3], [4, 0], [2]]


async def test_a_group_weighs_the_sum_of_its_rows_whoever_wrote_them() -> None:
    q = queue(train=TaskSpec(("tokens", "reward"), policy="longest_first", weight="tokens", whole_groups=True))
    await q.create_partition("a", range(6), group_size=2)
    await q.put("a", [5, 0, 2], {"tokens": lengths(1, 4, 6)})
    await q.put("a", [3, 4, 1], {"tokens": lengths(1, 9, 4)})
    await q.put("a", range(6), {"reward": np.zeros(6, np.float32)})
    assert [ids(await q.get("train", 2)) for _ in range(3)] == [[4, 5], [0, 1], [2, 3]]


async def test_a_row_that_comes_back_is_as_heavy_as_before() -> None:
    q = await weighed(TaskSpec(("tokens",), policy="longest_first", weight="tokens"), [3, 9, 1])
    batch = await q.get("train", 2)
    assert batch is not None and ids(batch) == [1, 0]
    await q.give_back(batch.lease)
    assert [ids(await q.get("train", 1)) for _ in range(3)] == [[1], [0], [2]]


async def test_ranks_of_a_balanced_task_get_as_many_rows_and_nearly_the_same_weight() -> None:
    task = TaskSpec(("tokens",), weight="tokens", split="balanced", ranks=2)
    q = await weighed(task, [9, 8, 7, 6, 5, 4, 3, 2])
    shares = [await q.get("train", 4, rank=rank) for rank in range(2)]
    assert [len(share.rows) for share in shares if share is not None] == [4, 4]
    assert [int(share.ragged("tokens").lengths.sum()) for share in shares if share is not None] == [22, 22]
    assert sorted(row for share in shares for row in ids(share)) == list(range(8))


# -- what cannot work


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"policy": "longest_first"}, "'longest_first' and needs a weight"),
        ({"split": "balanced"}, "'balanced' and needs a weight"),
        ({"weight": "old"}, "weighed by column 'old', which it does not read"),
        ({"weight": "speed"}, "weighed by column 'speed', which it does not read"),
        ({"weight": "reward"}, "weighed by column 'reward', which is not ragged"),
        ({"split": "fair"}, "unknown split 'fair'; there are \\['balanced', 'contiguous'\\]"),
    ],
)
def test_a_task_that_cannot_be_weighed_is_refused_when_the_queue_is_made(task: dict[str, Any], message: str) -> None:
    columns = {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32"), "old": ColumnSpec("int64")}
    with pytest.raises(ValueError, match=message):
        QueueSpec(columns, {"train": TaskSpec(("tokens", "reward"), **task)})
