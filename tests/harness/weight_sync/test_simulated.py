"""Simulated transports: how long transfers take, and the calls of the transports that they stand for."""

import asyncio

import pytest

from harness.config.transports import TransferTimes
from harness.runtime.virtual_runtime import LocalRole, VirtualClock
from harness.weight_sync.endpoints import HostReceiver, HostSender, ReceivingWorker, WeightReceiver, WeightSender
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.simulated import SimulatedReceiver, SimulatedSender, SimulatedTransport
from tests.support.local_queue import virtual

TIMES = TransferTimes(send_s=2.0, stage_s=5.0, load_s=1.0)


@virtual
async def test_staged_weights_arrive_in_the_background_and_are_read_once() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    sender = SimulatedSender(TIMES, clock)
    receiver = SimulatedReceiver(TIMES, clock)
    _: tuple[HostSender, WeightSender, HostReceiver, WeightReceiver] = (sender, sender, receiver, receiver)
    await sender.send(1, {})
    assert clock.now() == 2.0
    with pytest.raises(ValueError, match="version 1 is not in host memory; there: none"):
        receiver.staged(1)
    await asyncio.gather(sender.wait_arrived(1), receiver.stage(1))
    assert clock.now() == 7.0
    assert list(receiver.staged(1)) == []
    with pytest.raises(ValueError, match="version 1 is not in host memory"):
        receiver.staged(1)
    with pytest.raises(ValueError, match="version 2 is not under way; the last one sent is 1"):
        await sender.wait_arrived(2)
    await sender.send(2, {})
    await sender.send(3, {})  # waits until version 2 has arrived
    assert clock.now() == 9.0 + 5.0 + 2.0


@virtual
async def test_a_sender_that_is_connected_anew_can_send_again_what_it_had_under_way() -> None:
    """A transfer in the background that broke off is tried again over a new connection."""

    clock, notes = VirtualClock(asyncio.get_running_loop()), list[str]()
    worker = Worker("actor[0]", notes)
    trainer = LocalRole("actor[0]", worker)
    transport = SimulatedTransport("host_staged", TIMES, clock)
    await transport.connect([trainer], [], TransferPlan(()))  # type: ignore[list-item]
    await worker.sender.send(1, {})
    await transport.connect([trainer], [], TransferPlan(()))  # type: ignore[list-item]
    await worker.sender.resend(1)
    await worker.sender.wait_arrived(1)
    assert clock.now() == TIMES.send_s + TIMES.stage_s


@virtual
async def test_a_receiver_that_is_connected_anew_still_has_what_had_arrived() -> None:
    """An engine that comes back has all connect again, and some have not loaded the version before."""

    trainer, engine = (LocalRole(name, Worker(name, [])) for name in ("trainer", "engine"))
    transport = SimulatedTransport("host_staged", TIMES, VirtualClock(asyncio.get_running_loop()))
    await transport.connect([trainer], [engine], TransferPlan(()))  # type: ignore[list-item]
    await engine.role.stage(1)
    await transport.connect([trainer], [engine], TransferPlan(()))  # type: ignore[list-item]
    await engine.role.swap(1)


class Worker:
    """Notes what the transport asks of it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes
        self.sender: SimulatedSender
        self.receiver: SimulatedReceiver | None = None

    async def use(self, end: SimulatedSender | SimulatedReceiver) -> None:
        if isinstance(end, SimulatedSender):
            self.sender = end
        else:
            await ReceivingWorker.use(self, end)  # type: ignore[arg-type]

    async def send(self, version: int) -> list[object]:
        return await self._note("send", self.sender.send(version, {}))

    async def stage(self, version: int) -> list[object]:
        return await self._note("stage", self.receiver.stage(version))

    async def load(self, version: int) -> list[object]:
        assert list(self.receiver.receive(version)) == []
        return await self._note("load", asyncio.sleep(TIMES.load_s))

    async def swap(self, version: int) -> list[object]:
        assert list(self.receiver.staged(version)) == []
        return await self._note("swap", asyncio.sleep(TIMES.load_s))

    async def _note(self, what: str, work: object) -> list[object]:
        start = asyncio.get_running_loop().time()
        await work  # type: ignore[misc]
        self.notes.append(f"{self.name} {what} {start:g}-{asyncio.get_running_loop().time():g}")
        return []


@pytest.mark.parametrize(
    ("transport", "calls"),
    [
        ("collective", ["engine load 0-1", "trainer send 0-2"]),
        ("ipc", ["trainer send 0-2", "engine load 2-3"]),
        ("host_staged", ["trainer send 0-2", "engine stage 2-7", "engine swap 7-8"]),
    ],
)
@virtual
async def test_a_simulated_wire_makes_the_calls_of_the_wire_it_stands_for(transport: str, calls: list[str]) -> None:
    notes: list[str] = []
    trainer, engine = LocalRole("actor[0]", Worker("trainer", notes)), LocalRole("e", Worker("engine", notes))
    carrier = SimulatedTransport(transport, TIMES, VirtualClock(asyncio.get_running_loop()))
    await carrier.connect([trainer], [engine], TransferPlan(()))
    await carrier.transfer([trainer], [engine], 1)
    assert notes == calls
