"""Stopping and going on: what each mode of a pause promises, that no token is lost by any; the end of single samples;
and sleep, which gives the device back to those it is shared with."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from harness.protocols import Completion, Request, Sampling, StopMode
from tests.contract.reference import assert_greedy
from tests.contract.subject import NAME, VARIED, Collected, Subject, in_flight, too_late_unless, waiting_for

pytestmark = pytest.mark.asyncio(loop_scope="session")

A_WHILE_S = 0.2
"""In which a paused engine has to show that it does nothing; a slow machine makes the test weaker, never wrong."""


async def nothing_comes(samples: Collected) -> None:
    before = len(samples.done), len(samples.aborted)
    await asyncio.sleep(A_WHILE_S)
    assert (len(samples.done), len(samples.aborted)) == before, "a paused engine went on"


async def pause(subject: Subject, mode: StopMode) -> None:
    async with waiting_for(f"pause({mode!r})"):
        await subject.engine.pause(mode)


def continued(request: Request, partial: Completion) -> Request:
    return replace(request, partial=partial)


@in_flight
async def test_pause_keep_holds_everything_as_it_is_until_resume(subject: Subject) -> None:
    subject.sample_by(VARIED)
    requests = subject.many()
    expected = await subject.generate(requests)
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        await pause(subject, "keep")
        held = subject.engine.running, subject.engine.waiting
        too_late_unless(subject.engine.running)
        await samples.until(len(requests) - sum(held))  # what was done before, and is still to be told
        await nothing_comes(samples)
        assert (subject.engine.running, subject.engine.waiting) == held
        await subject.engine.resume()
        done = await samples.all()
    if subject.compares_tokens and "seeds" not in subject.under_test.cannot:
        for sample_id, completion in expected.items():
            assert done[sample_id].tokens.tolist() == completion.tokens.tolist()


@in_flight
async def test_pause_wait_finishes_what_runs_and_starts_nothing(subject: Subject) -> None:
    async with subject.busy() as samples:
        await pause(subject, "wait")
        too_late_unless(subject.engine.waiting)
        assert subject.engine.running == 0
        await samples.until(subject.load - subject.engine.waiting)
        assert not samples.aborted
        await nothing_comes(samples)
        await subject.engine.resume()
        assert len(await samples.all()) == subject.load


@in_flight
async def test_pause_abort_returns_everything_at_once(subject: Subject) -> None:
    async with subject.busy() as samples:
        await pause(subject, "abort")
        assert (subject.engine.running, subject.engine.waiting) == (0, 0)
        await samples.all()
        too_late_unless(any(len(completion.tokens) for completion in samples.aborted))
        assert {completion.finish_reason for completion in samples.aborted} == {"abort"}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_what_is_submitted_to_a_paused_engine_starts_when_it_is_resumed(subject: Subject, mode: StopMode) -> None:
    subject.sample_by(Sampling(max_tokens=5))
    await pause(subject, mode)
    async with subject.collecting(subject.requests(3)) as samples:
        await nothing_comes(samples)
        assert (subject.engine.running, subject.engine.waiting) == (0, 3)
        await subject.engine.resume()
        assert len(await samples.all()) == 3


async def test_an_engine_may_be_paused_twice_and_resumed_twice(subject: Subject) -> None:
    async with subject.busy() as samples:
        await pause(subject, "keep")
        await pause(subject, "wait")
        await subject.engine.resume()
        await subject.engine.resume()
        await samples.all()


@in_flight
async def test_abort_and_resume_lose_no_token(subject: Subject) -> None:
    """Aborted again and again, each time after some of the samples are through."""
    subject.sample_by(VARIED)
    requests = {request.sample_id: request for request in subject.many()}
    partials: dict[int, Completion] = {}
    async with subject.collecting(list(requests.values())) as samples:
        for _ in range(3):
            too_late_unless(len(samples.done) < len(requests))
            await samples.until(len(samples.done) + 1)
            await pause(subject, "abort")
            await samples.all()
            for partial in samples.aborted:
                partials[partial.sample_id] = partial
            again = [continued(requests[partial.sample_id], partial) for partial in samples.aborted]
            await subject.engine.resume()
            samples.submit(again)
        done = await samples.all()
    assert set(done) == set(requests)
    too_late_unless(any(len(partial.tokens) for partial in partials.values()))
    if subject.compares_tokens:
        for sample_id, completion in done.items():
            subject.assert_sampled_by_its_versions(requests[sample_id], completion)
        for sample_id, partial in partials.items():
            assert_goes_on_from(partial, done[sample_id])


def assert_goes_on_from(partial: Completion, completion: Completion) -> None:
    length = len(partial.tokens)
    for column in ("tokens", "log_probs", "versions"):
        np.testing.assert_array_equal(getattr(completion, column)[:length], getattr(partial, column))
    for time in ("started_at", "first_token_at") if length else ():
        assert getattr(completion, time) == getattr(partial, time)


@in_flight
async def test_greedy_tokens_are_the_same_through_abort_and_resume(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(replace(VARIED, temperature=0))
    requests = subject.many()
    done = await aborted_once(subject, requests)
    for request in requests:
        assert_greedy(subject.model(subject.engine.version), request.prompt, done[request.sample_id])


@in_flight
async def test_an_aborted_sample_goes_on_with_the_draws_it_would_have_had(subject: Subject) -> None:
    subject.needs("tokens", "seeds", "resumed draws")
    subject.sample_by(VARIED)
    requests = subject.many()
    through = await subject.generate(requests)
    interrupted = await aborted_once(subject, requests)
    for sample_id, completion in through.items():
        assert interrupted[sample_id].tokens.tolist() == completion.tokens.tolist()


async def test_only_a_samples_own_completion_that_has_room_can_be_continued(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=10))
    request, other = subject.requests(2)
    done = await subject.generate([request, other])
    full = replace(done[request.sample_id], finish_reason="length")
    for partial in (full, replace(done[other.sample_id], finish_reason="abort")):
        with pytest.raises(ValueError, match=f"sample {request.sample_id}"):
            subject.engine.submit([continued(request, partial)])
    assert (subject.engine.running, subject.engine.waiting) == (0, 0)


async def test_a_dropped_cache_changes_no_token(subject: Subject) -> None:
    subject.sample_by(replace(VARIED, temperature=0))
    requests = subject.many()
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        await pause(subject, "keep")
        subject.engine.drop_cache()
        await subject.engine.resume()
        done = await samples.all()
    if subject.compares_tokens:
        for request in requests:
            assert_greedy(subject.model(subject.engine.version), request.prompt, done[request.sample_id])


async def aborted_once(subject: Subject, requests: list[Request]) -> dict[int, Completion]:
    """All samples from the first token to the last, but for one interruption while the first of them are through."""
    by_id = {request.sample_id: request for request in requests}
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        await pause(subject, "abort")
        await samples.all()
        again = [continued(by_id[partial.sample_id], partial) for partial in reversed(samples.aborted)]
        too_late_unless(any(len(partial.tokens) for partial in samples.aborted))
        samples.submit(again)
        await subject.engine.resume()
        return dict(await samples.all())


# -- ending single samples


@in_flight
async def test_samples_that_are_cut_end_where_they_are_and_no_other_does(subject: Subject) -> None:
    subject.sample_by(VARIED)
    requests = subject.many()
    expected = await subject.generate(requests)
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        named = [request.sample_id for request in requests if request.sample_id not in samples.done][::2]
        async with waiting_for("cut"):
            await subject.engine.cut([*named, -1])  # the last one is none of its samples
        done = await samples.all()
    assert not samples.aborted
    cut = {sample for sample, completion in done.items() if completion.finish_reason == "cut"}
    too_late_unless(cut)
    assert cut <= set(named)
    for sample, completion in done.items():
        whole, got = expected[sample].tokens.tolist(), completion.tokens.tolist()
        assert len(got) == len(completion.log_probs) == len(completion.versions) > 0
        if sample not in cut:
            assert completion.finish_reason == expected[sample].finish_reason
        if subject.compares_tokens and "seeds" not in subject.under_test.cannot:
            assert got == (whole[: len(got)] if sample in cut else whole)
    for request in requests if subject.compares_tokens else ():
        subject.assert_sampled_by_its_versions(request, done[request.sample_id])


async def test_an_engine_goes_on_after_a_cut(subject: Subject) -> None:
    subject.sample_by(VARIED)
    requests = subject.many()
    expected = await subject.generate(requests)
    async with subject.collecting(requests) as samples:
        await subject.engine.cut([request.sample_id for request in requests])
        assert len(await samples.all()) == len(requests)
    assert (subject.engine.running, subject.engine.waiting) == (0, 0)
    again = await subject.generate(requests)
    if subject.compares_tokens and "seeds" not in subject.under_test.cannot:
        assert all(again[sample].tokens.tolist() == done.tokens.tolist() for sample, done in expected.items())


# -- sleep


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


@pytest.mark.slow
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
    async with subject.busy(requests := subject.many()) as samples:
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
    async with subject.busy() as samples:
        too_late_unless(subject.engine.running)
        with pytest.raises(RuntimeError, match=NAME):
            await subject.engine.sleep()
        await samples.all()
    await subject.engine.sleep()
    with pytest.raises(RuntimeError, match=NAME):
        await subject.engine.resume()
