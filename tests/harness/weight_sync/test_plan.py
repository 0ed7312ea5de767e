"""Which tensors travel in which bucket, how they get there from their shards, and how damage is found."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.weight_sync.difference import apply, difference
from harness.weight_sync.plan import (
    TransferError,
    TransferPlan,
    _bring,
    _copies,
    all_gathered,
    digest,
    digests,
    pack,
    plan_transfer,
    unpack,
    verify,
)
from harness.weight_sync.process_group import TransferGroup, open_rendezvous
from tests.support.processes import run_in_processes
from tests.support.weight_ends import LONG_S, LOOPBACK, Weights, carried, kept, meet, met_again, offer_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
ALIGNMENT = 16

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


def make(specs: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(specs))
    return {
        f"tensor.{i}": torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(specs)
    }


def flat(plan: TransferPlan) -> list[str]:
    return [spec.name for bucket in plan.buckets for spec in bucket.tensors]


def nbytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


@given(tensors, st.integers(1, 4000))
def test_every_tensor_travels_once_in_order_in_a_bounded_bucket_at_an_aligned_place(
    specs: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    parameters = make(specs)
    plan = plan_transfer(parameters.items(), bucket_bytes)
    assert flat(plan) == list(parameters)
    for bucket in plan.buckets:
        end = 0
        for spec in bucket.tensors:
            assert spec.offset % ALIGNMENT == 0 and spec.offset >= end
            assert spec.bytes == nbytes(parameters[spec.name])
            end = spec.offset + spec.bytes
        assert end <= bucket.bytes < end + ALIGNMENT
        assert len(bucket.tensors) == 1 or end <= bucket_bytes
    assert plan.largest == max(bucket.bytes for bucket in plan.buckets)
    assert plan.bytes == sum(bucket.bytes for bucket in plan.buckets)


@given(tensors, st.integers(1, 4000))
def test_unpack_undoes_pack(specs: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int) -> None:
    parameters = make(specs)
    plan = plan_transfer(parameters.items(), bucket_bytes)
    buffer = torch.empty(plan.largest, dtype=torch.uint8)
    arrived = {}
    for bucket in plan.buckets:
        pack(bucket, parameters, buffer)
        arrived |= {name: tensor.clone() for name, tensor in unpack(bucket, buffer)}
    assert list(arrived) == list(parameters)
    for name, tensor in parameters.items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)


def test_tensors_share_a_bucket_up_to_its_last_byte() -> None:
    parameters = {str(i): torch.zeros(4) for i in range(5)}
    plan = plan_transfer(parameters.items(), bucket_bytes=32)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [2, 2, 1]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 8))
def test_senders_have_equal_shares_up_to_a_bucket(sizes: list[int], senders: int) -> None:
    parameters = {str(number): torch.zeros(size) for number, size in enumerate(sizes)}
    plan = plan_transfer(parameters.items(), bucket_bytes=256)
    shares = [0] * senders
    for bucket, owner in zip(plan.buckets, plan.owners(senders), strict=True):
        shares[owner] += bucket.bytes
    assert sum(shares) == plan.bytes and max(shares) - min(shares) <= plan.largest
    assert sorted(set(plan.owners(senders))) == list(range(min(senders, len(plan.buckets))))


def test_tied_weights_travel_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    assert flat(plan_transfer(model.named_parameters(), 1 << 20)) == ["0.weight"]


def test_what_was_packed_stays_and_a_rank_that_does_not_send_needs_all_parameters() -> None:
    parameters = {"a": torch.ones(3), "b": torch.ones(3)}
    (bucket,) = plan_transfer(parameters.items(), 1 << 20).buckets
    pack(bucket, parameters, None)
    with pytest.raises(KeyError, match="b"):
        pack(bucket, {"a": torch.ones(3)}, None)
    parameters = {"a": torch.ones(3)}
    (bucket,) = plan_transfer(parameters.items(), 1 << 20).buckets
    buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
    pack(bucket, parameters, buffer)
    parameters["a"].zero_()
    ((_, arrived),) = unpack(bucket, buffer)
    assert arrived.tolist() == [1, 1, 1]


def test_what_was_gathered_on_a_gpu_is_copied_beside_what_it_does_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what CUDA is asked for: after what made the tensor, whose memory is kept until then."""
    calls: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def wait_stream(self, other: str) -> None:
            calls.append(f"wait for {other}")

        def __enter__(self) -> None:
            calls.append("begin")

        def __exit__(self, *_: object) -> None:
            calls.append("end")

    class Tensor:
        is_cuda, device = True, torch.device("cuda", 7)

        def is_pinned(self) -> bool:
            return True

        def copy_(self, other: object, *, non_blocking: bool = False) -> None:
            calls.append(f"copy {non_blocking}")

        def record_stream(self, stream: Stream) -> None:
            calls.append("keep")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    _bring(Tensor(), Tensor())  # type: ignore[arg-type]
    _copies.cache_clear()
    assert calls == ["wait for the current one", "begin", "copy True", "end", "keep"]


