"""Whole jobs with the engines that have environments of their own, where these are installed here."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engines import EMBEDDED
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.results import Check, LeftOut
from harness.config.readers import described_engine
from harness.config.registries import ENGINES

_LIMIT_S = 280.0
_MOST = {"policy/mismatch_kl": 1e-3, "router/rerouted": 0.02}
"""Bounds of float32: on cores both are 0; products of a GPU may have 10 bits."""
_REPLAY = ("model=tiny-moe", "training.routing_replay=true")
# Make hands these down: by them, what `make gate-gpu DEVICE=cpu` starts would be `make bench DEVICE=cpu`.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "DEVICE")


def run(setting: GateSetting) -> Iterator[Check]:
    """`make bench ENGINE=` for each whose environment `make setup-<engine>` has made."""
    others = [name for name in ENGINES if name != EMBEDDED]
    installed = [name for name in others if any(Path(f".venv-{name}").glob(".installed*"))]  # for CPUs, or CUDA
    if not installed or shutil.which("make") is None:
        missing = ", ".join(f"make setup-{name}" for name in others)
        raise LeftOut(f"no other engine is installed in this folder: {missing}")
    for name in others:
        if name not in installed:
            yield Check(name, f"not installed (make setup-{name})", left_out=True)
            continue
        ways = getattr(described_engine(name), "WAYS_ON_GPUS", {}) if setting.gpu else {}
        for way, environment in (ways or {"": {}}).items():
            yield _job(name, setting, f"{name}, {way}" if way else name, environment)
        if setting.gpu and getattr(described_engine(name), "GIVES_ROUTES", False):
            yield _job(name, setting, f"{name}, routing replay", {}, "router/rerouted", _REPLAY)


def _job(
    engine: str,
    setting: GateSetting,
    name: str,
    chosen: Mapping[str, str],
    metric: str = "policy/mismatch_kl",
    settings: Sequence[str] = (),
) -> Check:
    """Have a job sample and train, whose log-probs, or experts, have to be the engine's by this metric. name: of the
    check, and of its experiment. chosen: of its environment; settings: of the job."""
    kind = f"cluster.kind={'gpu' if setting.gpu else 'cpu'}"
    one = ["schedule=colocate_sync", "cluster.devices=1"]
    arguments = " ".join([*one, *settings, kind, "smoke=true", "save_weights=false", "iterations=3"])
    environment = {name: value for name, value in os.environ.items() if name not in _OF_MAKE} | dict(chosen)
    experiment = name.replace(", ", "_").replace(" ", "_")
    results = setting.folder.resolve() / "engines"
    environment["CADENCE_RESULTS"] = str(results)
    command = ["make", "bench", f"ENGINE={engine}", f"EXPERIMENT={experiment}", "FORCE=1", f"ARGS={arguments}"]
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode == 0:
        said = f"a job of 3 iterations, colocated on one device, in {time.monotonic() - start:.0f} s"
        (metrics,) = (results / experiment).rglob("metrics.jsonl")
        told = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        found, most = max(each[metric] for each in told if metric in each), _MOST[metric]
        return Check(name, f"{said}, {metric.partition('/')[2]} {found:.1e} (at most {most:g})", found < most)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return Check(name, f"exit code {done.returncode}: {' | '.join(lines[-2:])}", passed=False)
