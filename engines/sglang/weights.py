"""Weights into an SGLang server: its schedulers receive them from the trainer, or get what this process has.

What this process has goes in buckets: by CUDA handles to a server on its own GPU, else as tensors over Gloo, which
servers of others know too. The server puts each bucket in place when it is complete; no end holds all weights twice.
On a server that wants it so, all stand between begin and end of one update.
"""

import asyncio
import socket
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from engines.buckets import PackedBucket, buckets
from engines.gloo_groups import listening_store, shut_doors
from engines.loading import ExpectedWeights, next_bucket, only_partly
from engines.merging import Base, whole_weights
from engines.sglang.client import Refused, SGLangClient, both
from engines.sglang.receiving import UNTOUCHED, to_join, to_receive, to_take
from harness.protocols import TransferError, TransferOffer

_LINK_TIMEOUT_S = 120.0  # of one broadcast
_LOOK_AGAIN_S = 0.005
_SOURCE, _SERVER = 0, 1
"""Ranks: of this process, and of the server's first scheduler."""


class PartialWeightUpdate(RuntimeError):
    """The server refused weights or broke off."""


class Link(Protocol):
    """The way of buckets from this process to the schedulers, and the device that they leave from."""

    device: torch.device

    def buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        """Copies of the weights. Reads them to their end, whatever becomes of the buckets."""

    async def open(self) -> None:
        """Meet the schedulers, where they have not met."""

    async def send(self, bucket: Any) -> None:
        """Returns when the server has loaded the bucket."""

    async def finish(self, version: int) -> None:
        """Have the server count what it was sent as this version."""

    def close(self) -> None:
        """Forget the other end, which broke off: the next `open` meets it anew."""


