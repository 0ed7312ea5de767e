"""Random faults over simulated runs, and afterwards what is promised of them."""

import asyncio
import io
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from harness.acceptance.chaos.processes import FaultyQueue, Process
from harness.acceptance.chaos.simulated import Chaos, ChaosCampaign, page, play, run_campaign
from harness.cli.acceptance import chaos
from harness.config.registries import SCHEDULES
from harness.runtime.runtime import WorkerDied
from harness.runtime.virtual_runtime import run_virtual
from harness.transfer_queue import QueueSpec, TaskSpec
from tests.support.local_queue import COLUMNS, ids, rewards, soon


@pytest.mark.slow
def test_a_seed_with_faults_keeps_its_promises_and_can_be_repeated(tmp_path: Path) -> None:
    first, again = (play(46, tmp_path / name) for name in ("first", "again"))
    assert first.problems == [] and first.faults > 0
    assert (first.struck, first.told) == (again.struck, again.told)


@pytest.mark.slow
def test_every_schedule_keeps_its_promises_whatever_happens(tmp_path: Path) -> None:
    campaign = ChaosCampaign(first=1000, seeds=3 * len(SCHEDULES))
    run_campaign(campaign, limit_s=600)
    assert [(one.seed, one.problems) for one in campaign.failed] == [] and campaign.skipped == 0
    assert {"cut", "dies", "engine dies", "stands still", "loses weights"} < campaign.struck.keys()


def test_a_seed_that_failed_is_named_with_the_command_that_repeats_it() -> None:
    failed = Chaos(7, "half_step", struck=Counter(cut=1), problems=["iteration 2 trained 3 samples of 8"])
    text = page(ChaosCampaign(7, 1, done=[failed]))
    assert "cadence chaos first=7 seeds=1" in text and "- iteration 2 trained 3 samples of 8" in text


def test_a_machine_too_busy_to_end_what_it_began_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(campaign: ChaosCampaign, limit_s: float, told: object) -> None:
        campaign.done.append(Chaos(7, "half_step"))
        raise TimeoutError("waited 5520 s for simulated chaos")

    monkeypatch.setattr("harness.acceptance.chaos.simulated.run_campaign", half)
    said = io.StringIO()
    assert chaos(["first=7", "seeds=2"], tmp_path, Console(file=said, width=200)) == 1
    assert "waited 5520 s for simulated chaos: a run that had begun did not end" in said.getvalue()
    assert "1 simulated runs" in (tmp_path / "chaos/simulated.md").read_text()


def test_what_crosses_an_edge_of_a_slow_process_keeps_its_order() -> None:
    async def main() -> None:
        process, came = Process("device[0]", Random(0)), list[int]()
        process.be_slow(5.0, 1.0)

        async def note(number: int) -> None:
            came.append(number)

        def call(number: int) -> Coroutine[Any, Any, Any]:
            return process.carry_out("actor[0]", "note", lambda: note(number))

        await asyncio.gather(*(call(number) for number in range(50)))
        assert came == list(range(50)) and asyncio.get_running_loop().time() > 5.0

    run_virtual(main())


def test_a_process_that_stands_still_answers_when_it_goes_on_and_one_that_died_never() -> None:
    async def main() -> None:
        process = Process("device[0]", Random(0))
        process.stand_still(3.0)
        await process.carry_out("actor[0]", "sleep", lambda: asyncio.sleep(0))
        assert asyncio.get_running_loop().time() == 3.0
        call = asyncio.create_task(process.carry_out("actor[0]", "train", lambda: asyncio.sleep(100)))
        await asyncio.sleep(1)
        process.die("killed by signal 9")
        with pytest.raises(WorkerDied, match=r"actor\[0\] died during train: killed by signal 9"):
            await call
        with pytest.raises(WorkerDied, match=r"actor\[0\] died before train: killed by signal 9"):
            await process.carry_out("actor[0]", "train", lambda: asyncio.sleep(0))

    run_virtual(main())


def test_a_call_that_is_given_up_in_the_moment_of_a_death_is_given_up_and_meets_no_death() -> None:
    async def main() -> None:
        process = Process("device[0]", Random(0))
        call = asyncio.create_task(process.carry_out("rollout[0]", "stream", lambda: asyncio.sleep(100)))
        await asyncio.sleep(1)
        process.die("killed by signal 9")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run_virtual(main())


@pytest.mark.parametrize("steps", range(12))
def test_what_a_queue_hands_to_a_call_that_was_given_up_is_there_for_others(steps: int) -> None:
    async def main() -> None:
        spec = QueueSpec(COLUMNS, {"score": TaskSpec(("reward",))})
        queue = FaultyQueue(spec, Process("queue", Random(0)), Process("driver", Random(0)))
        await queue.create_partition("train_0", [0])
        one, other = (queue.seen_from(Process(name, Random(0))) for name in ("one", "other"))
        given_up = await soon(one.get("score", 1, consumer="one"))
        await queue.put("train_0", [0], rewards([0]))
        for _ in range(steps):
            await asyncio.sleep(0)
        given_up.cancel()
        (found,) = await asyncio.gather(given_up, return_exceptions=True)
        if isinstance(found, asyncio.CancelledError):
            assert ids(await other.get("score", 1, consumer="other", timeout_s=10.0)) == [0]

    run_virtual(main())
