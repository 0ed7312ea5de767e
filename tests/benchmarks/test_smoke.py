"""Every benchmark runs to its end on as little as it can, so that none breaks unnoticed. Its figures mean nothing here.

The stress of the queue is a test by itself (tests/integration/test_transfer_queue_processes.py).
"""

import os
from pathlib import Path

import pytest

from tests.support.fabricated_cells import Made, make_run
from tests.support.project import ROOT, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = [
    *("model.warm_start=false", "iterations=3", "warmup_iterations=1", "loggers=[]"),
    *("algorithm.batch_groups=4", "algorithm.group_size=4", "algorithm.micro_batch_groups=4"),
]
ARGUMENTS = {
    "bench_bound": SHORT,
    "bench_checkpoints": [*SHORT, "iterations=9", "--rounds", "1", "--every", "3"],
    "bench_control_plane": ["--sizes", "64x64"],
    "bench_delta_sync": ["--only", "tiny", "--steps", "5", "--transport", "host_staged"],
    "bench_intervals": ["--repeats", "200"],
    "bench_overhead": [*SHORT, "iterations=6", "--rounds", "1"],
    "bench_paced": ["--schedules", "one_step_off", "iterations=2", "warmup_iterations=1"],
    "bench_prediction": ["--rounds", "1", "--iterations", "8", "--schedules", "fully_async", "model.warm_start=false"],
    "bench_rollout": ["--rounds", "1"],
    "bench_scale": ["--engines", "8", "--clients", "8", "--seconds", "1", "--samples", "64"],
    "bench_service": ["--rounds", "1", "--samples", "64", "--batch", "16", "--weights-mib", "1"],
    "bench_simulation": ["iterations=2"],
    "bench_soak": ["--every", "5", "--faults", "iterations=12", "checkpoint.every=2", "loggers=[]"],
    "bench_weight_sync": ["--rounds", "1", "--layers", "1", "--verify", "--only", "collective"],
    "transfer_queue": ["--quick", "--cases", "stream"],
}


def run(name: str, results: Path, *arguments: str) -> str:
    environment = os.environ | {"CADENCE_RESULTS": str(results), "GLOO_SOCKET_IFNAME": "lo"}
    done = python("-m", f"tests.benchmarks.{name}", *arguments, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "figures.json")] if name == "transfer_queue" else []
    assert run(name, tmp_path, *ARGUMENTS[name], *output)


def test_engines_are_compared_over_finished_runs(tmp_path: Path) -> None:
    for engine in ("torch", "vllm"):
        for seed in (0, 1):
            make_run(tmp_path, engine, Made(settings=(f"engine={engine}",)), seed, manifest={"engine": engine})
    assert "| `vllm` |" in run("bench_engines", tmp_path, "--experiment", "made_up")


def test_every_benchmark_is_tried() -> None:
    there = {path.stem for path in (ROOT / "tests/benchmarks").glob("bench_*.py")} | {"transfer_queue"}
    assert there == set(ARGUMENTS) | {"bench_engines"}
