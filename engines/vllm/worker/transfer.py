"""The worker's end of the weight link: buckets by Gloo on a CPU, by CUDA IPC on a GPU, as one of vLLM's backends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from engines.vllm.weights import ADAPTER, broadcast, gloo_group, shared_tensor


@dataclass
class Rendezvous(WeightTransferInitInfo):
    """store: the file at which `size` CPU processes meet; None on a GPU, where memory is mapped."""

    store: str | None
    size: int
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """What is in a bucket of `size` bytes, and where; `handle`: how to map it, where it does not travel."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    size: int
    handle: list[Any] | None


class BucketTransfer(WeightTransferEngine[Rendezvous, BucketInfo]):
    """Keeps what comes until it is complete, and changes the model only then: an update that breaks off leaves it as it
    was. On a GPU vLLM's layerwise reload makes of the weights what its kernels want; on a CPU, whose layers compute
    with the plain weights, they are changed in place. Each of several workers gets all weights whole, of which the
    model's own loading takes its part."""

    init_info_cls = Rendezvous
    update_info_cls = BucketInfo
    _group: torch.distributed.ProcessGroup | None = None
    _arrived: tuple[tuple[BucketInfo, torch.Tensor], ...] = ()

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        if init_info.store is not None:
            rank = ADAPTER + 1 + get_tensor_model_parallel_rank()
            self._group = gloo_group(init_info.store, rank, init_info.size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        self._arrived = ()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the bucket is here: then the sender may use its buffer again."""
        self.receive_weights(self.parse_update_info(update_info))
        self._synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self._group is None:
            buffer = shared_tensor(update_info.handle, update_info.size).to(self.device, copy=True)
        else:
            buffer = torch.empty(update_info.size, dtype=torch.uint8)
            broadcast(self._group, buffer)
        self._arrived += ((update_info, buffer),)

    def finish_weight_update(self) -> None:
        if self.device.type != "cpu":
            initialize_layerwise_reload(self.model)
        self.model.load_weights(tensor for info, buffer in self._arrived for tensor in unpacked(buffer, info))
        if self.device.type != "cpu":
            finalize_layerwise_reload(self.model, self.model_config)
        self._synchronize()
        self._arrived = ()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        self._group, self._arrived = None, ()


def unpacked(buffer: torch.Tensor, info: BucketInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view into `buffer`) of each tensor of the bucket."""
    for name, kind, shape, start in zip(info.names, info.dtypes, info.shapes, info.offsets, strict=True):
        dtype = getattr(torch, kind)
        end = start + dtype.itemsize * math.prod(shape)
        yield name, buffer[start:end].view(dtype).view(shape)
