"""From reports of training to the run's files: metrics, ledger, samples of a run that ended early."""

import asyncio
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from harness.config.placement import Placement
from harness.cost_model.shape import sample_flops
from harness.driver.evaluation import Evaluated
from harness.driver.listeners import IterationListener, RunListener
from harness.driver.progress import ProgressDisplay
from harness.driver.recorder import Recorder
from harness.driver.session import worker_places
from harness.metrics.definitions import METRIC_NAMES
from harness.metrics.ledger import LedgerError
from harness.metrics.parts import PARTS, RESPONSES, SAMPLES, SPANS, GrowingTable, read_growing, read_samples_so_far
from harness.metrics.run_files import RunDirectory, load_kept, load_ledger, load_metrics, load_samples, load_timeline
from harness.metrics.samples import RESPONSES_SCHEMA, SCHEMA, Texts
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Completion, Span
from harness.rl.diagnostics import diagnostics
from harness.runtime.runtime import RealClock
from harness.tasks import Problem
from harness.transfer_queue import Batch, Ragged
from harness.workers.dataflow import rollout_columns, text_column
from harness.workers.dealing import joined, some_rows
from harness.workers.recording import RecordingSettings, RecordRole, RunLengthDecoder, TokenDecoder, Work
from harness.workers.training import Pass, TrainedRows, TrainReport
from tests.support.fsdp_samples import SMALL

N, BATCH = 2, 3  # samples of a group, groups of a batch
HOST = ("reward", "advantages")
PLACEMENT = Placement({"rollout": (0,), "actor": (1,), "actor_fwd": (1,), "reference": (1,)})


class SetClock(RealClock):
    """Says the time that it was set to."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path, "bench", "cell", 0) as folder:
        yield folder


def recorder_of(recording: RecordingSettings, *, pooled: bool = False) -> Recorder:
    timeline = Timeline(worker_places(PLACEMENT, pooled=pooled, host=HOST), warmup=0)
    return Recorder(timeline, SetClock(), recording, devices=2)


@pytest.fixture
def recorder(run: RunDirectory) -> Recorder:
    recorder = recorder_of(RecordingSettings(TokenDecoder(), N))
    recorder.listeners.append(IterationListener(run.append_metrics))
    return recorder


class Rows:
    """In place of a queue: rows that were trained."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batch, self.leases = joined(batches), 0

    async def get(self, task: str, count: int, *, only: Sequence[int], consumer: str) -> Batch:
        self.leases += 1
        return some_rows(self.batch, np.flatnonzero(np.isin(self.batch.rows, only)))

    async def give_back(self, lease: int) -> None:
        self.leases -= 1


def trained(rows: list[int], version: int, **columns: Any) -> tuple[TrainedRows, Batch]:
    """Responses of two tokens; every first sample of a group is right. Times are those of the row, but the last, which
    the first row has."""
    k = len(rows)
    times = np.array(rows, dtype=np.float64) / 100
    log_probs, versions = np.full(2, -0.5, np.float32), np.full(2, version, np.int32)
    said = [
        Completion(row, np.array([7, 1]), log_probs, versions, "stop", at + 0.1, at + 0.2, first_token_at=at + 0.15)
        for row, at in zip(rows, times.tolist(), strict=True)
    ]
    told: dict[str, Any] = rollout_columns(said, engine=0) | {
        "prompt": Ragged(np.zeros(4 * k, np.int64), np.full(k, 4)),
        "reward": np.array([1.0 if row % N == 0 else 0.25 for row in rows], np.float32),
        "exact_match": np.array([row % N == 0 for row in rows]),
        "reward_failure": text_column(["the judge is away" if row % N == 1 else "" for row in rows]),
        "admitted_at": times,
        **columns,
    }
    ids = np.array(rows)
    return TrainedRows(ids, ids, told["reward"], rows[0] / 100 + 0.3), Batch("train_0", ids, told, lease=0)


