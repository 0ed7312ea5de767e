"""What each schedule asks of a job, in which order: what runs beside what, and what waits for what."""

from itertools import pairwise
from typing import get_args

import pytest

from schedules import Schedule
from schedules.adaptive_staleness import AdaptiveStaleness
from schedules.capacity import Capacity
from schedules.colocate_sync import ColocateSync
from schedules.delayed_update import DelayedUpdate
from schedules.fully_async import FullyAsync
from schedules.half_step import HalfStep
from schedules.k_step_off import KStepOff
from schedules.lending import Lending
from schedules.one_step_off import OneStepOff
from schedules.protocol import PauseMode
from schedules.rolling_update import RollingUpdate
from schedules.separated_sync import SeparatedSync
from schedules.tail_rounds import TailRounds
from schedules.windowed import Windowed
from tests.support.fake_job import STAGES, FakeJob

# -- colocate_sync


async def test_colocated_roles_take_the_devices_phase_by_phase() -> None:
    log = await FakeJob().play(ColocateSync())
    for i in range(4):
        batch, scores = (f"admit {8 * (i + 1)}", f"generate {i}"), [f"{name} {i}" for name in STAGES]
        for phase, following in pairwise([batch, scores, (f"train {i}",), (f"publish {i + 1}",)]):
            assert max(log.at(f"{line} done") for line in phase) < min(map(log.at, following))
        for phase in (batch, scores):
            assert max(map(log.at, phase)) < min(log.at(f"{line} done") for line in phase), "they wait for rows alone"
        assert i == 0 or log.at(f"publish {i} done") < log.at(batch[0])


async def test_a_failing_stage_ends_a_colocated_run_before_training() -> None:
    job = FakeJob()

    async def fail(iteration: int) -> None:
        raise OSError("no reward model")

    job.stages[0].process = fail  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as caught:
        await ColocateSync().run(job)
    assert caught.group_contains(OSError, match="no reward model") and not job.log.of("train")


# -- tail_rounds


async def test_what_is_put_off_begins_again_once_a_batch_of_it_has_come_together() -> None:
    log = await FakeJob(iterations=5).play(TailRounds(over=0.5))
    assert log.of("admit", "limit", "resume", "complete", "put off", "train", "publish", "close") == [
        *("limit 12", "admit 12", "complete 0", "put off", "train 0", "publish 1"),  # 4 are left
        *("resume 12 to 25", "admit 24", "complete 1", "put off", "train 1", "publish 2"),  # 8 are: a tail round
        *("resume 26", "admit 24", "complete 2", "put off", "train 2", "publish 3"),
        *("resume 24 to 39", "admit 36", "complete 3", "put off", "train 3", "publish 4"),
        *("resume 44", "admit 40", "complete 4", "put off", "train 4", "publish 5"),  # all that is left of the job
        *("resume 44", "close"),
    ]


# -- separated_sync


async def test_separated_roles_begin_a_batch_together_where_they_stream_and_else_wait() -> None:
    log = await FakeJob().play(SeparatedSync(streaming=False))
    for i in range(4):
        for name in STAGES:
            assert log.at(f"generate {i} done") < log.at(f"{name} {i}")
            assert log.at(f"{name} {i} done") < log.at(f"train {i}")
        assert log.at(f"actor_fwd {i}") < log.at(f"reference {i} done"), "they have devices of their own"
    log = await FakeJob().play(SeparatedSync())
    for i in range(4):
        begun = [log.at(f"{what} {i}") for what in ("generate", *STAGES, "train")]
        ended = [log.at(f"{what} {i} done") for what in ("generate", *STAGES, "train")]
        assert max(begun) < min(ended) and max(ended) < log.at(f"publish {i + 1}")


# -- one_step_off and k_step_off


async def test_one_step_off_generates_the_next_batch_while_it_trains_and_meets_for_weights() -> None:
    log = await FakeJob().play(OneStepOff())
    assert log.of("admit") == [f"admit {8 * (version + 2)}" for version in (0, 0, 1, 2, 3)]
    for i in range(4):
        for name in STAGES:
            assert log.at(f"generate {i} done") < log.at(f"{name} {i}") < log.at(f"train {i}")
            assert log.at(f"{name} {i} done") < log.at(f"train {i}"), "training starts when the batch is complete"
        assert log.at(f"train {i} done") < log.at(f"publish {i + 1}")
    for i in range(1, 4):
        if i > 1:
            assert log.at(f"publish {i - 1} done") < log.at(f"generate {i}"), "batch i is sampled by version i - 1"
        assert log.at(f"generate {i}") < log.at(f"train {i - 1}") < log.at(f"publish {i}")
        assert log.at(f"generate {i} done") < log.at(f"publish {i}"), "and by no other"
    assert log.of("generate") == [f"generate {i}" for i in range(4)]


