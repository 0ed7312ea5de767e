"""samples.parquet: a row per sample ever admitted, with its fate and its lag taken apart, and the metrics that follow
from it; responses.parquet: the tokens of every trained sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.config.job import DEALT_AGAIN
from harness.metrics.definitions import CUSTOM, LATENCIES, LATENCY_PERCENTILES
from harness.metrics.parquet import read_as
from harness.protocols import FINISH_REASONS

Fate = Literal[
    "trained",
    "dropped_stale",
    "dropped_filtered",
    "dropped_baseline",
    "dropped_straggler",
    "dropped_failed",
    "dropped_spare",
    "in_flight",
]
FATES: tuple[str, ...] = get_args(Fate)


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A row of samples.parquet. Times: seconds since the run began, on the run's clock. Lags: iterations.

    None stands where there is nothing to say: `trained_*` of a sample that was not trained, versions and lags of one
    that has no token yet, the reward of one that was not judged, or could not be (reward_failed; failure says why).
    custom: the extra values of its score, columns `custom/<name>`. A dropped sample lags behind the newest
    version as it was dropped, or as its last token was sampled, if that was later.

    cache_age: versions from the weights that made an entry of the KV cache to those that sampled by it, mean over the
    entries behind each token, then over the tokens that were sampled.

    response_tokens: those that the policy sampled; stale_tokens: of these, those too old to have a loss
    (algorithm.max_token_staleness); environment_tokens: those between them that an environment wrote,
    which count in no lag. finish_reason: one of `harness.protocols.FINISH_REASONS`; turns: how often the policy spoke.
    """

    sample_id: int
    group_id: int
    engine: str | None
    fate: Fate
    trained_iteration: int | None
    version_first: int | None
    version_last: int | None
    lag_worst: int | None
    lag_mean: float | None
    lag_in_flight: int | None
    lag_in_queue: int | None
    span: int | None
    cache_age: float | None
    admitted_at: float
    started_at: float | None
    first_token_at: float | None
    finished_at: float | None
    trained_at: float | None
    prompt_tokens: int
    response_tokens: int
    stale_tokens: int | None
    reward: float | None
    exact_match: bool | None
    finish_reason: str | None
    turns: int | None
    environment_tokens: int | None
    reward_failed: bool | None
    failure: str | None = None
    custom: Mapping[str, float] = field(default_factory=dict)