def end(recorder: Recorder, version: int, batches: Sequence[Batch], queue: dict[str, float] | None = None) -> None:
    """The iteration is published, recorded and closed."""
    ended = recorder.published(version)
    rows: Any = Rows(batches)
    role = RecordRole(rows, recorder.clock, recorder.recording)
    recorded = asyncio.run(role.record(ended.trained))
    ended.close(replace(recorded, generated=(12 * version + 3, 1)), queue or {})
    role.close()
    assert not rows.leases, "all was given back"


def sums_of(tokens: int, off: float = 0.0) -> dict[str, float]:
    """Of tokens that are all as far from the policy that sampled: e^off. One is clipped."""
    zeros = torch.zeros(tokens)
    sums = diagnostics(zeros + off, zeros, zeros, zeros == 0, entropies=zeros + 2, gradients=zeros, unbounded=zeros)
    return sums | {"clipped": 1.0}


def play(recorder: Recorder, iteration: int, *, version: int, ranks: int = 1) -> None:
    """One iteration of a second: its rows shared out over ranks, then published."""
    first = iteration * BATCH * N
    rows = list(range(first, first + BATCH * N))
    start, share = float(iteration), len(rows) // ranks
    recorder.spans([Span("rollout", "0", "generate", start, start + 0.5, version, iteration)])
    reports, batches = [], []
    for rank in range(ranks):
        mine = rows[rank * share : (rank + 1) * share]
        spans = [Span("actor", "0", "update_actor", start + 0.5, start + 0.9, iteration, iteration)] if not rank else []
        sums = sums_of(2 * share, off=math.log(1 + rank))
        steps = [
            {"grad_norm": 0.25, "learning_rate": 2e-3, "skipped": float(iteration == 0)},
            {"grad_norm": 0.75, "learning_rate": 1e-3, "skipped": 0.0},
        ]
        told, batch = trained(mine, version)
        passes = [Pass([10 * (1 + 2 * ((rank + number) % 2))], 0.2) for number in range(2)]
        reports.append(TrainReport([told], sums, steps, spans, passes=passes))
        batches.append(batch)
    recorder.trained(iteration, reports)
    recorder.clock.time = iteration + 1.0  # type: ignore[attr-defined]
    end(recorder, iteration + 1, batches, {"queue/depth_samples": 3.0})


def admit(recorder: Recorder, groups: range) -> None:
    for group in groups:
        problem = Problem(np.arange(4) + group, f"answer {group}", row=f"a.jsonl:{group}")
        recorder.admitted(range(group * N, (group + 1) * N), problem, at=group / 100)


