"""Weights that all training ranks send, each its share, over real process groups: whole or not at all."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.weight_sync.endpoints import HostSender, stop_reading
from harness.weight_sync.plan import TransferError
from harness.weight_sync.process_group import open_rendezvous
from tests.support.processes import run_in_processes
from tests.support.weight_ends import CPU, LONG_S, LOOPBACK, Offer, Weights, kept, offer_of, plan, same, weights

TRANSPORTS = ("collective", "host_staged")
SENDERS = RECEIVERS = 2
VERSIONS = (1, 2, 3)
ROWS = 6_000_000
"""24 MB: more than sockets take in before they are read."""


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
        joining = [
            self.pool.submit(offer.sender, self.rendezvous.connect(), CPU, before, number)
            for number, before in enumerate(self.senders)
        ]
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
        both.receiver._group.close()
        raised, arrived = both.carry(1)
        assert all(isinstance(error, TransferError) for error in [*raised, arrived])
        both.meet()

        def resend(number: int) -> None:
            async def again() -> None:
                await both.senders[number].resend(1)
                await both.senders[number].wait_arrived(1)

            asyncio.run(again())

        sending = [both.pool.submit(resend, number) for number in range(SENDERS)]
        assert same(both.receive(1), weights(1))
        assert [one.result() for one in sending] == [None, None]
