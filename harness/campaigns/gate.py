"""The equivalence gate: before schedules are compared, those that may not lag are shown to compute the same.

Three short real runs, seed 0: colocate_sync, and separated_sync and fully_async at staleness 0. The training world is
one rank in all of them, and the engine batch-invariant (torch on the CPU): then docs/equivalence.md has them equal."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from engines import EMBEDDED
from harness.campaigns.cells import CellRequest, ResolvedCell, resolve_cell
from harness.campaigns.execution import RunOutcomes, Runs, StartRun, run_cells
from harness.checks.plugins import looks_at_whole_batches
from harness.comparison.equivalence import GATE, GATE_RUNS, Gate, GatePair, as_json, differences, read_gate
from harness.config import AlgorithmConfig
from harness.config.compose import compose_job, plugins_of
from harness.config.machine import Machine
from harness.metrics.atomic_files import write_text
from harness.metrics.run_files import load_samples

ITERATIONS = 3
CELLS = {
    "colocate_sync": ("schedule=colocate_sync", "cluster.devices=1"),
    "separated_sync, streaming": ("schedule=separated_sync", "schedule.streaming=true", "cluster.devices=2"),
    "fully_async, max_staleness=0": ("schedule=fully_async", "schedule.max_staleness=0", "cluster.devices=2"),
}
"""The first is the baseline of the others."""

_SMALL = (
    "backend=real",
    f"engine={EMBEDDED}",
    "cluster=local",
    "cluster.kind=cpu",
    "cluster.oversubscribe=true",
    "smoke=true",
    "save_weights=true",
    f"iterations={ITERATIONS}",
    "algorithm.group_size=4",
    "algorithm.kl_coef=0",
)
_OF_THE_JOB = ("model.", "model=", "task.", "task=", "max_tokens=", "algorithm.", "algorithm=", "training.lora_")
_SOURCES = ("harness", "schedules", "engines", "experiments")
_ROOT = Path(__file__).resolve().parents[2]


def _batch(algorithm: AlgorithmConfig | None) -> tuple[str, ...]:
    """A small batch: in two micro-batches, or four groups a mini-batch; those that score for the loss alone."""
    parts = 1 if algorithm is None else algorithm.mini_batches
    groups = 4 * max(2, parts)
    whole = algorithm is not None and looks_at_whole_batches(algorithm)
    recompute = algorithm is not None and algorithm.learns_from_actor_fwd
    return (
        f"algorithm.batch_groups={groups}",
        f"algorithm.micro_batch_groups={groups // parts if whole else 4}",
        f"algorithm.recompute_log_probs={str(recompute).lower()}",
    )


@dataclass(frozen=True)
class GateJob:
    """The runs of one experiment's gate. settings: of all its runs; note: where that is not what is compared."""

    experiment: str
    settings: tuple[str, ...]
    note: str

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """Everything that the gate depends on: it need not run again while this is equal."""
        found = {"settings": list(self.settings), "sources": sources_digest(), "torch": version("torch")}
        plugins = [plugin.sha256 for plugin in plugins_of(compose_job(self.settings))]
        return found | ({"plugins": plugins} if plugins else {})

    @property
    def cells(self) -> list[CellRequest]:
        """The gate's cells, in an experiment of their own."""
        shared = (*self.settings, f"experiment={self.experiment}{GATE_RUNS}")
        return [CellRequest(f"gate: {label}", (*shared, *settings)) for label, settings in CELLS.items()]


def gate_job(cell: ResolvedCell, given: Sequence[str]) -> GateJob:
    """The gate of a comparison. cell: one of its cells; given: what its user set for all. Where the comparison is
    simulated, or runs on GPUs, whose sums depend on the batch, the gate runs `tiny` on the CPU."""
    experiment, engine = cell.config.experiment, cell.config.engine.name
    if cell.plan.backend == "real" and not cell.plan.gpu:
        own = tuple(setting for setting in given if setting.startswith(_OF_THE_JOB))
        other = f"the gate ran with engine {EMBEDDED}: what {engine} computes depends on the batch"
        return GateJob(experiment, (*own, *_SMALL, *_batch(cell.config.algorithm)), "" if engine == EMBEDDED else other)
    why = "the comparison runs on GPUs" if cell.plan.backend == "real" else "the comparison is simulated"
    return GateJob(experiment, ("model=tiny", *_SMALL, *_batch(None)), f"{why}; the gate ran tiny on the CPU, for real")


def passed_before(job: GateJob, results: Path) -> Gate | None:
    """The gate's result when it passed with these settings, sources and packages; None where it did not yet."""
    known = read_gate(results / job.experiment)
    return known if known is not None and known.passed and known.made_from == job.made_from else None


def run_gate(job: GateJob, results: Path, machine: Machine, console: Console, start: StartRun) -> Gate:
    """Run the gate where it has not passed before, and write gate.json into the experiment's folder. Raises ConfigError
    where this machine cannot hold its runs."""
    known = passed_before(job, results)
    if known is not None:
        return known
    cells = [resolve_cell(request, machine) for request in job.cells]
    outcomes = run_cells(Runs(tuple(cells), (0,), results, force=True), console, start)
    gate = _judged(job, cells, outcomes, results)
    folder = results / job.experiment
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / GATE, as_json(gate))
    return gate


def _judged(job: GateJob, cells: Sequence[ResolvedCell], outcomes: RunOutcomes, results: Path) -> Gate:
    baseline, *others = [cell.folder(0, results) for cell in cells]
    name, *names = CELLS
    failure, samples = "", 0
    pairs: tuple[GatePair, ...] = ()
    if outcomes.failed:
        first = outcomes.failed[0]
        failure = f"{first.label} {first.how}: {first.log}\n{first.log_tail}"
    else:
        pairs = tuple(
            GatePair(label, str(folder.relative_to(results)), tuple(differences(baseline, folder)))
            for label, folder in zip(names, others, strict=True)
        )
        samples = load_samples(baseline).num_rows
    return Gate(
        baseline=name,
        baseline_path=str(baseline.relative_to(results)),
        pairs=pairs,
        samples=samples,
        iterations=ITERATIONS,
        model=cells[0].config.model.name,
        note=job.note,
        failure=failure,
        made_from=job.made_from,
    )


def sources_digest() -> str:
    """SHA-256 of every source and setting that a run is made from: another digest is another program."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
