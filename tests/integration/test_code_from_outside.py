"""Code that is in none of this repository's files, named by import path: a job runs on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.real_runs import SMALL, bench

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

LOSS = '''
def square(log_probs, behaviour_log_probs, advantages, mask, *, scale: float = 1.0):
    """-scale A log pi + (log pi - log mu)^2."""
    pull = (log_probs - behaviour_log_probs) ** 2
    return (pull - scale * advantages * log_probs).masked_fill(~mask, 0.0)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "outside_storage.py").write_text(STORAGE)
    (tmp_path / "outside_loss.py").write_text(LOSS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "frames").mkdir()
    return tmp_path


def test_a_job_runs_on_a_loss_and_a_storage_from_outside(outside: Path) -> None:
    folder = bench(
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
