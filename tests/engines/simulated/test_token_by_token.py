"""Decoding that jumps from event to event against a simulation of every single token, for any calls in any order."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.simulated.decoding import Decoding
from harness.config import CostConfig
from harness.cost_model.cost import DecodeCost
from tests.support.examples import examples
from tests.support.simulated_setting import COST
from tests.support.token_by_token import GROUP, Sample, TokenByToken

LONGEST = 30  # prompt and response together


@st.composite
def costs(draw: st.DrawFn) -> CostConfig:
    """All but that of a step may be nothing."""

    def some(most: float) -> float:
        return draw(st.one_of(st.just(0.0), st.floats(most / 10, most)))

    return replace(
        COST, decode_step_s=draw(st.floats(0.05, 1.0)), decode_step_s_per_sample=some(0.5),
        decode_weights_s=some(2.0), decode_experts_s=some(2.0), expert_share=draw(st.floats(0.1, 1.0)),
        decode_s_per_cached_token=some(0.1), prefill_s_per_token=some(0.05), prefill_s_per_pair=some(0.005),
        kv_tokens=draw(st.one_of(st.none(), st.just(LONGEST), st.integers(LONGEST, 2 * LONGEST))),
        step_tokens=draw(st.one_of(st.none(), st.integers(1, 40))), prefix_caching=draw(st.booleans()),
    )  # fmt: skip


class Decodings(RuleBasedStateMachine):
    """Both, side by side on one clock."""

    @initialize(cost=costs(), slots=st.integers(2, 9))
    def start(self, cost: CostConfig, slots: int) -> None:
        self.cost, self.now, self.version, self.samples = cost, 0.0, 0, list[Sample]()
        self.away: list[Sample] = []  # aborted, and not submitted again
        self.found, self.expected = Decoding(DecodeCost.of(cost), slots=slots), TokenByToken(cost, slots=slots)

    @rule(sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, LONGEST - 12)), min_size=1, max_size=8))
    def submit(self, sizes: list[tuple[int, int]]) -> None:
        begun = len(self.samples)
        for number, (prompt, length) in enumerate(sizes, begun):
            prompt = prompt if number % GROUP == 0 else self.samples[-1].prompt
            self.samples.append(Sample(number, prompt, length, shared=prompt))
        self._submit(self.samples[begun:])

    @rule(seconds=st.floats(0.0, 10.0))
    def time_passes(self, seconds: float) -> None:
        self._advance(self.now + seconds)

    @precondition(lambda self: self.found.next_event() is not None)
    @rule()
    def the_next_event_comes(self) -> None:
        due = self.found.next_event()
        self._advance(max(due, self.now))

    @rule()
    def the_cache_is_dropped(self) -> None:
        self.found.drop_cache(self.now)
        self.expected.drop_cache(self.now)

    @rule()
    def stop(self) -> None:
        self.found.stop(self.now)
        self.expected.stop(self.now)
        while not self.found.stopped:
            self.the_next_event_comes()
        assert self.expected.stopped

    @rule()
    def drain(self) -> None:
        self.found.drain(self.now)
        self.expected.drain(self.now)
        while not self.found.drained:
            self.the_next_event_comes()
        assert self.expected.drained

    @precondition(lambda self: self.found.stopped)
    @rule()
    def load(self) -> None:
        self.version += 1
        self.found.load(self.version)
        self.expected.load(self.version)

    @precondition(lambda self: self.found.stopped)
    @rule()
    def abort(self) -> None:
        found, expected = self.found.abort(), self.expected.abort()
        assert [(s.sample_id, s.runs) for s in found] == [(s.sample_id, s.runs) for s in expected]
        self.away += expected

    @precondition(lambda self: self.away)
    @rule()
    def what_was_aborted_comes_back(self) -> None:
        samples, self.away = self.away, []
        self._submit(samples)

    @rule()
    def resume(self) -> None:
        self.found.resume(self.now)
        self.expected.resume(self.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        here = self.found.running + len(self.found.waiting) + len(self.found.finished)
        assert here + len(self.away) == len(self.samples)

    def teardown(self) -> None:
        self.resume()
        if self.away:
            self.what_was_aborted_comes_back()
        while self.found.running:
            self.the_next_event_comes()
        done = {sample.sample_id: (sample, at) for sample, at in self.found.finished}
        assert sorted(done) == list(range(len(self.samples)))
        for expected in self.samples:
            sample, at = done[expected.sample_id]
            assert sample.runs == expected.runs and sum(tokens for _, tokens in sample.runs) == expected.length
            assert (sample.started_at, sample.first_token_at, at) == pytest.approx(expected.times, rel=1e-9)
        assert self.found.preemptions == self.expected.preemptions
        assert self.found.recomputed_tokens == self.expected.recomputed_tokens

    def _submit(self, samples: list[Sample]) -> None:
        self.found.submit([sample.simulated() for sample in samples], self.now)
        self.expected.submit(samples, self.now)

    def _advance(self, now: float) -> None:
        self.now = now
        self.found.advance(now)
        self.expected.advance(now)


TestDecodings = Decodings.TestCase
TestDecodings.settings = settings(
    max_examples=examples(100), stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
