"""The process group of one sender and its receivers, built on a store, beside whatever default group its members have:
so an engine needs nothing of the trainer's, and the trainer nothing of the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from harness.weight_sync.errors import TransferError

SOURCE = 0
HOST = torch.device("cpu")


class OnItsWay(Protocol):
    """What was handed to the group, and is not there yet."""

    def wait(self) -> object: ...


class Link:
    """One end of the group. Its first failure closes it, so that the other ends fail at once instead of by their
    timeouts; from then on everything that is asked of it fails, until both sides meet again."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._group: dist.ProcessGroup | None = group

    @contextmanager
    def guard(self, version: int) -> Iterator[None]:
        """Around every use: what breaks in the group is a TransferError that names the version."""
        if self._group is None:
            raise TransferError(f"version {version}: a transfer failed before, and both sides have not met since")
        try:
            yield
        except TransferError:
            raise
        except RuntimeError as error:  # torch's own
            self.close()
            raise TransferError(f"version {version} broke off: {error}") from error

    def broadcast(self, data: torch.Tensor) -> OnItsWay:
        """From the sender to all others; `data` (on the group's device) is theirs once it was waited for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SOURCE, 0
        assert self._group is not None
        return cast(OnItsWay, self._group.broadcast([data], options))

    def barrier(self) -> None:
        """Wait for all members to come here."""
        assert self._group is not None
        self._group.barrier(dist.BarrierOptions()).wait()

    def synchronise(self) -> None:
        """Wait for what the device was told to do with the data."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Nothing of this end may be under way: it would be waited for."""
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()
        self._group = None


@dataclass(frozen=True)
class Meeting:
    """Where a process group comes together: a store at host:port, `size` members, waits that end after timeout_s."""

    host: str
    port: int
    size: int
    timeout_s: float

    def host_link(self, store: dist.Store, device: torch.device) -> Link:
        """The group as its sender, which holds the store. Returns when all members have joined."""
        return self._link(store, SOURCE, device)

    def guest_link(self, number: int, device: torch.device) -> Link:
        """The group as receiver `number` (from 0)."""
        with _met():
            store = dist.TCPStore(
                self.host, self.port, self.size, False, _seconds(self.timeout_s), wait_for_workers=False
            )
        return self._link(store, number + 1, device)

    def _link(self, store: dist.Store, rank: int, device: torch.device) -> Link:
        prefixed, seconds = dist.PrefixStore("weight_sync", store), _seconds(self.timeout_s)
        with _met():
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = seconds
                nccl = dist.ProcessGroupNCCL(prefixed, rank, self.size, options)
                return Link(cast(dist.ProcessGroup, nccl), device)
            gloo = dist.ProcessGroupGloo(prefixed, rank, self.size, seconds)
            return Link(cast(dist.ProcessGroup, gloo), device)


def open_meeting(host: str, receivers: int, timeout_s: float) -> tuple[Meeting, dist.Store]:
    """A store on a free port of `host` and the way to it. The store lives as long as it is held."""
    store = dist.TCPStore(host, 0, receivers + 1, True, _seconds(timeout_s), wait_for_workers=False)
    return Meeting(host, store.port, receivers + 1, timeout_s), store


@contextmanager
def _met() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"sender and receivers did not meet: {error}") from error


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
