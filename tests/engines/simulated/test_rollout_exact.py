"""The simulated rollout engine, which jumps from event to event, against a simulation of every single token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.rollout import SimulatedRollout
from harness.config import CostConfig, LengthsConfig
from harness.cost_model.lengths import Lengths
from harness.protocols import Completion, Request
from harness.runtime.virtual_runtime import VirtualClock, run_virtual
from tests.support.examples import examples
from tests.support.simulated_setting import COST, requests, runs
from tests.support.token_by_token import Sample, TokenByToken

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
        decode_s_per_cached_token=random.choice([0.0, random.random() / 20]),
        prefill_s_per_token=random.choice([0.0, random.random() / 20]),
        prefill_s_per_pair=random.choice([0.0, random.random() / 200]),
        kv_tokens=random.choice([None, random.randint(1, 3) * (prompt + UNIFORM.cap)]),
    )
    return Case(random.randint(1, 6), prompt, cost, actions)


Outcome = dict[int, tuple[list[tuple[int, int]], float | None, float | None]]
"""Of each sample: runs (version, tokens), when it started and when it was finished."""


def outcome_of_the_engine(case: Case, lengths: Lengths) -> tuple[Outcome, int]:
    """And how often a sample was preempted."""

    async def main() -> tuple[list[Completion], int]:
        clock = VirtualClock(asyncio.get_running_loop())
        engine = SimulatedRollout(case.cost, lengths, slots=case.slots, group_size=2, clock=clock, load_s=0.0)
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
    return {c.sample_id: (runs(c), c.started_at, c.finished_at) for c in done}, preemptions


def outcome_token_by_token(case: Case, lengths: Lengths) -> tuple[Outcome, int]:
    engine, now, version = TokenByToken(case.cost, slots=case.slots), 0.0, 0
    for action in case.actions:
        now = max(now, action.at)
        if not action.mode:
            drawn = lengths.of(np.array(action.ids)).tolist()
            samples = [Sample(i, case.prompt, length) for i, length in zip(action.ids, drawn, strict=True)]
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
    return {s.sample_id: (s.runs, s.started_at, s.finished_at) for s in engine.finished}, engine.preemptions


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_events_give_what_a_simulation_of_every_token_gives(seed: int) -> None:
    case, lengths = random_case(seed), Lengths(UNIFORM, seed)
    found, preempted = outcome_of_the_engine(case, lengths)
    expected, expected_preempted = outcome_token_by_token(case, lengths)
    assert found.keys() == expected.keys() and preempted == expected_preempted
    for sample_id, (counted, started_at, finished_at) in expected.items():
        assert found[sample_id][0] == counted
        assert found[sample_id][1:] == pytest.approx((started_at, finished_at), rel=1e-9)
