"""The remains of an earlier attempt in a run's folder, from which the next one goes on."""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.config import ConfigError
from harness.config.inputs import Input, digests, refuse_changed
from harness.driver.checkpoint_files import (
    CHECKPOINTS,
    Checkpoint,
    clear_passed_over,
    cut_back,
    in_place,
    last_checkpoint,
)
from harness.metrics.parts import PARTS, SPANS
from harness.metrics.run_files import LOCK, RESTARTS, TRAINED, load_manifest, locked

_MANIFEST, _SYSTEM = "manifest.json", "system.jsonl"


class NothingToGoBackTo(Exception):
    """The run has no checkpoint that can be believed."""


class EarlierAttempt:
    """Asked by the run's folder, once it is locked, what is to stay of it: all that the newest checkpoint that can be
    believed speaks of. checkpoint: that one; resumed: the versions that earlier attempts went on from, and this one;
    begun_with: the folder of the other run whose checkpoint the first of them was. Where there are checkpoints and none
    can be believed, all goes into a folder beside the run's.

    trained: the run was, and only its end is to be written; then all stays.

    inputs: what the run reads now. Raises ConfigError, and leaves the folder as it is, where it is not what was read.
    begin_with: such a folder, for a run that has none of its own yet. It stays as it is. required: raise
    NothingToGoBackTo, and leave the folder as it is, where there is no checkpoint."""

    def __init__(
        self,
        console: Console,
        *,
        ignored: bool,
        begin_with: Path | None = None,
        required: bool = False,
        inputs: Sequence[Input] = (),
    ) -> None:
        self.checkpoint: Checkpoint | None = None
        self.trained = False
        self.resumed: list[int] = []
        self.begun_with: str | None = None
        self._console, self._ignored, self._begin_with, self._required = console, ignored, begin_with, required
        self._inputs = inputs

    def __call__(self, run: Path) -> Collection[str]:
        if not self._ignored and (run / TRAINED).exists():
            self.trained = True
            self._refuse_changed(run, _manifest_before(run))
            self._say(f"{run} was trained to its end: what is left of its files is written")
            return {path.name for path in run.iterdir()}
        if not self._ignored:
            self.checkpoint = self._found(run)
        if self.checkpoint is not None:
            files = self._gone_back(run, self.checkpoint)
        elif self._begin_with is not None:
            files = self._begun(run, self._begin_with)
        elif self._required:
            raise NothingToGoBackTo
        else:
            self._set_aside(run)
            return ()
        return {CHECKPOINTS, _MANIFEST, _SYSTEM, RESTARTS, *(Path(path).parts[0] for path in files)}

    def _gone_back(self, run: Path, checkpoint: Checkpoint) -> Collection[str]:
        """The run's growing files are as they were at a checkpoint of its own."""
        before = _manifest_before(run)
        self._refuse_changed(run, before)
        clear_passed_over(run, checkpoint.version)
        cut_back(run, checkpoint.cut.files)
        for lines in (_SYSTEM, RESTARTS):
            _cut_to_lines(run / lines)
        self.resumed, self.begun_with = [*before.get("resumed", []), checkpoint.version], before.get("begun_with")
        self._say(f"going on from version {checkpoint.version}, of {checkpoint.folder}; force=true starts anew")
        return checkpoint.cut.files

    def _begun(self, run: Path, other: Path) -> Collection[str]:
        """The run's growing files are copies of another's. But for its spans: they are of engines that this run may not
        have."""
        with locked(other, busy="this run, which checkpoint.begin_with names, is going on; end it first"):
            found = self._found(other)
            if found is None:
                raise ConfigError(f"checkpoint.begin_with: {other} has no whole checkpoint; leave it out")
            files = {path: size for path, size in found.cut.files.items() if Path(path) != Path(PARTS, SPANS)}
            self._set_aside(run)
            for kept in (CHECKPOINTS, PARTS):
                shutil.rmtree(run / kept, ignore_errors=True)
            for lines in (_SYSTEM, RESTARTS) if self._ignored else (_SYSTEM,):
                (run / lines).unlink(missing_ok=True)
            for path in files:
                (run / path).parent.mkdir(exist_ok=True)
                shutil.copyfile(other / path, run / path)
            cut_back(run, files)
        self.checkpoint = replace(found, elsewhere=True)
        self.resumed, self.begun_with = [found.version], str(other)
        self._say(f"beginning with version {found.version}, of {found.folder}")
        return files

    def _refuse_changed(self, run: Path, before: Mapping[str, Any]) -> None:
        refuse_changed(digests(before), self._inputs, f"{run} was begun", "put it back, or start anew with force=true")

    def _set_aside(self, run: Path) -> None:
        """Move aside what only checkpoints speak of that are not believed. These move last, for they are why the rest
        does."""
        if self._ignored or not in_place(run):
            return
        aside = next(path for number in count(1) if not (path := run.with_name(f"aside-{number}.{run.name}")).exists())
        aside.mkdir()
        for name in [*(path.name for path in run.iterdir() if path.name not in (LOCK, CHECKPOINTS)), CHECKPOINTS]:
            (run / name).rename(aside / name)
        self._say(f"no checkpoint is left to go on from: the run begins anew, and what was there is now {aside}")

    def _found(self, run: Path) -> Checkpoint | None:
        found, lines = last_checkpoint(run)
        for line in lines:
            self._say(line)
        return found

    def _say(self, line: str) -> None:
        self._console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)


def _manifest_before(run: Path) -> dict[str, Any]:
    """The manifest, which may have been lost with the attempt."""
    try:
        return dict(load_manifest(run))
    except (FileNotFoundError, ValueError):
        return {}


def _cut_to_lines(path: Path) -> None:
    """Cut the file after its last whole line: its writer may have died over one."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
