"""Gathering from the shards of a training world: the right bytes, and no more memory than a bucket on any rank."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import finalize

import pytest
import torch
from torch.distributed import TCPStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.weight_sync.plan import pack, plan_transfer, unpack
from tests.support.processes import run_in_processes

HOST, WORLD, BUCKET_BYTES = "127.0.0.1", 3, 40_000
SLACK = 4096
"""Bytes of numbers and sizes that are no weights."""


class Probe(TorchDispatchMode):
    """The most bytes of storages made under it that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if type(tensor) is torch.Tensor}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if type(tensor) is torch.Tensor and _storage(tensor)._cdata not in given:  # no view of what was there
                self._note(_storage(tensor))
        return made

    def _note(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or not size:
            return
        self._known.add(place)
        self.alive += size
        self.most = max(self.most, self.alive)
        finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.alive -= size


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def weights() -> dict[str, torch.Tensor]:
    """Rows that divide by the ranks and rows that do not, fewer rows than ranks, none, several dtypes, one large."""
    generator = torch.Generator().manual_seed(0)
    return {
        "even": torch.randn(30, 40, generator=generator),
        "odd": torch.randn(31, 7, generator=generator),
        "few": torch.randn(2, 5, generator=generator),
        "vector": torch.randn(50, generator=generator).bfloat16(),
        "large": torch.randn(100, 100, generator=generator),
        "middle": torch.randn(64, 128, generator=generator),
        "none": torch.zeros(0, 4),
        "whole": torch.arange(11),
    }


@contextmanager
def world(rank: int, port: int) -> Iterator[Any]:
    store = TCPStore(HOST, port, WORLD, False, timedelta(seconds=120), wait_for_workers=False)
    init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    yield init_device_mesh("cpu", (WORLD,))
    destroy_process_group()


def gather(rank: int, port: int, dimension: int) -> tuple[bool, int]:
    """Whether all that arrived is right (on rank 0), and the most bytes held beyond shards and bucket."""
    with world(rank, port) as mesh:
        full = weights()
        shards: Mapping[str, torch.Tensor] = {
            name: distribute_tensor(tensor, mesh, [Shard(min(dimension, tensor.ndim - 1))])
            if name != "whole"
            else tensor
            for name, tensor in full.items()
        }
        plan = plan_transfer(shards.items(), BUCKET_BYTES)
        buffer = torch.empty(plan.largest, dtype=torch.uint8) if rank == 0 else None
        fine, probe = True, Probe()
        gc.collect()
        for bucket in plan.buckets:
            with probe:
                pack(bucket, shards, buffer)
            if buffer is not None:
                fine = fine and all(torch.equal(tensor, full[name]) for name, tensor in unpack(bucket, buffer))
        assert plan.largest == 40_000
        return fine, probe.most


@pytest.fixture(scope="module")
def gathered() -> Callable[[int], list[tuple[bool, int]]]:
    def run(dimension: int) -> list[tuple[bool, int]]:
        store = TCPStore(HOST, 0, WORLD, True, timedelta(seconds=120), wait_for_workers=False)
        return run_in_processes(gather, [(rank, store.port, dimension) for rank in range(WORLD)], timeout_s=200)

    return run


def test_rows_go_straight_from_their_shards_to_their_place(gathered: Any) -> None:
    for fine, most in gathered(0):
        assert fine and most <= SLACK, "a rank held more than its shards and the bucket"


def test_any_other_layout_is_gathered_one_tensor_at_a_time(gathered: Any) -> None:
    ranks = gathered(1)
    assert all(fine for fine, _ in ranks)
    assert all(most >= 40_000 for _, most in ranks), "the probe saw nothing"
