"""Weights that travel in the background, over real process groups; other processes where only those show it."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import torch

from harness.weight_sync.host_staged import HostStagedReceiver, HostStagedSender
from harness.weight_sync.plan import pack
from tests.support.processes import run_in_processes
from tests.support.weight_ends import CPU, offered, same, store_of, two_ends, weights

ROWS = 6_000_000
"""24 MB: more than sockets take in before they are read."""


async def carry(sender: HostStagedSender, receiver: HostStagedReceiver, *versions: int) -> None:
    for version in versions:
        await sender.send(version, weights(version))
        await receiver.stage(version)


# --- what is there, and for how long ---------------------------------------------------------------------------------


async def test_a_trainer_may_change_what_it_sent_and_stages_arrive_in_turn() -> None:
    sender, receiver = two_ends("host_staged")
    trained = weights(1)
    await sender.send(1, trained)
    for tensor in trained.values():
        tensor.zero_()
    await receiver.stage(1)
    assert same(dict(receiver.staged(1)), weights(1))
    sender, receiver = two_ends("host_staged")
    both = asyncio.gather(receiver.stage(1), receiver.stage(2))
    for version in (1, 2):
        await sender.send(version, weights(version))
    await both
    assert same(dict(receiver.staged(1)), weights(1)) and same(dict(receiver.staged(2)), weights(2))


async def test_the_newest_versions_are_kept_and_what_was_loaded_is_forgotten() -> None:
    sender, receiver = two_ends("host_staged")
    await carry(sender, receiver, 1, 2)
    assert list(receiver._staged) == [1, 2]
    await carry(sender, receiver, 3)
    with pytest.raises(ValueError, match="version 1 is not in host memory; there: 2, 3"):
        receiver.staged(1)
    assert same(dict(receiver.staged(2)), weights(2)) and same(dict(receiver.staged(3)), weights(3))
    sender, receiver = two_ends("host_staged")
    await carry(sender, receiver, 1, 2)
    assert same(dict(receiver.staged(2)), weights(2))
    for version in (1, 2):
        with pytest.raises(ValueError, match=f"version {version} is not in host memory; there: none"):
            receiver.staged(version)
    sender, receiver = two_ends("host_staged")
    await carry(sender, receiver, 1)
    next(receiver.staged(1))
    assert same(dict(receiver.staged(1)), weights(1))


async def test_only_the_last_version_sent_can_be_waited_for() -> None:
    sender, _receiver = two_ends("host_staged")
    await sender.wait_arrived(0)
    with pytest.raises(ValueError, match="version 1 is not under way; the last one sent is 0"):
        await sender.wait_arrived(1)


# --- between processes -----------------------------------------------------------------------------------------------


def receive_and_go_on(number: int, offer: Any) -> list[bool]:
    """A receiver that lets the sender begin only from within its own `stage`: whether each version arrived."""

    async def receive() -> list[bool]:
        receiver, store, fine = offer.receiver(number, CPU), store_of(offer), []
        for version in (1, 2):
            staging = asyncio.create_task(receiver.stage(version))
            await asyncio.sleep(0)  # begins to stage
            store.set(f"{number} receives {version}", "")
            await staging
            fine.append(same(dict(receiver.staged(version)), weights(version, ROWS)))
        return fine

    return asyncio.run(receive())


async def test_both_sides_go_on_while_weights_travel() -> None:
    """The sender returns before anybody receives; and who receives still acts: otherwise this would wait for ever."""
    offer, store = offered("host_staged", receivers=2, rows=ROWS)
    arguments = [(number, offer) for number in range(2)]
    receiving = asyncio.create_task(asyncio.to_thread(run_in_processes, receive_and_go_on, arguments, 120))
    sender = await asyncio.to_thread(offer.sender, store, CPU)
    for version in (1, 2):
        keys = [f"{number} receives {version}" for number in range(2)]
        await asyncio.to_thread(store.wait, keys, timedelta(seconds=60))
        await sender.send(version, weights(version, ROWS))
        await sender.wait_arrived(version)
    assert await receiving == [[True, True]] * 2


def join_and_leave(number: int, offer: Any) -> None:
    _receiver = offer.receiver(number, CPU)
    store_of(offer).wait(["leave"], timedelta(seconds=60))


async def test_a_receiver_that_dies_fails_its_version_and_whatever_would_follow() -> None:
    offer, store = offered("host_staged", receivers=1, rows=ROWS)
    leaving = asyncio.create_task(asyncio.to_thread(run_in_processes, join_and_leave, [(0, offer)], 120))
    sender = await asyncio.to_thread(offer.sender, store, CPU)
    store.set("leave", "")
    await leaving
    await sender.send(1, weights(1, ROWS))
    for call in (sender.wait_arrived(1), sender.send(2, weights(2, ROWS))):
        with pytest.raises(RuntimeError, match="version 1 did not get to all receivers"):
            await call


def send_one_and_a_half(offer: Any) -> None:
    """A sender that dies after the first bucket of version 2."""

    async def send() -> None:
        sender = offer.sender(store_of(offer), CPU)
        await sender.send(1, weights(1))
        await sender.wait_arrived(1)
        bucket = offer.plan.buckets[0]
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
        pack(bucket, weights(2), buffer)
        sender._group.broadcast(buffer).wait()

    asyncio.run(send())


async def test_a_truncated_transfer_names_its_version_and_leaves_the_one_before() -> None:
    offer, _store = offered("host_staged", receivers=1)
    sending = asyncio.create_task(asyncio.to_thread(run_in_processes, send_one_and_a_half, [(offer,)], 120))
    receiver = await asyncio.to_thread(offer.receiver, 0, CPU)
    await receiver.stage(1)
    with pytest.raises(RuntimeError, match="version 2 did not arrive"):
        await receiver.stage(2)
    await sending
    with pytest.raises(ValueError, match="version 2 is not in host memory; there: 1"):
        receiver.staged(2)
    assert same(dict(receiver.staged(1)), weights(1))
