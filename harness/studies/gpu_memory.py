"""The memory of three models on described machines, as chosen where nobody says more, and as planned."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from harness.config.compose import DOCS, as_arguments, compose_job
from harness.cost_model.memory_plan import GIB, USABLE
from harness.metrics.tables import write_csv
from harness.planner.memory import COLUMNS, every_schedule, merged, planned_memory, row
from harness.planner.plan import EFFORT, Plan, explore_all, layout, plan_jobs, why_none

MODELS = ("qwen7b", "qwen32b", "qwen3-30b-a3b")
MACHINES = {
    "8 x H100": ("h100", 8),
    "8 x A100": ("a100", 8),
    "8 x H20": ("h20", 8),
    "1 x H200": ("h200", 1),
    "2 x 8 H100": ("h100", 16),
}
"""Files of experiments/device, and how many of them."""
PLANNED = {"2 x 8 H100, planned": ("h100", 16), "8 x 8 H100, planned": ("h100", 64)}
"""The same, of the two larger models, as a plan has them: with engines that take several devices."""
RESPONSE = 8192


def write_page(progress: Callable[[str], None] = lambda said: None) -> Path:
    """Writes docs/gpu_memory.csv: every schedule on every machine, and the settings chosen."""
    lines: list[tuple[str, ...]] = []
    for model in MODELS:
        for machine, (device, gpus) in (MACHINES | (PLANNED if model != MODELS[0] else {})).items():
            progress(f"{model} on {machine}")
            job = [f"model={model}", f"device={device}", f"cluster.devices={gpus}", f"max_tokens={RESPONSE}"]
            usable = f"{USABLE * compose_job(job).device.memory_bytes / GIB:.1f}"
            made = list(proposed(job)) if machine in PLANNED else every_schedule(job)
            lines += [(model, machine, usable, *cells) for cells in merged(made)]
    return write_csv(DOCS / "gpu_memory.csv", pd.DataFrame(lines, columns=["model", "machine", "usable", *COLUMNS]))


def proposed(job: list[str]) -> Iterator[tuple[str, ...]]:
    """The job under each schedule as the planner proposes it, with the staleness of its file, by
    `harness.planner.memory.COLUMNS`."""
    jobs, settings = plan_jobs(job)
    fixed = frozenset({"schedule.max_staleness", "max_tokens"})
    for one in explore_all(jobs, fixed, EFFORT, processes=1):
        name = one.config.schedule.name
        if one.found is None:
            yield (name, "", "", "", "", f"no: {why_none(one)}", "")
            continue
        chosen = as_arguments(layout(Plan([one]).best))
        *cells, more = row(planned_memory([f"schedule={name}", *settings, *shlex.split(chosen)]))
        yield (*cells, f"{chosen} {more}".strip())