def test_an_iteration_is_a_line_of_known_metrics(recorder: Recorder, run: RunDirectory) -> None:
    admit(recorder, range(2 * BATCH))
    play(recorder, 0, version=0)
    play(recorder, 1, version=0)
    first, second = load_metrics(run.path)
    idle = {f"idle/{role}" for role in (*PLACEMENT.devices, "reward", "advantages")}
    absent = {
        "policy/kl_coef",
        "policy/kl_ref",
        "policy/mismatch_kl",
        "policy/proximal_lag",
        "policy/rejected",
        "reward/baseline",
        "token_ledger/discarded_lag",
        "token_ledger/masked",
        "throughput/mfu",
        "train/rank_imbalance",
        *(name for name in METRIC_NAMES if name.startswith(("turns/", "filter/", "critic/", "router/", "straggler/"))),
    }  # no reference, no recomputed log-probs, no rejection, no environment, filter, critic, experts, limit, other rank
    phases = {name for name in METRIC_NAMES if name.startswith(("time/", "eval/"))}
    assert set(first) - phases == ({"iteration", "samples", "seconds"} | METRIC_NAMES | idle) - absent - phases
    assert (second["iteration"], second["samples"], second["seconds"]) == (1, 12, 2.0)
    assert (first["staleness/max"], second["staleness/max"], second["staleness/mean"]) == (0, 1, 1.0)
    assert second["throughput/samples_per_s"] == 6.0 and second["throughput/tokens_per_s_per_device"] == 18.0
    assert second["reward/mean"] == pytest.approx(0.625) and second["reward/exact_match"] == 0.5
    assert second["time/iteration_s"] == 1.0 and second["time/generate_s"] == pytest.approx(0.5)
    assert second["idle/rollout"] == pytest.approx(0.5) and second["idle/reference"] == pytest.approx(0.6)
    assert second["policy/entropy"] == 2.0 and second["queue/depth_samples"] == 3
    assert (second["train/grad_norm"], second["train/learning_rate"]) == (0.5, 1e-3)
    assert [first["train/skipped_steps"], second["train/skipped_steps"]] == [1, 1]
    assert (first["ledger/trained"], first["ledger/in_flight"], second["ledger/in_flight"]) == (6, 6, 0)
    told = [second[f"token_ledger/{name}"] for name in ("generated", "consumed", "discarded", "in_flight")]
    assert told == [27, 24, 1, 2], "a token was thrown away as its sample began again"
    assert second["reward/correct_and_complete"] == 0.5 and second["throughput/correct_samples_per_s"] == 3.0


def test_work_over_what_devices_could_do_is_reported_where_known(recorder: Recorder, run: RunDirectory) -> None:
    recorder.recording = replace(recorder.recording, work=Work(SMALL, scorings=1, peak=1e6))
    admit(recorder, range(BATCH))
    play(recorder, 0, version=0)
    (line,) = load_metrics(run.path)
    work = BATCH * N * sample_flops(SMALL, 4, 2, scorings=1)
    assert line["throughput/mfu"] == pytest.approx(work / (line["time/iteration_s"] * 2 * 1e6))


def test_held_out_accuracy_is_in_the_line_of_its_version(recorder: Recorder, run: RunDirectory) -> None:
    first = Evaluated(0, 0.0, 4, 0, 0.5, 0.6, None, None, 0.0, 20, 1.5, 3.0)
    heard: list[Evaluated] = []

    class Hears(RunListener):
        def evaluated(self, found: Evaluated) -> None:
            heard.append(found)

    recorder.listeners.append(Hears())
    admit(recorder, range(2 * BATCH))
    recorder.evaluated(first, {})
    play(recorder, 0, version=0)
    recorder.evaluated(second := replace(first, version=2, greedy=0.75), {})
    play(recorder, 1, version=0)
    lines = load_metrics(run.path)
    assert heard == [first, second]
    assert not any(name.startswith("eval/") for name in lines[0])
    assert (lines[1]["eval/version"], lines[1]["eval/greedy"], lines[1]["eval/device_s"]) == (2, 0.75, 3.0)


def test_extra_values_of_scores_are_custom_metrics_and_columns(recorder: Recorder, run: RunDirectory) -> None:
    recorder.recording = replace(recorder.recording, decoder=TokenDecoder(("copied", "style/caps")))
    admit(recorder, range(BATCH))
    values = np.array([[row, np.nan if row else 0.5] for row in range(BATCH * N)])
    rows, batch = trained(list(range(BATCH * N)), 0, score_extras=Ragged.from_rows(list(values)))
    recorder.trained(0, [TrainReport([rows], sums_of(12))])
    recorder.clock.time = 1.0  # type: ignore[attr-defined]
    end(recorder, 1, [batch])
    (metrics,) = load_metrics(run.path)
    assert (metrics["custom/copied"], metrics["custom/style/caps"]) == (2.5, 0.5)
    recorder.write(run)
    samples = load_samples(run.path)
    assert samples["custom/copied"].to_pylist() == list(range(6))
    assert samples["custom/style/caps"].to_pylist() == [0.5, *[None] * 5]


