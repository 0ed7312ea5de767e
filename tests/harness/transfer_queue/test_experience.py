"""The tensor verbs: what was put as tensors comes back as tensors, packed and uncopied where that is possible."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from harness.transfer_queue import Batch, Column, ColumnSpec, GetRequest, LeaseExpired, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.experience import Experience, ExperienceQueue, Values, to_column, to_tensor
from harness.transfer_queue.local import LocalQueue

SPEC = QueueSpec(
    {
        "tokens": ColumnSpec("int64", ragged=True),
        "reward": ColumnSpec("float32"),
        "pair": ColumnSpec("int32", shape=(2,)),
    },
    {"train": TaskSpec(("tokens", "reward", "pair"), lease_s=60)},
)
PAIRS = torch.zeros(3, 2, dtype=torch.int32)
TOKENS = [torch.arange(n) + n for n in (3, 0, 2)]


class Blocking:
    """A LocalQueue that blocks, in an event loop of its own."""

    def __init__(self) -> None:
        self.spec = SPEC
        self._queue = LocalQueue(SPEC)
        self._runner = asyncio.Runner()

    def run(self, method: str, *args: Any, **options: Any) -> Any:
        return self._runner.run(getattr(self._queue, method)(*args, **options))

    def put(
        self, partition: str, rows: Iterable[int], columns: Mapping[str, Column], *, timeout_s: float | None = None
    ) -> None:
        self.run("put", partition, rows, columns, timeout_s=timeout_s)

    def get_batch(self, request: GetRequest) -> Batch | None:
        return self.run("get_batch", request)

    def acknowledge(self, lease: int) -> None:
        self.run("acknowledge", lease)

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def blocking() -> Iterable[Blocking]:
    queue = Blocking()
    queue.run("create_partition", "a", range(3))
    yield queue
    queue.close()


@pytest.mark.parametrize(
    "tokens", [TOKENS, torch.nested.as_nested_tensor(TOKENS, layout=torch.jagged)], ids=["a list", "nested"]
)
def test_what_is_put_as_tensors_is_got_as_tensors(blocking: Blocking, tokens: Values) -> None:
    queue = ExperienceQueue(blocking)
    pairs = [torch.tensor([i, i + 1], dtype=torch.int32) for i in range(3)]
    queue.put_experience("a", range(3), {"tokens": tokens, "pair": pairs})
    queue.put_experience("a", [2, 0, 1], {"reward": torch.tensor([2.0, 0.0, 1.0])})
    experience = queue.get_experience("train", 3)
    assert isinstance(experience, Experience) and len(experience) == 3
    assert experience.rows.tolist() == [0, 1, 2] and experience.data["reward"].tolist() == [0, 1, 2]
    assert [row.tolist() for row in experience.data["tokens"].unbind()] == [row.tolist() for row in TOKENS]
    assert experience.data["pair"].tolist() == [[0, 1], [1, 2], [2, 3]]
    queue.acknowledge(experience)
    assert queue.get_experience("train", 1, partition="a") is None


def test_what_is_not_acknowledged_is_refused_when_it_comes_late(blocking: Blocking) -> None:
    queue = ExperienceQueue(blocking)
    queue.put_experience(
        "a", range(3), {"tokens": TOKENS, "pair": torch.zeros(3, 2, dtype=torch.int32), "reward": torch.ones(3)}
    )
    experience = queue.get_experience("train", 3, consumer="dead")
    assert experience is not None
    blocking.run("release", "dead")
    with pytest.raises(LeaseExpired):
        queue.acknowledge(experience)


def test_a_tensor_of_another_dtype_and_an_unknown_column_are_refused_by_name(blocking: Blocking) -> None:
    queue = ExperienceQueue(blocking)
    with pytest.raises(ValueError, match="column 'reward' holds float32, not float64"):
        queue.put_experience("a", range(3), {"reward": torch.ones(3, dtype=torch.float64)})
    with pytest.raises(ValueError, match="column 'rewards' is unknown"):
        queue.put_experience("a", range(3), {"rewards": torch.ones(3)})


def test_tensors_share_the_memory_of_their_columns() -> None:
    ragged, dense = Ragged.from_rows([np.arange(3), np.arange(2)]), np.zeros(2, np.float32)
    to_tensor(ragged).values()[0] = 7
    to_tensor(dense)[1] = 7
    assert ragged.values[0] == 7 and dense[1] == 7
    tensor = torch.zeros(3)
    to_column(tensor, ragged=False)[0] = 5  # type: ignore[index]
    assert tensor[0] == 5
