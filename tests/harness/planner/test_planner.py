"""No run takes less than its bound; branch and bound finds what looking at every candidate finds; fronts."""

import math
import random
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks import job as checks
from harness.checks.defaults import fit_to_gpus
from harness.checks.job import JobPlan, plan_job
from harness.checks.layout import device_roles
from harness.cli.front import settings_of
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job, make_schedule, names_of
from harness.config.machine import Machine
from harness.config.registries import SCHEDULES, find
from harness.cost_model.cost import rank_shares, slowest_share_s
from harness.driver.session import simulate
from harness.planner import explore as explore_module
from harness.planner.candidates import Candidate, grid
from harness.planner.explore import Effort, TrialResult, cost_of, explore, pool_layout, scoring_roles, trial, window
from harness.planner.mean_lag import Flow, by_applied_compute, in_completion_order, in_fifo_order, newer
from harness.planner.period import period
from harness.planner.plan import EFFORT, SEED, Choice, bench_command, fixed_by, make_plan, plan_jobs
from harness.planner.search import Prospect, front, search
from harness.planner.work import LengthSamples, least_work, likely_work
from harness.studies.staleness import BUSY, FIXED, flows, fully_async, page, simulated, study
from schedules.k_step_off import KStepOff
from tests.support.every_schedule import EVERY_SCHEDULE

SMALL = (
    "backend=virtual model=qwen7b cluster.devices=16 algorithm.batch_groups=8 algorithm.group_size=4 "
    "cost.prompt_tokens=64 cost.lengths.mean=256 cost.lengths.cap=1024"
).split()
BOTH_WAYS = {"separated_sync": ("schedule.streaming=true", "schedule.streaming=false")}
JOBS = [
    pytest.param(*one.values, option, marks=one.marks)
    for one in EVERY_SCHEDULE
    for option in BOTH_WAYS.get(str(one.values[0]), ("seeds=1",))
]


def candidates(config: JobConfig) -> list[Candidate]:
    """Those that fit."""
    roles = device_roles(config)
    every = grid(config, make_schedule(config), True)
    return [candidate for candidate in every if cost_of(config, make_schedule(config), candidate, roles) is not None]


def bound(config: JobConfig, candidate: Candidate, lengths: LengthSamples) -> float:
    schedule, roles = make_schedule(config), device_roles(config)
    cost = cost_of(config, make_schedule(config), candidate, roles)
    pools = pool_layout(config, schedule, candidate, len(scoring_roles(roles)))
    return period(schedule, least_work(cost, pools, lengths))


@pytest.mark.parametrize(("name", "option"), JOBS)
def test_no_run_is_faster_than_its_bound(name: str, option: str) -> None:
    """Over a whole run nothing was made before it began: its seconds are at least as many bounds as iterations."""
    rng = random.Random(name)
    for seed in range(2):
        config = compose_job([f"schedule={name}", option, *SMALL, f"engine.slots={rng.choice([4, 16, 128])}"])
        if name == "fully_async":
            options = config.schedule.options | {"max_staleness": rng.choice([0, 0.5, 1, 2, 4])}
            config = replace(config, schedule=replace(config.schedule, options=options))
        schedule, roles = make_schedule(config), device_roles(config)
        cycle = schedule.k if isinstance(schedule, KStepOff) else 1 + math.ceil(schedule.eta)
        iterations = cycle * math.ceil(4 / cycle)
        candidate = rng.choice(candidates(config))
        job = replace(candidate.apply(config, roles), iterations=iterations)
        began, ended = simulate(job, seed).timeline.elapsed_window()
        least = bound(config, candidate, LengthSamples.of(config, seed, iterations))
        assert (ended - began) / iterations >= least * (1 - 1e-9), (seed, candidate)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_planners_best_is_the_best_of_all_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.planner.explore._LEAST_SAMPLES", 1)  # two iterations tell them apart
    chosen = ["algorithm.micro_batch_groups=2", "training.recompute_activations=true", "training.pipeline_parallel=1"]
    fixed = [setting.partition("=")[0] for setting in chosen]
    light = ["cost.lengths.sigma=0.1", "cluster.devices=8"]
    config = compose_job([f"schedule={name}", *SMALL, *light, *chosen])
    explored = explore(config, fixed, 0, Effort(10**9, 10**9))
    found = explored.found
    assert found is not None and found.left is None and (found.pruned > 0 or name != "separated_sync")
    schedule, roles = make_schedule(config), device_roles(config)
    short = window(schedule, 32)
    lengths = LengthSamples.of(config, 0, short.iterations)
    door = explore_module._Door(config, fixed)
    grid_of_real = grid(replace(config, backend="real"), schedule, True, fixed)
    prospects = list(explore_module.prospects_of(config, schedule, grid_of_real, lengths, {}))
    of_all = [prospect.candidate for prospect in prospects if door.opens(prospect.candidate)]
    times = [trial(one.apply(config, roles), short, 0, bound=bound(config, one, lengths)).seconds for one in of_all]
    assert len(prospects) == len(found.tried) + found.pruned + explored.refused
    assert found.tried[0][1].seconds == min(times)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "model", "devices", "tensor"),
    [("colocate_sync", "qwen3-30b-a3b", 16, (2, 4)), ("separated_sync", "qwen7b", 64, (4, 4))],
)
def test_a_search_knows_what_waiting_for_the_last_of_many_engines_costs(
    schedule: str, model: str, devices: int, tensor: tuple[int, int]
) -> None:
    given = [f"model={model}", f"cluster.devices={devices}"]
    (job,), _ = plan_jobs([f"schedule={schedule}", *given])
    found = explore(job, fixed_by(given), SEED, EFFORT).found
    best = found.tried[0][0]
    assert (best.engine_parallel, best.tensor_parallel) == tensor, (
        "as where all are tried; others are 4 and 15 % slower"
    )


