"""How a run that did not come to its end says so, in a line and without a traceback."""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from harness.driver.checkpointing import Left
from harness.protocols import EngineDied
from harness.runtime.runtime import WorkerDied
from harness.weight_sync.membership import LostEngine


class NothingScored(RuntimeError):
    """None of the samples that are to be learnt from, or to be judged by, could be scored."""

    def __init__(self, which: str, failure: str) -> None:
        """Names the samples, how many and of what, and the failure of one of them."""
        super().__init__(f"none of {which} could be scored, and the run ends; for example, {failure}")


def left_in(failures: Iterable[Exception]) -> str | None:
    """How a command said that it left, as it was asked."""
    return next((str(part) for part in failures if isinstance(part, Left)), None)


_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EIO)
_ERROR_NUMBER = re.compile(r"(?:os error |[Ee]rrno |Os \{ code: )(\d+)")
"""How errors of libraries, which are no OSError, tell of one: safetensors', Arrow's."""


def storage_in(failures: Iterable[Exception], results: Path) -> str | None:
    """A line on what the file system refused: the disk is full, or read-only, or the folder of results is gone."""
    for part in failures:
        number = part.errno if isinstance(part, OSError) else None
        if number is None and (said := _ERROR_NUMBER.search(f"{part}")):
            number = int(said[1])
        named = Path(part.filename) if isinstance(part, OSError) and isinstance(part.filename, str) else None
        below = named is not None and named.absolute().is_relative_to(results.absolute())
        if number in _REFUSED or (number in _GONE and (below or not results.exists())):
            return (
                f"{named or results}: {os.strerror(number)}: results cannot be written; see to it, or name another "
                "folder by CADENCE_RESULTS"
            )
    return None


_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def memory_in(failures: Iterable[Exception]) -> str | None:
    """A line on which call of a role found no memory."""
    for part in failures:
        if isinstance(part, MemoryError) or "OutOfMemory" in type(part).__name__ or _says(part, _NO_MEMORY):
            notes = [note.partition(":")[0].removeprefix("in ") for note in getattr(part, "__notes__", ())]
            where = next((note for note in notes if "[" in note), "this process")
            what = str(part).splitlines()[0] if str(part) else "no more is given to it"
            return (
                f"{where} ran out of memory: {what}; lower engine.slots, algorithm.micro_batch_groups or "
                "training.tokens_per_micro_batch, or see `cadence doctor`"
            )
    return None


def _says(error: Exception, words: Iterable[str]) -> bool:
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in words)


def losses_in(failures: Iterable[Exception]) -> list[str]:
    """Lines on what died, in the words of those who noticed: a worker, an engine, the queue behind its connection. What
    else failed is how others met a death."""
    losses = WorkerDied | EngineDied | LostEngine | ConnectionError
    return list(dict.fromkeys(str(part) for part in failures if isinstance(part, losses)))


def waits_in(failures: Iterable[Exception]) -> list[str]:
    """Lines on what was waited for in vain, where it has a name."""
    return list(dict.fromkeys(str(part) for part in failures if isinstance(part, TimeoutError) and str(part)))
