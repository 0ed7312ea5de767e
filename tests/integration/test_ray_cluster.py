"""Workers in Ray actors answer as those of one machine do, and Ray says how they died."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from harness.config.placement import Placement
from harness.runtime.ray_cluster import RayCluster
from harness.runtime.runtime import WorkerDied
from tests.support.ray_leftovers import IGNORED
from tests.support.real_runs import SMALL, bench
from tests.support.worker_roles import EchoRole, build_echoes, fail_to_build

pytestmark = [pytest.mark.slow, *IGNORED]


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster of this machine."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


async def test_workers_of_a_cluster_answer_die_and_end(address: str) -> None:
    two = {("echo", 0): EchoRole, ("echo", 1): EchoRole}
    placement = Placement({"rollout": (0, 1), "actor": (2,)})
    limits = {"start_timeout_s": 120, "call_timeout_s": 60}
    with RayCluster(address, placement, gpu=False, per_engine=2, **limits) as cluster:
        first, second = cluster.start_worker("device[0,1]", (0, 1), two, build_echoes)
        (other,) = cluster.start_worker("device[2]", (2,), {("echo", 2): EchoRole}, build_echoes)
        (broken,) = cluster.start_worker("host", (), {("echo", 3): EchoRole}, fail_to_build)
        for handle in (first, other, broken):
            await handle.connected()
        assert await first.role.pid() == await second.role.pid() != await other.role.pid()
        with pytest.raises(MemoryError, match="no room for the weights"):
            await broken.role.pid()
        before = time.monotonic()
        await other.connection.start_clock(12.5, here=False)
        assert abs(await other.role.origin() - 12.5) < time.monotonic() - before
        await first.end()
        assert await first.death() and await second.role.echo(3) == [3]
        call = asyncio.create_task(second.role.block())
        await asyncio.sleep(0)
        os.kill(await other.connected(), signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"echo\[2\] died during pid: .*; its output is in Ray's logs"):
            await other.role.pid()
        assert await other.death() and await second.death(within_s=0.1) is None
        await second.end()
        with pytest.raises(WorkerDied, match=r"echo\[1\] died during block"):
            await call


@pytest.mark.parametrize("schedule", ["fully_async", "colocate_sync"])
def test_a_run_whose_workers_are_on_a_cluster(
    schedule: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)

    folder = bench(tmp_path, "cluster", f"schedule={schedule}", *SMALL.split(), "iterations=2")

    assert (folder / "DONE").is_file()
