"""What is drawn, and with which log-probabilities: the ones that importance weights are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.protocols import Sampling
from tests.contract.reference import distribution_of, logits_of
from tests.contract.subject import Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
async def test_log_probabilities_are_those_of_the_distribution_that_tokens_were_drawn_from(
    subject: Subject, sampling: Sampling
) -> None:
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
    (first,) = subject.requests(1, prompt_tokens=6)
    requests = [first, *subject.same_prompt(first, 399)]
    drawn = [int(completion.tokens[0]) for completion in (await subject.generate(requests)).values()]

    logits = logits_of(subject.model(subject.engine.version), first.prompt, np.zeros(1, np.int64))
    expected = len(drawn) * distribution_of(logits, sampling)[0].exp().numpy()
    counts = np.bincount(drawn, minlength=len(expected))
    assert not counts[expected == 0].any(), "tokens of probability zero were drawn"
    rare = expected < 5  # together one cell, as the test demands
    cells = np.append(expected[~rare], expected[rare].sum()), np.append(counts[~rare], counts[rare].sum())
    cells = tuple(cell[cells[0] > 0] for cell in cells)
    choices = len(cells[0])
    statistic = float(((cells[1] - cells[0]) ** 2 / cells[0]).sum())
    assert choices > 4, "the distribution leaves no choice: nothing was tested"
    assert statistic < choices - 1 + 6 * np.sqrt(2 * (choices - 1)) + 6


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
