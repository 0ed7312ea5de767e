"""One iteration's object in metrics.jsonl: known names only, each given once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from harness.metrics.definitions import METRIC_NAMES
from harness.metrics.samples import CUSTOM
from harness.tasks.task import EXTRA_NAME

AXES = ("iteration", "samples", "seconds")
"""Axes of plots: the iteration, the samples trained and the seconds on the run's clock at its end."""

_FAMILIES = re.compile(rf"idle/[a-z][a-z0-9_]*|queue(/[a-z][a-z0-9_]*)+|(eval/)?{CUSTOM}{EXTRA_NAME.pattern}")


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError, naming them, if any name is no metric."""
    unknown = sorted(name for name in names if name not in METRIC_NAMES and not _FAMILIES.fullmatch(name))
    if unknown:
        raise ValueError(
            f"unknown metric {', '.join(unknown)}; known are those of harness/metrics/definitions.py, "
            "idle/<role>, queue/... and custom/..."
        )


def iteration_metrics(
    iteration: int, samples: int, seconds: float, *parts: Mapping[str, float]
) -> dict[str, int | float]:
    """The object of one iteration: the axes, then the metrics of all parts.

    samples: trained up to the end of this iteration; seconds: the run's clock at its end. Raises ValueError for an
    unknown name or one that two parts give.
    """
    merged: dict[str, int | float] = {"iteration": iteration, "samples": samples, "seconds": seconds}
    for part in parts:
        check_names(part)
        twice = sorted(part.keys() & merged.keys())
        if twice:
            raise ValueError(f"iteration {iteration}: {', '.join(twice)} given by two parts")
        merged.update(part)
    return merged


def throughput_metrics(samples: int, tokens: int, seconds: float, devices: int) -> dict[str, float]:
    """throughput/* of one iteration: trained samples and their tokens (prompt + response) over its seconds.

    devices: all devices of the run, over which the per-device figure is taken.
    """
    if seconds <= 0 or devices <= 0:
        raise ValueError(f"no throughput over {seconds} s on {devices} devices")
    return {
        "throughput/samples_per_s": samples / seconds,
        "throughput/tokens_per_s": tokens / seconds,
        "throughput/tokens_per_s_per_device": tokens / seconds / devices,
    }
