"""A job goes on from a checkpoint: its roles and its queue, before its schedule begins."""

from __future__ import annotations

from harness.driver.assemble import Assembly
from harness.driver.backends import RunSpec
from harness.driver.checkpoint_files import QUEUE, Checkpoint
from harness.driver.finished_rows import finished_rows
from harness.runtime.runtime import ask_all


async def go_on_from(checkpoint: Checkpoint, run: RunSpec, assembly: Assembly) -> None:
    """Trainers are as they were, every engine and scorer has their weights, and the queue what was in flight: of that
    what rollout had finished, and prompts of the rest."""
    cut, job = checkpoint.cut, assembly.job
    for world, ranks in assembly.worlds.items():
        folder = str(checkpoint.folder / world)
        await ask_all(ranks, lambda rank, folder=folder: rank.load_state(folder, cut.version))  # type: ignore[misc]
    await assembly.coordinator.publish(cut.version)
    admitted = {one.group: one.at for one in cut.admitted}
    limit_of = None if run.schedule.order == "fifo" else run.schedule.capacity(job).limit
    finished = finished_rows(checkpoint.folder / QUEUE, admitted.keys(), run.config.algorithm.group_size, limit_of)
    await job.prompts.restore(cut.prompts, admitted, finished)
