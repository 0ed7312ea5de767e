"""One iteration's object in metrics.jsonl: known names only, each given once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from harness.metrics.samples import CUSTOM
from harness.tasks.task import EXTRA_NAME

METRIC_NAMES = frozenset(
    {
        "time/iteration_s",
        "time/generate_s",
        "time/wait_for_samples_s",
        "time/reference_s",
        "time/old_log_prob_s",
        "time/advantages_s",
        "time/update_actor_s",
        "time/wait_for_slowest_rank_s",
        "time/values_s",
        "time/update_critic_s",
        "time/weight_sync_s",
        "time/weight_sync_exposed_s",
        "throughput/samples_per_s",
        "throughput/tokens_per_s",
        "throughput/tokens_per_s_per_device",
        "throughput/mfu",
        "throughput/fraction_of_bound",
        "staleness/mean",
        "staleness/max",
        "staleness/steps_mean",
        "staleness/steps_max",
        "staleness/in_flight_mean",
        "staleness/in_queue_mean",
        "staleness/span_max",
        "reward/mean",
        "reward/exact_match",
        "reward/failed",
        "reward/same_in_group",
        "reward/baseline",
        "filter/refused",
        "filter/share",
        "filter/rounds",
        "turns/mean",
        "turns/max",
        "turns/environment_tokens",
        "turns/failed",
        "response_length/mean",
        "response_length/p99",
        "response_length/truncated",
        "eval/version",
        "eval/greedy",
        "eval/reward",
        "eval/sampled",
        "eval/pass_at_k",
        "eval/device_s",
        "eval/failed",
        "train/grad_norm",
        "train/learning_rate",
        "train/skipped_steps",
        "train/rank_imbalance",
        "critic/loss",
        "critic/clip_fraction",
        "critic/explained_variance",
        "critic/value_mean",
        "critic/return_mean",
        "critic/lag",
        "critic/lag_max",
        "critic/grad_norm",
        "critic/learning_rate",
        "critic/skipped_steps",
        "policy/kl_ref",
        "policy/kl_coef",
        "policy/entropy",
        "policy/clip_fraction",
        "policy/ratio_max",
        "policy/kl_behaviour",
        "policy/kl_behaviour_k1",
        "policy/kl_behaviour_reverse",
        "policy/chi_squared",
        "policy/effective_samples",
        "policy/ratio_p01",
        "policy/ratio_p50",
        "policy/ratio_p99",
        "policy/left_out",
        "policy/cut",
        "policy/rejected",
        "policy/mismatch_kl",
        "policy/proximal_lag",
        "straggler/cut",
        "straggler/dropped",
        "queue/depth_samples",
        "ledger/admitted",
        "ledger/trained",
        "ledger/dropped_stale",
        "ledger/dropped_filtered",
        "ledger/dropped_baseline",
        "ledger/dropped_straggler",
        "ledger/dropped_failed",
        "ledger/dropped_spare",
        "ledger/in_flight",
    }
)
"""The metrics of an iteration, besides `idle/<role>` for each role, what the queue measures as `queue/...`, and
`custom/<name>` for each extra value of a task's scores."""

AXES = ("iteration", "samples", "seconds")
"""Axes of plots: the iteration, the samples trained and the seconds on the run's clock at its end."""

_FAMILIES = re.compile(rf"idle/[a-z][a-z0-9_]*|queue(/[a-z][a-z0-9_]*)+|(eval/)?{CUSTOM}{EXTRA_NAME.pattern}")


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError, naming them, if any name is no metric."""
    unknown = sorted(name for name in names if name not in METRIC_NAMES and not _FAMILIES.fullmatch(name))
    if unknown:
        raise ValueError(
            f"unknown metric {', '.join(unknown)}; known are METRIC_NAMES in {__name__}, idle/<role>, queue/... and "
            "custom/..."
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
