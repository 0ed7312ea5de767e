"""DONE, the last file of a run: that it finished, when, and what its files were then."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from harness.config.files import MIB, read_text, sha256_of
from harness.metrics.atomic_files import write_text
from harness.metrics.schemas import reading

DONE = "DONE"
INCOMPLETE = "mlflow-incomplete.txt"
"""There while MLflow lacks something of a finished run, and says why; it comes and goes after DONE."""
MODEL = "model"  # the folder of the final weights, with all that transformers and the engines need to load them
CRITIC = "critic"  # folder of the final critic, where there is one, as a model that classifies tokens


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and digest of a file."""

    bytes: int
    sha256: str


class DoneFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of DONE. at: when everything was there; files: by their paths in the run's folder, None where an
    earlier version wrote only the time."""

    at: Annotated[datetime, msgspec.Meta(tz=True)]
    files: dict[str, Written] | None


def write_done(folder: Path) -> None:
    """Write that all files are there as they stay: those of the folder, and of its models."""
    files = {
        path.relative_to(folder).as_posix(): Written(path.stat().st_size, sha256_of(path))
        for path in sorted(_files_of(folder))
    }
    now = datetime.now(UTC).replace(microsecond=0)
    write_text(folder / DONE, msgspec.json.format(msgspec.json.encode(DoneFile(now, files)), indent=1).decode() + "\n")


def _files_of(folder: Path) -> Iterator[Path]:
    for part in (folder, folder / MODEL, folder / CRITIC):
        for path in part.iterdir() if part.is_dir() else ():
            if path.is_file() and not path.name.startswith(".") and path.name not in (DONE, INCOMPLETE):
                yield path


def read_done(folder: Path) -> DoneFile:
    """Raises DamagedFile for a file that no version wrote. The time of an empty one is the file's own."""
    path = folder / DONE
    with reading(path):
        text = read_text(path, 16 * MIB)
        if text.startswith("{"):
            done = msgspec.json.decode(text, type=DoneFile)
            for name in done.files or ():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise ValueError(f"{name!r} is no file of this folder")
            return done
        at = datetime.fromisoformat(text.strip()) if text.strip() else datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return DoneFile(at if at.tzinfo else at.replace(tzinfo=UTC), None)


def is_done(folder: Path) -> bool:
    """Whether the run in this folder finished. Raises DamagedFile where a file is missing or has another size."""
    if not (folder / DONE).exists():
        return False
    for name, written in (read_done(folder).files or {}).items():
        _check_size(folder / name, written)
    return True


def check_files(folder: Path) -> None:
    """Check the files of a run that is done. Raises DamagedFile as `is_done`, and for a file whose bytes are others
    than they were; of weights the size has to do, they may be as large as the disk is."""
    for name, written in (read_done(folder).files or {}).items():
        path = folder / name
        _check_size(path, written)
        with reading(path):
            if "/" not in name and (found := sha256_of(path)) != written.sha256:
                raise ValueError(f"its SHA-256 is {found[:12]}, and was {written.sha256[:12]} when the run was done")


def _check_size(path: Path, written: Written) -> None:
    with reading(path):
        size = path.stat().st_size
        if path.is_symlink() or not path.is_file():
            raise ValueError("it is no file of its own")
        if size != written.bytes:
            raise ValueError(f"it has {size:,} bytes, and had {written.bytes:,} when the run was done")
