"""Ending single samples: where they are, and the others go on."""

from __future__ import annotations

import pytest

from tests.contract.in_flight import in_flight, too_late_unless
from tests.contract.subject import VARIED, Subject, waiting_for

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