PROBLEM_ROW = pa.field("row", pa.string())  # the column by which the problem of a sample is found
_ARROW = {
    **{"int": pa.int32(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_(), "Fate": pa.string()},
    **dict.fromkeys(("sample_id", "group_id"), pa.int64()),
}
"""Types of columns, by those of fields; of ids by their names."""


def _column(own: Field[Any]) -> pa.Field:
    kind, _, none = str(own.type).partition(" | ")
    return pa.field(own.name, _ARROW.get(own.name, _ARROW[kind]), nullable=bool(none))


SCHEMA = pa.schema([_column(own) for own in fields(SampleRecord) if own.name != "custom"])
TEXT_FIELDS = (pa.field("prompt_text", pa.string()), pa.field("response_text", pa.string()))
FILE_SCHEMA = pa.schema([*SCHEMA, PROBLEM_ROW, *TEXT_FIELDS])
"""Columns of samples.parquet: of records, and what is known of their problems."""


def untrained_record(
    sample_id: int, fate: Fate, *, group_id: int, admitted_at: float, prompt_tokens: int, reward: float | None = None
) -> SampleRecord:
    """The row of a sample that was dropped, or is in flight: without versions and lags."""
    known = {
        "sample_id": sample_id,
        "group_id": group_id,
        "fate": fate,
        "admitted_at": admitted_at,
        "prompt_tokens": prompt_tokens,
        "response_tokens": 0,
        "reward": reward,
    }
    return SampleRecord(**{name: known.get(name) for name in SCHEMA.names})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TrainedSamples:
    """Samples trained in one iteration, as arrays of [k].

    versions: the policy version of each response token, of all samples in a row; or, with run_tokens (each at least 1),
    the version of each run of that many tokens. runs [k]: how many of `versions` belong to each sample. mask: for each
    of `versions`, whether the policy sampled; where not, that of the token before stands there. finish_reason: places
    in `harness.protocols.FINISH_REASONS`. keeps_cache: samples that run as new weights come keep what older ones put
    into their KV caches; else it is computed again. max_token_staleness: lag beyond which a token has no loss; None:
    there is none."""

    sample_id: np.ndarray
    engine: np.ndarray
    versions: np.ndarray
    runs: np.ndarray
    run_tokens: np.ndarray | None
    mask: np.ndarray
    prompt_tokens: np.ndarray
    admitted_at: np.ndarray
    started_at: np.ndarray
    first_token_at: np.ndarray
    finished_at: np.ndarray
    trained_at: np.ndarray
    finish_reason: np.ndarray
    turns: np.ndarray
    keeps_cache: bool = False
    max_token_staleness: int | None = None


def trained_records(
    samples: TrainedSamples,
    iteration: int,
    group_size: int,
    rewards: Sequence[float] | None = None,
    exact_matches: Sequence[bool] | None = None,
    custom: Mapping[str, np.ndarray] | None = None,
    failures: Sequence[str] | None = None,
) -> list[SampleRecord]:
    """The rows of samples that were trained in `iteration`, where the trainer held the version of that number.

    rewards: NaN of one without a score; failures: why each could not be scored, "" where it was; custom: extra values
    of scores, float [k] by name; NaN is no value.

    The lag of a token is `iteration - version`. As versions do not decrease, the worst lag is the first token's and
    splits exactly: lag_worst = (last - first) + (iteration - last) = lag_in_flight + lag_in_queue.

    Only tokens that were sampled count. Raises ValueError, naming the first such sample, for one without such a token,
    or whose versions decrease, are negative or newer than the trainer's."""
    ids, count = samples.sample_id, samples.sample_id.size
    if not count:
        return []
    versions = samples.versions.astype(np.int64)
    every = np.ones_like(versions) if samples.run_tokens is None else samples.run_tokens
    sampled = every * samples.mask
    ends = np.cumsum(samples.runs)
    starts = ends - samples.runs
    _refuse(ids, samples.runs == 0, "was trained but has no token")
    steps = np.diff(versions, prepend=versions[:1])
    steps[starts] = 0  # from one sample to the next
    first, last = versions[starts], versions[ends - 1]
    _refuse(ids, np.minimum.reduceat(steps, starts) < 0, "has token versions that decrease")
    _refuse(ids, first < 0, "has a negative token version")
    _refuse(ids, last > iteration, f"has a token newer than version {iteration}, which the trainer held")
    tokens = np.add.reduceat(sampled, starts)
    _refuse(ids, tokens == 0, "was trained but has no token that was sampled")
    lag_mean = iteration - np.add.reduceat(versions * sampled, starts) / tokens
    most = iteration if samples.max_token_staleness is None else samples.max_token_staleness
    stale = np.add.reduceat(sampled * (iteration - versions > most), starts)
    columns: list[list[Any]] = [
        ids.tolist(),
        (ids // group_size).tolist(),
        [str(engine) for engine in samples.engine.tolist()],
        ["trained"] * count,
        [iteration] * count,
        first.tolist(),
        last.tolist(),
        (iteration - first).tolist(),
        lag_mean.tolist(),
        (last - first).tolist(),
        (iteration - last).tolist(),
        (1 + np.add.reduceat(steps != 0, starts)).tolist(),
        (_cache_ages(samples, every, starts) / tokens).tolist() if samples.keeps_cache else [0.0] * count,
        samples.admitted_at.tolist(),
        samples.started_at.tolist(),
        [None if at != at else at for at in samples.first_token_at.tolist()],
        samples.finished_at.tolist(),
        samples.trained_at.tolist(),
        samples.prompt_tokens.tolist(),
        tokens.tolist(),
        stale.tolist(),
        [None] * count if rewards is None else [None if reward != reward else reward for reward in rewards],
        [None] * count
        if rewards is None or exact_matches is None
        else [None if of != of else right for of, right in zip(rewards, exact_matches, strict=True)],
        [FINISH_REASONS[reason] for reason in samples.finish_reason.tolist()],
        samples.turns.tolist(),
        (np.add.reduceat(every, starts) - tokens).tolist(),
        [None] * count if failures is None else [bool(failure) for failure in failures],
        [None] * count if failures is None else [failure or None for failure in failures],
        [{name: float(of[i]) for name, of in (custom or {}).items() if not np.isnan(of[i])} for i in range(count)],
    ]
    return [SampleRecord(*row) for row in zip(*columns, strict=True)]


def _cache_ages(samples: TrainedSamples, every: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """`cache_age` of each sample, summed over the tokens that were sampled. every: tokens of each of `versions`.

    The entry of a token is made as the one behind it is sampled, those of the prompt as the first is. So in a run of
    version v behind T tokens, of which token t has version v_t, the j-th token has P + T + j - 1 entries, whose ages
    add up to v (P + T - 1) - (P - 1) v_1 - (v_1 + ... + v_T), whatever j is. Where weights came between two turns, all
    that was said before is a prompt again."""
    versions, mask = samples.versions.astype(np.int64), samples.mask
    before, summed = (np.cumsum(counts) - counts for counts in (every, every * versions))
    entries = np.repeat(samples.prompt_tokens - before[starts], samples.runs) + before
    anew = np.zeros(versions.size, np.bool_)
    anew[1:] = ~mask[:-1] & (np.diff(versions) > 0)
    anew[starts] = True
    first = np.flatnonzero(anew)[np.cumsum(anew) - 1]
    ages = versions * (entries - 1) - (entries[first] - 1) * versions[first] - (summed - summed[first])
    harmonic = np.concatenate(([0.0], np.cumsum(1 / np.arange(1, (entries + every).max()))))
    return np.add.reduceat(mask * ages * (harmonic[entries + every - 1] - harmonic[entries - 1]), starts)


def _refuse(ids: np.ndarray, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        raise ValueError(f"sample {ids[wrong][0]} {what}")


def staleness_metrics(records: Iterable[SampleRecord], steps_per_version: int = 1) -> dict[str, float]:
    """The staleness/* metrics of the trained samples among `records`, in iterations; every sample counts once.

    mean: mean over samples of lag_mean; max: the worst lag of all; in_flight_mean, in_queue_mean: means of the two
    parts of the worst lag; span_max: the most versions that sampled one sample; cache_mean: mean of cache_age.
    steps_mean, steps_max: mean and max in optimizer steps, as the iteration begins, of which a version is made by so
    many. Raises ValueError if none was trained."""
    trained = _trained(records)
    mean, worst = float(np.mean([r.lag_mean for r in trained])), float(np.max([r.lag_worst for r in trained]))
    return {
        "staleness/mean": mean,
        "staleness/max": worst,
        "staleness/steps_mean": mean * steps_per_version,
        "staleness/steps_max": worst * steps_per_version,
        "staleness/in_flight_mean": float(np.mean([r.lag_in_flight for r in trained])),
        "staleness/in_queue_mean": float(np.mean([r.lag_in_queue for r in trained])),
        "staleness/span_max": float(np.max([r.span for r in trained])),
        "staleness/cache_mean": float(np.mean([r.cache_age for r in trained])),
    }


def discarded_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """The mean lag of the tokens of dropped records, if any, without those that others were compared with."""
    dropped = [r for r in records if r.fate not in ("trained", "dropped_baseline") and r.lag_mean is not None]
    if not dropped:
        return {}
    lags = np.array([r.lag_mean for r in dropped], np.float64)
    return {"token_ledger/discarded_lag": float(np.average(lags, weights=[r.response_tokens for r in dropped]))}


def masked_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """The share of trained response tokens that were too old for a loss. Raises ValueError if none was trained."""
    trained = _trained(records)
    return {"token_ledger/masked": sum(r.stale_tokens or 0 for r in trained) / sum(r.response_tokens for r in trained)}


def length_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """response_length/* (tokens) of the trained samples among `records`. Raises ValueError if none was trained."""
    lengths = [r.response_tokens for r in _trained(records)]
    return {"response_length/mean": float(np.mean(lengths)), "response_length/p99": float(np.percentile(lengths, 99))}


def truncation_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """The share of the trained samples that the limit on tokens ended. Raises ValueError if none was trained."""
    return {"response_length/truncated": float(np.mean([r.finish_reason == "length" for r in _trained(records)]))}


def filter_metrics(records: Iterable[SampleRecord], refused: int) -> dict[str, float]:
    """filter/* of an iteration in which a filter refused so many groups: that number, its share of all groups that were
    refused or trained, and how many prompts the place of a trained group was dealt at most. Raises ValueError if none
    was trained."""
    groups = {record.group_id for record in _trained(records)}
    return {
        "filter/refused": float(refused),
        "filter/share": refused / (refused + len(groups)),
        "filter/rounds": float(max(groups) // DEALT_AGAIN + 1),
    }


def straggler_metrics(records: Iterable[SampleRecord], dropped: int) -> dict[str, float]:
    """straggler/* of an iteration in which so many groups were dropped since they took too long: that number, and the
    share of the trained samples that were cut. Raises ValueError if none was trained."""
    cut = float(np.mean([r.finish_reason == "cut" for r in _trained(records)]))
    return {"straggler/cut": cut, "straggler/dropped": float(dropped)}


def reward_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """reward/* of the trained samples among `records`; every sample that was scored counts once.

    same_in_group: the share of groups in which all such samples have one reward, so that a comparison within them says
    nothing; failed: samples that could not be scored; correct_and_complete: the share of the trained ones that are
    right, and ended by themselves. Raises ValueError if none was trained, if a trained one has neither reward nor
    failure, or if none was scored."""
    trained = _trained(records)
    scored = [r for r in trained if r.reward is not None and r.exact_match is not None]
    unjudged = [r.sample_id for r in trained if (r.reward is None or r.exact_match is None) and not r.reward_failed]
    if unjudged or not scored:
        told = f"{len(unjudged)} trained samples have no reward or exact match, the first is {unjudged[:1]}"
        raise ValueError(told if unjudged else f"none of the {len(trained)} trained samples could be scored")
    return {
        "reward/mean": float(np.mean([r.reward for r in scored])),
        "reward/exact_match": float(np.mean([r.exact_match for r in scored])),
        "reward/correct_and_complete": sum(r.finish_reason == "stop" and bool(r.exact_match) for r in scored)
        / len(trained),
        "reward/failed": float(sum(bool(r.reward_failed) for r in trained)),
        "reward/same_in_group": _same_in_group(scored, {r.group_id for r in trained}),
    }


def baseline_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """reward/baseline: the mean of the rewards that others were compared with, where there were such samples; sums: how
    many `baselines`, and their `baseline_reward`."""
    return {"reward/baseline": sums["baseline_reward"] / sums["baselines"]} if sums.get("baselines") else {}


def _same_in_group(records: Iterable[SampleRecord], groups: Iterable[int]) -> float:
    rewards: dict[int, set[float | None]] = {group: set() for group in groups}
    for record in records:
        rewards[record.group_id].add(record.reward)
    return float(np.mean([len(found) <= 1 for found in rewards.values()]))


def turn_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """turns/* of the trained samples, of a task with an environment; failed: a share. Raises ValueError if none was."""
    trained = _trained(records)
    return {
        "turns/mean": float(np.mean([r.turns for r in trained])),
        "turns/max": float(np.max([r.turns for r in trained])),
        "turns/environment_tokens": float(np.mean([r.environment_tokens for r in trained])),
        "turns/failed": float(np.mean([r.finish_reason == "failed" for r in trained])),
    }


def custom_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """custom/<name>: the mean over those trained samples among `records` that have the value."""
    values: dict[str, list[float]] = {}
    for record in _trained(records):
        for name, value in record.custom.items():
            values.setdefault(name, []).append(value)
    return {CUSTOM + name: float(np.mean(values[name])) for name in sorted(values)}


def read_samples(path: Path) -> pa.Table:
    """The table of samples.parquet: the columns of FILE_SCHEMA, then whatever others the file has. Raises ValueError as
    `read_as` does, and for a fate that is none."""
    table = read_as(path, FILE_SCHEMA)
    if unknown := set(table.column("fate").unique().to_pylist()) - set(FATES):
        raise ValueError(f"{path} cannot be read: {unknown} is no fate of a sample; they are {', '.join(FATES)}")
    return table


def record_of(row: Mapping[str, Any]) -> SampleRecord:
    """The record of a row of `read_samples(...).to_pylist()`, without columns that are unknown here."""
    custom = {name.removeprefix(CUSTOM): row[name] for name in row if name.startswith(CUSTOM) and row[name] is not None}
    return SampleRecord(**{name: row[name] for name in SCHEMA.names}, custom=custom)


def _trained(records: Iterable[SampleRecord]) -> list[SampleRecord]:
    trained = [r for r in records if r.fate == "trained"]
    if not trained:
        raise ValueError("no trained sample among the records: nothing to average")
    return trained


VERSION_RUN = (pa.field("version", pa.int32()), pa.field("tokens", pa.int32()))
PROBLEMS_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        PROBLEM_ROW,
        pa.field("prompt", pa.list_(pa.int32()), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
    ]
)
LONGEST_ANSWER = 2000  # characters of an answer that are kept: its row leads to the rest
RESPONSES_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("response", pa.list_(pa.int32()), nullable=False),
        pa.field("log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("version_runs", pa.list_(pa.struct(VERSION_RUN))),
    ]
)
HELD_OUT_SCHEMA = pa.schema(
    [
        pa.field("version", pa.int32(), nullable=False),
        PROBLEM_ROW,
        pa.field("number", pa.int32(), nullable=False),
        pa.field("prompt", pa.list_(pa.int32()), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("response", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("reward", pa.float64()),
        pa.field("exact_match", pa.bool_()),
        pa.field("finish_reason", pa.string()),
        pa.field("turns", pa.int32()),
        pa.field("failure", pa.string()),
    ]
)
"""Columns of eval_responses.parquet, besides extra values of scores. number: 0 of the greedy one, then sampled ones."""


@dataclass(frozen=True)
class Texts:
    """Prompts and responses as text beside their tokens. decode: of the task; samples: that have a text, spread evenly
    over all that have a response; characters: of each text at most."""

    decode: Callable[[np.ndarray], str]
    samples: int
    characters: int

    def of_samples(self, samples: pa.Table, responses: pa.Table, problems: pa.Table) -> pa.Table:
        """Samples with the columns of `TEXT_FIELDS`."""
        answered = _places(samples["sample_id"], responses["sample_id"])
        asked = _places(samples["group_id"], problems["group_id"])
        chosen = self._spread(np.flatnonzero(answered >= 0))
        tokens = ((problems["prompt"], asked[chosen]), (responses["response"], answered[chosen]))
        return self._with_texts(samples, chosen, tokens)

    def of_held_out(self, responses: pa.Table) -> pa.Table:
        """Responses to held-out problems with the same columns."""
        chosen = self._spread(np.arange(len(responses)))
        tokens = ((responses["prompt"], chosen), (responses["response"], chosen))
        return self._with_texts(responses, chosen, tokens)

    def _spread(self, places: np.ndarray) -> np.ndarray:
        count = min(self.samples, len(places))
        return places[np.arange(count) * len(places) // max(count, 1)]

    def _with_texts(
        self, table: pa.Table, chosen: np.ndarray, tokens: Iterable[tuple[pa.ChunkedArray, np.ndarray]]
    ) -> pa.Table:
        """tokens: of each column lists, and which of them are of the chosen rows; less than 0: none."""
        for field_, (lists, places) in zip(TEXT_FIELDS, tokens, strict=True):
            texts = np.full(len(table), None, object)
            texts[chosen] = [None if place < 0 else self._text(lists[place].values) for place in places.tolist()]
            table = table.add_column(before_custom(table), field_, pa.array(texts, pa.string()))
        return table

    def _text(self, tokens: pa.Array) -> str:
        text = self.decode(tokens[: self.characters].to_numpy())
        return f"{text[: self.characters]}…" if max(len(text), len(tokens)) > self.characters else text


def before_custom(table: pa.Table) -> int:
    """The place of the first column of an extra value, which all others stand before."""
    return sum(not name.startswith(CUSTOM) for name in table.column_names)


def _places(values: pa.ChunkedArray, among: pa.ChunkedArray) -> np.ndarray:
    """The place of each value among others, -1 for one that is not there."""
    places: np.ndarray = pc.index_in(values, among).fill_null(-1).to_numpy()
    return places


TIMES = ("admitted_at", "started_at", "first_token_at", "finished_at", "response_tokens")
PERCENTILES = (50, 90, 99)


def latencies(times: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each of `LATENCIES`, seconds, float64 [k], NaN where unknown. times: float64 [k] by `TIMES`, or NaN."""
    admitted, started, first, finished, tokens = (times[name] for name in TIMES)
    between = np.where(tokens > 1, tokens - 1, np.nan)
    values = (started - admitted, first - started, (finished - first) / between, finished - started)
    return dict(zip(LATENCIES, values, strict=True))


def latency_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """latency/* of the trained samples among `records`, in seconds: what is known of them."""
    rows = [[getattr(one, name) for name in TIMES] for one in records if one.fate == "trained"]
    columns = np.array(rows, np.float64).reshape(-1, len(TIMES)).T  # None is NaN
    parts = latencies(dict(zip(TIMES, columns, strict=True)))
    return {
        f"latency/{part}_p{percentile}_s": value
        for part, values in parts.items()
        for percentile, value in percentiles(values, LATENCY_PERCENTILES).items()
    }


def percentiles(values: np.ndarray, which: Iterable[int] = PERCENTILES) -> dict[int, float]:
    """Percentiles of the values that are known, with linear interpolation; none where none is."""
    known = values[~np.isnan(values)]
    return {one: float(np.percentile(known, one)) for one in which} if known.size else {}


def latencies_by_engine(samples: Iterable[pa.Table]) -> dict[str, dict[str, np.ndarray]]:
    """`latencies` of the trained samples of runs, by engine, in order. samples: samples.parquet of each run."""
    table = pa.concat_tables([one.select(["engine", "fate", *TIMES]) for one in samples])
    trained = table.filter(pa.compute.equal(table["fate"], "trained"))
    times = {name: trained[name].cast(pa.float64()).to_numpy() for name in TIMES}
    numbers, which = np.unique(trained["engine"].cast(pa.int64()).to_numpy(), return_inverse=True)
    order, ends = np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1]
    parts = {part: np.split(values[order], ends) for part, values in latencies(times).items()}
    return {str(number): {part: of[place] for part, of in parts.items()} for place, number in enumerate(numbers)}
