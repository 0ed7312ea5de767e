"""Samples between their turns: what an environment answers, and how a sample ends."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from harness.config.registries import find
from harness.protocols import Completion, Request
from harness.tasks import Problem, Step, Task, environment_of
from harness.workers.episodes import Episodes
from tests.support.role_setting import TickingClock

TASK: Task = find("task", "lookup")()


ODD: dict[str, Any] = {"nan": math.nan, "too large": 1e39, "a dict": {"score": 1.0}}
WHY = {
    "hang": "no answer after 0.05 s",
    "raise": "RuntimeError: no such tool (",
    "foreign": "ValueError: ",
    **{name: f"ValueError: the reward of a step is {reward!r}" for name, reward in ODD.items()},
}


class Script:
    """Answers `c` until it is done, after so many turns; or does what it is told instead."""

    max_turns = 3
    step_timeout_s = 0.05

    def __init__(self, turns: int = 99, instead: str = "") -> None:
        self.turns, self.instead = turns, instead
        self.asked: list[str] = []
        self.hanging = asyncio.Event()
        self.closed = 0

    async def reset(self, problem: Problem, seed: int) -> list[int]:
        return [seed]

    async def step(self, state: list[int], action: str) -> Step:
        self.asked.append(action)
        if self.instead == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        if self.instead == "raise":
            raise RuntimeError("no such tool")
        if self.instead == "foreign":
            return Step("#", done=False)
        done = len(self.asked) == self.turns
        return Step("c", done, reward=ODD.get(self.instead, 0.5))

    async def close(self, state: list[int]) -> None:
        self.closed += 1


def turn(text: str, partial: Completion | None = None, reason: str = "stop", version: int = 4) -> Completion:
    """What an engine returns: all that is there, and one more turn."""
    said = np.append(TASK.encode(text), TASK.stop_tokens[0])
    new = (said, np.full(len(said), -1.0, np.float32), np.full(len(said), version, np.int32))
    before = () if partial is None else (partial.tokens, partial.log_probs, partial.versions)
    tokens, log_probs, versions = (np.concatenate(p) for p in zip(before, new, strict=True)) if before else new
    return Completion(7, tokens, log_probs, versions, reason, 1.0, 2.0)  # type: ignore[arg-type]


def episodes(script: Script, max_tokens: int = 60) -> Episodes:
    made = Episodes(script, TASK, TickingClock(), seed=0, max_tokens=max_tokens)
    made.begin(7, TASK.problem(0, 0))
    return made


async def test_what_the_environment_answers_stands_behind_the_turn_masked_and_of_its_version() -> None:
    script = Script(turns=2)
    playing = episodes(script)
    following = await playing.follow(turn("+a", version=3))
    assert isinstance(following, Request) and following.partial is not None
    partial = following.partial
    assert TASK.decode(partial.tokens) == "+a.c" and partial.mask is not None
    assert partial.mask.tolist() == [True, True, True, False]
    assert (partial.log_probs[-1], partial.versions.tolist()) == (0.0, [3, 3, 3, 3])
    done = await playing.follow(turn("7", partial, version=5))
    assert isinstance(done, Completion) and done.mask is not None and script.asked == ["+a", "7"]
    assert done.mask.tolist() == [True, True, True, False, True, True]
    assert (done.finish_reason, done.turns, done.environment_reward) == ("stop", 2, 1.0)
    assert script.closed == 1


@pytest.mark.parametrize("instead", WHY)
async def test_an_environment_that_hangs_raises_or_says_what_is_nothing_fails_its_sample(instead: str) -> None:
    script = Script(instead=instead)
    done = await episodes(script).follow(turn("+a"))
    assert isinstance(done, Completion) and done.finish_reason == "failed" and len(done.tokens) == 3
    assert math.isnan(done.environment_reward) and script.closed == 1
    assert done.failure.startswith(f"its environment failed in turn 1: {WHY[instead]}")


async def test_a_sample_has_no_more_turns_and_tokens_than_it_may_have() -> None:
    playing, said = episodes(Script()), turn("+a")
    for _ in range(2):
        following = await playing.follow(said)
        assert isinstance(following, Request)
        said = turn("+c", following.partial)
    last = await playing.follow(said)
    assert isinstance(last, Completion) and (last.finish_reason, last.turns) == ("turns", 3)
    for reason, limit in (("length", 4), ("length", 3)):
        short = await episodes(Script(), max_tokens=limit).follow(turn("+a"))
        assert isinstance(short, Completion) and short.finish_reason == reason
    cut = await episodes(Script()).follow(turn("+a", reason="length"))
    assert isinstance(cut, Completion) and (cut.finish_reason, cut.turns) == ("length", 1)


async def test_the_demonstration_of_a_lookup_is_what_its_environment_rewards() -> None:
    environment = environment_of(TASK)
    assert environment is not None
    for index in range(50):
        problem = TASK.held_out(index)
        parts = [TASK.decode(part) for part in TASK.transcript(problem)]  # type: ignore[attr-defined]
        state = await environment.reset(problem, 0)
        for said, answered in zip(parts[:-1:2], parts[1::2], strict=True):
            step = await environment.step(state, said[:-1])
            assert (step.observation, step.done) == (answered, False)
        assert await environment.step(state, parts[-1][:-1]) == Step("", True, 1.0)
        assert (await environment.step(state, "x")).reward == 0.0


def test_what_cannot_be_an_environment_is_refused_by_name() -> None:
    class Blocking(Script):
        def step(self, state: list[int], action: str) -> Step:  # type: ignore[override]
            return Step("", True)

    class Wrong:
        def __init__(self, environment: object) -> None:
            self.environment = environment

    with pytest.raises(ValueError, match="write `async def step`"):
        environment_of(Wrong(Blocking()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lacks max_turns"):
        environment_of(Wrong(object()))  # type: ignore[arg-type]


async def test_a_sample_that_is_cut_waits_for_no_environment_and_gets_no_other_turn() -> None:
    script = Script(instead="hang")
    script.step_timeout_s = 3600.0
    made = episodes(script)
    following = asyncio.ensure_future(made.follow(turn("ab")))
    await script.hanging.wait()
    made.cut([7, 8])  # it has no sample 8
    ended = await following
    assert isinstance(ended, Completion) and ended.finish_reason == "cut" and ended.turns == 1
    assert script.closed == 1
    script = Script()
    made = episodes(script)
    made.cut([7])
    ended = await made.follow(turn("ab"))
    assert isinstance(ended, Completion) and ended.finish_reason == "cut"
    assert not script.asked
