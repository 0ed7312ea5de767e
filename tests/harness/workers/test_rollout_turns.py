"""Samples of several turns: what happens to those at their tools, on the virtual clock; what an environment answers,
and how a sample ends."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from engines.simulated.rollout import SimulatedRollout
from harness.config.registries import find
from harness.protocols import FINISH_REASONS, Completion, Request
from harness.runtime.virtual_runtime import VirtualClock
from harness.tasks import Problem, Step, Task, environment_of
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import Column
from harness.workers.episodes import Episodes
from harness.workers.rollout import RolloutRole
from harness.workers.turns import NO_TURNS, DeviceTurns, Turns
from tests.support.local_queue import virtual
from tests.support.role_setting import GROUP, ROWS, CountingQueue, FixedWeights, TickingClock, rollout_role, settle
from tests.support.simulated_setting import make_engine

SAYS_S, TOOL_S, TURNS = 8.0, 10.0, 3
"""A turn is 8 tokens, of a second each; then its tool takes 10 s."""
WHOLE_S = TURNS * SAYS_S + (TURNS - 1) * TOOL_S
"""Of a sample that nothing holds up."""


class Tools:
    """Answers until the third turn, which ends the sample. hang, fail: which sample's tools do, counted from 0 as they
    begin."""

    max_turns, step_timeout_s = 9, 60.0

    def __init__(self, hang: int | None = None, fail: int | None = None) -> None:
        self.hang, self.fail = hang, fail
        self.begun = self.closed = self.away = 0

    async def reset(self, problem: Problem, seed: int) -> list[int]:
        self.begun += 1
        return [self.begun - 1, 0]

    async def step(self, state: list[int], action: str) -> Step:
        state[1] += 1
        if state[0] == self.hang:
            await asyncio.Event().wait()
        if state[0] == self.fail:
            raise RuntimeError("no such tool")
        if state[1] == TURNS:
            return Step("", done=True, reward=1.0)
        self.away += 1
        await asyncio.sleep(TOOL_S)
        self.away -= 1
        return Step("<5 tokens>", done=False)

    async def close(self, state: list[int]) -> None:
        self.closed += 1


SIMULATED = SimulatedTask(10, 1000)


class TurnsQueue(CountingQueue):
    """Remembers how the samples that were put had ended."""

    def __init__(self) -> None:
        super().__init__(environment=True)
        self.reasons: dict[int, str] = {}
        self.turns: dict[int, int] = {}

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        rows = list(rows)
        if "response" in columns:
            reasons, turns = columns["finish_reason"], columns["turns"]
            assert isinstance(reasons, np.ndarray) and isinstance(turns, np.ndarray)
            self.reasons |= {row: FINISH_REASONS[reason] for row, reason in zip(rows, reasons, strict=True)}
            self.turns |= dict(zip(rows, turns.tolist(), strict=True))
        await super().put(partition, rows, columns)


def tooled(
    queue: CountingQueue, tools: Tools, *, index: int = 0, slots: int = ROWS, turns: Turns = NO_TURNS
) -> tuple[RolloutRole, SimulatedRollout]:
    """A role whose samples have 8 tokens a turn."""
    clock = VirtualClock(asyncio.get_running_loop())
    engine = make_engine(*[int(SAYS_S)] * 3 * ROWS, slots=slots)
    episodes = Episodes(tools, SIMULATED, clock, seed=0, max_tokens=None)
    return rollout_role(engine, queue, index=index, clock=clock, episodes=episodes, turns=turns), engine


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("asked_at", [SAYS_S - 2, SAYS_S, SAYS_S + TOOL_S / 2, SAYS_S + TOOL_S, WHOLE_S - 1])
@virtual
async def test_a_pause_that_drains_lasts_until_the_last_turn_of_all_that_had_begun(asked_at: float) -> None:
    """Asked for while all speak, at the very moment at which they stop, and while all are at their tools."""

    queue, tools = TurnsQueue(), Tools()
    role, engine = tooled(queue, tools, slots=2 * GROUP)
    rows = await queue.admit(0, SIMULATED)
    await queue.close()
    await role.use(FixedWeights())
    running = asyncio.create_task(role.stream())
    await asyncio.sleep(asked_at)
    await role.pause("wait")
    assert tools.begun == tools.closed > 0 == tools.away == engine.running == engine.waiting
    assert now() >= WHOLE_S
    await role.load(1)
    await role.resume(below=ROWS)
    await running
    assert queue.written() == rows
    assert all(len(set(versions)) == 1 for versions in queue.versions.values()), "no sample has two policies"


@pytest.mark.parametrize("paused", [None, "keep", "drain"])
@virtual
async def test_who_retires_finishes_the_samples_that_are_at_their_tools_and_takes_no_more(paused: str | None) -> None:
    queue, tools = TurnsQueue(), Tools()
    role, engine = tooled(queue, tools, slots=GROUP)
    await queue.admit(0, SIMULATED)
    running = asyncio.create_task(role.stream())
    await asyncio.sleep(SAYS_S / 2)
    asks = [asyncio.create_task(role.pause("wait" if paused == "drain" else "keep"))] if paused else []
    await asyncio.sleep(0 if paused else SAYS_S)
    asks.append(asyncio.create_task(role.retire()))
    await settle()
    begun = engine.running + tools.away
    assert begun >= GROUP and not asks[-1].done(), "it has samples to finish"
    await asyncio.gather(*asks, running)
    assert len(queue.written()) == tools.begun == tools.closed == begun < ROWS
    assert set(queue.reasons.values()) == {"stop"} and set(queue.turns.values()) == {TURNS}
    other, _ = tooled(queue, Tools(), index=1)
    await other.generate(0)
    assert queue.written() == list(range(ROWS)), "another does the rest"


@pytest.mark.parametrize("lost_at", [SAYS_S / 2, SAYS_S + TOOL_S / 2, WHOLE_S + 0.5])
@virtual
async def test_samples_of_a_lost_engine_begin_anew_on_another_and_each_is_written_once(lost_at: float) -> None:
    """Lost while all speak, while all are at their tools, and while some are written."""

    queue, tools = TurnsQueue(), [Tools(), Tools()]
    rows = await queue.admit(0, SIMULATED)
    (dead, _), (alive, engine) = (tooled(queue, tools[i], index=i, slots=2 * GROUP) for i in range(2))
    losing = asyncio.create_task(dead.generate(0))
    await asyncio.sleep(lost_at)
    done = queue.written()
    losing.cancel()
    await queue.release("rollout[0]")
    await alive.generate(0)
    assert queue.written() == rows and engine.running == engine.waiting == tools[1].away == 0
    assert tools[1].begun == tools[1].closed == ROWS - len(done), "what it had not written, and the rest"
    assert Counter(queue.turns.values()) == {TURNS: ROWS}, "of none is a turn missing"
    batch = await queue.read("reward")
    assert len(batch) == ROWS
    assert not np.isnan(batch.dense("environment_reward")).any()


@pytest.mark.parametrize("which", [{"hang": 3}, {"fail": 3}], ids=["hangs", "raises"])
@pytest.mark.parametrize("drained", [False, True])
@virtual
async def test_a_tool_that_hangs_or_raises_costs_its_own_sample_only(which: dict[str, int], drained: bool) -> None:
    queue, tools = TurnsQueue(), Tools(**which)
    role, _ = tooled(queue, tools)
    rows = await queue.admit(0, SIMULATED)
    await queue.close()
    await role.use(FixedWeights())
    running = asyncio.create_task(role.stream())
    if drained:
        await asyncio.sleep(SAYS_S + 1)
        await role.pause("wait")
        await role.load(1)
        await role.resume(below=ROWS)
    await running
    assert queue.written() == rows and tools.closed == ROWS
    assert Counter(queue.reasons.values()) == {"stop": ROWS - 1, "failed": 1}
    (failed,) = (row for row, reason in queue.reasons.items() if reason == "failed")
    assert queue.turns[failed] == 1 and set(queue.turns.values()) == {1, TURNS}
    assert now() == (SAYS_S + tools.step_timeout_s if "hang" in which else WHOLE_S), "others lost no time over it"


@virtual
async def test_the_device_is_others_while_all_samples_are_at_their_tools() -> None:
    queue, device = TurnsQueue(), DeviceTurns()
    role, _ = tooled(queue, Tools(), turns=device)
    await queue.admit(0, SIMULATED)
    await queue.close()
    running = asyncio.create_task(role.stream())
    await asyncio.sleep(SAYS_S + 1)
    assert device.holder is None
    async with device.turn("reference[0].work"):
        await asyncio.sleep(TOOL_S + 1)  # they come back meanwhile, and wait for it
    await settle()
    assert device.holder == "rollout[0].generate"
    await running
    assert device.holder is None and now() == WHOLE_S + 2


# -- what an environment answers, and how a sample ends


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
