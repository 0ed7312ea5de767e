"""A row in one draw of what is unknown: its job, with the costs of that draw, and its steps on the virtual clock."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.checks.layout import device_roles
from harness.config import CostConfig, JobConfig
from harness.config.compose import make_schedule
from harness.config.placement import resolve_split
from harness.driver.event_model import difference, fast_steps, not_covered
from harness.prediction.evidence import StepRow
from harness.prediction.posterior import engines_of

WARMUP = 2  # iterations before a schedule is in its stride: their batches do not count
END = 2  # iterations at the end, while no more is generated
BATCHES = 3  # simulated batches that a step is a mean over
CHUNKS = 4  # equal parts at most in which a trainer that streams takes a batch, as with verl's require_batches
PART = 1024
"""Samples of a batch, at least, of rows whose trainers stream (`smaller`): over 24 draws of verl's 16 + 16 a step lasts
0.4 % less then than with all 8,192, in one draw 3 % more or less, where draws differ by 19 %."""

CHECKED = 256  # the same of jobs that the schedule's own file runs, which takes seconds for thousands of samples
WHOLE = ("one_step_off", "k_step_off", "separated_sync")  # schedules whose trainers begin with whole batches


@dataclass(frozen=True)
class DrawnCosts:
    """Costs of a row in one draw, of a batch: engine: of one, with its lengths; seconds of scoring, all of it, of
    training, and of that what does not grow with tokens; of what is hidden behind training, of setting a batch up, and
    of the weights' way to the engines. tokens: of a batch, with prompts; fetch_s: of taking samples from a queue."""

    engine: CostConfig
    scoring_s: Mapping[str, float]
    update_s: float
    serial_s: float
    hidden_s: float
    before_s: float
    sync_s: float
    tokens: float
    fetch_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step: between two versions; while an engine generated; while the trainer only waited."""

    step_s: float
    generation_s: float
    wait_s: float


def streams(row: StepRow) -> bool:
    """Whether the row's trainer takes samples one by one as they come."""
    return row.schedule not in WHOLE


def row_job(row: StepRow, job: JobConfig, drawn: DrawnCosts) -> JobConfig:
    """The row's job: each rollout engine, and each pool that works together, is one device of the simulation."""
    algorithm = job.algorithm
    split: dict[str, int | str] = {
        "rollout": engines_of(row, job),
        "actor": 1,
        "actor_fwd": "actor",
        "reference": "actor",
    }
    scoring_s = sum(drawn.scoring_s.values()) / max(1, len(drawn.scoring_s))  # they share one setting
    cost = by_token_alone(drawn.engine, (drawn.update_s + drawn.fetch_s) / drawn.tokens, scoring_s / drawn.tokens)
    return replace(
        one_device_each(job, split),
        iterations=WARMUP + BATCHES + END + math.ceil(make_schedule(job).eta),
        warmup_iterations=WARMUP,
        algorithm=replace(
            algorithm,
            micro_batch_groups=algorithm.batch_groups // math.gcd(CHUNKS, algorithm.batch_groups),
            mini_batches=1,
            recompute_log_probs="old_log_prob_s" in drawn.scoring_s,
            reference="ref_log_prob_s" in drawn.scoring_s,
            kl_coef=0.0,
        ),
        cost=replace(
            cost,
            train_step_s=drawn.serial_s,
            reward_s_per_sample=drawn.hidden_s / algorithm.batch_samples,
            generate_s=drawn.before_s,
            network_bytes_per_s=cost.weight_bytes / drawn.sync_s,
        ),
    )


def uncovered(job: JobConfig) -> str:
    """Parts of a row's job that only the schedule's own file knows; "" where the fast model knows all."""
    return not_covered(
        job, make_schedule(job), resolve_split(job.schedule.split, job.cluster.devices, device_roles(job))
    )


def samples_drawn(row: StepRow, job: JobConfig) -> int:
    """Samples of a batch, at least, that a draw of a row simulates."""
    batch = job.algorithm.batch_samples
    return min(PART, batch) if streams(row) else batch


def smaller(job: JobConfig, least: int) -> JobConfig:
    """A row's job with a part of its engines and as large a part of its batch, of `least` samples or more, which takes
    as long where the trainer streams; a batch that is waited for as a whole waits for the longest of all its
    samples."""
    algorithm, cost, split = job.algorithm, job.cost, dict(job.schedule.split)
    engines = int(split["rollout"])
    both = math.gcd(engines, algorithm.batch_groups, algorithm.micro_batch_groups)
    most = max(1, algorithm.batch_samples // least)
    times = max(n for n in range(1, both + 1) if both % n == 0 and n <= most)
    assert isinstance(cost, CostConfig)
    return replace(
        one_device_each(job, {**split, "rollout": engines // times}),
        algorithm=replace(
            algorithm,
            batch_groups=algorithm.batch_groups // times,
            micro_batch_groups=algorithm.micro_batch_groups // times,
        ),
        cost=replace(
            cost,
            train_s_per_token=times * cost.train_s_per_token,
            log_prob_s_per_token=times * cost.log_prob_s_per_token,
            reward_s_per_sample=times * cost.reward_s_per_sample,
        ),
    )


def simulated(job: JobConfig, seed: int, fetch_s: float) -> SimulatedStep:
    """Run the job of a row. fetch_s: part of its training in which it takes samples."""
    steps, window = fast_steps(job, seed, WARMUP + BATCHES), slice(WARMUP, WARMUP + BATCHES)
    means = (float(values[window].mean()) for values in (steps.seconds, steps.generate_s, steps.wait_s))
    step_s, generation_s, wait_s = means
    return SimulatedStep(step_s, generation_s, wait_s + fetch_s)


def checked(job: JobConfig, seed: int) -> float:
    """How far the fast model is from the schedule's own file in this job, made smaller: of the seconds of a step."""
    return difference(smaller(job, CHECKED), seed)


def one_device_each(config: JobConfig, split: Mapping[str, int | str]) -> JobConfig:
    """The job in which every rollout engine, and every other pool, is one device; split: as `schedule.split`. How the
    devices of a worker share its work is in the costs then, not in the layout."""
    return replace(
        config,
        schedule=replace(config.schedule, split=dict(split)),
        cluster=replace(config.cluster, devices=sum(count for count in split.values() if isinstance(count, int))),
        engine=replace(config.engine, tensor_parallel=1),
        training=replace(config.training, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1),
    )


def by_token_alone(cost: CostConfig, train_s_per_token: float, log_prob_s_per_token: float) -> CostConfig:
    """Costs whose training and scoring are a time per token and nothing else; what generation costs stays."""
    return replace(
        cost,
        log_prob_s_per_token=log_prob_s_per_token,
        log_prob_s_per_pair=0.0,
        log_prob_call_s=0.0,
        train_s_per_token=train_s_per_token,
        train_s_per_pair=0.0,
        train_call_s=0.0,
        train_step_s=0.0,
        call_s=0.0,
    )
