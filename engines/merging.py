"""Adapters for engines that compute with whole weights: W + alpha / rank * B A, in float32, rounded to the dtype of W.

Adapters alone travel. Whoever takes them in for an engine, its own processes or the one beside them, reads the base
from the files that the engine started with, which stay in the page cache while there is room, and hands over whole
weights of each version: nothing is added to what was added before, so that nothing drifts. Needs as little else as can
be: it is loaded by vLLM's workers and SGLang's schedulers.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engines.loading import apart
from harness.config.plugins import load
from harness.protocols import TransferOffer

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Base:
    """The base of adapters: safetensors files in a folder, and alpha / rank."""

    folder: str
    scale: float

    def merged(self, adapters: Weights, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights on `device` by their names in files, once all adapters have come."""
        from safetensors import safe_open

        came = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in adapters}
        for path in sorted(Path(self.folder).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    layer, weight = name.removesuffix("weight"), file.get_tensor(name).to(device)
                    if (up := came.get(f"{layer}lora_B.weight")) is not None:
                        added = up @ came[f"{layer}lora_A.weight"]
                        weight = weight.float().add_(added, alpha=self.scale).to(weight.dtype)
                    yield name, weight

    def offer(self, offer: TransferOffer) -> TransferOffer:
        """The same offer to processes that receive by `receiver_of`."""
        data = [self.folder, self.scale, offer.join, base64.b64encode(offer.data).decode()]
        return replace(offer, join=f"{__name__}:{receiver_of.__name__}", data=json.dumps(data).encode())


def whole_weights(base: Base | None, weights: Weights, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by their names in files: these, or those that they are adapters of."""
    return apart(weights) if base is None else base.merged(weights, device)


@dataclass
class MergingReceiver:
    """A receiver of adapters that gives whole weights."""

    receiver: Any
    base: Base
    device: torch.device

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in files, full tensor) of every weight of `version`; raises what the receiver raises."""
        weights = self.receiver.receive(version)
        try:
            yield from self.base.merged(weights, self.device)
        finally:
            weights.close()


def receiver_of(
    data: bytes, number: int, device: torch.device, previous: MergingReceiver | None = None
) -> MergingReceiver:
    """Join by `Base.offer`: `harness.protocols.TransferOffer`."""
    folder, scale, join, inner = json.loads(data)
    before = None if previous is None else previous.receiver
    receiver = load(join, "join")(base64.b64decode(inner), number, device, before)
    return MergingReceiver(receiver, Base(folder, scale), device)
