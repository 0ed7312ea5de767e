"""How well does a cost model, fitted to `colocate_sync` on one device, predict real runs of every other schedule?

    python -m tests.benchmarks.bench_prediction [--rounds 2] [--iterations 30] [--schedules NAMES] [settings ...]

Fits `harness/simulator/calibration.py` to the spans and samples of real `colocate_sync` runs of the tiny model on one
device (two batch sizes, so that fixed and growing parts come apart), prints the costs, then runs every schedule for
real, and on the virtual clock with these costs. Prints the median time of an iteration of both. Target: 20 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.config import CostConfig
from harness.metrics.run_files import load_samples, load_timeline
from harness.metrics.timeline import SYNC_KINDS, Timeline
from harness.placement import HOST_ROLES
from harness.protocols import Span
from harness.runner.compose import compose_job
from harness.runner.simulate import simulate
from harness.simulator.calibration import Measured, calibrate
from schedules import SCHEDULES

WARMUP = 4  # iterations left out; even, as k_step_off makes two at a time
CALIBRATION = (("algorithm.batch_groups=16",), ("algorithm.batch_groups=4", "algorithm.micro_batch_groups=2"))
SPLITS = {"colocate_sync": ("cluster.devices=1",), "half_step": ("cluster.devices=3", "schedule.split.rollout=2")}
APART = ("cluster.devices=2",)  # one samples, one trains
COLUMNS = "{:<22}{:>9}{:>14}{:>15}{:>10}"


def measure(name: str, settings: Sequence[str], results: Path) -> Path:
    """The folder of a real run."""
    command = [sys.executable, "-m", "harness", "bench", f"experiment={name}", "backend=real", "force=true", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    (folder,) = (results / name).glob("*/seed=*")
    return folder


def turns(timeline: Timeline, iteration: int) -> list[tuple[Span, float]]:
    """The work of one iteration on its one device, in order, with the seconds since the work before it was done."""
    at, end = timeline.window(iteration)
    found = []
    for span in timeline.spans:
        if span.kind == "wait_for_samples" or span.role in HOST_ROLES or not at < span.end <= end:
            continue
        found.append((span, span.end - at))
        at = span.end
    return found


def measured(folders: Sequence[Path]) -> Measured:
    """What these runs of `colocate_sync` on one device did."""
    values: dict[str, list[float]] = defaultdict(list)
    lengths = []
    for folder in folders:
        timeline, samples = load_timeline(folder), load_samples(folder).to_pandas()
        rows = int(samples["trained_iteration"].value_counts().iloc[0])
        lengths.append(samples["response_tokens"].to_numpy())
        for iteration in range(WARMUP, len(timeline.iteration_ends)):
            batch = samples[samples["trained_iteration"] == iteration].sort_values("sample_id")
            tokens = (batch["prompt_tokens"] + batch["response_tokens"]).to_numpy()
            values["longest"].append(batch["response_tokens"].max())
            values["sampled"].append(batch["response_tokens"].sum())
            values["prompts"].append(batch["prompt_tokens"].sum())
            _take(values, turns(timeline, iteration), tokens, rows)
    arrays = {name: np.array(of_name, np.float64) for name, of_name in values.items()}
    prompts, sizes = arrays["prompts"].sum(), sum(map(len, lengths)) * (1 - WARMUP / len(timeline.iteration_ends))
    return Measured(**arrays, lengths=np.concatenate(lengths), prompt_tokens=prompts / sizes)


def _take(values: dict[str, list[float]], done: Sequence[tuple[Span, float]], tokens: np.ndarray, rows: int) -> None:
    """Sort the turns of one iteration by what they cost. Micro-batches are the parts of a batch, in order."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for span, seconds in done:
        by_kind["transfer" if span.kind in SYNC_KINDS else span.kind].append(seconds)
        if span.kind == "generate":
            values["wake_s"].append(seconds - (span.end - span.start))
            values["generate_s"].append(span.end - span.start)
    *updates, step = by_kind["update_actor"]
    values["step_s"].append(step)
    for name, calls in (
        ("log_prob", by_kind["reference"]),
        ("log_prob", by_kind["old_log_prob"]),
        ("train", updates),
    ):
        values[f"{name}_s"] += calls
        values[f"{name}_tokens"] += [float(part.sum()) for part in np.split(tokens, len(calls))]
    values["transfer_s"] += [sum(by_kind["transfer"]) / 2] * 2  # the trainer writes, then all read


def iteration_s(timeline: Timeline) -> float:
    """Median seconds of an iteration: of pairs of them, since some schedules do two at a time."""
    ends = [timeline.iteration_ends[i] for i in range(WARMUP - 1, len(timeline.iteration_ends))]
    return statistics.median((after - before) / 2 for before, after in zip(ends, ends[2:], strict=False))


def predicted_s(cost: CostConfig, settings: Sequence[str]) -> float:
    return iteration_s(simulate(replace(compose_job(["backend=virtual", *settings]), cost=cost), 0).timeline)


def tell(cost: CostConfig) -> None:
    print("costs, fitted to colocate_sync on one device:")
    for name in ("decode_step_s", "decode_step_s_per_sample", "log_prob_s_per_token", "train_s_per_token"):
        print(f"  {name}: {getattr(cost, name):.3g}")
    for name in ("call_s", "train_step_s", "sync_s", "reload_s", "prompt_tokens"):
        print(f"  {name}: {getattr(cost, name):.3g}")
    lengths = np.array(cost.lengths.values)
    print(f"  responses: mean {lengths.mean():.2f}, longest {lengths.max()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("settings", nargs="*", help="more settings of all jobs, such as task=expand")
    given = parser.parse_args()
    common = [f"iterations={given.iterations}", "save_weights=false", *given.settings]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CADENCE_RESULTS"] = folder
        alone = [*common, "schedule=colocate_sync", "cluster.devices=1"]
        runs = [measure(f"fit{n}", [*alone, *batch], Path(folder)) for n, batch in enumerate(CALIBRATION)]
        cost = calibrate(measured(runs), compose_job(["cost=tiny_cpu"]).cost)
        tell(cost)
        print(COLUMNS.format("schedule", "devices", "measured, ms", "simulated, ms", "error"), flush=True)
        for name in given.schedules.split(","):
            job = [*common, f"schedule={name}", *SPLITS.get(name, APART), "cluster.oversubscribe=true"]
            devices = compose_job(job).cluster.devices
            times = [iteration_s(load_timeline(measure(name, job, Path(folder)))) for _ in range(given.rounds)]
            real, simulated = statistics.median(times), predicted_s(cost, job)
            error = f"{simulated / real - 1:+.0%}"
            print(COLUMNS.format(name, devices, f"{real * 1e3:.0f}", f"{simulated * 1e3:.0f}", error), flush=True)


if __name__ == "__main__":
    main()
