"""Writing down what was trained, where its rows lie: a role of the host reads them from the queue once more, writes the
run's samples, responses and order of arrival, and answers the driver with what is small.

The queue keeps a row until the driver knows that it is written, and finishes it then. A recorder that is started again
cuts the files back to what the driver knows, reads the same rows, and writes them once.
"""

import asyncio
import hashlib
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.config import ModelConfig
from harness.config.job import DEALT_AGAIN
from harness.cost_model.shape import sample_flops
from harness.metrics.arrivals import Arrivals, RunOf, Sampled, runs_of
from harness.metrics.parts import SampleParts
from harness.metrics.samples import (
    Fate,
    SampleRecord,
    TrainedSamples,
    baseline_metrics,
    custom_metrics,
    discarded_metrics,
    filter_metrics,
    latency_metrics,
    length_metrics,
    masked_metrics,
    reward_metrics,
    staleness_metrics,
    straggler_metrics,
    trained_records,
    truncation_metrics,
    turn_metrics,
    untrained_record,
)
from harness.protocols import Clock
from harness.rl.diagnostics import policy_metrics
from harness.runtime.runtime import RealClock, open_ended
from harness.transfer_queue import Batch, Ragged, TransferQueue
from harness.workers.dataflow import RECORD, REFUSED, samples_in, texts_of
from harness.workers.dealing import some_rows
from harness.workers.readers import joined
from harness.workers.training import TrainedRows
from harness.workers.turns import NO_TURNS, ComputingRole


