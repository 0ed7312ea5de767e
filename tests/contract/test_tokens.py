"""What a sample is, from its submission to its record; whether an engine computes what transformers does, also after an
update; what it draws, and with which log-probabilities: the ones that importance weights are made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.protocols import Request, Sampling
from tests.contract.reference import MAX_LENGTH, VOCABULARY, assert_greedy, distribution_of, log_probs_of, logits_of
from tests.contract.subject import SLOTS, Subject, in_flight, too_late_unless

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = Sampling(max_tokens=24, temperature=0)


async def test_a_sample_with_a_sampling_of_its_own_is_sampled_by_that_beside_others(subject: Subject) -> None:
    subject.needs("tokens")
    usual = Sampling(max_tokens=30)
    subject.sample_by(usual)
    sampled, greedy = subject.requests(10), subject.requests(10)
    mixed = [*sampled, *(replace(request, sampling=GREEDY) for request in greedy)]
    done = await subject.generate(sorted(mixed, key=lambda request: request.sample_id % 3))
    for request in greedy:
        assert len(done[request.sample_id].tokens) == GREEDY.max_tokens
        assert_greedy(subject.model(subject.engine.version), request.prompt, done[request.sample_id])
        np.testing.assert_array_equal(done[request.sample_id].log_probs, np.zeros(GREEDY.max_tokens, np.float32))
    for request in sampled:
        subject.assert_sampled_by_its_versions(request, done[request.sample_id])


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
async def test_greedy_tokens_are_those_of_a_transformers_forward_before_and_after_an_update(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(GREEDY)
    requests = subject.requests(20)
    before = await subject.generate(requests)
    old, new = subject.engine.version, await subject.update()
    after = await subject.generate(requests)
    for version, done in ((old, before), (new, after)):
        for request in requests:
            assert set(done[request.sample_id].versions) == {version}
            assert_greedy(subject.model(version), request.prompt, done[request.sample_id])
            assert not done[request.sample_id].log_probs.any(), "a greedy token is certain"
    assert any(before[i].tokens.tolist() != after[i].tokens.tolist() for i in before), "versions cannot be told apart"


async def test_an_idle_engine_has_forgotten_the_old_weights_though_no_one_dropped_its_cache(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(GREEDY)
    requests = subject.requests(4, prompt_tokens=70)  # a cache of prefixes would know these
    await subject.generate(requests)
    version = await subject.update(drop_cache=False)
    done = await subject.generate(requests)
    for request in requests:
        assert_greedy(subject.model(version), request.prompt, done[request.sample_id])


SAMPLINGS = [
    pytest.param(Sampling(max_tokens=30), id="plain"),
    pytest.param(Sampling(max_tokens=30, temperature=0.6), id="cold"),
    pytest.param(Sampling(max_tokens=30, temperature=1.7), id="hot"),
    pytest.param(Sampling(max_tokens=30, temperature=1.2, top_p=0.8), id="nucleus"),
]


def needs(subject: Subject, sampling: Sampling) -> None:
    subject.needs("tokens")
    if sampling.top_p < 1:
        subject.needs("top_p")


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_log_probabilities_are_those_of_what_tokens_were_drawn_from(subject: Subject, sampling: Sampling) -> None:
    needs(subject, sampling)
    subject.sample_by(sampling)
    requests = subject.requests(20)
    done = await subject.generate(requests)
    for request in requests:
        subject.assert_sampled_by_its_versions(request, done[request.sample_id])


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_tokens_come_as_often_as_their_probability_says(subject: Subject, sampling: Sampling) -> None:
    """Pearson's chi-square over one-token responses. Its statistic has a mean of `choices - 1` and a variance of twice
    that; six deviations are not reached by chance."""
    needs(subject, sampling)
    sampling = Sampling(1, sampling.temperature, sampling.top_p)
    subject.sample_by(sampling)
    first, expected = max(
        ((request, _expected(subject, request, sampling)) for request in subject.requests(8, prompt_tokens=6)),
        key=lambda found: int((found[1] >= _CELL).sum()),
    )
    requests = [first, *subject.same_prompt(first, _DRAWN - 1)]
    drawn = [int(completion.tokens[0]) for completion in (await subject.generate(requests)).values()]

    counts = np.bincount(drawn, minlength=len(expected))
    assert not counts[expected == 0].any(), "tokens of probability zero were drawn"
    rare = expected < _CELL  # together one cell, as the test demands
    cells = np.append(expected[~rare], expected[rare].sum()), np.append(counts[~rare], counts[rare].sum())
    cells = tuple(cell[cells[0] > 0] for cell in cells)
    choices = len(cells[0])
    statistic = float(((cells[1] - cells[0]) ** 2 / cells[0]).sum())
    assert choices > 4, "the distribution leaves no choice: nothing was tested"
    assert statistic < choices - 1 + 6 * np.sqrt(2 * (choices - 1)) + 6


def _expected(subject: Subject, request: Request, sampling: Sampling) -> np.ndarray:
    """How often each token comes among those drawn."""
    logits = logits_of(subject.model(subject.engine.version), request.prompt, np.zeros(1, np.int64))
    return _DRAWN * distribution_of(logits, sampling)[0].exp().numpy()


_DRAWN, _CELL = 400, 5


async def test_samples_of_one_prompt_differ(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(Sampling(max_tokens=16))
    (first,) = subject.requests(1)
    done = await subject.generate([first, *subject.same_prompt(first, 7)])
    assert len({tuple(completion.tokens) for completion in done.values()}) == 8


async def test_a_sample_draws_the_same_tokens_whatever_runs_beside_it(subject: Subject) -> None:
    subject.needs("tokens", "seeds")
    subject.sample_by(Sampling(max_tokens=30))
    requests = subject.requests(20)
    together = await subject.generate(requests)
    again = await subject.generate(requests[::-1])
    alone = [(await subject.generate([request]))[request.sample_id] for request in requests[:3]]
    for request in requests:
        assert again[request.sample_id].tokens.tolist() == together[request.sample_id].tokens.tolist()
    for completion in alone:
        assert completion.tokens.tolist() == together[completion.sample_id].tokens.tolist()


async def test_an_engine_leaves_the_random_state_of_its_process_alone(subject: Subject) -> None:
    subject.needs("tokens")
    before = torch.get_rng_state()
    await subject.generate(subject.requests(4))
    assert torch.equal(torch.get_rng_state(), before)


# -- from submission to record


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
    async with subject.busy() as samples:
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
