"""A role that is held begins nothing, and says whether somebody else may have begun meanwhile."""

from __future__ import annotations

import asyncio

from harness.workers.turns import ComputingRole, DeviceTurns


class Role(ComputingRole):
    """Computes until it is told to end."""

    def __init__(self, name: str, device: DeviceTurns, order: list[str]) -> None:
        super().__init__(name, device)
        self.order, self.ends = order, asyncio.Event()

    async def compute(self) -> None:
        async with self.turn("work"):
            self.order.append(self.waits.owner)
            await self.ends.wait()


async def soon() -> None:
    """Everything that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_role_that_is_held_ends_its_turn_and_begins_none() -> None:
    order: list[str] = []
    role = Role("actor[0]", DeviceTurns(), order)
    first = asyncio.create_task(role.compute())
    await soon()
    holding = asyncio.create_task(role.hold())
    await soon()
    second = asyncio.create_task(role.compute())
    await soon()
    assert not holding.done() and await role.progress() == 0
    role.ends.set()
    assert await holding, "it had a turn"
    await first
    assert order == ["actor[0]"] and not second.done() and await role.progress() == 1
    assert not await role.hold(), "it has none now"
    await role.let_go()
    await second
    assert len(order) == 2 and await role.progress() == 2


async def test_a_role_that_waited_for_the_device_of_another_is_found_when_both_are_held_again() -> None:
    order: list[str] = []
    device = DeviceTurns()
    roles = [Role("reference[0]", device, order), Role("actor[0]", device, order)]
    working = [asyncio.create_task(role.compute()) for role in roles]
    await soon()
    assert order == ["reference[0]"]
    holding = asyncio.gather(*(role.hold() for role in roles))
    await soon()
    roles[0].ends.set()
    assert await holding == [True, False]
    await soon()
    again = asyncio.gather(*(role.hold() for role in roles))
    await soon()
    assert order == ["reference[0]", "actor[0]"] and not again.done()
    roles[1].ends.set()
    assert await again == [False, True]
    assert await asyncio.gather(*(role.hold() for role in roles)) == [False, False]
    await asyncio.gather(*working)
