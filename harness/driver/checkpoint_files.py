"""Checkpoints of a run in its folder: what is in one, how it is put in place at once, and which one is to be believed.

    checkpoints/version-000040/
        manifest.json     sizes and SHA-256 of all other files; written last
        driver.json       `Cut`: what the driver knew
        queue/            the queue, as harness/transfer_queue/snapshots writes it
        actor/            a file of each training rank (engines/torch/checkpoint.py)
        critic/           the same of the critic's, where there is one

It is written beside its name, as `.version-000040`, and renamed when all of it is on the disk. Every file is held
against the manifest before any of it is read, JSON is decoded into types without unknown fields, and nothing is
unpickled. It may be a stranger's, whose digests are his own: of the run's folder it names the files of `GROWING` alone,
no link is followed, and it speaks of no more samples than its files have bytes.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.config.files import sha256_of
from harness.metrics.ledger import DropReason, LedgerState
from harness.metrics.run_files import GROWING
from harness.metrics.samples import Fate
from harness.tasks.buffer import DealerState

CHECKPOINTS = "checkpoints"
MANIFEST, DRIVER, QUEUE = "manifest.json", "driver.json", "queue"
FORMAT = 1
_BLOCK = 1 << 20
_NAME = re.compile(r"version-(\d{6,})")

FileFacts = dict[str, tuple[int, str]]
"""Bytes and SHA-256 of files, by path in the folder."""


class DamagedCheckpoint(ValueError):
    """Raised where a checkpoint does not hold what was written."""


class AdmittedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group in flight, by its number, which tells what its place was dealt before, too. at: seconds on the run's
    clock; prompt_tokens: values of its prompt's column."""

    group: int
    at: float
    prompt_tokens: int


class PartitionRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Groups first to end - 1 are in partition `number`."""

    number: int
    first: int
    end: int


Decision = Literal["kept", "refused", "again", "spare"]
"""Trained; refused, and a spare takes its part; refused, and its place is dealt another; not needed."""


class RefilledPartition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A partition of `places` groups, of which a filter has refused so many. decided: what becomes of those of its
    candidates, numbered from 0, of which that is certain, but for the kept ones."""

    number: int
    places: int
    refused: int
    decided: list[tuple[int, Decision]] = []


class RefilledState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """deals: (place, how often it was dealt another prompt) of places in flight that were."""

    deals: list[tuple[int, int]]
    partitions: list[RefilledPartition]


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The group in a place was refused by a filter, or dropped as a straggler, and the place dealt another prompt; or,
    `replaced`, a spare took its part. at: seconds on the run's clock; rewards: of its samples, None for what is no
    number."""

    partition: int
    place: int
    at: float
    rewards: list[float | None]
    reason: DropReason = "filtered"
    replaced: bool = False


class PromptState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """next: the first group that was not admitted; groups: of the job, with those that make up for dropped ones; drops:
    what each call of `Prompts.drop` returned; partitions: that are not done with; refilled: where there is a filter;
    dealer: where there is a buffer."""

    next: int
    groups: int
    drops: list[int]
    made: int
    end: int
    partitions: list[PartitionRange]
    refilled: RefilledState | None = None
    dealer: DealerState | None = None


class RecorderState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """skipped_steps: by whose they are, the actor's or the critic's; unread: samples that were dropped and are not
    recorded, by the fields of `Untrained`."""

    trained_samples: int
    skipped_steps: dict[str, float]
    last_end: float
    engines: list[dict[str, Any]]
    unread: list[tuple[int, Fate, int, float, int, int, float | None]] = []


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The driver's knowledge as `version` had been made and nothing of the next one.

    at: time of the run's clock when it was written down; files: bytes of each growing file of the run's folder;
    digests: SHA-256 of those;
    refused: by a filter, since then and until the queue was saved; kl_coefficient: with which the next batch's
    advantages are made, where it goes from batch to batch.
    """

    version: int
    at: float
    ledger: LedgerState
    admitted: list[AdmittedGroup]
    prompts: PromptState
    recorder: RecorderState
    files: dict[str, int]
    refused: list[Refusal] = []
    kl_coefficient: float | None = None
    digests: dict[str, str] = {}


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    version: int
    files: FileFacts


@dataclass(frozen=True)
class Checkpoint:
    """One that was found whole. elsewhere: in the folder of another run, whose devices may have been others."""

    folder: Path
    cut: Cut
    elsewhere: bool = False

    @property
    def version(self) -> int:
        """The version that it holds."""
        return self.cut.version


def name_of(version: int) -> str:
    """Name of a version's folder."""
    return f"version-{version:06}"