def test_batches_that_are_generated_as_one_wait_for_their_longest_responses_together() -> None:
    config = compose_job(["schedule=k_step_off", "schedule.k=2", *SMALL])
    candidate = candidates(config)[0]
    cost = cost_of(config, make_schedule(config), candidate, device_roles(config))
    pools = pool_layout(config, make_schedule(config), candidate, stages=2)
    as_one, apart = (
        likely_work(cost, replace(pools, together=batches), LengthSamples.of(config, 0, 4), streaming=False).generate_s
        for batches in (pools.together, 1)
    )
    assert pools.together == 2 and as_one < 0.9 * apart


def test_candidates_fit_devices_batch_and_memory_and_grow_with_the_logarithm() -> None:
    for name in ("colocate_sync", "half_step"):
        config = compose_job([f"schedule={name}", *SMALL, "cluster.devices=24"])
        every = grid(config, make_schedule(config), True)
        assert every
        for one in every:
            assert 12 <= one.devices <= 24 and config.algorithm.batch_groups % (one.ranks * one.micro_groups) == 0
            assert one.rollout % one.engine_parallel == 0 and one.engines >= make_schedule(config).least_engines
    sizes = []
    for devices in (64, 128, 256, 512, 1024):
        config = compose_job(
            ["schedule=fully_async", *SMALL, f"cluster.devices={devices}", "algorithm.batch_groups=512"]
        )
        sizes.append(len(grid(config, make_schedule(config), True)))
    steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
    assert max(steps) <= 2 * max(1, min(steps)), sizes
    config = compose_job(["schedule=fully_async", *SMALL, "model=qwen32b", "cluster.devices=8"])
    found = explore(config, (), 0, Effort(1, 1))
    assert found.unfit == found.candidates > 0 and found.found is None


REAL = (*SMALL, "backend=real", "model.checkpoint=null", "max_tokens=1024")
MACHINES = ("a100", 8, "torch"), ("h20", 8, "sglang"), ("h200", 1, "vllm"), ("h100", 16, "vllm")


ENDLESS = TrialResult(**dict.fromkeys((field.name for field in fields(TrialResult)), math.inf))


