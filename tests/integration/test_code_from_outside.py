"""Code that is in none of this repository's files, named by import path: a job runs on it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from harness.checks.job import plan_job
from harness.checks.layout import device_roles
from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine
from harness.config.placement import resolve_split
from harness.cost_model.memory_plan import GIB, Lengths, PlanSetting, plan_memory
from harness.metrics.run_files import load_metrics
from tests.support.forked_drivers import Drivers, forked_drivers
from tests.support.real_runs import SMALL

STORAGE = '''
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import shutil

import numpy as np

from harness.transfer_queue.storage.units import UnitStorage, UnitStore


@dataclass(frozen=True)
class Folder:
    """Frames as files of a folder, one for each column of a frame."""

    folder: str

    def check(self):
        if not Path(self.folder).is_dir():
            raise ValueError(f"{self.folder} is no folder; make it")

    def storage(self, session):
        return UnitStorage([Files(Path(self.folder))], session.writer, 0)

    def store(self, queue):
        return UnitStore([Files(Path(self.folder))])


class Files:
    name = "a folder"

    def __init__(self, folder):
        self.folder = folder

    def store(self, partition, number, buffers):
        (self.folder / partition).mkdir(exist_ok=True)
        for column, buffer in buffers.items():
            buffer.tofile(self.folder / partition / f"{number}-{column}")
            with (self.folder / "written").open("a") as log:
                log.write("x")

    def load(self, partition, cells):
        return [np.fromfile(self.folder / partition / f"{cell.number}-{cell.column}", np.uint8) for cell in cells]

    def forget(self, partition, number, columns):
        for column in columns:
            (self.folder / partition / f"{number}-{column}").unlink()

    def drop(self, partitions):
        for partition in partitions:
            shutil.rmtree(self.folder / partition, ignore_errors=True)

    def clear(self):
        pass

    def close(self):
        pass
'''

TRANSPORT = '''
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.config.transports import TransferMemory, TransferTimes, Transport
from harness.weight_sync.plan import digests, pack
from harness.weight_sync.process_group import HOST, BucketReceiver, BucketSender, GroupOffer, Sources
from schedules.separated_sync import SeparatedSync

FOLDER = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class FolderOffer(GroupOffer):
    folder: str

    def sender(self, store, device, previous=None, number=0):
        return FolderSender(self.plan, self.rendezvous.sender_group(store, HOST), Path(self.folder))

    def receiver(self, number, device, previous=None):
        sources = Sources(self.plan, self.rendezvous.receiver_groups(number, HOST))
        return FolderReceiver(self.plan, sources, Path(self.folder))


class Folder(Transport):
    """Two files of a folder, a bucket in each; a group on the host says when to go on to the other."""

    one_host = in_turn = True
    offers = FolderOffer

    def times(self, cost, sender_links):
        return TransferTimes(3.0, 0.0, 2.0)

    def memory(self, bucket, parameter, *, sharded):
        return TransferMemory("a bucket for its file", bucket, bucket, kept=False)

    def offer(self, plan, rendezvous, device, *, within_gpu):
        made = FolderOffer(plan, rendezvous, str(FOLDER))
        return made, made


class End:
    def _finish(self):
        self._group.barrier()


class FolderSender(End, BucketSender):
    def __init__(self, plan, group, folder):
        super().__init__(plan, group)
        self.folder, self.bucket = folder, torch.empty(plan.largest, dtype=torch.uint8)

    def _fill(self, turn, bucket, parameters):
        pack(bucket, parameters, self.bucket)
        taken = digests(bucket, self.bucket).numpy().tobytes() if self.plan.checked else b""
        (self.folder / str(turn)).write_bytes(self.bucket[: bucket.bytes].numpy().tobytes() + taken)

    def _hand_over(self, filled):
        self._group.barrier()


class FolderReceiver(End, BucketReceiver):
    def __init__(self, plan, sources, folder):
        super().__init__(plan, sources)
        self.folder = folder

    def _next(self, number):
        self._group.barrier()
        size = self.plan.buckets[number].bytes
        read = torch.frombuffer(bytearray((self.folder / str(number % 2)).read_bytes()), dtype=torch.uint8)
        with (self.folder / "read").open("a") as log:
            log.write("x")
        return read[:size], read[size:].clone().view(torch.int64) if self.plan.checked else None


@dataclass(frozen=True)
class Sent(SeparatedSync):
    """separated_sync by a transport that is a setting."""

    transport: str = "collective"
'''

LOSS = '''
def square(log_probs, behaviour_log_probs, advantages, mask, *, scale: float = 1.0):
    """-scale A log pi + (log pi - log mu)^2."""
    pull = (log_probs - behaviour_log_probs) ** 2
    return (pull - scale * advantages * log_probs).masked_fill(~mask, 0.0)
'''


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "outside_storage.py").write_text(STORAGE)
    (folder / "outside_loss.py").write_text(LOSS)
    (folder / "outside_transport.py").write_text(TRANSPORT)
    for made in ("weights", "frames"):
        (folder / made).mkdir()
    return folder


@pytest.fixture(scope="module")
def seeing(outside: Path) -> Iterator[Drivers]:
    """Drivers that find what lies there."""
    with patch.dict(os.environ, PYTHONPATH=str(outside)), forked_drivers() as drivers:
        yield drivers


@pytest.mark.slow
def test_a_job_runs_on_a_loss_and_a_storage_from_outside(outside: Path, seeing: Drivers) -> None:
    folder = seeing.bench(
        outside / "results",
        "outside",
        *SMALL.split(),
        "schedule=separated_sync",
        "iterations=3",
        "algorithm.correction=outside_loss:square",
        "algorithm.options.scale=2.0",
        "cluster.queue=outside_storage:Folder",
        f"cluster.queue_options.folder={outside / 'frames'}",
    )
    used = {plugin["setting"] for plugin in json.loads((folder / "manifest.json").read_text())["plugins"]}
    assert used == {"algorithm.correction", "cluster.queue"}
    assert (folder / "DONE").exists() and len((outside / "frames/written").read_text()) >= 9
    assert not list((outside / "frames").glob("train_0/*"))  # what was trained is dropped there, too


SENT = ("schedule=outside_transport:Sent", "schedule.transport=outside_transport:Folder", "iterations=3")


@pytest.mark.slow
def test_weights_travel_by_a_transport_from_outside(outside: Path, seeing: Drivers) -> None:
    """The weights that engines sample with are those that were trained: all digests agree, and the log-probs of the
    engine are those of the trainer's own forward pass, as by broadcast."""
    settings = (*SMALL.split(), "algorithm.recompute_log_probs=true", "cluster.verify_weights=true")
    settings = (*settings, "cluster.bucket_bytes=65536", "cluster.devices=3", "schedule.split.rollout=2")
    folder = seeing.bench(outside / "results", "by_files", *SENT, *settings)
    used = {
        plugin["setting"]: plugin["path"] for plugin in json.loads((folder / "manifest.json").read_text())["plugins"]
    }
    assert used == {"schedule": "outside_transport:Sent", "schedule.transport": "outside_transport:Folder"}
    buckets, odd = divmod(len((outside / "weights/read").read_text()), 2 * 3)  # by two engines, three versions
    assert buckets > 1 and not odd
    by_broadcast = seeing.bench(outside / "results", "by_broadcast", SENT[0], SENT[2], *settings)
    mismatch = [[line["policy/mismatch_kl"] for line in load_metrics(run)] for run in (folder, by_broadcast)]
    assert mismatch[0] == mismatch[1]


