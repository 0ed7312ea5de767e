"""A checkpoint that is being made, where training is faster than the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

from harness.config import CheckpointConfig
from harness.driver.checkpointing import Checkpoints


class SlowQueue:
    """Saves once it is let."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.let = asyncio.Event()

    async def save(self, folder: str) -> None:
        self.folders.append(folder)
        await self.let.wait()


async def test_a_version_made_while_the_queue_is_saved_waits_for_that_and_saves_nothing_itself(tmp_path: Path) -> None:
    queue = SlowQueue()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=2), queue=queue, worlds={}, last=9)
    await checkpoints.begin(2)
    forgetting = [asyncio.create_task(checkpoints.save_queue()) for _version in (3, 4)]
    await asyncio.sleep(0.01)
    assert len(queue.folders) == 1 and not any(task.done() for task in forgetting) and checkpoints.writing
    queue.let.set()
    await asyncio.gather(*forgetting)
    await checkpoints.save_queue()  # until it is called complete
    assert len(queue.folders) == 1 and not checkpoints.writing