def test_ranks_add_up_to_one_iteration(recorder: Recorder, run: RunDirectory) -> None:
    admit(recorder, range(BATCH))
    play(recorder, 0, version=0, ranks=2)
    (metrics,) = load_metrics(run.path)
    assert metrics["samples"] == 6 and metrics["policy/ratio_max"] == 2.0
    assert metrics["policy/clip_fraction"] == pytest.approx(2 / 12)
    assert metrics["train/rank_imbalance"] == 1.5, "in each micro-batch one has 30 tokens and one 10: as many in all"
    assert metrics["time/wait_for_slowest_rank_s"] == pytest.approx(2 * 0.2 / 3)


def test_what_is_not_trained_is_dropped_for_a_reason_or_in_flight(recorder: Recorder, run: RunDirectory) -> None:
    admit(recorder, range(BATCH + 2))
    play(recorder, 0, version=0)
    recorder.dropped([6, 7], "stale")
    recorder.write(run)
    samples = load_samples(run.path).to_pylist()
    assert [sample["sample_id"] for sample in samples] == list(range((BATCH + 2) * N))
    assert [sample["fate"] for sample in samples] == ["trained"] * 6 + ["dropped_stale"] * 2 + ["in_flight"] * 2
    last = samples[-1]
    assert (last["group_id"], last["admitted_at"], last["prompt_tokens"]) == (4, 0.04, 4)
    assert last["lag_worst"] is None and last["trained_at"] is None and last["reward"] is None
    ledger = load_ledger(run.path)
    assert (ledger["admitted"], ledger["trained"], ledger["in_flight"]) == (10, 6, 2)
    assert ledger["in_flight_ids"] == [8, 9] and ledger["trained_by_iteration"] == {"0": 6}
    assert ledger["dropped_ids"]["stale"] == [6, 7]
    with pytest.raises(LedgerError, match="sample 6 cannot be dropped as stale: it is dropped"):
        recorder.dropped([6], "stale")


def test_a_trained_sample_keeps_what_it_went_through(recorder: Recorder, run: RunDirectory) -> None:
    admit(recorder, range(2 * BATCH))
    play(recorder, 0, version=0)
    play(recorder, 1, version=0)
    recorder.write(run)
    sample = load_samples(run.path).to_pylist()[7]
    assert (sample["sample_id"], sample["group_id"], sample["engine"], sample["trained_iteration"]) == (7, 3, "0", 1)
    assert (sample["lag_worst"], sample["lag_in_flight"], sample["lag_in_queue"], sample["span"]) == (1, 0, 1, 1)
    assert (sample["prompt_tokens"], sample["response_tokens"], sample["reward"]) == (4, 2, 0.25)
    times = [sample[f"{event}_at"] for event in ("admitted", "started", "finished", "trained")]
    assert times == pytest.approx([0.07, 0.17, 0.27, 0.36])


def test_what_others_were_compared_with_has_a_fate_of_its_own(recorder: Recorder, run: RunDirectory) -> None:
    admit(recorder, range(BATCH))
    rows = range(BATCH * N)
    sums = sums_of(2 * BATCH) | {"baselines": float(BATCH), "baseline_reward": 1.5}
    steps = [{"grad_norm": 1.0, "learning_rate": 1e-3, "skipped": 0.0}]
    spans = [Span("actor", "0", "update_actor", 0.5, 0.9, 0, 0)]
    baselines = {row: 0.5 for row in rows if row % N == 0}
    learnt, _ = trained([row for row in rows if row % N], 0)
    _, batch = trained(list(rows), 0)
    recorder.trained(0, [TrainReport([learnt], sums, steps, spans, baselines)])
    recorder.clock.time = 1.0  # type: ignore[attr-defined]
    end(recorder, 1, [batch], {"queue/depth_samples": 0.0})
    recorder.write(run)
    assert [sample["fate"] for sample in load_samples(run.path).to_pylist()] == ["dropped_baseline", "trained"] * BATCH
    (line,) = load_metrics(run.path)
    assert line["reward/baseline"] == 0.5 and line["ledger/dropped_baseline"] == BATCH == line["ledger/trained"]


