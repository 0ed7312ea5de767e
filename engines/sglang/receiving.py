"""Weights in the schedulers of an SGLang server: each, a rank of tensor parallelism, is a receiver of the trainer.

Loaded in SGLang's environment by `launcher.py`, as the extension that /update_weights_from_ipc calls in every scheduler
(`WeightUpdater.update_weights_from_ipc` of SGLang 0.5.21). Imports no SGLang: what it needs it is given.
"""

import base64
import json
from typing import Any

import torch
import torch.distributed as dist

from engines.buckets import BucketContents, PackedBucket, shared_tensor, unpacked
from engines.transfers import TransferEnd

_JOIN, _RECEIVE, _TAKE, _HANDLE = "join", "receive", "take", "handle"
UNTOUCHED = "the server keeps the weights that it had: "
"""Begins the answer where nothing of the version was put into any model."""

_END = TransferEnd()


def to_join(path: str, data: bytes, number: int) -> dict[str, str]:
    """The request to become receivers, the first rank as this `number`: `harness.protocols.TransferOffer`."""
    return {_JOIN: path, "data": base64.b64encode(data).decode(), "number": str(number)}


def to_receive(version: int) -> dict[str, str]:
    """The request to receive this version, which was or will be sent."""
    return {_RECEIVE: str(version)}


def to_take(bucket: PackedBucket) -> dict[str, str]:
    """The request to take a bucket on a GPU that the server uses too."""
    handle = [part.hex() if isinstance(part, bytes) else part for part in bucket.handle()]
    return {_TAKE: json.dumps(bucket.described()), _HANDLE: json.dumps(handle)}


class Receiving:
    """The extension. model_runner: SGLang's, of this rank."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def update_weights_from_ipc(self, asked: dict[str, str]) -> None:
        """Do what is asked, as all ranks do. Raises RuntimeError on each of them where it failed on any."""
        answers = self._answers_of_all(self._done(asked))
        failures = [failure for failure, _ in answers if failure is not None]
        if failures:
            raise RuntimeError(("" if any(touched for _, touched in answers) else UNTOUCHED) + failures[0])

    def _done(self, asked: dict[str, str]) -> tuple[str | None, bool]:
        """Why this rank did not do it, and whether it put anything into its model."""
        if _JOIN in asked:
            number = int(asked["number"]) + self._runner.tp_rank
            return _END.join(asked[_JOIN], base64.b64decode(asked["data"]), number, self._device), False
        if _RECEIVE in asked:
            # SGLang's models copy each tensor before they ask for the next one.
            failure = _END.receive(int(asked[_RECEIVE]), self._runner.model.load_weights, keeps=False)
            self._synchronize()
            return failure, _END.touched
        if _TAKE in asked:
            contents = BucketContents(**json.loads(asked[_TAKE]))
            handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(asked[_HANDLE])]
            self._runner.model.load_weights(unpacked(shared_tensor(handle, contents.size), contents))
            self._synchronize()
        return None, True

    def _synchronize(self) -> None:
        """Wait until the sender's memory was read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _answers_of_all(self, answer: tuple[str | None, bool]) -> list[tuple[str | None, bool]]:
        """Answers of all ranks, on each: SGLang passes on what the first one says."""
        if self._runner.tp_size == 1:
            return [answer]
        answers: list[Any] = [None] * self._runner.tp_size
        dist.all_gather_object(answers, answer, group=self._runner.tp_group.cpu_group)
        return answers

    @property
    def _device(self) -> torch.device:
        runner = self._runner
        return torch.device("cpu") if runner.device == "cpu" else torch.device(runner.device, runner.gpu_id)
