"""An engine's own processes receive the trainer's weights: what that moves and copies, against the least there is."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.sglang import receiving
from engines.transfers import TransferEnd
from harness.weight_sync import process_group
from harness.weight_sync.endpoints import SentOffer
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import open_rendezvous
from tests.support.weight_ends import CPU, LONG_S, LOOPBACK, Weights, offer_of, same

SMALL, LARGE = 4 * 1000, 4 << 20
WEIGHTS: Weights = {
    "small": torch.randn(SMALL // 4),
    "large": torch.randn(4, LARGE // 16),
    "last": torch.ones(SMALL // 4),
}
ALL = LARGE + 2 * SMALL
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class Copied(TorchDispatchMode):
    """Bytes that this thread copies from tensor to tensor."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in COPIES:
            self.bytes += result.nbytes
        return result


class Ends:
    """A trainer that sends WEIGHTS, and an engine's process with a model of the same names."""

    def __init__(self, transport: str, *, keeps: bool) -> None:
        self.keeps, self.model = keeps, {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        rendezvous, store = open_rendezvous(LOOPBACK, 1, LONG_S)
        offer = offer_of(transport, plan_transfer(WEIGHTS.items(), 1 << 20), rendezvous)
        told = SentOffer.of(transport, offer).for_engine()
        assert told.shapes == {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
        self.end = TransferEnd()
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self.end.join, told.join, told.data, 0, CPU)
            self.sender: Any = offer.sender(store, CPU)
            assert joining.result() is None
        offer.withdraw()

    def put(self, weights: Any) -> None:
        for name, tensor in weights:
            self.model[name].copy_(tensor)

    def sent(self) -> int:
        with Copied() as copied:
            asyncio.run(self.sender.send(1, WEIGHTS))
        return copied.bytes

    def received(self) -> int:
        with Copied() as copied:
            assert self.end.receive(1, self.put, keeps=self.keeps) is None
        return copied.bytes


@pytest.mark.parametrize("keeps", [False, True], ids=["SGLang, vLLM on a CPU", "vLLM on a GPU"])
@pytest.mark.parametrize(
    ("transport", "travels", "packed"),
    [
        (
            "collective",
            ALL,
            2 * SMALL,
        ),  # the least: all of it once, and only what is too small to go by itself is packed
        ("ipc", 0, ALL),  # the least: one copy into what both sides map
    ],
)
def test_a_version_travels_once_and_is_copied_into_the_model_once(
    transport: str, travels: int, packed: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    travelled: list[int] = []
    broadcast = process_group.TransferGroup.broadcast

    def counted(group: process_group.TransferGroup, data: torch.Tensor) -> Any:
        travelled.append(data.nbytes)
        return broadcast(group, data)

    monkeypatch.setattr(process_group.TransferGroup, "broadcast", counted)
    ends = Ends(transport, keeps=keeps)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(ends.received)
        copied = ends.sent()
        # Layerwise reload keeps what it gets until a layer is whole: one copy more, and no more than that.
        assert receiving.result() == (2 * ALL if keeps else ALL)
    assert sum(travelled) in range(2 * travels, 2 * travels + 64), "counted at both ends, with what pads a bucket"
    assert copied == packed
    assert same(ends.model, WEIGHTS) and ends.end.touched


def test_a_transfer_that_fails_before_anything_came_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends("collective", keeps=False)
    ends.sender._group.close()
    monkeypatch.setattr(receiving, "_END", ends.end)
    model = SimpleNamespace(load_weights=ends.put)
    scheduler = receiving.Receiving(SimpleNamespace(model=model, device="cpu", tp_size=1, tp_rank=0))
    with pytest.raises(RuntimeError, match=f"^{receiving.UNTOUCHED}version 2 broke off"):
        scheduler.update_weights_from_ipc(receiving.to_receive(2))
    assert not ends.end.touched and not ends.model["large"].any()
    assert "a transfer failed before" in (ends.end.receive(3, ends.put, keeps=False) or "")
