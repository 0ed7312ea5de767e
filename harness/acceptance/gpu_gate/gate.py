"""The whole gate: which device, which folder, which parts, each in a process of its own and within its limit; and what
came of it, on a console and as a page.

A part that hangs or crashes is named as such, with the end of what it printed, and the next one goes on. Results are
kept: a second call goes on with what is missing."""

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.acceptance.gpu_gate.results import (
    AGAIN,
    PartResult,
    exit_status,
    lines,
    read_result,
    result_path,
    summary,
    write_report,
    write_result,
)
from harness.config import ConfigError
from harness.rpc.children import kill_group
from harness.rpc.process_id import ProcessId, descendants

FOLDER = "gate-gpu"

_ASK = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


def run(given: Mapping[str, str], results: Path, say: Callable[[str], None]) -> int:
    """0 where everything was asked and passed, 1 where something failed, 3 where nothing did and something was left out
    or not begun. given: what was typed: `device`, by default what there is; `parts`; `force`; `limit_s`: begin nothing
    that could take longer than what is left of them. Raises ConfigError for a value that cannot be, and where a GPU is
    asked for and there is none."""
    device, limit = given.get("device", ""), given.get("limit_s", "")
    if device not in ("", "cpu", "gpu"):
        raise ConfigError(f"device={device} is unknown; choose cpu or gpu, or leave it out for what there is")
    if limit and not re.fullmatch(r"\d+(\.\d+)?", limit):
        raise ConfigError(f"limit_s={limit} is no number; the gate runs in slices of so many seconds, such as 590")
    parts = chosen(PARTS, [name for name in given.get("parts", "").split(",") if name])
    gpu = "" if device == "cpu" else _gpu_name()
    if device == "gpu" and not gpu:
        raise ConfigError("device=gpu: torch finds no GPU; device=cpu runs the same gate on the cores")
    kind, name = ("cuda", gpu) if gpu else ("cpu", "cpu")
    folder = results / FOLDER / re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
    found: list[PartResult] = []
    names = [part.name for part in parts]
    force, seconds = given.get("force", "") not in ("", "false", "0"), float(limit) if limit else None
    for result in run_gate(parts, kind, folder, force=force, seconds=seconds, say=say):
        for line in lines(result):
            say(line)
        found.append(result)
    missing = [name for name in names if name not in {result.part for result in found}]
    say(str(write_report(folder, name, found, missing)))
    say(summary(found))
    status, why = exit_status(found, missing)
    say(why or "exit status 0: everything was asked, and passed")
    return status


