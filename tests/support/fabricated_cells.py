"""Cells of made-up runs, written with the product's own writers: how fast they are and what they learn is given."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.comparison.runs import Cell, read_run
from harness.config import Backend
from harness.config.compose import compose_job, plain
from harness.metrics.definitions import iteration_metrics, throughput_metrics
from harness.metrics.done import write_done
from harness.metrics.ledger import Ledger
from harness.metrics.manifest import RunIdentity, build_manifest
from harness.metrics.run_files import KEPT, RunDirectory, load_samples
from harness.metrics.samples import length_metrics, staleness_metrics
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span
from tests.support.sample_records import trained_record, write_samples

PLACEMENT = {
    ("rollout", "0"): Place("rollout", ("device 0",)),
    ("reward", "0"): Place("host reward", ("host reward",)),
    ("actor", "0"): Place("actor", ("device 1",)),
}
BATCH = 8


@dataclass(frozen=True)
class Made:
    """A cell to be made up. step_s: of an iteration, first_s: of the first; exact_match: at the end, None where nothing
    is rewarded; noise: relative, of steps, and absolute, of exact matches, from run to run; settings: of its job;
    evaluated: every fifth version, and by how much held-out accuracy is beside exact match; None: never."""

    schedule: str = "fully_async"
    step_s: float = 1.0
    first_s: float = 5.0
    exact_match: float | None = 0.9
    noise: tuple[float, float] = (0.02, 0.01)
    lag: int = 1
    backend: Backend = "real"
    iterations: int = 20
    settings: tuple[str, ...] = ()
    draw: int = 0  # another draw of everything that is random
    evaluated: float | None = 0.0


@cache
def _config(schedule: str, backend: str, iterations: int, settings: tuple[str, ...]) -> dict[str, Any]:
    sizes = ("algorithm.batch_groups=2", "algorithm.group_size=4", f"iterations={iterations}", f"backend={backend}")
    return plain(compose_job([f"schedule={schedule}", *sizes, *settings]))


@cache
def _manifest() -> dict[str, Any]:
    """What no run says of itself; finding it out takes long."""
    return build_manifest(RunIdentity("", "", 0, "", "", "", "real"), {})


def evaluation(version: int, at_s: float, accuracy: float) -> dict[str, Any]:
    """A line of eval.jsonl."""
    found = dict.fromkeys(("greedy", "reward", "sampled", "pass_at_k"), accuracy)
    return {"version": version, "at_s": at_s, "problems": 128, "k": 3, **found, "truncated": 0.0, "tokens": 512,
            "seconds": 0.1, "device_s": 0.2, "custom": {}}  # fmt: skip


def make_cell(root: Path, label: str, made: Made, seeds: Sequence[int] = range(5)) -> Cell:
    """Write finished runs of these seeds below `root`, and read them as a cell."""
    return Cell(label, label, tuple(read_run(make_run(root, label, made, seed).path) for seed in seeds))


def make_run(
    root: Path, label: str, made: Made, seed: int, *, slower: float = 1.0, manifest: Any = None
) -> RunDirectory:
    """One finished run; manifest: what its manifest says otherwise."""
    rng = np.random.default_rng([made.draw, seed])
    speed = slower * np.exp(made.noise[0] * rng.standard_normal())
    learnt = made.noise[1] * rng.standard_normal()
    run = RunDirectory(root, "made_up", label, seed)
    run.start()
    run.write_config(_config(made.schedule, made.backend, made.iterations, made.settings))
    identity = RunIdentity("made_up", label, seed, made.schedule, "tiny", "torch", made.backend)
    when = {"started_at": f"2026-01-01T{seed:02d}:00:00+00:00", "git": {"commit": "a" * 40, "dirty": False}}
    run.write_manifest(_manifest() | asdict(identity) | when | (manifest or {}))
    timeline, ledger, records, now = Timeline(PLACEMENT), Ledger(), [], 0.0
    if made.exact_match is not None and made.evaluated is not None:
        run.append_evaluation(evaluation(0, 0.0, 0.4 + made.evaluated))
    for iteration in range(made.iterations):
        step = (made.step_s if iteration else made.first_s) * speed * np.exp(0.05 * rng.standard_normal())
        spans = [
            Span("rollout", "0", "generate", now, now + 0.6 * step, iteration, iteration),
            Span("actor", "0", "update_actor", now + 0.2 * step, now + step, iteration, iteration),
        ]
        timeline.add(spans)
        start, now = now, now + step
        timeline.end_iteration(iteration, now)
        batch = [
            trained_record(
                [max(0, iteration - made.lag)] * 5, iteration, sample_id=row, group_size=4,
                times=(max(0.0, start - step), start, start + 0.1 * step, start + 0.2 * step), reward=None,
                exact_match=None,
            )
            for row in range(BATCH * iteration, BATCH * (iteration + 1))
        ]  # fmt: skip
        ids = [record.sample_id for record in batch]
        ledger.admit(ids)
        ledger.trained(ids, iteration)
        records += batch
        rewards = {}
        if made.exact_match is not None:
            share = 1 - np.exp(-5 * (iteration + 1) / made.iterations)
            right = 0.4 + (made.exact_match + learnt - 0.4) * share + 0.002 * rng.standard_normal()
            rewards = {"reward/exact_match": float(right), "reward/mean": float(0.5 + 0.5 * right)}
            if made.evaluated is not None and (iteration + 1) % 5 in (0, made.iterations % 5):
                run.append_evaluation(evaluation(iteration + 1, now, float(right) + made.evaluated))
        run.append_metrics(
            iteration_metrics(
                iteration,
                BATCH * (iteration + 1),
                now,
                timeline.iteration_metrics(iteration),
                throughput_metrics(BATCH, 10 * BATCH, step, devices=2),
                staleness_metrics(batch),
                length_metrics(batch),
                rewards,
                ledger.metrics(),
            )
        )
    write_samples(run.path / "samples.parquet", records)
    run.write_trace(timeline)
    run.write_ledger(ledger)
    run.finish()
    return run


HOSTILE = (
    "\x1b[2Jred\x9b1m\r\u202egpj.exe\u2066 \u200b[bold]\ufeff </pre><img src=x onerror='document.title = 1'> "
    "日本語のとても長い文" + "w" * 200
)
"""Text that would do something to a screen, or to a page."""


def keep_samples(path: Path) -> None:
    """Problems, responses and held-out responses of some samples of a finished run of at least two iterations: sample 5
    has a response, the lowest reward, and a hostile answer; 14 was refused, and 15 is in flight."""
    samples = load_samples(path)
    count = len(samples)
    told: dict[str, Any] = {"row": [f"a.jsonl:{one // 4}" for one in range(count)], "reward": [0.5] * count}
    told["fate"] = ["trained"] * 14 + ["dropped_filtered", "in_flight"] + ["trained"] * (count - 16)
    told["reward"][5], told["reward"][6] = 0.25, None
    for name, values in told.items():
        place = samples.column_names.index(name)
        column = samples.schema.field(name)
        samples = samples.set_column(place, column, pa.array(values, column.type))
    pq.write_table(samples, path / "samples.parquet")
    runs = [{"version": 0, "tokens": 2}, {"version": 3, "tokens": 1}]
    rows: dict[str, list[dict[str, Any]]] = {
        "problems": [{"group_id": 1, "row": "a.jsonl:1", "prompt": [3, 4], "answer": HOSTILE}],
        "responses": [
            {
                "sample_id": 5,
                "response": [3, 4, 5],
                "log_probs": [-1.0] * 3,
                "loss_mask": [True] * 3,
                "version_runs": runs,
            }
        ],
        "eval_responses": [
            {"version": version, "row": "7", "number": number, "prompt": [3], "answer": "a", "response": [4, 5]}
            | {"reward": number / 2, "exact_match": number == 2, "finish_reason": "length", "turns": 1}
            | {"response_text": HOSTILE}
            for version in (0, 2)
            for number in range(3)
        ],
    }
    for name, lines in rows.items():
        pq.write_table(pa.Table.from_pylist(lines, schema=KEPT[name][0]), path / f"{name}.parquet")
    write_done(path)
