"""Only what changed travels: the bits that arrive are those that were sent; where an end may hold anything else, all of
a bucket is sent."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.weight_sync.difference import apply, difference
from harness.weight_sync.plan import TransferError, plan_transfer
from harness.weight_sync.process_group import TransferGroup, open_rendezvous
from tests.support.weight_ends import LONG_S, LOOPBACK, Weights, carried, kept, meet, met_again, offer_of

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
