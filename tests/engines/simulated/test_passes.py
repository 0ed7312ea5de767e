"""Simulated forward and training passes: how long they last; and devices that take turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.simulated.passes import Device, LockedDevice, SharedDevice, SimulatedLogProb, SimulatedTrainer
from harness.protocols import LogProbEngine, TrainBatch, TrainEngine
from harness.runtime.runtime import RealClock
from harness.runtime.virtual_runtime import VirtualClock, run_virtual
from harness.transfer_queue import Ragged
from tests.support.simulated_setting import COST, now


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.from_rows([np.array(row, np.int64) for row in rows], np.int64)


PROMPTS = ragged([10], [20], [30], [40])
RESPONSES = ragged([5], [1, 4], [10], [3, 3, 4])


def train_batch() -> TrainBatch:
    zeros = Ragged(np.zeros(7, np.float32), RESPONSES.lengths)
    return TrainBatch(PROMPTS, RESPONSES, zeros, zeros, np.zeros(4, np.float32))


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 130), (2, 90), (3, 90), (4, 50), (9, 50)])
def test_a_pass_lasts_as_long_as_the_largest_share_of_its_tokens(ranks: int, tokens: int) -> None:
    async def main() -> tuple[float, float, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        device = SharedDevice(clock)
        scorer = SimulatedLogProb(COST, device, clock=clock, ranks=ranks, load_s=2.0)
        trainer = SimulatedTrainer(COST, device, ranks=ranks)
        _: tuple[LogProbEngine, TrainEngine] = (scorer, trainer)
        log_probs = await scorer.log_probs(PROMPTS, RESPONSES)
        assert log_probs.values.dtype == np.float32 and log_probs.lengths.tolist() == [1, 2, 1, 3]
        scored = now()
        assert await trainer.accumulate(train_batch()) == {}
        trained = now()
        assert await trainer.step() == {"grad_norm": 0.0}
        assert trainer.named_parameters() == {}
        return scored, trained - scored, now() - trained

    assert run_virtual(main()) == (3.0 + 0.5 * tokens, 3.0 + 2.0 * tokens, 7.0)


def test_the_slowest_share_need_not_have_the_most_tokens() -> None:
    """Attention: four samples of 5 tokens against one of 12 and three of 2."""
    cost = replace(COST, log_prob_s_per_pair=0.25, train_s_per_pair=1.0, log_prob_call_s=1.5, train_call_s=2.5)
    prompts, responses = ragged([3], [3], [3], [3], [3], [1], [1], [1]), ragged(*[[2], [1, 1]] * 2, [9], *[[1]] * 3)

    async def main() -> tuple[float, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        device = SharedDevice(clock)
        await SimulatedLogProb(cost, device, clock=clock, ranks=2).log_probs(prompts, responses)
        scored = now()
        zeros = Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)
        batch = TrainBatch(prompts, responses, zeros, zeros, np.zeros(8, np.float32))
        await SimulatedTrainer(cost, device, ranks=2).accumulate(batch)
        return scored, now() - scored

    tokens, pairs = 12 + 3 * 2, 12**2 + 3 * 2**2
    assert run_virtual(main()) == (3.0 + 1.5 + 0.5 * tokens + 0.25 * pairs, 3.0 + 2.5 + 2.0 * tokens + pairs)


def test_a_scorer_takes_its_weights_in_their_time() -> None:
    async def main() -> tuple[int, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        scorer = SimulatedLogProb(COST, SharedDevice(clock), clock=clock, load_s=2.0)
        await scorer.load_weights(3, iter(()))
        return scorer.version, now()

    assert run_virtual(main()) == (3, 2.0)


def test_passes_on_one_device_take_turns_in_the_order_they_came() -> None:
    async def main() -> list[tuple[str, float]]:
        clock = VirtualClock(asyncio.get_running_loop())
        device, seen = SharedDevice(clock), list[tuple[str, float]]()
        scorer = SimulatedLogProb(COST, device, clock=clock)
        trainer = SimulatedTrainer(COST, device)

        async def score(name: str) -> None:
            await scorer.log_probs(ragged([4]), ragged([4]))
            seen.append((name, now()))

        async def train() -> None:
            await trainer.step()
            seen.append(("step", now()))

        await asyncio.gather(score("first"), train(), score("second"))
        return seen

    assert run_virtual(main()) == [("first", 7.0), ("step", 14.0), ("second", 21.0)]


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