# --- digests ---------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_wrong_byte_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before, at = digest(tensor), draw.draw(st.integers(0, len(data) - 1))
    tensor[at] ^= draw.draw(st.integers(1, 255))
    assert digest(tensor) != before


@pytest.mark.parametrize("size", [0, 8, 4096 * 8 - 1, 4096 * 8 * 3 + 13])
def test_the_digest_of_a_copy_is_the_same_wherever_the_words_fall_into_blocks(size: int) -> None:
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    assert digest(data) == digest(data.clone())
    if size >= 2 * 4096 * 8:
        swapped = data.clone()
        swapped[: 4096 * 8], swapped[4096 * 8 : 2 * 4096 * 8] = data[4096 * 8 : 2 * 4096 * 8], data[: 4096 * 8]
        assert digest(swapped) != digest(data)


def test_a_damaged_tensor_is_named() -> None:
    (bucket,) = plan_transfer({"a": torch.ones(9), "b": torch.ones(5), "c": torch.ones(2)}.items(), 1 << 20).buckets
    data = torch.zeros(bucket.bytes, dtype=torch.uint8)
    pack(bucket, {"a": torch.ones(9), "b": torch.ones(5), "c": torch.ones(2)}, data)
    expected = digests(bucket, data)
    verify(bucket, data, expected, version=3)
    data[bucket.tensors[1].offset + 7] ^= 1
    with pytest.raises(TransferError, match=r"version 3 arrived damaged: b$"):
        verify(bucket, data, expected, version=3)


# --- from the shards of a training world: the right bytes, and no more memory than a bucket on any rank ---------------

HOST, WORLD, GATHERED_BUCKET = "127.0.0.1", 3, 40_000
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


def sharded_weights() -> dict[str, torch.Tensor]:
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


def gather(rank: int, port: int, dimension: int, senders: int) -> tuple[bool, int, int]:
    """Whether all that arrived here is right, also where every rank gathers all; the most bytes held beyond shards and
    bucket, and how many buckets."""
    with world(rank, port) as mesh:
        full = sharded_weights()
        shards: Mapping[str, torch.Tensor] = {
            name: distribute_tensor(tensor, mesh, [Shard(min(dimension, tensor.ndim - 1))])
            if name != "whole"
            else tensor
            for name, tensor in full.items()
        }
        plan = plan_transfer(shards.items(), GATHERED_BUCKET)
        buffer, buckets = torch.empty(plan.largest, dtype=torch.uint8), 0
        fine, probe = True, Probe()
        gc.collect()
        for bucket, owner in zip(plan.buckets, plan.owners(senders), strict=True):
            with probe:
                pack(bucket, shards, buffer if rank == owner else None, owner)
            if rank == owner:
                buckets += 1
                fine = fine and all(torch.equal(tensor, full[name]) for name, tensor in unpack(bucket, buffer))
        assert plan.largest == 40_000 and len(plan.buckets) >= WORLD
        with patch.object(dist, "all_gather", wraps=dist.all_gather) as collective:
            everywhere = dict(all_gathered(shards, {}))
        assert collective.call_count == 2, "not one for each run of neighbours of one dtype"
        fine = fine and all(torch.equal(everywhere[name], tensor) for name, tensor in full.items())
        return fine, probe.most, buckets


@pytest.fixture(scope="module")
def gathered() -> Callable[[int, int], list[tuple[bool, int, int]]]:
    def run(dimension: int, senders: int) -> list[tuple[bool, int, int]]:
        store = TCPStore(HOST, 0, WORLD, True, timedelta(seconds=120), wait_for_workers=False)
        arguments = [(rank, store.port, dimension, senders) for rank in range(WORLD)]
        return run_in_processes(gather, arguments, timeout_s=200)

    return run


@pytest.mark.parametrize("senders", [1, WORLD])
def test_rows_go_straight_from_their_shards_to_their_place(gathered: Any, senders: int) -> None:
    ranks = gathered(0, senders)
    for fine, most, _ in ranks:
        assert fine and most <= SLACK, "a rank held more than its shards and the bucket"
    assert [buckets > 0 for *_, buckets in ranks] == [rank < senders for rank in range(WORLD)]