@dataclass(frozen=True)
class TokenDecoder:
    """Reads the columns of trained samples: a value per token, a reward per sample. extra_names: of the values in
    `score_extras`; keeps_cache, max_token_staleness: as `TrainedSamples` has them; has_tokens: whether responses are
    tokens, which can be kept."""

    extra_names: Sequence[str] = ()
    keeps_cache: bool = False
    max_token_staleness: int | None = None
    has_tokens = True

    def prompt_tokens(self, values: int) -> int:
        """Tokens of a prompt whose column has this many values."""
        return values

    def records(
        self, batch: Batch, samples: np.ndarray, trained_at: np.ndarray, iteration: int, group_size: int
    ) -> list[SampleRecord]:
        """Records of rows; the trainer held version `iteration` when the batch started. samples: their ids, int64 [k],
        in the order of the rows; trained_at: seconds, float64 [k]."""
        prompts = batch.ragged("prompt").lengths
        trained = _samples(batch, samples, trained_at, prompts, None, self)
        extras: Sequence[np.ndarray] = ()
        if self.extra_names:
            extras = list(batch.ragged("score_extras").values.reshape(-1, len(self.extra_names)).T)
        return trained_records(
            trained,
            iteration,
            group_size,
            batch.dense("reward").tolist(),
            batch.dense("exact_match").tolist(),
            dict(zip(self.extra_names, extras, strict=True)),
            texts_of(batch.ragged("reward_failure")),
        )

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics that these samples, and the sums of their training, give of the policy."""
        lengths = length_metrics(records) | truncation_metrics(records)
        rewards = reward_metrics(records) | baseline_metrics(sums)
        return lengths | rewards | policy_metrics(dict(sums)) | custom_metrics(records)

    def runs(self, batch: Batch) -> Iterator[list[tuple[int, int]]]:
        """Runs of each sample, one after another: (version, tokens)."""
        return runs_of(batch.ragged("versions"))


@dataclass(frozen=True)
class RunLengthDecoder:
    """The same of a value per run of tokens that one version sampled; nothing was said, so nothing is rewarded."""

    prompt: int
    """Tokens of every prompt."""
    keeps_cache: bool = False
    max_token_staleness: int | None = None
    extra_names = ()
    has_tokens = False

    def prompt_tokens(self, values: int) -> int:
        return self.prompt

    def records(
        self, batch: Batch, samples: np.ndarray, trained_at: np.ndarray, iteration: int, group_size: int
    ) -> list[SampleRecord]:
        prompts = np.full(samples.size, self.prompt)
        trained = _samples(batch, samples, trained_at, prompts, batch.ragged("response").values, self)
        return trained_records(trained, iteration, group_size)

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        return length_metrics(records)

    def runs(self, batch: Batch) -> Iterator[list[tuple[int, int]]]:
        return runs_of(batch.ragged("versions"), batch.ragged("response"))


SampleDecoder = TokenDecoder | RunLengthDecoder


def _samples(
    batch: Batch,
    samples: np.ndarray,
    trained_at: np.ndarray,
    prompt_tokens: np.ndarray,
    run_tokens: np.ndarray | None,
    decoder: SampleDecoder,
) -> TrainedSamples:
    versions = batch.ragged("versions")
    of_rows = ("engine", "admitted_at", "started_at", "first_token_at", "finished_at", "finish_reason", "turns")
    return TrainedSamples(
        sample_id=samples,
        versions=versions.values,
        runs=versions.lengths,
        run_tokens=run_tokens,
        mask=batch.ragged("loss_mask").values,
        prompt_tokens=prompt_tokens,
        trained_at=trained_at,
        keeps_cache=decoder.keeps_cache,
        max_token_staleness=decoder.max_token_staleness,
        **{name: batch.dense(name) for name in of_rows},
    )


RESPONSE_COLUMNS = ("response", "log_probs", "loss_mask", "versions")

_READ_AT_ONCE = 256  # rows: micro-batches are read together as far as this goes, for a message takes time of its own
_IN_A_GET = 2048  # rows, of the 4,096 that it may name


class Untrained(NamedTuple):
    """A sample that was dropped. prompt_tokens: tokens, not values; version: the newest as it was dropped; reward: None
    where it is not known."""

    sample: int
    fate: Fate
    group: int
    admitted_at: float
    prompt_tokens: int
    version: int
    reward: float | None = None

    @property
    def record(self) -> SampleRecord:
        """The row of samples.parquet."""
        sample, fate, group, admitted_at, prompt_tokens, _, reward = self
        return untrained_record(
            sample, fate, group_id=group, admitted_at=admitted_at, prompt_tokens=prompt_tokens, reward=reward
        )


class _KeptSample(NamedTuple):
    """A sample that was read and not trained. response: its RESPONSE_COLUMNS, where these are tokens; record: as if it
    had been trained."""

    response: tuple[np.ndarray, ...]
    record: SampleRecord

    def as_told(self, one: Untrained) -> SampleRecord:
        """The row of samples.parquet."""
        read = self.record
        assert read.trained_iteration is not None and read.version_last is not None
        later = max(one.version, read.version_last) - read.trained_iteration
        lags = {name: getattr(read, name) + later for name in ("lag_worst", "lag_mean", "lag_in_queue")}
        read = replace(read, trained_iteration=None, trained_at=None, stale_tokens=None, **lags)
        return replace(read, fate=one.fate, admitted_at=one.admitted_at)


@dataclass(frozen=True)
class Work:
    """peak: operations per second of one device; scorings: forward passes over a sample, besides training; epochs:
    passes of training over it, the critic's too; adapters: parameters of these, where they alone are trained."""

    model: ModelConfig
    scorings: int
    peak: float
    epochs: int = 1
    adapters: int = 0


@dataclass(frozen=True)
class RecordingSettings:
    """How samples of a job are written down; picklable. several_turns: a task with an environment; filters,
    limits_samples: whether groups may be refused, and samples cut; work: where the peak of a device is known; run_of:
    whose order of arrival is kept, none without; check: is shown each iteration's, and raises where a replay came out
    otherwise."""

    decoder: SampleDecoder
    group_size: int
    steps_per_version: int = 1
    several_turns: bool = False
    filters: bool = False
    limits_samples: bool = False
    work: Work | None = None
    run_of: RunOf | None = None
    check: Callable[[Arrivals], None] | None = None


