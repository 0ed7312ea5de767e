"""Weights that change under running samples: each token says which version sampled it, and it is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.protocols import Completion, Request, StopMode
from tests.contract.reference import log_probs_of
from tests.contract.subject import VARIED, Subject, in_flight, too_late_unless

pytestmark = pytest.mark.asyncio(loop_scope="session")

UPDATES = 10


@in_flight
async def test_every_token_was_sampled_by_the_version_that_it_names(subject: Subject) -> None:
    """Also by no other: its log-probability under the other one of the two is a different one."""
    subject.sample_by(VARIED)
    requests = subject.many()
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        old, new = subject.engine.version, await subject.update()
        done = await samples.all()
    too_late_unless(spans_both(done))
    for request in requests:
        completion = done[request.sample_id]
        assert set(completion.versions) <= {old, new}
        assert (np.diff(completion.versions) >= 0).all(), "a token of the old weights after one of the new"
        if subject.compares_tokens:
            subject.assert_sampled_by_its_versions(request, completion)
            assert_tells_versions_apart(subject, request, completion, {old: new, new: old})


def spans_both(done: dict[int, Completion]) -> bool:
    """Some sample lived through the update."""
    return any(len(set(completion.versions)) == 2 for completion in done.values())


def assert_tells_versions_apart(
    subject: Subject, request: Request, completion: Completion, other: dict[int, int]
) -> None:
    under = {v: log_probs_of(subject.model(v), request.prompt, completion.tokens, subject.sampling) for v in other}
    for at, version in enumerate(completion.versions.tolist()):
        errors = {v: abs(completion.log_probs[at] - under[v][at]) for v in other}
        # Two models may agree on one token by chance: then nothing can be told.
        assert errors[version] < errors[other[version]] or abs(under[version][at] - under[other[version]][at]) < 2e-4


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@in_flight
async def test_ten_updates_in_a_row_under_load(subject: Subject, mode: StopMode) -> None:
    """What is aborted goes on under the next version. No sample is lost, none comes twice, and each token is right."""
    subject.sample_by(VARIED)
    first = subject.engine.version
    requests: dict[int, Request] = {}
    async with subject.collecting([]) as samples:

        def submit_more() -> None:
            more = subject.requests(subject.load // 4)
            requests.update({request.sample_id: request for request in more})
            samples.submit(more)

        submit_more()
        for _ in range(UPDATES):
            submit_more()
            await samples.until(len(samples.done) + len(samples.aborted) + 1)
            too_late_unless(subject.engine.running)
            await subject.update(mode)
            if mode == "abort":
                await samples.until(len(requests) - subject.engine.running - subject.engine.waiting)
                samples.submit([replace(requests[a.sample_id], partial=a) for a in samples.aborted])
        done = await samples.all()
    assert set(done) == set(requests)
    assert subject.engine.version == first + UPDATES
    for sample_id, completion in done.items():
        check_versions(completion, first, mode)
        if subject.compares_tokens:
            subject.assert_sampled_by_its_versions(requests[sample_id], completion)


def check_versions(completion: Completion, first: int, mode: StopMode) -> None:
    assert (np.diff(completion.versions) >= 0).all()
    assert first <= completion.versions[0] and completion.versions[-1] <= first + UPDATES
    if mode == "wait":
        assert len(set(completion.versions)) == 1, "a drained engine was updated under a running sample"


@in_flight
async def test_without_dropping_the_cache_running_samples_go_on_and_say_so(subject: Subject) -> None:
    """Their keys are of old weights, so no forward has their log-probabilities. Their versions are exact as ever."""
    subject.sample_by(VARIED)
    requests = subject.many()
    async with subject.collecting(requests) as samples:
        await samples.until(1)
        old, new = subject.engine.version, await subject.update(drop_cache=False)
        done = await samples.all()
    too_late_unless(spans_both(done))
    for request in requests:
        completion = done[request.sample_id]
        assert set(completion.versions) <= {old, new} and (np.diff(completion.versions) >= 0).all()
        if subject.compares_tokens:
            until_update = completion.versions == old
            expected = log_probs_of(subject.model(old), request.prompt, completion.tokens)[until_update]
            np.testing.assert_allclose(completion.log_probs[until_update], expected, rtol=0, atol=1e-4)
