"""Giving the device back to those it is shared with, and taking it again."""

from __future__ import annotations

import pytest

from tests.contract.in_flight import in_flight, too_late_unless
from tests.contract.subject import NAME, VARIED, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def assert_generates(subject: Subject) -> None:
    subject.sample_by(VARIED)
    requests = subject.requests(4)
    done = await subject.generate(requests)
    for request in requests:
        assert set(done[request.sample_id].versions) == {subject.engine.version}
        if subject.compares_tokens:
            subject.assert_sampled_by_its_versions(request, done[request.sample_id])


async def test_an_engine_that_slept_samples_from_the_weights_it_had(subject: Subject) -> None:
    await subject.engine.sleep()
    await subject.engine.wake()
    await assert_generates(subject)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_weights_that_came_during_sleep_are_the_ones_it_wakes_with(subject: Subject, keep_weights: bool) -> None:
    """As colocated roles do: the engine is asleep while the trainer publishes."""
    await subject.engine.sleep(keep_weights=keep_weights)
    await subject.take(subject.engine.version + 1)
    subject.engine.drop_cache()
    await subject.engine.wake()
    await assert_generates(subject)


async def test_waking_an_engine_that_is_awake_does_nothing(subject: Subject) -> None:
    await subject.engine.wake()
    await assert_generates(subject)


@in_flight
async def test_running_samples_sleep_too_and_go_on_from_their_tokens(subject: Subject) -> None:
    subject.sample_by(VARIED)
    requests = subject.many()
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        await subject.engine.pause("keep")
        too_late_unless(subject.engine.running)
        await subject.engine.sleep()
        await subject.engine.wake()
        await subject.engine.resume()
        done = await samples.all()
    if subject.compares_tokens:
        for request in requests:
            subject.assert_sampled_by_its_versions(request, done[request.sample_id])


@in_flight
async def test_a_busy_engine_refuses_to_sleep_and_a_sleeping_one_to_go_on(subject: Subject) -> None:
    subject.sample_by(VARIED)
    async with subject.collecting(subject.many()) as samples:
        await samples.until(1)
        too_late_unless(subject.engine.running)
        with pytest.raises(RuntimeError, match=NAME):
            await subject.engine.sleep()
        await samples.all()
    await subject.engine.sleep()
    with pytest.raises(RuntimeError, match=NAME):
        await subject.engine.resume()