def test_a_simulated_sample_is_read_as_runs_of_tokens_and_has_no_reward(run: RunDirectory) -> None:
    recorder = recorder_of(RecordingSettings(RunLengthDecoder(prompt=100), N), pooled=True)
    recorder.listeners.append(IterationListener(run.append_metrics))
    admit(recorder, range(3 * BATCH))
    for iteration in range(3):
        rows = list(range(iteration * BATCH * N, (iteration + 1) * BATCH * N))
        runs = [0, 2] if iteration == 2 else [iteration, iteration]
        versions = Ragged(np.tile(np.array(runs, np.int32), len(rows)), np.full(len(rows), 2))
        lengths = Ragged(np.tile(np.array([30, 10]), len(rows)), np.full(len(rows), 2))
        told, batch = trained(rows, iteration, versions=versions, response=lengths)
        span = Span("actor", "0", "update_actor", iteration, iteration + 0.9, iteration, iteration)
        recorder.trained(iteration, [TrainReport([told], spans=[span])])
        recorder.clock.time = iteration + 1.0  # type: ignore[attr-defined]
        end(recorder, iteration + 1, [batch])
    recorder.write(run)
    *_, last = load_metrics(run.path)
    assert not [name for name in last if name.startswith(("reward/", "policy/"))]
    assert last["response_length/mean"] == 40 and last["throughput/tokens_per_s"] == 6 * 140
    assert (last["staleness/max"], last["staleness/mean"], last["staleness/span_max"]) == (2, 1.5, 2)
    assert not (run.path / "responses.parquet").exists()
    assert load_samples(run.path).to_pylist()[-1]["reward"] is None


def test_listeners_hear_what_is_written(recorder: Recorder, run: RunDirectory) -> None:
    heard: list[dict[str, float]] = []
    doing: list[tuple[str, str]] = []

    class Hears(RunListener):
        def iteration(self, metrics: Mapping[str, float]) -> None:
            heard.append(dict(metrics))

        def doing(self, role: str, what: str) -> None:
            doing.append((role, what))

    recorder.listeners.append(Hears())
    admit(recorder, range(BATCH))
    recorder.doing("actor", "batch 0")
    play(recorder, 0, version=0)
    assert [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()] == heard
    assert doing == [("actor", "batch 0")]


def test_places_follow_the_placement() -> None:
    found = worker_places(PLACEMENT, pooled=False, host=HOST)
    assert found["rollout", "0"] == Place("rollout", ("device 0",))
    assert found["actor_fwd", "0"] == found["actor", "0"] == Place("actor+actor_fwd+reference", ("device 1",))
    assert found["reward", "0"].devices == ("host reward",)
    both = Placement({"rollout": (0, 1), "actor": (0, 1)})
    assert worker_places(both, pooled=False, host=HOST)["actor", "1"] == Place("rollout+actor", ("device 1",))
    pooled = worker_places(both, pooled=True, host=HOST)
    assert pooled["actor", "0"] == Place("rollout+actor", ("device 0", "device 1")) and ("actor", "1") not in pooled
    assert pooled["rollout", "1"] == Place("rollout+actor", ("device 1",))


def metrics(iteration: int, *, seconds: float = 0.5, lag: float = 1.0, exact: float = 0.5) -> dict[str, float]:
    return {
        "iteration": float(iteration),
        "staleness/max": lag,
        "time/iteration_s": seconds,
        "throughput/samples_per_s": 128 / seconds,
        "reward/exact_match": exact,
        "reward/mean": exact + 0.25,
    }


def plain() -> tuple[Console, StringIO]:
    told = StringIO()
    return Console(file=told, width=120, force_terminal=False), told


