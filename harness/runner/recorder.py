"""Turns what happens in a job into the run's files: ledger, samples, timeline, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.metrics.iteration import iteration_metrics, throughput_metrics
from harness.metrics.ledger import Ledger
from harness.metrics.run_files import RunDirectory
from harness.metrics.samples import SampleRecord, reward_metrics, sample_record, staleness_metrics
from harness.metrics.timeline import Place, Timeline
from harness.placement import HOST_ROLES, Placement
from harness.protocols import Span
from harness.rl.diagnostics import add_diagnostics, policy_metrics
from harness.roles.actor import TrainedRows, TrainReport
from harness.runtime.clock import RealClock


@dataclass(frozen=True)
class _Admitted:
    group_id: int
    at: float
    prompt_tokens: int


class Recorder:
    """`harness.runner.job.Observer`. One iteration is closed when the version it made has been published."""

    def __init__(
        self,
        run: RunDirectory,
        timeline: Timeline,
        clock: RealClock,
        *,
        group_size: int,
        devices: int,
    ) -> None:
        self.run, self.timeline, self.clock = run, timeline, clock
        self.group_size, self.devices = group_size, devices
        self.ledger = Ledger()
        self.listeners: list[Callable[[Mapping[str, float]], None]] = []
        """Hear the metrics of every iteration."""
        self.on_doing: Callable[[str, str], None] = lambda role, what: None
        self._admitted: dict[int, _Admitted] = {}
        self._records: list[SampleRecord] = []
        self._responses: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._trained: tuple[int, Sequence[TrainReport]] | None = None

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None:
        self.ledger.admit(rows)
        self._admitted |= {row: _Admitted(row // self.group_size, at, prompt_tokens) for row in rows}

    def doing(self, role: str, what: str) -> None:
        self.on_doing(role, what)

    def spans(self, spans: Iterable[Span]) -> None:
        self.timeline.add(spans)

    def trained(self, iteration: int, reports: Sequence[TrainReport]) -> None:
        for report in reports:
            self.timeline.add(report.spans)
        self._trained = (iteration, reports)

    def published(self, version: int, queue_depth: int) -> None:
        """Closes iteration version - 1."""
        assert self._trained is not None and self._trained[0] == version - 1
        iteration, reports = self._trained
        at = self.clock.now()
        self.timeline.end_iteration(iteration, at)
        records = [record for report in reports for rows in report.trained for record in self._rows(rows, iteration)]
        self.ledger.trained([record.sample_id for record in records], iteration)
        self._records += records
        for rows in (rows for report in reports for rows in report.trained):
            self._responses += zip(rows.rows.tolist(), rows.responses.rows(), rows.log_probs.rows(), strict=True)
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
            reward_metrics(records),
            policy_metrics(sums),
            self.ledger.metrics(),
            {"queue/depth_samples": float(queue_depth)},
        )
        self.run.append_metrics(metrics)
        for listener in self.listeners:
            listener(metrics)

    def write(self) -> None:
        """Everything but the metrics, which are there already. Raises LedgerError if a sample was lost."""
        in_flight = [self._in_flight(row) for row in sorted(self.ledger.in_flight)]
        self.run.write_samples(sorted(self._records + in_flight, key=lambda record: record.sample_id))
        self.run.write_responses(*zip(*self._responses, strict=True))
        self.run.write_trace(self.timeline)
        self.run.write_ledger(self.ledger)

    def _rows(self, rows: TrainedRows, iteration: int) -> Iterable[SampleRecord]:
        """Records of what one rank trained; the trainer held version `iteration` when the batch started."""
        for i, (row, versions) in enumerate(zip(rows.rows.tolist(), rows.versions.rows(), strict=True)):
            yield sample_record(
                sample_id=row,
                group_id=row // self.group_size,
                fate="trained",
                engine=str(rows.engine[i]),
                versions=versions,
                trainer_version=iteration,
                trained_iteration=iteration,
                admitted_at=float(rows.admitted_at[i]),
                started_at=float(rows.started_at[i]),
                finished_at=float(rows.finished_at[i]),
                trained_at=float(rows.trained_at[i]),
                prompt_tokens=int(rows.prompt_tokens[i]),
                reward=float(rows.reward[i]),
                exact_match=bool(rows.exact_match[i]),
            )

    def _in_flight(self, row: int) -> SampleRecord:
        admitted = self._admitted[row]
        return sample_record(
            sample_id=row,
            group_id=admitted.group_id,
            fate="in_flight",
            admitted_at=admitted.at,
            prompt_tokens=admitted.prompt_tokens,
        )


def places(placement: Placement) -> dict[tuple[str, str], Place]:
    """(role, worker) -> its pool and device, for the timeline."""
    found = {
        (role, str(number)): Place(pool, (f"device {device}",))
        for pool, devices in placement.pools.items()
        for role in placement.devices
        if placement.devices[role] == devices
        for number, device in enumerate(devices)
    }
    return found | {(role, "0"): Place(f"host {role}", (f"host {role}",)) for role in HOST_ROLES}
