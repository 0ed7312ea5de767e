"""The first question to any engine: does it compute what transformers computes, and still so after an update?"""

from __future__ import annotations

import numpy as np
import pytest

from harness.protocols import Sampling
from tests.contract.reference import assert_greedy
from tests.contract.subject import Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = Sampling(max_tokens=24, temperature=0)


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
    assert any(before[i].tokens.tolist() != after[i].tokens.tolist() for i in before), (
        "the two versions cannot be told apart"
    )


async def test_a_greedy_token_is_certain_so_its_log_probability_is_zero(subject: Subject) -> None:
    subject.needs("tokens")
    subject.sample_by(GREEDY)
    for completion in (await subject.generate(subject.requests(4))).values():
        np.testing.assert_array_equal(completion.log_probs, np.zeros(24, np.float32))


async def test_an_idle_engine_has_forgotten_the_old_weights_even_where_no_one_dropped_its_cache(
    subject: Subject,
) -> None:
    subject.needs("tokens")
    subject.sample_by(GREEDY)
    requests = subject.requests(4, prompt_tokens=70)  # a cache of prefixes would know these
    await subject.generate(requests)
    version = await subject.update(drop_cache=False)
    done = await subject.generate(requests)
    for request in requests:
        assert_greedy(subject.model(version), request.prompt, done[request.sample_id])
