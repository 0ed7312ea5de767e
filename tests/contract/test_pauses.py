"""Stopping and going on: what each mode of a pause promises, and that no token is lost by any."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from harness.protocols import Completion, Request, Sampling, StopMode
from tests.contract.in_flight import in_flight, too_late_unless
from tests.contract.reference import assert_greedy
from tests.contract.subject import VARIED, Collected, Subject, waiting_for

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
    subject.sample_by(VARIED)
    async with subject.collecting(subject.many()) as samples:
        await samples.until(1)
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
    subject.sample_by(VARIED)
    async with subject.collecting(subject.many()) as samples:
        await samples.until(1)
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
    subject.sample_by(Sampling(max_tokens=30))
    async with subject.collecting(subject.many()) as samples:
        await samples.until(1)
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
