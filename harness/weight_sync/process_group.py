"""The process group of one sender and its receivers, built on a store, beside whatever default group its members have:
so an engine needs nothing of the trainer's, and the trainer nothing of the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from harness.weight_sync.errors import TransferError

SOURCE = 0
HOST = torch.device("cpu")
_ABORTED = "called off"  # a key of the rendezvous's store
_LOOK_S = 0.5  # how often a wait looks whether the rendezvous was called off
_POLL_S = 1e-4  # how often it is looked whether a GPU is done, or all have come


class Work(Protocol):
    """What was handed to the group, and is not there yet."""

    def wait(self, timeout: timedelta = ...) -> object: ...

    def is_completed(self) -> bool: ...


class TransferGroup:
    """One end of the group. Its first failure closes it, so that the other ends fail at once instead of by their
    timeouts; from then on everything that is asked of it fails, until both sides meet again.

    Where an end dies, only those that talk to it notice; so the driver, which hears of a death, aborts the
    rendezvous, and no end waits any longer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, aborted: Callable[[], bool]) -> None:
        self.device = device
        self._group: dist.ProcessGroup | None = group
        self._aborted = aborted

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

    def broadcast(self, data: torch.Tensor) -> Work:
        """From the sender to all others; `data` (on the group's device) is theirs once it was waited for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SOURCE, 0
        assert self._group is not None
        return cast(Work, self._group.broadcast([data], options))

    def barrier(self) -> None:
        """Wait for all members to come here."""
        assert self._group is not None
        self.wait(cast(Work, self._group.barrier(dist.BarrierOptions())))

    def wait(self, work: Work) -> None:
        """Until it is there, it fails (RuntimeError, torch's own), or the rendezvous is called off (TransferError)."""
        if self.device.type == "cuda":
            looked = time.monotonic()
            while not work.is_completed():
                time.sleep(_POLL_S)
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    self._raise_if_aborted()
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if self._aborted():
            self.close()
            raise TransferError("it was called off: one that took part is gone")

    def synchronise(self) -> None:
        """Wait for what the device was told to do with the data."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Letting go of a group waits for what it has under way, which Gloo gives up by its own timeout only: so that
        happens on the side."""
        groups, self._group = [self._group], None
        if groups[0] is not None and self.device.type == "cuda":
            groups[0].abort()
        threading.Thread(target=groups.clear, daemon=True).start()


@dataclass(frozen=True)
class Rendezvous:
    """Where a process group comes together: a store at host:port, `size` members, waits that end after timeout_s."""

    host: str
    port: int
    size: int
    timeout_s: float

    def sender_group(self, store: dist.Store, device: torch.device) -> TransferGroup:
        """The group as its sender, which holds the store. Returns when all members have joined."""
        return self._join(store, SOURCE, device)

    def receiver_group(self, number: int, device: torch.device) -> TransferGroup:
        """The group as receiver `number` (from 0)."""
        with _met():
            store = dist.TCPStore(
                self.host, self.port, self.size, False, _seconds(self.timeout_s), wait_for_workers=False
            )
        return self._join(store, number + 1, device)

    def abort(self) -> None:
        """Nobody who meets here is to wait for the others any longer."""
        with suppress(RuntimeError):  # the store is gone: so is all that was to be called off
            store = dist.TCPStore(self.host, self.port, self.size, False, _seconds(_LOOK_S), wait_for_workers=False)
            store.set(_ABORTED, "")

    def _join(self, store: dist.Store, rank: int, device: torch.device) -> TransferGroup:
        def aborted() -> bool:
            try:
                return store.check([_ABORTED])
            except RuntimeError:  # its host is gone
                return True

        prefixed, seconds = dist.PrefixStore("weight_sync", store), _seconds(self.timeout_s)
        with _met():
            self._wait_for_all(store, rank, aborted)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = seconds
                nccl = dist.ProcessGroupNCCL(prefixed, rank, self.size, options)
                return TransferGroup(cast(dist.ProcessGroup, nccl), device, aborted)
            gloo = dist.ProcessGroupGloo(prefixed, rank, self.size, seconds)
            return TransferGroup(cast(dist.ProcessGroup, gloo), device, aborted)

    def _wait_for_all(self, store: dist.Store, rank: int, aborted: Callable[[], bool]) -> None:
        """Until every member is here: building a group cannot be called off."""
        store.set(f"here {rank}", "")
        deadline, pause = time.monotonic() + self.timeout_s, _POLL_S
        while missing := [k for k in range(self.size) if not store.check([f"here {k}"])]:
            if aborted():
                raise TransferError("sender and receivers did not meet: one that was to come is gone")
            if time.monotonic() > deadline:
                raise TransferError(
                    f"sender and receivers did not meet: members {missing} of {self.size} did not come within "
                    f"{self.timeout_s} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S / 10)


def open_rendezvous(host: str, receivers: int, timeout_s: float) -> tuple[Rendezvous, dist.Store]:
    """A store on a free port of `host` and the way to it. The store lives as long as it is held."""
    store = dist.TCPStore(host, 0, receivers + 1, True, _seconds(timeout_s), wait_for_workers=False)
    return Rendezvous(host, store.port, receivers + 1, timeout_s), store


@contextmanager
def _met() -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except RuntimeError as error:
        raise TransferError(f"sender and receivers did not meet: {error}") from error


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
