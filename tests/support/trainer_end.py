"""A trainer's end, in the process of a test, of transfers to an engine whose own processes receive them."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from harness.protocols import FromTrainer
from harness.weight_sync.endpoints import SentOffer
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import open_rendezvous
from tests.support.weight_ends import CPU, LONG_S, LOOPBACK, offer_of

LONG = 300_000
"""A vocabulary so large that its embedding, of 64 float32 a row, does not fit into the kernel's buffers: who sends more
than that knows that the receiver has begun."""


class TrainerEnd:
    """Connected to the engine; sends it what it is given, by buckets of so many bytes."""

    def __init__(self, engine: Any, sender: Any) -> None:
        self._engine, self._sender = engine, sender

    @classmethod
    async def connected(
        cls, transport: str, engine: Any, weights: Mapping[str, torch.Tensor], bucket_bytes: int = 20_000
    ) -> "TrainerEnd":
        rendezvous, store = open_rendezvous(LOOPBACK, engine.ends, LONG_S)
        offer = offer_of(transport, plan_transfer(weights.items(), bucket_bytes, checked=True), rendezvous)
        joining = asyncio.create_task(engine.join(SentOffer.of(transport, offer).for_engine(), 0))
        sender = await asyncio.to_thread(offer.sender, store, CPU)
        await joining
        offer.withdraw()
        return cls(engine, sender)

    async def bring(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises a group of what either end raised, once both have ended."""
        sending = asyncio.to_thread(lambda: asyncio.run(self._sender.send(version, weights)))
        ends = await asyncio.gather(self._engine.load_weights(version, FromTrainer()), sending, return_exceptions=True)
        if failures := [end for end in ends if isinstance(end, BaseException)]:
            raise BaseExceptionGroup(f"version {version} was not brought", failures)
