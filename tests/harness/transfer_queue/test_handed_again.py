"""What a reader that is gone had not finished goes out again, row by row, without what it had."""

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, LocalQueue, QueueSpec, TaskSpec

COLUMNS = {name: ColumnSpec("float32") for name in ("prompt", "response", "length")}
SPEC = QueueSpec(
    COLUMNS,
    {
        "make": TaskSpec(("prompt",), whole_groups=True, writes=("response", "length")),
        "train": TaskSpec(("response", "length"), whole_groups=True, policy="completion"),
    },
)


async def queue_of(groups: int, spec: QueueSpec = SPEC) -> LocalQueue:
    """Groups of three rows, all of which may be made."""
    queue = LocalQueue(spec)
    rows = range(3 * groups)
    await queue.create_partition("p", rows, 3)
    await queue.put("p", rows, {"prompt": np.zeros(len(rows), np.float32)})
    return queue


async def make(queue: LocalQueue, *rows: int, columns: tuple[str, ...] = ("response", "length")) -> None:
    await queue.put("p", rows, dict.fromkeys(columns, np.ones(len(rows), np.float32)))


async def take(queue: LocalQueue, task: str, count: int, **options: object) -> list[int] | None:
    batch = await queue.get(task, count, minimum=3, timeout_s=0.01, **options)  # type: ignore[arg-type]
    return None if batch is None else batch.rows.tolist()


async def test_rows_that_were_made_do_not_go_out_again_and_the_others_do() -> None:
    queue = await queue_of(4)
    assert await take(queue, "make", 9, consumer="dead") == list(range(9))
    await make(queue, 0, 1, 2)
    await make(queue, 4)
    await make(queue, 7, columns=("response",))  # not all of it
    await queue.release("dead")
    assert await take(queue, "make", 6, consumer="other") == [3, 5, 6, 7, 8]
    assert await take(queue, "make", 6, consumer="other") == [9, 10, 11]
    await make(queue, 3, 5, 6, 8, 9, 10, 11)
    await make(queue, 7, columns=("length",))
    await queue.close()
    assert await take(queue, "make", 6) is None
    assert sorted(await take(queue, "train", 12) or []) == list(range(12))
    assert await queue.clear_finished() == ["p"]


async def test_a_reader_that_is_gone_twice_leaves_less_each_time() -> None:
    queue = await queue_of(1)
    for made in range(3):
        assert await take(queue, "make", 3, consumer=f"dead {made}") == list(range(made, 3))
        await make(queue, made)
        await queue.release(f"dead {made}")
    await queue.close()
    assert await take(queue, "make", 3) is None


async def test_a_group_that_was_begun_keeps_the_lowest_bound_it_was_begun_under_and_another_does_not() -> None:
    queue = await queue_of(2)
    await queue.set_bound("make", "old", 6)
    await queue.set_bound("make", "new", 12)
    assert await take(queue, "make", 6, consumer="old") == list(range(6))
    await make(queue, 0)
    await queue.release("old")
    assert await take(queue, "make", 6, consumer="new") == [1, 2, 3, 4, 5]
    assert await queue.drop("train", "make", 6) == [0, 1, 2]
    assert await queue.drop("train", "make", 12) == [3, 4, 5]


async def test_with_a_lease_what_was_made_counts_as_acknowledged() -> None:
    tasks = {"make": TaskSpec(("prompt",), whole_groups=True, lease_s=1e9, writes=("response",))}
    queue = await queue_of(2, QueueSpec(COLUMNS, tasks))
    assert await take(queue, "make", 6, consumer="dead") == list(range(6))
    await make(queue, 0, 1, 2)
    await queue.release("dead")
    batch = await queue.get("make", 3, consumer="other")
    assert batch is not None and batch.rows.tolist() == [3, 4, 5]
    await queue.acknowledge(batch.lease)
    await queue.close()
    assert await take(queue, "make", 3) is None


@pytest.mark.parametrize(
    ("task", "match"),
    [
        (TaskSpec(("prompt",), writes=("prize",)), "writes unknown columns"),
        (TaskSpec(("prompt",), writes=("length",), ranks=2), "several readers"),
    ],
)
def test_what_cannot_be_told_is_refused(task: TaskSpec, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        QueueSpec(COLUMNS, {"make": task})