def _gpu_name() -> str:
    """Name of the first GPU; asked in a process that ends, so that none of its memory is taken while the gate runs."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise ConfigError(f"torch cannot be loaded: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip()


MODULE = "harness.acceptance.gpu_gate.part"
_LAST_LINES = 3


@dataclass(frozen=True)
class GatePart:
    """A part of the gate. module: has `run`; limit_s: its longest, on a GPU machine or on two cores; needs:
    distributions beyond torch, transformers and what these require; in_pieces: it ends in time, and goes on later."""

    name: str
    title: str
    module: str
    limit_s: float
    needs: tuple[str, ...] = ()
    in_pieces: bool = False


_LEAST_S = 60.0  # for a piece of a part that goes on later
_CLOSES_S = 20.0  # what a job that was begun in time may take longer than thought


_HERE = "harness.acceptance.gpu_gate.parts"

WHEELS = (
    *("msgspec", "psutil", "pyarrow", "scipy", "pandas", "nvidia-ml-py", "python-dateutil", "six", "cloudpickle"),
    *("hydra-core", "omegaconf", "antlr4-python3-runtime", "mlflow", "mlflow-skinny", "mlflow-tracing", "alembic"),
    *("Mako", "SQLAlchemy", "greenlet", "sqlparse", "opentelemetry-api", "opentelemetry-proto", "opentelemetry-sdk"),
    *("opentelemetry-semantic-conventions", "protobuf", "databricks-sdk", "google-auth", "pyasn1", "pyasn1_modules"),
    *("fastapi", "starlette", "cachetools", "cryptography", "cffi", "pycparser", "importlib_metadata", "zipp"),
    *("requests", "urllib3", "charset-normalizer", "certifi", "GitPython", "gitdb", "smmap", "python-dotenv"),
)
"""Distributions that whole jobs import besides, which `pip install --no-deps` brings."""

PARTS = (
    GatePart("device", "versions, and what the device reaches bare", f"{_HERE}.device", 120),
    GatePart("worlds", "process groups of what is there", f"{_HERE}.worlds", 240),
    GatePart("kernels", "sampling, log-probabilities, attention and losses against float64", f"{_HERE}.kernels", 240),
    GatePart("training", "training steps, and their memory", f"{_HERE}.training", 480),
    GatePart("layouts", "stages, shared layers and spread experts, on two devices", f"{_HERE}.layouts", 300),
    GatePart("rollout", "the embedded engine against the CPU, and its speed", f"{_HERE}.rollout", 300),
    GatePart("weights", "every way that weights travel, and its bandwidth", f"{_HERE}.weights", 300),
    GatePart("engines", "the other engines, where they are installed", f"{_HERE}.engines", 590),
    GatePart("jobs", "whole jobs under every schedule that fits", f"{_HERE}.jobs", 1200, WHEELS, in_pieces=True),
    GatePart("profile", "times of this device, and costs fitted to them", f"{_HERE}.profile", 590),
)


def chosen(parts: Sequence[GatePart], names: Sequence[str]) -> list[GatePart]:
    """The named parts, in the order of the gate; all, where none is named. Raises ConfigError for one there is not."""
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            raise ConfigError(f"the gate has no part {name}; choose from {', '.join(known)}")
    return [part for part in parts if not names or part.name in names]


def run_gate(
    parts: Sequence[GatePart],
    kind: str,
    folder: Path,
    *,
    force: bool = False,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[PartResult]:
    """Run parts and yield each part's result, new or kept. force: ask anew what there is. seconds: begin no part that
    could take longer than what is left of them; such parts yield nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for part in parts:
        kept = None if force else read_result(folder, part.name)
        if kept is not None and kept.status not in AGAIN:
            yield kept
            continue
        left = math.inf if seconds is None else seconds - (time.monotonic() - began)
        if (_LEAST_S if part.in_pieces else part.limit_s) > left:
            say(f"{part.name} could take {part.limit_s:.0f} s, more than is left: the same command goes on with it")
            continue
        limit_s = min(part.limit_s, left)
        say(f"{part.name}: {part.title} (at most {limit_s:.0f} s)")
        if force or kept is None or kept.status != "unfinished":
            result_path(folder, part.name).unlink(missing_ok=True)
        yield _run(replace(part, limit_s=limit_s), kind, folder)


def _run(part: GatePart, kind: str, folder: Path) -> PartResult:
    log, start = folder / f"{part.name}.log", time.monotonic()
    until = f"{start + part.limit_s - _CLOSES_S if part.in_pieces else math.inf}"
    command = [sys.executable, "-m", MODULE, part.name, part.module, kind, str(folder), until, *part.needs]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        below: set[ProcessId] = set()
        try:
            code = _wait(process, part.limit_s, below)
        finally:
            _end(process, below)
    seconds = time.monotonic() - start
    found = read_result(folder, part.name) or PartResult(part.name)
    if code is None:
        found = found.ended("timed out", seconds, f"it was ended after {part.limit_s:.0f} s; {_last_words(log)}")
    elif code != 0 or found.status == "running":
        found = found.ended("crashed", seconds, f"{_how(code)}; {_last_words(log)}")
    else:
        found = replace(found, seconds=round(seconds, 1))
    write_result(folder, found)
    return found


def _wait(process: subprocess.Popen[bytes], limit_s: float, below: set[ProcessId]) -> int | None:
    """Exit code of a process, None where it runs longer than `limit_s`. below: gets all processes that it starts."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            below.update(descendants(process.pid))
    return None


def _end(process: subprocess.Popen[bytes], below: set[ProcessId]) -> None:
    """Kill it and what it left behind."""
    if process.poll() is None:
        kill_group(process.pid)
        process.wait()
    for child in below:
        child.kill()


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no result"


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{log}: {' | '.join(lines[-_LAST_LINES:])}" if lines else f"{log} is empty"
