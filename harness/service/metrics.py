"""A job as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.metrics.prometheus import exposition
from harness.service.job import ServedJob
from harness.service.requests import TRAINER


def prometheus_text(job: ServedJob) -> bytes:
    """Rows by what became of them, versions, and lags as a histogram."""
    return exposition(_OfJob(job))


class _OfJob(Collector):
    def __init__(self, job: ServedJob) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        job = self._job
        rows = CounterMetricFamily("cadence_rows", "Rows so far, by how far they came.", labels=["state"])
        for state, count in (("loaded", job.loaded), ("generated", job.generated), ("trained", job.trained)):
            rows.add_metric([state], count)
        yield rows
        versions = GaugeMetricFamily("cadence_version", "Version of the weights that a role has.", labels=["role"])
        for role, version in {TRAINER: job.version, **job.engines}.items():
            if version is not None:
                versions.add_metric([role], version)
        yield versions
        yield GaugeMetricFamily("cadence_admitted_groups", "Groups below may be given to engines.", job.admitted)
        lags = HistogramMetricFamily("cadence_lag_versions", "Lag of the rows that were trained.")
        below, total, buckets = 0, 0, []
        for lag in range(job.worst_lag + 1):
            below += job.lags[lag]
            total += lag * job.lags[lag]
            buckets.append((str(float(lag)), below))
        lags.add_metric([], [*buckets, ("+Inf", sum(job.lags.values()))], total)
        yield lags
