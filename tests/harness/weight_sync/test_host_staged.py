"""Weights that travel in the background, and those that all training ranks send, each its share, over real process
groups: whole or not at all; other processes where only those show it."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.weight_sync.endpoints import HostSender, stop_reading
from harness.weight_sync.host_staged import HostStagedReceiver, HostStagedSender
from harness.weight_sync.plan import TransferError, pack
from harness.weight_sync.process_group import open_rendezvous
from tests.support.processes import run_in_processes
from tests.support.weight_ends import (
    CPU,
    LONG_S,
    LOOPBACK,
    Offer,
    Weights,
    kept,
    offer_of,
    offered,
    plan,
    same,
    store_of,
    two_ends,
    weights,
)

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


@pytest.mark.slow
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


TRANSPORTS = ("collective", "host_staged")
SENDERS = RECEIVERS = 2
VERSIONS = (1, 2, 3)


# --- two training ranks with half of every tensor each, and two receivers, all in processes of their own --------------


def trainer(rank: int, port: int, offer: Any) -> None:
    store = TCPStore(LOOPBACK, port, SENDERS, False, wait_for_workers=False)
    init_process_group("gloo", store=store, rank=rank, world_size=SENDERS)
    mesh = init_device_mesh("cpu", (SENDERS,))

    async def send() -> None:
        sender = offer.sender(offer.rendezvous.connect(), CPU, None, rank)
        for version in VERSIONS:
            shards = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in weights(version).items()}
            await sender.send(version, shards)
        if isinstance(sender, HostSender):
            await sender.wait_arrived(VERSIONS[-1])

    asyncio.run(send())
    destroy_process_group()


def receiver(number: int, offer: Any) -> list[bool]:
    end = offer.receiver(number, CPU)

    def arrived(version: int) -> Weights:
        if hasattr(end, "stage"):
            asyncio.run(end.stage(version))
            return kept(end.staged(version))
        return kept(end.receive(version))

    return [same(arrived(version), weights(version)) for version in VERSIONS]


def take_part(kind: str, number: int, port: int, offer: Any) -> list[bool] | None:
    return trainer(number, port, offer) if kind == "trainer" else receiver(number, offer)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", [{}, {"checked": True}, {"delta": True}])
def test_every_version_of_two_ranks_shards_arrives_bit_for_bit(transport: str, how: dict[str, bool]) -> None:
    rendezvous, _store = open_rendezvous(LOOPBACK, RECEIVERS, LONG_S, SENDERS)
    offer = offer_of(transport, plan(**how), rendezvous)
    assert set(offer.plan.owners(SENDERS)) == {0, 1}, "one rank sends all: the test shows nothing"
    world = TCPStore(LOOPBACK, 0, SENDERS, True, wait_for_workers=False)
    parts = [(kind, number, world.port, offer) for kind in ("trainer", "receiver") for number in range(2)]
    assert run_in_processes(take_part, parts, 120) == [None, None, [True] * 3, [True] * 3]


# --- what fails: both senders and one receiver, in threads ------------------------------------------------------------


class Ends:
    """Two senders that hold all weights, and a receiver. They connect again with `meet`."""

    def __init__(self, transport: str, pool: ThreadPoolExecutor, rows: int, *, checked: bool) -> None:
        self.offer: Offer = offer_of(transport, plan(rows, checked=checked), open_rendezvous(LOOPBACK, 1, LONG_S)[0])
        self.pool = pool
        self.senders: list[Any] = [None, None]
        self.receiver: Any = None
        self.meet()

    def meet(self) -> None:
        self.rendezvous, self._store = open_rendezvous(LOOPBACK, 1, LONG_S, SENDERS)
        offer: Any = replace(self.offer, rendezvous=self.rendezvous)
        told = [(self.rendezvous.connect(), CPU, before, number) for number, before in enumerate(self.senders)]
        joining = [self.pool.submit(offer.sender, *one) for one in told]
        self.receiver = offer.receiver(0, CPU, self.receiver)
        self.senders = [sender.result() for sender in joining]

    def send(self, number: int, version: int, sent: Weights) -> Exception | None:
        async def send() -> None:
            sender = self.senders[number]
            await sender.send(version, sent)
            if isinstance(sender, HostSender):
                await sender.wait_arrived(version)

        try:
            asyncio.run(send())
        except Exception as error:
            return error
        return None

    def receive(self, version: int, read: int | None = None) -> Weights:
        """read: how many tensors, before the reader stops."""
        if hasattr(self.receiver, "stage"):
            asyncio.run(self.receiver.stage(version))
            return kept(self.receiver.staged(version))
        arriving = self.receiver.receive(version)
        if read is None:
            return kept(arriving)
        some = {name: tensor.clone() for (name, tensor), _ in zip(arriving, range(read), strict=False)}
        stop_reading(arriving)
        return some

    def carry(self, version: int, sent: Weights | None = None) -> tuple[list[Exception | None], Weights | Exception]:
        """What each sender raised; what arrived, or what the receiver raised."""
        sending = [self.pool.submit(self.send, number, version, sent or weights(version)) for number in range(SENDERS)]
        try:
            arrived: Weights | Exception = self.receive(version)
        except Exception as error:
            arrived = error
        return [one.result() for one in sending], arrived


@contextmanager
def ends(transport: str, *, rows: int = 40, checked: bool = False) -> Iterator[Ends]:
    with ThreadPoolExecutor(SENDERS) as pool:
        yield Ends(transport, pool, rows, checked=checked)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("broken", range(SENDERS))
def test_where_one_sender_breaks_off_the_next_connection_brings_all(transport: str, broken: int) -> None:
    with ends(transport) as both:
        assert both.carry(1)[0] == [None, None]
        both.senders[broken]._group.close()
        raised, arrived = both.carry(2)
        assert isinstance(raised[broken], TransferError) and isinstance(arrived, TransferError)
        both.meet()
        raised, arrived = both.carry(3)
        assert raised == [None, None] and isinstance(arrived, dict) and same(arrived, weights(3))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_death_ends_the_waits_for_all_senders(transport: str) -> None:
    """The second sender never sends; the driver, which hears of its death, aborts the rendezvous."""
    with ends(transport, rows=ROWS) as both:
        first = both.pool.submit(both.send, 0, 1, weights(1, ROWS))
        both.pool.submit(both.rendezvous.abort)
        with pytest.raises(TransferError, match="aborted"):
            both.receive(1)
        assert isinstance(first.result(), TransferError)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tensor_that_the_second_sender_damages_is_named(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(transport, checked=True) as both:
        owners = both.offer.plan.owners(SENDERS)
        bucket = both.offer.plan.buckets[owners.index(1)]
        name = bucket.tensors[0].name
        module = __import__(f"harness.weight_sync.{transport}", fromlist=["digests"])
        taken = module.digests

        def wrong(of: Any, data: torch.Tensor) -> torch.Tensor:
            return taken(of, data) + (of == bucket)

        monkeypatch.setattr(module, "digests", wrong)
        raised, arrived = both.carry(1)
        assert raised == [None, None] and isinstance(arrived, TransferError) and f"damaged: {name}" in str(arrived)
        monkeypatch.undo()
        raised, arrived = both.carry(2)
        assert raised == [None, None] and isinstance(arrived, dict) and same(arrived, weights(2))


def test_the_host_copies_of_all_senders_are_one_copy_of_the_weights() -> None:
    with ends("host_staged") as both:
        copies = [sum(tensor.numel() for tensor in sender._copy) for sender in both.senders]
        assert sum(copies) == both.offer.plan.bytes and max(copies) <= sum(copies) / 2 + both.offer.plan.largest


@pytest.mark.timeout(60)
def test_a_reader_that_stops_keeps_no_sender_from_the_next_version() -> None:
    with ends("collective") as both:
        sending = [both.pool.submit(both.send, number, 1, weights(1)) for number in range(SENDERS)]
        assert len(both.receive(1, read=2)) == 2
        assert [one.result() for one in sending] == [None, None]
        raised, arrived = both.carry(2)
        assert raised == [None, None] and isinstance(arrived, dict) and same(arrived, weights(2))


@pytest.mark.timeout(60)
def test_what_both_senders_copied_is_sent_again_over_new_groups() -> None:
    with ends("host_staged") as both:
        sending = [both.pool.submit(both.send, number, 1, weights(1)) for number in range(SENDERS)]
        asyncio.run(both.receiver.stage(1))
        assert [one.result() for one in sending] == [None, None]
        both.receiver._group.close()
        raised, arrived = both.carry(2)
        assert all(isinstance(error, TransferError) for error in [*raised, arrived])
        both.meet()
        assert same(kept(both.receiver.staged(1)), weights(1)), "what was there is lost"

        def resend(number: int) -> None:
            async def again() -> None:
                await both.senders[number].resend(2)
                await both.senders[number].wait_arrived(2)

            asyncio.run(again())

        sending = [both.pool.submit(resend, number) for number in range(SENDERS)]
        assert same(both.receive(2), weights(2))
        assert [one.result() for one in sending] == [None, None]
