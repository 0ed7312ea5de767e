from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_in_processes

from harness.weight_sync.ipc import SharedOffer, SharedWeights, create_buffer
from harness.weight_sync.plan import plan_transfer

CPU = torch.device("cpu")


def weights(version: int) -> dict[str, torch.Tensor]:
    return {
        "embedding": torch.full((7, 5), float(version)),
        "norm": torch.arange(11) + version,
        "scale": torch.full((3,), float(version), dtype=torch.bfloat16),
    }


@pytest.fixture
def offer() -> Iterator[SharedOffer]:
    offer = create_buffer(plan_transfer(weights(0).items(), bucket_bytes=64))
    yield offer
    offer.path.unlink(missing_ok=True)


def assert_received(end: SharedWeights, version: int) -> None:
    arrived = dict(end.receive(version))
    assert list(arrived) == list(weights(version))
    for name, tensor in weights(version).items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)


async def test_what_was_sent_arrives_version_after_version(offer: SharedOffer) -> None:
    sender, receivers = SharedWeights(offer), [offer.receiver(number, CPU) for number in range(2)]
    for version in (1, 2, 3):
        await sender.send(version, weights(version))
        for receiver in receivers:
            assert_received(receiver, version)


def test_a_buffer_that_was_never_filled_is_refused(offer: SharedOffer) -> None:
    for version in (0, 1):
        with pytest.raises(RuntimeError, match=f"hold version -1, not {version}"):
            next(offer.receiver(0, CPU).receive(version))


@pytest.mark.parametrize("asked", [1, 3])
async def test_another_version_than_the_one_held_is_refused(offer: SharedOffer, asked: int) -> None:
    sender = SharedWeights(offer)
    await sender.send(2, weights(2))
    with pytest.raises(RuntimeError, match=f"hold version 2, not {asked}; send must end before receive"):
        next(offer.receiver(0, CPU).receive(asked))


async def test_a_send_that_broke_off_leaves_a_buffer_that_nobody_takes(offer: SharedOffer) -> None:
    sender, receiver = SharedWeights(offer), offer.receiver(0, CPU)
    await sender.send(1, weights(1))
    with pytest.raises(KeyError, match="scale"):
        await sender.send(2, {name: tensor for name, tensor in weights(2).items() if name != "scale"})
    for version in (1, 2):
        with pytest.raises(RuntimeError, match=f"hold version -1, not {version}"):
            next(receiver.receive(version))
    await sender.send(3, weights(3))
    assert_received(receiver, 3)


async def test_the_mapping_outlives_its_file(offer: SharedOffer) -> None:
    sender, receiver = SharedWeights(offer), offer.receiver(0, CPU)
    offer.path.unlink()
    await sender.send(1, weights(1))
    assert_received(receiver, 1)


def test_who_comes_after_the_file_is_gone_cannot_join(offer: SharedOffer) -> None:
    offer.path.unlink()
    with pytest.raises(FileNotFoundError):
        offer.receiver(0, CPU)
    assert not offer.path.exists()


def test_nobody_else_can_read_the_file(offer: SharedOffer) -> None:
    assert offer.path.stat().st_mode & 0o077 == 0


def sums_in_another_process(offer: SharedOffer, version: int) -> list[float]:
    return [float(tensor.float().sum()) for _, tensor in offer.receiver(0, CPU).receive(version)]


async def test_another_process_reads_what_was_sent(offer: SharedOffer) -> None:
    await SharedWeights(offer).send(4, weights(4))
    (sums,) = run_in_processes(sums_in_another_process, [(offer, 4)], timeout_s=120)
    assert sums == [float(tensor.float().sum()) for tensor in weights(4).values()]


def test_an_offer_names_its_plan_and_its_place(offer: SharedOffer) -> None:
    assert isinstance(offer.path, Path) and offer.path.exists()
    assert offer.path.stat().st_size == offer.plan.bytes + 16


def test_weights_that_do_not_fit_into_shared_memory_are_refused_before_anything_is_made() -> None:
    huge = plan_transfer([("huge", torch.empty(1 << 50, device="meta"))], bucket_bytes=64)
    with pytest.raises(RuntimeError, match="need 4503599627370512 bytes in .*enlarge it"):
        create_buffer(huge)
