"""The simulated rollout engine, which jumps from event to event, against a simulation of every single token."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_setting import COST, requests, runs

from engines.simulated import SimulatedRollout
from harness.config import CostConfig, LengthsConfig
from harness.protocols import Completion, Request
from harness.runtime.virtual_loop import VirtualClock, run_virtual
from harness.simulator.lengths import Lengths

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
    cost = replace(
        COST,
        decode_step_s=0.05 + random.random(),
        decode_step_s_per_sample=random.choice([0.0, random.random()]),
        prefill_s_per_token=random.choice([0.0, random.random() / 20]),
    )
    return Case(random.randint(1, 6), random.randint(1, 30), cost, actions)


Outcome = dict[int, tuple[list[tuple[int, int]], float, float]]
"""Of each sample: runs (version, tokens), when it started and when it was finished."""


def outcome_of_the_engine(case: Case, lengths: Lengths) -> Outcome:
    async def main() -> list[Completion]:
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
        return done

    return {c.sample_id: (runs(c), c.started_at, c.finished_at) for c in run_virtual(main())}


@dataclass
class Token:
    """A sample of the simulation below."""

    sample_id: int
    length: int
    prompt: int
    versions: list[int] = field(default_factory=list)
    started: float | None = None
    cached: bool = False


def outcome_token_by_token(case: Case, lengths: Lengths) -> Outcome:
    rows: list[Token] = []
    waiting: deque[Token] = deque()
    outcome: Outcome = {}
    actions, free_from, now, version = deque(case.actions), 0.0, 0.0, 0

    def admit(now: float) -> None:
        while waiting and len(rows) < case.slots:
            sample = waiting.popleft()
            sample.started = now if sample.started is None else sample.started
            rows.append(sample)

    def step(now: float) -> float:
        for sample in rows:
            if not sample.cached:
                now += (sample.prompt + len(sample.versions)) * case.cost.prefill_s_per_token
            sample.cached = True
        now += case.cost.decode_step_s + len(rows) * case.cost.decode_step_s_per_sample
        for sample in rows:
            sample.versions.append(version)
        for sample in [sample for sample in rows if len(sample.versions) == sample.length]:
            rows.remove(sample)
            counted = [(v, sample.versions.count(v)) for v in sorted(set(sample.versions))]
            assert sample.started is not None
            outcome[sample.sample_id] = (counted, sample.started, now)
        return now

    while actions or rows or waiting:
        while actions and max(actions[0].at, free_from) <= now:
            action = actions.popleft()
            if not action.mode:
                ids = np.array(action.ids)
                waiting.extend(Token(i, n, case.prompt) for i, n in zip(action.ids, lengths.of(ids), strict=True))
                if max(action.at, free_from) == now:  # between two steps, not within the last one
                    admit(now)
                continue
            while action.mode == "wait" and rows:
                now = step(now)
            if action.mode == "abort":
                waiting.extendleft(reversed(rows))
                rows.clear()
                for sample in waiting:
                    sample.cached, sample.started = False, sample.started if sample.versions else None
            now += action.wait_s
            free_from, version = now, version + 1
            for sample in rows:
                sample.cached = sample.cached and not action.drop
            admit(now)
        admit(now)
        if rows:
            now = step(now)
        elif actions:
            now = max(now, actions[0].at)
    return outcome


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(0, 2**32))
def test_events_give_what_a_simulation_of_every_token_gives(seed: int) -> None:
    case, lengths = random_case(seed), Lengths(UNIFORM, seed)
    found, expected = outcome_of_the_engine(case, lengths), outcome_token_by_token(case, lengths)
    assert found.keys() == expected.keys()
    for sample_id, (counted, started_at, finished_at) in expected.items():
        assert found[sample_id][0] == counted
        assert found[sample_id][1:] == pytest.approx((started_at, finished_at), rel=1e-9)
