"""One part of the gate, in a process of its own: `python -m harness.acceptance.gpu_gate.part <name> <device> <folder>`.

A part is a module with `run(setting)`, which yields a `Check` after each thing that it looked at.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.acceptance.gpu_gate.results import Check, LeftOut, PartResult, Status, write_result
from harness.config import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GateSetting:
    """The device and folder of a part. folder: of the gate's results, for what a part leaves besides its checks."""

    kind: Literal["cpu", "cuda"]
    folder: Path

    @property
    def device(self) -> torch.device:
        """The first device of its kind."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", 0)

    @property
    def gpu(self) -> bool:
        """Whether it runs on GPUs."""
        return self.kind == "cuda"


def run_part(name: str, module: str, setting: GateSetting) -> PartResult:
    """Run it here. Whatever ends it early is written down; its traceback goes where errors go."""
    start = time.monotonic()
    result = PartResult(name)
    write_result(setting.folder, result)
    try:
        checks: Iterator[Check] = importlib.import_module(module).run(setting)
        for check in checks:
            result = replace(result, checks=(*result.checks, check))
            write_result(setting.folder, result)
        wrong = [check.what for check in result.checks if not check.passed]
        result = result.ended("failed" if wrong else "passed", time.monotonic() - start, "; ".join(wrong))
    except LeftOut as missing:
        result = result.ended("left out", time.monotonic() - start, str(missing))
    except ConfigError as error:
        result = result.ended("failed", time.monotonic() - start, str(error))
    except Exception as error:
        traceback.print_exc()
        status: Status = "left out" if _package_is_missing(error) else "failed"
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        result = result.ended(status, time.monotonic() - start, why)
    write_result(setting.folder, result)
    return result


def _package_is_missing(error: Exception) -> bool:
    """Whether a package of others is missing: a module of ours is there, or the gate is broken."""
    own = ("harness", "engines", "schedules")
    return isinstance(error, ModuleNotFoundError) and (error.name or "harness").partition(".")[0] not in own


if __name__ == "__main__":
    _, part, path, kind, folder = sys.argv
    run_part(part, path, GateSetting("cpu" if kind == "cpu" else "cuda", Path(folder)))