def test_without_a_terminal_it_prints_plain_lines_no_oftener_than_asked() -> None:
    console, told = plain()
    with ProgressDisplay(console, "a job | seed 0", 20, every_s=0.0) as display:
        display.doing("rollout", "batch 0")
        display.iteration(metrics(0))
        display.iteration(metrics(1, lag=2.0, exact=1.0))
    assert told.getvalue().splitlines() == [
        "a job | seed 0",
        "iteration 1/20  exact match 0.50  reward 0.75  256 samples/s  worst lag 1",
        "iteration 2/20  exact match 0.75  reward 1.00  256 samples/s  worst lag 2",
    ]
    console, told = plain()
    with ProgressDisplay(console, "a job", 20, every_s=3600.0) as display:
        for i in range(10):
            display.iteration(metrics(i))
    assert told.getvalue() == "a job\n"
    console, told = plain()
    with ProgressDisplay(console, "a job", 100, every_s=0.0) as display:
        display.iteration(metrics(0, seconds=100.0, lag=3.0, exact=0.0))
        for i in range(1, 11):
            display.iteration(metrics(i))
    assert told.getvalue().splitlines()[-1].endswith("exact match 0.50  reward 0.75  256 samples/s  worst lag 3")


def test_a_terminal_shows_figures_and_roles_or_that_it_waits() -> None:
    told = StringIO()
    with ProgressDisplay(Console(file=told, width=120, force_terminal=True, color_system=None), "a job", 20) as display:
        display.doing("rollout", "batch 7")
        display.doing("actor", "publishing version 7")
        display.iteration(metrics(6, lag=2.0))
    shown = told.getvalue()
    for text in ("a job", "7/20", "worst lag 2", "rollout", "batch 7", "actor", "publishing version 7"):
        assert text in shown
    told = StringIO()
    with ProgressDisplay(Console(file=told, width=120, force_terminal=True), "a job", 20):
        pass
    assert "waiting for the first iteration" in told.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failure_leaves_the_terminal_usable_and_goes_on(terminal: bool) -> None:
    told = StringIO()
    console = Console(file=told, force_terminal=terminal)
    with pytest.raises(RuntimeError, match="broken"), ProgressDisplay(console, "a", 2):
        raise RuntimeError("broken")
    if terminal:
        assert told.getvalue().count("\x1b[?25h") == 1, "the cursor is back"


# -- while it goes on


def test_a_run_can_be_read_while_it_goes_on_and_after_its_death(recorder: Recorder, run: RunDirectory) -> None:
    recorder.write_into(run)
    admit(recorder, range(3 * BATCH))
    for iteration in range(2):
        play(recorder, iteration, version=0)
    assert load_samples(run.path)["sample_id"].to_pylist() == list(range(2 * BATCH * N))
    assert load_timeline(run.path).iteration_ends == {0: 1.0, 1: 2.0}
    assert load_ledger(run.path)["trained"] == 6  # as of the first iteration: it is written every few seconds
    for name in (SAMPLES, RESPONSES, SPANS):
        path = run.path / PARTS / name
        path.write_bytes(path.read_bytes()[:-5])  # in the middle of the second batch
    so_far = load_samples(run.path)
    assert so_far["sample_id"].to_pylist() == list(range(BATCH * N))
    assert so_far["row"].to_pylist() == [f"a.jsonl:{sample // N}" for sample in range(BATCH * N)]
    assert load_timeline(run.path).iteration_ends == {0: 1.0}
    assert len(read_growing(run.path / PARTS / RESPONSES)) == BATCH * N


