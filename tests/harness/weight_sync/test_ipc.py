"""Two slots in shared memory, and who may look into which."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.weight_sync.ipc import SharedOffer, share_slots, slot_bytes
from harness.weight_sync.plan import TransferError, plan_transfer
from harness.weight_sync.process_group import Rendezvous, open_rendezvous
from tests.support.processes import run_in_processes
from tests.support.weight_ends import CPU, LOOPBACK, carried, kept, offered, plan, same, two_ends, weights


@pytest.fixture
def offer() -> Iterator[SharedOffer]:
    offer = share_slots(plan(), Rendezvous(LOOPBACK, 1, 2, 5.0))
    yield offer
    offer.path.unlink(missing_ok=True)


async def test_what_was_sent_arrives_version_after_version() -> None:
    ends = two_ends("ipc")
    for version in (1, 2, 3):
        assert same(await carried(*ends, version, weights(version)), weights(version))


def test_the_memory_is_that_of_two_buckets_whatever_the_model() -> None:
    many = plan_transfer({f"{i}": torch.zeros(1000) for i in range(100)}.items(), bucket_bytes=4096)
    offer = share_slots(many, Rendezvous(LOOPBACK, 1, 2, 5.0))
    size = offer.path.stat().st_size
    offer.withdraw()
    assert many.bytes == 400_000 and many.largest == 4000
    assert 2 * many.largest <= size == 2 * slot_bytes(many) <= 2 * many.largest + 128


def test_an_offer_withdrawn_leaves_nothing_and_takes_nobody(offer: SharedOffer) -> None:
    offer.withdraw()
    with pytest.raises(FileNotFoundError):
        offer.receiver(0, CPU)
    assert not offer.path.exists()


def test_nobody_else_can_read_the_file(offer: SharedOffer) -> None:
    assert offer.path.stat().st_mode & 0o077 == 0


def test_an_offer_is_small_and_picklable_and_names_its_place(offer: SharedOffer) -> None:
    data = pickle.dumps(offer)
    assert pickle.loads(data) == offer and len(data) < 4096
    assert isinstance(offer.path, Path) and offer.path.exists()


def test_slots_that_do_not_fit_into_shared_memory_are_refused_before_anything_is_made() -> None:
    huge = plan_transfer([("huge", torch.empty(1 << 50, device="meta"))], bucket_bytes=64)
    with pytest.raises(RuntimeError, match="need 9007199254740992 bytes in .*enlarge it"):
        share_slots(huge, Rendezvous(LOOPBACK, 1, 2, 5.0))


def read_in_another_process(number: int, offer: SharedOffer) -> bool:
    receiver = offer.receiver(number, CPU)
    return all([same(kept(receiver.receive(version)), weights(version)) for version in (1, 2)])


async def test_several_other_processes_read_what_was_sent() -> None:
    offer, store = offered("ipc", receivers=2)
    assert isinstance(offer, SharedOffer)
    arguments = [(number, offer) for number in range(2)]
    reading = asyncio.create_task(asyncio.to_thread(run_in_processes, read_in_another_process, arguments, 120))
    sender = await asyncio.to_thread(offer.sender, store, CPU)
    offer.withdraw()
    for version in (1, 2):
        await asyncio.to_thread(lambda version=version: asyncio.run(sender.send(version, weights(version))))
    assert await reading == [True, True]


async def test_a_sender_alone_fails_by_its_timeout_and_then_at_once() -> None:
    sender, _receiver = two_ends("ipc", timeout_s=1.0)
    with pytest.raises(TransferError, match="version 1 broke off"):
        await sender.send(1, weights(1))
    with pytest.raises(TransferError, match="version 2: a transfer failed before"):
        await sender.send(2, weights(2))


def test_who_does_not_meet_is_told_so() -> None:
    rendezvous, store = open_rendezvous(LOOPBACK, 1, 1.0)
    offer = share_slots(plan(), rendezvous)
    with pytest.raises(TransferError, match="did not meet"):
        offer.sender(store, CPU)
    offer.withdraw()
