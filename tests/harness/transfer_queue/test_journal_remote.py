"""A queue in a process of its own that is killed, and one that takes its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, LeaseExpired, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.columns import Column
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.protocol import Backend
from harness.transfer_queue.storage.shm import ShmBackend

SPEC = QueueSpec(
    {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float64")},
    {"score": TaskSpec(("reward",)), "train": TaskSpec(("tokens", "reward"), lease_s=600.0)},
)
LENGTH = 4096
BACKENDS = pytest.mark.parametrize("backend", [ShmBackend(), InlineBackend()], ids=["shm", "inline"])


def cells(rows: list[int]) -> dict[str, Column]:
    """More than travels in a message, where there is another way."""
    return {
        "tokens": Ragged.from_rows([np.full(LENGTH, row) for row in rows], np.int64),
        "reward": np.array(rows, np.float64),
    }


def get(queue: SyncQueue, task: str, consumer: str = "x") -> tuple[int, list[int]]:
    batch = queue.get(task, 2, consumer=consumer, timeout_s=60)
    assert batch is not None
    assert batch.dense("reward").tolist() == batch.rows.tolist()
    if task == "train":
        assert np.array_equal(batch.ragged("tokens").values, np.repeat(batch.rows, LENGTH))
    return batch.lease, batch.rows.tolist()


def fill(queue: SyncQueue) -> None:
    queue.create_partition("a", range(8))
    queue.put("a", [1, 0, 2], cells([1, 0, 2]))
    queue.put("a", [3], {"reward": np.array([3.0])})


def go_on(queue: SyncQueue) -> None:
    """After `fill`, and rows 0 and 1 were handed out to both tasks under leases 0 and 1."""
    queue.acknowledge(1)
    with pytest.raises(ValueError, match="column 'reward' of row 3 .* is already written"):
        queue.put("a", [3], {"reward": np.array([3.0])})
    queue.put("a", [3], {"tokens": cells([3])["tokens"]})
    assert get(queue, "score") == (2, [2, 3])
    lease, rows = get(queue, "train")
    assert (lease, rows) == (3, [2, 3])
    queue.release("x")
    with pytest.raises(LeaseExpired):
        queue.acknowledge(3)
    assert get(queue, "train") == (4, [2, 3])
    queue.clear_finished()


@BACKENDS
def test_what_a_killed_queue_had_answered_goes_on_in_another_process(tmp_path: Path, backend: Backend) -> None:
    with QueueProcess.start(SPEC, backend, journal=str(tmp_path)) as first, first.sync() as queue:
        fill(queue)
        assert (get(queue, "score"), get(queue, "train", "y")) == ((0, [0, 1]), (1, [0, 1]))
        queue.describe()  # what this client said to have received has arrived
        first.process.kill()
        first.process.wait()
        with pytest.raises(ConnectionError):
            queue.describe()
    with QueueProcess.start(SPEC, backend, journal=str(tmp_path)) as second, second.sync() as queue:
        go_on(queue)
        queue.acknowledge(4)
        told = queue.describe()["partitions"]
        queue.save()
        assert len(list(tmp_path.iterdir())) == 3
    with QueueProcess.start(SPEC, backend, journal=str(tmp_path)) as third, third.sync() as queue:
        assert queue.describe()["partitions"] == told


@BACKENDS
def test_a_queue_is_saved_while_in_use_and_resumed_more_than_once(tmp_path: Path, backend: Backend) -> None:
    folder = str(tmp_path / "checkpoint")
    with QueueProcess.start(SPEC, backend) as first, first.sync() as queue:
        fill(queue)
        with pytest.raises(ValueError, match="journals in no folder"):
            queue.save()
        assert (get(queue, "score"), get(queue, "train", "y")) == ((0, [0, 1]), (1, [0, 1]))
        queue.save(folder)
        queue.clear_finished()
    for _ in range(2):
        with QueueProcess.start(SPEC, backend, resume=folder) as again, again.sync() as queue:
            go_on(queue)


def test_a_queue_cannot_resume_and_journal_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both: a journal resumes by itself"):
        QueueProcess.start(SPEC, resume=str(tmp_path), journal=str(tmp_path))