async def test_k_step_off_makes_k_versions_on_a_rollout_batch_the_last_of_which_is_what_is_left() -> None:
    log = await FakeJob(iterations=6).play(KStepOff(k=2))
    assert log.of("generate") == ["generate 0-1", "generate 2-3", "generate 4-5"]
    assert log.of("publish", "mark") == ["mark 1", "publish 2", "mark 3", "publish 4", "mark 5", "publish 6"]
    assert log.of("admit") == ["admit 32", "admit 32", "admit 48", "admit 64"], "limit(v) = (v + 4) * 8 at boundaries"
    assert log.at("generate 2-3") < log.at("train 0") < log.at("generate 2-3 done") < log.at("publish 2")
    assert log.at("train 1 done") < log.at("publish 2") < log.at("generate 4-5")
    assert log.at("train 0 done") < log.at("mark 1 done") < log.at("train 1")
    log = await FakeJob(iterations=5).play(KStepOff(k=3))
    assert log.of("generate") == ["generate 0-2", "generate 3-4"]
    assert log.of("publish", "mark") == ["mark 1", "mark 2", "publish 3", "mark 4", "publish 5"]
    one, k = await FakeJob().play(OneStepOff()), await FakeJob().play(KStepOff(k=1))
    assert one.lines == k.lines


@pytest.mark.parametrize("k", [0, -2])
def test_a_rollout_batch_of_no_training_batch_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"^schedule.k={k} is out of bounds; use 1 or more$"):
        KStepOff(k=k)


# -- delayed_update and half_step


async def test_every_engine_swaps_between_two_batches_the_version_before() -> None:
    job = FakeJob(engines=3)
    log = await job.play(DelayedUpdate())
    for k in range(3):
        own = [line for line in log.lines if line.startswith(f"{k}: ") and not line.endswith("done")]
        assert own == [f"{k}: {what}" for what in BATCH_BY_BATCH], "swaps are never before a generate is done"
    for version in (1, 2):
        assert log.at(f"here {version}") < log.at(f"0: swap {version}")
    assert log.of("limit", "stream") == [], "a batch's own groups are all that an engine is asked for"


BATCH_BY_BATCH = ["generate 0", "generate 1", "swap 1", "generate 2", "swap 2", "generate 3"]


@pytest.mark.parametrize("schedule", [DelayedUpdate(), HalfStep()])
async def test_training_goes_on_while_staged_weights_travel(schedule: Schedule) -> None:
    job = FakeJob()
    limits = [Capacity(8, schedule.eta).limit(version) for version in range(5)]
    log = await job.play(schedule)
    assert log.of("admit") == [f"admit {limit}" for limit in limits]
    asked = [line for line in log.lines if line.startswith(("train", "send", "admit", "close"))]
    expected = [f"admit {limits[0]}"]
    for version in range(1, 5):
        expected += [f"train {version - 1}", f"send {version}", f"admit {limits[version]}"]
    assert [line for line in asked if not line.endswith("done")] == [*expected, "close"]
    assert log.at("send 1 done") < log.at("train 1") < log.at("here 1"), "one version travels while the next is made"
    assert log.at("here 4"), "nothing is under way when the run ends"
    for name in STAGES:
        assert log.of(f"{name} ") == [f"{name} streams"]


async def test_cohorts_take_a_version_one_after_the_other_and_drain_where_they_must() -> None:
    log = await FakeJob(engines=5).play(HalfStep(cohorts=3))
    assert log.of("limit") == ["limit 12"]
    expected = []
    for version in range(1, 5):
        for k in range(3):
            for verb in ("pause keep", f"swap {version}", f"resume {8 * version + 12}"):
                expected += [f"{k}: {verb}", f"{k}: {verb} done"]
    assert [line for line in log.lines if line[1:3] == ": "] == expected, "at most one is paused at any time"
    log = await FakeJob().play(HalfStep(pause="wait"))
    assert set(log.of("0: pause", "1: pause")) == {"0: pause wait", "1: pause wait"}


