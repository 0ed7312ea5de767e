"""What a process holds, and what is left where nothing should be."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Footprint:
    """rss, shared: bytes of its own memory, and of all memory without a name that it holds by descriptors."""

    rss: int
    shared: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.rss / 2**20:.1f} MiB + {self.shared / 2**20:.1f} MiB shared, {self.descriptors} descriptors"


def footprint(pid: int) -> Footprint:
    with open(f"/proc/{pid}/status") as status:
        (rss,) = [int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:")]
    shared = descriptors = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            shared += path.stat().st_blocks * 512 if os.readlink(path).startswith("/memfd:") else 0
            descriptors += 1
        except FileNotFoundError:  # closed since it was listed
            pass
    return Footprint(rss, shared, descriptors)


def memory_holders(name: str) -> list[str]:
    """Who holds or maps memory whose name has `name` in it, in all processes that can be looked into."""
    return [f"process {pid} holds {held}" for pid in _processes() for held in _held(pid) if name in held]


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _held(pid: int) -> set[str]:
    """Targets of its descriptors, and files that it maps; nothing of a process that has gone or is another's."""
    try:
        links = {os.readlink(path) for path in _existing(Path(f"/proc/{pid}/fd").iterdir())}
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return set()
    return links | {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}


def _existing(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_symlink())


def shm_files() -> set[str]:
    """Less the semaphores: libraries' of any process of this machine, which makes, maps and removes one in a moment."""
    return {str(path) for path in SHM.iterdir() if not path.name.startswith("sem.")}


def orphans(files: Iterable[str]) -> list[str]:
    """Those of these files that are there and that no living process holds: a process left them behind."""
    held = set().union(*(_held(pid) for pid in _processes()))
    return sorted(file for file in files if file not in held and Path(file).exists())
