"""A server's queue that goes on with what is in a folder."""

from __future__ import annotations

from collections.abc import Callable

from harness.transfer_queue.journal.service import JournaledService, load
from harness.transfer_queue.service import QueueService
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.protocol import Backend, Keeper, Session, Storage
from harness.transfer_queue.storage.shm import ShmStorage
from harness.transfer_queue.storage.shm_keeper import ShmKeeper

Start = Callable[[QueueSpec, Keeper, Storage], QueueService]
"""Makes the service; payload that it brings goes to the storage."""
_NOBODY = 0  # clients are numbered from 1


def new(spec: QueueSpec, keeper: Keeper, storage: Storage) -> QueueService:
    return QueueService(spec, keeper)


def loaded(folder: str) -> Start:
    """The queue that was saved there; the folder stays as it is."""
    return lambda spec, keeper, storage: load(spec, keeper, folder, storage=storage)


def journaled(folder: str) -> Start:
    """The queue that is there, or a new one: every change is in the folder before it is answered."""
    return lambda spec, keeper, storage: JournaledService(spec, keeper, folder, storage=storage)


def start_service(start: Start, spec: QueueSpec, backend: Backend, keeper: Keeper, queue: str) -> QueueService:
    """In the event loop that it will run in. What holds payload is from then on the keeper's."""
    storage = backend.storage(Session(queue, _NOBODY))
    try:
        service = start(spec, keeper, storage)
        if isinstance(storage, ShmStorage) and isinstance(keeper, ShmKeeper):
            _hand_over(storage, keeper, service)
        return service
    finally:
        storage.close()


def _hand_over(storage: ShmStorage, keeper: ShmKeeper, service: QueueService) -> None:
    with service.moment() as (_, frames):
        for partition in {partition for partition, _ in frames}:
            segment = storage.unannounced(partition)
            if segment is not None:
                keeper.open(_NOBODY, partition, segment.unit, segment.descriptor)