@dataclass(frozen=True)
class WrittenSoFar:
    """The folder of a run, and how many bytes of its files of samples, by path in it, are known to be as they should
    be."""

    folder: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class TrainedIteration:
    """The driver's knowledge of an iteration, or, without ranks, of what was dropped after the last one. ranks:
    micro-batches of each rank that trained its own; sums: of all ranks; untrained: samples dropped since the last one,
    and those dropped before of which nobody knew what they said; drops: stale groups, by call; refused, late: groups
    that a filter refused, and that took too long; into: None where nothing is written, and records are answered."""

    iteration: int
    ranks: list[list[TrainedRows]]
    sums: dict[str, float]
    untrained: list[Untrained]
    drops: list[list[int]]
    refused: int
    late: int
    into: WrittenSoFar | None

    def rows(self, group_size: int) -> np.ndarray:
        """All rows of the groups that were trained, int64, with those that others were compared with."""
        rows = [part.rows for rank in self.ranks for part in rank]
        groups = np.unique(np.concatenate(rows) // group_size) if rows else np.empty(0, np.int64)
        return (groups[:, None] * group_size + np.arange(group_size)).ravel()


@dataclass
class Recorded:
    """tokens: of prompts and responses; flops: where `RecordingSettings.work` is known; metrics: of the samples;
    sampled: tokens of responses by fate, of those that were dropped, too; generated: tokens that engines have sampled
    so far, and those of them thrown away as samples began again, where somebody asked them; files, digests: bytes and
    SHA-256 of what is written; records: where nothing is; unread: samples that were dropped and are not recorded, as
    nobody has read yet what they say; stale: rows of those that are, which are done with."""

    samples: int
    tokens: int
    flops: float
    metrics: dict[str, float]
    sampled: dict[str, int] = field(default_factory=dict)
    generated: tuple[int, int] = (0, 0)
    files: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    records: list[SampleRecord] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)


