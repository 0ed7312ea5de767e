"""Random jobs of every schedule for the virtual clock: engines, batches, groups, steps, lengths, turns, filters, a
critic, limits of samples, room for contexts, rollout against training from 1:5 to 5:1, transfers of 0 to several
iterations."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from harness.config import CostConfig, JobConfig, LatencyConfig, LengthsConfig, ScheduleConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.registries import ORDERS
from schedules import Schedule

T = TypeVar("T")


class Choose(Protocol):
    """One of some values, at random."""

    def __call__(self, values: Sequence[T], /) -> T: ...


PROMPT_TOKENS = 20
LENGTHS = (
    LengthsConfig(kind="constant", mean=100.0, cap=4000),
    *(
        LengthsConfig(kind="lognormal", mean=100.0, sigma=sigma, cap=cap)
        for sigma in (0.3, 1.0, 2.0)
        for cap in (400, 4000)
    ),
)
TURNS = (None, LengthsConfig(kind="lognormal", mean=3.0, sigma=1.0, cap=8))
OBSERVATIONS = LengthsConfig(kind="uniform", mean=20.0, cap=39)
LATENCIES = (
    LatencyConfig(),
    LatencyConfig(mean=0.3),
    LatencyConfig(kind="lognormal", mean=0.3, sigma=2.0, timeout_s=2.0),  # seconds; a batch takes about one
)
HANGING = LatencyConfig(kind="lognormal", mean=300.0, sigma=4.0)
LIMITS = {"wait": (None,), "cut": (0.01, 1.0, 5.0, 30.0), "drop": (600.0, 2000.0)}
"""Seconds; a batch takes one to five where no tool hangs. No sample without a tool that hangs may be dropped: its
place would be dealt others without end."""
STRAGGLERS: tuple[Literal["wait", "cut", "drop"], ...] = ("wait", "wait", "cut", "drop")
FRACTIONS = (0, 0.25, 0.5, 1, 1.5, 2, 4)
_BESIDE_ACTOR: tuple[int | str, ...] = ("actor", "actor", 1)
_BESIDE_OTHERS: tuple[int | str, ...] = ("actor", "actor_fwd", 1)
_TRIES = 50


@cache
def base(schedule: str) -> JobConfig:
    """The job that random ones vary: simulated, with a reference."""
    return compose_job([f"schedule={schedule}", "backend=virtual", "warmup_iterations=0", "algorithm.reference=true"])


def with_options(config: JobConfig, options: dict[str, Any]) -> JobConfig:
    """The same job with other options of its schedule."""
    return replace(config, schedule=replace(config.schedule, options=options))


def random_options(schedule: type[Schedule], choose: Choose) -> dict[str, Any]:
    """A value of every option, from its field: an example, or one of its type within its bounds; that go together."""
    types = get_type_hints(schedule)
    for _ in range(_TRIES):
        options = {own.name: choose(_values(own, types[own.name])) for own in dataclasses.fields(schedule)}  # type: ignore[arg-type]
        try:
            schedule(**options)
        except ValueError:
            continue
        return options
    return {}


def _values(own: dataclasses.Field[Any], kind: Any) -> Sequence[Any]:
    least, most = own.metadata.get("bounds", (own.default, own.default))
    if own.name == "order":
        return tuple(ORDERS)
    if examples := own.metadata.get("examples"):
        return tuple(examples)
    if kind is bool:
        return (False, True)
    if get_origin(kind) is Literal:
        return get_args(kind)
    if kind is int:
        return range(int(least), int(min(most, least + 2)) + 1)
    if kind is float:
        return [value for value in (*FRACTIONS, own.default) if least <= value <= most]
    return (own.default,)


_OVER_SAMPLING = (1.0, 1.5, 2.0)


def random_job(schedule: str, choose: Choose) -> JobConfig:
    """A random job of 1 to 6 iterations."""
    config = base(schedule)
    filtered = choose(("none", "none", "zero_variance"))
    options = random_options(type(make_schedule(config)), choose)
    made = make_schedule(with_options(config, options))
    engines = choose(range(made.least_engines, max(5, made.least_engines) + 1))
    trainers, micro = choose((1, 2)), choose((1, 2))
    parts = choose(range(1, 5))  # of a batch, each a micro-batch of every rank
    batch, group = micro * trainers * parts, choose((2, 3, 4))
    critic = made.order == "fifo" and choose((False, True))
    split: dict[str, int | str]
    if made.colocated:
        split = {"actor": trainers} | dict.fromkeys(("rollout", "actor_fwd", "reference"), "actor")
    else:
        split = {
            "rollout": engines,
            "actor": trainers,
            "actor_fwd": choose(_BESIDE_ACTOR),
            "reference": choose(_BESIDE_OTHERS),
        }
        if critic:
            split["critic"] = choose(_BESIDE_ACTOR)
        if made.lends:
            split["lent"] = "actor"
    on_straggler = choose(STRAGGLERS)
    refills = filtered != "none" or on_straggler == "drop"
    latencies = LATENCIES if on_straggler == "wait" else (*LATENCIES, HANGING)
    algorithm = replace(
        config.algorithm,
        advantage="gae" if critic else choose(("group", "group", "optimal_token_baseline", "remax")),
        normalise_std=choose((False, True)) if critic else True,
        batch_groups=batch,
        group_size=group,
        micro_batch_groups=micro,
        mini_batches=choose([steps for steps in (1, 2, 3, 4) if parts % steps == 0]),
        filter=filtered,
        filter_rounds=8_000,  # with the largest batch, what a message tells of
        over_sampling=choose(_OVER_SAMPLING) if refills and made.order == "fifo" else 1.0,
    )
    return replace(
        config,
        iterations=choose(range(1, 7)),
        schedule=ScheduleConfig(name=config.schedule.name, split=split, options=options),
        algorithm=algorithm,
        cost=_random_cost(
            choose,
            samples=batch * group,
            engines=engines,
            trainers=trainers,
            filtered=filtered,
            latencies=latencies,
            several_turns=not made.lends,
        ),
        engine=replace(
            config.engine,
            slots=choose((group, 2 * group, 16 * group)),
            on_straggler=on_straggler,
            sample_limit_s=choose(LIMITS[on_straggler]),
        ),
        cluster=replace(config.cluster, devices=16),
    )


def _random_cost(
    choose: Choose,
    *,
    samples: int,
    engines: int,
    trainers: int,
    filtered: str,
    latencies: Sequence[LatencyConfig],
    several_turns: bool,
) -> CostConfig:
    """Random costs. samples: of a batch, which is trained in a second or so; several_turns: that samples may have."""
    tokens = samples * 120.0  # about
    speed = choose((0.2, 0.5, 1.0, 2.0, 5.0))  # seconds to generate a batch
    transfer = choose((0.0, 0.05, 0.5, 3.0))
    per_token = speed * engines / tokens
    lengths, turns = choose(LENGTHS), choose(TURNS) if several_turns else None
    longest = PROMPT_TOKENS + lengths.cap * (1 if turns is None else turns.cap)
    if turns is not None:
        longest += turns.cap * OBSERVATIONS.cap
    return CostConfig(
        name="drawn",
        decode_step_s=choose((0.2, 1.0)) * per_token,
        decode_step_s_per_sample=per_token,
        prefill_s_per_token=choose((0.0, 0.1)) * per_token,
        log_prob_s_per_token=0.1 * trainers / tokens,
        train_s_per_token=0.8 * trainers / tokens,
        train_step_s=0.02,
        call_s=choose((0.0, 0.01)),
        weight_bytes=1.0,
        network_bytes_per_s=1.0 / max(transfer, 1e-9),
        host_bytes_per_s=10.0 / max(transfer, 1e-9),
        sync_s=choose((0.0, 0.01)),
        offload_s=0.01,
        reload_s=0.01,
        prompt_tokens=PROMPT_TOKENS,
        lengths=lengths,
        turns=turns,
        observation_tokens=OBSERVATIONS,
        tool_latency=choose(latencies),
        decode_weights_s=choose((0.0, 3.0)) * per_token,
        decode_s_per_cached_token=choose((0.0, 0.002)) * per_token,
        kv_tokens=choose((None, longest, 2 * longest)),
        reward_s_per_sample=choose((0.0, 0.1)) / samples,
        filtered_share=None if filtered == "none" else choose((0.0, 0.2, 0.5, 0.8)),
    )
