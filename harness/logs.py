"""Logs of a run's process: a JSON object a line, which says of which run, role and version it is."""

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

RUN = "CADENCE_RUN"
"""Environment variable that says which run a process is of."""


def run_in(logs: Path) -> str:
    """`<experiment>/<cell>/seed=<n>`, of the folder of its logs."""
    return "/".join(logs.parent.parts[-3:])


def log_as_lines(role: str, version: Callable[[], int | None]) -> None:
    """Log warnings and worse of this process, Python's too, as such lines on its error output. version: returns that of
    the weights that its roles have, None where they have none."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(role, version))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


class _Lines(logging.Formatter):
    def __init__(self, role: str, version: Callable[[], int | None]) -> None:
        super().__init__()
        self._role, self._version = role, version

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "run": os.environ.get(RUN, ""),
            "role": self._role,
            "version": self._version(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told)
