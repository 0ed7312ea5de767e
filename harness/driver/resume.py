"""A job goes on from a checkpoint: its roles and its queue, before its schedule begins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from harness.driver.assemble import Assembly
from harness.driver.backends import RunSpec
from harness.driver.checkpoint_files import QUEUE, Checkpoint, Cut
from harness.driver.finished_rows import Finished, finished_rows
from harness.runtime.runtime import ask_all


async def go_on_from(
    checkpoint: Checkpoint, run: RunSpec, assembly: Assembly, start_clocks: Callable[[float], Awaitable[None]]
) -> None:
    """Trainers are as they were, every engine and scorer has their weights, and the queue what was in flight: of that
    what rollout had finished, and prompts of the rest. Clocks start when all has been read."""
    cut, job = checkpoint.cut, assembly.job
    for world, ranks in assembly.worlds.items():
        folder = str(checkpoint.folder / world)
        await ask_all(ranks, lambda rank, folder=folder: rank.load_state(folder, cut.version))  # type: ignore[misc]
    admitted = job.prompts.recall(cut.prompts, {one.group: one.at for one in cut.admitted}, cut.refused)
    limit_of = None if run.schedule.order == "fifo" else run.schedule.capacity(job).limit
    algorithm, prompts = run.config.algorithm, job.prompts
    finished = finished_rows(
        checkpoint.folder / QUEUE,
        admitted.keys(),
        algorithm.group_size,
        limit_of,
        prompts.first_sample if run.config.refills else None,
    )
    await start_clocks(_newest(cut, finished))
    await assembly.coordinator.distribute(cut.version)
    await assembly.coordinator.fleet.all_back()  # a schedule may deal its engines out as it begins
    if cut.kl_coefficient is not None:
        await assembly.advantages.role.go_on_with(cut.kl_coefficient)
    await prompts.restore(cut.prompts.partitions, admitted, finished)


def _newest(cut: Cut, finished: Mapping[str, Finished]) -> float:
    """Time of the newest that is kept: what was done after it is lost, and does not count."""
    return max([cut.at, *(refusal.at for refusal in cut.refused), *(kept.newest for kept in finished.values())])
