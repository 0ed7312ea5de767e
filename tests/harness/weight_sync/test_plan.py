from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.weight_sync.plan import TransferPlan, pack, plan_transfer, unpack

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


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    parameters = {"small": torch.zeros(4), "large": torch.zeros(100), "small too": torch.zeros(4)}
    plan = plan_transfer(parameters.items(), bucket_bytes=64)
    assert [[spec.name for spec in bucket.tensors] for bucket in plan.buckets] == [["small"], ["large"], ["small too"]]
    assert plan.largest == 400


def test_tensors_share_a_bucket_up_to_its_last_byte() -> None:
    parameters = {str(i): torch.zeros(4) for i in range(5)}
    plan = plan_transfer(parameters.items(), bucket_bytes=32)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [2, 2, 1]


def test_dtypes_mix_in_a_bucket_without_a_tensor_at_an_odd_place() -> None:
    parameters = {"byte": torch.ones(3, dtype=torch.uint8), "long": torch.arange(3), "half": torch.ones(1).bfloat16()}
    (bucket,) = plan_transfer(parameters.items(), bucket_bytes=1 << 20).buckets
    assert [spec.offset for spec in bucket.tensors] == [0, 16, 48]


def test_tied_weights_travel_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    assert flat(plan_transfer(model.named_parameters(), 1 << 20)) == ["0.weight"]


def test_a_rank_that_does_not_send_needs_no_buffer_but_all_parameters() -> None:
    parameters = {"a": torch.ones(3), "b": torch.ones(3)}
    (bucket,) = plan_transfer(parameters.items(), 1 << 20).buckets
    pack(bucket, parameters, None)
    with pytest.raises(KeyError, match="b"):
        pack(bucket, {"a": torch.ones(3)}, None)


def test_what_was_packed_does_not_change_with_the_parameter() -> None:
    parameters = {"a": torch.ones(3)}
    (bucket,) = plan_transfer(parameters.items(), 1 << 20).buckets
    buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
    pack(bucket, parameters, buffer)
    parameters["a"].zero_()
    ((_, arrived),) = unpack(bucket, buffer)
    assert arrived.tolist() == [1, 1, 1]
