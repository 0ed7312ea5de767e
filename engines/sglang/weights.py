"""Weights from the adapter to its SGLang server: buckets of tensors, broadcast in a process group of two over Gloo.

The server allocates what it is asked to expect, receives tensor after tensor and loads them when the bucket is
complete. The last bucket carries the version; on a server that wants it so, all stand between begin and end of one
update.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.parse
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from engines.experts import apart
from engines.loading import ExpectedWeights
from engines.sglang.client import SGLangClient, both

_LINK_TIMEOUT_S = 120.0  # of one broadcast
_LOOK_AGAIN_S = 0.005
_SOURCE, _SERVER = 0, 1
"""Ranks."""

Bucket = list[tuple[str, torch.Tensor]]


class PartialWeightUpdate(RuntimeError):
    """The server may hold a mixture of two versions: it must not generate before it has a complete one."""


class WeightSender:
    """model: of the same shape as the server's; not kept. brackets: the server's dialect. bucket_bytes: of a bucket at
    most; a larger tensor travels alone."""

    def __init__(self, model: torch.nn.Module, client: SGLangClient, *, brackets: bool, bucket_bytes: int) -> None:
        self._client, self._brackets, self._bucket_bytes = client, brackets, bucket_bytes
        self._expected = ExpectedWeights(model, client.owner)
        self._name = ""
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None

    async def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights of the server.

        They are collected first, so that the server hears nothing where the iterable raises or does not fit: for as
        long as it takes, a copy of them all is in host memory.

        Raises:
            ValueError: as `ExpectedWeights.checked`. PartialWeightUpdate: the server refused, broke off or did not
            answer in time. It may have some of the new weights.
        """
        # Reading may block in a collective: not in the thread that listens to the server.
        buckets = await asyncio.to_thread(self._collected, version, weights)
        try:
            await self._send_all(version, buckets)
        except RuntimeError as error:
            self._group = None  # where one end broke off, the two cannot go on
            raise PartialWeightUpdate(str(error)) from error

    def _collected(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Bucket]:
        buckets: list[Bucket] = [[]]
        size = 0
        for name, tensor in apart(self._expected.checked(version, weights)):
            if buckets[-1] and size + tensor.nbytes > self._bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append((name, tensor.detach().to("cpu", copy=True).contiguous()))
            size += tensor.nbytes
        return buckets

    async def _send_all(self, version: int, buckets: list[Bucket]) -> None:
        if self._group is None:
            await self._meet()
        if self._brackets:
            await self._client.post("/begin_weight_update", {"selector": "all"})
        try:
            for bucket in buckets:
                await self._send(bucket, version if bucket is buckets[-1] else None)
        finally:
            if self._brackets:
                await self._client.post("/end_weight_update")

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
        """A group of us and the server, under a name of its own: a server cannot use one twice."""
        timeout = timedelta(seconds=min(_LINK_TIMEOUT_S, self._client.timeout_s))
        host = _own_address(self._client.url)
        self._name = f"cadence-{uuid.uuid4().hex}"
        self._store = store = dist.TCPStore(host, 0, 2, True, timeout, wait_for_workers=False)
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
        joined = asyncio.create_task(asyncio.to_thread(_join, store, self._name, host, timeout))
        await both(post, joined)
        self._group = joined.result()


def _join(store: dist.Store, name: str, host: str, timeout: timedelta) -> dist.ProcessGroup:
    """As torch.distributed nests prefixes for a group of this name, which is how the server joins."""
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
