"""Forward and training passes that let time pass instead of computing, and the devices that roles share for them.
Samples are run-length coded, see `engines.simulated.rollout`."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from harness.config import CostConfig
from harness.cost_model.cost import largest_share_s
from harness.protocols import Clock, TrainBatch
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    import torch


_LOOK_AGAIN_S = 0.001


class Device(Protocol):
    """A device, or several that always work together."""

    async def work(self, seconds: float) -> None:
        """Wait for a turn, then let so much time pass while everyone else waits."""


class SharedDevice:
    """Roles of one process take turns in the order in which they came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()

    async def work(self, seconds: float) -> None:
        async with self._turn:
            await self._clock.sleep(seconds)


class LockedDevice:
    """Roles of several processes of one host agree by locks on two files: the one that is next holds the second.

    So no role gets two turns while another waits. The system takes locks from a process that dies. Raises TimeoutError
    after `timeout_s` without a turn.
    """

    def __init__(self, path: Path, clock: Clock, *, timeout_s: float) -> None:
        self._path, self._clock, self._timeout_s = path, clock, timeout_s
        self._turn = asyncio.Lock()  # of the roles of this process

    async def work(self, seconds: float) -> None:
        async with self._turn:
            until = self._clock.now() + self._timeout_s
            with self._path.open("ab") as device:  # closing a file gives its lock back
                with self._path.with_suffix(".next").open("ab") as following:
                    await self._take(following.fileno(), until)
                    await self._take(device.fileno(), until)
                await self._clock.sleep(seconds)

    async def _take(self, descriptor: int, until: float) -> None:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock.now() >= until:
                    raise TimeoutError(
                        f"waited {self._timeout_s:g} s for a turn on the device of {self._path}; another role holds it"
                    ) from None
            await self._clock.sleep(_LOOK_AGAIN_S)


class SimulatedLogProb:
    """`harness.protocols.LogProbEngine`: data-parallel ranks that share each micro-batch; the slowest decides.

    cost: resolved for the model; load_s: what taking new weights lasts. Loading takes no turn on the device: copies run
    beside what is computed there.
    """

    def __init__(self, cost: CostConfig, device: Device, *, clock: Clock, ranks: int = 1, load_s: float = 0.0) -> None:
        self._cost, self._clock, self._load_s = cost, clock, load_s
        self._device, self._ranks = device, ranks
        self.version = 0

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Zeros, a value per run."""
        cost = self._cost
        share_s = largest_share_s(
            prompts,
            responses,
            self._ranks,
            s_per_token=cost.log_prob_s_per_token,
            s_per_pair=cost.log_prob_s_per_pair,
        )
        await self._device.work(cost.call_s + cost.log_prob_call_s + share_s)
        return Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        start = self._clock.now()
        for _ in weights:
            pass
        await self._clock.sleep(max(0.0, self._load_s - (self._clock.now() - start)))
        self.version = version


class SimulatedTrainer:
    """`harness.protocols.TrainEngine`: one rank, or (ranks > 1) a whole training world in one.

    cost: resolved for the model. A world cuts each micro-batch into contiguous parts of nearly equal counts and waits
    for the slowest. `parameters` are what it offers to send, if anything; they never change.
    """

    def __init__(
        self,
        cost: CostConfig,
        device: Device,
        *,
        ranks: int = 1,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._cost, self._device, self._ranks = cost, device, ranks
        self._parameters = dict(parameters or {})

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        """No sums: nothing was computed that a policy metric could be made of."""
        cost = self._cost
        share_s = largest_share_s(
            batch.prompts,
            batch.responses,
            self._ranks,
            s_per_token=cost.train_s_per_token,
            s_per_pair=cost.train_s_per_pair,
        )
        await self._device.work(cost.call_s + cost.train_call_s + share_s)
        return {}

    async def step(self) -> dict[str, float]:
        await self._device.work(self._cost.train_step_s)
        return {"grad_norm": 0.0}

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._parameters)
