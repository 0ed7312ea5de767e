"""The peer: PyPI `TransferQueue` 0.1.11, driven through its public client. Imported in its own environment only.

Its readers cannot wait: a reader that finds too few rows asks again after 2 ms, as its own loader and examples poll.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import TransferQueueClient

from tests.benchmarks.transfer_queue.contract import Taken
from tests.benchmarks.transfer_queue.machine import titled
from tests.benchmarks.transfer_queue.workload import Tasks

VERSION = "0.1.11"
POLL_S = 0.002
DEADLINE_S = 120.0


class Peer:
    """One controller and one storage unit, both Ray actors: its defaults, with gets that return at once if not served
    (the other mode blocks the controller, and all its clients, while one of them waits)."""

    def start(self, flows: Mapping[str, Tasks]) -> Any:
        assert transfer_queue.__version__ == VERSION, f"expected {VERSION}, not {transfer_queue.__version__}"
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        settings = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
        transfer_queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))
        return ray.get(transfer_queue.interface._TQ_CONTROLLER.get_config.remote())

    def connect(self, address: Any, flow: str) -> "PeerClient":
        return PeerClient(address, f"{flow}_{os.getpid()}")

    def services(self) -> list[int]:
        return titled("ray::TransferQueueController", "ray::SimpleStorageUnit")

    def stop(self) -> None:
        transfer_queue.close()
        ray.shutdown()


class PeerClient:
    def __init__(self, settings: Any, name: str) -> None:
        torch.set_num_threads(1)
        backend = settings.backend.storage_backend
        self._client = TransferQueueClient(name, settings.controller.zmq_info)
        self._client.initialize_storage_manager(manager_type=backend, config=settings.backend[backend])

    def native(self, rows: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(row) for row in rows]

    def create(self, partition: str, rows: int) -> None:
        """It makes a partition at its first put."""

    def put(
        self,
        partition: str,
        rows: np.ndarray,
        ragged: Mapping[str, Sequence[torch.Tensor]],
        dense: Mapping[str, np.ndarray],
    ) -> None:
        columns = {name: torch.nested.as_nested_tensor(list(c), layout=torch.jagged) for name, c in ragged.items()}
        columns |= {name: torch.from_numpy(column) for name, column in dense.items()}
        self._client.put(TensorDict(columns, batch_size=rows.size), partition_id=partition)

    def get(self, partition: str, task: str, columns: Sequence[str], count: int) -> Taken:
        return self.read(self.ask(partition, task, columns, count))

    def ask(self, partition: str, task: str, columns: Sequence[str], count: int) -> Any:
        """What the controller says about the next `count` rows, asked for until it has them."""
        deadline = time.monotonic() + DEADLINE_S
        while not (meta := self._client.get_meta(list(columns), count, partition, task_name=task)).size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"task {task!r} of {partition!r} had no {count} rows for {DEADLINE_S} s")
            time.sleep(POLL_S)
        return meta

    def read(self, meta: Any) -> Taken:
        found = dict(self._client.get_data(meta).items())
        ragged = {name: _packed(column) for name, column in found.items() if column.dim() > 1}
        dense = {name: column.numpy() for name, column in found.items() if column.dim() == 1}
        return Taken(ragged, dense, meta)

    def put_back(self, taken: Taken, column: str, values: np.ndarray, offsets: np.ndarray) -> None:
        packed = torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))
        self._client.put(TensorDict({column: packed}, batch_size=offsets.size - 1), metadata=taken.handle)

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def close(self) -> None:
        self._client.close()


def _packed(column: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    if not column.is_nested:  # rows of equal length came back stacked
        rows, items = column.shape
        return column.reshape(-1).numpy(), np.arange(rows + 1) * items
    if column.layout is not torch.jagged:
        column = torch.nested.as_nested_tensor(list(column.unbind()), layout=torch.jagged)
    return column.values().numpy(), column.offsets().numpy()
