"""The whole gate: which device, which folder, which parts; and what came of it, on a console and as a page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.acceptance.gpu_gate.parts import PARTS
from harness.acceptance.gpu_gate.results import PartResult, lines, passed, summary, write_report
from harness.acceptance.gpu_gate.runner import chosen, run_gate
from harness.config import ConfigError

FOLDER = "gate-gpu"

_ASK = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


@dataclass(frozen=True)
class GateRequest:
    """A request of the gate. device: "" is what there is. minutes: begin no part that could take longer than what is
    left of them."""

    device: Literal["", "cpu", "gpu"] = ""
    parts: tuple[str, ...] = ()
    force: bool = False
    minutes: float | None = None


def request(given: dict[str, str]) -> GateRequest:
    """The request that was typed. Raises ConfigError for a value that cannot be."""
    device, minutes = given.get("device", ""), given.get("minutes", "")
    if device not in ("", "cpu", "gpu"):
        raise ConfigError(f"device={device} is unknown; choose cpu or gpu, or leave it out for what there is")
    if minutes and not re.fullmatch(r"\d+(\.\d+)?", minutes):
        raise ConfigError(f"minutes={minutes} is no number; the gate runs in pieces of so many minutes, such as 10")
    parts = tuple(name for name in given.get("parts", "").split(",") if name)
    force = given.get("force", "") not in ("", "false", "0")
    return GateRequest(device, parts, force, float(minutes) if minutes else None)  # type: ignore[arg-type]


def run(asked: GateRequest, results: Path, say: Callable[[str], None]) -> int:
    """0 where every part that ran passed, and none is missing; 1 otherwise. Raises ConfigError where a GPU is asked for
    and there is none."""
    parts = chosen(PARTS, asked.parts)
    gpu = "" if asked.device == "cpu" else _gpu_name()
    if asked.device == "gpu" and not gpu:
        raise ConfigError("device=gpu: torch finds no GPU; DEVICE=cpu runs the same gate on the cores")
    kind, name = ("cuda", gpu) if gpu else ("cpu", "cpu")
    folder = results / FOLDER / re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
    found: list[PartResult] = []
    seconds = None if asked.minutes is None else 60 * asked.minutes
    for result in run_gate(parts, kind, folder, force=asked.force, seconds=seconds, say=say):
        for line in lines(result):
            say(line)
        found.append(result)
        write_report(folder, name, found)
    return _closed(found, parts, folder, say)


def _closed(found: Sequence[PartResult], parts: Sequence[object], folder: Path, say: Callable[[str], None]) -> int:
    if not found:
        return 1
    say(summary(found))
    say(str(folder / "gate.md"))
    return 0 if passed(found) and len(found) == len(parts) else 1


def _gpu_name() -> str:
    """Name of the first GPU; asked in a process that ends, so that none of its memory is taken while the gate runs."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise ConfigError(f"torch cannot be loaded: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip()
