"""Weights from the adapter's process to vLLM's workers, whole to each: these map the adapter's buckets, on a GPU or the
host, so that nothing travels but to other GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from engines.buckets import buckets
from engines.loading import ExpectedWeights, next_bucket, only_partly
from engines.merging import whole_weights
from harness.protocols import TransferError, TransferOffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engines.vllm.options import Options
    from engines.vllm.process import VLLMProcess


class VLLMWeightSender:
    """The adapter's side of vLLM's weight transfer. vLLM puts each bucket in place as it comes, none beside."""

    def __init__(
        self, process: VLLMProcess, model: PreTrainedModel, device: torch.device, name: str, options: Options
    ) -> None:
        self._process, self._device, self._name, self._options = process, device, name, options
        self._expected = ExpectedWeights(model, f"engine {name}")
        self.incomplete: str | None = None
        """The message where vLLM got a part of a set, and not the rest; None where it has a whole one."""

    async def join(self, offer: TransferOffer, number: int) -> None:
        """Let vLLM's workers become receivers of the trainer: `harness.protocols.ReceivingEngine`."""
        self._expected.require(offer.shapes)
        if self._process.base is not None:
            offer = self._process.base.offer(offer)
        failures = await self._process.ask_workers("join_transfer", path=offer.join, data=offer.data, number=number)
        if any(failures):
            raise TransferError(next(filter(None, failures)))

    async def receive(self, version: int) -> None:
        """Have vLLM's workers take `version` from the trainer. Raises TransferError where it did not arrive whole."""
        await self._process.ask("start a weight update", self._process.llm.start_weight_update())
        before, self.incomplete = self.incomplete, only_partly(f"engine {self._name}", version)
        answers = await self._process.ask_workers("receive_weights", version=version)
        failures = [failure for failure, _ in answers if failure is not None]
        if failures:
            if not any(touched for _, touched in answers):
                self.incomplete = before
            await self._process.tell_worker("abandon_weight_update")
            raise TransferError(failures[0])
        await self._finish(version)

    async def _finish(self, version: int) -> None:
        await self._process.ask("finish a weight update", self._process.llm.finish_weight_update(str(version)))
        self.incomplete = None

    async def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all weights, and have vLLM use and count them as `version`. Where the iterable raises before a bucket is
        full, vLLM keeps what it had; later it is `incomplete`. It is read in a thread, to its end.

        Raises ValueError as `ExpectedWeights.checked`.
        """
        await self._process.ask("start a weight update", self._process.llm.start_weight_update())
        try:
            await self._send_all(version, weights)
        except BaseException:
            await self._process.tell_worker("abandon_weight_update")
            raise
        await self._finish(version)

    async def _send_all(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        whole = whole_weights(self._process.base, self._expected.checked(version, weights), self._device)
        travelling = buckets(whole, self._device, self._options.weight_bucket_bytes)
        while (bucket := await next_bucket(travelling)) is not None:
            self.incomplete = only_partly(f"engine {self._name}", version)
            request = WeightTransferUpdateRequest(bucket.described() | {"handle": bucket.handle()})
            await self._process.ask("take a bucket of weights", self._process.llm.update_weights(request))
