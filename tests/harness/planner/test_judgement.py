"""Verdicts of a plan over draws: of common systems, of a part that stands for the whole, and none beyond what is
drawn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.config.compose import compose_job
from harness.planner.explore import Effort
from harness.planner.judgement import _Part, judge, systems
from harness.planner.plan import Choice, Plan, make_plan, plan_jobs
from harness.planner.report import draw_plan
from harness.prediction.evidence import SHARED, Evidence, StepRow, Workload
from harness.prediction.forecast import verdict_of

SETTINGS = ["model=qwen1.5b", "cluster.devices=16", "algorithm.batch_groups=32", "algorithm.group_size=4"]
FIXED = {"engine.tensor_parallel", "training.tensor_parallel", "algorithm.micro_batch_groups"}


def planned(*schedules: str) -> Plan:
    jobs = [job for name in schedules for job in plan_jobs([f"schedule={name}", *SETTINGS, "cost.lengths.cap=512"])[0]]
    return make_plan(jobs, frozenset(FIXED), Effort(samples=1, trials=1), processes=1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(SHARED, "one_step_off", "half_step")


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.planner.judgement.DRAWS", 8)


def of(plan: Plan, schedule: str) -> Choice:
    return next(choice for choice in plan.best_of_each if choice.schedule == schedule)


def test_what_is_judged_is_not_the_users_choice_and_a_tie_lies_within_its_bound(plan: Plan) -> None:
    near, far = np.linspace(1.01, 1.04, 64), np.linspace(0.9, 1.1, 64)
    assert (verdict_of(near), verdict_of(far)) == ("tie", "cannot be told")
    assert (verdict_of(near + 0.2), verdict_of(1 / (near + 0.2))) == ("faster", "slower")
    q, choice = systems(plan.best.config)[0], of(plan, "half_step")
    job, _ = _Part(choice, {"cost.train_share", "cost.lengths.mean"})._drawn(q, 16)
    own = choice.config.cost
    assert (job.cost.train_share, job.cost.lengths.mean) == (own.train_share, own.lengths.mean)
    assert (job.cost.forward_share, job.cost.lengths.sigma) == (q["forward_share"], q["tail"])
    assert _Part(choice, {"cost"})._drawn(q, 16)[0].cost == own
    alone = Plan([one for one in plan.explorations if one.config.schedule.name != SHARED])
    assert judge(alone, FIXED).why_none.startswith(f"{SHARED}, which they would be beside")
    given = compose_job([f"schedule={SHARED}", *SETTINGS, "cost=tiny_cpu"])
    of_costs = Plan([replace(one, config=given) for one in plan.explorations if one.config.schedule.name == SHARED])
    assert judge(of_costs, FIXED).why_none == "cost=tiny_cpu is given, of one system: nothing of it is drawn"


@pytest.mark.slow
def test_all_choices_are_judged_in_the_same_systems(plan: Plan) -> None:
    judged = judge(plan, FIXED)
    assert [one.choice.schedule for one in judged.of][0] == SHARED and len(judged.of) == 3
    baseline, other = judged.of[0].choice, of(plan, "half_step")
    speedup = judged.beside(other, baseline)
    assert speedup is not None and len(set(speedup.tolist())) > 4
    again = judge(plan, FIXED).beside(other, baseline)
    assert again is not None and np.array_equal(speedup, again)


@pytest.mark.slow
def test_a_proposal_that_is_not_the_fastest_of_its_schedule_is_drawn_beside_that(plan: Plan, tmp_path: Path) -> None:
    proposed = replace(of(plan, "half_step"))
    plan = replace(plan)
    plan.__dict__["best"] = proposed
    judged = judge(plan, FIXED)
    assert [one.choice.name for one in judged.of].count(proposed.name) == 2
    assert draw_plan(plan, tmp_path / "plan.png", judged).exists()


def test_a_part_of_the_batch_takes_as_long_as_all_of_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = systems(plan.best.config)[:3]
    own = [_Part(of(plan, SHARED), FIXED).in_turn(q) for q in drawn]
    for schedule in ("half_step", "one_step_off"):
        seconds = []
        for least in (10**6, 32):
            monkeypatch.setattr("harness.planner.judgement.PART", least)
            part = _Part(of(plan, schedule), FIXED)
            seconds.append([part.step_s(q, it) for q, it in zip(drawn, own, strict=True)])
        assert part._times > 1
        assert seconds[1] == pytest.approx(seconds[0], rel=0.15)


def test_a_system_that_trains_slower_where_devices_are_shared_gains_more(plan: Plan) -> None:
    q, gains = systems(plan.best.config)[0], []
    for alone in (1.0, 0.5):
        of_it = {**q, "alone_over_shared": alone}
        own = _Part(of(plan, SHARED), FIXED).in_turn(of_it)
        gains.append(own.step_s / _Part(of(plan, "one_step_off"), FIXED).step_s(of_it, own))
    assert gains[1] > 1.05 * gains[0]


def test_a_row_of_ones_own_narrows_the_draws(plan: Plan) -> None:
    says = Workload(
        model="qwen1.5b", device="h100", batch_groups=32, group_size=4, cap=512, response_mean=200, reference=False
    )
    row = StepRow(
        "a:1", SHARED, 16, 16, step_s=30.0, rollout_s=12.0, generate_s=11.0, update_s=12.0, old_log_prob_s=4.0
    )
    evidence = Evidence("a log", says, (row,), ())
    spreads = [np.std([np.log(q["train_share"]) for q in systems(plan.best.config, it)]) for it in (None, evidence)]
    assert spreads[1] < 0.8 * spreads[0]
    assert judge(plan, FIXED, evidence).stands_on == "narrowed by a log"
