"""What `fully_async` asks of a job: limits, pauses, what is due, and what is dropped."""

from __future__ import annotations

import pytest

from schedules import FullyAsync
from schedules.capacity import Capacity
from tests.support.fake_job import DEVICE, HOST, FakeJob


@pytest.mark.parametrize("eta", [0, 0.5, 1, 2, 2.5])
async def test_streaming_admits_and_dispatches_up_to_the_limit_of_the_published_version(eta: float) -> None:
    job = FakeJob()
    await FullyAsync(max_staleness=eta).run(job)
    capacity = Capacity(8, eta)
    limits = [capacity.limit(version) for version in range(5)]
    log = job.log
    assert log.of("admit") == [f"admit {limit}" for limit in limits]
    assert log.of("limit", "resume") == [
        f"limit {limits[0]}",
        *[f"resume {limit}" for limit in limits[1:]],
    ]
    for version in range(1, 5):
        published = log.at(f"publish {version} done")
        assert published < log.at(f"resume {limits[version]}") and published < log.at(f"admit {limits[version]}")


async def test_streaming_publishes_only_while_engines_are_paused() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    log, expected = job.log, []
    for version in range(1, 5):
        for line in (f"train {version - 1}", "pause drain=False", f"publish {version}", f"resume {8 * (version + 3)}"):
            expected += [line, f"{line} done"]
    assert [line for line in log.lines if line.startswith(("train", "pause", "publish", "resume"))] == expected


@pytest.mark.parametrize(("partial", "drain"), [(True, False), (False, True)])
async def test_streaming_drains_engines_where_samples_may_not_go_on_under_new_weights(
    partial: bool, drain: bool
) -> None:
    job = FakeJob()
    await FullyAsync(partial=partial).run(job)
    assert job.log.of("pause") == [f"pause drain={drain}"] * 4


async def test_every_stage_streams_through_the_whole_job_until_the_prompts_are_closed() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    for name in (*HOST, *DEVICE):
        assert job.log.of(f"{name} ") == [f"{name} streams"]
        assert job.log.at("close") < job.log.at(f"{name} streams done")
    assert job.log.at("admit 56 done") < job.log.at("close") < job.log.at("stream done")


async def test_the_first_failure_ends_a_streaming_run_with_all_its_loops() -> None:
    job = FakeJob(fail_at=2)
    with pytest.raises(ExceptionGroup) as caught:
        await FullyAsync().run(job)
    assert [str(error) for error in caught.value.exceptions] == ["the loss of iteration 2 is not finite"]
    assert job.log.of("publish") == ["publish 1", "publish 2"]
    assert "stream done" not in job.log.lines, "engines that waited were cancelled"


def due(eta: float, iteration: int) -> list[tuple[int, int]]:
    """By hand, batch 8: what version u started is among the (u + worst lag + 1 - iteration) * 8 next groups."""
    worst = Capacity(8, eta).worst_lag
    return [
        (Capacity(8, eta).limit(u), 8 * (u + worst + 1 - iteration)) for u in range(iteration) if u + worst >= iteration
    ]


@pytest.mark.parametrize("eta", [0, 0.5, 1, 2, 2.5])
async def test_in_completion_order_training_is_told_what_every_version_started_and_when_that_is_due(eta: float) -> None:
    job = FakeJob(iterations=6)
    log = await job.play(FullyAsync(max_staleness=eta, order="completion"))
    assert job.trainer.first == [due(eta, iteration) for iteration in range(6)]
    assert not log.of("drop")
    if eta == 2:
        assert job.trainer.first[3] == [(32, 8), (40, 16)], "versions 1 and 2; of version 0 nothing can be left"


async def test_in_fifo_order_training_is_told_nothing() -> None:
    job = FakeJob()
    log = await job.play(FullyAsync(on_stale="drop"))
    assert job.trainer.first == [[]] * 4 and not log.of("drop")


async def test_dropped_groups_are_made_up_for_in_every_later_limit() -> None:
    job = FakeJob(iterations=5)
    job.prompts.drops = [3, 0, 2]  # in iterations 2, 3, 4
    log = await job.play(FullyAsync(max_staleness=1, order="completion", on_stale="drop"))
    assert log.of("drop") == ["drop 16", "drop 24", "drop 35"], "limits of versions 0, 1, 2: the last one was widened"
    assert log.of("limit", "resume") == [
        *(
            "limit 16",
            "resume 24",
            "resume 32",
            "limit 35",
            "resume 43",
            "resume 51",
            "limit 53",
            "resume 61",
        )
    ]
    assert log.of("admit") == [f"admit {line.split()[1]}" for line in log.of("limit", "resume")]
    assert log.at("drop 16 done") < log.at("limit 35") < log.at("admit 35 done") < log.at("train 2")
    assert job.trainer.first == [[]] * 5


@pytest.mark.parametrize("staleness", [-1, -0.001, float("nan"), float("inf"), 1e7])
def test_a_staleness_that_is_no_bound_is_refused(staleness: float) -> None:
    with pytest.raises(ValueError, match=f"^schedule.max_staleness={staleness} is out of bounds; use 0 to 1000000$"):
        FullyAsync(max_staleness=staleness)
