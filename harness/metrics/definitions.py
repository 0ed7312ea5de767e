"""The metrics of a run, as definitions.toml has them: tables, pages, warnings, verdicts and MLflow read these."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from harness.tasks.task import EXTRA_NAME

CUSTOM = "custom/"  # beginning of the columns, and the metrics, of extra values of scores
Better = Literal["higher", "lower"]
Iterations = Sequence[Mapping[str, float]]  # lines of metrics.jsonl


@dataclass(frozen=True)
class Fault:
    """Something that went wrong, counted over a run. words: with {count}, or {times}, and {share}, where there is a
    whole to be a share of; bound: of the share, or else of the count, above which it is said; forbids: the setting of
    the task whose share it may have before there is no verdict."""

    words: str
    bound: float = 0.0
    forbids: str | None = None


@dataclass(frozen=True)
class Metric:
    """A metric. title: without its unit; better: None where neither is; meaning: formula, condition or whole, where the
    title leaves it open; counted: what of a run's iterations makes its number, where it is a fault: their sum, the last
    one, where it counts from the start, or their mean."""

    name: str
    title: str
    unit: str = ""
    better: Better | None = None
    meaning: str = ""
    fault: Fault | None = None
    counted: Literal["sum", "last", "mean"] = "sum"


LATENCIES = {
    "queueing": "wait for an engine",
    "first_token": "time to the first token",
    "between_tokens": "time between tokens",
    "request": "time of a request",
}
"""Parts of the time of a sample, in seconds, and their titles."""
LATENCY_PERCENTILES = (50, 99)  # percentiles of each part in the metrics of an iteration

_FILE = tomllib.loads(files(__package__).joinpath("definitions.toml").read_text(encoding="utf-8"))
DEFINITIONS: tuple[Metric, ...] = tuple(
    Metric(**{"name": name, **of, "fault": Fault(**of["fault"]) if "fault" in of else None})
    for name, of in _FILE["metrics"].items()
)
"""Metrics of an iteration, besides those of `FAMILIES`."""
FAMILIES: dict[str, str] = _FILE["families"]
"""Metrics whose names hold a role, a column, a task or a user's own name, and what they are."""
OF_LEDGER = {name: Fault(**of) for name, of in _FILE["ledger"].items()}
"""Faults that ledger.json lists, by what they are called there."""
_BY_NAME = {metric.name: metric for metric in DEFINITIONS}
METRIC_NAMES = frozenset(_BY_NAME)
FAILED_BOUND = 0.01  # value of `task.failed_bound` where a run's settings say nothing of it


def definition(name: str) -> Metric:
    """The metric of this name, which has to be one of `DEFINITIONS`."""
    return _BY_NAME[name]


@dataclass(frozen=True)
class Found:
    """A fault of one run. value: the share, where there is a whole, else the count; forbids: a verdict on the run."""

    name: str
    text: str
    value: float
    forbids: bool


def found_faults(
    iterations: Iterations,
    ledger: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
) -> list[Found]:
    """The faults of a run that are above their bounds, in the order of their definition. ledger: of ledger.json;
    evaluations: lines of eval.jsonl; config: the run's settings."""
    task = config.get("task", {})
    bound = float(task.get("failed_bound", FAILED_BOUND))
    if task.get("failure_reward") is not None:  # it is the response that is at fault
        bound = 1.0
    found = []
    for metric in DEFINITIONS:
        if metric.fault is not None:
            count, whole = _counted(metric, iterations, evaluations)
            found += _said(metric.name, metric.fault, count, whole, bound)
    lost = sum(event["what"] == "lost" for event in ledger.get("engines", ()))
    for name, count in (("engines", lost), ("restarts", len(ledger.get("restarts", ())))):
        found += _said(name, OF_LEDGER[name], count, None, 0.0)
    return found


def _counted(
    metric: Metric, iterations: Iterations, evaluations: Sequence[Mapping[str, Any]]
) -> tuple[float, float | None]:
    """The run's number of a fault, and what it is a share of: None where that is itself a share, or there is none."""
    if metric.name == "eval/failed":  # of versions, too, that no line of metrics is of
        return sum(one.get("failed", 0) for one in evaluations), sum(o["problems"] * (1 + o["k"]) for o in evaluations)
    values = [one[metric.name] for one in iterations if metric.name in one]
    if not values:
        return 0.0, None
    of_run = {"sum": sum, "last": lambda seen: seen[-1], "mean": lambda seen: sum(seen) / len(seen)}
    count = float(of_run[metric.counted](values))
    wholes: dict[str, Callable[[], float]] = {
        "reward/failed": lambda: iterations[-1]["samples"],
        "ledger/dropped_stale": lambda: iterations[-1]["ledger/admitted"],
        "ledger/dropped_failed": lambda: iterations[-1]["ledger/admitted"],
    }
    return count, wholes[metric.name]() if metric.name in wholes else None


