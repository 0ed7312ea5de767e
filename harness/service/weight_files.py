"""The trainer's weights as files: the newest versions, each whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

_KEPT = 2  # versions: a reader may still open the one before


class WeightFiles:
    """The files of a job's weights. folder: of nobody else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, version: int) -> Path:
        """The place of a version's file, whether it is there or not."""
        return self._folder / f"version_{version}.safetensors"

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """A file aside, which `keep` makes a version of; without, it is gone afterwards."""
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            yield file.file

    def check(self, file: IO[bytes]) -> None:
        """ValueError for what is no safetensors."""
        file.flush()
        try:
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="numpy") as held:
                held.keys()
        except SafetensorError as error:
            raise ValueError(f"the weights are no safetensors: {error}") from error

    def keep(self, file: IO[bytes], version: int) -> None:
        """Make this file that of the version; of older ones few stay."""
        os.link(str(file.name), self.path(version))
        self.path(version - _KEPT).unlink(missing_ok=True)
