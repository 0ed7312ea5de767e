"""A run of a record as log lines in the form of MLPerf's, `:::MLLOG {...}`, a file for each seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.studies.speedrun.record import Record, RecordedRun


def log_lines(
    record: Record, run: RecordedRun, config: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]
) -> str:
    """Every line of one run, up to the version that reaches the target. time_ms: the beginning of the run, and on from
    it the run's clock, which stands still during evaluations: so it is run_stop less run_start that is counted."""
    began = datetime.fromisoformat(run.started_at).timestamp()

    def line(key: str, value: object, at_s: float = 0.0, event: str = "POINT_IN_TIME", **metadata: object) -> str:
        told = {
            "namespace": "cadence",
            "time_ms": round(1000 * (began + at_s)),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        return f":::MLLOG {json.dumps(told)}"

    def lines() -> Iterator[str]:
        algorithm, batch = config["algorithm"], config["algorithm"]["batch_groups"] * config["algorithm"]["group_size"]
        yield line("submission_benchmark", record.track, track_digest=record.track_digest)
        yield line("submission_platform", record.hardware, devices=record.devices)
        yield line("submission_schedule", record.schedule, commit=record.commit, plugins=record.plugins)
        yield line("seed", run.seed)
        yield line("global_batch_size", batch, groups=algorithm["batch_groups"], group_size=algorithm["group_size"])
        yield line("target_accuracy", record.target)
        yield line("run_start", None, event="INTERVAL_START")
        for found in evaluations:
            if found["version"] <= run.version:
                samples = found["version"] * batch
                value, at_s = found["sampled"], found["at_s"]
                yield line("eval_accuracy", value, at_s, epoch_num=found["version"], samples=samples)
        yield line("run_stop", None, run.seconds, "INTERVAL_END", status="success")

    return "\n".join(lines()) + "\n"
