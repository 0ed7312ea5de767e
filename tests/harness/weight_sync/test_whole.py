"""All of a version or an error, on every transport: what is damaged, broken off or not read to its end."""

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.weight_sync.endpoints import HostSender, stop_reading
from harness.weight_sync.plan import TransferError, digest, digests, pack, plan_transfer, verify
from tests.support.weight_ends import Weights, carried, kept, meet, met_again, offered, plan, same, two_ends, weights

TRANSPORTS = ("collective", "ipc", "host_staged")
HANDED_OVER = ("collective", "ipc")


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


# --- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("checked", [False, True])
async def test_weights_arrive_bit_for_bit_with_and_without_digests(transport: str, checked: bool) -> None:
    ends = two_ends(transport, checked=checked)
    for version in (1, 2):
        assert same(await carried(*ends, version, weights(version)), weights(version))


class Damaging:
    """A sender's weights, one of which changes after its digest was taken: as on a transport that is no good."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: str, name: str) -> None:
        module = f"harness.weight_sync.{transport}"

        def wrong(bucket: Any, data: torch.Tensor) -> torch.Tensor:
            taken = digests(bucket, data)
            for number, spec in enumerate(bucket.tensors):
                if spec.name == name and self.times:
                    self.times -= 1
                    taken[number] += 1
            return taken

        self.times = 1
        monkeypatch.setattr(f"{module}.digests", wrong)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_damaged_tensor_is_an_error_and_the_next_transfer_is_fine(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = two_ends(transport, checked=True)
    Damaging(monkeypatch, transport, "large")
    with pytest.raises(TransferError, match="version 1 .*damaged: large"):
        await carried(*ends, 1, weights(1))
    assert same(await carried(*ends, 2, weights(2)), weights(2)), "an end was left in the middle of a transfer"


# --- what stops in the middle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", HANDED_OVER)
@pytest.mark.parametrize("read", [0, 1, 2, 6])
async def test_a_reader_that_stops_keeps_nobody_from_sending_the_next_version(transport: str, read: int) -> None:
    sender, receiver = two_ends(transport)

    def begin() -> None:
        arriving = receiver.receive(1)
        for _ in range(read):
            next(arriving)
        stop_reading(arriving)

    if read:  # who has not begun takes no part, and the sender waits for it
        sending = asyncio.to_thread(lambda: asyncio.run(sender.send(1, weights(1))))
        await asyncio.gather(sending, asyncio.to_thread(begin))
    assert same(await carried(sender, receiver, 2, weights(2)), weights(2))


@pytest.mark.parametrize("transport", HANDED_OVER)
async def test_weights_that_cannot_be_gathered_are_the_senders_error_and_end_the_receivers_wait(transport: str) -> None:
    sender, receiver = two_ends(transport)
    incomplete: Weights = {name: tensor for name, tensor in weights(1).items() if name != "whole"}
    receiving = asyncio.create_task(asyncio.to_thread(lambda: kept(receiver.receive(1))))
    with pytest.raises(KeyError, match="whole"):
        await asyncio.to_thread(lambda: asyncio.run(sender.send(1, incomplete)))
    with pytest.raises(TransferError, match="version 1 broke off"):
        await receiving


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_after_a_failure_both_sides_meet_again_and_go_on(transport: str) -> None:
    offer, store = offered(transport, checked=True)
    sender, receiver = meet(offer, store)
    sender._group.close()
    with pytest.raises(TransferError):
        await carried(sender, receiver, 1, weights(1))
    if isinstance(sender, HostSender):
        with pytest.raises(TransferError, match="version 1 did not get to all"):
            await sender.wait_arrived(1)
    ends = met_again(offer, (sender, receiver))
    assert same(await carried(*ends, 2, weights(2)), weights(2))


async def test_the_copy_in_host_memory_is_sent_again_over_a_new_link() -> None:
    offer, store = offered("host_staged")
    sender, receiver = meet(offer, store)
    await sender.send(1, weights(1))
    await receiver.stage(1)
    sender._group.close()
    receiver._group.close()
    await sender.send(2, weights(2))
    with pytest.raises(TransferError, match="version 2 did not get to all receivers"):
        await sender.wait_arrived(2)
    with pytest.raises(TransferError, match="version 2 did not arrive"):
        await receiver.stage(2)
    sender, receiver = met_again(offer, (sender, receiver))
    assert same(kept(receiver.staged(1)), weights(1)), "what was there before got lost"
    await sender.resend(2)
    await receiver.stage(2)
    assert same(kept(receiver.staged(2)), weights(2))


def test_a_checked_plan_says_so() -> None:
    assert plan(checked=True).checked and not plan().checked
