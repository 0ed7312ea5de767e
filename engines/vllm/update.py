"""A weight update of a vLLM engine, from end to end: all of a version, or none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from engines.loading import ExpectedWeights
from engines.vllm.link import Bucket, CudaLink, GlooLink, buckets, link_to
from engines.vllm.options import Options
from engines.vllm.process import VLLMProcess

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


class WeightUpdate:
    """The adapter's side of vLLM's weight transfer. Weights are used when all of them have come, and no sooner."""

    def __init__(
        self, process: VLLMProcess, model: Qwen3ForCausalLM, device: torch.device, name: str, options: Options
    ) -> None:
        self._process, self._device, self._name, self._options = process, device, name, options
        self._expected = ExpectedWeights(model, f"engine {name}")
        self._link: GlooLink | CudaLink | None = None
        self.torn: str | None = None
        """What there is to say where vLLM failed while it put a complete set in place; None where it did not."""

    async def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send all weights, and have vLLM use and count them as `version`. Where the iterable raises, or the set does
        not fit, vLLM keeps what it had. It is read in a thread, to its end.

        Raises ValueError as `ExpectedWeights.checked`.
        """
        await self._process.ask("start a weight update", self._process.llm.start_weight_update())
        try:
            await self._send_all(version, weights)
        except BaseException:
            self._link = None  # its ends may be out of step
            await self._process.tell_worker("abandon_weight_update")
            raise
        self.torn = (
            f"engine {self._name}: version {version} was put in place in part only; load a complete set of weights"
        )
        await self._process.ask("finish a weight update", self._process.llm.finish_weight_update(str(version)))
        self.torn = None

    async def _send_all(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        link = self._link = self._link or await self._connected()
        travelling = buckets(self._expected.checked(version, weights), self._device, self._options.weight_bucket_bytes)
        while (bucket := await _next(travelling)) is not None:
            await self._send(link, bucket)

    async def _connected(self) -> GlooLink | CudaLink:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        link = link_to(self._device, self._options.timeout_s)
        request = WeightTransferInitRequest(link.meeting())
        both = asyncio.gather(self._process.llm.init_weight_transfer_engine(request), asyncio.to_thread(link.open))
        try:
            await self._process.ask("join the weight link", both)
        finally:
            link.met()
        return link

    async def _send(self, link: GlooLink | CudaLink, bucket: Bucket) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(bucket.described() | {"handle": link.handle(bucket)})
        both = asyncio.gather(self._process.llm.update_weights(request), asyncio.to_thread(link.send, bucket))
        await self._process.ask("take a bucket of weights", both)


async def _next(travelling: Iterator[Bucket]) -> Bucket | None:
    """None after the last one. Whoever gives up waits for the thread, so that no one else reads beside it."""
    reading = asyncio.ensure_future(asyncio.to_thread(next, travelling, None))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait([reading])
        raise