def test_a_table_that_an_earlier_version_began_keeps_its_columns(tmp_path: Path) -> None:
    GrowingTable(tmp_path / SAMPLES, SCHEMA.remove(SCHEMA.get_field_index("failure"))).file.close()
    assert read_samples_so_far(tmp_path).column_names[-2:] == ["reward_failed", "row"]
    GrowingTable(tmp_path / RESPONSES, RESPONSES_SCHEMA.remove(4)).file.close()
    table = GrowingTable(tmp_path / RESPONSES, RESPONSES_SCHEMA)
    row = {"response": np.array([1]), "log_probs": np.array([-0.5], np.float32), "loss_mask": np.array([True])}
    table.append({"sample_id": [3], **{name: Ragged.from_rows([values]) for name, values in row.items()}})
    table.file.close()
    (read,) = read_growing(tmp_path / RESPONSES).to_pylist()
    assert read == {"sample_id": 3, "response": [1], "log_probs": [-0.5], "loss_mask": [True]}


def test_a_recorder_that_writes_remembers_nothing_settled(recorder: Recorder, run: RunDirectory) -> None:
    recorder.write_into(run)
    sizes = []
    for iteration in range(40):
        admit(recorder, range(iteration * BATCH, (iteration + 1) * BATCH))
        play(recorder, iteration, version=iteration)
        kept = (recorder._records, recorder._since.untrained, recorder._spans, recorder._problems)
        sizes.append(len(pickle.dumps((recorder._admitted, *kept, recorder.timeline._by_device))))
    assert max(sizes[1:]) == sizes[1] and not recorder.timeline.spans
    admit(recorder, range(40 * BATCH, 41 * BATCH))  # in flight at the end
    recorder.write(run, Texts(lambda tokens: "".join(map(str, tokens)), samples=4, characters=3))
    samples, problems = load_samples(run.path), pq.read_table(run.path / "problems.parquet").to_pylist()
    assert len(samples) == 41 * BATCH * N and len(load_timeline(run.path).spans) == 80
    assert samples["row"].to_pylist() == [f"a.jsonl:{sample // N}" for sample in range(41 * BATCH * N)]
    texts = [(one["sample_id"], one["prompt_text"], one["response_text"]) for one in samples.to_pylist()]
    assert [text for text in texts if text[1]] == [
        (sample, "".join(map(str, range(sample // N, sample // N + 3)))[:3] + "…", "71") for sample in (0, 60, 120, 180)
    ]
    assert problems[7] == {"group_id": 7, "row": "a.jsonl:7", "prompt": [7, 8, 9, 10], "answer": "answer 7"}
    responses = load_kept(run.path, "responses")
    assert responses["sample_id"].to_pylist() == list(range(40 * BATCH * N))
    assert responses["version_runs"][13].as_py() == [{"version": 2, "tokens": 2}]
    assert responses["response"][5].as_py() == [7, 1] and not (run.path / PARTS).exists()


def test_a_recorder_that_died_over_an_iteration_writes_it_once(recorder: Recorder, run: RunDirectory) -> None:
    recorder.write_into(run)
    admit(recorder, range(2 * BATCH))
    play(recorder, 0, version=0)
    told, batch = trained(list(range(BATCH * N, 2 * BATCH * N)), 1)
    recorder.trained(1, [TrainReport([told], sums_of(12))])
    recorder.clock.time = 2.0  # type: ignore[attr-defined]
    ended = recorder.published(2)
    rows: Any = Rows([batch])
    for torn in (b"half of a batch", b""):  # the first one had written all, and died before anybody knew
        role = RecordRole(rows, recorder.clock, recorder.recording)
        recorded = asyncio.run(role.record(ended.trained))
        role.close()
        with (run.path / PARTS / RESPONSES).open("ab") as file:
            file.write(torn)
    ended.close(recorded, {})
    growing = recorder.growing_files()[0]
    assert growing == {path: (run.path / path).stat().st_size for path in growing}
    recorder.write(run)
    assert load_samples(run.path)["sample_id"].to_pylist() == list(range(2 * BATCH * N))
    assert load_kept(run.path, "responses")["sample_id"].to_pylist() == list(range(2 * BATCH * N))
