"""Turns what happens in a job into the run's files: ledger, samples, timeline, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.placement import HOST_ROLES, Placement
from harness.driver.pool import EngineEvent
from harness.driver.readings import Reading, Response
from harness.metrics.iteration import iteration_metrics, throughput_metrics
from harness.metrics.ledger import ENGINE_EVENTS, DropReason, Ledger
from harness.metrics.run_files import RunDirectory
from harness.metrics.samples import Fate, SampleRecord, sample_record, staleness_metrics
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Clock, Span
from harness.rl.diagnostics import add_diagnostics
from harness.workers.actor import TrainReport


@dataclass(frozen=True)
class _Admitted:
    group_id: int
    at: float
    prompt_tokens: int


class Recorder:
    """`harness.driver.job.Observer`. One iteration is closed when the version it made has been published."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Clock,
        reading: Reading,
        *,
        group_size: int,
        devices: int,
    ) -> None:
        self.timeline, self.clock, self.reading = timeline, clock, reading
        self.group_size, self.devices = group_size, devices
        self.ledger = Ledger()
        self.events = 0
        """Grows whenever anything happened: what a watch for a stall looks at."""
        self.listeners: list[Callable[[Mapping[str, float]], None]] = []
        """Hear the metrics of every iteration."""
        self.on_doing: Callable[[str, str], None] = lambda role, what: None
        self.engines: list[dict[str, Any]] = []
        """What happened to rollout engines: which, what, when (seconds), why."""
        self._admitted: dict[int, _Admitted] = {}
        self._dropped: dict[int, DropReason] = {}
        self._records: list[SampleRecord] = []
        self._responses: list[Response] = []
        self._trained: tuple[int, Sequence[TrainReport]] | None = None

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None:
        self.events += 1
        self.ledger.admit(rows)
        self._admitted |= {row: _Admitted(row // self.group_size, at, prompt_tokens) for row in rows}

    def dropped(self, rows: Sequence[int], reason: DropReason) -> None:
        self.events += 1
        self.ledger.dropped(rows, reason)
        self._dropped |= dict.fromkeys(rows, reason)

    def doing(self, role: str, what: str) -> None:
        self.events += 1
        self.on_doing(role, what)

    def engine(self, name: str, what: EngineEvent, why: str = "") -> None:
        at = round(self.clock.now(), 3)
        self.engines.append({"engine": name, "what": what, "at_s": at, "why": why})
        self.doing("rollout", f"{name} {ENGINE_EVENTS[what]}" + (f": {why}" if why else ""))

    def spans(self, spans: Iterable[Span]) -> None:
        self.timeline.add(spans)

    def trained(self, iteration: int, reports: Sequence[TrainReport]) -> None:
        for report in reports:
            self.timeline.add(report.spans)
        self._trained = (iteration, reports)

    def published(self, version: int, queue: Mapping[str, float]) -> None:
        """Closes iteration version - 1. queue: its metrics."""
        assert self._trained is not None and self._trained[0] == version - 1
        iteration, reports = self._trained
        at = self.clock.now()
        self.timeline.end_iteration(iteration, at)
        trained = [rows for report in reports for rows in report.trained]
        records = [record for rows in trained for record in self.reading.records(rows, iteration, self.group_size)]
        self.ledger.trained([record.sample_id for record in records], iteration)
        self._records += records
        for rows in trained:
            self._responses += self.reading.responses(rows)
        sums: dict[str, float] = {}
        for report in reports:
            sums = add_diagnostics(sums, report.sums)
        tokens = sum(record.prompt_tokens + record.response_tokens for record in records)
        times = self.timeline.iteration_metrics(iteration)
        metrics = iteration_metrics(
            iteration,
            len(self._records),
            at,
            times,
            throughput_metrics(len(records), tokens, times["time/iteration_s"], self.devices),
            staleness_metrics(records),
            self.reading.metrics(records, sums),
            self.ledger.metrics(),
            queue,
        )
        for listener in self.listeners:
            listener(metrics)

    def samples(self) -> list[SampleRecord]:
        """One record per sample ever admitted, by sample id."""
        dropped = [self._untrained(row, _FATE_OF[reason]) for row, reason in self._dropped.items()]
        in_flight = [self._untrained(row, "in_flight") for row in self.ledger.in_flight]
        return sorted([*self._records, *dropped, *in_flight], key=lambda record: record.sample_id)

    def write(self, run: RunDirectory) -> None:
        """Everything but the metrics, which are there already. Raises LedgerError if a sample was lost."""
        run.write_samples(self.samples())
        if self._responses:
            run.write_responses(*zip(*self._responses, strict=True))
        run.write_trace(self.timeline)
        run.write_ledger(self.ledger, self.engines)

    def _untrained(self, row: int, fate: Fate) -> SampleRecord:
        admitted = self._admitted[row]
        return sample_record(
            sample_id=row,
            group_id=admitted.group_id,
            fate=fate,
            admitted_at=admitted.at,
            prompt_tokens=self.reading.prompt_tokens(admitted.prompt_tokens),
        )


_FATE_OF: dict[DropReason, Fate] = {"stale": "dropped_stale", "filtered": "dropped_filtered"}


def places(placement: Placement, *, pooled: bool, per_engine: int = 1) -> dict[tuple[str, str], Place]:
    """(role, worker) -> its pool and devices, for the timeline. A simulated (`pooled`) role is one worker that stands
    for all its devices, save rollout, whose engines each have `per_engine` of their own."""
    found: dict[tuple[str, str], Place] = {}
    for pool, devices in placement.pools.items():
        names = tuple(f"device {device}" for device in devices)
        for role in (role for role, its in placement.devices.items() if its == devices):
            if pooled and role != "rollout":
                found[role, "0"] = Place(pool, names)
            else:
                size = per_engine if role == "rollout" else 1
                parts = [names[start : start + size] for start in range(0, len(names), size)]
                found |= {(role, str(number)): Place(pool, part) for number, part in enumerate(parts)}
    return found | {(role, "0"): Place(f"host {role}", (f"host {role}",)) for role in HOST_ROLES}