class RecordRole(ComputingRole):
    """Records one iteration at a time. It computes in a thread, where time passes by itself, so that the other roles of
    its worker go on."""

    def __init__(self, queue: TransferQueue, clock: Clock, recording: RecordingSettings, *, name: str = "0") -> None:
        super().__init__(f"{RECORD}[{name}]", NO_TURNS)
        self.queue, self.clock, self.recording = queue, clock, recording
        self._work: Callable[..., Awaitable[Any]] = asyncio.to_thread if isinstance(clock, RealClock) else _at_once
        self._parts: SampleParts | None = None
        self._kept: dict[int, _KeptSample] = {}  # of those that were not trained

    @open_ended
    async def keep(self, groups: list[int]) -> None:
        """Reads groups that are refused, before others take their places. What was said there is written with the
        iteration of which the driver tells next, unless this process dies before that."""
        await asyncio.gather(*(self._keep_group(REFUSED, group) for group in groups))

    async def _keep_group(self, task: str, group: int) -> list[int]:
        """Reads a group that is not trained, if all of it is scored; its rows, or none."""
        n = self.recording.group_size
        rows = tuple(range(group * n, (group + 1) * n))
        try:
            batch = await self.queue.get(task, n, only=rows, consumer=self.waits.owner, timeout_s=0)
        except TimeoutError:  # nobody waits for what is not scored yet
            return []
        if batch is None:
            return []
        self._keep(batch, samples_in(batch))
        await self.queue.give_back(batch.lease)
        return list(rows)

    def _keep(self, batch: Batch, samples: np.ndarray) -> None:
        decoder, newest = self.recording.decoder, int(batch.ragged("versions").values.max())
        records = decoder.records(batch, samples, np.zeros(samples.size), newest, self.recording.group_size)
        said = [batch.ragged(name).rows() for name in RESPONSE_COLUMNS] if decoder.has_tokens else []
        for row, record in enumerate(records):
            self._kept[record.sample_id] = _KeptSample(tuple(column[row].copy() for column in said), record)

    @open_ended
    async def record(self, trained: TrainedIteration) -> Recorded:
        """Reads the rows of an iteration, gives them back, and writes them down. Waits for nobody: all of them are
        ready. Raises ValueError for versions that cannot be, and what `RecordingSettings.check` raises."""
        async with self.turn("record"):
            parts = None if trained.into is None else await self._work(self._opened, trained.into)
            samples = _IterationSamples(self.recording, trained, parts)
            await self._keep_compared(trained)
            stale = await self._keep_stale(trained.untrained)
            for parts_read in _together([part for rank in trained.ranks for part in rank]):
                batch, leases = await self._read(np.concatenate([part.rows for part in parts_read]))
                await self._work(samples.add, parts_read, batch)
                for lease in leases:
                    await self.queue.give_back(lease)
            recorded: Recorded = await self._work(samples.recorded, self._kept)
            for one in trained.untrained:
                self._kept.pop(one.sample, None)
            return replace(recorded, stale=stale)

    async def _keep_compared(self, trained: TrainedIteration) -> None:
        """Keeps what others were compared with, which is in the queue as what was trained is."""
        if not any(one.fate == "dropped_baseline" for one in trained.untrained):
            return
        parts = [part.rows for rank in trained.ranks for part in rank]
        rows = np.setdiff1d(trained.rows(self.recording.group_size), np.concatenate(parts))
        batch, leases = await self._read(rows)
        self._keep(batch, samples_in(batch))
        for lease in leases:
            await self.queue.give_back(lease)

    async def _keep_stale(self, untrained: Sequence[Untrained]) -> list[int]:
        """Keeps stale groups that are scored by now: engines end what they had begun of one that is dropped. Their
        rows."""
        groups = {one.group % DEALT_AGAIN for one in untrained if one.fate == "dropped_stale"}
        read = await asyncio.gather(*(self._keep_group(RECORD, group) for group in sorted(groups)))
        return [row for rows in read for row in rows]

    async def _read(self, rows: np.ndarray) -> tuple[Batch, list[int]]:
        """The rows in this order, whatever partitions they are of, and the leases under which they were read."""
        read: list[Batch] = []
        for start in range(0, rows.size, _IN_A_GET):
            left = rows[start : start + _IN_A_GET]
            while left.size:
                with self.waits("record", "rows that were trained"):
                    batch = await self.queue.get(
                        RECORD, left.size, only=tuple(left.tolist()), consumer=self.waits.owner
                    )
                assert batch is not None, "the queue keeps them until the driver has finished them"
                read.append(batch)
                left = left[~np.isin(left, batch.rows)]
        whole = joined(read)
        ascending = np.argsort(whole.rows, kind="stable")
        return some_rows(whole, ascending[np.searchsorted(whole.rows[ascending], rows)]), [one.lease for one in read]

    def _opened(self, into: WrittenSoFar) -> SampleParts:
        """The files as the driver knows them."""
        if self._parts is not None and self._parts.sizes == into.sizes:
            return self._parts
        self.close()
        decoder, run_of = self.recording.decoder, self.recording.run_of
        self._parts = SampleParts.cut_back(Path(into.folder), into.sizes, decoder.extra_names, run_of)
        weakref.finalize(self, self._parts.close)  # nobody closes a role of a simulated worker
        return self._parts

    def close(self) -> None:
        """Closes the files."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None


class _IterationSamples:
    """One iteration's samples, in the order of training."""

    def __init__(self, recording: RecordingSettings, trained: TrainedIteration, parts: SampleParts | None) -> None:
        self._recording, self._trained, self._parts = recording, trained, parts
        self._records: list[SampleRecord] = []
        self._sampled: list[Sampled] = []
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, parts: Sequence[TrainedRows], batch: Batch) -> None:
        """Takes the rows of some micro-batches, one after another, and keeps none of their tokens."""
        recording, samples = self._recording, np.concatenate([part.samples for part in parts])
        decoder, sizes = recording.decoder, [part.samples.size for part in parts]
        trained_at = np.repeat([part.at for part in parts], sizes)
        self._records += decoder.records(batch, samples, trained_at, self._trained.iteration, recording.group_size)
        if self._parts is None:
            return
        if decoder.has_tokens:
            self._parts.responses(samples, map(batch.ragged, RESPONSE_COLUMNS), trained=True)
        if recording.run_of is not None:
            of_rows = (samples, batch.dense("engine"), batch.dense("started_at"))
            told = zip(*(column.tolist() for column in of_rows), decoder.runs(batch), strict=True)
            self._sampled += [Sampled(*one) for one in told]
            self._digest_parts(batch, np.cumsum([0, *sizes]).tolist())

    def _digest_parts(self, batch: Batch, ends: Sequence[int]) -> None:
        """Micro-batch by micro-batch, whichever were read together."""
        responses, log_probs, rewards = batch.ragged("response"), batch.ragged("log_probs"), batch.dense("reward")
        for first, end in pairwise(ends):
            for column in (responses, log_probs):
                values = column.values[column.offsets[first] : column.offsets[end]]
                self._digest.update(np.ascontiguousarray(values).data)
            self._digest.update(np.ascontiguousarray(rewards[first:end]).data)

    def recorded(self, kept: Mapping[int, _KeptSample]) -> Recorded:
        """Writes what is of the whole iteration. kept: of samples that were not trained, by id."""
        told, records = self._trained, self._records
        answer = Recorded(
            len(records),
            sum(record.prompt_tokens + record.response_tokens for record in records),
            self._flops(),
            self._metrics() if records else {},
            unread=[one.sample for one in told.untrained if one.sample not in kept],
        )
        known = {one.sample: kept[one.sample] for one in told.untrained if one.sample in kept}
        dropped = [known[one.sample].as_told(one) for one in told.untrained if one.sample in known]
        records = [*dropped, *records]
        sampled: dict[str, int] = {}
        for record in records:
            sampled[record.fate] = sampled.get(record.fate, 0) + record.response_tokens
        answer = replace(answer, sampled=sampled, metrics=answer.metrics | discarded_metrics(dropped))
        if self._parts is None:
            return replace(answer, records=records)
        if self._recording.run_of is not None and told.ranks:
            ranks = [[part.samples.tolist() for part in rank] for rank in told.ranks if rank]
            arrivals = Arrivals(told.iteration, ranks, told.drops, self._sampled, self._digest.hexdigest())
            self._parts.arrivals(arrivals)
            if self._recording.check is not None:
                self._recording.check(arrivals)
        if known and self._recording.decoder.has_tokens:
            columns = map(Ragged.from_rows, zip(*(one.response for one in known.values()), strict=True))
            self._parts.responses(np.array(list(known)), columns, trained=False)
        self._parts.samples(records)
        return replace(answer, files=self._parts.sizes, digests=self._parts.digests)

    def _metrics(self) -> dict[str, float]:
        recording, told, records = self._recording, self._trained, self._records
        metrics = staleness_metrics(records, recording.steps_per_version)
        metrics |= latency_metrics(records)
        metrics |= {} if recording.decoder.max_token_staleness is None else masked_metrics(records)
        metrics |= recording.decoder.metrics(records, told.sums)
        metrics |= turn_metrics(records) if recording.several_turns else {}
        metrics |= filter_metrics(records, told.refused) if recording.filters else {}
        return metrics | (straggler_metrics(records, told.late) if recording.limits_samples else {})

    def _flops(self) -> float:
        if (work := self._recording.work) is None:
            return 0.0
        rest = work.scorings, work.epochs, work.adapters
        return sum(sample_flops(work.model, one.prompt_tokens, one.response_tokens, *rest) for one in self._records)


def _together(parts: Sequence[TrainedRows]) -> Iterator[list[TrainedRows]]:
    """The micro-batches in order, as many at a time as are read at once, one at least."""
    found: list[TrainedRows] = []
    for part in parts:
        if found and sum(one.rows.size for one in found) + part.rows.size > _READ_AT_ONCE:
            yield found
            found = []
        found.append(part)
    if found:
        yield found


async def _at_once(step: Callable[..., Any], *args: Any) -> Any:
    """Does what blocks on a clock that jumps."""
    return step(*args)
