"""One part of the gate, in a process of its own: `python -m harness.acceptance.gpu_gate.part <name> <module> <device>
<folder> <time> <package>...`.

A part is a module with `run(setting)`, which yields a `Check` after each thing that it looked at."""

from __future__ import annotations

import importlib
import math
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.acceptance.gpu_gate.results import (
    Check,
    LeftOut,
    PartResult,
    Status,
    Unfinished,
    read_result,
    write_result,
)
from harness.config import ConfigError
from harness.config.machine import installed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GateSetting:
    """The device and folder of a part. folder: of the gate's results, for what a part leaves besides its checks. until:
    a reading of time.monotonic, by which it has to end. kept: what an earlier command looked at."""

    kind: Literal["cpu", "cuda"]
    folder: Path
    until: float = math.inf
    kept: tuple[str, ...] = ()

    def require_time(self, seconds: float) -> None:
        """Raises Unfinished where less than that is left."""
        if time.monotonic() + seconds > self.until:
            raise Unfinished("no time was left for the rest")

    @property
    def device(self) -> torch.device:
        """The first device of its kind."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", 0)

    @property
    def gpu(self) -> bool:
        """Whether it runs on GPUs."""
        return self.kind == "cuda"


def run_part(name: str, module: str, setting: GateSetting, needs: Sequence[str] = ()) -> PartResult:
    """Run it here, or what an earlier command left of it. Whatever ends it early is written down; its traceback goes
    where errors go. needs: distributions, by name."""
    start, earlier = time.monotonic(), read_result(setting.folder, name)
    kept = earlier.checks if earlier is not None and earlier.status == "unfinished" else ()
    setting = replace(setting, kept=tuple(check.what for check in kept))
    result = PartResult(name, checks=kept)
    write_result(setting.folder, result)
    try:
        if missing := [need for need in needs if installed(need) is None]:
            raise LeftOut(f"needs {' '.join(map(_pinned, missing))} (pip install --no-deps; docs/gpu.md)")
        checks: Iterator[Check] = importlib.import_module(module).run(setting)
        for check in checks:
            result = replace(result, checks=(*result.checks, check))
            write_result(setting.folder, result)
        wrong = [check.what for check in result.checks if not check.passed]
        result = result.ended("failed" if wrong else "passed", time.monotonic() - start, "; ".join(wrong))
    except LeftOut as lacking:
        result = result.ended("left out", time.monotonic() - start, str(lacking))
    except Unfinished as error:
        result = result.ended("unfinished", time.monotonic() - start, str(error))
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


_PINS = Path(__file__).parents[3] / ".ci" / "constraints.txt"


def _pinned(distribution: str) -> str:
    """The name with the version that this code was tested with, where its folder says."""
    listed = _PINS.read_text(encoding="utf-8") if _PINS.exists() else ""
    found = re.search(rf"^{re.escape(distribution)}==\S+", listed, re.MULTILINE)
    return found[0] if found else distribution


if __name__ == "__main__":
    _, part, path, kind, folder, until, *needs = sys.argv
    run_part(part, path, GateSetting("cpu" if kind == "cpu" else "cuda", Path(folder), float(until)), needs)
