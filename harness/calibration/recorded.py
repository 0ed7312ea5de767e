"""Durations of pieces of work in recorded runs of synchronous schedules, from their timelines and their samples."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heapify, heapreplace

import numpy as np
import pandas as pd

from harness.config.placement import HOST_ROLES
from harness.metrics.timeline import SYNC_KINDS, WORK_KINDS, Interval, Timeline, union
from harness.protocols import Span

_KINDS = {"reference": "log_prob", "old_log_prob": "log_prob", "update_actor": "train"}

ATTENTION_FROM = 512
"""Tokens of a mean sequence from which attention is told apart: below, it is a few hundredths of the work."""


@dataclass(frozen=True)
class WorkTimes:
    """Pieces of work of devices that took turns, and the seconds that each took.

    Seconds count from the end of the piece before, so that a call's way there and back is part of what it costs. All
    arrays are float64. Batches of one engine, [n]: generate_s, steps (decode steps), sampled (tokens of all responses),
    cached (tokens in the KV caches, over all steps), prompts and prompt_pairs (tokens of all prompts, and the squares
    of their lengths). Where devices are shared: wake_s, from the end of the iteration before to the first request, and
    sleep_s, from the last response until the device is free.
    Calls (of one micro-batch): log_prob_s with log_prob_tokens and log_prob_pairs, and train_s with its own, prompts
    and responses together. step_s: optimizer steps. host_copy_s: each way of weights through host memory;
    broadcast_s: of weights from pool to pool. lengths int64: tokens of every response, any order."""

    generate_s: np.ndarray
    steps: np.ndarray
    sampled: np.ndarray
    cached: np.ndarray
    prompts: np.ndarray
    prompt_pairs: np.ndarray
    wake_s: np.ndarray
    sleep_s: np.ndarray
    log_prob_s: np.ndarray
    log_prob_tokens: np.ndarray
    log_prob_pairs: np.ndarray
    train_s: np.ndarray
    train_tokens: np.ndarray
    train_pairs: np.ndarray
    step_s: np.ndarray
    host_copy_s: np.ndarray
    broadcast_s: np.ndarray
    lengths: np.ndarray
    prompt_tokens: float

    @property
    def attention(self) -> bool:
        """Whether sequences are so long that attention shows."""
        return self.prompt_tokens + float(self.lengths.mean()) >= ATTENTION_FROM


def together(runs: Sequence[WorkTimes]) -> WorkTimes:
    """Work of several runs as if one had done it. Micro-batches of other sizes tell fixed parts from growing ones."""
    values = {field.name: [getattr(run, field.name) for run in runs] for field in fields(WorkTimes)}
    samples = [len(run.lengths) for run in runs]
    prompt_tokens = float(np.average(values.pop("prompt_tokens"), weights=samples))
    return WorkTimes(**{name: np.concatenate(arrays) for name, arrays in values.items()}, prompt_tokens=prompt_tokens)


@dataclass(frozen=True)
class Turn:
    """A piece of work. own: its seconds, less what it shares with the piece before on its devices; quiet: the seconds
    just before it in which no device worked."""

    span: Span
    devices: tuple[str, ...]
    own: float
    quiet: float

    @property
    def seconds(self) -> float:
        """Seconds of the turn, with what it waited."""
        return self.own + self.quiet


def turns(timeline: Timeline) -> dict[int, list[Turn]]:
    """The work of every iteration on devices, in order on each. The host's time belongs to the piece after it."""
    by_device: dict[tuple[str, ...], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in WORK_KINDS and span.role not in HOST_ROLES:
            by_device[timeline.placement[span.role, span.engine].devices].append(span)
    busy = union((span.start, span.end) for spans in by_device.values() for span in spans)
    ends = sorted(timeline.iteration_ends.values())
    found: dict[int, list[Turn]] = defaultdict(list)
    for devices, spans in by_device.items():
        at = timeline.started_at
        for span in spans:
            own = max(0.0, span.end - max(span.start, at))
            found[bisect_left(ends, span.end)].append(Turn(span, devices, own, _quiet(busy, at, span.start)))
            at = max(at, span.end)
    return found


def _quiet(busy: Sequence[Interval], at: float, start: float) -> float:
    """Seconds just before `start` in which no device worked, at most those since `at`. busy: sorted and disjoint."""
    before = bisect_left(busy, start, key=lambda interval: interval[0])
    return max(0.0, start - max(at, busy[before - 1][1])) if before else start - at


def measured(
    timeline: Timeline,
    samples: pd.DataFrame,
    *,
    slots: int,
    micro_batch: int,
    warmup: int,
    mini_batches: int = 1,
    epochs: int = 1,
) -> WorkTimes:
    """Work times of a run after its first `warmup` iterations. samples: of samples.parquet; slots: of one rollout
    engine; micro_batch: samples of one call; an optimizer step after each mini-batch of each epoch. Where a role has
    several workers, what each of its calls held is not recorded: all are taken to be equal. Raises ValueError for a run
    that has no iteration beyond `warmup`, and for one in which samples lagged."""
    if len(timeline.iteration_ends) <= warmup:
        raise ValueError(f"{len(timeline.iteration_ends)} iterations are no more than the {warmup} that are left out")
    trained = samples[samples["fate"] == "trained"].sort_values("sample_id")
    if trained["lag_worst"].max() > 0:
        raise ValueError("some samples lagged, so devices did not take turns; use a run of a synchronous schedule")
    places = {role: timeline.placement[role, engine] for role, engine in timeline.placement}
    found = _Values(slots, micro_batch, places["rollout"].pool == places["actor"].pool, mini_batches, epochs)
    engines = sum(role == "rollout" for role, _ in timeline.placement)
    done = turns(timeline)
    for _, batch in trained.groupby("trained_iteration"):
        iteration = int(batch["trained_iteration"].iloc[0])
        if iteration >= warmup:
            found.add(done[iteration], batch, engines)
    steady = trained[trained["trained_iteration"] >= warmup]
    names = [field.name for field in fields(WorkTimes) if field.name not in ("lengths", "prompt_tokens")]
    return WorkTimes(
        **{name: np.array(found.values[name], np.float64) for name in names},
        lengths=trained["response_tokens"].to_numpy(np.int64),
        prompt_tokens=float(steady["prompt_tokens"].mean()),
    )


class _Values:
    """The arrays of `WorkTimes`, as they grow by an iteration after the other."""

    def __init__(self, slots: int, micro_batch: int, shared: bool, mini_batches: int, epochs: int) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self._slots, self._micro_batch, self._shared = slots, micro_batch, shared
        self._steps, self._passes = mini_batches * epochs, {"train": epochs}

    def add(self, done: Iterable[Turn], batch: pd.DataFrame, engines: int) -> None:
        """Add an iteration. batch: the samples of this iteration, in order."""
        by_worker: dict[tuple[str, str, str], list[Turn]] = defaultdict(list)
        moved: dict[tuple[str, ...], float] = defaultdict(float)
        for turn in done:
            if turn.span.kind in SYNC_KINDS:
                moved[turn.devices] += turn.seconds
            else:
                by_worker[turn.span.kind, turn.span.role, turn.span.engine].append(turn)
        if self._shared:
            self._take_back(by_worker)
        slots = min(self._slots, -(-len(batch) // engines))
        for (kind, _, engine), turns in by_worker.items():
            if kind == "generate":
                self._generation(turns, batch[batch["engine"] == engine], slots)
            elif kind == "update_actor":
                self._take_steps(turns)
        by_role: dict[tuple[str, str], list[list[Turn]]] = defaultdict(list)
        for (kind, role, _), turns in by_worker.items():
            by_role[kind, role].append(turns)
        for (kind, _), workers in by_role.items():
            if kind in _KINDS:
                tokens = (batch["prompt_tokens"] + batch["response_tokens"]).to_numpy(np.float64)
                self._calls(_KINDS[kind], workers, tokens)
        if self._shared:  # the trainer writes, then all read
            self.values["host_copy_s"] += [sum(moved.values()) / len(moved) / 2] * 2
        else:
            self.values["broadcast_s"].append(max(moved.values()))

    def _take_steps(self, turns: list[Turn]) -> None:
        """Take out the optimizer steps of one rank, each after equally many micro-batches, which are left."""
        after, rest = divmod(len(turns), self._steps)
        if rest:
            raise ValueError(
                f"a batch has {len(turns)} micro-batches and optimizer steps, which {self._steps} steps do not cut "
                "into equal parts"
            )
        ends = slice(after - 1, None, after)
        self.values["step_s"] += [turn.seconds for turn in turns[ends]]
        del turns[ends]

    def _take_back(self, by_worker: dict[tuple[str, str, str], list[Turn]]) -> None:
        """Note what engines need to give devices back: on each device the first call after generation waits for it,
        beyond what later calls of its worker wait."""
        called = [turns for (kind, *_), turns in by_worker.items() if kind != "generate"]
        first = {turns[0].devices: turns for turns in sorted(called, key=lambda t: t[0].span.start, reverse=True)}
        for turns in first.values():
            usual = float(np.median([turn.quiet for turn in turns[1:]])) if turns[1:] else 0.0
            self.values["sleep_s"].append(max(0.0, turns[0].quiet - usual))
            turns[0] = replace(turns[0], quiet=min(turns[0].quiet, usual))

    def _generation(self, turns: Sequence[Turn], samples: pd.DataFrame, slots: int) -> None:
        if not len(samples):
            return
        prompts = samples["prompt_tokens"].to_numpy(np.float64)
        responses = samples["response_tokens"].to_numpy(np.float64)
        if self._shared:
            self.values["wake_s"].append(sum(turn.quiet for turn in turns))
        self.values["generate_s"].append(sum(turn.own for turn in turns))
        self.values["steps"].append(decode_steps(responses, slots))
        self.values["sampled"].append(responses.sum())
        self.values["cached"].append(float((responses * prompts + responses * (responses - 1) / 2).sum()))
        self.values["prompts"].append(prompts.sum())
        self.values["prompt_pairs"].append(float((prompts**2).sum()))

    def _calls(self, name: str, workers: Sequence[Sequence[Turn]], tokens: np.ndarray) -> None:
        """The calls of all workers of a role. tokens: of each sample, in order."""
        calls = [turn.seconds for turns in workers for turn in turns]
        passes = self._passes.get(name, 1)
        parts = [tokens[at : at + self._micro_batch] for at in range(0, len(tokens), self._micro_batch)] * passes
        if len(workers) == 1 and len(parts) == len(calls):
            sizes, pairs = [part.sum() for part in parts], [(part**2).sum() for part in parts]
        else:
            sizes = [passes * tokens.sum() / max(1, len(calls))] * len(calls)
            pairs = [passes * (tokens**2).sum() / max(1, len(calls))] * len(calls)
        self.values[f"{name}_s"] += calls
        self.values[f"{name}_tokens"] += sizes
        self.values[f"{name}_pairs"] += pairs


def decode_steps(responses: Sequence[float] | np.ndarray, slots: int) -> float:
    """Steps until all are done, where each in turn takes the first slot that is free. responses: tokens, [n]."""
    ends = [0.0] * slots
    heapify(ends)
    for tokens in responses:
        heapreplace(ends, ends[0] + float(tokens))
    return max(ends)
