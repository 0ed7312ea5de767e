"""Costs of a model, of transfers and of shares; devices that take turns; a task without content."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.simulated.passes import Device, LockedDevice, SharedDevice
from harness.config import CostConfig
from harness.config.compose import compose_job
from harness.cost_model.cost import (
    TransferTimes,
    Transport,
    largest_share_s,
    offload_s,
    reload_s,
    transfer_times,
)
from harness.cost_model.shape import parameters
from harness.runtime.runtime import RealClock
from harness.runtime.virtual_runtime import LocalRole, VirtualClock, run_virtual
from harness.tasks import Task
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import Ragged
from harness.weight_sync.endpoints import HostReceiver, HostSender, WeightReceiver, WeightSender
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.simulated import SimulatedOffer, SimulatedReceiver, SimulatedSender, SimulatedTransport

TINY = compose_job(["cost=tiny_cpu"])
COST = TINY.cost
assert isinstance(COST, CostConfig)


def test_the_tiny_costs_are_those_of_its_model() -> None:
    assert COST.weight_bytes == pytest.approx(4 * parameters(TINY.model), rel=0.05)


@pytest.mark.parametrize(
    ("transport", "times"),
    [
        ("collective", TransferTimes(11.0, 0.0, 11.0)),
        ("ipc", TransferTimes(3.0, 0.0, 3.0)),
        ("host_staged", TransferTimes(3.0, 10.0, 3.0)),
    ],
)
def test_a_transfer_costs_what_its_wire_carries_at_either_end(transport: Transport, times: TransferTimes) -> None:
    cost = replace(COST, weight_bytes=100.0, network_bytes_per_s=10.0, host_bytes_per_s=50.0, sync_s=1.0, offload_s=0.5)
    assert transfer_times(cost, transport) == times
    assert (offload_s(cost), reload_s(replace(cost, reload_s=0.25))) == (2.5, 2.25)


def test_the_slowest_share_is_that_of_contiguous_parts() -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(1, 50, 1) for _ in range(13)]
    responses = [random.integers(1, 50, random.integers(1, 4)) for _ in range(13)]
    tokens = [int(p.sum() + r.sum()) for p, r in zip(prompts, responses, strict=True)]
    seconds = [0.5 * t + 0.01 * t * t for t in tokens]
    for devices in (1, 2, 5, 13, 20):
        cuts = [13 * d // devices for d in range(devices + 1)]
        expected = max(sum(seconds[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True))
        columns = Ragged.from_rows(prompts), Ragged.from_rows(responses)
        assert largest_share_s(*columns, devices, s_per_token=0.5, s_per_pair=0.01) == pytest.approx(expected)


# -- devices


def test_a_lock_on_a_file_makes_those_who_share_a_device_take_turns(tmp_path: Path) -> None:
    async def main() -> list[tuple[str, float, float]]:
        clock = VirtualClock(asyncio.get_running_loop())
        path, seen = tmp_path / "device-0", list[tuple[str, float, float]]()

        async def works(name: str, device: Device) -> None:
            await device.work(5.0)
            seen.append((name, clock.now() - 5.0, clock.now()))

        own = LockedDevice(path, clock, timeout_s=60.0)
        other = LockedDevice(path, clock, timeout_s=60.0)  # as of another process: flock is by open file
        await asyncio.gather(works("one", own), works("two", other), works("three", own))
        return seen

    seen = sorted(run_virtual(main()), key=lambda turn: turn[1])
    assert {name for name, _, _ in seen} == {"one", "two", "three"}
    for (_, _, end), (_, start, _) in zip(seen[:-1], seen[1:], strict=True):
        assert end <= start <= end + 0.01


def test_a_role_that_works_without_a_break_leaves_the_other_every_second_turn(tmp_path: Path) -> None:
    async def main() -> list[str]:
        clock = VirtualClock(asyncio.get_running_loop())
        seen: list[str] = []

        async def works(name: str) -> None:
            device = LockedDevice(tmp_path / "device-0", clock, timeout_s=60.0)
            for _ in range(4):
                await device.work(5.0)
                seen.append(name)

        await asyncio.gather(works("one"), works("two"))
        return seen

    assert run_virtual(main()) == ["one", "two"] * 4


def test_a_turn_that_never_comes_is_an_error_that_names_the_device(tmp_path: Path) -> None:
    async def main() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        path = tmp_path / "device-0"
        holder = asyncio.create_task(LockedDevice(path, clock, timeout_s=1.0).work(100.0))
        await clock.sleep(1.0)
        with pytest.raises(TimeoutError, match="waited 2 s for a turn on the device of .*device-0; another role holds"):
            await LockedDevice(path, clock, timeout_s=2.0).work(1.0)
        assert clock.now() == pytest.approx(3.0, abs=0.01)
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await LockedDevice(path, clock, timeout_s=2.0).work(1.0)  # whoever ends gives the lock back

    run_virtual(main())


async def test_devices_work_on_the_real_clock(tmp_path: Path) -> None:
    clock = RealClock.starting_now()
    for device in (SharedDevice(clock), LockedDevice(tmp_path / "device-0", clock, timeout_s=60.0)):
        start = clock.now()
        await device.work(0.002)
        assert clock.now() - start >= 0.002


def test_who_is_cancelled_on_a_device_gives_it_to_the_next() -> None:
    async def main() -> float:
        clock = VirtualClock(asyncio.get_running_loop())
        device = SharedDevice(clock)
        first, second = asyncio.create_task(device.work(10.0)), asyncio.create_task(device.work(1.0))
        await clock.sleep(3.0)
        first.cancel()
        await second
        return clock.now()

    assert run_virtual(main()) == 4.0


# -- the task


def test_a_simulated_task_is_a_task() -> None:
    task = SimulatedTask(prompt_tokens=512, max_response_tokens=100)
    _: Task = task
    problem = task.problem(3, seed=0)
    assert (problem.prompt.tolist(), problem.answer.tolist()) == ([512], [0])
    assert problem.prompt.dtype == problem.answer.dtype == np.int64
    assert task.max_prompt_tokens == 512
    score = task.score(np.array([4, 5]), problem.answer)
    assert (score.reward, score.exact_match) == (0.0, False)
    assert task.decode(np.array([4, 5])) == "<9 tokens>"
    with pytest.raises(ValueError, match="a simulated task has no text"):
        task.encode("abc")


# -- the transport


TIMES = TransferTimes(send_s=2.0, stage_s=5.0, load_s=1.0)


def test_staged_weights_arrive_in_the_background_and_are_read_once() -> None:
    async def main() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        sender = SimulatedSender(TIMES, clock)
        receiver = SimulatedOffer(TransferPlan(()), TIMES, clock).receiver(0, torch.device("cpu"))
        _: tuple[HostSender, WeightSender, HostReceiver, WeightReceiver] = (sender, sender, receiver, receiver)
        await sender.send(1, {})
        assert clock.now() == 2.0
        with pytest.raises(ValueError, match="version 1 is not in host memory; there: none"):
            receiver.staged(1)
        await asyncio.gather(sender.wait_arrived(1), receiver.stage(1))
        assert clock.now() == 7.0
        assert list(receiver.staged(1)) == []
        with pytest.raises(ValueError, match="version 1 is not in host memory"):
            receiver.staged(1)
        with pytest.raises(ValueError, match="version 2 is not under way; the last one sent is 1"):
            await sender.wait_arrived(2)
        await sender.send(2, {})
        await sender.send(3, {})  # waits until version 2 has arrived
        assert clock.now() == 9.0 + 5.0 + 2.0

    run_virtual(main())


class Worker:
    """Notes what the transport asks of it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes
        self.sender: SimulatedSender
        self.receiver: SimulatedReceiver

    async def use(self, sender: SimulatedSender) -> None:
        self.sender = sender

    async def join(self, offer: SimulatedOffer, number: int) -> None:
        self.receiver = offer.receiver(number, torch.device("cpu"))

    async def publish(self, version: int) -> list[object]:
        return await self._note("publish", self.sender.send(version, {}))

    async def stage(self, version: int) -> list[object]:
        return await self._note("stage", self.receiver.stage(version))

    async def load(self, version: int) -> list[object]:
        assert list(self.receiver.receive(version)) == []
        return await self._note("load", asyncio.sleep(TIMES.load_s))

    async def swap(self, version: int) -> list[object]:
        assert list(self.receiver.staged(version)) == []
        return await self._note("swap", asyncio.sleep(TIMES.load_s))

    async def _note(self, what: str, work: object) -> list[object]:
        start = asyncio.get_running_loop().time()
        await work  # type: ignore[misc]
        self.notes.append(f"{self.name} {what} {start:g}-{asyncio.get_running_loop().time():g}")
        return []


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        ("collective", ["engine load 0-1", "trainer publish 0-2"]),
        ("ipc", ["trainer publish 0-2", "engine load 2-3"]),
        ("host_staged", ["trainer publish 0-2", "engine stage 2-7", "engine swap 7-8"]),
    ],
)
def test_a_simulated_wire_makes_the_calls_of_the_wire_it_stands_for(transport: Transport, told: list[str]) -> None:
    async def main() -> list[str]:
        notes: list[str] = []
        trainer, engine = LocalRole("actor[0]", Worker("trainer", notes)), LocalRole("e", Worker("engine", notes))
        carrier = SimulatedTransport(transport, TIMES, VirtualClock(asyncio.get_running_loop()))
        await carrier.connect(trainer, [engine], TransferPlan(()))
        await carrier.publish([trainer], [engine], 1)
        return notes

    assert run_virtual(main()) == told
