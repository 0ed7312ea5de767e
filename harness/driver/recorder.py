"""Turns what happens in a job into the run's files: ledger, samples, timeline, metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.config import ModelConfig
from harness.cost_model.shape import sample_flops
from harness.driver.checkpoint_files import AdmittedGroup, Checkpoint, RecorderState
from harness.driver.evaluation import Evaluated
from harness.driver.observer import EngineEvent, RunListener
from harness.driver.sample_decoders import SampleDecoder
from harness.metrics.arrivals import Arrivals, RunOf, Sampled, digest_of
from harness.metrics.iteration import iteration_metrics, throughput_metrics
from harness.metrics.ledger import ENGINE_EVENTS, DropReason, Ledger
from harness.metrics.parts import Parts
from harness.metrics.run_files import RunDirectory
from harness.metrics.samples import (
    Fate,
    SampleRecord,
    filter_metrics,
    staleness_metrics,
    straggler_metrics,
    turn_metrics,
    untrained_record,
)
from harness.metrics.schemas import Restart
from harness.metrics.timeline import Timeline
from harness.protocols import Clock, Span
from harness.rl.diagnostics import add_diagnostics
from harness.rl.value_loss import value_metrics
from harness.workers.training import TrainReport


@dataclass(frozen=True)
class Work:
    """peak: operations per second of one device; scorings: forward passes over a sample, besides training; epochs:
    passes of training over it, the critic's too."""

    model: ModelConfig
    scorings: int
    peak: float
    epochs: int = 1

    def flops_of(self, prompt: int, response: int) -> float:
        return sample_flops(self.model, prompt, response, self.scorings, self.epochs)


_LEDGER_EVERY_S = 5.0


@dataclass(frozen=True)
class _Admitted:
    group_id: int
    at: float
    prompt_tokens: int


