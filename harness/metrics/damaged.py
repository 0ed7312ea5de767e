"""What is said of a run's file that is missing, was cut off, or holds what no run writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import yaml  # type: ignore[import-untyped]
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError


class DamagedFile(ConfigError):
    """A file of a finished run cannot be read as what it should be."""


@contextmanager
def reading(file: Path, fix: str = "make the run again with FORCE=1, or take its folder away") -> Iterator[None]:
    """Around everything that reads `file`, to its last value. Raises DamagedFile, one line, where that fails."""
    try:
        yield
    except DamagedFile:
        raise
    except FileNotFoundError as error:
        raise DamagedFile(f"{file} is missing; {fix}") from error
    except _UNREADABLE as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else f"{error}"
        raise DamagedFile(f"{file} is damaged: {' '.join(why.split())}; {fix}") from error


_UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError),
    *(pa.ArrowException, yaml.YAMLError, msgspec.MsgspecError, OmegaConfBaseException),
)
