"""Both ends of a transport in one process, and weights to send: what most tests of weight sync begin with."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import Store

from harness.config.transports import transport_of
from harness.weight_sync.ipc import SharedOffer, share_slots
from harness.weight_sync.plan import TransferPlan, plan_transfer
from harness.weight_sync.process_group import GroupOffer, Rendezvous, open_rendezvous

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
LONG_S = 60.0

Weights = dict[str, torch.Tensor]
Offer = GroupOffer


def weights(version: int, rows: int = 40) -> Weights:
    """Several buckets of 64 bytes, one tensor larger than that, several dtypes, and one that is alone in its bucket."""
    generator = torch.Generator().manual_seed(version)
    return {
        "small": torch.randn(4, 3, generator=generator),
        "large": torch.arange(rows, dtype=torch.float32).roll(version),
        "half": torch.randn(17, generator=generator).bfloat16(),
        "whole": torch.arange(6) * version,
        "transposed": torch.randn(9, 40, generator=generator).T,
        "empty": torch.zeros(0, 3),
    }


def plan(rows: int = 40, *, checked: bool = False, delta: bool = False) -> TransferPlan:
    return plan_transfer(weights(0, rows).items(), bucket_bytes=64, checked=checked, delta=delta)


def offered(transport: str, receivers: int = 1, timeout_s: float = LONG_S, **of_plan: Any) -> tuple[Offer, Store]:
    rendezvous, store = open_rendezvous(LOOPBACK, receivers, timeout_s)
    return offer_of(transport, plan(**of_plan), rendezvous), store


def offer_of(transport: str, plan: TransferPlan, rendezvous: Rendezvous) -> Offer:
    offer: Offer
    _, offer = transport_of(transport).with_ends().offer(plan, rendezvous, CPU, within_gpu=False)
    return offer


def two_ends(transport: str, *, checked: bool = False, timeout_s: float = LONG_S) -> tuple[Any, Any]:
    """(sender, receiver)."""
    offer, store = offered(transport, checked=checked, timeout_s=timeout_s)
    return meet(offer, store)


def meet(offer: Offer, store: Store, before: tuple[Any, Any] = (None, None)) -> tuple[Any, Any]:
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, CPU, before[1])
        ends = offer.sender(store, CPU, before[0]), joining.result()
    offer.withdraw()
    return ends


def met_again(offer: Offer, before: tuple[Any, Any]) -> tuple[Any, Any]:
    """New ends in the place of those before, over a new process group."""
    rendezvous, store = open_rendezvous(LOOPBACK, 1, offer.rendezvous.timeout_s)
    if isinstance(offer, SharedOffer):
        return meet(share_slots(offer.plan, rendezvous), store, before)
    return meet(replace(offer, rendezvous=rendezvous), store, before)


def store_of(offer: Offer) -> Store:
    """The offer's store, as another process sees it."""
    return replace(offer.rendezvous, timeout_s=60.0).connect()


async def carried(sender: Any, receiver: Any, version: int, sent: Weights) -> Weights:
    """What arrives of what is sent."""
    if hasattr(receiver, "stage"):
        await sender.send(version, sent)
        await receiver.stage(version)
        return kept(receiver.staged(version))
    receiving = asyncio.create_task(asyncio.to_thread(lambda: kept(receiver.receive(version))))
    results = await asyncio.gather(asyncio.to_thread(lambda: asyncio.run(sender.send(version, sent))), receiving)
    return results[1]


def kept(arriving: Iterable[tuple[str, torch.Tensor]]) -> Weights:
    return {name: tensor.clone() for name, tensor in arriving}


def same(arrived: Weights, expected: Weights) -> bool:
    return list(arrived) == list(expected) and all(
        arrived[name].dtype == expected[name].dtype and torch.equal(arrived[name], expected[name]) for name in expected
    )