class SGLangWeightSender:
    """The adapter's side of SGLang's weight updates. model: of the same shape as the server's; not kept. base: of its
    adapters, if it has any. brackets: the server's dialect. `incomplete` says so where the server may hold a mixture of
    two versions: it must not generate before it has a complete one."""

    incomplete: str | None = None

    def __init__(
        self, model: torch.nn.Module, client: SGLangClient, link: Link, *, brackets: bool, base: Base | None = None
    ) -> None:
        self._client, self._link, self._brackets, self._base = client, link, brackets, base
        self._expected = ExpectedWeights(model, client.owner)

    async def join(self, offer: TransferOffer, number: int) -> None:
        """Let the server's schedulers become receivers of the trainer: `harness.protocols.ReceivingEngine`."""
        self._expected.require(offer.shapes)
        if self._base is not None:
            offer = self._base.offer(offer)
        await self._from_trainer(to_join(offer.join, offer.data, number))

    async def receive(self, version: int) -> None:
        """Have the schedulers take `version` from the trainer.

        Raises TransferError where it did not arrive whole; PartialWeightUpdate: the server broke off or is silent.
        """
        before, self.incomplete = self.incomplete, only_partly(self._client.owner, version)
        await self._bracketed(self._begin)
        try:
            await self._from_trainer(to_receive(version), version)
        except TransferError as error:
            if str(error).startswith(UNTOUCHED):
                self.incomplete = before
            await self._bracketed(self._end)
            raise
        await self._bracketed(self._end)
        self.incomplete = None

    async def _from_trainer(self, asked: dict[str, str], version: int | None = None) -> None:
        try:
            await _ask_schedulers(self._client, asked, version)
        except Refused as error:
            raise TransferError(error.said) from error

    async def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights of the server; it hears nothing where the iterable raises before a bucket is full.

        Raises:
            ValueError: as `ExpectedWeights.checked`. PartialWeightUpdate: the server refused, broke off or did not
            answer in time.
        """
        whole = whole_weights(self._base, self._expected.checked(version, weights), self._link.device)
        travelling = self._link.buckets(whole)
        bucket = await next_bucket(travelling)
        if bucket is None:
            return
        self.incomplete = only_partly(self._client.owner, version)
        await self._bracketed(self._link.open)
        await self._bracketed(self._begin)
        try:
            while bucket is not None:
                await self._bracketed(partial(self._link.send, bucket))
                bucket = await next_bucket(travelling)
            await self._bracketed(partial(self._link.finish, version))
        finally:
            await self._bracketed(self._end)
        self.incomplete = None

    async def _begin(self) -> None:
        if self._brackets:
            await self._client.post("/begin_weight_update", {"selector": "all"})

    async def _end(self) -> None:
        if self._brackets:
            await self._client.post("/end_weight_update")

    async def _bracketed(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except RuntimeError as error:
            self._link.close()
            raise PartialWeightUpdate(str(error)) from error


async def _ask_schedulers(client: SGLangClient, asked: dict[str, str], version: int | None = None) -> None:
    """Ask `receiving.py` in each of them. version: theirs, once they have done it."""
    body = {"zmq_handles": asked, "flush_cache": False, "weight_version": None if version is None else str(version)}
    await client.post("/update_weights_from_ipc", body)


class GlooLink:
    """A process group of this process and all schedulers; a broadcast a tensor. limit: bytes of a bucket at most; a
    larger tensor travels alone."""

    device = torch.device("cpu")

    def __init__(self, client: SGLangClient, schedulers: int, limit: int) -> None:
        self._client, self._size, self._limit = client, _SERVER + schedulers, limit
        self._name = ""
        self._group: dist.ProcessGroup | None = None

    def buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Copies on the host."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in weights:
            if bucket and size + tensor.nbytes > self._limit:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
            size += tensor.nbytes
        if bucket:
            yield bucket

    async def send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        post = asyncio.create_task(self._ask(bucket))
        sent = asyncio.create_task(asyncio.to_thread(self._broadcast, [tensor for _, tensor in bucket]))
        await both(post, sent)

    async def finish(self, version: int) -> None:
        await self._ask([], version)

    async def _ask(self, bucket: list[tuple[str, torch.Tensor]], version: int | None = None) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,  # with samples under way it would kill the server
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self._client.post("/update_weights_from_distributed", body)

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _SOURCE, 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()

    async def open(self) -> None:
        """A group under a name of its own: a server cannot use one twice."""
        if self._group is None:
            with shut_doors():
                await self._meet()

    async def _meet(self) -> None:
        timeout_s = min(_LINK_TIMEOUT_S, self._client.timeout_s)
        host = _own_address(self._client.url)
        self._name = f"cadence-{uuid.uuid4().hex}"
        store = listening_store(host, self._size, timeout_s)
        body = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": _SERVER,
            "world_size": self._size,
            "group_name": self._name,
            "backend": "gloo",
        }
        keys = store.num_keys()
        post = asyncio.create_task(self._client.post("/init_weights_update_group", body))
        while not post.done() and store.num_keys() == keys:
            # Joining blocks a thread: not before the server is there, if it comes at all.
            await asyncio.wait({post}, timeout=_LOOK_AGAIN_S)
        if post.done():
            post.result()
        limit = timedelta(seconds=timeout_s)
        own = dist.TCPStore(host, store.port, self._size, False, limit, wait_for_workers=False)
        joined = asyncio.create_task(asyncio.to_thread(self._join, own, host, limit))
        await both(post, joined)
        self._group = joined.result()  # and the store is closed

    def _join(self, store: dist.Store, host: str, timeout: timedelta) -> dist.ProcessGroup:
        """Join with torch.distributed's nested prefixes for the group's name, which is how the server joins."""
        name = self._name
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return cast(dist.ProcessGroup, dist.ProcessGroupGloo(prefixed, _SOURCE, self._size, options))

    def close(self) -> None:
        self._group = None


class CudaLink:
    """Schedulers that were started here map this process's bucket on `device`: nothing travels but to other GPUs."""

    def __init__(self, client: SGLangClient, device: torch.device, limit: int) -> None:
        self._client, self.device, self._limit = client, device, limit

    def buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[PackedBucket]:
        """The next one uses the memory of the one before."""
        return buckets(weights, self.device, self._limit)

    async def open(self) -> None:
        """Do nothing: there is nobody to meet."""

    async def send(self, bucket: PackedBucket) -> None:
        await _ask_schedulers(self._client, to_take(bucket))

    async def finish(self, version: int) -> None:
        await _ask_schedulers(self._client, {}, version)

    def close(self) -> None:
        """Do nothing: there was nothing to open."""


def _own_address(url: str) -> str:
    """The address of this machine that the server at `url` can reach."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # of a datagram: nothing is sent
        return str(probe.getsockname()[0])
