"""The origin of a run: its names, code, packages, hardware, seeds. Imports neither torch nor ray to find out."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from engines import DISTRIBUTIONS
from harness.config import Backend
from harness.config.machine import cpu_model, gpus, installed

PACKAGES = (
    "cadence-rl",
    "torch",
    "ray",
    "transformers",
    *DISTRIBUTIONS,
    "mlflow",
    "hydra-core",
    "omegaconf",
    "numpy",
    "safetensors",
    "pyarrow",
    "pandas",
    "matplotlib",
)

HOW_TIMED = {"real": "measured", "virtual": "simulated", "paced": "paced by the cost model"}
"""The origin of a run's times, by its backend, as titles and tables have it."""

BUSY = 0.10  # share of the cores; above it, kept busy by other processes, no times are judged


def others_load(manifest: Mapping[str, Any]) -> float | None:
    """The share of the cores that others kept busy during a run; None where times are simulated, or nobody looked."""
    found = manifest.get("load", {}).get("others")
    return None if found is None or manifest["backend"] == "virtual" else float(found)


@dataclass(frozen=True)
class RunIdentity:
    """Names of a run in titles, tags and tables."""

    experiment: str
    cell: str
    seed: int
    schedule: str
    model: str
    engine: str
    backend: Backend
    smoke: bool = False
    trial: bool = False

    @property
    def how_timed(self) -> str:
        """The origin of its times, as titles and tables have it."""
        return "a trial of processes that share a GPU, no measurement" if self.trial else HOW_TIMED[self.backend]


def build_manifest(identity: RunIdentity, seeds: Mapping[str, int]) -> dict[str, Any]:
    """The object of manifest.json. seeds: every seed that the run uses, by what it seeds."""
    return {
        **asdict(identity),
        "seeds": dict(seeds),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
        "hardware": hardware(),
    }


def identity_of(manifest: Mapping[str, Any]) -> RunIdentity:
    """The RunIdentity that the manifest was built with."""
    return RunIdentity(**{field.name: manifest[field.name] for field in fields(RunIdentity) if field.name in manifest})


def run_title(identity: RunIdentity) -> str:
    """Schedule, model, seed, and whether times were measured or simulated."""
    parts = [identity.schedule, identity.model, f"seed {identity.seed}", identity.how_timed]
    return " · ".join(parts + ["smoke run"] * identity.smoke)


_NO_CODE = ":(top,exclude)results"  # records among it, of which each would keep the next from being one


def git_state(source: Path = Path(__file__)) -> dict[str, Any] | None:
    """Commit and whether the tree differs from it (untracked files count; what is below results/ is no code), of the
    repository that tracks `source`. None where there is no git, or where `source` is not tracked: an installed copy
    inside another project's tree must not report that project's commit."""
    source = source.resolve()
    if shutil.which("git") is None or _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit, changes = _git(source, "rev-parse", "HEAD"), _git(source, "status", "--porcelain", "--", ":/", _NO_CODE)
    return None if commit is None else {"commit": commit, "dirty": bool(changes)}


def hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory in bytes, and the GPUs that it may use."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [str(gpu) for gpu in gpus()],
        "platform": platform.platform(),
    }


def _git(source: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(source.parent), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