@pytest.mark.parametrize("cohorts", [1, 0])
def test_a_single_cohort_would_stop_rollout_as_a_whole(cohorts: int) -> None:
    with pytest.raises(ValueError, match=f"^schedule.cohorts={cohorts} is out of bounds; use 2 or more$"):
        HalfStep(cohorts=cohorts)


def test_half_step_needs_an_engine_for_every_cohort() -> None:
    assert (HalfStep().least_engines, HalfStep(cohorts=3).least_engines, DelayedUpdate().least_engines) == (2, 3, 1)


# -- windowed


async def test_without_a_window_groups_are_trained_in_their_order_and_calls_are_those_of_fully_async() -> None:
    windowed, streamed = Windowed(max_staleness=1.5, window=0), FullyAsync(max_staleness=1.5)
    assert (windowed.order, windowed.eta, windowed.window_groups(8)) == (streamed.order, streamed.eta, None)
    assert (await FakeJob().play(windowed)).lines == (await FakeJob().play(streamed)).lines


# -- lending


async def test_training_devices_are_lent_only_where_the_trainer_would_wait_longer_than_it_is_patient() -> None:
    job = FakeJob(iterations=3)
    job.rollout.fills_s = 0.01
    log = await job.play(Lending(patience_s=1.0))
    assert not log.of("lent: ") and log.of("fill") == ["fill 4", "fill 12", "fill 20"]  # 0.4 of a batch of 8
    job = FakeJob(iterations=3)
    job.rollout.fills_s = 0.05
    log = await job.play(Lending(patience_s=0.01))
    assert log.of("lent: ", "train") == [
        *("lent: stream", "lent: resume 24", "lent: hand over", "train 0"),
        *("lent: swap 1", "lent: stream", "lent: resume 32", "lent: hand over", "train 1"),
        *("lent: swap 2", "lent: stream", "lent: resume 40", "lent: hand over", "train 2"),
    ]


# -- rolling_update


async def test_the_engine_that_is_furthest_behind_takes_the_newest_version_and_skips_those_between() -> None:
    job = FakeJob(engines=5)
    for version in (1, 2):
        job.weights.events[version].set()
    log = await job.play(RollingUpdate(updating=0.4))
    first = [line for line in log.of("0:", "2:", "4:") if "done" not in line]  # one of two rows; the other is 1 and 3
    assert first[:9] == [f"{k}: {what}" for k in (0, 2, 4) for what in ("pause wait", "swap 2", "resume 40")]
    assert {f"{k}: swap 4" for k in range(5)} <= set(log.lines), "in the end all have the last one"
    assert not log.of(*(f"{k}: swap 1" for k in range(5)))


# -- adaptive_staleness


async def test_staleness_grows_where_the_trainer_waited_and_shrinks_where_not_and_limits_never_fall() -> None:
    job = FakeJob(iterations=6)
    job.trainer.waits = [0.5, 0.3, 0.26, 0.25, 0.0, 0.3]
    log = await job.play(AdaptiveStaleness(max_staleness=1.2, step=0.5, idle=0.25))
    staleness = [0, 0.5, 1, 1.2, 1.075, 0.95, 1.2]
    assert log.of("limit", "resume") == [
        f"{'resume' if version else 'limit'} {Capacity(8, eta).limit(version)}" for version, eta in enumerate(staleness)
    ]


# -- fully_async


@pytest.mark.parametrize("eta", [0, 0.5, 1, 2, 2.5])
async def test_streaming_admits_and_dispatches_up_to_the_limit_of_the_published_version(eta: float) -> None:
    job = FakeJob()
    await FullyAsync(max_staleness=eta).run(job)
    capacity = Capacity(8, eta)
    limits = [capacity.limit(version) for version in range(5)]
    log = job.log
    assert log.of("admit") == [f"admit {limit}" for limit in limits]
    assert log.of("limit", "resume") == [f"limit {limits[0]}", *[f"resume {limit}" for limit in limits[1:]]]
    for version in range(1, 5):
        published = log.at(f"publish {version} done")
        assert published < log.at(f"resume {limits[version]}") and published < log.at(f"admit {limits[version]}")


