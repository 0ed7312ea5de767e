"""What is believed of a checkpoint's folder, and what is passed over, and named."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from harness.config import CheckpointConfig
from harness.driver.checkpoint_files import (
    CHECKPOINTS,
    Cut,
    PromptState,
    RecorderState,
    begun,
    clear_passed_over,
    cut_back,
    last_checkpoint,
    name_of,
    put_in_place,
)
from harness.driver.checkpointing import Checkpoints
from harness.driver.earlier import EarlierAttempt
from harness.metrics.ledger import LedgerState


def cut(version: int, size: int) -> Cut:
    ledger = LedgerState(admitted=8, in_flight=[(4, 8)], trained=[(0, 4, 0)], dropped=[])
    prompts = PromptState(next=2, groups=20, drops=[], made=1, end=4, partitions=[])
    recorder = RecorderState(trained_samples=4, skipped_steps={}, last_end=1.5, engines=[])
    digests = {"metrics.jsonl": hashlib.sha256(b"0123456789" * (size // 10)).hexdigest()}
    return Cut(version, 2.5, ledger, [], prompts, recorder, {"metrics.jsonl": size}, digests=digests)


def make(run: Path, version: int, keep: int = 9) -> Path:
    """A checkpoint; the run's metrics have ten bytes a version."""
    (run / "metrics.jsonl").write_bytes(b"0123456789" * version)
    folder = begun(run / CHECKPOINTS, version)
    (folder / "actor").mkdir()
    (folder / "actor" / "rank-00000.safetensors").write_bytes(b"weights" * version)
    (folder / "queue").mkdir()
    (folder / "queue" / "CURRENT").write_text("0\n")
    return put_in_place(folder, cut(version, 10 * version), {}, keep)


def test_the_newest_is_found_as_it_was_written_and_the_files_of_its_run_are_cut_back(tmp_path: Path) -> None:
    for version in (2, 4):
        make(tmp_path, version)
    (tmp_path / "metrics.jsonl").write_bytes(b"0123456789" * 7)
    found, lines = last_checkpoint(tmp_path)
    assert found is not None and found.cut == cut(4, 40) and not lines
    cut_back(tmp_path, found.cut.files)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 40


def test_no_more_are_kept_than_asked_for_and_a_damaged_one_pushes_no_whole_one_out(tmp_path: Path) -> None:
    for version in (2, 4, 6):
        make(tmp_path, version, keep=2)
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir()) == [name_of(4), name_of(6)]
    make(tmp_path, 30)
    flipped(make(tmp_path, 40) / "driver.json")
    began = EarlierAttempt(Console(quiet=True), ignored=False)
    began(tmp_path)
    assert began.checkpoint is not None and began.checkpoint.version == 30
    make(tmp_path, 45, keep=2)
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir()) == [name_of(30), name_of(45)]


def test_one_gets_its_name_once_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[Path] = set()
    named = tmp_path / CHECKPOINTS / name_of(2)

    def watched(descriptor: int) -> None:
        if not named.exists():
            synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", watched)
    make(tmp_path, 2)
    assert {tmp_path, tmp_path / "metrics.jsonl"} < synced


FILES = ("actor/rank-00000.safetensors", "queue/CURRENT", "driver.json", "manifest.json")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a bit": flipped,
    "random": lambda path: path.write_bytes(b"\x93\x00\xff" * 50),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_one_is_passed_over_for_the_one_before_and_named(tmp_path: Path, file: str, damage: str) -> None:
    make(tmp_path, 2)
    newest = make(tmp_path, 4)
    DAMAGES[damage](newest / file)
    found, (line,) = last_checkpoint(tmp_path)
    assert found is not None and found.version == 2
    assert str(newest) in line and line.endswith("; the one before it is tried")


def unreadable(run: Path) -> None:
    manifest = run / CHECKPOINTS / name_of(4) / "manifest.json"
    manifest.unlink()
    manifest.mkdir()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (unreadable, "manifest.json cannot be read: Is a directory; the one before it is tried"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"0123456789" * 3), "shorter than it was at version-000004"),
        (
            lambda run: (run / "metrics.jsonl").write_bytes(b"0123456789" * 3 + b"0123456780"),
            "metrics.jsonl is damaged: it is not what it was at version-000004",
        ),
    ],
)
def test_what_is_not_as_it_was_is_passed_over(tmp_path: Path, harm: Callable[[Path], object], why: str) -> None:
    for version in (2, 4):
        make(tmp_path, version)
    harm(tmp_path)
    found, (line,) = last_checkpoint(tmp_path)
    assert found is not None and found.version == 2 and why in line


def test_one_that_was_not_finished_is_named_and_goes(tmp_path: Path) -> None:
    make(tmp_path, 2)
    left = begun(tmp_path / CHECKPOINTS, 4)
    found, lines = last_checkpoint(tmp_path)
    assert found is not None and found.version == 2 and left.exists()
    clear_passed_over(tmp_path, 2)
    assert not left.exists()
    assert lines == ["version-000004 was not finished, and is left out"]


