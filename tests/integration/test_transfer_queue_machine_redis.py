"""The queue with its payloads in real redis servers, against the model in plain Python."""

import shutil

import pytest

from tests.support.queue_machine import TASKS, UNTIMED, run_machine
from tests.support.queue_sides import SocketSide
from tests.support.redis_servers import keys, redis_server

pytest.importorskip("redis", reason="needs the redis extra")
from harness.transfer_queue.storage.redis_storage import RedisBackend  # noqa: E402

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server on the PATH"),
]


def test_the_queue_in_redis_behaves_as_its_model_and_leaves_nothing_there() -> None:
    least = dict.fromkeys(TASKS, 2) | {"deaths": 1}
    with redis_server() as one, redis_server() as other:
        backend = RedisBackend((one.url, other.url), inline_bytes=256)
        run_machine(lambda: SocketSide(UNTIMED, backend), cases=12, steps=40, least=least)
        assert keys((one, other)) == []
