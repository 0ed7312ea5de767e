"""The rollout role where samples have several turns: what happens to those that are at their tools, on the virtual
clock."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from engines.simulated.rollout import SimulatedRollout
from harness.protocols import FINISH_REASONS
from harness.runtime.virtual_runtime import VirtualClock, run_virtual
from harness.tasks import Problem, Step
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import Column
from harness.workers.episodes import Episodes
from harness.workers.rollout import RolloutRole
from harness.workers.turns import NO_TURNS, DeviceTurns, Turns
from tests.support.role_setting import GROUP, ROWS, CountingQueue, FixedWeights, rollout_role, settle
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


TASK = SimulatedTask(10, 1000)


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
    episodes = Episodes(tools, TASK, clock, seed=0, max_tokens=None)
    return rollout_role(engine, queue, index=index, clock=clock, episodes=episodes, turns=turns), engine


def written(queue: CountingQueue) -> list[int]:
    """Every row that was put, as often as it was."""
    return sorted(row for put in queue.responses for row in put)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("asked_at", [SAYS_S - 2, SAYS_S, SAYS_S + TOOL_S / 2, SAYS_S + TOOL_S, WHOLE_S - 1])
def test_a_pause_that_drains_lasts_until_the_last_turn_of_all_that_had_begun(asked_at: float) -> None:
    """Asked for while all speak, at the very moment at which they stop, and while all are at their tools."""

    async def main() -> None:
        queue, tools = TurnsQueue(), Tools()
        role, engine = tooled(queue, tools, slots=2 * GROUP)
        rows = await queue.admit(0, TASK)
        await queue.close()
        await role.join(FixedWeights(), 0)
        running = asyncio.create_task(role.stream())
        await asyncio.sleep(asked_at)
        await role.pause("wait")
        assert tools.begun == tools.closed > 0 == tools.away == engine.running == engine.waiting
        assert now() >= WHOLE_S
        await role.load(1)
        await role.resume(below=ROWS)
        await running
        assert written(queue) == rows
        assert all(len(set(versions)) == 1 for versions in queue.versions.values()), "no sample has two policies"

    run_virtual(main())


@pytest.mark.parametrize("paused", [None, "keep", "drain"])
def test_who_retires_finishes_the_samples_that_are_at_their_tools_and_takes_no_more(paused: str | None) -> None:
    async def main() -> None:
        queue, tools = TurnsQueue(), Tools()
        role, engine = tooled(queue, tools, slots=GROUP)
        await queue.admit(0, TASK)
        running = asyncio.create_task(role.stream())
        await asyncio.sleep(SAYS_S / 2)
        asks = [asyncio.create_task(role.pause("wait" if paused == "drain" else "keep"))] if paused else []
        await asyncio.sleep(0 if paused else SAYS_S)
        asks.append(asyncio.create_task(role.retire()))
        await settle()
        begun = engine.running + tools.away
        assert begun >= GROUP and not asks[-1].done(), "it has samples to finish"
        await asyncio.gather(*asks, running)
        assert len(written(queue)) == tools.begun == tools.closed == begun < ROWS
        assert set(queue.reasons.values()) == {"stop"} and set(queue.turns.values()) == {TURNS}
        other, _ = tooled(queue, Tools(), index=1)
        await other.generate(0)
        assert written(queue) == list(range(ROWS)), "another does the rest"

    run_virtual(main())


@pytest.mark.parametrize("lost_at", [SAYS_S / 2, SAYS_S + TOOL_S / 2, WHOLE_S + 0.5])
def test_samples_of_a_lost_engine_begin_anew_on_another_and_each_is_written_once(lost_at: float) -> None:
    """Lost while all speak, while all are at their tools, and while some are written."""

    async def main() -> None:
        queue, tools = TurnsQueue(), [Tools(), Tools()]
        rows = await queue.admit(0, TASK)
        (dead, _), (alive, engine) = (tooled(queue, tools[i], index=i, slots=2 * GROUP) for i in range(2))
        losing = asyncio.create_task(dead.generate(0))
        await asyncio.sleep(lost_at)
        done = written(queue)
        losing.cancel()
        await queue.release("rollout[0]")
        await alive.generate(0)
        assert written(queue) == rows and engine.running == engine.waiting == tools[1].away == 0
        assert tools[1].begun == tools[1].closed == ROWS - len(done), "what it had not written, and the rest"
        assert Counter(queue.turns.values()) == {TURNS: ROWS}, "of none is a turn missing"
        batch = await queue.read("reward")
        assert len(batch) == ROWS
        assert not np.isnan(batch.dense("environment_reward")).any()

    run_virtual(main())


@pytest.mark.parametrize("which", [{"hang": 3}, {"fail": 3}], ids=["hangs", "raises"])
@pytest.mark.parametrize("drained", [False, True])
def test_a_tool_that_hangs_or_raises_costs_its_own_sample_only(which: dict[str, int], drained: bool) -> None:
    async def main() -> None:
        queue, tools = TurnsQueue(), Tools(**which)
        role, _ = tooled(queue, tools)
        rows = await queue.admit(0, TASK)
        await queue.close()
        await role.join(FixedWeights(), 0)
        running = asyncio.create_task(role.stream())
        if drained:
            await asyncio.sleep(SAYS_S + 1)
            await role.pause("wait")
            await role.load(1)
            await role.resume(below=ROWS)
        await running
        assert written(queue) == rows and tools.closed == ROWS
        assert Counter(queue.reasons.values()) == {"stop": ROWS - 1, "failed": 1}
        (failed,) = (row for row, reason in queue.reasons.items() if reason == "failed")
        assert queue.turns[failed] == 1 and set(queue.turns.values()) == {1, TURNS}
        assert now() == (SAYS_S + tools.step_timeout_s if "hang" in which else WHOLE_S), "others lost no time over it"

    run_virtual(main())


def test_the_device_is_others_while_all_samples_are_at_their_tools() -> None:
    async def main() -> None:
        queue, device = TurnsQueue(), DeviceTurns()
        role, _ = tooled(queue, Tools(), turns=device)
        await queue.admit(0, TASK)
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

    run_virtual(main())
