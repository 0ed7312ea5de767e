"""Metrics as Prometheus reads them: of a run its newest iteration and each of its roles; of a served job."""

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from harness.service.job import ServedJob
from harness.service.requests import TRAINER


def prometheus_text(job: ServedJob) -> bytes:
    """Rows by what became of them, versions, and lags as a histogram."""
    return _exposition(_of_job(job))


def _of_job(job: ServedJob) -> Iterator[Metric]:
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


__all__ = ["CONTENT_TYPE", "prometheus_text", "run_text"]


def run_text(health: Mapping[str, Any], metrics: Mapping[str, float]) -> bytes:
    """health: as `/health` has it; metrics: of the newest iteration, by their names in metrics.jsonl."""
    return _exposition(_of_run(health, metrics))


def _exposition(families: Iterable[Metric]) -> bytes:
    registry: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(registry)


def _of_run(health: Mapping[str, Any], metrics: Mapping[str, float]) -> Iterator[Metric]:
    roles = health["roles"]
    yield GaugeMetricFamily("cadence_run_seconds", "The run's clock.", health["seconds"])
    versions = GaugeMetricFamily("cadence_version", "Version of the weights that a role has.", labels=["role"])
    versions.add_metric(["trainer"], health["version"])
    up = GaugeMetricFamily("cadence_role_up", "1 unless it ended.", labels=["role"])
    heard = GaugeMetricFamily("cadence_role_heard_seconds_ago", "Since its last answer.", labels=["role"])
    for role in roles:
        up.add_metric([role["name"]], not role["state"].startswith("ended"))
        if role["heard_s_ago"] is not None:
            heard.add_metric([role["name"]], role["heard_s_ago"])
        if role["version"] is not None:
            versions.add_metric([role["name"]], role["version"])
    yield from (versions, up, heard)
    newest = GaugeMetricFamily("cadence_metric", "Of the newest iteration, as in metrics.jsonl.", labels=["name"])
    for name, value in metrics.items():
        newest.add_metric([name], value)
    yield newest