class Recorder:
    """`harness.driver.observer.Observer`. One iteration is closed when the version it made has been published."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Clock,
        decoder: SampleDecoder,
        *,
        group_size: int,
        devices: int,
        several_turns: bool = False,
        steps_per_version: int = 1,
        filters: bool = False,
        limits_samples: bool = False,
        run_of: RunOf | None = None,
    ) -> None:
        """run_of: what is recorded of its order of arrival is this run's; none of it without."""
        self.timeline, self.clock, self.decoder, self.run_of = timeline, clock, decoder, run_of
        self.steps_per_version = steps_per_version
        self.group_size, self.devices, self.several_turns = group_size, devices, several_turns
        self.ledger = Ledger()
        self.filters, self.limits_samples = filters, limits_samples
        """Whether some groups may be refused, and whether samples may take as long as they like."""
        self.events = 0
        """Grows whenever anything happened: what a watch for a stall looks at."""
        self.listeners: list[RunListener] = []
        self.work: Work | None = None
        """What samples need to be computed, where it is known what a device can do."""
        self.version = 0
        """The newest that was made known."""
        self.roles: dict[str, str] = {}
        """What each is doing."""
        self.engines: list[dict[str, Any]] = []
        """What happened to rollout engines: which, what, when (seconds), why."""
        self.restarts: list[Restart] = []
        """Of roles that died."""
        self._admitted: dict[int, _Admitted] = {}  # in flight
        self._trained_samples = 0
        self._records: list[SampleRecord] = []  # trained or dropped, and not in the parts
        self._spans: list[Span] = []  # not in the parts yet; of a run that has some
        self._parts: Parts | None = None
        self._ledger_due = 0.0
        self._trained: tuple[int, Sequence[TrainReport], Sequence[TrainReport]] | None = None
        self._skipped_steps = {"train": 0.0, "critic": 0.0}
        self._given_up = Counter[DropReason]()  # samples, since the last version
        self._drops: list[list[int]] = []  # stale groups, of each call since the last version
        self._evaluated: Evaluated | None = None  # and in no line yet

    def write_into(self, run: RunDirectory) -> None:
        """From now on what is known goes into the run's files as it happens, and is not remembered here."""
        self._run = run
        if self.run_of is not None:
            run.begin_arrivals(self.run_of)
        extra_names = self.decoder.extra_names
        self._parts = run.open_parts(self.timeline, extra_names)

    def growing_files(self) -> tuple[dict[str, int], dict[str, str]]:
        """Bytes and SHA-256 of the files that grow iteration by iteration, by name; of a run without files nothing."""
        return ({}, {}) if self._parts is None else (self._run.file_sizes(), self._run.file_digests())

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None:
        self.events += 1
        self.ledger.admit(rows)
        self._admitted |= {row: _Admitted(row // self.group_size, at, prompt_tokens) for row in rows}

    def dropped(self, rows: Sequence[int], reason: DropReason) -> None:
        self.events += 1
        self.ledger.dropped(rows, reason)
        self._records += [self._untrained(row, _FATE_OF[reason]) for row in rows]
        for row in rows:
            del self._admitted[row]
        self._given_up[reason] += len(rows)
        if reason == "stale":
            self._drops.append([row // self.group_size for row in rows[:: self.group_size]])

    def doing(self, role: str, what: str) -> None:
        self.events += 1
        self.roles[role] = what
        for listener in self.listeners:
            listener.doing(role, what)

    def engine(self, name: str, what: EngineEvent, why: str = "") -> None:
        at = round(self.clock.now(), 3)
        self.engines.append({"engine": name, "what": what, "at_s": at, "why": why})
        self.doing("rollout", f"{name} {ENGINE_EVENTS[what]}" + (f": {why}" if why else ""))

    def restarted(self, restart: Restart) -> None:
        self.events += 1
        self.restarts.append(restart)
        if self._parts is not None:
            self._run.append_restart(msgspec.to_builtins(restart))
        for listener in self.listeners:
            listener.restarted(restart)

    def spans(self, spans: Iterable[Span]) -> None:
        spans = list(spans)
        self.timeline.add(spans)
        if self._parts is not None:
            self._spans += spans

    def evaluated(self, found: Evaluated) -> None:
        self._evaluated = found
        for listener in self.listeners:
            listener.evaluated(found)

    def trained(self, iteration: int, reports: Sequence[TrainReport], of_values: Sequence[TrainReport] = ()) -> None:
        for report in (*reports, *of_values):
            self.spans(report.spans)
        self._trained = (iteration, reports, of_values)

    def published(self, version: int) -> Callable[[Mapping[str, float]], None]:
        """Ends iteration version - 1. What is left is called with the metrics of the queue."""
        assert self._trained is not None and self._trained[0] == version - 1
        iteration, reports, of_values = self._trained
        self.version = version
        at = self.clock.now()
        self.timeline.end_iteration(iteration, at)
        for report in reports:
            for rows in report.trained:
                self.ledger.trained(rows.rows.tolist(), iteration)
            if report.baselines:
                self.dropped(list(report.baselines), "baseline")
        ledger = self.ledger.metrics()
        if self._evaluated is not None and self._evaluated.version:  # there is no line for the first one
            ledger |= self._evaluated.metrics
        self._evaluated = None
        given_up, self._given_up = self._given_up, Counter()
        settled, self._records = self._records, []  # as of now: a checkpoint may be made of it
        drops, self._drops = self._drops, []
        return lambda queue: self._close(
            iteration, reports, of_values, at, {**ledger, **queue}, given_up, settled, drops
        )

    def _close(
        self,
        iteration: int,
        reports: Sequence[TrainReport],
        of_values: Sequence[TrainReport],
        at: float,
        counts: Mapping[str, float],
        given_up: Mapping[DropReason, int],
        settled: list[SampleRecord],
        drops: list[list[int]],
    ) -> None:
        """The metrics of what was trained. counts: of the ledger and the queue, as the iteration ended; given_up:
        samples that were dropped meanwhile; settled: samples, by then, that are not written yet; drops: stale
        groups, by each call meanwhile."""
        trained = [rows for report in reports for rows in report.trained]
        records = [record for rows in trained for record in self.decoder.records(rows, iteration, self.group_size)]
        self._trained_samples += len(records)
        tokens = sum(record.prompt_tokens + record.response_tokens for record in records)
        times = self.timeline.iteration_metrics(iteration)
        metrics = iteration_metrics(
            iteration,
            self._trained_samples,
            at,
            times,
            throughput_metrics(len(records), tokens, times["time/iteration_s"], self.devices),
            staleness_metrics(records, self.steps_per_version),
            self.decoder.metrics(records, _added_up(reports)),
            turn_metrics(records) if self.several_turns else {},
            filter_metrics(records, given_up["filtered"] // self.group_size) if self.filters else {},
            straggler_metrics(records, given_up["straggler"] // self.group_size) if self.limits_samples else {},
            self._step_metrics("train", reports),
            value_metrics(_added_up(of_values)),
            self._step_metrics("critic", of_values),
            self._utilisation(records, times["time/iteration_s"]),
            counts,
        )
        for listener in self.listeners:
            listener.iteration(metrics)
        settled += records
        for record in records:
            del self._admitted[record.sample_id]
        if self._parts is None:
            self._records = settled + self._records
        else:
            if self.run_of is not None:
                arrivals = self._arrivals(iteration, reports, drops)
                self._run.append_arrivals(arrivals)
                for listener in self.listeners:
                    listener.arrivals(arrivals)
            self._parts.responses([response for rows in trained for response in self.decoder.responses(rows)])
            self._write_parts(self._parts, settled, {iteration: at})
            self.timeline.forget(iteration)

    def _arrivals(self, iteration: int, reports: Sequence[TrainReport], drops: list[list[int]]) -> Arrivals:
        ranks = [[rows.rows.tolist() for rows in report.trained] for report in reports]
        trained = [rows for report in reports for rows in report.trained]
        sampled = [
            Sampled(sample, engine, started_at, runs)
            for rows in trained
            for sample, engine, started_at, runs in zip(
                rows.rows.tolist(),
                rows.engine.tolist(),
                rows.started_at.tolist(),
                self.decoder.runs(rows),
                strict=True,
            )
        ]
        found = (part for rows in trained for part in (rows.responses.values, rows.log_probs.values, rows.reward))
        return Arrivals(iteration, [rank for rank in ranks if rank], drops, sampled, digest_of(found))

    def state(self) -> RecorderState:
        """As the last iteration that ended is written down."""
        last_end = self.timeline.elapsed_window()[1]
        return RecorderState(self._trained_samples, dict(self._skipped_steps), last_end, list(self.engines))

    def admitted_groups(self) -> list[AdmittedGroup]:
        """Those in flight, as of now."""
        first = {row // self.group_size: row for row in sorted(self.ledger.in_flight, reverse=True)}
        told = [self._admitted[row] for _, row in sorted(first.items())]
        return [AdmittedGroup(one.group_id, one.at, one.prompt_tokens) for one in told]

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """What was known then; the run's files are as they were."""
        cut, n = checkpoint.cut, self.group_size
        state = cut.recorder
        if checkpoint.elsewhere:  # what was done on other devices is in the other run's timeline
            self.timeline.started_at = state.last_end
        self.ledger = Ledger.restored(cut.ledger)
        for one in cut.admitted:
            told = _Admitted(one.group, one.at, one.prompt_tokens)
            self._admitted |= dict.fromkeys(range(one.group * n, (one.group + 1) * n), told)
        self._trained_samples, self._skipped_steps = state.trained_samples, dict(state.skipped_steps)
        self.engines += state.engines
        self.timeline.end_iteration(cut.version - 1, state.last_end)

    def _write_parts(self, parts: Parts, records: list[SampleRecord], ended: Mapping[int, float]) -> None:
        """With all spans that are not there yet."""
        spans, self._spans = self._spans, []
        parts.samples(records)
        parts.spans(spans, ended)
        if (now := time.monotonic()) >= self._ledger_due:
            self._run.write_ledger(self.ledger, self.engines)
            self._ledger_due = now + _LEDGER_EVERY_S

    def _utilisation(self, records: Sequence[SampleRecord], seconds: float) -> dict[str, float]:
        """Where a device's peak is known."""
        if self.work is None:
            return {}
        flops = sum(self.work.flops_of(record.prompt_tokens, record.response_tokens) for record in records)
        return {"throughput/mfu": flops / (seconds * self.devices * self.work.peak)}

    def _step_metrics(self, whose: str, reports: Sequence[TrainReport]) -> dict[str, float]:
        """Of the optimizer's steps, which every rank reports alike; nothing of simulated ones."""
        steps = [step for report in reports[:1] for step in report.steps if step]
        if not steps:
            return {}
        self._skipped_steps[whose] += sum(step["skipped"] for step in steps)
        return {
            f"{whose}/grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
            f"{whose}/learning_rate": steps[-1]["learning_rate"],
            f"{whose}/skipped_steps": self._skipped_steps[whose],
        }

    def samples(self) -> list[SampleRecord]:
        """One record per sample ever admitted, by sample id, of a run without parts."""
        assert self._parts is None, "they are in the parts"
        return sorted([*self._records, *self._in_flight()], key=lambda record: record.sample_id)

    def write(self, run: RunDirectory) -> None:
        """Everything but the metrics, which are there already. Raises LedgerError if a sample was lost."""
        ended: Mapping[int, float] = {}
        if self._parts is None:  # all of it is here; but for the responses, which a simulated run has none of
            self.write_into(run)
            self._spans, ended = self.timeline.spans, self.timeline.iteration_ends
        assert self._parts is not None
        self._write_parts(self._parts, [*self._records, *self._in_flight()], ended)
        run.merge_parts()
        run.write_ledger(self.ledger, self.engines)

    def _in_flight(self) -> list[SampleRecord]:
        return [self._untrained(row, "in_flight") for row in self.ledger.in_flight]

    def _untrained(self, row: int, fate: Fate) -> SampleRecord:
        admitted = self._admitted[row]
        return untrained_record(
            row,
            fate,
            group_id=admitted.group_id,
            admitted_at=admitted.at,
            prompt_tokens=self.decoder.prompt_tokens(admitted.prompt_tokens),
        )


_FATE_OF: dict[DropReason, Fate] = {
    "stale": "dropped_stale",
    "filtered": "dropped_filtered",
    "baseline": "dropped_baseline",
    "straggler": "dropped_straggler",
    "spare": "dropped_spare",
}


def _added_up(reports: Sequence[TrainReport]) -> dict[str, float]:
    """The sums of all ranks."""
    sums: dict[str, float] = {}
    for report in reports:
        sums = add_diagnostics(sums, report.sums)
    return sums
