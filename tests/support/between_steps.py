"""An engine that dies once, between two optimizer steps of a batch whose last group it has, and the loss by which it
hears of steps."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from engines.torch.rollout import TorchRollout
from harness.protocols import Request

FOLDER = "BETWEEN_STEPS_FOLDER"
"""The variable that names the folder, there and empty, in which it is noted what happened."""
GROUPS, GROUP, BATCH = 4, 2, 4
"""Groups of a batch, each with a step of its own; samples of a group; the batch that it dies in."""
SETTINGS = (
    "engine=tests.support.between_steps:DyingEngine algorithm.correction=tests.support.between_steps:counted "
    f"algorithm.batch_groups={GROUPS} algorithm.mini_batches={GROUPS} algorithm.group_size={GROUP} "
    "algorithm.micro_batch_groups=1"
).split()


class DyingEngine(TorchRollout):
    def submit(self, requests: Sequence[Request]) -> None:
        """Of the last group of the batch it samples nothing."""
        last = range((BATCH * GROUPS + GROUPS - 1) * GROUP, (BATCH + 1) * GROUPS * GROUP)
        if not (_folder() / "died").exists() and any(request.sample_id in last for request in requests):
            self._dying = asyncio.create_task(_die())
            requests = [request for request in requests if request.sample_id not in last]
        super().submit(requests)


async def _die() -> None:
    """Once the second micro-batch of the batch is computed: after its first step."""
    computed = _folder() / "micro-batches"
    while not computed.exists() or computed.stat().st_size < BATCH * GROUPS + 2:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.01)
    (_folder() / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def counted(log_probs: torch.Tensor, _: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of a micro-batch, which is noted."""
    with (_folder() / "micro-batches").open("ab") as file:
        file.write(b".")
    return -advantages * log_probs


def _folder() -> Path:
    return Path(os.environ[FOLDER])
