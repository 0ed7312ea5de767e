"""Who computes on a device when: in order on one device, and in the same order on all ranks of a world, which meet at
the queue: agreements in one order, counts that are waited for."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runtime.virtual_runtime import run_virtual
from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.service.meetings import Meetings
from harness.workers.engine_devices import EngineTurns, FirstDevice, OtherDevice
from harness.workers.turns import (
    ComputingRole,
    DeviceTurns,
    HeldTurn,
    NoTurns,
    PlacedTurns,
    SeveralDevices,
    Turns,
    WorldTurns,
    world_turns,
)
from tests.support.local_queue import virtual
from tests.support.role_setting import settle


class MeetingHere:
    """A `harness.workers.turns.Meeting` of this event loop; one whose queue is `gone` raises."""

    def __init__(self) -> None:
        self.meetings = Meetings()
        self.gone = asyncio.Event()

    async def agree(self, world: str, what: str, rank: int, ranks: int) -> int:
        asked = asyncio.ensure_future(self.meetings.agree(world, what, rank, ranks))
        gone = asyncio.ensure_future(self.gone.wait())
        await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not asked.done():
            asked.cancel()
            raise ConnectionError("the queue is gone")
        return asked.result()

    async def lacking(self, world: str, what: str, ranks: int) -> list[int]:
        return self.meetings.lacking(world, what, ranks)

    async def note(self, world: str, what: str, count: int) -> None:
        self.meetings.note(world, what, count)

    async def reached(self, world: str, what: str, least: int) -> int:
        return await self.meetings.reached(world, what, least)


# --- one device -------------------------------------------------------------------------------------------------------


@virtual
async def test_a_device_is_taken_in_the_order_in_which_it_was_asked_for() -> None:
    turns, seen = DeviceTurns(), list[tuple[str, float]]()

    async def compute(who: str, after: float) -> None:
        await asyncio.sleep(after)
        async with turns.turn(who):
            assert turns.holder == who
            seen.append((who, asyncio.get_running_loop().time()))
            await asyncio.sleep(10)

    await asyncio.gather(compute("c[0].x", 2), compute("a[0].x", 0), compute("b[0].x", 1), compute("a[0].y", 3))
    assert seen == [("a[0].x", 0), ("b[0].x", 10), ("c[0].x", 20), ("a[0].y", 30)]
    assert turns.holder is None


@virtual
async def test_a_loop_that_waits_for_a_device_says_who_holds_it() -> None:
    turns = DeviceTurns("device 1")

    async def wait() -> None:
        async with turns.turn("actor[0].train"):
            pass

    async with turns.turn("rollout[0].generate"):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1)
        assert turns.lines("actor[0]") == ["actor[0].train waits for device 1, which rollout[0].generate holds"]
        assert turns.lines("rollout[0]") == turns.lines("actor") == []
    await waiting
    assert turns.lines("actor[0]") == []


@virtual
async def test_a_wait_for_a_device_ends_with_an_error_and_takes_no_turn_from_others() -> None:
    turns = DeviceTurns(limit_s=5)

    async def ask(who: str, hold_s: float) -> None:
        async with turns.turn(who):
            await asyncio.sleep(hold_s)

    holding = asyncio.create_task(ask("rollout[0].generate", 6))
    await asyncio.sleep(0)
    late = asyncio.create_task(ask("actor[0].train", 1))
    await asyncio.sleep(2)
    later = asyncio.create_task(ask("reference[0].work", 1))
    said = "after 5 s actor[0].train waits for the device, which rollout[0].generate holds"
    with pytest.raises(TimeoutError, match=f"^{re.escape(said)}$"):
        await late
    await asyncio.gather(holding, later)
    assert asyncio.get_running_loop().time() == 7


@virtual
async def test_one_that_fails_or_is_cancelled_leaves_the_device() -> None:
    turns = DeviceTurns()
    with pytest.raises(ValueError):
        async with turns.turn("a[0].x"):
            raise ValueError
    holding = asyncio.create_task(asyncio.sleep(0))
    async with turns.turn("a[0].x"):
        waiting = asyncio.ensure_future(turns.turn("b[0].x").__aenter__())
        await holding
        waiting.cancel()
    async with turns.turn("c[0].x"):
        assert turns.holder == "c[0].x"


async def test_a_world_of_one_needs_its_device_only() -> None:
    device = DeviceTurns()
    assert world_turns(MeetingHere(), "actor", rank=0, ranks=1, device=device, limit_s=1) is device
    free: Turns = NoTurns()
    async with free.turn("a[0].x"), free.turn("b[0].x"):
        assert free.lines("a[0]") == []


# --- several devices, and turns that are held -------------------------------------------------------------------------


@virtual
async def test_a_worker_of_several_devices_takes_them_in_one_order_and_says_which_it_lacks() -> None:
    devices = [DeviceTurns(f"device {number}") for number in range(3)]
    left, right, every = SeveralDevices(devices[:2]), SeveralDevices(devices[1:]), SeveralDevices(devices)
    seen: list[tuple[str, float]] = []

    async def compute(who: str, turns: Turns, times: int) -> None:
        for _ in range(times):
            async with turns.turn(who):
                seen.append((who, asyncio.get_running_loop().time()))
                await asyncio.sleep(1)

    work = asyncio.gather(compute("a[0].x", left, 2), compute("b[0].x", right, 2), compute("c[0].x", every, 2))
    await asyncio.sleep(0.5)
    assert right.lines("b[0]") == ["b[0].x waits for device 1, which a[0].x holds"]
    assert every.lines("c[0]") == ["c[0].x waits for device 0, which a[0].x holds"]
    await work
    assert sorted(at for _, at in seen) == [0, 1, 2, 3, 4, 5], "all of them need device 1"


@virtual
async def test_a_turn_that_is_held_is_taken_once_and_given_back_once() -> None:
    turns = DeviceTurns()
    held = HeldTurn(turns, "rollout[0].generate")
    await asyncio.gather(held.take(), held.take())
    assert held.held and turns.holder == "rollout[0].generate"

    async def other() -> float:
        async with turns.turn("reference[0].work"):
            return asyncio.get_running_loop().time()

    waiting = asyncio.create_task(other())
    await asyncio.sleep(3)
    await asyncio.gather(held.give_back(), held.give_back())
    assert await waiting == 3 and not held.held and turns.holder is None
    await held.take()
    assert turns.holder == "rollout[0].generate"


def test_workers_that_share_devices_share_turns_and_others_have_none() -> None:
    devices = {"rollout": (0, 1, 2, 3), "actor": (0, 1, 2, 3), "actor_fwd": (4,), "reference": (4,)}
    one_each = PlacedTurns(devices, {"rollout": 4, "actor": 4, "actor_fwd": 1, "reference": 1}, limit_s=None)
    for number in range(4):
        assert one_each("rollout", number) is one_each("actor", number)
    assert one_each("actor", 0) is not one_each("actor", 1)
    assert one_each("actor_fwd", 0) is one_each("reference", 0)

    pooled = PlacedTurns(devices, {"rollout": 2, "actor": 1, "actor_fwd": 1, "reference": 1}, limit_s=None)
    whole = pooled("actor", 0)
    assert isinstance(whole, SeveralDevices)
    assert list(whole.devices) == [pooled("rollout", 0), pooled("rollout", 1)], "two devices of an engine are one"

    apart = PlacedTurns({"rollout": (0,), "actor": (1,)}, {"rollout": 1, "actor": 1}, limit_s=None)
    assert isinstance(apart("rollout", 0), NoTurns) and isinstance(apart("actor", 0), NoTurns)


# --- several ranks on a simulated clock -------------------------------------------------------------------------------

LIMIT_S = 100.0
SECONDS = st.sampled_from([0.0, 0.0, 0.0001, 0.001, 0.01, 0.1, 0.5])
WORK_OF_RANKS = ("actor.train", "reference.work", "actor_fwd.work", "actor.send")


@dataclass
class Plan:
    """Of each loop, on each rank: seconds before it asks for each turn, and seconds in it; and of a role of one rank,
    that takes its device by itself."""

    loops: Mapping[str, Sequence[Sequence[tuple[float, float]]]]
    others: Sequence[Sequence[tuple[float, float]]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.integers(2, 4))
    names = draw(st.lists(st.sampled_from(WORK_OF_RANKS), min_size=1, unique=True))
    loops = {}
    for name in names:
        turns = draw(st.integers(1, 6))
        timing = st.lists(st.tuples(SECONDS, SECONDS), min_size=turns, max_size=turns)
        loops[name] = [draw(timing) for _ in range(ranks)]
    return Plan(loops, [draw(st.lists(st.tuples(SECONDS, SECONDS), max_size=3)) for _ in range(ranks)])


@dataclass
class Seen:
    """Turns (loop, count) of each rank in its order; when each was asked for, by the rank that was last."""

    order: list[list[tuple[str, int]]]
    asked: dict[tuple[str, int], float] = field(default_factory=dict)
    inside: dict[tuple[str, int], int] = field(default_factory=dict)


async def play(plan: Plan) -> Seen:
    """A turn is a collective: it goes on once every rank has begun it, and would wait forever out of order."""
    ranks, meeting = len(plan.others), MeetingHere()
    seen, loop = Seen([[] for _ in range(ranks)]), asyncio.get_running_loop()
    everyone: dict[tuple[str, int], asyncio.Barrier] = {}

    async def collective(rank: int, name: str, turns: Turns, device: DeviceTurns) -> None:
        role, work = name.split(".")
        for count, (before, during) in enumerate(plan.loops[name][rank]):
            await asyncio.sleep(before)
            key = (name, count)
            seen.asked[key] = loop.time()
            async with turns.turn(f"{role}[{rank}].{work}"):
                assert device.holder == f"{role}[{rank}].{work}"
                seen.order[rank].append(key)
                await everyone.setdefault(key, asyncio.Barrier(ranks)).wait()
                await asyncio.sleep(during)

    async def other(rank: int, device: DeviceTurns) -> None:
        for before, during in plan.others[rank]:
            await asyncio.sleep(before)
            async with device.turn(f"rollout[{rank}].generate"):
                await asyncio.sleep(during)

    async with asyncio.TaskGroup() as tasks:
        for rank in range(ranks):
            device = DeviceTurns(limit_s=LIMIT_S)
            turns = world_turns(meeting, "actor", rank=rank, ranks=ranks, device=device, limit_s=LIMIT_S)
            for name in plan.loops:
                tasks.create_task(collective(rank, name, turns, device))
            tasks.create_task(other(rank, device))
    return seen


@given(plans())
def test_all_ranks_take_the_same_turns_first_come_first_served_whatever_comes_when(plan: Plan) -> None:
    seen = run_virtual(play(plan))
    wanted = {(name, count) for name, timing in plan.loops.items() for count in range(len(timing[0]))}
    assert set(seen.order[0]) == wanted and len(seen.order[0]) == len(wanted)
    assert all(order == seen.order[0] for order in seen.order)
    times = [seen.asked[turn] for turn in seen.order[0]]
    assert times == sorted(times), "a turn came before one that all ranks had asked for earlier"


class EngineOfTwo:
    """The two devices of an engine, and the turns of the ranks there, which are the training world."""

    def __init__(self, limit_s: float) -> None:
        meeting = MeetingHere()
        self.given_back = 0
        here, beside = (DeviceTurns(f"device {rank}", limit_s=limit_s) for rank in range(2))
        self.first = FirstDevice(here, meeting, engine=0, others=1, limit_s=limit_s)
        self.other = OtherDevice(beside, meeting, engine=0, place=1, limit_s=limit_s, give_back=self._give_back)
        shared = (self.first, self.other)
        common: Any = {"ranks": 2, "limit_s": limit_s}
        self.ranks = [world_turns(meeting, "actor", rank=r, device=shared[r], **common) for r in range(2)]
        self.engine = EngineTurns(here, self.ranks[0], self.first, together=False)

    def _give_back(self) -> None:
        self.given_back += 1


WORK = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=5)


@given(WORK, st.lists(SECONDS, min_size=1, max_size=4))
def test_an_engine_of_two_devices_has_both_after_all_that_began_there_and_never_waits_in_a_circle(
    trained: list[tuple[float, float, float]], generated: list[float]
) -> None:
    busy: set[str] = set()

    async def train(rank: int, devices: EngineOfTwo, together: asyncio.Barrier) -> None:
        for work in trained:
            await asyncio.sleep(work[rank])
            async with devices.ranks[rank].turn(f"actor[{rank}].train"):
                assert "engine" not in busy
                busy.add(f"rank {rank}")
                await together.wait()
                await asyncio.sleep(work[2] * rank)
                busy.discard(f"rank {rank}")

    async def generate(devices: EngineOfTwo) -> None:
        for seconds in generated:
            await asyncio.sleep(seconds)
            before = devices.given_back
            async with devices.engine.turn("rollout[0].generate"):
                assert devices.given_back == before + 1 and not busy
                busy.add("engine")
                await asyncio.sleep(seconds)
                busy.discard("engine")

    async def load(turns: Turns, rank: int, together: asyncio.Barrier) -> None:
        async with turns.turn(f"rollout[{rank}].load"):
            await together.wait()

    async def play() -> None:
        devices, together = EngineOfTwo(LIMIT_S), asyncio.Barrier(2)

        async def start() -> None:
            await asyncio.sleep(1.0)
            await devices.first.engine_sleeps()

        await asyncio.gather(start(), devices.other.begin())
        assert asyncio.get_running_loop().time() >= 1.0, "ranks take nothing before the engine sleeps"
        await asyncio.gather(generate(devices), *(train(rank, devices, together) for rank in range(2)))
        await asyncio.gather(load(devices.engine, 0, together), load(devices.ranks[1], 1, together))
        assert devices.given_back == len(generated) + 1, "for a load, too"

    run_virtual(play())


@virtual
async def test_an_engine_that_waits_for_its_other_devices_says_so_and_ends_by_its_limit() -> None:
    devices = EngineOfTwo(limit_s=5.0)
    with pytest.raises(TimeoutError, match="after 5 s device 1 of engine 0 waits for the engine to start"):
        await devices.other.begin()
    await devices.first.engine_sleeps()
    await devices.other.begin()
    late = asyncio.create_task(hold(devices.ranks[1], "actor[1].train", 60))
    await hold(devices.ranks[0], "actor[0].train", 0)
    waiting = asyncio.create_task(hold(devices.engine, "rollout[0].generate"))
    await asyncio.sleep(1)
    said = "rollout[0].generate waits for the other devices of engine 0, where ranks are still at work"
    assert devices.engine.lines("rollout[0]") == [said] and devices.engine.lines("actor[0]") == []
    with pytest.raises(TimeoutError, match=f"after 5 s {re.escape(said)}"):
        await waiting
    late.cancel()


def two_ranks(meeting: MeetingHere, limit_s: float = 5.0) -> tuple[list[DeviceTurns], list[WorldTurns]]:
    devices = [DeviceTurns(limit_s=limit_s) for _ in range(2)]
    told: Any = {"ranks": 2, "limit_s": limit_s}
    return devices, [WorldTurns(meeting, "actor", rank=rank, device=devices[rank], **told) for rank in range(2)]


async def hold(turns: Turns, who: str, seconds: float = 1.0) -> None:
    async with turns.turn(who):
        await asyncio.sleep(seconds)


@virtual
async def test_a_turn_that_a_rank_never_asks_for_ends_with_its_name() -> None:
    _, (first, second) = two_ranks(MeetingHere())
    await asyncio.gather(hold(first, "actor[0].train"), hold(second, "actor[1].train"))
    waiting = asyncio.create_task(hold(second, "actor[1].train"))
    await asyncio.sleep(1)
    assert second.lines("actor[1]") == ["actor[1].train waits for its turn 2 in the training world of 2"]
    with pytest.raises(TimeoutError, match=r"after 5 s actor\[1\].train waits for .* of 2; rank 0 has not asked"):
        await waiting
    assert second.lines("actor[1]") == []
    with pytest.raises(RuntimeError, match=r"actor\[1\].train was cancelled while it waited for a turn of all ranks"):
        await hold(second, "actor[1].train")


@virtual
async def test_a_turn_that_waits_for_another_says_so() -> None:
    _, ranks = two_ranks(MeetingHere())
    holding = [asyncio.create_task(hold(turns, f"actor[{rank}].train", 7)) for rank, turns in enumerate(ranks)]
    await asyncio.sleep(1)
    waiting = [asyncio.create_task(hold(turns, f"reference[{rank}].work")) for rank, turns in enumerate(ranks)]
    await asyncio.sleep(1)
    (said,) = ranks[0].lines("reference[0]")
    assert said.endswith("waits for its turn 1 in the training world of 2, now in turn 1, of actor[0].train")
    for task in waiting:
        with pytest.raises(TimeoutError, match="now in turn 1, of actor.*; all ranks have asked for it"):
            await task
    await asyncio.gather(*holding)
    await asyncio.gather(*(hold(turns, f"actor[{rank}].train") for rank, turns in enumerate(ranks)))


@virtual
async def test_a_granted_turn_that_waits_for_its_device_says_who_holds_that() -> None:
    (device, _), ranks = two_ranks(MeetingHere())
    async with device.turn("rollout[0].generate"):
        waiting = [asyncio.create_task(hold(turns, f"actor[{rank}].train")) for rank, turns in enumerate(ranks)]
        await asyncio.sleep(1)
        assert ranks[0].lines("actor[0]") == ["actor[0].train waits for the device, which rollout[0].generate holds"]
    await asyncio.gather(*waiting)


@virtual
async def test_a_loop_has_one_turn_at_a_time_and_ranks_that_lack_are_named() -> None:
    _, (first, _) = two_ranks(MeetingHere())
    waiting = asyncio.create_task(hold(first, "actor[0].train"))
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match=r"actor\[0\].train asks for a second turn before its first is over"):
        await hold(first, "actor[0].train")
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    meeting = MeetingHere()
    turns = [WorldTurns(meeting, "actor", rank=rank, ranks=70, device=DeviceTurns(), limit_s=5) for rank in range(70)]
    async with asyncio.TaskGroup() as tasks:
        for rank, one in enumerate(turns):
            tasks.create_task(hold(one, f"actor[{rank}].train"))
    with pytest.raises(TimeoutError, match="ranks 1, 2, 3, 4, 5, 6, 7, 8 and 61 more have not asked for it"):
        await hold(turns[0], "actor[0].train")


@virtual
async def test_when_the_queue_has_gone_every_wait_ends_with_its_error() -> None:
    meeting = MeetingHere()
    _, (first, _) = two_ranks(meeting)
    waiting = [asyncio.create_task(hold(first, who)) for who in ("actor[0].train", "reference[0].work")]
    await asyncio.sleep(0.1)
    meeting.gone.set()
    for task in waiting:
        with pytest.raises(ConnectionError, match="the queue is gone"):
            await task


class Role(ComputingRole):
    """Computes until it is told to end."""

    def __init__(self, name: str, device: DeviceTurns, order: list[str]) -> None:
        super().__init__(name, device)
        self.order, self.ends = order, asyncio.Event()

    async def compute(self) -> None:
        async with self.turn("work"):
            self.order.append(self.waits.owner)
            await self.ends.wait()


async def test_a_role_that_is_held_ends_its_turn_and_begins_none() -> None:
    order: list[str] = []
    role = Role("actor[0]", DeviceTurns(), order)
    first = asyncio.create_task(role.compute())
    await settle()
    holding = asyncio.create_task(role.hold())
    await settle()
    second = asyncio.create_task(role.compute())
    await settle()
    assert not holding.done() and await role.progress() == 0
    role.ends.set()
    assert await holding, "it had a turn"
    await first
    assert order == ["actor[0]"] and not second.done() and await role.progress() == 1
    assert not await role.hold(), "it has none now"
    await role.let_go()
    await second
    assert len(order) == 2 and await role.progress() == 2


async def test_a_role_that_waited_for_the_device_of_another_is_found_when_both_are_held_again() -> None:
    order: list[str] = []
    device = DeviceTurns()
    roles = [Role("reference[0]", device, order), Role("actor[0]", device, order)]
    working = [asyncio.create_task(role.compute()) for role in roles]
    await settle()
    assert order == ["reference[0]"]
    holding = asyncio.gather(*(role.hold() for role in roles))
    await settle()
    roles[0].ends.set()
    assert await holding == [True, False]
    await settle()
    again = asyncio.gather(*(role.hold() for role in roles))
    await settle()
    assert order == ["reference[0]", "actor[0]"] and not again.done()
    roles[1].ends.set()
    assert await again == [False, True]
    assert await asyncio.gather(*(role.hold() for role in roles)) == [False, False]
    await asyncio.gather(*working)


# -- where ranks meet


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), unique=True, max_size=18))
def test_what_all_ranks_asked_for_is_numbered_in_the_order_of_the_last(asked: list[tuple[int, int]]) -> None:
    async def play() -> None:
        meetings, found = Meetings(), list[tuple[int, int, int]]()

        async def ask(rank: int, what: int) -> None:
            found.append((await meetings.agree("actor", f"turn {what}", rank, 3), what, rank))

        tasks, complete = [], list[int]()
        for rank, what in asked:
            tasks.append(asyncio.create_task(ask(rank, what)))
            await asyncio.sleep(1)
            if sum(other == what for _, other in asked[: len(tasks)]) == 3:
                complete.append(what)
        assert sorted(found) == sorted((n, what, rank) for n, what in enumerate(complete, 1) for rank in range(3))
        for _, what in asked:
            there = {rank for rank, other in asked if other == what}
            lacking = [] if what in complete else [rank for rank in range(3) if rank not in there]
            assert meetings.lacking("actor", f"turn {what}", 3) == lacking
        for task in tasks:
            task.cancel()

    run_virtual(play())


@virtual
async def test_a_rank_asks_once_and_one_that_has_gone_is_answered_no_more() -> None:
    meetings = Meetings()
    gone = asyncio.create_task(meetings.agree("actor", "a", 0, 2))
    await asyncio.sleep(0)
    gone.cancel()
    for rank in (0, 2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} of 2 cannot ask for a of actor"):
            await meetings.agree("actor", "a", rank, 2)
    assert await meetings.agree("actor", "a", 1, 2) == 1
    assert await meetings.agree("critic", "a", 0, 1) == 1, "each world counts for itself"


@virtual
async def test_a_count_is_waited_for_and_never_falls() -> None:
    meetings = Meetings()
    assert await meetings.reached("engine 0", "begun", 0) == 0
    waiting = [asyncio.create_task(meetings.reached("engine 0", "begun", least)) for least in (1, 2, 9)]
    await asyncio.sleep(1)
    waiting[0].cancel()
    meetings.note("engine 0", "begun", 3)
    await asyncio.sleep(1)
    assert waiting[1].result() == 3 and not waiting[2].done()
    with pytest.raises(ValueError, match="begun of engine 0 is at 3, and cannot fall to 2"):
        meetings.note("engine 0", "begun", 2)
    waiting[2].cancel()


async def test_ranks_meet_at_the_queue_by_the_tokens_that_workers_have() -> None:
    spec = QueueSpec(columns={"reward": ColumnSpec("float32")}, tasks={"train": TaskSpec(("reward",))})
    with QueueProcess.start(spec) as process:
        first, second = process.queue.for_role("writer"), process.queue.for_role("reader")
        asked = asyncio.create_task(first.agree("actor", "a", 0, 2))
        await first.note("engine 0", "begun", 4)
        assert await second.reached("engine 0", "begun", 1) == 4
        assert await second.lacking("actor", "a", 2) == [1]
        assert [await second.agree("actor", "a", 1, 2), await asked] == [1, 1]
        late = asyncio.create_task(second.reached("engine 0", "begun", 5))
        await asyncio.sleep(0.1)
        process.kill()
        with pytest.raises(ConnectionError, match="is lost"):
            await late
