"""Random jobs of every schedule on the virtual clock, played to their end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from harness.config import CostConfig, JobConfig, LatencyConfig, LengthsConfig, ScheduleConfig
from harness.config.compose import compose_job, make_schedule
from harness.driver.session import Session, simulate
from schedules import Schedule
from schedules.base import ORDERS
from tests.support.invariants import Finished


@dataclass(frozen=True)
class Run:
    """One finished run and the most rows its queue ever held."""

    finished: Finished
    most_rows: int
    metrics: list[dict[str, float]]
    """Of each iteration."""


@cache
def base(schedule: str) -> JobConfig:
    return compose_job([f"schedule={schedule}", "backend=virtual", "warmup_iterations=0", "algorithm.reference=true"])


def play(config: JobConfig, seed: int = 0) -> Run:
    most = [0]
    metrics: list[dict[str, float]] = []

    def watch(session: Session) -> None:
        session.recorder.listeners.append(lambda of_iteration: metrics.append(dict(of_iteration)))
        queue: Any = session.assembly.queue
        controller = queue._service._controller
        create = controller.create

        def created(name: str, rows: Any, group_size: int) -> None:
            create(name, rows, group_size)
            most[0] = max(most[0], controller._partitions.rows)

        controller.create = created

    recorder = simulate(config, seed, started=watch)
    recorder.ledger.check()
    finished = Finished(config, recorder.samples(), recorder.ledger.counts(), recorder.timeline)
    return Run(finished, most[0], metrics)


PROMPT_TOKENS = 20
LENGTHS = st.one_of(
    st.builds(LengthsConfig, kind=st.just("constant"), mean=st.just(100.0), cap=st.just(4000)),
    st.builds(
        LengthsConfig,
        kind=st.just("lognormal"),
        mean=st.just(100.0),
        sigma=st.sampled_from([0.3, 1.0, 2.0]),
        cap=st.sampled_from([400, 4000]),
    ),
)
TURNS = st.one_of(
    st.none(),
    st.just(LengthsConfig(kind="lognormal", mean=3.0, sigma=1.0, cap=8)),
)
OBSERVATIONS = LengthsConfig(kind="uniform", mean=20.0, cap=39)
LATENCIES = st.one_of(
    st.sampled_from([LatencyConfig(), LatencyConfig(mean=0.3)]),
    st.just(LatencyConfig(kind="lognormal", mean=0.3, sigma=2.0, timeout_s=2.0)),  # seconds; a batch takes about one
)
FRACTIONS = (0, 0.25, 0.5, 1, 1.5, 2, 4)


def options_of(schedule: type[Schedule]) -> st.SearchStrategy[dict[str, Any]]:
    """Values of every option, from its field: the examples that it gives, or some of its type and within its bounds;
    those that go together."""
    types = get_type_hints(schedule)
    drawn = st.fixed_dictionaries({own.name: _values(own, types[own.name]) for own in dataclasses.fields(schedule)})
    return drawn.filter(lambda options: _goes_together(schedule, options))


def _goes_together(schedule: type[Schedule], options: dict[str, Any]) -> bool:
    try:
        schedule(**options)
    except ValueError:
        return False
    return True


def _values(own: dataclasses.Field[Any], kind: Any) -> st.SearchStrategy[Any]:
    least, most = own.metadata.get("bounds", (own.default, own.default))
    if own.name == "order":
        return st.sampled_from(ORDERS)
    if examples := own.metadata.get("examples"):
        return st.sampled_from(examples)
    if kind is bool:
        return st.booleans()
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is int:
        return st.integers(least, min(most, least + 2))
    if kind is float:
        return st.sampled_from([value for value in (*FRACTIONS, own.default) if least <= value <= most])
    return st.just(own.default)


def with_options(config: JobConfig, options: dict[str, Any]) -> JobConfig:
    return replace(config, schedule=replace(config.schedule, options=options))


@st.composite
def jobs(draw: st.DrawFn, schedule: str) -> JobConfig:
    """Engines, batches, groups, lengths, room for contexts, rollout against training from 1:5 to 5:1, transfers of 0 to
    several iterations."""
    config = base(schedule)
    filtered = draw(st.sampled_from(["none", "none", "zero_variance"]))
    options = draw(options_of(type(make_schedule(config))))
    made = make_schedule(with_options(config, options))
    engines = draw(st.integers(made.least_engines, max(5, made.least_engines)))
    trainers = draw(st.sampled_from([1, 2]))
    micro = draw(st.sampled_from([1, 2]))
    batch = micro * trainers * draw(st.integers(1, 4))
    group = draw(st.integers(2, 4))
    tokens = batch * group * 120.0  # of a batch, about
    speed = draw(st.sampled_from([0.2, 0.5, 1.0, 2.0, 5.0]))  # seconds to generate a batch; training one takes 1
    transfer = draw(st.sampled_from([0.0, 0.05, 0.5, 3.0]))
    per_token = speed * engines / tokens
    lengths = draw(LENGTHS)
    turns = draw(TURNS)
    longest = PROMPT_TOKENS + lengths.cap * (1 if turns is None else turns.cap)
    if turns is not None:
        longest += turns.cap * OBSERVATIONS.cap
    cost = CostConfig(
        name="drawn",
        decode_step_s=draw(st.sampled_from([0.2, 1.0])) * per_token,
        decode_step_s_per_sample=per_token,
        prefill_s_per_token=draw(st.sampled_from([0.0, 0.1])) * per_token,
        log_prob_s_per_token=0.1 * trainers / tokens,
        train_s_per_token=0.8 * trainers / tokens,
        train_step_s=0.02,
        call_s=draw(st.sampled_from([0.0, 0.01])),
        weight_bytes=1.0,
        network_bytes_per_s=1.0 / max(transfer, 1e-9),
        host_bytes_per_s=10.0 / max(transfer, 1e-9),
        sync_s=draw(st.sampled_from([0.0, 0.01])),
        offload_s=0.01,
        reload_s=0.01,
        prompt_tokens=PROMPT_TOKENS,
        lengths=lengths,
        turns=turns,
        observation_tokens=OBSERVATIONS,
        tool_latency=draw(LATENCIES),
        decode_weights_s=draw(st.sampled_from([0.0, 3.0])) * per_token,
        decode_s_per_cached_token=draw(st.sampled_from([0.0, 0.002])) * per_token,
        kv_tokens=draw(st.sampled_from([None, longest, 2 * longest])),
        reward_s_per_sample=draw(st.sampled_from([0.0, 0.1])) / (batch * group),
        filtered_share=None if filtered == "none" else draw(st.sampled_from([0.0, 0.2, 0.5, 0.8])),
    )
    critic = made.order == "fifo" and draw(st.booleans())
    if made.colocated:
        split: dict[str, int | str] = {
            "actor": trainers,
            "rollout": "actor",
            "actor_fwd": "actor",
            "reference": "actor",
        }
    else:
        split = {
            "rollout": engines,
            "actor": trainers,
            "actor_fwd": draw(st.sampled_from(["actor", "actor", 1])),
            "reference": draw(st.sampled_from(["actor", "actor_fwd", 1])),
        }
        if critic:
            split["critic"] = draw(st.sampled_from(["actor", 1]))
    algorithm = replace(
        config.algorithm,
        advantage="gae" if critic else "group",
        normalise_std=draw(st.booleans()) if critic else True,
        batch_groups=batch,
        group_size=group,
        micro_batch_groups=micro,
        filter=filtered,
        filter_rounds=100,
    )
    return replace(
        config,
        iterations=draw(st.integers(1, 6)),
        schedule=ScheduleConfig(name=config.schedule.name, split=split, options=options),
        algorithm=algorithm,
        cost=cost,
        engine=replace(config.engine, slots=draw(st.sampled_from([group, 2 * group, 16 * group]))),
        cluster=replace(config.cluster, devices=16),
    )
