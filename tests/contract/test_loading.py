"""A set of weights is loaded whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness.protocols import Completion, Request
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
    subject.sample_by(VARIED)
    version = subject.engine.version + 1
    async with subject.collecting(subject.many()) as samples:
        await samples.until(1)
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
