"""Whether an engine computes what transformers computes, also after an update; what it draws, and with which
log-probabilities: the ones that importance weights are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.protocols import Request, Sampling
from tests.contract.reference import assert_greedy, distribution_of, logits_of
from tests.contract.subject import Subject

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
