"""Weights from the adapter's process to vLLM's workers, whole to each, in buckets, by Gloo between CPUs, by CUDA IPC
on a GPU. Imports no vLLM: both ends use it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from engines.buckets import PackedBucket, buckets
from engines.gloo_groups import prove, shut_doors
from engines.loading import ExpectedWeights, next_bucket, only_partly
from engines.merging import whole_weights
from harness.protocols import TransferError, TransferOffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engines.vllm.options import Options
    from engines.vllm.process import VLLMProcess


ADAPTER = 0
"""The adapter's rank in the group of a link; those of vLLM's workers follow."""


class VLLMWeightSender:
    """The adapter's side of vLLM's weight transfer. vLLM puts each bucket in place as it comes, none beside."""

    def __init__(
        self,
        process: VLLMProcess,
        model: PreTrainedModel,
        device: torch.device,
        name: str,
        options: Options,
        *,
        workers: int = 1,
    ) -> None:
        self._process, self._device, self._name, self._options = process, device, name, options
        self._workers = workers
        self._expected = ExpectedWeights(model, f"engine {name}")
        self._link: GlooLink | CudaLink | None = None
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
            self._link = None  # its ends may be out of step
            await self._process.tell_worker("abandon_weight_update")
            raise
        await self._finish(version)

    async def _send_all(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        link = self._link = self._link or await self._connected()
        whole = whole_weights(self._process.base, self._expected.checked(version, weights), self._device)
        travelling = buckets(whole, self._device, self._options.weight_bucket_bytes)
        while (bucket := await next_bucket(travelling)) is not None:
            self.incomplete = only_partly(f"engine {self._name}", version)
            await self._send(link, bucket)

    async def _connected(self) -> GlooLink | CudaLink:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        link = _link_to(self._device, self._options.timeout_s, self._workers)
        request = WeightTransferInitRequest(link.rendezvous())
        both = asyncio.gather(self._process.llm.init_weight_transfer_engine(request), asyncio.to_thread(link.open))
        try:
            await self._process.ask("join the weight link", both)
        finally:
            link.joined()
        return link

    async def _send(self, link: GlooLink | CudaLink, bucket: PackedBucket) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(bucket.described() | {"handle": link.handle(bucket)})
        both = asyncio.gather(self._process.llm.update_weights(request), asyncio.to_thread(link.send, bucket))
        await self._process.ask("take a bucket of weights", both)


class GlooLink:
    """The adapter's end between CPUs: all meet at a file, and talk over loopback."""

    def __init__(self, timeout_s: float, workers: int) -> None:
        self._timeout_s, self._size = timeout_s, 1 + workers
        self._folder = tempfile.TemporaryDirectory(prefix="cadence-vllm-link-")
        self._store = str(Path(self._folder.name) / "store")
        self._group: dist.ProcessGroup | None = None

    def rendezvous(self) -> dict[str, Any]:
        """Fields of `WorkerRendezvous`: the store and the size of the group that the worker joins."""
        return {"store": self._store, "size": self._size, "timeout_s": self._timeout_s}

    def open(self) -> None:
        """Wait until the workers have come, at most `timeout_s`."""
        self._group = gloo_group(self._store, ADAPTER, self._size, self._timeout_s)

    def joined(self) -> None:
        """Remove the file: all are there, or one never will be."""
        self._folder.cleanup()

    def handle(self, bucket: PackedBucket) -> None:
        """None: there is nothing to map, the bytes travel."""

    def send(self, bucket: PackedBucket) -> None:
        """Send the bucket; returns when the workers have taken it."""
        assert self._group is not None, "send before open"
        broadcast(self._group, bucket.buffer[: bucket.size])


class CudaLink:
    """The adapter's end where GPUs are: workers map the adapter's bucket, and nothing travels but to other GPUs."""

    def rendezvous(self) -> dict[str, Any]:
        """Fields of `WorkerRendezvous`: there is no group to join."""
        return {"store": None, "size": 0, "timeout_s": 0.0}

    def open(self) -> None:
        """Do nothing: there is no group to join."""

    def joined(self) -> None:
        """Do nothing: there was no file."""

    def handle(self, bucket: PackedBucket) -> list[Any]:
        """The handle by which the worker maps the bucket."""
        return bucket.handle()

    def send(self, bucket: PackedBucket) -> None:
        """Do nothing: the worker maps the bucket's memory."""


def _link_to(device: torch.device, timeout_s: float, workers: int) -> GlooLink | CudaLink:
    return CudaLink() if device.type == "cuda" else GlooLink(timeout_s, workers)


def gloo_group(store: str, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """The group of all ends, over loopback whatever the environment says. Blocks until all are there."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    files = dist.FileStore(store, size)
    files.set_timeout(timedelta(seconds=timeout_s))
    with shut_doors():
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(files, rank, size, options)
        prove(group, files)
    return cast(dist.ProcessGroup, group)


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
    """Broadcast from the adapter to the workers; returns when `buffer` was read or filled."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = ADAPTER, 0
    group.broadcast([buffer], options).wait()
