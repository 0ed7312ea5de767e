"""What a sample is, from its submission to its record."""

from __future__ import annotations

import numpy as np
import pytest

from harness.protocols import Request, Sampling
from tests.contract.reference import MAX_LENGTH, VOCABULARY, log_probs_of
from tests.contract.subject import SLOTS, VARIED, Subject, in_flight, too_late_unless

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_records_have_the_dtypes_and_times_of_the_protocol(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=20))
    done = await subject.generate(subject.requests(3))
    for completion in done.values():
        arrays = (completion.tokens, completion.log_probs, completion.versions)
        assert [array.dtype for array in arrays] == [np.int64, np.float32, np.int32]
        assert len({array.shape for array in arrays}) == 1 and completion.tokens.ndim == 1
        assert 0 <= completion.started_at <= completion.first_token_at <= completion.finished_at
        assert set(completion.versions) == {subject.engine.version}


@pytest.mark.parametrize("length", [1, 2, 33])
async def test_a_sample_that_nothing_stops_has_the_length_that_was_asked_for(subject: Subject, length: int) -> None:
    subject.needs("tokens")
    subject.sample_by(Sampling(max_tokens=length))
    for completion in (await subject.generate(subject.requests(3))).values():
        assert (len(completion.tokens), completion.finish_reason) == (length, "length")
        assert completion.tokens.min() >= 0 and completion.tokens.max() < VOCABULARY


async def test_a_stop_token_ends_a_sample_and_stands_last_with_its_log_probability(subject: Subject) -> None:
    subject.needs("tokens")
    stops = (3, 14, 15, 92)
    subject.sample_by(Sampling(max_tokens=20, stop_tokens=stops))
    requests = subject.requests(24)
    done = await subject.generate(requests)
    assert {completion.finish_reason for completion in done.values()} == {"stop", "length"}
    for request in requests:
        completion = done[request.sample_id]
        at = np.flatnonzero(np.isin(completion.tokens, stops)).tolist()
        assert at == ([len(completion.tokens) - 1] if completion.finish_reason == "stop" else [])
        assert completion.finish_reason == "stop" or len(completion.tokens) == 20
        expected = log_probs_of(subject.model(subject.engine.version), request.prompt, completion.tokens)
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-4)


async def test_a_stop_token_in_the_prompt_stops_nothing(subject: Subject) -> None:
    subject.needs("tokens")
    (request,) = subject.requests(1, prompt_tokens=5)
    subject.sample_by(Sampling(max_tokens=1, stop_tokens=tuple(request.prompt.tolist())))
    assert len((await subject.generate([request]))[request.sample_id].tokens) == 1


async def test_what_is_submitted_is_counted_at_once_and_what_is_done_no_more(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=12))
    engine, number = subject.engine, 3 * SLOTS
    assert engine.slots == SLOTS and (engine.running, engine.waiting) == (0, 0)
    async with subject.collecting(subject.requests(number)) as samples:
        assert engine.running + engine.waiting == number
        while len(samples.done) < number:
            assert engine.running <= SLOTS
            await samples.until(len(samples.done) + 1)
    assert (engine.running, engine.waiting) == (0, 0)


async def test_samples_start_in_the_order_of_submission(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=12))
    requests = subject.requests(3 * SLOTS)
    done = await subject.generate(requests)
    started = [done[request.sample_id].started_at for request in requests]
    assert started == sorted(started)


@in_flight
async def test_samples_stream_out_while_others_run(subject: Subject) -> None:
    subject.sample_by(VARIED)
    async with subject.collecting(subject.many()) as samples:
        await samples.until(1)
        too_late_unless(len(samples.done) < subject.load)
        await samples.all()


async def test_work_that_comes_while_others_run_is_taken_in(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=30))
    async with subject.collecting(subject.requests(SLOTS // 2)) as samples:
        for number in range(1, 5):
            samples.submit(subject.requests(2))
            await samples.until(number)
        assert len(await samples.all()) == SLOTS // 2 + 8


async def test_who_stops_waiting_for_finished_samples_loses_none(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=20))
    requests = subject.requests(3 * SLOTS)
    done = []
    async with subject.collecting(requests) as samples:
        await samples.until(1)
    done += samples.done
    async with subject.collecting([]) as rest:
        rest.expect(request.sample_id for request in requests if request.sample_id not in samples.done)
        done += await rest.all()
    assert sorted(done) == [request.sample_id for request in requests]


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(np.zeros(0, np.int64), id="empty"),
        pytest.param(np.array([1, VOCABULARY]), id="beyond the vocabulary"),
        pytest.param(np.ones(MAX_LENGTH - 19, np.int64), id="too long"),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_refused_and_not_queued(subject: Subject, prompt: np.ndarray) -> None:
    subject.needs("tokens")
    subject.sample_by(Sampling(max_tokens=20))
    fine, wrong = subject.requests(2)
    with pytest.raises(ValueError, match=f"sample {wrong.sample_id}"):
        subject.engine.submit([fine, Request(wrong.sample_id, prompt)])
    assert (subject.engine.running, subject.engine.waiting) == (0, 0)


async def test_the_longest_sample_that_fits_is_served(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(Sampling(max_tokens=20))
    requests = subject.requests(1, prompt_tokens=MAX_LENGTH - 20)
    done = await subject.generate(requests)
    assert [len(completion.tokens) for completion in done.values()] == [20]


async def test_every_token_counts_as_progress(subject: Subject) -> None:
    subject.sample_by(Sampling(max_tokens=20))
    before = subject.engine.sampled
    done = await subject.generate(subject.requests(3))
    longest = max(int(c.tokens.sum()) if not subject.compares_tokens else len(c.tokens) for c in done.values())
    assert subject.engine.sampled - before >= longest