def test_where_none_is_believed_all_that_was_there_is_beside_the_run_which_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "seed=0"
    run.mkdir()
    for version in (2, 4):
        make(run, version)
    (run / "metrics.jsonl").write_bytes(b"1123456789" * 4)
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = StringIO()
    began = EarlierAttempt(Console(file=said), ignored=False)
    assert began(run) == () and began.checkpoint is None and not list(run.iterdir())
    aside = tmp_path / "aside-1.seed=0"
    assert before == {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()}
    assert "version-000002; none is before it" in said.getvalue() and str(aside) in said.getvalue()


def test_a_file_more_than_was_written_is_not_believed(tmp_path: Path) -> None:
    (make(tmp_path, 2) / "queue" / "snapshot-9.msgpack").write_bytes(b"")
    found, (line,) = last_checkpoint(tmp_path)
    assert found is None and "queue/snapshot-9.msgpack is not of this checkpoint" in line


def pipe_beside(folder: Path) -> None:
    os.mkfifo(folder / "queue" / "pipe")


def linked(folder: Path) -> None:
    weights = folder / "actor" / "rank-00000.safetensors"
    weights.rename(folder.parent / "elsewhere")
    weights.symlink_to(folder.parent / "elsewhere")


def linked_metrics(folder: Path) -> None:
    metrics = folder.parent.parent / "metrics.jsonl"
    metrics.rename(metrics.with_name("elsewhere"))
    metrics.symlink_to(metrics.with_name("elsewhere"))


def told(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A driver.json that says something else, with digests that fit it."""

    def forge(folder: Path) -> None:
        driver, manifest = folder / "driver.json", folder / "manifest.json"
        said = msgspec.json.decode(driver.read_bytes())
        change(said)
        driver.write_bytes(msgspec.json.encode(said))
        facts = msgspec.json.decode(manifest.read_bytes())
        facts["files"]["driver.json"] = [driver.stat().st_size, hashlib.sha256(driver.read_bytes()).hexdigest()]
        manifest.write_bytes(msgspec.json.encode(facts))

    return forge


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (told(lambda cut: cut["files"].update({"../thesis.txt": 0})), "names '../thesis.txt', which is no file that"),
        (told(lambda cut: cut["files"].update({"config.yaml": 0})), "names 'config.yaml', which is no file that grows"),
        (told(lambda cut: cut["files"].update({"metrics.jsonl": -1})), "metrics.jsonl is shorter than it was"),
        (told(lambda cut: cut["ledger"].update(trained=[[0, 10**12, 0]])), "1,000,000,000,004 samples, in "),
        (linked, "rank-00000.safetensors is neither a file nor a folder"),
        (linked_metrics, "metrics.jsonl is neither a file nor a folder"),
        (pipe_beside, "pipe is neither a file nor a folder"),
    ],
)
def test_one_that_a_stranger_made_touches_nothing_else(forge: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("kept")
    run = tmp_path / "seed=0"
    run.mkdir()
    forge(make(run, 2))
    found, (line,) = last_checkpoint(run)
    assert found is None and why in line


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    folder = begun(tmp_path / CHECKPOINTS, 2)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    put_in_place(folder, cut(2, 0), {}, keep=1)
    manifest = folder.with_name(name_of(2)) / "manifest.json"
    told = msgspec.json.decode(manifest.read_bytes())
    manifest.write_bytes(msgspec.json.encode(told | {"more": 1}))
    found, (line,) = last_checkpoint(tmp_path)
    assert found is None and "manifest.json is damaged: Object contains unknown field `more`" in line


@pytest.mark.parametrize("ignored", [True, False])
def test_what_begins_with_another_run_tells_no_ignored_restarts(tmp_path: Path, ignored: bool) -> None:
    other, run = tmp_path / "other", tmp_path / "seed=0"
    for folder in (other, run):
        folder.mkdir()
    make(other, 2)
    (run / "restarts.jsonl").write_text("{}\n")
    EarlierAttempt(Console(quiet=True), ignored=ignored, begin_with=other)(run)
    assert (run / "restarts.jsonl").exists() != ignored


class SlowQueue:
    """Saves once it is let."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.let = asyncio.Event()

    async def save(self, folder: str) -> None:
        self.folders.append(folder)
        await self.let.wait()


async def test_a_version_made_while_the_queue_is_saved_waits_for_that_and_saves_nothing_itself(tmp_path: Path) -> None:
    queue = SlowQueue()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=2), queue=queue, worlds={}, last=9)
    await checkpoints.begin(2)
    forgetting = [asyncio.create_task(checkpoints.save_queue()) for _version in (3, 4)]
    await asyncio.sleep(0.01)
    assert len(queue.folders) == 1 and not any(task.done() for task in forgetting) and checkpoints.writing
    queue.let.set()
    await asyncio.gather(*forgetting)
    await checkpoints.save_queue()  # until it is called complete
    assert len(queue.folders) == 1 and not checkpoints.writing
