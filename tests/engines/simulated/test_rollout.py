"""The simulated rollout engine: one rule of what roles rely on at a time; its KV cache, and where that has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.decoding import Decoding, SimulatedSample
from engines.simulated.rollout import SimulatedRollout
from harness.cost_model.cost import DecodeCost
from harness.protocols import Completion, Request
from harness.runtime.runtime import RealClock
from harness.runtime.virtual_runtime import VirtualClock, VirtualLoop, run_virtual
from tests.support.examples import examples
from tests.support.simulated_setting import COST, Given, drain, make_engine, now, requests, runs


def test_a_step_lasts_longer_the_more_samples_run_and_prompts_hold_everyone_up() -> None:
    async def main() -> dict[int, Completion]:
        engine = make_engine(2, 4, 2, slots=2, decode_step_s_per_sample=0.5, prefill_s_per_token=0.1)
        engine.submit(requests(0, 1, 2))
        return await drain(engine)

    done = run_virtual(main())
    assert (done[0].started_at, done[0].finished_at) == (0.0, 6.0)  # two prompts, then two steps with two samples
    assert (done[2].started_at, done[2].finished_at) == (6.0, 11.0)  # a prompt, two steps with two samples
    assert (done[1].started_at, done[1].finished_at) == (0.0, 11.0)


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


def test_a_sample_that_lives_through_updates_has_a_run_for_each_version() -> None:
    async def main() -> dict[int, Completion]:
        engine = make_engine(10, 2, 3)
        engine.submit(requests(0))
        for version, at in ((1, 3.0), (2, 5.5), (3, 6.0)):
            await asyncio.sleep(at - now())
            await engine.pause("keep")
            await engine.load_weights(version, iter(()))
            await engine.resume()
        engine.submit(requests(1))
        return await drain(engine)

    done = run_virtual(main())
    assert runs(done[0]) == [(0, 3), (1, 3), (3, 4)]  # version 2 sampled nothing before version 3 came
    assert runs(done[1]) == [(3, 2)]


def test_pause_waits_for_the_step_that_is_under_way() -> None:
    async def main() -> tuple[float, float]:
        engine = make_engine(4)
        engine.submit(requests(0))
        await asyncio.sleep(1.25)
        await engine.pause("keep")
        paused_at = now()
        await asyncio.sleep(10.0)
        assert engine.running == 1
        await engine.resume()
        return paused_at, (await drain(engine))[0].finished_at

    assert run_virtual(main()) == (2.0, 14.0)


def test_an_engine_that_drains_starts_nothing_new_until_it_goes_on() -> None:
    async def main() -> tuple[float, int, Completion]:
        engine = make_engine(3, 2, slots=1)
        engine.submit(requests(0, 1))
        await engine.pause("wait")
        drained_at, waiting = now(), engine.waiting
        await asyncio.sleep(2.0)
        await engine.resume()
        return drained_at, waiting, (await drain(engine))[1]

    drained_at, waiting, last = run_virtual(main())
    assert (drained_at, waiting, last.started_at, last.finished_at) == (3.0, 1, 5.0, 7.0)


def test_a_dropped_cache_costs_the_prefill_of_all_that_runs() -> None:
    async def finish(drop: bool) -> float:
        engine = make_engine(6, prefill_s_per_token=0.1)
        engine.submit(requests(0))
        await asyncio.sleep(4.0)  # one second of prefill, three tokens
        await engine.pause("keep")
        if drop:
            engine.drop_cache()
        await engine.resume()
        return (await drain(engine))[0].finished_at

    assert run_virtual(finish(drop=False)) == 7.0
    assert run_virtual(finish(drop=True)) == pytest.approx(7.0 + 1.3)


def test_aborted_samples_come_back_with_what_they_have_and_go_on_elsewhere() -> None:
    async def main() -> tuple[dict[int, Completion], dict[int, Completion]]:
        one, other = make_engine(8, 8, 1, slots=2, group_size=3), make_engine(8, 8, 1, group_size=3)
        one.submit(requests(0, 1, 2))
        await asyncio.sleep(3.0)
        await one.pause("abort")
        partials = {completion.sample_id: completion for completion in await one.finished()}
        await asyncio.sleep(7.0)
        await other.load_weights(4, iter(()))
        other.submit([Request(i, np.array([10]), partial) for i, partial in partials.items()])
        return partials, await drain(other)

    partials, done = run_virtual(main())
    assert {i: (runs(c), c.finish_reason) for i, c in partials.items()} == {
        0: ([(0, 3)], "abort"),
        1: ([(0, 3)], "abort"),
        2: ([], "abort"),
    }
    assert {i: (runs(c), c.finish_reason) for i, c in done.items()} == {
        0: ([(0, 3), (4, 5)], "stop"),
        1: ([(0, 3), (4, 5)], "stop"),
        2: ([(4, 1)], "stop"),
    }
    assert done[0].started_at == 0.0 and done[0].finished_at == 15.0


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


def test_weights_that_break_off_leave_an_engine_that_refuses_to_generate() -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield "weight", None
        raise ConnectionError("the trainer is gone")

    async def main() -> Completion:
        engine = make_engine(2)
        with pytest.raises(ConnectionError):
            await engine.load_weights(1, broken())
        engine.submit(requests(0))
        with pytest.raises(RuntimeError, match="version 1 was loaded in part only"):
            await engine.finished()
        await engine.pause("keep")
        with pytest.raises(RuntimeError, match="version 1 was loaded in part only"):
            await engine.resume()
        await engine.load_weights(2, iter(()))
        await engine.resume()
        return (await drain(engine))[0]

    assert runs(run_virtual(main())) == [(2, 2)]


def test_a_busy_engine_takes_no_weights_and_gives_no_device_back() -> None:
    async def main() -> None:
        engine = make_engine(5)
        engine.submit(requests(0))
        with pytest.raises(RuntimeError, match="load_weights needs a paused or idle engine, but 1 samples run"):
            await engine.load_weights(1, iter(()))
        with pytest.raises(RuntimeError, match="sleep needs a paused or idle engine"):
            await engine.sleep()
        assert runs((await drain(engine))[0]) == [(0, 5)]

    run_virtual(main())


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


def test_what_is_no_simulated_request_is_refused() -> None:
    async def main() -> None:
        engine = make_engine(5, 5)
        with pytest.raises(ValueError, match="sample 1: a simulated prompt is one value"):
            engine.submit([Request(1, np.array([3, 4]))])
        done = Completion(0, np.array([5]), np.zeros(1, np.float32), np.zeros(1, np.int32), "length", 0.0, 1.0)
        with pytest.raises(ValueError, match="only its own aborted completion"):
            engine.submit([Request(0, np.array([3]), done)])
        assert not engine.running and not engine.waiting

    run_virtual(main())


def test_a_sample_at_the_cap_ended_by_its_length() -> None:
    async def main() -> list[str]:
        engine = make_engine(1000, 999)
        engine.submit(requests(0, 1))
        done = await drain(engine)
        return [done[0].finish_reason, done[1].finish_reason]

    assert run_virtual(main()) == ["length", "stop"]


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


def test_a_step_reads_every_context_and_the_next_reads_a_token_more_of_each() -> None:
    async def main() -> dict[int, Completion]:
        engine = make_engine(2, 4, cost=replace(COST, decode_s_per_cached_token=0.5))
        engine.submit(requests(0, 1, prompt_tokens=10))
        return await drain(engine)

    done = run_virtual(main())
    assert done[0].finished_at == (1 + 0.5 * 20) + (1 + 0.5 * 22)
    assert done[1].finished_at == done[0].finished_at + (1 + 0.5 * 12) + (1 + 0.5 * 13)


@pytest.mark.parametrize(("samples", "step_s"), [(1, 3.0), (4, 3.0), (5, 3.5), (8, 5.0)])
def test_reading_the_weights_hides_the_samples_that_it_has_time_for(samples: int, step_s: float) -> None:
    async def main() -> float:
        engine = make_engine(*[1] * 8, cost=replace(COST, decode_step_s_per_sample=0.5, decode_weights_s=2.0))
        engine.submit(requests(*range(samples)))
        return (await drain(engine))[0].finished_at

    assert run_virtual(main()) == step_s


def test_attention_makes_a_long_prompt_cost_more_than_its_tokens() -> None:
    async def main() -> float:
        engine = make_engine(1, 1, cost=replace(COST, prefill_s_per_token=0.5, prefill_s_per_pair=0.25))
        engine.submit([*requests(0, prompt_tokens=10), *requests(1, prompt_tokens=4)])
        return (await drain(engine))[0].finished_at

    assert run_virtual(main()) == (5 + 25) + (2 + 4) + 1


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


# -- room


def test_a_sample_waits_until_its_context_and_the_next_step_fit() -> None:
    async def main() -> dict[int, Completion]:
        engine = make_engine(3, 5, 2, cost=replace(COST, kv_tokens=32))
        engine.submit(requests(0, 1, 2))
        assert (engine.running, engine.waiting) == (2, 1)  # two contexts of 10 leave room for 10, and not for the step
        return await drain(engine)

    done = run_virtual(main())
    assert [(done[i].started_at, done[i].finished_at) for i in range(3)] == [(0, 3), (0, 5), (3, 5)]


def test_who_came_last_makes_room_and_is_the_first_to_come_back() -> None:
    async def main() -> tuple[dict[int, Completion], int, int]:
        engine = make_engine(8, 8, 1, slots=2, prefill_s_per_token=0.5, cost=replace(COST, kv_tokens=24))
        engine.submit(requests(0, 1, 2))
        return await drain(engine), engine.preemptions, engine.recomputed_tokens

    done, preemptions, recomputed = run_virtual(main())
    # Two prompts, and two steps until 24 tokens are cached. Sample 1 leaves with 12, and waits for sample 0.
    assert done[0].finished_at == 10 + 2 + 6
    assert (done[1].started_at, done[1].finished_at) == (0, 18 + (6 + 5) + 6)  # beside sample 2, with a prompt of 10
    assert (done[2].started_at, done[2].finished_at) == (18, 30)
    assert (preemptions, recomputed) == (1, 12)
    assert [runs(done[i]) for i in range(3)] == [[(0, 8)], [(0, 8)], [(0, 1)]]


def test_a_preempted_sample_goes_on_under_the_weights_it_finds() -> None:
    async def main() -> dict[int, Completion]:
        engine = make_engine(8, 8, cost=replace(COST, kv_tokens=24))
        engine.submit(requests(0, 1))
        await asyncio.sleep(3.0)
        assert (engine.running, engine.waiting) == (1, 1)
        await engine.pause("keep")
        await engine.load_weights(1, iter(()))
        await engine.resume()
        return await drain(engine)

    done = run_virtual(main())
    assert [runs(done[i]) for i in range(2)] == [[(0, 3), (1, 5)], [(0, 2), (1, 6)]]


def test_an_engine_that_drains_finishes_what_was_preempted_and_starts_nothing() -> None:
    async def main() -> tuple[float, list[Completion], int]:
        engine = make_engine(8, 8, 1, slots=2, cost=replace(COST, kv_tokens=24))
        engine.submit(requests(0, 1, 2))
        await asyncio.sleep(3.0)
        await engine.pause("wait")
        return now(), await engine.finished(), engine.waiting

    drained_at, done, waiting = run_virtual(main())
    assert (drained_at, waiting) == (14.0, 1)
    assert sorted((c.sample_id, *runs(c)) for c in done) == [(0, (0, 8)), (1, (0, 8))]


def test_an_engine_that_stopped_with_nothing_but_preempted_samples_drains_them_too() -> None:
    async def main() -> list[float]:
        engine = make_engine(8, 8, cost=replace(COST, kv_tokens=24))
        engine.submit(requests(0, 1))
        await asyncio.sleep(7.5)
        await engine.pause("keep")
        assert (now(), engine.running, engine.waiting) == (8.0, 0, 1)
        await engine.pause("wait")
        return [completion.finished_at for completion in await engine.finished()]

    assert run_virtual(main()) == [8.0, 14.0]


def test_what_was_preempted_can_be_aborted_and_goes_on_elsewhere() -> None:
    async def main() -> tuple[dict[int, list[tuple[int, int]]], int]:
        engine = make_engine(8, 8, 8, cost=replace(COST, kv_tokens=36))
        engine.submit(requests(0, 1, 2))
        await asyncio.sleep(4.0)
        await engine.pause("abort")
        return {c.sample_id: runs(c) for c in await engine.finished()}, engine.running + engine.waiting

    assert run_virtual(main()) == ({0: [(0, 4)], 1: [(0, 4)], 2: [(0, 2)]}, 0)


def test_a_sample_that_never_fits_is_refused_with_the_others_of_its_call() -> None:
    async def main() -> dict[int, Completion]:
        engine = make_engine(5, 14, 15, cost=replace(COST, kv_tokens=24))
        with pytest.raises(ValueError, match="sample 2 will have 25 tokens, .* room for kv_tokens=24"):
            engine.submit(requests(0, 2))
        assert not engine.running and not engine.waiting
        engine.submit(requests(1))
        return await drain(engine)

    assert runs(run_virtual(main())[1]) == [(0, 14)]


# -- what room does to the time of a batch

Sizes = list[tuple[int, int]]
sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=2, max_size=14)


def played(cost: DecodeCost, given: Sizes) -> tuple[float, Decoding]:
    """When the last of these samples, (prompt, tokens), all there from the start, is done."""
    decoding, at = Decoding(cost, slots=len(given)), 0.0
    decoding.submit([SimulatedSample(i, prompt, tokens) for i, (prompt, tokens) in enumerate(given)], at)
    while (due := decoding.next_event()) is not None:
        decoding.advance(at := due)
    return at, decoding


@given(given=sizes, room=st.integers(32, 150))
@settings(max_examples=examples(100))
def test_a_batch_is_never_faster_for_want_of_room(given: Sizes, room: int) -> None:
    """Than with none missing. Between two rooms that are both too small either may be the faster: in the greater one
    more is admitted early, preempted, and prefilled again."""
    cost = DecodeCost(step_s=1.0, per_sample_s=0.1, per_cached_s=0.02, prefill_s_per_token=0.02)
    (free_s, free), (limited_s, limited) = played(cost, given), played(replace(cost, kv_tokens=room), given)
    assert limited_s >= free_s * (1 - 1e-9)
    assert free.preemptions == 0 and len(limited.finished) == len(given)
    if limited.recomputed_tokens:
        assert limited_s > free_s


@given(given=sizes, spare=st.integers(0, 100))
@settings(max_examples=examples(50))
def test_room_that_nobody_needs_changes_nothing(given: Sizes, spare: int) -> None:
    cost = DecodeCost(step_s=1.0, per_cached_s=0.02, prefill_s_per_token=0.02)
    enough = sum(prompt + tokens for prompt, tokens in given) + spare
    assert played(replace(cost, kv_tokens=enough), given)[0] == played(cost, given)[0]


def test_samples_of_a_group_share_its_prompt_in_time_and_room() -> None:
    """vLLM 0.32, v1/core/kv_cache_manager.py: of what the cache has, all but the last token is not computed again."""

    async def main() -> tuple[dict[int, Completion], int]:
        cost = replace(COST, prefix_caching=True, prefill_s_per_token=0.5, kv_tokens=10 + 2 * 3)
        engine = make_engine(3, 3, 3, cost=cost, group_size=2)
        engine.submit(requests(0, 1, 2))
        return await drain(engine), engine.preemptions

    done, preemptions = run_virtual(main())
    assert [(done[i].started_at, done[i].finished_at) for i in range(3)] == [(0, 8.5), (0, 8.5), (8.5, 16.5)]
    assert preemptions == 0


def test_a_prompt_is_prefilled_beside_samples_that_go_on_as_far_as_steps_have_tokens() -> None:
    """A step of n samples and p tokens of prompts, n + p <= step_tokens, lasts 1 + max(2, p / 2): the weights are read
    once for both (Sarathi, arXiv 2308.16369, section 4.2). Prompts of 10: the first, alone, then 7 and 3."""

    async def main() -> dict[int, Completion]:
        cost = replace(COST, step_tokens=8, prefill_s_per_token=0.5, decode_weights_s=2.0)
        engine = make_engine(4, 2, cost=cost)
        engine.submit(requests(0, 1))
        return await drain(engine)

    done = run_virtual(main())
    assert [(done[i].started_at, done[i].finished_at) for i in range(2)] == [(0, 16.5), (6.0, 16.5)]