async def test_streaming_publishes_only_while_engines_are_paused() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    log, expected = job.log, []
    for version in range(1, 5):
        for line in ("pause keep", f"publish {version}", f"resume {8 * (version + 3)}"):
            expected += [line, f"{line} done"]
    assert [line for line in log.lines if line.startswith(("pause", "publish", "resume"))] == expected


async def test_the_trainer_goes_on_beside_the_engines_that_take_up_a_new_version() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    at = job.log.at
    for version in range(1, 4):
        assert at(f"publish {version} done") < at(f"train {version}") < at(f"resume {8 * (version + 3)} done")
        assert at(f"train {version} done") < at(f"publish {version + 1}")


async def test_engines_get_every_second_version_and_the_last_and_never_stop_for_the_others() -> None:
    log = await FakeJob(iterations=5).play(FullyAsync(max_staleness=1.5, publish_every=2))
    capacity = Capacity(8, 1.5)
    assert log.of("mark", "publish") == ["mark 1", "publish 2", "mark 3", "publish 4", "publish 5"]
    assert log.of("pause") == ["pause keep"] * 3
    limits = [capacity.limit(version) for version in (0, 2, 4, 5)]
    assert log.of("limit", "resume") == [f"limit {limits[0]}", *(f"resume {limit}" for limit in limits[1:])]
    assert log.of("admit") == [f"admit {limit}" for limit in limits]


@pytest.mark.parametrize(("eta", "every"), [(0, 2), (1.5, 3), (2, 4)])
def test_engines_that_could_not_start_what_is_trained_before_new_weights_are_refused(eta: float, every: int) -> None:
    with pytest.raises(ValueError, match=rf"schedule.publish_every={every}: .*; set max_staleness={every - 1} or more"):
        FullyAsync(max_staleness=eta, publish_every=every)


async def test_what_is_due_or_dropped_goes_by_the_versions_that_engines_had() -> None:
    options = {"order": "completion", "publish_every": 2}
    job = FakeJob(iterations=6)
    await job.play(FullyAsync(max_staleness=2, **options))  # type: ignore[arg-type]
    assert job.trainer.first == [
        [],
        [(24, 16)],  # versions 0 and 1 start what is below 24, for batches 0 to 2
        [(24, 8)],
        [(40, 16)],
        [(40, 8)],
        [(56, 16)],
    ]
    job = FakeJob(iterations=5)
    job.prompts.drops = [3, 2]  # in iterations 3 and 4: what versions 0, and 1 as it, started
    log = await job.play(FullyAsync(max_staleness=2, on_stale="drop", **options))  # type: ignore[arg-type]
    assert log.of("drop") == ["drop 24", "drop 24"]
    assert log.of("limit", "resume") == ["limit 24", "resume 40", "limit 43", "resume 59", "limit 61", "resume 69"]


@pytest.mark.parametrize("mode", get_args(PauseMode))
async def test_streaming_pauses_engines_in_the_mode_that_it_was_given(mode: PauseMode) -> None:
    job = FakeJob()
    await FullyAsync(pause=mode).run(job)
    assert job.log.of("pause") == [f"pause {mode}"] * 4


async def test_every_stage_streams_through_the_whole_job_until_the_prompts_are_closed() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    for name in STAGES:
        assert job.log.of(f"{name} ") == [f"{name} streams"]
        assert job.log.at("close") < job.log.at(f"{name} streams done")
    assert job.log.at("admit 56 done") < job.log.at("close") < job.log.at("stream done")


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
        *("limit 16", "resume 24", "resume 32", "limit 35", "resume 43", "resume 51", "limit 53", "resume 61")
    ]
    assert log.of("admit") == [f"admit {line.split()[1]}" for line in log.of("limit", "resume")]
    assert log.at("drop 16 done") < log.at("limit 35") < log.at("admit 35 done") < log.at("train 2")
    assert job.trainer.first == [[]] * 5


@pytest.mark.parametrize("staleness", [-1, -0.001, float("nan"), float("inf"), 1e7])
def test_a_staleness_that_is_no_bound_is_refused(staleness: float) -> None:
    with pytest.raises(ValueError, match=f"^schedule.max_staleness={staleness} is out of bounds; use 0 to 1000000$"):
        FullyAsync(max_staleness=staleness)
