"""Seconds of an iteration in the long run, put together from its work as a schedule does it.

What happens at the same time is combined by `beside`. Of the least work, with `max`, it is a bound: no run takes less.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from harness.planner.work import IterationWork
from schedules import Schedule
from schedules.adaptive_staleness import AdaptiveStaleness
from schedules.colocate_sync import ColocateSync
from schedules.delayed_update import DelayedUpdate
from schedules.fully_async import FullyAsync
from schedules.half_step import HalfStep
from schedules.k_step_off import KStepOff
from schedules.lending import Lending
from schedules.one_step_off import OneStepOff
from schedules.partial_rollout_sync import PartialRolloutSync
from schedules.rolling_update import RollingUpdate
from schedules.separated_sync import SeparatedSync
from schedules.sorted_batches import SortedBatches
from schedules.tail_rounds import TailRounds
from schedules.windowed import Windowed

Beside = Callable[..., float]  # seconds of several kinds of work that go on at the same time, from the seconds of each


def period(schedule: Schedule, work: IterationWork, beside: Beside = max) -> float:
    """Seconds of an iteration; of a schedule that is not known here, what holds for every one of them."""
    return _PERIOD.get(type(schedule), _any)(schedule, work, beside)


def runs_on(schedule: Schedule) -> bool:
    """Whether its engines go from one batch to the next without running empty."""
    return _PERIOD.get(type(schedule)) is _streamed and not schedule.loads_between_batches


def in_turn(schedule: Schedule) -> bool:
    """Whether one phase comes after the other, whatever its options."""
    return _PERIOD.get(type(schedule)) is _in_turn


def hindered(*seconds: float) -> float:
    """Probable seconds of work that goes on beside other work: it waits now and then, the longer the more there is of
    the other. Between the longest of them and their sum."""
    return math.hypot(*seconds)


def _any(schedule: Schedule, work: IterationWork, beside: Beside, *, handing_over_s: float = 0.0) -> float:
    """Each pool has its work; and a batch is sampled by versions at most ceil(eta) behind it, so that its longest
    response begins, is trained on and has made a version within ceil(eta) + 1 iterations; in its fresh part, where
    groups are trained in their order, floor."""
    after_s = work.micro_s + work.step_s
    response_s = (work.longest_s + after_s) / (1 + math.ceil(schedule.eta))
    fresh_s = (
        (work.fresh_s + after_s) / (1 + math.floor(schedule.eta)) if work.fresh_s and schedule.order == "fifo" else 0.0
    )
    return beside(work.generate_s, work.actor_s + handing_over_s, work.scorers_s, max(response_s, fresh_s))


def _streamed(schedule: Schedule, work: IterationWork, beside: Beside) -> float:
    """The trainer hands its weights over between two iterations, or after every k-th. Where its devices are lent, all
    generate when these do not train."""
    iterations = schedule.publish_every if isinstance(schedule, FullyAsync) else 1
    work = replace(work, generate_s=(work.generate_s + work.lent * work.actor_s) / (1 + work.lent))
    return _any(schedule, work, beside, handing_over_s=work.send_s / iterations)


def _together(schedule: Schedule, work: IterationWork, beside: Beside) -> float:
    """Generate, then score and train on what is there, then bring the weights; pools work at the same time."""
    assert isinstance(schedule, SeparatedSync)
    if not schedule.streaming:
        return _in_turn(schedule, work, beside)
    return (
        beside(work.batch_s + work.micro_s, work.actor_s - work.step_s, work.scorers_s) + work.step_s + work.publish_s
    )


def _in_turn(schedule: Schedule, work: IterationWork, beside: Beside) -> float:
    """One phase after the other; a device that is shared is given back before it is used otherwise."""
    return _phases(schedule, work, work.batch_s)


def _phases(schedule: Schedule, work: IterationWork, generate_s: float) -> float:
    give_back_s = work.offload_s if schedule.colocated else 0.0
    return generate_s + give_back_s + work.score_s + work.train_s + work.step_s + work.publish_s


def _carried(schedule: Schedule, work: IterationWork, beside: Beside) -> float:
    """One phase after the other, but what is long is generated over several of them."""
    return max(_phases(schedule, work, work.generate_s), _any(schedule, work, beside))


def _two_pools(schedule: Schedule, work: IterationWork, beside: Beside) -> float:
    """Generating k batches beside scoring and then training on k batches one by one; then both wait for the weights.
    Neither hinders the other: they meet when both are done."""
    batches = schedule.cycle
    generate_s = max(work.generate_s, work.longest_s / batches, work.batch_s if batches == 1 else 0.0)
    return max(generate_s, work.score_s + work.train_s + work.step_s) + work.publish_s / batches


_PERIOD: dict[type, Callable[[Schedule, IterationWork, Beside], float]] = {
    ColocateSync: _in_turn,
    PartialRolloutSync: _carried,
    SortedBatches: _carried,
    TailRounds: _carried,
    SeparatedSync: _together,
    OneStepOff: _two_pools,
    KStepOff: _two_pools,
    DelayedUpdate: _streamed,
    HalfStep: _streamed,
    RollingUpdate: _streamed,
    FullyAsync: _streamed,
    Lending: _streamed,
    Windowed: _streamed,
    AdaptiveStaleness: _streamed,
}