@pytest.mark.slow
def test_a_transport_from_outside_is_simulated(outside: Path, seeing: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = seeing.bench(
        outside / "results", "simulated", *SENT, "backend=virtual", "cost=tiny_cpu", "cluster.devices=2"
    )
    assert [line["time/weight_sync_s"] for line in load_metrics(folder)] == pytest.approx([3.0 + 2.0] * 3)
    monkeypatch.syspath_prepend(outside)
    config = compose_job(["model=qwen7b", "model.checkpoint=null", "cluster.devices=2", "schedule=separated_sync"])
    placement = resolve_split(config.schedule.split, 2, device_roles(config))
    setting = PlanSetting(Lengths(8, 8), 80 * GIB, "outside_transport:Folder")
    held = [item for pool in plan_memory(config, placement, setting).pools for item in pool.items]
    (sender,) = (item for item in held if item.what == "a bucket for its file")
    assert sender.bytes >= config.cluster.bucket_bytes and sender.phases == ("publish",)


def test_a_transport_within_a_host_is_refused_across_two(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(outside)
    config = compose_job([*SENT, "cluster.devices=16", "backend=real"])
    with pytest.raises(ConfigError, match="transport=outside_transport:Folder shares memory inside of one host"):
        plan_job(config, make_schedule(config), Machine(cores=8, gpus=16, gpu_bytes=80 * GIB, nodes=2))
