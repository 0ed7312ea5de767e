"""What the control plane keeps and tells: leases that end, what waits for how long, the bytes of each column."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from harness.transfer_queue import LeaseExpired, Ragged, TaskSpec
from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.leases import LOST_KEPT, Leases, Share
from harness.transfer_queue.control.reporting import KEPT, Latency, queue_metrics
from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.rows.frames import Frame
from tests.support.local_queue import filled, queue, rewards, virtual

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


def test_one_reader_that_holds_on_does_not_pile_up_the_leases_of_the_others() -> None:
    leases = Leases()
    held = leases.issue(ASK, share(), 1.0)
    for at in range(1000):
        leases.close(leases.issue(ASK, share(), 2.0 + at).number)
    assert len(leases._due) < 100
    assert leases.next_due() == 1.0 and leases.overdue(5000) == [held]


def test_a_lease_without_end_is_never_due() -> None:
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
    told = latency.describe()
    assert told["count"] == 10 + 3 * (KEPT // 2) + 3 * KEPT and told["max_s"] == 1 and told["p50_s"] > 0.8


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
    told = (await q.describe())["tasks"]["score"]
    assert told["oldest_s"] == pytest.approx(1, abs=1e-3)
    assert told["handout"]["count"] == 2 and told["handout"]["p50_s"] == pytest.approx(3, abs=1e-3)
    await asyncio.sleep(4)
    assert batch is not None
    await q.give_back(batch.lease)
    assert (await q.describe())["tasks"]["score"]["oldest_s"] == pytest.approx(5, abs=1e-3), "row 2"
    await q.get("score", 3)
    told = (await q.describe())["tasks"]["score"]
    assert (told["oldest_s"], told["ready"], told["depth_samples"]) == (0, 0, 1)
    assert told["handout"]["max_s"] == pytest.approx(5, abs=1e-3), "what came back waited from then on"


@virtual
async def test_metrics_are_flat_names_of_what_is_described() -> None:
    q = await filled(queue(score=TaskSpec(("reward",)), train=TaskSpec(("reward", "old"))), range(4))
    await q.put("a", [1], {"old": Ragged.from_rows([np.zeros(3, np.float32)])})
    waiting = asyncio.ensure_future(q.get("train", 2))
    await asyncio.sleep(1.5)
    await q.get("score", 3)
    told = queue_metrics(await q.describe())
    assert told["queue/depth_samples"] == 4 and told["queue/live_rows"] == 4 and told["queue/partitions"] == 1
    assert told["queue/bytes/reward"] == 16 and told["queue/bytes/tokens"] == 0
    assert told["queue/bytes"] == told["queue/bytes/reward"] + told["queue/bytes/old"]
    assert (told["queue/score/ready"], told["queue/score/depth_samples"]) == (1, 1)
    assert told["queue/score/oldest_s"] == pytest.approx(1.5, abs=1e-3)
    assert told["queue/score/handout_p50_ms"] == pytest.approx(1500, abs=1)
    assert (told["queue/train/handout_max_ms"], told["queue/train/waiting_gets"]) == (0, 1)
    assert all(isinstance(value, float) for value in told.values())
    waiting.cancel()


def test_a_put_that_does_not_say_how_long_its_rows_are_is_refused() -> None:
    q = queue(train=TaskSpec(("tokens",), weight="tokens", policy="longest_first"))
    books = Controller(q.spec)
    books.create("a", range(2), 1)
    with pytest.raises(ValueError, match="a put of column 'tokens' must bring the lengths of its 2 rows"):
        books.put("a", np.arange(2), Frame(2, {"tokens": 24}, (0, 0)), {"tokens": np.array([1])}, 0.0)
    books.put("a", np.arange(2), Frame(2, {"tokens": 24}, (0, 0)), {"tokens": np.array([0, 0])}, 0.0)
