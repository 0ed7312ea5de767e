"""Decoding that jumps from event to event against a simulation of every single token, for any calls in any order."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.simulated.decoding import Decoding
from engines.simulated.rollout import SimulatedRollout
from harness.config import CostConfig, LengthsConfig
from harness.cost_model.cost import DecodeCost
from harness.cost_model.lengths import ResponseLengths
from harness.protocols import Completion, Request
from harness.runtime.virtual_runtime import VirtualClock, run_virtual
from tests.support.examples import examples
from tests.support.simulated_setting import COST, requests, runs
from tests.support.token_by_token import GROUP, Sample, TokenByToken

LONGEST = 30  # prompt and response together


@st.composite
def costs(draw: st.DrawFn) -> CostConfig:
    """All but that of a step may be nothing."""

    def some(most: float) -> float:
        return draw(st.one_of(st.just(0.0), st.floats(most / 10, most)))

    return replace(
        COST,
        decode_step_s=draw(st.floats(0.05, 1.0)),
        decode_step_s_per_sample=some(0.5),
        decode_weights_s=some(2.0),
        decode_experts_s=some(2.0),
        expert_share=draw(st.floats(0.1, 1.0)),
        decode_s_per_cached_token=some(0.1),
        prefill_s_per_token=some(0.05),
        prefill_s_per_pair=some(0.005),
        kv_tokens=draw(st.one_of(st.none(), st.just(LONGEST), st.integers(LONGEST, 2 * LONGEST))),
        step_tokens=draw(st.one_of(st.none(), st.integers(1, 40))),
        prefix_caching=draw(st.booleans()),
    )


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
        assert due is not None
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


UNIFORM = LengthsConfig(kind="uniform", mean=6.0, cap=9)


@dataclass
class Action:
    """At `at`, or when the one before is over: submit `ids`, or stop in this mode, wait, take a version, and go on."""

    at: float
    ids: list[int] = field(default_factory=list)
    mode: str = ""
    wait_s: float = 0.0
    drop: bool = False


@dataclass
class Case:
    slots: int
    prompt: int
    cost: CostConfig
    actions: list[Action]


def random_case(seed: int) -> Case:
    random = Random(seed)
    actions, next_id, at = [], 0, 0.0
    for _ in range(random.randint(1, 8)):
        at += random.choice([0.0, 0.1, 1.0, 5.0, 30.0]) * random.random()
        if next_id == 0 or random.random() < 0.5:
            count = random.randint(1, 6)
            actions.append(Action(at, ids=list(range(next_id, next_id + count))))
            next_id += count
        else:
            mode = random.choice(["keep", "keep", "wait", "abort"])
            actions.append(Action(at, mode=mode, wait_s=random.random() * 3, drop=random.random() < 0.5))
    prompt = random.randint(1, 30)
    cost = replace(
        COST,
        decode_step_s=0.05 + random.random(),
        decode_step_s_per_sample=random.choice([0.0, random.random()]),
        decode_weights_s=random.choice([0.0, 2 * random.random()]),
        decode_experts_s=random.choice([0.0, 2 * random.random()]),
        expert_share=0.1 + 0.9 * random.random(),
        decode_s_per_cached_token=random.choice([0.0, random.random() / 20]),
        prefill_s_per_token=random.choice([0.0, random.random() / 20]),
        prefill_s_per_pair=random.choice([0.0, random.random() / 200]),
        kv_tokens=random.choice([None, random.randint(1, 3) * (prompt + UNIFORM.cap)]),
        step_tokens=random.choice([None, random.randint(1, 60)]),
        prefix_caching=random.random() < 0.5,
    )
    return Case(random.randint(1, 6), prompt, cost, actions)


Decoded = dict[int, tuple[list[tuple[int, int]], tuple[float | None, ...]]]
"""Of each sample: runs (version, tokens), when it started and when it was finished."""


def outcome_of_the_engine(case: Case, lengths: ResponseLengths) -> tuple[Decoded, int]:
    """And how often a sample was preempted."""

    async def main() -> tuple[list[Completion], int]:
        clock = VirtualClock(asyncio.get_running_loop())
        engine = SimulatedRollout(case.cost, lengths, slots=case.slots, group_size=GROUP, clock=clock, load_s=0.0)
        version, done = 0, []
        for action in case.actions:
            await clock.sleep(max(0.0, action.at - clock.now()))
            if not action.mode:
                engine.submit(requests(*action.ids, prompt_tokens=case.prompt))
                continue
            version += 1
            some = engine.running or engine.waiting
            await engine.pause(action.mode)  # type: ignore[arg-type]
            partials: list[Completion] = []
            if action.mode == "abort" and some:
                collected = await engine.finished()
                done += [completion for completion in collected if completion.finish_reason != "abort"]
                partials = [completion for completion in collected if completion.finish_reason == "abort"]
                assert not engine.running and not engine.waiting
            await clock.sleep(action.wait_s)
            await engine.load_weights(version, iter(()))
            if action.drop:
                engine.drop_cache()
            await engine.resume()
            prompt = np.array([case.prompt])
            engine.submit([Request(partial.sample_id, prompt, partial) for partial in partials])
        while engine.running or engine.waiting or engine._done:
            done += await engine.finished()
        await engine.close()
        return done, engine.preemptions

    done, preemptions = run_virtual(main())
    return {c.sample_id: (runs(c), (c.started_at, c.first_token_at, c.finished_at)) for c in done}, preemptions


def outcome_token_by_token(case: Case, lengths: ResponseLengths) -> tuple[Decoded, int]:
    engine, now, version = TokenByToken(case.cost, slots=case.slots), 0.0, 0
    for action in case.actions:
        now = max(now, action.at)
        if not action.mode:
            drawn = lengths.of(np.array(action.ids)).tolist()
            samples = [
                Sample(i, case.prompt, length, shared=case.prompt) for i, length in zip(action.ids, drawn, strict=True)
            ]
            engine.submit(samples, now)
            continue
        version += 1
        if action.mode == "wait":
            engine.drain(now)
            now = engine.run_until(lambda: engine.drained, now)
        engine.stop(now)
        now = engine.run_until(lambda: engine.stopped, now) + action.wait_s
        partials = engine.abort() if action.mode == "abort" else []
        engine.load(version)
        if action.drop:
            engine.drop_cache(now)
        engine.resume(now)
        engine.submit(partials, now)
    engine.run_until(lambda: not engine.rows, now)
    return {s.sample_id: (s.runs, s.times) for s in engine.finished}, engine.preemptions


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_events_give_what_a_simulation_of_every_token_gives(seed: int) -> None:
    case, lengths = random_case(seed), ResponseLengths(UNIFORM, seed)
    found, preempted = outcome_of_the_engine(case, lengths)
    expected, expected_preempted = outcome_token_by_token(case, lengths)
    assert found.keys() == expected.keys() and preempted == expected_preempted
    for sample_id, (counted, times) in expected.items():
        assert found[sample_id] == (counted, pytest.approx(times, rel=1e-9))
