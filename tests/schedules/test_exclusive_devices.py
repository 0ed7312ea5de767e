"""A device computes for one role at a time, on the virtual clock too: nothing is faster than its work. Of the schedules
that are built in, test_every_schedule.py checks it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.acceptance.chaos.jobs import base
from harness.comparison.promises import FinishedRun
from harness.config import JobConfig, LengthsConfig
from tests.support.engine_events import Event, simulate_with
from tests.support.examples import examples
from tests.support.invariants import check_devices, check_every_sample_once, check_run, spans_by_device
from tests.support.random_jobs import jobs, play
from tests.support.simulated_setting import COST

STREAM = "tests.support.colocated_stream:ColocatedStream"
checked = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


@checked
@given(job=jobs(STREAM), moment=st.floats(0, 1), seed=st.integers(0, 3))
def test_roles_that_stream_on_one_pool_take_turns_and_an_engine_that_dies_leaves_its_device_to_the_others(
    job: JobConfig, moment: float, seed: int
) -> None:
    """They take no less than their work."""
    job = replace(job, cluster=replace(job.cluster, on_lost_engine="go_on"))
    run = play(job, seed).finished
    check_run(run)
    check_devices(run)
    end = run.timeline.elapsed_window()[1]  # spares may be generated beyond it
    for device, spans in spans_by_device(run).items():
        work = sum(min(span.end, end) - span.start for span in spans if span.start < end)
        if device.startswith("device"):
            assert {span.role for span in spans} >= {"rollout", "actor", "actor_fwd", "reference"}
            assert work <= end * (1 + 1e-9)
    if int(job.schedule.split["actor"]) > 1:
        event = Event(moment * max(sample.trained_at or 0 for sample in run.samples), 0, "dies")
        recorder = simulate_with(job, seed, [event], lambda session: None)
        run = FinishedRun(job, recorder.samples(), recorder.ledger.counts(), recorder.timeline)
        check_every_sample_once(run)
        check_devices(run)


def test_streaming_on_one_pool_is_not_faster_than_one_role_after_the_other() -> None:
    """Of constant lengths, with nothing to switch: what streams waits for the same device."""
    made = {}
    for schedule in ("colocate_sync", STREAM):
        job = base(schedule)
        cost = replace(
            COST,
            lengths=LengthsConfig(kind="constant", mean=100.0, cap=400),
            **dict.fromkeys(("offload_s", "reload_s", "sync_s", "weight_bytes"), 0.0),
        )
        split: dict[str, int | str] = {"actor": 2, "rollout": "actor", "actor_fwd": "actor", "reference": "actor"}
        made[schedule] = replace(
            job,
            iterations=8,
            cost=cost,
            schedule=replace(job.schedule, split=split),
            engine=replace(job.engine, slots=64),
        )
    runs = {schedule: play(job).finished for schedule, job in made.items()}
    last = {schedule: run.timeline.elapsed_window()[1] for schedule, run in runs.items()}
    assert last[STREAM] >= 0.99 * last["colocate_sync"]
