"""What an earlier attempt at a run left in its folder, that the next one goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from harness.driver.checkpoint_files import CHECKPOINTS, Checkpoint, cut_back, last_checkpoint

_SYSTEM = "system.jsonl"


class EarlierAttempt:
    """Asked by the run's folder, once it is locked, what is to stay of it: all that the newest checkpoint that can be
    believed speaks of. checkpoint: that one; resumed: the versions that earlier attempts went on from, and this one."""

    def __init__(self, console: Console, *, ignored: bool) -> None:
        self.checkpoint: Checkpoint | None = None
        self.resumed: list[int] = []
        self._console, self._ignored = console, ignored

    def __call__(self, run: Path) -> Collection[str]:
        if self._ignored:
            return ()
        self.checkpoint, lines = last_checkpoint(run)
        for line in lines:
            self._say(line)
        if self.checkpoint is None:
            return ()
        files, version = self.checkpoint.cut.files, self.checkpoint.version
        cut_back(run, files)
        _cut_to_lines(run / _SYSTEM)
        self.resumed = [*_resumed_before(run), version]
        self._say(f"going on from version {version}, of {self.checkpoint.folder}; FORCE=1 starts anew")
        return {CHECKPOINTS, _SYSTEM, *(Path(path).parts[0] for path in files)}

    def _say(self, line: str) -> None:
        self._console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)


def _resumed_before(run: Path) -> list[int]:
    """As the manifest has it, which may have been lost with the attempt."""
    try:
        return [int(version) for version in json.loads((run / "manifest.json").read_text("utf-8")).get("resumed", [])]
    except (FileNotFoundError, ValueError):
        return []


def _cut_to_lines(path: Path) -> None:
    """Its writer may have died over the last one."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
