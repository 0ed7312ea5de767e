"""The trainer's weights in the processes of an engine that hold its model: each is a receiver of the transfer itself.

Loaded in vLLM's workers: needs as little else as can be.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from engines.loading import apart
from harness.config.plugins import load
from harness.protocols import TransferError

Put = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""Puts (name in files, full tensor) pairs into the model, each before it asks for the next one."""


class TransferEnd:
    """The end of the transfer in this process. It answers with the message of a transfer that failed, and of no other
    error: the engine's own calls would not bring its type back."""

    def __init__(self) -> None:
        self._receiver: Any = None
        self.touched = False
        """Whether the last version, whole or not, put anything into the model."""

    def join(self, path: str, data: bytes, number: int, device: torch.device) -> str | None:
        """Become receiver `number`: `harness.protocols.TransferOffer`. Returns why the ends did not meet."""
        try:
            self._receiver = load(path, "join")(data, number, device, self._receiver)
        except TransferError as error:
            return str(error)
        return None

    def receive(self, version: int, put: Put, *, keeps: bool) -> str | None:
        """Receive `version` into the model. keeps: what was put may be read later, when it would be overwritten, so it
        is copied once. Returns why it did not arrive whole."""
        self.touched = False
        weights = self._receiver.receive(version)
        try:
            put(self._noted(apart((name, tensor.clone() if keeps else tensor) for name, tensor in weights)))
        except TransferError as error:
            return str(error)
        finally:
            weights.close()  # what was not read still passes: the other receivers wait for this one
        return None

    def _noted(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights:
            self.touched = True
            yield pair