def test_of_columns_no_more_than_two_parts_are_held_besides(gathered: Any) -> None:
    ranks = gathered(1, WORLD)
    assert all(fine for fine, *_ in ranks)
    assert all(0 < most <= 2 * 40_000 // WORLD + SLACK for _, most, _ in ranks), ranks


TRANSPORTS = ("collective", "host_staged")
NUMBERS = 6000
BUCKET_BYTES = 16 << 10


def trained(version: int) -> Weights:
    """Weights of a policy, one in a hundred of which differ from those of the version before; NaN, -0 and what is
    subnormal are among them. A tensor is tied: it is there once, under one name."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "embed": torch.randn(NUMBERS, generator=generator).bfloat16(),
        "norm": torch.ones(33, dtype=torch.bfloat16),
        "head": torch.randn(NUMBERS // 10, 10, generator=generator),
        "odd": torch.arange(7, dtype=torch.uint8),
    }
    for step in range(version):
        for tensor in found.values():
            flat = tensor.view(-1)
            places = torch.randint(len(flat), (1 + len(flat) // 100,), generator=generator)
            if tensor.is_floating_point():
                flat[places] = torch.tensor([-0.0, 0.0, float("nan"), 1e-39, 1.5])[step % 5].to(tensor.dtype)
            else:
                flat[places] += 1
    return found


def bits(weights: Weights) -> dict[str, list[int]]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).tolist() for name, tensor in weights.items()}


def ends(transport: str) -> tuple[Any, Any, Any]:
    """The offer, the sender, the receiver."""
    plan = plan_transfer(trained(0).items(), BUCKET_BYTES, delta=True)
    rendezvous, store = open_rendezvous(LOOPBACK, 1, LONG_S)
    offer = offer_of(transport, plan, rendezvous)
    return offer, *meet(offer, store)


def counted(group: TransferGroup, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each broadcast of this group from now on."""
    sent: list[int] = []
    as_it_is = group.broadcast

    def broadcast(data: torch.Tensor) -> Any:
        sent.append(data.nbytes)
        return as_it_is(data)

    monkeypatch.setattr(group, "broadcast", broadcast)
    return sent


@given(st.binary(max_size=300), st.integers(0, 2**32), st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_a_difference_makes_the_new_bytes_of_the_old_and_is_never_longer(data: bytes, seed: int, share: float) -> None:
    new = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    other = torch.randint(256, new.shape, dtype=torch.uint8, generator=generator)
    held = torch.where(torch.rand(new.shape, generator=generator) < share, other, new)
    body = difference(new, held)
    assert len(body) <= len(new)
    apply(body.clone(), held)
    assert torch.equal(held, new)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_later_versions_travel_in_part_and_arrive_whole(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, sender, receiver = ends(transport)
    sent = counted(sender._group, monkeypatch)
    moved = []
    for version in range(8):
        sent.clear()
        assert bits(await carried(sender, receiver, version, trained(version))) == bits(trained(version))
        moved.append(sum(sent))
    assert moved[0] > offer.plan.bytes and max(moved[1:]) < offer.plan.bytes / 5, moved


async def test_versions_in_host_memory_stay_as_they_are_while_others_are_made_of_them() -> None:
    _offer, sender, receiver = ends("host_staged")

    async def stage(version: int) -> None:
        await sender.send(version, trained(version))
        await receiver.stage(version)

    for version in (1, 2, 3, 4, 5, 6):
        await stage(version)
        if version == 4:
            assert bits(kept(receiver.staged(4))) == bits(trained(4))
        elif version in (2, 6):  # the one before was made into this one, and was not loaded
            assert bits(kept(receiver.staged(version - 1))) == bits(trained(version - 1))
    assert bits(kept(receiver.staged(6))) == bits(trained(6))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_receiver_that_holds_anything_else_gets_all(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, sender, receiver = ends(transport)
    await carried(sender, receiver, 1, trained(1))
    held = receiver._last[0] if transport == "host_staged" else next(iter(receiver._held._held.values()))
    held[0] ^= 1
    with pytest.raises(TransferError, match="version 2 .*damaged: embed"):
        await carried(sender, receiver, 2, trained(2))
    sender, receiver = met_again(offer, (sender, receiver))
    sent = counted(sender._group, monkeypatch)
    assert bits(await carried(sender, receiver, 3, trained(3))) == bits(trained(3))
    assert sum(sent) > offer.plan.bytes
