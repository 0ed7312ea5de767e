"""A second user of the machine finds the doors of a queue closed, and is sent away where one was left open."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess
from tests.support.another_user import open_folder, tried_by_another_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

SPEC = QueueSpec({"a": ColumnSpec("int8")}, {"t": TaskSpec(("a",))})


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as path:
        yield path


def test_another_user_reaches_neither_socket_nor_saved_rows(folder: Path) -> None:
    saved = folder / "saved"
    with QueueProcess.start(SPEC, saves=str(folder)) as process, process.sync() as queue:
        queue.save(str(saved))
        socket = Path(process.queue.endpoint.address.removeprefix("unix:"))
        closed = (socket.parent, socket, saved, saved / "snapshot-0.msgpack")
        assert tried_by_another_user(closed) == {str(path): "EACCES" for path in closed}

        socket.parent.chmod(0o755)
        socket.chmod(0o666)
        assert tried_by_another_user([socket]) == {str(socket): "heard 0 bytes"}, "not even a challenge"

        assert queue.describe()["closed"] is False
