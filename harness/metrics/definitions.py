"""The metrics of a run, a line each: its name, title, unit, which way is better, and of those that count something that
went wrong what is said of it, and from which bound on. Tables, pages, warnings, verdicts and MLflow read these.

Adding one is its line here, and whoever writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """A metric. title: without its unit; better: None where neither is; counted: what of a run's iterations makes its
    number, where it is a fault: their sum, the last one, where it counts from the start, or their mean."""

    name: str
    title: str
    unit: str = ""
    better: Better | None = None
    fault: Fault | None = None
    counted: Literal["sum", "last", "mean"] = "sum"


def _s(name: str, title: str, better: Better | None = "lower") -> Metric:
    return Metric(f"time/{name}_s", title, "s", better)


LATENCIES = {
    "queueing": "wait for an engine",
    "first_token": "time to the first token",
    "between_tokens": "time between tokens",
    "request": "time of a request",
}
"""Parts of the time of a sample, in seconds, and their titles."""
LATENCY_PERCENTILES = (50, 99)  # percentiles of each part in the metrics of an iteration

DEFINITIONS: tuple[Metric, ...] = (
    _s("iteration", "an iteration"),
    _s("generate", "generating"),
    _s("wait_for_samples", "waiting for samples"),
    _s("reference", "reference log-probabilities"),
    _s("old_log_prob", "recomputed log-probabilities"),
    _s("advantages", "advantages"),
    _s("update_actor", "updating the actor"),
    _s("wait_for_slowest_rank", "training ranks wait for the slowest, per iteration"),
    _s("values", "values"),
    _s("update_critic", "updating the critic"),
    _s("weight_sync", "weight sync"),
    _s("weight_sync_exposed", "weight sync exposed, per iteration"),
    _s("clock_uncertainty", "uncertainty of the clocks of other hosts"),
    Metric("throughput/samples_per_s", "samples per second", "1/s", "higher"),
    Metric("throughput/tokens_per_s", "tokens per second", "tokens/s", "higher"),
    Metric("throughput/tokens_per_s_per_device", "tokens per second and device", "tokens/s", "higher"),
    Metric("throughput/correct_samples_per_s", "correct and complete samples per second", "1/s", "higher"),
    Metric("throughput/mfu", "share of the devices' peak operations", "", "higher"),
    Metric("throughput/fraction_of_bound", "share of ideal throughput", "", "higher"),
    Metric("staleness/mean", "mean lag of a sample", "iterations"),
    Metric("staleness/max", "largest lag of a token", "iterations"),
    Metric("staleness/steps_mean", "mean lag of a sample", "optimizer steps"),
    Metric("staleness/steps_max", "largest lag of a token", "optimizer steps"),
    Metric("staleness/in_flight_mean", "lag that grew while sampled", "iterations"),
    Metric("staleness/in_queue_mean", "lag that grew in the queue", "iterations"),
    Metric("staleness/span_max", "versions that sampled one sample, at most", "versions"),
    Metric("staleness/cache_mean", "age of the KV cache, behind the weights that sample", "iterations"),
    Metric("token_ledger/discarded_lag", "mean lag of discarded tokens", "iterations"),
    Metric("reward/mean", "mean reward of trained samples", "", "higher"),
    Metric("reward/exact_match", "exact match of trained samples", "", "higher"),
    Metric("reward/correct_and_complete", "trained samples that are correct and complete", "", "higher"),
    Metric(
        "reward/failed",
        "samples that could not be scored",
        "samples",
        "lower",
        Fault("{count} of the trained samples ({share}) could not be scored", forbids="failed_bound"),
    ),
    Metric(
        "reward/same_in_group",
        "groups with one reward",
        fault=Fault("flat rewards: in {share} of the groups all rewards are equal, and they taught nothing", 0.9),
        counted="mean",
    ),
    Metric("reward/baseline", "mean reward of the samples that others are compared with"),
    Metric("filter/refused", "groups that the filter refused", "groups"),
    Metric("filter/share", "share of groups that the filter refused"),
    Metric("filter/rounds", "prompts dealt to one place, at most"),
    Metric("turns/mean", "turns of a sample"),
    Metric("turns/max", "most turns of a sample"),
    Metric("turns/environment_tokens", "tokens that the environment wrote", "tokens"),
    Metric(
        "turns/failed",
        "samples whose environment failed",
        "",
        "lower",
        Fault("the environment, agent loop or tool of {share} of the trained samples failed"),
        "mean",
    ),
    *(
        Metric(f"latency/{part}_p{n}_s", f"{title}, {n}th percentile", "s", "lower")
        for part, title in LATENCIES.items()
        for n in LATENCY_PERCENTILES
    ),
    Metric("response_length/mean", "response length", "tokens"),
    Metric("response_length/p99", "response length, 99th percentile", "tokens"),
    Metric(
        "response_length/truncated",
        "truncated responses",
        fault=Fault("{share} of the responses were cut off by the limit on tokens", 0.25),
        counted="mean",
    ),
    Metric("eval/version", "version that was evaluated"),
    Metric("eval/greedy", "held-out accuracy, greedy", "", "higher"),
    Metric("eval/reward", "held-out reward, greedy", "", "higher"),
    Metric("eval/sampled", "held-out accuracy, sampled", "", "higher"),
    Metric("eval/pass_at_k", "held-out pass@k", "", "higher"),
    Metric("eval/device_s", "devices' seconds for evaluation", "s", "lower"),
    Metric(
        "eval/failed",
        "held-out responses that could not be scored",
        "responses",
        "lower",
        Fault(
            "{count} of the held-out responses ({share}) could not be scored, and are in no accuracy",
            forbids="failed_bound",
        ),
    ),
    Metric("train/grad_norm", "norm of the gradient"),
    Metric("train/learning_rate", "learning rate"),
    Metric(
        "train/skipped_steps",
        "skipped optimizer steps",
        "steps",
        "lower",
        Fault("{count} optimizer steps were skipped, as their gradient was not finite"),
        "last",
    ),
    Metric("train/rank_imbalance", "tokens of the fullest training rank over the mean", "", "lower"),
    Metric("critic/loss", "loss of the critic", "", "lower"),
    Metric("critic/clip_fraction", "share of values that are clipped"),
    Metric("critic/explained_variance", "variance of returns that values explain", "", "higher"),
    Metric("critic/value_mean", "mean value"),
    Metric("critic/return_mean", "mean return"),
    Metric("critic/lag", "mean lag of values", "iterations"),
    Metric("critic/lag_max", "largest lag of values", "iterations"),
    Metric("critic/grad_norm", "norm of the critic's gradient"),
    Metric("critic/learning_rate", "learning rate of the critic"),
    Metric(
        "critic/skipped_steps",
        "skipped steps of the critic",
        "steps",
        "lower",
        Fault("{count} of the critic's steps were skipped, as their gradient was not finite"),
        "last",
    ),
    Metric("policy/kl_ref", "KL to the reference", "nats per token"),
    Metric("policy/kl_coef", "coefficient of the KL"),
    Metric("policy/entropy", "entropy", "nats per token"),
    Metric("policy/clip_fraction", "share of tokens that are clipped"),
    Metric("policy/ratio_max", "largest ratio of a token"),
    Metric("policy/kl_behaviour", "KL to the policy in training from the one that sampled", "nats per token"),
    Metric("policy/kl_behaviour_k1", "the same by k1", "nats per token"),
    Metric("policy/kl_behaviour_reverse", "KL the other way", "nats per token"),
    Metric("policy/chi_squared", "chi-squared of the policies"),
    Metric("policy/effective_samples", "effective share of tokens, by importance weights"),
    Metric("policy/ratio_p01", "ratio, first percentile"),
    Metric("policy/ratio_p50", "ratio, median"),
    Metric("policy/ratio_p99", "ratio, 99th percentile"),
    Metric("policy/left_out", "tokens left out by the correction"),
    Metric("policy/cut", "tokens whose weight the correction cuts"),
    Metric("policy/rejected", "tokens that rejection leaves out"),
    Metric("policy/mismatch_kl", "KL of engine and trainer at one version", "nats per token"),
    Metric("policy/proximal_lag", "lag of the recomputed policy", "iterations"),
    Metric("router/load_max", "tokens of the fullest expert, of the mean"),
    Metric("router/entropy", "entropy of the router", "nats per token"),
    Metric("router/rerouted", "replayed choices of experts that the trainer would not make"),
    Metric(
        "straggler/cut",
        "samples that were cut",
        "",
        "lower",
        Fault("{share} of the trained samples were cut, as they took too long", 0.01),
        "mean",
    ),
    Metric(
        "straggler/dropped",
        "groups that took too long",
        "groups",
        "lower",
        Fault("{count} groups were dropped, as they took too long"),
    ),
    Metric("queue/depth_samples", "samples in the queue", "samples"),
    Metric("ledger/admitted", "admitted", "samples"),
    Metric("ledger/trained", "trained", "samples"),
    Metric(
        "ledger/dropped_stale",
        "dropped as stale",
        "samples",
        "lower",
        Fault("{count} samples ({share} of the admitted) were sampled and dropped as stale", 0.1),
        "last",
    ),
    Metric("ledger/dropped_filtered", "refused by a filter", "samples"),
    Metric("ledger/dropped_baseline", "compared with, not trained", "samples"),
    Metric("ledger/dropped_straggler", "dropped, as their group took too long", "samples"),  # said as straggler/dropped
    Metric(
        "ledger/dropped_failed",
        "dropped, as one of their group could not be scored",
        "samples",
        "lower",
        Fault(
            "{count} samples ({share} of the admitted) were dealt anew, as one of their group could not be scored",
            forbids="failed_bound",
        ),
        "last",
    ),
    Metric("ledger/dropped_spare", "not needed", "samples"),
    Metric("ledger/in_flight", "in flight", "samples"),
    Metric("token_ledger/generated", "tokens that were generated", "tokens"),
    Metric("token_ledger/consumed", "tokens that were trained", "tokens"),
    Metric("token_ledger/masked", "trained tokens too old to have a loss"),
    Metric("token_ledger/discarded", "tokens that were discarded", "tokens"),
    Metric("token_ledger/in_flight", "tokens in flight", "tokens"),
)
"""Metrics of an iteration, besides those of `FAMILIES`."""

MEANINGS: dict[str, str] = {
    "time/weight_sync_s": "seconds in which some transfer was published, staged or loaded",
    "time/weight_sync_exposed_s": "a device did nothing else meanwhile; mean over devices that hold trained weights",
    "time/clock_uncertainty_s": "the most by which a time of another host is off",
    "time/wait_for_slowest_rank_s": "mean over ranks, as if a micro-batch lasted by its fullest rank's packed tokens",
    "throughput/tokens_per_s": "prompts and responses",
    "throughput/tokens_per_s_per_device": "over all devices of the run",
    "throughput/correct_samples_per_s": "of the trained ones",
    "throughput/mfu": "these samples' operations, each once / (window x devices x dense bfloat16 peak)",
    "throughput/fraction_of_bound": "(largest over pools of: mean busy seconds of the pool's devices) / window",
    "staleness/mean": "mean of lag_mean",
    "staleness/max": "largest lag_worst",
    "staleness/steps_mean": "iterations times the optimizer steps that make a version",
    "staleness/steps_max": "iterations times the optimizer steps that make a version",
    "staleness/in_flight_mean": "mean of lag_in_flight",
    "staleness/in_queue_mean": "mean of lag_in_queue",
    "staleness/span_max": "largest span",
    "staleness/cache_mean": "mean of cache_age; 0 unless schedule.pause=keep and engine.keep_cache",
    "token_ledger/discarded_lag": "over tokens of dropped samples that were read in this iteration, when dropped",
    "reward/mean": "of those that were scored",
    "reward/exact_match": "as sampled, not greedy",
    "reward/correct_and_complete": "share that is right and ended by itself: cut off by no limit",
    "reward/same_in_group": "share of groups; their advantages are 0",
    "reward/baseline": "the greedy ones of algorithm.advantage=remax",
    "filter/refused": "since the last iteration",
    "filter/share": "of all that were refused or trained",
    "filter/rounds": "of the trained groups",
    "turns/environment_tokens": "mean of a sample; in no response length",
    "turns/failed": "share; a step raised an error or took too long",
    "latency/queueing_p50_s": "from its admission until an engine has a slot for it, the last time that it began",
    "latency/first_token_p50_s": "from its slot: prefill, and the step that samples it",
    "latency/between_tokens_p50_s": "mean of each sample, with pauses for weights and what environments take",
    "latency/request_p50_s": "from its slot to its last token",
    "response_length/mean": "tokens that the policy sampled",
    "response_length/p99": "with linear interpolation",
    "response_length/truncated": "share that the limit on tokens ended; not simulated",
    "eval/greedy": "share of greedy responses that are right",
    "eval/sampled": "share of sampled responses that are right",
    "eval/pass_at_k": "share of problems with at least one right sampled response",
    "train/grad_norm": "before clipping, mean over the iteration's steps; null where one is not finite",
    "train/learning_rate": "of the iteration's last step",
    "train/skipped_steps": "of the run so far",
    "train/rank_imbalance": "over the iteration's micro-batches, in each of which all ranks wait for the fullest; "
    "padding is not counted: training.layout=padded computes the longest row for all, and equal tokens gain little",
    "critic/loss": "over the tokens that it learns from, as all means of critic/",
    "critic/clip_fraction": "without a gradient, as they moved too far",
    "critic/explained_variance": "1 - var(returns - values) / var(returns); left out where all returns are alike",
    "critic/value_mean": "advantages were made with these",
    "critic/lag": "of the critic that wrote them behind the one that learns",
    "policy/kl_ref": "k3; where the job has a reference (algorithm.kl_coef above 0, or algorithm.reference=true)",
    "policy/kl_coef": "in the reward (algorithm.kl_in=reward), mean over samples",
    "policy/entropy": "at the sampling temperature",
    "policy/clip_fraction": "whose gradient PPO's clip would cut off, whatever the correction",
    "policy/ratio_max": "of new to behaviour probability",
    "policy/kl_behaviour": "KL(mu, pi) by k3",
    "policy/kl_behaviour_reverse": "KL(pi, mu), by importance weights",
    "policy/effective_samples": "that would say as much at equal weights",
    "policy/ratio_p01": "over tokens, right to half a percent, as the other two",
    "policy/left_out": "share of all tokens that have an advantage and no policy gradient",
    "policy/cut": "share of all tokens (tis, cispo, dppo_*)",
    "policy/rejected": "share of sampled tokens, where algorithm.rejection is set",
    "policy/mismatch_kl": "k3 of the trainer's recomputed log-probabilities from the engine's: kernels, batching",
    "policy/proximal_lag": "behind the trainer's, mean over samples",
    "router/load_max": "mean over layers; no token is dropped, and padding counts",
    "router/entropy": "of its choice among all experts, mean over layers and micro-batches",
    "router/rerouted": "share, where training.routing_replay is set",
    "straggler/cut": "share, where engine.on_straggler=cut",
    "straggler/dropped": "since the last iteration",
    "token_ledger/generated": "in what engines handed over; these four where no role was lost and nothing resumed",
    "token_ledger/masked": "share of those consumed, with algorithm.max_token_staleness: read, and not learnt from",
    "token_ledger/discarded": "of dropped samples, and what was thrown away as samples began again",
    "token_ledger/in_flight": "generated - trained - discarded: in responses that wait, and in prefixes",
}
"""Formula, condition or whole of the metrics whose titles leave it open; `mu` sampled, `pi` is trained."""

FAMILIES: dict[str, str] = {
    "idle/<role>": "1 - busy / window, mean over the role's devices, which roles share; overlaps count once",
    "custom/<name>": "an extra value of a task's scores: mean over those that have one",
    "eval/custom/<name>": "what eval.function returned",
    "queue/live_rows, bytes, bytes/<column>, open_leases, partitions": "of the queue's live partitions",
    "queue/<task>/depth_samples, ready, waiting_gets": "neither handed out nor dropped; ready; gets that wait",
    "queue/<task>/oldest_s": "seconds that the oldest ready row has waited",
    "queue/<task>/handout_p50_ms, _p99_ms, _max_ms": "how long the latest 1,024 rows lay ready",
}
"""Metrics whose names hold a role, a column, a task or a user's own name, and what they are."""

OF_LEDGER: dict[str, Fault] = {
    "engines": Fault("{times} a rollout engine was lost"),
    "restarts": Fault("{times} roles died and were started again: its times include that"),
}
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
            f"unknown metric {', '.join(unknown)}; known are those of harness/metrics/definitions.py, "
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