def begun(checkpoints: Path, version: int) -> Path:
    """An empty folder to write in."""
    folder = checkpoints / f".{name_of(version)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def put_in_place(folder: Path, cut: Cut, known: FileFacts, keep: int) -> Path:
    """All else is there: driver.json and the manifest, and then the name. All but the `keep` newest are deleted. Of the
    run's growing files what it speaks of is on the disk, too. known: files whose digests were computed by those who
    wrote them."""
    _write(folder / DRIVER, msgspec.json.encode(cut))
    facts = known | {path: _facts(folder / path) for path in _paths(folder) if path not in known}
    _write(folder / MANIFEST, msgspec.json.encode(_Manifest(FORMAT, cut.version, facts)))
    for inside in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        _sync(inside)
    run = folder.parent.parent
    growing = [run / path for path in cut.files]
    for grown in (*growing, *{run, *(path.parent for path in growing)}):
        _sync(grown)
    final = folder.with_name(name_of(cut.version))
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    _sync(final.parent)
    for _, old in list(_there(final.parent))[keep:]:
        shutil.rmtree(old)
    return final


def last_checkpoint(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest one of this run's folder that is whole; and a line for each that was passed over for it."""
    lines = []
    checkpoints = run / CHECKPOINTS
    for left in _unfinished(checkpoints):
        lines.append(f"{left.name.removeprefix('.')} was not finished, and is left out")
    folders = in_place(run)
    for number, folder in enumerate(folders, start=1):
        try:
            return Checkpoint(folder, read(folder, run)), lines
        except DamagedCheckpoint as error:
            why = f"{error}"
        except OSError as error:
            why = f"{error.filename or folder} cannot be read: {error.strerror}"
        lines.append(f"{why}; {'the one before it is tried' if number < len(folders) else 'none is before it'}")
    return None, lines


def in_place(run: Path) -> list[Path]:
    """Checkpoints of this run's folder that have their names, the newest first."""
    return [folder for _, folder in _there(run / CHECKPOINTS)]


def read(folder: Path, run: Path) -> Cut:
    """The driver's part of a checkpoint. Raises DamagedCheckpoint, naming the file, unless every file is as the
    manifest says, and the run's growing files are as long as they were."""
    _refuse_special([folder, *folder.rglob("*")])
    manifest = _decoded(folder / MANIFEST, _Manifest)
    if manifest.format != FORMAT:
        raise DamagedCheckpoint(f"{folder / MANIFEST} has format {manifest.format}; this code reads {FORMAT}")
    there = set(_paths(folder)) - {MANIFEST}
    for path in sorted(manifest.files.keys() ^ there):
        raise DamagedCheckpoint(f"{folder / path} is {'missing' if path not in there else 'not of this checkpoint'}")
    for path, facts in manifest.files.items():
        if _facts(folder / path) != tuple(facts):
            raise DamagedCheckpoint(f"{folder / path} is damaged: it is not what was written")
    cut = _decoded(folder / DRIVER, Cut)
    if cut.version != manifest.version or name_of(cut.version) != folder.name:
        raise DamagedCheckpoint(f"{folder / DRIVER} is of version {cut.version}")
    for path in sorted(cut.files.keys() - GROWING):
        raise DamagedCheckpoint(f"{folder / DRIVER} names {path!r}, which is no file that grows with a run")
    _refuse_special(run / path for name in cut.files for path in (name, Path(name).parent))
    for path, size in cut.files.items():
        if not (run / path).is_file() or not 0 <= size <= (run / path).stat().st_size:
            raise DamagedCheckpoint(f"{run / path} is shorter than it was at {folder.name}")
        if path in cut.digests and _digest(run / path, size) != cut.digests[path]:
            raise DamagedCheckpoint(f"{run / path} is damaged: it is not what it was at {folder.name}")
    written = sum(size for size, _ in manifest.files.values()) + sum(cut.files.values())
    if cut.ledger.samples > written:
        raise DamagedCheckpoint(f"{folder / DRIVER} speaks of {cut.ledger.samples:,} samples, in {written:,} bytes")
    return cut


def clear_passed_over(run: Path, version: int) -> None:
    """Remove what `last_checkpoint` passed over for the one of this version: it would count among those that are
    kept."""
    newer = [folder for there, folder in _there(run / CHECKPOINTS) if there > version]
    for left in [*newer, *_unfinished(run / CHECKPOINTS)]:
        shutil.rmtree(left)


def cut_back(run: Path, files: Mapping[str, int]) -> None:
    """The run's growing files are as they were."""
    for path, size in files.items():
        os.truncate(run / path, size)


def _there(checkpoints: Path) -> Iterable[tuple[int, Path]]:
    """Checkpoints with their versions, the newest first."""
    if not checkpoints.is_dir():
        return []
    found = [(int(match[1]), path) for path in checkpoints.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def _unfinished(checkpoints: Path) -> list[Path]:
    return list(checkpoints.glob(f".{name_of(0)[:8]}*")) if checkpoints.is_dir() else []


def _refuse_special(paths: Iterable[Path]) -> None:
    """A link leads elsewhere, a pipe is waited for."""
    for path in paths:
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            raise DamagedCheckpoint(f"{path} is neither a file nor a folder: no link, pipe or device is read")


def _paths(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())


def _facts(path: Path) -> tuple[int, str]:
    return path.stat().st_size, sha256_of(path)


def _digest(path: Path, size: int) -> str:
    """SHA-256 of its first bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size and (block := file.read(min(size, _BLOCK))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def _decoded(path: Path, type_: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """A file, or what names a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
