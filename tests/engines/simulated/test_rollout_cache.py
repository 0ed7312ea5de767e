"""The simulated engine's KV cache: what contexts cost in each step, and what happens where there is no room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.decoding import Decoding, SimulatedSample
from harness.cost_model.cost import DecodeCost
from harness.protocols import Completion
from harness.runtime.virtual_runtime import run_virtual
from tests.support.examples import examples
from tests.support.simulated_setting import COST, drain, make_engine, now, requests, runs

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
