"""Weights from the adapter to its SGLang server: buckets of tensors, broadcast in a process group of two over Gloo.

The server allocates what it is asked to expect, receives tensor after tensor and puts them in place when the bucket is
complete; no end holds all weights twice. The last bucket carries the version; on a server that wants it so, all stand
between begin and end of one update.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from engines.loading import ExpectedWeights, apart, next_bucket, only_partly
from engines.sglang.client import SGLangClient, both
from engines.stores import listening_store

_LINK_TIMEOUT_S = 120.0  # of one broadcast
_LOOK_AGAIN_S = 0.005
_SOURCE, _SERVER = 0, 1
"""Ranks."""

Bucket = list[tuple[str, torch.Tensor]]


class PartialWeightUpdate(RuntimeError):
    """The server refused weights or broke off."""


class SGLangWeightSender:
    """The adapter's side of SGLang's weight updates. model: of the same shape as the server's; not kept. brackets: the
    server's dialect. bucket_bytes: of a bucket at most; a larger tensor travels alone. `incomplete` says so where the
    server may hold a mixture of two versions: it must not generate before it has a complete one."""

    incomplete: str | None = None

    def __init__(self, model: torch.nn.Module, client: SGLangClient, *, brackets: bool, bucket_bytes: int) -> None:
        self._client, self._brackets, self._bucket_bytes = client, brackets, bucket_bytes
        self._expected = ExpectedWeights(model, client.owner)
        self._name = ""
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None

    async def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights of the server; it hears nothing where the iterable raises before a bucket is full.

        Raises:
            ValueError: as `ExpectedWeights.checked`. PartialWeightUpdate: the server refused, broke off or did not
            answer in time.
        """
        travelling = self._buckets(version, weights)
        bucket = await next_bucket(travelling)
        if bucket is None:
            return
        self.incomplete = only_partly(self._client.owner, version)
        await self._bracketed(self._begin)
        try:
            await self._send_all(version, bucket, travelling)
        finally:
            await self._bracketed(self._end)
        self.incomplete = None

    async def _begin(self) -> None:
        if self._group is None:
            await self._meet()
        if self._brackets:
            await self._client.post("/begin_weight_update", {"selector": "all"})

    async def _end(self) -> None:
        if self._brackets:
            await self._client.post("/end_weight_update")

    async def _bracketed(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except RuntimeError as error:
            self._group = None  # where one end broke off, the two cannot go on
            raise PartialWeightUpdate(str(error)) from error

    def _buckets(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        """Copies on the host. Reads the weights to their end, whatever becomes of the buckets."""
        bucket: Bucket = []
        size = 0
        for name, tensor in apart(self._expected.checked(version, weights)):
            if bucket and size + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
            size += tensor.nbytes
        if bucket:
            yield bucket

    async def _send_all(self, version: int, first: Bucket, travelling: Iterator[Bucket]) -> None:
        """Send all buckets; the last one carries the version, so one is read before the one before it leaves."""
        bucket: Bucket | None = first
        while bucket is not None:
            after = await next_bucket(travelling)
            await self._bracketed(partial(self._send, bucket, version if after is None else None))
            bucket = after

    async def _send(self, bucket: Bucket, version: int | None) -> None:
        """Returns when the server has loaded the bucket."""
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,  # with samples under way it would kill the server
        }
        if version is not None:
            body["weight_version"] = str(version)
        post = asyncio.create_task(self._client.post("/update_weights_from_distributed", body))
        sent = asyncio.create_task(asyncio.to_thread(self._broadcast, [tensor for _, tensor in bucket]))
        await both(post, sent)

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _SOURCE, 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()

    async def _meet(self) -> None:
        """A group of this process and the server, under a name of its own: a server cannot use one twice."""
        timeout_s = min(_LINK_TIMEOUT_S, self._client.timeout_s)
        host = _own_address(self._client.url)
        self._name = f"cadence-{uuid.uuid4().hex}"
        self._store = store = listening_store(host, 2, timeout_s)
        body = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": _SERVER,
            "world_size": 2,
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
        joined = asyncio.create_task(asyncio.to_thread(_join, store, self._name, host, timedelta(seconds=timeout_s)))
        await both(post, joined)
        self._group = joined.result()


def _join(store: dist.Store, name: str, host: str, timeout: timedelta) -> dist.ProcessGroup:
    """Join a Gloo group with torch.distributed's nested prefixes for its name, which is how the server joins."""
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(prefixed, _SOURCE, 2, options))


def _own_address(url: str) -> str:
    """The address of this machine that the server at `url` can reach."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # of a datagram: nothing is sent
        return str(probe.getsockname()[0])
