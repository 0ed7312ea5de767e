"""What a comparison measures of one run: written when it ends, and read by the console, MLflow and `cadence.load`."""

from __future__ import annotations

import math

from harness.comparison.measures import metric_definitions
from harness.comparison.runs import Run


def summary_of(run: Run) -> dict[str, float]:
    """By the keys of measures: rates after warm-up, shares of idle time, what was learnt at the end. An exact match
    that was never reached is left out."""
    values = {metric.key: metric.of(run) for metric in metric_definitions([run])}
    return {key: value for key, value in values.items() if math.isfinite(value)}
