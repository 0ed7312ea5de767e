"""A set of weights is loaded whole or not at all; where they change under running samples, each token names the version
that sampled it, and it is true."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.protocols import Completion, Request, StopMode
from tests.contract.reference import log_probs_of
from tests.contract.subject import NAME, VARIED, Subject, in_flight, too_late_unless

pytestmark = pytest.mark.asyncio(loop_scope="session")

Weights = Iterator[tuple[str, torch.Tensor]]


def broken_off(weights: Weights) -> Weights:
    yield from [next(weights) for _ in range(5)]
    raise ConnectionError("the trainer is gone")


def without_the_last(weights: Weights) -> Weights:
    yield from list(weights)[:-1]


def of_another_shape(weights: Weights) -> Weights:
    for name, tensor in weights:
        yield name, tensor[:-1] if name.endswith("down_proj.weight") else tensor


def with_a_stranger(weights: Weights) -> Weights:
    yield from weights
    yield "strange.weight", torch.zeros(3)


BROKEN = [
    pytest.param(broken_off, ConnectionError, "the trainer is gone", id="broken off"),
    pytest.param(without_the_last, ValueError, "model.norm.weight", id="one is missing"),
    pytest.param(of_another_shape, ValueError, "down_proj.weight", id="wrong shape"),
    pytest.param(with_a_stranger, ValueError, "strange.weight", id="unknown name"),
]


@pytest.mark.parametrize(("broken", "error", "message"), BROKEN)
async def test_a_load_that_fails_leaves_the_old_version_or_a_refusal_and_the_next_one_heals_it(
    subject: Subject, broken, error: type[Exception], message: str
) -> None:
    if error is not ConnectionError:
        subject.needs("tokens")  # an engine without a model cannot know what fits
    engine, old = subject.engine, subject.engine.version
    subject.sample_by(VARIED)
    await engine.pause("keep")
    with pytest.raises(error, match=message):
        await engine.load_weights(old + 1, broken(subject.weights(old + 1)))
    assert engine.version == old
    requests = subject.requests(4)
    done = await old_version_or_none(subject, requests)
    assert_sampled_by(subject, requests, done, old)

    left = [request for request in requests if request.sample_id not in done]
    async with subject.collecting([]) as samples:
        await engine.pause("keep")
        await subject.take(old + 2)
        await engine.resume()
        samples.expect(request.sample_id for request in left)
        if engine.running + engine.waiting < len(left):
            samples.submit(left)
        assert_sampled_by(subject, left, await samples.all(), old + 2)


async def old_version_or_none(subject: Subject, requests: list[Request]) -> dict[int, Completion]:
    """What the engine makes of these after a load that failed: all of them, or a refusal that names the engine."""
    try:
        await subject.engine.resume()
        return await subject.generate(requests)
    except RuntimeError as refusal:
        assert NAME in str(refusal)
        return {}


def assert_sampled_by(subject: Subject, requests: list[Request], done: dict[int, Completion], version: int) -> None:
    for request in requests:
        if request.sample_id in done:
            assert set(done[request.sample_id].versions) == {version}
            if subject.compares_tokens:
                subject.assert_sampled_by_its_versions(request, done[request.sample_id])


@in_flight
async def test_a_busy_engine_refuses_weights(subject: Subject) -> None:
    version = subject.engine.version + 1
    async with subject.busy() as samples:
        too_late_unless(subject.engine.running)
        with pytest.raises(RuntimeError, match=NAME):
            await subject.engine.load_weights(version, subject.weights(version))
        assert subject.engine.version == version - 1
        done = await samples.all()
    assert {version - 1} == {token_version for c in done.values() for token_version in c.versions.tolist()}


async def test_an_idle_engine_takes_weights_without_a_pause(subject: Subject) -> None:
    subject.sample_by(VARIED)
    await subject.take(subject.engine.version + 1)
    requests = subject.requests(4)
    assert_sampled_by(subject, requests, await subject.generate(requests), subject.engine.version)


async def test_weights_belong_to_the_sender_again_once_they_are_loaded(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(VARIED)
    version = subject.engine.version + 1
    await subject.engine.load_weights(version, passing_through_one_buffer(subject.weights(version)))
    requests = subject.requests(4)
    assert_sampled_by(subject, requests, await subject.generate(requests), version)


def passing_through_one_buffer(weights: Weights) -> Weights:
    """As a bucket of a transfer: a tensor lives until the next one is asked for, and no longer."""
    for name, tensor in weights:
        lent = tensor.clone()
        yield name, lent
        lent.fill_(torch.nan)


# -- under running samples


UPDATES = 10


@in_flight
async def test_every_token_was_sampled_by_the_version_that_it_names(subject: Subject) -> None:
    """Also by no other: its log-probability under the other one of the two is a different one."""
    async with subject.busy(requests := subject.many()) as samples:
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


@pytest.mark.slow
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
    async with subject.busy(requests := subject.many()) as samples:
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
