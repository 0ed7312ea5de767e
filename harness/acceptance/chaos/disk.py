"""A small file system, which can be full: in memory, where this process may mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SIZE = "64m"
_FILLER = ".filler"


@dataclass(frozen=True)
class Disk:
    """A mounted file system that can be filled."""

    folder: Path

    def fill(self) -> None:
        """Fill it to the last byte."""
        block = bytes(64 << 10)
        with (self.folder / _FILLER).open("wb", buffering=0) as file:
            while True:
                try:
                    if file.write(block) < len(block):
                        return
                except OSError:
                    return

    def empty(self) -> None:
        """Make room again."""
        (self.folder / _FILLER).unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk | None]:
    """None where this process may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "chaos", str(folder)):
        yield None
        return
    try:
        yield Disk(folder)
    finally:
        _run("umount", "-l", str(folder))


def _run(*command: str) -> int:
    return subprocess.run(command, check=False, capture_output=True).returncode
