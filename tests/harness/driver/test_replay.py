"""Simulated runs that do again what was recorded of another, on machines whose parts are faster and slower."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks.earlier_run import why_not_replayed
from harness.checks.job import plan_job
from harness.comparison.promises import read_finished
from harness.config import ConfigError, CostConfig, JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.metrics.arrivals import ARRIVALS, DamagedArrivals, read_arrivals
from harness.metrics.run_files import load_ledger, load_metrics, load_samples
from harness.runtime.runtime import parts_of
from harness.workers.replaying import Replay
from tests.support.attempts import attempt
from tests.support.examples import examples
from tests.support.invariants import check_run
from tests.support.random_jobs import jobs, without_limit

DECIDED = ["sample_id", "engine", "fate", "trained_iteration", "version_first", "version_last", "lag_worst", "lag_mean"]


def elsewhere(config: JobConfig, rollout: float, training: float, transfer: float) -> JobConfig:
    """The same job where these last so many times as long."""
    cost = config.cost
    assert isinstance(cost, CostConfig)
    slower = replace(
        cost,
        decode_step_s=cost.decode_step_s * rollout,
        decode_step_s_per_sample=cost.decode_step_s_per_sample * rollout,
        train_s_per_token=cost.train_s_per_token * training,
        log_prob_s_per_token=cost.log_prob_s_per_token * training,
        network_bytes_per_s=cost.network_bytes_per_s / transfer,
        host_bytes_per_s=cost.host_bytes_per_s / transfer,
    )
    return replace(config, cost=slower)


def recorded(config: JobConfig, results: Path) -> tuple[Path, Replay]:
    """A run of this job, to its end: the rest of one that attempts before left there."""
    run = attempt(config, results, None, [])
    assert run is not None
    placement = plan_job(config, make_schedule(config), NO_MACHINE).placement
    return run.path, Replay.read(run.path, config, 0, placement)


def check_replayed(config: JobConfig, other: JobConfig) -> None:
    assert why_not_replayed(config, make_schedule(config), "virtual", gpu=False) is None
    with TemporaryDirectory() as results:
        there, replay = recorded(config, Path(results) / "there")
        check_same(there, replay, other, Path(results) / "here")


def check_same(there: Path, replay: Replay, other: JobConfig, results: Path, *, engines: bool = True) -> None:
    """The recorded run and its replay by this job. engines: each sample is of the same one, too."""
    decided = DECIDED if engines else [column for column in DECIDED if column != "engine"]
    here = attempt(other, results, None, [], replay=replay)
    assert here is not None
    check_run(read_finished(here.path))
    theirs, ours = load_ledger(there), load_ledger(here.path)
    told = [ledger.pop("tokens", None) for ledger in (theirs, ours)]  # none by a run that went on after it was killed
    kept = {one["generated"] - one["begun_again"] for one in told if one}
    assert theirs == ours and len(kept) <= 1, "what was aborted there is not begun twice here"
    found, expected = (load_samples(path).select(decided) for path in (here.path, there))
    trained = [fate == "trained" for fate in expected["fate"].to_pylist()]
    assert found["fate"].equals(expected["fate"])
    assert found.filter(trained).equals(expected.filter(trained))


TIMES = st.sampled_from([0.1, 0.5, 1.0, 3.0, 20.0])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fully_async", "half_step"])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_replay_ends_as_the_recorded_run(schedule: str, data: st.DataObject) -> None:
    """Of a drawn job what can be replayed."""
    drawn = data.draw(jobs(schedule))
    algorithm = replace(drawn.algorithm, filter="none", advantage="group")
    cost = replace(drawn.cost, turns=None, filtered_share=None)
    config = without_limit(replace(drawn, algorithm=algorithm, cost=cost))
    check_replayed(config, elsewhere(config, data.draw(TIMES), data.draw(TIMES), data.draw(TIMES)))


LENGTHS = [*range(1, 13), 1000]
"""Tokens: few, but for a straggler now and then, which is overtaken by everything else."""


def fixed(*settings: str) -> JobConfig:
    return compose_job(
        [
            *("cost=tiny_cpu", "iterations=6", "cluster.devices=4", "backend=virtual", "warmup_iterations=0"),
            *("algorithm.batch_groups=4", "algorithm.group_size=2", "algorithm.micro_batch_groups=1"),
            *("schedule=fully_async", "schedule.order=completion", "schedule.on_stale=drop"),
            *("schedule.max_staleness=1", "schedule.split.rollout=3", "cost.lengths.kind=trace"),
            *(f"cost.lengths.values={LENGTHS}", "cost.lengths.cap=1000"),
            *settings,
        ]
    )


def test_the_record_holds_drops_and_engines_that_gave_up_samples(tmp_path: Path) -> None:
    config = fixed()
    other = elsewhere(config, 0.1, 3.0, 1.0)
    there, replay = recorded(config, tmp_path / "there")
    assert load_ledger(there)["dropped_stale"] and any(replay.drops)
    free = attempt(other, tmp_path / "free", None, [])
    assert free is not None and load_samples(free.path).select(DECIDED) != load_samples(there).select(DECIDED)
    check_replayed(config, other)
    # It has room for one group, and is slower than in the recorded run.
    config = fixed("schedule.pause=abort", "engine.slots=2")
    check_replayed(config, elsewhere(config, 20.0, 1.0, 1.0))


def test_a_group_that_two_engines_sampled_since_the_run_was_killed_between_is_dealt_to_one(tmp_path: Path) -> None:
    config = fixed("checkpoint.every=1", "schedule.on_stale=wait", "schedule.max_staleness=3")
    length = load_metrics(recorded(config, tmp_path / "whole")[0])[-1]["seconds"]
    split = 0
    for share in (0.3, 0.9):
        assert attempt(config, tmp_path / f"{share}", share * length, []) is None
        there, replay = recorded(config, tmp_path / f"{share}")
        split += replay.recording != read_arrivals(there / ARRIVALS)
        other = replace(config, checkpoint=fixed().checkpoint)
        check_same(there, replay, other, tmp_path / f"{share} again", engines=False)
    assert split > 0


def test_a_record_of_another_seed_or_of_other_lengths_is_refused(tmp_path: Path) -> None:
    config = fixed()
    there, replay = recorded(config, tmp_path / "there")
    placement = plan_job(config, make_schedule(config), NO_MACHINE).placement
    with pytest.raises(ConfigError, match="seed=0.*and this run is.*seed=1"):
        Replay.read(there, config, 1, placement)
    longer = replace(config.cost, lengths=replace(config.cost.lengths, values=(7, 8)))
    with pytest.raises(ExceptionGroup) as told:
        attempt(replace(config, cost=longer), tmp_path / "here", None, [], replay=replay)
    (line,) = {str(part) for part in parts_of(told.value) if isinstance(part, ConfigError)}
    assert re.match(r"replay: sample \d+ got \d+ tokens of version 0 and then", line)


def damaged(path: Path, change: Callable[[bytes], bytes]) -> str:
    data = path.read_bytes()
    path.write_bytes(change(data))
    with pytest.raises(DamagedArrivals) as told:
        read_arrivals(path)
    path.write_bytes(data)
    return str(told.value)


def test_a_damaged_record_is_named_with_its_line_and_any_changed_byte_noticed(tmp_path: Path) -> None:
    path = recorded(fixed(), tmp_path)[0] / ARRIVALS
    lines = path.read_bytes().splitlines(keepends=True)
    assert "line 3 is damaged: it is not what was written" in damaged(
        path, lambda data: b"".join([*lines[:2], lines[2].replace(b"sampled", b"sampler"), *lines[3:]])
    )
    assert "its last line was cut off" in damaged(path, lambda data: data[:-7])
    assert "ends after 5 of 6 iterations" in damaged(path, lambda data: b"".join(lines[:-1]))
    assert "line 3 is of iteration 2, not 1" in damaged(path, lambda data: b"".join([*lines[:2], *lines[3:]]))
    assert "line 1 is damaged" in damaged(path, lambda data: b"\x00\xff" + data)
    assert "is empty" in damaged(path, lambda data: b"")
    path.unlink()
    with pytest.raises(DamagedArrivals, match="is missing"):
        read_arrivals(path)
    path = recorded(fixed(), tmp_path)[0] / ARRIVALS
    random = Random(5)
    for _ in range(100):
        at = random.randrange(path.stat().st_size)
        damaged(path, lambda data, at=at: data[:at] + bytes([data[at] ^ random.randrange(1, 256)]) + data[at + 1 :])  # type: ignore[misc]
