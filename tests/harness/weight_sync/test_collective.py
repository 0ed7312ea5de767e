import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import Store

from harness.weight_sync.collective import CollectiveOffer
from harness.weight_sync.plan import TransferPlan, plan_transfer
from harness.weight_sync.process_group import open_rendezvous
from tests.support.processes import run_in_processes

CPU = torch.device("cpu")
HOST = "127.0.0.1"
VERSIONS = (1, 2, 3)
BUCKET_BYTES = 256


def weights(version: int) -> dict[str, torch.Tensor]:
    """Several buckets, one larger than the bound, and several dtypes."""
    generator = torch.Generator().manual_seed(version)
    return {
        "small": torch.randn(3, 4, generator=generator),
        "large": torch.randn(40, 9, generator=generator),
        "half": torch.randn(17, generator=generator).bfloat16(),
        "whole": torch.arange(5) * version,
    }


def plan() -> TransferPlan:
    return plan_transfer(weights(0).items(), BUCKET_BYTES)


def offered(receivers: int, timeout_s: float) -> tuple[CollectiveOffer, Store]:
    rendezvous, store = open_rendezvous(HOST, receivers, timeout_s)
    return CollectiveOffer(plan(), rendezvous), store


def take_part(number: int, offer: CollectiveOffer) -> list[bool]:
    """A receiver: whether each version arrived bit for bit."""
    receiver = offer.receiver(number, CPU)
    fine = []
    for version in VERSIONS:
        expected = weights(version)
        arrived = {name: tensor.clone() for name, tensor in receiver.receive(version)}
        same = [torch.equal(arrived[name], tensor) for name, tensor in expected.items()]
        fine.append(list(arrived) == list(expected) and all(same))
    return fine


async def test_every_version_reaches_every_receiver_bit_for_bit() -> None:
    offer, store = offered(receivers=2, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(run_in_processes, take_part, [(0, offer), (1, offer)], 90)
        sender = offer.sender(store, CPU)
        for version in VERSIONS:
            await sender.send(version, weights(version))
        assert answers.result() == [[True] * len(VERSIONS)] * 2


@pytest.mark.timeout(60)
def test_a_missing_receiver_is_an_error_and_not_a_hang() -> None:
    offer, store = offered(receivers=1, timeout_s=1.0)
    with pytest.raises(RuntimeError):  # torch's own error is one
        offer.sender(store, CPU)


@pytest.mark.timeout(60)
def test_a_receiver_without_a_sender_is_an_error_and_not_a_hang() -> None:
    offer, _store = offered(receivers=1, timeout_s=1.0)
    with pytest.raises(RuntimeError):
        offer.receiver(0, CPU)


def join_and_leave(number: int, offer: CollectiveOffer) -> None:
    offer.receiver(number, CPU)


async def test_a_receiver_that_dies_is_an_error_for_the_sender() -> None:
    offer, store = offered(receivers=1, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(run_in_processes, join_and_leave, [(0, offer)], 90)
        sender = offer.sender(store, CPU)
        gone.result()
    with pytest.raises(RuntimeError):
        for version in range(1, 50):  # the first sends may still fit into a socket's buffer
            await sender.send(version, weights(version))


def test_the_offer_is_small_and_picklable() -> None:
    offer, _store = offered(receivers=2, timeout_s=5)
    data = pickle.dumps(offer)
    assert pickle.loads(data) == offer and len(data) < 4096
    assert offer.rendezvous.size == 3 and offer.rendezvous.port > 0
