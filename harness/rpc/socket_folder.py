"""The folder of this process's Unix sockets: no other user may enter it. It goes with the last of them, or with the
process, or where that was killed with the next process that makes one."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

_PREFIX = "cadence"
_LONGEST = 30  # characters of where folders are: with folder and name, the kernel takes 107

_folder: Path | None = None
_names: set[str] = set()  # in use
_lock = threading.Lock()


def new_path() -> str:
    """Path of a new socket; its folder is there, 0700."""
    global _folder
    with _lock:
        if _folder is None:
            shared = Path(tempfile.gettempdir())
            shared = shared if len(str(shared)) <= _LONGEST else Path("/tmp")
            _remove_those_of_the_dead(shared)
            _folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{_own_name()}-", dir=shared))
            atexit.register(_remove, _folder, os.getpid())
        path = str(_folder / secrets.token_hex(8))
        _names.add(path)
        return path


def forget(path: str) -> None:
    """Nobody listens there any more. Nothing happens where the path is not of `new_path` in this process."""
    global _folder
    with _lock:
        if path in _names:
            _names.discard(path)
            Path(path).unlink(missing_ok=True)
            if not _names and _folder is not None:
                _remove(_folder, os.getpid())
                _folder = None


def _own_name() -> str:
    """Name of this process: pids are of a namespace, and come again."""
    return f"{_namespace()}-{os.getpid()}-{_started_at(os.getpid())}"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started_at(pid: int) -> str | None:
    """Ticks from the machine's start to that of a process; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _remove_those_of_the_dead(shared: Path) -> None:
    for folder in shared.glob(f"{_PREFIX}-{_namespace()}-*-*-*"):
        pid, started_at = folder.name.split("-")[2:4]
        with suppress(FileNotFoundError):  # another process may remove it, too, or its own
            if folder.stat().st_uid == os.geteuid() and _started_at(int(pid)) != started_at:
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def _forked() -> None:
    global _folder, _lock
    _folder, _lock = None, threading.Lock()
    _names.clear()


os.register_at_fork(after_in_child=_forked)
