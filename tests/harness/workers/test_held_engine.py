"""An engine that is borrowed and given back: what it was doing goes on as if nothing had happened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.protocols import Completion, Request, Sampling
from harness.runtime.runtime import RealClock
from harness.workers.held_engine import HeldEngine
from tests.support.fsdp_samples import SMALL

SLOTS = 4
SAMPLED = Sampling(max_tokens=24, stop_tokens=(3, 5))
GREEDY = replace(SAMPLED, temperature=0.0)


def requests(first: int, number: int, sampling: Sampling | None = None) -> list[Request]:
    prompts = np.random.default_rng(first).integers(1, SMALL.vocabulary, (number, 5))
    return [Request(first + place, prompt, sampling=sampling) for place, prompt in enumerate(prompts)]


OURS, OTHERS, LATE = requests(0, 10), requests(1 << 40, 6, GREEDY), requests(100, 2)


def engine() -> TorchRollout:
    return TorchRollout(build_model(SMALL), sampling=SAMPLED, slots=SLOTS, seed=0, clock=RealClock.starting_now())


class Role:
    """Takes whatever is finished, as a rollout role does."""

    def __init__(self, engine: HeldEngine) -> None:
        self.engine, self.done = engine, dict[int, Completion]()
        self._news = asyncio.Event()

    async def take(self) -> None:
        while True:
            self.done |= {done.sample_id: done for done in await self.engine.finished()}
            self._news.set()

    async def until(self, number: int) -> None:
        async with asyncio.timeout(60):
            while len(self.done) < number:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def role() -> AsyncIterator[Role]:
    driving = Role(HeldEngine(engine()))
    taking = asyncio.create_task(driving.take())
    yield driving
    taking.cancel()


async def alone(wanted: list[Request]) -> dict[int, list[int]]:
    """What an engine of its own makes of them."""
    async with role() as driving:
        driving.engine.submit(wanted)
        await driving.until(len(wanted))
        return {sample: done.tokens.tolist() for sample, done in driving.done.items()}


async def in_the_middle(driving: Role) -> None:
    driving.engine.submit(OURS)
    for _ in range(4):  # a token for each turn of the event loop
        await asyncio.sleep(0)
    assert driving.engine.sampled > 0 and driving.engine.running == SLOTS


async def test_samples_go_on_with_the_tokens_that_they_would_have_had() -> None:
    async with role() as driving:
        await in_the_middle(driving)
        before = driving.engine.running, driving.engine.waiting
        await driving.engine.hold()
        assert (driving.engine.running, driving.engine.waiting) == before, "the role sees an engine that stands still"
        found = await driving.engine.generate(OTHERS)
        driving.engine.submit(LATE)
        assert driving.engine.waiting == before[1] + len(LATE)
        again = await driving.engine.generate(OTHERS)
        assert not driving.done.keys() & {request.sample_id for request in (*OTHERS, *LATE)}
        await driving.engine.let_go()
        await driving.until(len(OURS) + len(LATE))
    assert {sample: done.tokens.tolist() for sample, done in driving.done.items()} == await alone([*OURS, *LATE])
    assert {done.finish_reason for done in driving.done.values()} <= {"stop", "length"}
    expected = await alone(OTHERS)
    assert [done.sample_id for done in found] == [request.sample_id for request in OTHERS]
    for done in (*found, *again):
        assert done.tokens.tolist() == expected[done.sample_id]


async def test_one_that_was_paused_stays_paused_and_one_that_slept_goes_on_sleeping() -> None:
    async with role() as driving:
        await in_the_middle(driving)
        await driving.engine.pause("keep")
        await driving.engine.hold()
        assert len(await driving.engine.generate(OTHERS)) == len(OTHERS)
        await driving.engine.let_go()
        sampled = driving.engine.sampled
        for _ in range(20):
            await asyncio.sleep(0)
        assert driving.engine.sampled == sampled
        await driving.engine.resume()
        await driving.until(len(OURS))
        await driving.engine.sleep()
        await driving.engine.hold()
        assert len(await driving.engine.generate(OTHERS)) == len(OTHERS)
        await driving.engine.let_go()
        with pytest.raises(RuntimeError, match="asleep"):
            await driving.engine.resume()


async def test_whoever_would_change_the_engine_waits_until_it_is_let_go() -> None:
    async with role() as driving:
        await driving.engine.hold()
        pausing = asyncio.create_task(driving.engine.pause("keep"))
        assert len(await driving.engine.generate(OTHERS)) == len(OTHERS)
        assert not pausing.done()
        await driving.engine.let_go()
        await pausing


async def test_a_sample_of_several_turns_is_followed_to_its_end() -> None:
    turns: list[int] = []

    async def follow(turn: Completion) -> Request | Completion:
        """Every sample has two turns, of which the second goes on from the first."""
        turns.append(turn.sample_id)
        if turns.count(turn.sample_id) == 2:
            return turn
        request = next(request for request in OTHERS if request.sample_id == turn.sample_id)
        return replace(request, sample_id=turn.sample_id, sampling=None)

    async with role() as driving:
        await driving.engine.hold()
        found = await driving.engine.generate(OTHERS, follow)
        await driving.engine.let_go()
    expected = await alone(OTHERS)
    assert sorted(turns) == sorted([request.sample_id for request in OTHERS] * 2)
    assert {done.sample_id: done.tokens.tolist() for done in found} == expected, "each turn has the sampling of its own"


async def test_an_engine_that_fails_while_it_is_held_fails_who_holds_it() -> None:
    held = HeldEngine(engine())
    await held.hold()

    async def broken() -> list[Completion]:
        raise FloatingPointError("log-probabilities are not finite")

    held.engine.finished = broken  # type: ignore[method-assign]
    with pytest.RaisesGroup(FloatingPointError):
        await held.generate(OTHERS)


async def test_samples_that_are_cut_while_it_is_held_end_when_it_is_let_go() -> None:
    whole = await alone(OURS)
    async with role() as driving:
        driving.engine.submit(OURS)
        await driving.until(1)
        await driving.engine.hold()
        left = [request.sample_id for request in OURS if request.sample_id not in driving.done]
        await driving.engine.cut(left)
        assert len(driving.done) == len(OURS) - len(left)
        await driving.engine.let_go()
        await driving.until(len(OURS))
    assert {driving.done[sample].finish_reason for sample in left} >= {"cut"}
    for sample, done in driving.done.items():
        assert done.tokens.tolist() == whole[sample][: len(done.tokens)]
