"""The simulated rollout engine: one rule of what roles rely on at a time; its KV cache, and where that has no room."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.rollout import SimulatedRollout
from harness.cost_model.cost import DecodeCost
from harness.protocols import Completion, Request
from harness.runtime.runtime import RealClock
from harness.runtime.virtual_runtime import VirtualClock, VirtualLoop, run_virtual
from tests.support.examples import examples
from tests.support.simulated_setting import COST, Given, drain, make_engine, now, requests, runs


def test_the_last_of_a_group_or_a_group_of_free_slots_hands_over() -> None:
    async def main() -> list[tuple[float, list[int]]]:
        engine = make_engine(1, 2, 3, 9, 4, 5, 20, 20, slots=8, group_size=4)
        engine.submit(requests(*range(8)))
        seen = []
        while engine.running:
            done = await engine.finished()
            seen.append((now(), sorted(completion.sample_id for completion in done)))
        return seen

    # Four slots are free at 4 s, group 0 is complete at 9 s.
    assert run_virtual(main()) == [(4.0, [0, 1, 2, 4]), (9.0, [3, 5]), (20.0, [6, 7])]


def test_what_comes_while_weights_load_into_an_idle_engine_starts_under_the_new_ones() -> None:
    async def main() -> Completion:
        engine = make_engine(2, load_s=5.0)
        load = asyncio.create_task(engine.load_weights(1, iter(())))
        await asyncio.sleep(1.0)
        engine.submit(requests(0))
        await load
        engine.drop_cache()
        return (await drain(engine))[0]

    done = run_virtual(main())
    assert (runs(done), done.started_at, done.finished_at) == ([(1, 2)], 5.0, 7.0)


def test_an_aborted_sample_goes_on_from_its_tokens_and_one_that_only_waited_begins_then() -> None:
    """A prompt takes 5 s, a token 1 s; at 20 s the cache of the second is lost in the middle of its first step."""

    async def main() -> dict[int, Completion]:
        engine = make_engine(5, 2, slots=1, prefill_s_per_token=0.5)
        engine.submit(requests(0, 1))
        await asyncio.sleep(7.5)
        await engine.pause("abort")
        assert now() == 8.0
        partials = await engine.finished()
        await engine.load_weights(1, iter(()))
        await asyncio.sleep(2.0)
        await engine.resume()
        engine.submit([Request(partial.sample_id, np.array([10]), partial) for partial in partials])
        asyncio.get_running_loop().call_at(20.0, engine.drop_cache)
        return await drain(engine)

    first, second = (done for _, done in sorted(run_virtual(main()).items()))
    assert (runs(first), first.started_at, first.first_token_at, first.finished_at) == (
        [(0, 3), (1, 2)],
        0.0,
        6.0,
        18.5,
    )
    assert (runs(second), second.started_at, second.first_token_at, second.finished_at) == ([(1, 2)], 18.5, 24.5, 31.0)


def test_loading_lasts_as_long_as_it_should_and_no_longer_than_the_weights_take() -> None:
    async def main() -> tuple[float, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        engine = SimulatedRollout(COST, Given(1), slots=1, group_size=1, clock=clock, load_s=5.0)
        await engine.load_weights(1, iter(()))
        loaded = now()

        def slow() -> Iterator[tuple[str, Any]]:
            clock.origin -= 4.0  # what arrives takes this long, on the engine's clock
            yield "weight", None

        await engine.load_weights(2, slow())
        return loaded, now()

    assert run_virtual(main()) == (5.0, 6.0)


def test_an_engine_that_gave_its_device_back_takes_it_again_before_it_generates() -> None:
    async def main() -> tuple[float, float, Completion]:
        engine = make_engine(2)
        await engine.wake()
        assert now() == 0.0
        await engine.sleep()
        asleep_at = now()
        engine.submit(requests(0))
        with pytest.raises(RuntimeError, match="asleep; call wake"):
            await engine.finished()
        await engine.wake()
        return asleep_at, now(), (await drain(engine))[0]

    asleep_at, awake_at, done = run_virtual(main())
    assert (asleep_at, awake_at) == (4.0 + 2.0, 6.0 + 5.0 + 2.0)  # and the weights there and back
    assert (done.started_at, done.finished_at) == (13.0, 15.0)


def test_a_closed_engine_leaves_no_timer_and_says_so() -> None:
    async def main() -> float:
        engine = make_engine(50)
        engine.submit(requests(0))
        waits = asyncio.create_task(engine.finished())
        await asyncio.sleep(1.0)
        await engine.close()
        with pytest.raises(RuntimeError, match="engine 0 is closed"):
            await waits
        loop = asyncio.get_running_loop()
        assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
        return now()

    assert run_virtual(main()) == 1.0


def test_what_is_no_simulated_request_or_never_fits_is_refused() -> None:
    async def main() -> None:
        engine = make_engine(5, 5)
        with pytest.raises(ValueError, match="sample 1: a simulated prompt is one value"):
            engine.submit([Request(1, np.array([3, 4]))])
        done = Completion(0, np.array([5]), np.zeros(1, np.float32), np.zeros(1, np.int32), "length", 0.0, 1.0)
        with pytest.raises(ValueError, match="only its own aborted completion"):
            engine.submit([Request(0, np.array([3]), done)])
        assert not engine.running and not engine.waiting

    run_virtual(main())

    async def main() -> dict[int, Completion]:
        engine = make_engine(5, 14, 15, cost=replace(COST, kv_tokens=24))
        with pytest.raises(ValueError, match="sample 2 will have 25 tokens, .* room for kv_tokens=24"):
            engine.submit(requests(0, 2))
        assert not engine.running and not engine.waiting
        engine.submit(requests(1))
        return await drain(engine)

    assert runs(run_virtual(main())[1]) == [(0, 14)]


async def test_on_a_real_clock_samples_last_as_long_as_their_steps_whenever_the_timers_come() -> None:
    clock = RealClock.starting_now()
    cost = replace(COST, decode_step_s=0.001)
    engine = SimulatedRollout(cost, Given(3, 5, 4), slots=2, group_size=1, clock=clock, load_s=0.0)
    engine.submit(requests(0, 1, 2))
    done = await drain(engine)
    assert done[0].finished_at - done[0].started_at == pytest.approx(0.003)
    assert done[1].finished_at - done[1].started_at == pytest.approx(0.005)
    assert done[2].started_at == done[0].finished_at
    assert done[2].finished_at - done[2].started_at == pytest.approx(0.004)
    assert clock.now() >= done[2].finished_at
    await engine.close()


class LateLoop(VirtualLoop):
    """Every timer comes late, as on a busy machine."""

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_later(delay + 0.7, callback, *args, context=context)


def test_a_timer_that_is_late_delays_no_sample() -> None:
    async def finish_times() -> list[float]:
        engine = make_engine(3, 5, 5, 9, 12, 4, slots=2)
        engine.submit(requests(0, 1, 2, 3, 4, 5))
        return [completion.finished_at for _, completion in sorted((await drain(engine)).items())]

    with asyncio.Runner(loop_factory=LateLoop) as late:
        assert late.run(finish_times()) == run_virtual(finish_times()) == [3.0, 5.0, 8.0, 14.0, 20.0, 18.0]


# -- what steps last


@given(
    count=st.integers(1, 10**6),
    samples=st.integers(1, 512),
    context=st.integers(1, 30_000),
    step_s=st.floats(1e-4, 1.0),
    per_cached_s=st.one_of(st.just(0.0), st.floats(1e-12, 1e-3)),
    part=st.floats(0.01, 0.99),
)
@settings(max_examples=examples(200))
def test_the_step_that_is_under_way_is_found_however_long_it_has_been(
    count: int, samples: int, context: int, step_s: float, per_cached_s: float, part: float
) -> None:
    cost = DecodeCost(step_s=step_s, per_cached_s=per_cached_s)
    cached = samples * context
    begun, ended = (cost.steps(number, samples, cached) for number in (count - 1, count))
    assert cost.steps_begun(begun + part * (ended - begun), samples, cached) == count
    assert cost.steps_begun(ended, samples, cached) == count
    assert cost.steps_begun(ended + 1e-9 * step_s, samples, cached) == count, "the same moment, rounded"