def _said(name: str, fault: Fault, count: float, whole: float | None, bound: float) -> list[Found]:
    share = count if whole is None else count / max(whole, 1.0)
    if share <= fault.bound:
        return []
    said, times = f"{count:,.0f}", "once" if count == 1 else f"{count:,.0f} times"
    text = fault.words.format(count=said, times=times, share=f"{float(f'{100 * share:.2g}'):g} %")
    return [Found(name, f"{text} ({name})", share, fault.forbids is not None and share > bound)]


AXES = ("iteration", "samples", "seconds")
"""Axes of plots: the iteration, the samples trained and the seconds on the run's clock at its end."""

_FAMILIES = re.compile(rf"idle/[a-z][a-z0-9_]*|queue(/[a-z][a-z0-9_]*)+|(eval/)?{CUSTOM}{EXTRA_NAME.pattern}")


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError, naming them, if any name is no metric."""
    unknown = sorted(name for name in names if name not in METRIC_NAMES and not _FAMILIES.fullmatch(name))
    if unknown:
        raise ValueError(
            f"unknown metric {', '.join(unknown)}; known are those of harness/metrics/definitions.toml, "
            "idle/<role>, queue/... and custom/..."
        )


def iteration_metrics(
    iteration: int, samples: int, seconds: float, *parts: Mapping[str, float]
) -> dict[str, int | float]:
    """The object of one iteration: the axes, then the metrics of all parts. samples: trained up to the end of this
    iteration; seconds: the run's clock at its end. Raises ValueError for an unknown name or one that two parts give."""
    merged: dict[str, int | float] = {"iteration": iteration, "samples": samples, "seconds": seconds}
    for part in parts:
        check_names(part)
        twice = sorted(part.keys() & merged.keys())
        if twice:
            raise ValueError(f"iteration {iteration}: {', '.join(twice)} given by two parts")
        merged.update(part)
    return merged


def throughput_metrics(samples: int, tokens: int, seconds: float, devices: int) -> dict[str, float]:
    """throughput/* of one iteration: trained samples and their tokens (prompt + response) over its seconds. devices:
    all devices of the run, over which the per-device figure is taken."""
    if seconds <= 0 or devices <= 0:
        raise ValueError(f"no throughput over {seconds} s on {devices} devices")
    return {
        "throughput/samples_per_s": samples / seconds,
        "throughput/tokens_per_s": tokens / seconds,
        "throughput/tokens_per_s_per_device": tokens / seconds / devices,
    }


def good_rate(of_samples: Mapping[str, float], samples_per_s: float) -> dict[str, float]:
    """throughput/correct_samples_per_s, where samples are rewarded. of_samples: their metrics."""
    share = of_samples.get("reward/correct_and_complete")
    return {} if share is None else {"throughput/correct_samples_per_s": share * samples_per_s}


def token_metrics(tokens: Mapping[str, int]) -> dict[str, float]:
    """token_ledger/*, where they are known. tokens: as ledger.json has them, so far."""
    if not tokens:
        return {}
    consumed = tokens.get("trained", 0)
    discarded = sum(tokens.values()) - tokens["generated"] - consumed
    return {
        "token_ledger/generated": float(tokens["generated"]),
        "token_ledger/consumed": float(consumed),
        "token_ledger/discarded": float(discarded),
        "token_ledger/in_flight": float(tokens["generated"] - consumed - discarded),
    }


_QUEUE = "queue/"


def logged(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Values of an iteration as loggers have them: one object of metrics.jsonl, without its step, NaN and None. What
    the queue says of itself is more than half of them, and is among the system metrics, which have charts of their
    own."""
    return {
        f"system/{name}" if name.startswith(_QUEUE) else name: float(value)
        for name, value in metrics.items()
        if name != "iteration" and value is not None and math.isfinite(value)
    }