@pytest.fixture
def every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound rules anything out, and nothing is simulated: whatever may be proposed is among what was tried."""
    monkeypatch.setattr(explore_module, "trial", lambda *args, **kwargs: ENDLESS)


def proposable(*settings: str) -> list[Choice]:
    """What a plan of one schedule may propose."""
    job = compose_job(settings)
    found = explore(job, fixed_by(settings), 0, Effort(10**9, 10**6)).found
    return [Choice("", job, candidate, outcome) for candidate, outcome in found.tried] if found else []


def door_of_a_real_run(choice: Choice, settings: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> JobPlan:
    """What `cadence bench` says there to the command that the plan prints."""
    monkeypatch.setattr(checks, "check_environment", lambda config: None)  # what is installed here
    arguments = settings_of("bench", shlex.split(bench_command(choice, settings))[2:])
    job = compose_job(arguments)
    machine = Machine(8, job.cluster.devices, int(job.device.memory_bytes), nodes=-(-job.cluster.devices // 8))
    config = fit_to_gpus(job, make_schedule(job), names_of(arguments), machine).config
    return plan_job(config, make_schedule(config), machine)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "devices", "engine"), MACHINES)
def test_what_is_proposed_for_a_real_run_passes_its_door(
    device: str, devices: int, engine: str, every_trial: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(SCHEDULES)[:: 1 if devices <= 8 else 4]:  # of two nodes' devices there are thousands of candidates
        settings = (*REAL, f"schedule={name}", f"engine={engine}", f"device={device}", f"cluster.devices={devices}")
        settings += ("model=qwen0.5b",) if devices == 1 else ()  # no plan moves moments to the host
        choices = proposable(*settings)
        assert bool(choices) == (devices > 1 or find("schedule", name).colocated), name
        for choice in random.Random(name).sample(choices, min(3, len(choices))):
            assert door_of_a_real_run(choice, settings, monkeypatch).backend == "real"


@pytest.mark.parametrize(
    ("schedule", "held"), [("colocate_sync", explore_module._Door.opens), ("tail_rounds", explore_module._Door.holds)]
)
def test_samples_at_the_door_are_as_long_as_those_that_are_simulated(
    schedule: str, held: Callable[[explore_module._Door, Candidate], bool]
) -> None:
    """Of a candidate that a simulation takes, too: activations of 8,704 tokens are more than a real rank has."""
    config = compose_job([f"schedule={schedule}", "model=qwen32b", "cluster.devices=16", "engine=vllm"])
    kept, again = (Candidate(16, 16, 0, True, 4, 4, 1, recompute, 1) for recompute in (False, True))
    assert cost_of(config, make_schedule(config), kept, device_roles(config)) is not None
    door = explore_module._Door(config, ())
    assert [held(door, one) for one in (kept, again)] == [False, True]
    assert held(explore_module._Door(replace(config, max_tokens=20), ("max_tokens",)), kept)


@pytest.mark.slow
def test_real_candidates_are_what_users_would_try_on_several_devices(every_trial: None) -> None:
    """Half of the devices, all where they are shared, and layers shared by 1, 2 and 4 of them, uncut."""
    for name, actor in (("fully_async", 8), ("colocate_sync", 16)):
        settings = [*REAL, f"schedule={name}", "engine=vllm", "algorithm.batch_groups=16"]
        found = explore(compose_job(settings), fixed_by(settings), 0, Effort(10**9, 3)).found
        tried = {(one.tensor_parallel, one.pipeline_parallel, one.actor, one.scoring) for one, _ in found.tried}
        assert tried == {(tensor, 1, actor, 0) for tensor in (1, 2, 4)}, name
    # vLLM's and SGLang's, on devices of their own and beside the trainer.
    for engine, schedule, sizes in (
        ("vllm", "fully_async", {1, 2, 4}),
        ("vllm", "colocate_sync", {1, 2, 4}),
        ("sglang", "fully_async", {1, 2, 4}),
        ("torch", "fully_async", {1}),
    ):
        choices = proposable(*REAL, "cluster.devices=8", f"engine={engine}", f"schedule={schedule}")
        assert {choice.candidate.engine_parallel for choice in choices} == sizes, (engine, schedule)


def test_where_a_real_run_refuses_all_the_plan_says_why() -> None:
    settings = [*REAL, "schedule=fully_async", "cluster.devices=8", "engine.tensor_parallel=2"]
    with pytest.raises(ConfigError, match="a real run would refuse .* engine.tensor_parallel=2 can be simulated only"):
        make_plan([compose_job(settings)], fixed_by(settings), Effort(1, 1), processes=1)


@dataclass(frozen=True)
class Seconds:
    seconds: float


TIMES = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.01, 1), st.floats(0.1, 100)), min_size=1, max_size=30)
"""(seconds, bound as a share of them, what seems likely) of every candidate."""


def prospects(times: list[tuple[float, float, float]]) -> list[Prospect[int]]:
    return [Prospect(i, seconds * share, likely) for i, (seconds, share, likely) in enumerate(times)]


@given(TIMES)
def test_with_budget_to_spare_the_best_is_the_best_of_all(times: list[tuple[float, float, float]]) -> None:
    found = search(prospects(times), lambda i: Seconds(times[i][0]), budget=len(times))
    assert found.tried[0][1].seconds == min(seconds for seconds, _, _ in times)
    assert (found.left, found.gap) == (None, 0.0)
    assert len(found.tried) + found.pruned == len(times)


@given(TIMES, st.integers(1, 5))
def test_a_spent_budget_says_how_much_better_is_left(times: list[tuple[float, float, float]], budget: int) -> None:
    found = search(prospects(times), lambda i: Seconds(times[i][0]), budget)
    best = found.tried[0][1].seconds
    assert len(found.tried) <= budget
    assert min(seconds for seconds, _, _ in times) >= best * (1 - found.gap) * (1 - 1e-12)


def test_nothing_is_run_that_its_bound_rules_out_nor_searched_for_among_nothing() -> None:
    ran: list[int] = []

    def run(i: int) -> Seconds:
        ran.append(i)
        return Seconds(10.0)

    search([Prospect(0, 5.0, 6.0), Prospect(1, 10.0, 11.0), Prospect(2, 9.0, 12.0)], run, budget=3)
    assert ran == [0, 2]
    with pytest.raises(ValueError, match="nothing to search"):
        search([], lambda i: Seconds(1.0), 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_what_is_not_on_the_front_is_beaten_and_what_is_on_it_is_not(points: list[tuple[int, int]]) -> None:
    kept = front(points, gain=lambda p: p[0], price=lambda p: p[1])
    for gain, price in points:
        better = any(g >= gain and p <= price and (g, p) != (gain, price) for g, p in points)
        assert ((gain, price) in kept) == (not better)


@given(st.lists(st.integers(1, 50), min_size=8, max_size=8), st.integers(1, 8), st.integers(1, 5))
def test_no_simulated_engine_is_faster_than_its_work(lengths: list[int], rows: int, parts: int) -> None:
    costs = {"s_per_token": 0.5, "s_per_pair": 0.1}
    seconds = LengthSamples(np.array([lengths]), prompt=3, group_size=2).slowest_s(rows, parts, **costs)
    for micro, start in enumerate(range(0, 8, rows)):
        here = lengths[start : start + rows]
        shares = rank_shares(np.array(here) + 3, parts, group_size=2)
        slowest, most = slowest_share_s(shares, **costs), slowest_share_s([np.array([53])], **costs)
        assert seconds[0, micro] <= slowest * (1 + 1e-12) <= seconds[0, micro] + 2 * most


APART = 0.15
"""Iterations: of 30 such jobs none was further off."""


def light(count: int, slower: tuple[float, float]) -> list[Flow]:
    """Random jobs as the formulas assume: light tails, one pool clearly slower."""
    random = np.random.default_rng(1)
    return [
        replace(flow, eta=8.0, train_s=flow.generate_s * random.uniform(*slower))
        for flow in flows(random, count, tails=(0.1, 0.3))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flow", light(8, slower=(0.3, 0.8)), ids=str)
def test_where_rollout_is_slower_the_lag_is_that_of_littles_law(flow: Flow) -> None:
    first, of_all = simulated(flow, fully_async(flow))
    assert in_fifo_order(flow) == pytest.approx(first, abs=APART)
    assert in_fifo_order(flow) - newer(flow) == pytest.approx(of_all, abs=APART)
    completed, _ = simulated(flow, fully_async(flow, "schedule.order=completion"))
    assert in_completion_order(flow) == pytest.approx(completed, abs=APART)


@pytest.mark.parametrize("flow", light(4, slower=(1.3, 2.0)), ids=str)
def test_where_training_is_slower_the_lag_is_what_the_dispatch_rule_allows(flow: Flow) -> None:
    ahead = replace(flow, eta=1.5)
    assert in_fifo_order(ahead) == in_completion_order(ahead) == 1.5
    assert simulated(ahead, fully_async(ahead))[0] == pytest.approx(1.5, abs=0.02)


@pytest.mark.slow
def test_the_page_and_littles_law_say_how_far_apart_they_are() -> None:
    for flow in light(8, slower=(0.3, 0.8)):
        rho = flow.train_s / flow.generate_s
        streams = in_completion_order(flow) - (flow.train_s / flow.batch + flow.transfer_s) / flow.period_s
        assert by_applied_compute(flow) == pytest.approx(streams + rho, abs=0.02)
    text = page(study(count=8), {"half_step": 0.5})
    assert "| half_step | 1/2 | 0.5 | 0.50 |" in text and "| sigma | jobs |" in text
    assert "nan" not in text.partition("## Where they part")[0]


@pytest.mark.parametrize("schedule", FIXED)
def test_a_schedule_lags_as_its_formula_says_where_training_is_slower(schedule: str) -> None:
    assert simulated(BUSY, f"schedule={schedule}".split())[0] == pytest.approx(FIXED[schedule][1], abs=0.1)
