"""Workers in Ray actors answer as those of one machine do, and Ray says how they died."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from ray.cluster_utils import Cluster

from harness.config.placement import Placement
from harness.runtime.ray_cluster import ClusterSettings, RayCluster
from harness.runtime.runtime import WorkerDied
from harness.transfer_queue import ColumnSpec, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.storage.inline import InlineBackend
from tests.support.ray_leftovers import IGNORED
from tests.support.real_runs import SMALL, STARTED_WITHIN_S, bench, killed
from tests.support.worker_roles import EchoRole, build_echoes, fail_to_build

pytestmark = [pytest.mark.slow, *IGNORED]

ONE_CPU = {"num_cpus": 1, "include_dashboard": False}
SETTINGS = (*SMALL.split(), "schedule=fully_async", f"cluster.wait_timeout_s={STARTED_WITHIN_S}")
JOINS = "import ray; ray.init()"
"""Whatever session Ray finds on this machine."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of this machine, on which each test leaves nothing."""
    idle = {"RAY_prestart_worker_first_driver": "0"}  # or workers import Ray that nobody needs
    with patch.dict(os.environ, idle):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


async def test_workers_of_a_cluster_answer_die_and_end(address: str) -> None:
    two = {("echo", 0): EchoRole, ("echo", 1): EchoRole}
    placement = Placement({"rollout": (0, 1), "actor": (2,)})
    limits = {"start_timeout_s": 120, "call_timeout_s": 60}
    with RayCluster(ClusterSettings(address, placement, gpu=False, per_engine=2, **limits)) as cluster:
        first, second = cluster.start_worker("device[0,1]", (0, 1), two, build_echoes)
        (other,) = cluster.start_worker("device[2]", (2,), {("echo", 2): EchoRole}, build_echoes)
        (broken,) = cluster.start_worker("host", (), {("echo", 3): EchoRole}, fail_to_build)
        for handle in (first, other, broken):
            await handle.connected()
        assert await first.role.pid() == await second.role.pid() != await other.role.pid()
        with pytest.raises(MemoryError, match="no room for the weights"):
            await broken.role.pid()
        before = time.monotonic()
        await other.connection.start_clock(12.5)
        assert abs(await other.role.origin() - 12.5) < time.monotonic() - before
        await first.end()
        assert await first.death() and await second.role.echo(3) == [3]
        call = asyncio.create_task(second.role.block())
        await asyncio.sleep(0)
        os.kill(await other.connected(), signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=r"echo\[2\] died during pid: .* \(on [\d.]+\); its output is in the logs of Ray"
        ):
            await other.role.pid()
        assert await other.death() and await second.death(within_s=0.1) is None
        await second.end()
        with pytest.raises(WorkerDied, match=r"echo\[1\] died during block"):
            await call


async def test_payloads_of_a_run_travel_in_the_channel_of_its_queue(address: str) -> None:
    """However many bytes they are."""
    spec = QueueSpec({"tokens": ColumnSpec("int64", ragged=True)}, {"train": TaskSpec(("tokens",))})
    tokens = Ragged.from_rows([np.arange(10_000_000)])
    limits = {"start_timeout_s": 120, "call_timeout_s": 60}
    placement = Placement({"rollout": (0,), "actor": (1,)})
    with RayCluster(ClusterSettings(address, placement, gpu=False, **limits)) as cluster:
        queue = cluster.start_queue(spec)
        await queue.create_partition("train_0", [0])
        await queue.put("train_0", [0], {"tokens": tokens})
        batch = await queue.get("train", 1, timeout_s=60)
        assert batch is not None and np.array_equal(batch.ragged("tokens").values, tokens.values)
        assert isinstance(queue, RemoteQueue) and queue.endpoint.backend == InlineBackend()


def test_a_run_with_all_on_a_cluster(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `fully_async`; others in test_hosts."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    folder = bench(tmp_path, "cluster", "cluster.queue=ray", *SETTINGS, "iterations=2")
    assert (folder / "DONE").is_file()


def test_a_run_that_names_no_cluster_does_not_join_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Its sockets' names must be short, and its workers may still end when it is gone.
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        theirs = Cluster(initialize_head=True, head_node_args=ONE_CPU)
        try:
            run = bench(tmp_path, "beside", *SETTINGS, "iterations=2")
            assert (run / "DONE").is_file()
            assert not theirs.global_state.job_table()
            subprocess.run([sys.executable, "-c", JOINS], check=True, timeout=STARTED_WITHIN_S)
            assert theirs.global_state.job_table(), "it is there to be joined"
        finally:
            theirs.shutdown()


def test_sigterm_on_clusters_leaves_a_checkpoint(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    code, said = killed(tmp_path, "left", (*SETTINGS, "iterations=400", "checkpoint.every=1"), 2, signal.SIGTERM)
    assert code == 75 and "left, as SIGTERM asked, with a checkpoint of version" in said
