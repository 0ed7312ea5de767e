"""Simulated runs of which engines and the worker of the host die at any moment, and are started again."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from harness.acceptance.chaos.jobs import base, random_job
from harness.comparison.promises import FinishedRun
from harness.config import JobConfig, RestartsConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.transports import transport_of
from harness.driver.restarts import EngineRestarts, GivenUp, Restarts, how, roles_in
from harness.metrics.schemas import Restart
from harness.runtime.runtime import RealClock, WorkerDied, parts_of
from harness.runtime.virtual_runtime import LocalRole
from harness.weight_sync.membership import LostEngine
from tests.support.coordinated_workers import BROKEN, DIED, Setting, Worker
from tests.support.engine_events import KillableHandle
from tests.support.every_schedule import EVERY_SCHEDULE
from tests.support.invariants import check_dispatch, check_every_sample_once, check_lags, check_times
from tests.support.killable_runtime import Death, simulate_killed
from tests.support.random_jobs import play
from tests.support.role_setting import settle


def end_of(job: JobConfig, seed: int) -> float:
    return max(sample.trained_at or 0 for sample in play(job, seed).finished.samples)


def alone(job: JobConfig) -> bool:
    """Whether an engine has its worker to itself."""
    return not make_schedule(job).colocated


DEATHS = [(0.2, "host", 0.05), (0.3, "rollout[0]", 0.1), (0.32, "rollout[1]", 0.0), (0.5, "rollout[0]", 0.0)]
"""When, as a share of the run; who; and how long the next start of it lasts, as such a share, too. At any moment:
tests/harness/acceptance/test_chaos.py."""


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_roles_that_die_are_started_again_and_no_sample_knows_of_it(schedule: str) -> None:
    job = replace(random_job(schedule, Random(3).choice), iterations=6, restarts=RestartsConfig(limit=len(DEATHS)))
    engines = int(job.schedule.split["rollout"]) if alone(job) else 0
    there = {"host", *(f"rollout[{number}]" for number in range(engines))}
    ends_at = end_of(job, 0)
    planned = [Death(at * ends_at, name, start * ends_at) for at, name, start in DEATHS if name in there]
    recorder = simulate_killed(job, 0, planned)
    recorder.ledger.check()
    restarted = [name for restart in recorder.restarts for name in restart.roles]
    run = FinishedRun(job, recorder.samples(), recorder.ledger.counts(), recorder.timeline, frozenset(restarted))
    check_every_sample_once(run)
    check_dispatch(run)
    check_times(run)
    check_lags(run, newer=transport_of(make_schedule(job).transport).staged)
    assert len(recorder.restarts) <= len(planned) and not recorder.engines
    assert "reward[0]" in restarted and ("rollout[0]" in restarted) == alone(base(schedule))


def test_a_death_too_many_or_of_the_last_engine_ends_the_run() -> None:
    job = replace(base("fully_async"), restarts=RestartsConfig(limit=2), iterations=6)
    ends_at = end_of(job, 0)
    deaths = [Death(share * ends_at, "host") for share in (0.2, 0.4, 0.6)]
    with pytest.raises((WorkerDied, ExceptionGroup)) as ended:
        simulate_killed(job, 0, deaths)
    (given_up,) = {str(part) for part in parts_of(ended.value) if isinstance(part, GivenUp)}
    assert "it was started again 2 times before (restarts.limit=2)" in given_up
    job = in_steps("separated_sync", engines=1)
    with pytest.raises(WorkerDied, match="rollout.0. died .*; no engine was left to sample the rest of batch 2"):
        simulate_killed(job, 0, [between_steps(job, sampled=False)])


STEPS = (
    "backend=virtual",
    "iterations=4",
    "engine.slots=8",
    "algorithm.batch_groups=4",
    "algorithm.micro_batch_groups=1",
    "algorithm.mini_batches=4",
    "algorithm.recompute_log_probs=false",
)
"""An optimizer step for each group."""


def in_steps(schedule: str, engines: int) -> JobConfig:
    split = f"schedule.split={{rollout:{engines},actor:1}}"
    return compose_job([f"schedule={schedule}", split, f"cluster.devices={engines + 1}", *STEPS])


def between_steps(job: JobConfig, *, sampled: bool) -> Death:
    """Of the engine that has the last sample of a batch, while no other has any, after the first step of the batch;
    sampled: when that sample is finished, too, and before the last step."""
    run = play(job).finished
    first, *_, last = [s.end for s in run.timeline.spans if s.kind == "update_actor" and s.iteration == 2][1::2]
    *_, (finished, engine) = sorted((s.finished_at, s.engine) for s in run.samples if s.trained_iteration == 2)
    others = [s.finished_at for s in run.samples if s.trained_iteration == 2 and s.engine != engine]
    begin, end = (finished, last) if sampled else (max([0.0, *others]), finished)
    assert max(begin, first) < end
    return Death((max(begin, first) + end) / 2, f"rollout[{engine}]")


@pytest.mark.parametrize(("schedule", "engines", "sampled"), [("separated_sync", 2, False), ("one_step_off", 1, True)])
def test_it_goes_on_where_others_can_sample_them_or_all_are_sampled(schedule: str, engines: int, sampled: bool) -> None:
    job = in_steps(schedule, engines)
    death = between_steps(job, sampled=sampled)
    recorder = simulate_killed(job, 0, [death])
    recorder.ledger.check()
    assert [restart.roles for restart in recorder.restarts] == [[death.worker]]


def starting_in(setting: Setting, restarts: Restarts, heard: list[Restart], *, lacks: bool = False) -> EngineRestarts:
    """lacks: any batch has samples that no engine is left to make."""

    class Starting:
        async def start_again(self, engine: Worker) -> None:
            setting.log.append(f"{engine.name} starts")
            engine.dead = False

    return EngineRestarts(
        setting.coordinator,
        restarts,
        Starting(),  # type: ignore[arg-type]
        RealClock.starting_now(),
        heard.append,
        lambda batch: asyncio.sleep(0, lacks),
    )


async def test_an_engine_that_died_over_a_transfer_is_started_again_when_that_has_ended() -> None:
    setting = Setting("host_staged", on_lost="go_on")
    engine, copied = setting.engines[0], setting.trainers[0].hold("send")
    heard: list[Restart] = []
    restarts = starting_in(setting, Restarts(1), heard)
    transfer = asyncio.create_task(setting.coordinator.start_transfer(1))
    await settle()
    engine.dead = True  # while the trainer's copy is made, before it was asked for its part
    replaced = asyncio.create_task(restarts.replace(engine, "killed"))
    await settle()
    copied.set()
    await transfer
    assert await replaced == 1 and heard
    assert setting.log.index("engine0.stage") < setting.log.index("engine0 starts")


@pytest.mark.parametrize(("limit", "version"), [(2, 1), (1, None)])
async def test_one_that_was_started_again_without_weights_died(limit: int, version: int | None) -> None:
    setting = Setting("collective", engine0={"load": [BROKEN] * 3})
    await setting.coordinator.connect()
    heard: list[Restart] = []
    assert await starting_in(setting, Restarts(limit), heard).replace(setting.engines[0], "killed") == version
    assert setting.count("engine0 starts") == limit
    why = "engine0 did not get version 1: the link broke (after 3 attempts)"
    assert [restart.why for restart in heard] == [why] * (version is not None)


async def test_a_trainers_death_over_its_weights_is_not_the_engines() -> None:
    setting, restarts = Setting("collective"), Restarts(1)
    await setting.coordinator.connect()
    setting.trainers[0].errors = {"send": [DIED]}
    with pytest.RaisesGroup(pytest.RaisesExc(WorkerDied, match="it died")):
        await starting_in(setting, restarts, []).replace(setting.engines[0], "killed")
    assert restarts.allow(["engine0"])


async def test_a_death_after_which_all_go_back_is_counted_once() -> None:
    setting, restarts = Setting("collective", "go_on"), Restarts(1)
    setting.trainers[0].hold("settled_version")
    setting.trainers[0].hold("open_batch").set()  # steps of it were made
    setting.fleet.replace = starting_in(setting, restarts, [], lacks=True).replace
    setting.fleet.membership.mark_lost("engine1", "engine1 died")
    await setting.fleet.lose({"engine0": "engine0 died"})
    with pytest.RaisesGroup(pytest.RaisesExc(LostEngine, match="engine0 died.*no engine was left to sample")):
        await setting.fleet.back("engine0")
    assert restarts.allow(["engine0"])


async def test_a_call_of_a_killed_worker_ends_with_its_death_also_where_the_next_one_lives_already() -> None:
    class Role:
        async def work(self) -> None:
            await asyncio.gather(asyncio.Event().wait())  # such calls are cancelled level by level

    handle = KillableHandle(LocalRole("reward[0]", Role()))
    call = asyncio.create_task(handle.role.work())
    await settle()
    handle.die()
    handle.dead = False
    with pytest.raises(WorkerDied, match="died during work"):
        await call


def test_a_limit_and_a_message_are_of_the_roles_that_die_together() -> None:
    restarts = Restarts(1)
    restarts.count(["reward[0]", "advantages[0]"])
    assert restarts.allow(["rollout[0]"])
    assert not restarts.allow(["advantages[0]", "reward[0]"])
    assert not Restarts(0).allow(["rollout[0]"])
    said = "actor[0] died during train: killed by signal 9 (Killed); its output is in /a/device[1].log; critic[0] died"
    assert roles_in(said) == ["actor[0]", "critic[0]"]
    assert how(said) == "actor[0] died during train: killed by signal 9 (Killed); critic[0] died"
    assert roles_in("the queue died: its process has ended") == ["queue"]
