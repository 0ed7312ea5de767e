"""What this queue promises and TransferQueue 0.1.11 was seen not to keep, one test each."""

import ast
import asyncio
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from harness.rpc.handshake import ANSWER
from harness.transfer_queue import GetRequest, QueueSpec, TaskSpec, TransferQueue
from harness.transfer_queue.loader import StreamingDataLoader
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.local_queue import ids, virtual
from tests.support.project import ROOT
from tests.support.remote_queue import COLUMNS, Stranger, rewards, serving, tokens, until

TRAIN = QueueSpec(COLUMNS, {"train": TaskSpec(("reward",), lease_s=3600), "other": TaskSpec(("tokens",))})


# -- who waits for whom


async def others_go_on(queue: TransferQueue, waiting: int) -> None:
    """Puts, gets of another task and questions, all answered while no waiting get was."""
    for row in range(8):
        await queue.put("a", [row], tokens([row]))
        assert ids(await queue.get("other", 1, partition="a")) == [row]
        assert (await queue.describe())["waiting_gets"] == {"train": waiting, "other": 0}


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


# -- the loader


@virtual
async def test_the_streaming_loader_gives_a_batch_the_moment_it_is_ready() -> None:
    """TransferQueue 0.1.11 slept for a second wherever a batch was not there yet. On a clock that only moves when
    all tasks wait, a batch is here at the very time at which its last row was written."""
    queue, clock = LocalQueue(TRAIN), asyncio.get_running_loop()
    await queue.create_partition("a", range(6))
    due = {0.001: [0], 0.25: [1], 3.0: [3, 4], 7.125: [2], 9.5: [5]}
    for at, rows in due.items():
        clock.call_later(at, lambda rows=rows: asyncio.ensure_future(queue.put("a", rows, rewards(rows))))
    loader = StreamingDataLoader(queue, GetRequest("train", 2, partition="a"))
    seen = [(clock.time(), ids(batch)) async for batch in loader]
    assert seen == [(0.25, [0, 1]), (7.125, [2, 3]), (9.5, [4, 5])]


@pytest.mark.slow
def test_two_workers_of_a_data_loader_get_each_batch_once() -> None:
    """TransferQueue 0.1.11 gave every worker all batches. They are spawned: tests/harness/transfer_queue/test_loader.py
    has forked ones."""
    with QueueProcess.start(TRAIN) as process:
        with process.sync() as queue:
            queue.create_partition("a", range(64))
            queue.put("a", range(64), rewards(range(64)))
        stream = StreamingDataLoader(process.queue, GetRequest("train", 4, partition="a", timeout_s=60))
        how = {"num_workers": 2, "multiprocessing_context": "spawn", "timeout": 120, "in_order": False}
        batches = [ids(batch) for batch in DataLoader(stream, batch_size=None, **how)]
        assert sorted(batches) == [list(range(i, i + 4)) for i in range(0, 64, 4)]
        with process.sync() as queue:
            assert queue.describe()["partitions"]["a"]["tasks"]["train"]["done"] == 64


# -- trust


class Bomb:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "a client with the token"])
async def test_a_pickle_sent_as_a_message_is_not_opened(tmp_path: Path, known: bool) -> None:
    """TransferQueue 0.1.11 unpickled whatever came, from any process that could reach its port."""
    mark = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(mark))
    async with serving(spec=TRAIN) as (server, queue), Stranger.at(server, known) as stranger:
        if known:
            await stranger.say(1, bomb)
            assert isinstance((await stranger.hear())[1], m.Failed)
        else:
            await asyncio.get_running_loop().sock_sendall(stranger.sock, bomb.ljust(ANSWER))
        assert (await queue.describe())["live_rows"] == 0
        if known:
            await queue.create_partition("a", range(1))
            spoiled = Frame(1, {"tokens": 8 + 8 * len(bomb)}, len(bomb).to_bytes(8, "little") + bomb * 8)
            put = m.Put("a", bytes(8), spoiled, {})
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


# -- packaging


README = ROOT / "harness/transfer_queue/README.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for example in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        exec(example, names)
    printed = capsys.readouterr().out
    assert "Batch(partition='train_0', rows=array([0, 1, 2, 3]" in printed
    assert "{'tokens': 0, 'reward': 1}" in printed
