"""In which order rows go, how they are cut into shares, and what the control plane keeps and reports."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.transfer_queue import LeaseExpired, Ragged, TaskSpec
from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.leases import LOST_KEPT, Leases, Share
from harness.transfer_queue.control.policies import POLICIES, SPLITS, balanced, contiguous
from harness.transfer_queue.control.reporting import KEPT, Latency, queue_metrics
from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.frames import Frame
from tests.support.examples import examples
from tests.support.local_queue import filled, ids, queue, rewards, virtual

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


async def test_heavy_rows_and_groups_go_first_also_when_they_come_back() -> None:
    q = await weighed(TaskSpec(("tokens",), policy="longest_first", weight="tokens"), [3, 9, 1, 9, 4])
    assert [ids(await q.get("train", 2)) for _ in range(3)] == [[1, 3], [4, 0], [2]]
    q = queue(train=TaskSpec(("tokens", "reward"), policy="longest_first", weight="tokens", whole_groups=True))
    await q.create_partition("a", range(6), group_size=2)
    await q.put("a", [5, 0, 2], {"tokens": lengths(1, 4, 6)})
    await q.put("a", [3, 4, 1], {"tokens": lengths(1, 9, 4)})
    await q.put("a", range(6), {"reward": np.zeros(6, np.float32)})
    assert [ids(await q.get("train", 2)) for _ in range(3)] == [[4, 5], [0, 1], [2, 3]]
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
        ({"columns": ("speed",)}, "unknown columns \\['speed'\\]"),
        ({"columns": ()}, "one or more different columns"),
        ({"policy": "lifo"}, "unknown policy 'lifo'"),
        ({"ranks": 0}, "at least one rank, not 0"),
        ({"lease_s": 0}, "more than 0 seconds, not 0"),
        ({"writes": ("prize",)}, "writes unknown columns"),
        ({"writes": ("old",), "ranks": 2}, "several readers"),
    ],
)
def test_a_task_that_cannot_work_is_refused_when_the_queue_is_made(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        queue(train=TaskSpec(**{"columns": ("tokens", "reward"), **task}))


def heaviest(parts: list[np.ndarray], weights: np.ndarray) -> int:
    return max(int(weights[part].sum()) for part in parts)


def lengths_of(seed: int, count: int) -> np.ndarray:
    """A long tail, capped: response lengths_of."""
    return np.minimum(np.random.default_rng(seed).lognormal(6, 1, count), 8192).astype(np.int64)


@settings(max_examples=examples(300))
@given(weights=st.lists(st.integers(0, 1000), max_size=40), shares=st.integers(1, 9))
def test_shares_have_every_unit_and_differ_by_no_more_than_the_heaviest(weights: list[int], shares: int) -> None:
    array = np.array(weights, np.int64)
    parts = balanced(array, shares)
    assert [part.size for part in parts] == [part.size for part in contiguous(array, shares)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(weights)))
    assert all((np.diff(part) > 0).all() for part in parts), "a share keeps the order of its units"
    sums = [int(array[part].sum()) for part in parts]
    assert max(sums) - min(sums) <= max(weights, default=0)


@pytest.mark.parametrize(("count", "shares"), [(16, 2), (32, 4), (30, 4), (64, 8), (512, 8)])
def test_the_slowest_rank_has_less_to_do_than_with_contiguous_shares(count: int, shares: int) -> None:
    for seed in range(20):
        weights = lengths_of(seed, count)
        with_the_heaviest = weights.max() + np.sort(weights)[: count // shares - 1].sum()
        parts = balanced(weights, shares)
        assert heaviest(parts, weights) < heaviest(contiguous(weights, shares), weights)
        assert heaviest(parts, weights) <= 1.1 * max(weights.sum() / shares, with_the_heaviest)


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_fewer_units_than_ranks_leave_the_last_ranks_without(name: str) -> None:
    parts = SPLITS[name](np.array([4, 7]), 3, np.array([1, 5]))
    assert [part.size for part in parts] == [1, 1, 0]
    assert sorted(np.concatenate(parts).tolist()) == [4, 7]


ASK = GetRequest("score", 1, consumer="x")


def share() -> Share:
    return Share(0, "a", np.array([0]), 1)


def test_a_late_acknowledgement_is_refused_however_many_leases_were_lost_since() -> None:
    leases = Leases()
    kept, lost = leases.issue(ASK, share(), None), leases.issue(ASK, share(), None)
    leases.lose(lost)
    for _ in range(LOST_KEPT + 10):
        leases.lose(leases.issue(ASK, share(), None))
    with pytest.raises(LeaseExpired):
        leases.check_kept(lost.number)
    leases.check_kept(kept.number)
    leases.close(kept.number)
    assert len(leases._lost) == len(leases._lost_order) == LOST_KEPT
    acknowledged = leases.issue(ASK, share(), None)
    leases.close(acknowledged.number)
    leases.check_kept(acknowledged.number)


def test_leases_do_not_pile_up_and_one_without_end_is_never_due() -> None:
    leases = Leases()
    held = leases.issue(ASK, share(), 1.0)
    for at in range(1000):
        leases.close(leases.issue(ASK, share(), 2.0 + at).number)
    assert len(leases._due) < 100
    assert leases.next_due() == 1.0 and leases.overdue(5000) == [held]
    leases = Leases()
    leases.issue(ASK, share(), float("inf"))
    assert leases.next_due() is None and len(leases) == 1


def test_latencies_are_those_of_the_latest_hand_outs() -> None:
    latency = Latency()
    assert latency.describe() == {"count": 0, "p50_s": 0, "p99_s": 0, "max_s": 0}
    latency.add(np.full(10, 9.0))
    assert latency.describe() == {"count": 10, "p50_s": 9, "p99_s": 9, "max_s": 9}
    for _ in range(3):
        latency.add(np.linspace(0, 1, KEPT // 2))
    latency.add(np.linspace(0, 1, 3 * KEPT))
    described = latency.describe()
    assert described["count"] == 10 + 3 * (KEPT // 2) + 3 * KEPT
    assert described["max_s"] == 1 and described["p50_s"] > 0.8


@virtual
async def test_describe_tells_how_long_rows_wait_and_how_long_they_waited() -> None:
    q = queue(score=TaskSpec(("reward",), lease_s=100))
    await q.create_partition("a", range(4))
    await q.put("a", [0, 1], rewards([0, 1]))
    await asyncio.sleep(2)
    await q.put("a", [2], rewards([2]))
    await asyncio.sleep(1)
    assert (await q.describe())["tasks"]["score"]["oldest_s"] == pytest.approx(3, abs=1e-3)
    batch = await q.get("score", 2)
    described = (await q.describe())["tasks"]["score"]
    assert described["oldest_s"] == pytest.approx(1, abs=1e-3)
    assert described["handout"]["count"] == 2 and described["handout"]["p50_s"] == pytest.approx(3, abs=1e-3)
    await asyncio.sleep(4)
    assert batch is not None
    await q.give_back(batch.lease)
    assert (await q.describe())["tasks"]["score"]["oldest_s"] == pytest.approx(5, abs=1e-3), "row 2"
    await q.get("score", 3)
    described = (await q.describe())["tasks"]["score"]
    assert (described["oldest_s"], described["ready"], described["depth_samples"]) == (0, 0, 1)
    assert described["handout"]["max_s"] == pytest.approx(5, abs=1e-3), "what came back waited from then on"


@virtual
async def test_metrics_are_flat_names_of_what_is_described() -> None:
    q = await filled(queue(score=TaskSpec(("reward",)), train=TaskSpec(("reward", "old"))), range(4))
    await q.put("a", [1], {"old": Ragged.from_rows([np.zeros(3, np.float32)])})
    waiting = asyncio.ensure_future(q.get("train", 2))
    await asyncio.sleep(1.5)
    await q.get("score", 3)
    described = queue_metrics(await q.describe())
    assert [described[f"queue/{name}"] for name in ("depth_samples", "live_rows", "partitions")] == [4, 4, 1]
    assert described["queue/bytes/reward"] == 16 and described["queue/bytes/tokens"] == 0
    assert described["queue/bytes"] == described["queue/bytes/reward"] + described["queue/bytes/old"]
    assert (described["queue/score/ready"], described["queue/score/depth_samples"]) == (1, 1)
    assert described["queue/score/oldest_s"] == pytest.approx(1.5, abs=1e-3)
    assert described["queue/score/handout_p50_ms"] == pytest.approx(1500, abs=1)
    assert (described["queue/train/handout_max_ms"], described["queue/train/waiting_gets"]) == (0, 1)
    assert all(isinstance(value, float) for value in described.values())
    waiting.cancel()


def test_a_put_that_does_not_say_how_long_its_rows_are_is_refused() -> None:
    q = queue(train=TaskSpec(("tokens",), weight="tokens", policy="longest_first"))
    controller = Controller(q.spec)
    controller.create("a", range(2), 1)
    with pytest.raises(ValueError, match="a put of column 'tokens' must bring the lengths of its 2 rows"):
        controller.put("a", np.arange(2), Frame(2, {"tokens": 24}, (0, 0)), {"tokens": np.array([1])}, 0.0)
    controller.put("a", np.arange(2), Frame(2, {"tokens": 24}, (0, 0)), {"tokens": np.array([0, 0])}, 0.0)
