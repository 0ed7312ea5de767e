"""What this queue promises and TransferQueue 0.1.11 was seen not to keep, one test each."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import pickle
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import setuptools
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from harness.transfer_queue import (
    Batch,
    Column,
    ColumnSpec,
    GetRequest,
    LeaseExpired,
    LocalQueue,
    QueueSpec,
    Ragged,
    TaskSpec,
    TransferQueue,
)
from harness.transfer_queue.control.policies import POLICIES
from harness.transfer_queue.loader import StreamingDataLoader
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.storage.shm import ShmBackend
from harness.workers.dataflow import ROLLOUT_COLUMNS, partition_name, queue_spec
from tests.support.examples import examples
from tests.support.local_queue import virtual
from tests.support.project import ROOT
from tests.support.queue_sides import LocalSide, SocketSide
from tests.support.remote_queue import Stranger, endpoint_of, serving, until

COLUMNS = {"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32")}
TRAIN = QueueSpec(COLUMNS, {"train": TaskSpec(("reward",), lease_s=3600), "other": TaskSpec(("tokens",))})


def rewards(rows: Any) -> dict[str, Column]:
    return {"reward": np.array(list(rows), np.float32)}


def tokens(rows: Any) -> dict[str, Column]:
    return {"tokens": Ragged.from_rows([np.full(700, row) for row in rows], np.int64)}


def ids(batch: Batch | None) -> list[int]:
    assert batch is not None
    return batch.rows.tolist()


# -- groups


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(20))
@given(order=st.permutations([(row, column) for row in range(12) for column in COLUMNS]), count=st.sampled_from([4, 8]))
def test_groups_never_mix_across_prompts_however_their_rows_become_ready(
    policy: str, order: list[tuple[int, str]], count: int
) -> None:
    """TransferQueue 0.1.11 cut whatever was ready into groups by count: responses to different prompts shared one."""

    async def run() -> None:
        task = TaskSpec(tuple(COLUMNS), policy, whole_groups=True, weight="tokens")
        queue = LocalQueue(QueueSpec(COLUMNS, {"train": task}))
        await queue.create_partition("a", range(12), group_size=4)
        readers = [asyncio.ensure_future(queue.get("train", count, minimum=4, partition="a")) for _ in range(3)]
        for row, column in order:
            await queue.put("a", [row], rewards([row]) if column == "reward" else tokens([row]))
        batches = [batch for batch in await asyncio.gather(*readers) if batch is not None]
        groups = [ids(batch)[i : i + 4] for batch in batches for i in range(0, len(batch), 4)]
        assert sorted(groups) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]

    asyncio.run(run())


# -- who waits for whom


async def others_go_on(queue: TransferQueue, waiting: int) -> None:
    """Puts, gets of another task and questions, all answered while nobody who waits was."""
    for row in range(8):
        await queue.put("a", [row], tokens([row]))
        assert ids(await queue.get("other", 1, partition="a")) == [row]
        assert (await queue.describe())["waiting_gets"] == {"train": waiting, "other": 0}


@virtual
async def test_a_waiting_reader_blocks_neither_the_queue_nor_any_writer() -> None:
    """TransferQueue 0.1.11 answered one request at a time: for seconds, a reader without rows kept every writer out."""
    queue = LocalQueue(TRAIN)
    await queue.create_partition("a", range(8))
    readers = [asyncio.ensure_future(queue.get("train", 8, consumer=str(i))) for i in range(3)]
    await asyncio.sleep(0)
    await others_go_on(queue, waiting=3)
    assert asyncio.get_running_loop().time() == 0
    await queue.put("a", range(8), rewards(range(8)))
    done, waiting = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    assert [ids(reader.result()) for reader in done] == [list(range(8))]
    for reader in waiting:
        reader.cancel()


async def test_a_waiting_reader_over_a_socket_blocks_neither_the_queue_nor_any_writer() -> None:
    """Neither on its own connection, nor on another."""
    async with serving(ShmBackend(inline_bytes=0), spec=TRAIN) as (_, queue):
        await queue.create_partition("a", range(8))
        readers = [asyncio.ensure_future(queue.get("train", 8, consumer=str(i), partition="a")) for i in range(64)]
        await until(queue, lambda waiting: len(waiting) == 64)
        await others_go_on(queue, waiting=64)
        await queue.put("a", range(8), rewards(range(8)))
        (first,), _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        batch = first.result()
        assert ids(batch) == list(range(8))
        await queue.acknowledge(batch.lease)
        assert [r.result() for r in readers if (await asyncio.wait([r])) and r is not first] == [None] * 63


# -- what a writer is told


@pytest.mark.parametrize("over", ["no socket", "a socket"])
def test_a_put_with_a_conflicting_dtype_is_an_error_to_its_caller_and_marks_nothing_ready(over: str) -> None:
    """TransferQueue 0.1.11 logged it in another process, and handed the rows out."""
    side = LocalSide(TRAIN) if over == "no socket" else SocketSide(TRAIN, ShmBackend(inline_bytes=0))
    try:
        side.call("x", "create_partition", "a", range(2))
        side.call("x", "put", "a", [0], rewards([0]))
        with pytest.raises(ValueError, match="column 'reward' holds float32, not float64: cast it before the put"):
            side.call("x", "put", "a", [1], tokens([1]) | {"reward": np.zeros(1)})
        told = side.call("x", "describe")["partitions"]["a"]
        assert told["written"] == {"tokens": 0, "reward": 1} and told["tasks"]["train"]["ready"] == 1
        with pytest.raises(TimeoutError, match="1 of the 2 rows left are ready"):
            side.call("x", "get", "train", 2, timeout_s=0)
        side.call("x", "put", "a", [1], rewards([1]))
        assert ids(side.call("x", "get", "train", 2)) == [0, 1]
    finally:
        side.close()


@virtual
async def test_what_is_beyond_the_caps_waits_and_a_timeout_names_the_slowest_task() -> None:
    """TransferQueue 0.1.11 had no bound: whoever produced faster than others consumed filled the memory."""
    queue = LocalQueue(dataclasses.replace(TRAIN, capacity_rows=4, capacity_bytes=16))
    await queue.create_partition("a", range(4))
    await queue.put("a", range(4), rewards(range(4)))
    clock = asyncio.get_running_loop()
    with pytest.raises(TimeoutError, match="in 5 s: the slowest task is 'train' with 4 rows to do, the oldest in 'a'"):
        await queue.create_partition("b", range(4, 8), timeout_s=5)
    with pytest.raises(TimeoutError, match="no room for a put of .* in 2 s: the slowest task is 'train'"):
        await queue.put("a", [0], {"tokens": Ragged.from_rows([np.zeros(0, np.int64)])}, timeout_s=2)
    assert clock.time() == 7
    waits = asyncio.ensure_future(queue.create_partition("b", range(4, 8)))
    await asyncio.sleep(0)
    assert not waits.done()
    await queue.clear("a")
    await waits


# -- the loader


@virtual
async def test_the_streaming_loader_gives_a_batch_the_moment_it_is_ready() -> None:
    """TransferQueue 0.1.11 slept for a second wherever a batch was not there yet. On a clock that only moves when
    everybody waits, a batch is here at the very time at which its last row was written."""
    queue, clock = LocalQueue(TRAIN), asyncio.get_running_loop()
    await queue.create_partition("a", range(6))
    due = {0.001: [0], 0.25: [1], 3.0: [3, 4], 7.125: [2], 9.5: [5]}
    for at, rows in due.items():
        clock.call_later(at, lambda rows=rows: asyncio.ensure_future(queue.put("a", rows, rewards(rows))))
    seen = [
        (clock.time(), ids(batch)) async for batch in StreamingDataLoader(queue, GetRequest("train", 2, partition="a"))
    ]
    assert seen == [(0.25, [0, 1]), (7.125, [2, 3]), (9.5, [4, 5])]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_two_workers_of_a_data_loader_get_each_batch_once(start: str) -> None:
    """TransferQueue 0.1.11 gave every worker all batches."""
    with QueueProcess.start(TRAIN) as process:
        with process.sync() as queue:
            queue.create_partition("a", range(64))
            queue.put("a", range(64), rewards(range(64)))
        stream = StreamingDataLoader(process.queue, GetRequest("train", 4, partition="a", timeout_s=60))
        loader = DataLoader(
            stream, batch_size=None, num_workers=2, multiprocessing_context=start, timeout=120, in_order=False
        )
        batches = [ids(batch) for batch in loader]
        assert sorted(batches) == [list(range(i, i + 4)) for i in range(0, 64, 4)]
        with process.sync() as queue:
            assert queue.describe()["partitions"]["a"]["tasks"]["train"]["done"] == 64


# -- the dead


def test_the_rows_of_a_dead_consumer_go_out_again_and_its_late_acknowledgement_is_refused() -> None:
    """TransferQueue 0.1.11 knew no acknowledgement: what a consumer took and died with was lost."""
    side = SocketSide(TRAIN, ShmBackend(inline_bytes=0))
    try:
        side.call("x", "create_partition", "a", range(4))
        side.call("x", "put", "a", range(4), rewards(range(4)))
        done, lost = (side.call("y", "get", "train", 2, consumer="y") for _ in range(2))
        side.call("y", "acknowledge", done.lease)
        side.die("y")
        again = side.call("x", "get", "train", 2, timeout_s=60)
        assert ids(again) == ids(lost) == [2, 3]
        with pytest.raises(LeaseExpired, match=f"lease {lost.lease} is over and its rows go out again"):
            side.call("y", "acknowledge", lost.lease)
        side.call("x", "acknowledge", again.lease)
        assert side.call("x", "get", "train", 2, partition="a") is None
    finally:
        side.close()


# -- versions


async def test_rows_carry_the_policy_versions_that_sampled_them() -> None:
    """TransferQueue 0.1.11 kept none. Here they are a column like any other, one for each token."""
    queue = LocalQueue(queue_spec(["rollout", "actor"], training_ranks=1, capacity_rows=4))
    name = partition_name(3)
    await queue.create_partition(name, range(4), group_size=2)
    prompts = Ragged.from_rows([np.arange(3)] * 4, np.int64)
    await queue.put(name, range(4), {"prompt": prompts, "answer": prompts, "admitted_at": np.zeros(4)})
    sampled_by = [np.array(versions, np.int32) for versions in ([2, 2], [2, 3, 3], [3], [1, 2, 3, 3])]
    while (batch := await queue.get("rollout", 2, partition=name)) is not None:
        lengths = np.array([len(sampled_by[row]) for row in batch.rows])
        by_type = {"versions": Ragged.from_rows([sampled_by[row] for row in batch.rows])}
        for column, spec in ROLLOUT_COLUMNS.items():
            values = np.zeros(lengths.sum() if spec.ragged else len(batch), spec.dtype)
            by_type.setdefault(column, Ragged(values, lengths) if spec.ragged else values)
        await queue.put(name, batch.rows, by_type)
    await queue.put(name, range(4), {"reward": np.zeros(4, np.float32), "exact_match": np.zeros(4, bool)})
    await queue.put(name, range(4), {"advantage": np.zeros(4, np.float32)})
    trained = await queue.get("actor", 4, partition=name)
    assert trained is not None
    assert [row.tolist() for row in trained.ragged("versions").rows()] == [row.tolist() for row in sampled_by]


# -- trust


class Bomb:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "a client with the token"])
async def test_a_pickle_sent_as_a_message_is_not_opened(tmp_path: Path, known: bool) -> None:
    """TransferQueue 0.1.11 unpickled whatever came, from whoever could reach its port."""
    mark = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(mark))
    async with serving(spec=TRAIN) as (server, queue), Stranger.at(server, known) as stranger:
        if not known:
            await stranger.hear()
        await stranger.say(1, bomb)
        _, answer = await stranger.hear()
        assert isinstance(answer, m.Failed)
        assert (await queue.describe())["live_rows"] == 0
        if known:
            await queue.create_partition("a", range(1))
            spoiled = {"tokens": 16 + 8 * len(bomb)}
            put = m.Put("a", bytes(8), (1, spoiled, bytes(8) + len(bomb).to_bytes(8, "little") + bomb * 8), {}, None)
            assert await stranger.asks(put) == m.Done()
            batch = await queue.get("other", 1)
            assert batch is not None and batch.ragged("tokens").values.tobytes() == bomb * 8
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "it would have exploded"


@pytest.mark.parametrize("file", sorted((ROOT / "harness/transfer_queue").rglob("*.py")), ids=lambda file: file.stem)
def test_no_module_of_the_queue_imports_what_unpickles(file: Path) -> None:
    unpickles = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing"}
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not unpickles & {name.partition(".")[0] for name in named}
    loads = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
    assert not loads


async def test_a_client_without_the_token_is_refused() -> None:
    """TransferQueue 0.1.11 served whoever connected."""
    async with serving(spec=TRAIN) as (server, queue):
        stranger = type(queue)(endpoint_of(server, token=bytes(32)))
        await queue.describe()

        async def ask() -> None:
            with pytest.raises(PermissionError, match="refuses a client without its token"):
                await stranger.describe()

        await ask()
        assert (await queue.describe())["live_rows"] == 0


# -- packaging


def test_installing_the_project_adds_its_own_packages_only() -> None:
    """The wheel of TransferQueue 0.1.11 brought top-level packages `tests` and `scripts`."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(told) == {"packages", "package-data"} and set(told["packages"]) == {"find"}
    found = setuptools.find_namespace_packages(str(ROOT), **told["packages"]["find"])
    assert set(told["package-data"]) <= set(found)
    assert Counter(name.partition(".")[0] for name in found).keys() == {"harness", "schedules", "engines"}
