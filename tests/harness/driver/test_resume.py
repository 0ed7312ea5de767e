"""Simulated runs that are cut off, and go on from their checkpoints: what must hold of a run holds of them. At any
moment, and with other faults: tests/harness/acceptance/test_chaos.py."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from harness.comparison.promises import FinishedRun, read_finished
from harness.config import CheckpointConfig, EvalConfig, JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.driver.checkpoint_files import CHECKPOINTS, DRIVER, Cut
from harness.driver.checkpointing import LeftAtCheckpoint
from harness.metrics.run_files import load_evaluations, load_metrics
from harness.runtime.runtime import parts_of
from harness.tasks import Problem, Task
from tests.support.attempts import attempt
from tests.support.every_schedule import EVERY_SCHEDULE
from tests.support.invariants import check_run

ITERATIONS = 8
SMALL = (
    "cost=tiny_cpu",
    f"iterations={ITERATIONS}",
    "cluster.devices=4",
    "algorithm.batch_groups=4",
    "algorithm.group_size=2",
    "algorithm.micro_batch_groups=1",
    "warmup_iterations=0",
    "backend=virtual",
)


def job(schedule: str, every: int = 2, **options: Any) -> JobConfig:
    config = compose_job([*SMALL, f"schedule={schedule}"])
    made = replace(config, schedule=replace(config.schedule, options=config.schedule.options | options))
    return replace(made, checkpoint=CheckpointConfig(every=every))


def whole_run(config: JobConfig, results: Path) -> tuple[Path, list[float]]:
    """To which nothing happens: its folder, and when its iterations ended."""
    run = attempt(config, results / "whole", None, [])
    assert run is not None
    return run.path, [line["seconds"] for line in load_metrics(run.path)]


def newest_cut(path: Path) -> Cut:
    """Of a run that is over."""
    (*_, newest) = sorted((path / CHECKPOINTS).glob("version-*"))
    return msgspec.json.decode((newest / DRIVER).read_bytes(), type=Cut)


def check_told(path: Path, run: FinishedRun) -> None:
    """The buffer was asked once of every group that was dealt, and told of it with the problem that it had given."""
    known = json.loads((path / "buffer.json").read_text("utf-8"))
    told = {group: answer for group, answer in known["told"]}
    dealt = run.counts["trained"] + run.counts["dropped_filtered"]
    assert len(known["taken"]) == len(known["told"]) == len(told) == dealt // run.group
    for number, group in enumerate(known["taken"]):
        assert told[group] == str(number)


def check_resumed(config: JobConfig, cuts: list[float]) -> list[int]:
    """cuts: shares of the whole run after which an attempt is cut off. The versions that attempts began with."""
    began: list[int] = []
    with TemporaryDirectory() as results:
        whole, ends = whole_run(config, Path(results))
        length = ends[-1]
        for cut in cuts:
            if attempt(config, Path(results) / "cut", cut * length, began) is not None:
                break
        else:
            finished = attempt(config, Path(results) / "cut", None, began)
            assert finished is not None
        path = Path(results) / "cut" / "e" / "c" / "seed=0"
        run, unbroken = read_finished(path), read_finished(whole)
        check_run(run)
        if make_schedule(config).order == "fifo":
            assert {s.sample_id for s in run.trained} == {s.sample_id for s in unbroken.trained}
            assert run.counts == unbroken.counts
        lines = load_metrics(path)
        if config.algorithm.filters:
            refused = sum(line["filter/refused"] for line in lines)
            assert refused * run.group == run.counts["dropped_filtered"]
        assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
        if config.algorithm.kl_target is not None:
            of_run, of_unbroken = newest_cut(path), newest_cut(whole)
            assert of_run.version == of_unbroken.version > began[-1]
            assert of_run.kl_coefficient == of_unbroken.kl_coefficient != config.algorithm.kl_coef
        if config.task.buffer is not None:
            check_told(path, run)
        times = [line["seconds"] for line in lines]
        assert times == sorted(times)
    return began


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_a_run_that_was_cut_off_twice_keeps_what_its_schedule_promises(schedule: str) -> None:
    began = check_resumed(job(schedule), [0.55, 0.4])
    assert began == sorted(began) and began[-1] > began[0] == 0


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_so_it_is_where_training_follows_the_order_of_completion(on_stale: str) -> None:
    check_resumed(job("fully_async", order="completion", on_stale=on_stale, max_staleness=1.0), [0.6, 0.3])


@pytest.mark.parametrize("order", ["fifo", "completion"])
def test_so_it_is_where_engines_get_every_third_version(order: str) -> None:
    began = check_resumed(job("fully_async", order=order, max_staleness=2.5, publish_every=3), [0.7, 0.4])
    assert began[1] == 3, "the only version before the cut that engines got, and a checkpoint holds"


def filtered(config: JobConfig, share: float = 0.4, over_sampling: float = 1.0) -> JobConfig:
    """A draw says which groups are refused; the rest are kept."""
    algorithm = replace(config.algorithm, filter="zero_variance", filter_rounds=100, over_sampling=over_sampling)
    return replace(config, algorithm=algorithm, cost=replace(config.cost, filtered_share=share))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "over_sampling"),
    [("colocate_sync", 1.0), ("k_step_off", 1.5), ("half_step", 2.0), ("fully_async", 1.0)],
)
def test_so_it_is_where_groups_are_refused(schedule: str, over_sampling: float) -> None:
    """They are dealt again, or spares replace them."""
    check_resumed(filtered(job(schedule), over_sampling=over_sampling), [0.6, 0.4])


@pytest.mark.slow
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_so_it_is_where_refused_groups_are_dealt_again_and_stale_ones_dropped(on_stale: str) -> None:
    check_resumed(filtered(job("fully_async", order="completion", on_stale=on_stale, max_staleness=1.0)), [0.6, 0.3])


@dataclass
class Remembering:
    """A data buffer that writes down what it is asked and told. The answer of its n-th problem is n, counted from 0."""

    taken: list[int] = field(default_factory=list, init=False)
    told_of: list[tuple[int, str]] = field(default_factory=list, init=False)

    def take(self, task: Task, group: int, seed: int) -> Problem:
        self.taken.append(group)
        return replace(task.problem(group, seed), answer=str(len(self.taken) - 1))

    def record_rewards(self, problem: Problem, group: int, rewards: Sequence[float]) -> None:
        self.told_of.append((group, problem.answer))

    def state(self) -> Mapping[str, Any]:
        return {"taken": self.taken, "told": self.told_of}

    def load(self, state: Mapping[str, Any]) -> None:
        self.taken = list(state["taken"])
        self.told_of = [(group, answer) for group, answer in state["told"]]


@pytest.mark.parametrize(("schedule", "share"), [("one_step_off", None), ("delayed_update", 0.4)])
def test_a_data_buffer_goes_on_with_what_it_was_told(schedule: str, share: float | None) -> None:
    config = job(schedule)
    config = replace(config, task=replace(config.task, buffer=f"{__name__}:Remembering"))
    check_resumed(config if share is None else filtered(config, share), [0.55, 0.4])


@pytest.mark.parametrize("schedule", ["separated_sync", "one_step_off", "fully_async"])
def test_the_coefficient_that_follows_a_kl_is_that_of_the_unbroken_run(schedule: str) -> None:
    config = job(schedule)
    followed = replace(config.algorithm, kl_in="reward", kl_coef=0.05, kl_target=0.1)
    check_resumed(replace(config, algorithm=followed), [0.55, 0.4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "devices", "others"), [("colocate_sync", 2, 4), ("one_step_off", 4, 2), ("fully_async", 2, 4)]
)
def test_a_run_on_other_devices_begins_with_a_checkpoint(
    schedule: str, devices: int, others: int, tmp_path: Path
) -> None:
    there, here = (
        replace(config, cluster=replace(config.cluster, devices=count))
        for config in [filtered(job(schedule, every=1))]
        for count in (devices, others)
    )
    (whole, ends), (_, ends_here) = (whole_run(one, tmp_path / f"{one.cluster.devices}") for one in (there, here))
    began: list[int] = []
    assert attempt(there, tmp_path / "there", ends[-1] * 0.55, began) is None
    before = {path: path.read_bytes() for path in (tmp_path / "there").rglob("*") if path.is_file()}
    other = tmp_path / "there" / "e" / "c" / "seed=0"
    assert attempt(here, tmp_path / "here", ends_here[-1] * 0.5, began, other) is None
    finished = attempt(here, tmp_path / "here", None, began, other)
    assert finished is not None and 0 < began[1] < began[2]
    assert before == {path: path.read_bytes() for path in (tmp_path / "there").rglob("*") if path.is_file()}
    run = read_finished(finished.path)
    check_run(run)
    assert {s.sample_id for s in run.trained} == {s.sample_id for s in read_finished(whole).trained}
    lines = load_metrics(finished.path)
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    assert run.timeline.started_at == lines[began[1] - 1]["seconds"]


@pytest.mark.parametrize("schedule", ["colocate_sync", "separated_sync", "half_step"])
def test_the_step_after_a_checkpoint_which_is_done_again_counts_once(schedule: str, tmp_path: Path) -> None:
    began: list[int] = []
    _, seconds = whole_run(job(schedule), tmp_path)
    assert attempt(job(schedule), tmp_path, (seconds[5] + seconds[6]) / 2, []) is None
    finished = attempt(job(schedule), tmp_path, None, began)
    assert finished is not None and began == [4]
    step = seconds[-1] / ITERATIONS
    assert load_metrics(finished.path)[-1]["seconds"] < seconds[-1] + step / 2


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_the_same_versions_are_evaluated_wherever_a_run_is_cut_off(schedule: str, tmp_path: Path) -> None:
    def evaluated(run: Path) -> list[int]:
        return [line["version"] for line in load_evaluations(run)]

    config = replace(job(schedule, every=1), eval=EvalConfig(every=2))
    whole, ends = whole_run(config, tmp_path)
    expected, began = evaluated(whole), list[int]()
    for share in (0.4, 0.9):
        assert attempt(config, tmp_path / f"{share}", share * ends[-1], []) is None
        finished = attempt(config, tmp_path / f"{share}", None, began)
        assert finished is not None and evaluated(finished.path) == expected
    assert len(set(began)) > 1


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_a_run_that_is_asked_to_leave_makes_a_checkpoint_and_goes_on_from_it(schedule: str, tmp_path: Path) -> None:
    config, began = job(schedule, every=100), list[int]()
    _, ends = whole_run(config, tmp_path)
    with pytest.raises((LeftAtCheckpoint, ExceptionGroup)) as ended:
        attempt(config, tmp_path, None, began, leave_at=ends[-1] * 0.3)
    (left,) = {part.version for part in parts_of(ended.value) if isinstance(part, LeftAtCheckpoint)}
    finished = attempt(config, tmp_path, None, began)
    assert finished is not None and began == [0, left] and left < ITERATIONS - 1
    check_run(read_finished(finished.path))


def test_a_run_that_is_asked_to_leave_at_its_end_comes_there(tmp_path: Path) -> None:
    config = job("colocate_sync", every=100)
    _, seconds = whole_run(config, tmp_path)
    assert attempt(config, tmp_path, None, [], leave_at=(seconds[-3] + seconds[-2]) / 2) is not None
