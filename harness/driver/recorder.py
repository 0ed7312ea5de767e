"""Turns what happens in a job into the run's files: ledger, samples, timeline, metrics."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import msgspec

from harness.driver.checkpoint_files import AdmittedGroup, Checkpoint, RecorderState
from harness.driver.evaluation import Evaluated
from harness.driver.listeners import RunListener
from harness.metrics.definitions import good_rate, iteration_metrics, throughput_metrics, token_metrics
from harness.metrics.ledger import ENGINE_EVENTS, DropReason, Ledger
from harness.metrics.parts import DriverParts, SampleParts
from harness.metrics.run_files import RunDirectory
from harness.metrics.samples import Fate, SampleRecord, Texts
from harness.metrics.schemas import Restart
from harness.metrics.timeline import Timeline
from harness.protocols import Clock, Span
from harness.rl.diagnostics import add_diagnostics
from harness.rl.value_loss import value_metrics
from harness.runtime.runtime import RealClock
from harness.tasks import Problem
from harness.workers.recording import Recorded, RecordingSettings, TrainedIteration, Untrained, WrittenSoFar
from harness.workers.training import TrainReport

_LEDGER_EVERY_S = 5.0

EngineEvent = Literal["lost", "leaves", "left", "joins", "works"]


@dataclass(frozen=True)
class EndedIteration:
    """trained: what is to be recorded of it; close: is called with what was, and with the metrics of the queue, as
    `queue_metrics` names them."""

    trained: TrainedIteration
    close: Callable[[Recorded, Mapping[str, float]], None]


@dataclass(frozen=True)
class _Admitted:
    group_id: int
    at: float
    prompt_tokens: int


@dataclass
class _SinceVersion:
    """Events since the newest version. given_up: samples; drops: stale groups, of each call; evaluated: in no line of
    metrics yet; trained: the iteration, reports of the actor's ranks, and of the critic's."""

    untrained: list[Untrained] = field(default_factory=list)
    given_up: Counter[DropReason] = field(default_factory=Counter)
    drops: list[list[int]] = field(default_factory=list)
    evaluated: Evaluated | None = None
    trained: tuple[int, Sequence[TrainReport], Sequence[TrainReport]] | None = None


class Recorder:
    """Hears what happens in a job, as it happens. One iteration is closed when the version it made has been published.

    Twenty-six attributes: six are for others to look at while a run goes on, and six are its files.
    """

    def __init__(self, timeline: Timeline, clock: Clock, recording: RecordingSettings, *, devices: int) -> None:
        """recording: how samples are written down, by whoever reads them."""
        self.timeline, self.clock, self.recording = timeline, clock, recording
        self.group_size, self.devices = recording.group_size, devices
        self.ledger = Ledger()
        self.events = 0
        """Grows whenever anything happened: what a watch for a stall looks at."""
        self.listeners: list[RunListener] = []
        self.version = 0
        """The newest that was made known."""
        self.roles: dict[str, str] = {}
        """The doing of each role."""
        self.engines: list[dict[str, Any]] = []
        """Events of rollout engines: which, what, when (seconds), why."""
        self.restarts: list[Restart] = []
        """Restarts of roles that died."""
        self.tokens: dict[str, int] = {}
        """Tokens that engines generated, those thrown away as samples began again, and those of samples by fate; of a
        run that lost no role and was not resumed."""
        self._admitted: dict[int, _Admitted] = {}  # in flight
        self._trained_samples = 0
        self._sampled: Counter[str] | None = Counter()  # tokens by fate; None: of a run that was resumed
        self._records: list[SampleRecord] = []  # of a run without parts
        self._since = _SinceVersion()
        self._spans: list[Span] = []  # not in the parts yet; of a run that has some
        self._problems: list[tuple[int, Problem]] = []  # the same
        self._parts: DriverParts | None = None
        self._files: dict[str, int] = {}  # bytes of those of samples, as of the last iteration that was recorded
        self._digests: dict[str, str] = {}
        self._ledger_due = 0.0
        self._skipped_steps = {"train": 0.0, "critic": 0.0}
        self._unread: list[Untrained] = []  # dropped, and nobody has read what they say

    def write_into(self, run: RunDirectory) -> None:
        """Write what is known into the run's files as it happens from now on, and do not remember it here."""
        self._run = run
        self._parts = run.open_parts(self.timeline, self.recording.decoder.extra_names)
        with closing(self._sample_parts(run)) as parts:
            self._files, self._digests = parts.sizes, parts.digests

    def _sample_parts(self, run: RunDirectory) -> SampleParts:
        return SampleParts(run.path, self.recording.decoder.extra_names, self.recording.run_of)

    def growing_files(self) -> tuple[dict[str, int], dict[str, str]]:
        """Bytes and SHA-256 of the files that grow iteration by iteration, by name; of a run without files nothing."""
        if self._parts is None:
            return {}, {}
        sizes, digests = self._run.growing_files()
        return sizes | self._files, digests | self._digests

    def admitted(self, rows: Sequence[int], problem: Problem, at: float) -> None:
        """The rows of a group were admitted. at: seconds of the run's clock."""
        self.events += 1
        self.ledger.admit(rows)
        group = rows[0] // self.group_size
        self._admitted |= dict.fromkeys(rows, _Admitted(group, at, len(problem.prompt)))
        if self._parts is not None and self.recording.decoder.has_tokens:
            self._problems.append((group, problem))

    def dropped(self, rows: Sequence[int], reason: DropReason, rewards: Sequence[float | None] = ()) -> None:
        """Rows were dropped. rewards: of each, where they are known."""
        self.events += 1
        self.ledger.dropped(rows, reason)
        known = dict(zip(rows, rewards, strict=False)) if self.recording.decoder.has_tokens else {}
        fate = cast("Fate", f"dropped_{reason}")
        self._since.untrained += [self._without_training(row, fate, known.get(row)) for row in rows]
        for row in rows:
            del self._admitted[row]
        self._since.given_up[reason] += len(rows)
        if reason == "stale":
            self._since.drops.append([row // self.group_size for row in rows[:: self.group_size]])

    def doing(self, role: str, what: str) -> None:
        """A role does something else from now on."""
        self.events += 1
        self.roles[role] = what
        for listener in self.listeners:
            listener.doing(role, what)

    def engine(self, name: str, what: EngineEvent, why: str = "") -> None:
        """A rollout engine is lost, leaves or joins."""
        at = round(self.clock.now(), 3)
        self.engines.append({"engine": name, "what": what, "at_s": at, "why": why})
        self.doing("rollout", f"{name} {ENGINE_EVENTS[what]}" + (f": {why}" if why else ""))

    def restarted(self, restart: Restart) -> None:
        """Roles died, and are at work again."""
        self.events += 1
        self.restarts.append(restart)
        if self._parts is not None:
            self._run.append_restart(msgspec.to_builtins(restart))
        for listener in self.listeners:
            listener.restarted(restart)

    def spans(self, spans: Iterable[Span]) -> None:
        """Spans have ended."""
        spans = list(spans)
        self.timeline.add(spans)
        if self._parts is not None:
            self._spans += spans

    def evaluated(self, found: Evaluated, responses: Mapping[str, Any]) -> None:
        """responses: as columns of eval_responses.parquet."""
        self._since.evaluated = found
        if self._parts is not None and responses:
            self._parts.held_out(responses)
        for listener in self.listeners:
            listener.evaluated(found)

    def trained(self, iteration: int, reports: Sequence[TrainReport], of_values: Sequence[TrainReport] = ()) -> None:
        """of_values: the critic's reports, where there is one."""
        for report in (*reports, *of_values):
            self.spans(report.spans)
        self._since.trained = (iteration, reports, of_values)

    def published(self, version: int) -> EndedIteration:
        """Ends iteration version - 1. Whoever has recorded its samples calls what is left."""
        since = self._since
        assert since.trained is not None and since.trained[0] == version - 1
        iteration, reports, of_values = since.trained
        self.version = version
        at = self.clock.now()
        self.timeline.end_iteration(iteration, at)
        for report in reports:
            for rows in report.trained:
                samples = rows.samples.tolist()
                self.ledger.trained(samples, iteration)
                for sample in samples:
                    del self._admitted[sample]
            if report.baselines:
                rewards = [None if math.isnan(reward) else reward for reward in report.baselines.values()]
                self.dropped(list(report.baselines), "baseline", rewards)
        ledger = self.ledger.metrics()
        if since.evaluated is not None and since.evaluated.version:  # there is no line for the first one
            ledger |= since.evaluated.metrics
        self._since = _SinceVersion()  # as of now: a checkpoint may be made of it
        trained = TrainedIteration(
            iteration,
            [report.trained for report in reports],
            _added_up(reports),
            [*self._unread, *since.untrained],
            since.drops,
            refused=since.given_up["filtered"] // self.group_size,
            late=since.given_up["straggler"] // self.group_size,
            into=self._into(),
        )
        return EndedIteration(
            trained, lambda recorded, queue: self._close(trained, reports, of_values, at, recorded, {**ledger, **queue})
        )

    def _close(
        self,
        trained: TrainedIteration,
        reports: Sequence[TrainReport],
        of_values: Sequence[TrainReport],
        at: float,
        recorded: Recorded,
        counts: Mapping[str, float],
    ) -> None:
        """The metrics of what was trained. counts: of the ledger and the queue, as the iteration ended."""
        iteration = trained.iteration
        self._trained_samples += recorded.samples
        self._note(trained, recorded)
        times = self.timeline.iteration_metrics(iteration)
        if isinstance(self.clock, RealClock) and self.clock.uncertainty_s:
            times["time/clock_uncertainty_s"] = self.clock.uncertainty_s
        seconds, work = times["time/iteration_s"], self.recording.work
        metrics = iteration_metrics(
            iteration,
            self._trained_samples,
            at,
            times,
            throughput_metrics(recorded.samples, recorded.tokens, seconds, self.devices),
            recorded.metrics,
            good_rate(recorded.metrics, recorded.samples / seconds),
            token_metrics(self.tokens),
            self._step_metrics("train", reports),
            _rank_metrics(reports),
            value_metrics(_added_up(of_values)),
            self._step_metrics("critic", of_values),
            {} if work is None else {"throughput/mfu": recorded.flops / (seconds * self.devices * work.peak)},
            counts,
        )
        for listener in self.listeners:
            listener.iteration(metrics)
        if self._parts is not None:
            self._write_parts(self._parts, {iteration: at})
            self.timeline.forget(iteration)

    def _note(self, trained: TrainedIteration, recorded: Recorded) -> None:
        """Note what was recorded of samples. What was in an engine that is gone nobody counts."""
        unread = set(recorded.unread)
        self._unread = [one for one in trained.untrained if one.sample in unread]
        self.tokens = {}
        if self._sampled is not None and not (self.engines or self.restarts):
            self._sampled.update(recorded.sampled)
            generated, begun_again = recorded.generated
            self.tokens = {"generated": generated, "begun_again": begun_again, **self._sampled}
        if self._parts is None:
            self._records += recorded.records
        else:
            self._files, self._digests = recorded.files, recorded.digests

    def after_the_last(self) -> tuple[TrainedIteration, Callable[[Recorded], None]]:
        """Samples that were dropped and are not recorded as the schedule ends, and who is told what was recorded of
        them."""
        since, self._since = self._since, _SinceVersion()
        untrained = [*self._unread, *since.untrained]
        rest = TrainedIteration(self.version, [], {}, untrained, [], refused=0, late=0, into=self._into())
        return rest, partial(self._note, rest)

    def _into(self) -> WrittenSoFar | None:
        return None if self._parts is None else WrittenSoFar(str(self._run.path.absolute()), self._files)

    def state(self) -> RecorderState:
        """The state as the last iteration that ended is written down."""
        last_end = self.timeline.elapsed_window()[1]
        skipped = dict(self._skipped_steps)
        return RecorderState(self._trained_samples, skipped, last_end, list(self.engines), list(self._unread))

    def admitted_groups(self) -> list[AdmittedGroup]:
        """Groups in flight, as of now."""
        first = {row // self.group_size: row for row in sorted(self.ledger.in_flight, reverse=True)}
        told = [self._admitted[row] for _, row in sorted(first.items())]
        return [AdmittedGroup(one.group_id, one.at, one.prompt_tokens) for one in told]

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Take over what was known then; the run's files are as they were."""
        cut, n = checkpoint.cut, self.group_size
        state = cut.recorder
        if checkpoint.elsewhere:  # what was done on other devices is in the other run's timeline
            self.timeline.started_at = state.last_end
        self.ledger, self._sampled = Ledger.restored(cut.ledger), None
        for one in cut.admitted:
            told = _Admitted(one.group, one.at, one.prompt_tokens)
            self._admitted |= dict.fromkeys(range(one.group * n, (one.group + 1) * n), told)
        self._trained_samples, self._skipped_steps = state.trained_samples, dict(state.skipped_steps)
        self.engines += state.engines
        self._unread = [Untrained(*one) for one in state.unread]
        self.timeline.end_iteration(cut.version - 1, state.last_end)

    def _write_parts(self, parts: DriverParts, ended: Mapping[int, float]) -> None:
        """Write all spans and problems that are not there yet."""
        spans, self._spans = self._spans, []
        parts.spans(spans, ended)
        problems, self._problems = self._problems, []
        parts.problems(problems)
        if (now := time.monotonic()) >= self._ledger_due:
            self._run.write_ledger(self.ledger, self.engines)
            self._ledger_due = now + _LEDGER_EVERY_S

    def _step_metrics(self, whose: str, reports: Sequence[TrainReport]) -> dict[str, float]:
        """Metrics of the optimizer's steps, which every rank reports alike; nothing of simulated ones."""
        steps = [step for report in reports[:1] for step in report.steps if step]
        if not steps:
            return {}
        self._skipped_steps[whose] += sum(step["skipped"] for step in steps)
        return {
            f"{whose}/grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
            f"{whose}/learning_rate": steps[-1]["learning_rate"],
            f"{whose}/skipped_steps": self._skipped_steps[whose],
        }

    def samples(self) -> list[SampleRecord]:
        """One record per sample ever admitted, by sample id, of a run without parts."""
        assert self._parts is None, "they are in the parts"
        return sorted([*self._records, *self._left()], key=lambda record: record.sample_id)

    def write(self, run: RunDirectory, texts: Texts | None = None) -> None:
        """Everything but the metrics, which are there already. texts: that are kept. Raises LedgerError if a sample was
        lost."""
        ended: Mapping[int, float] = {}
        if self._parts is None:  # all of it is here; but for the responses, which a simulated run has none of
            self.write_into(run)
            self._spans, ended = self.timeline.spans, self.timeline.iteration_ends
        assert self._parts is not None
        with closing(self._sample_parts(run)) as parts:
            parts.samples([*self._records, *self._left()])
        self._write_parts(self._parts, ended)
        run.write_ledger(self.ledger, self.engines, self.tokens)
        run.note_trained()
        run.merge_parts(texts)

    def _left(self) -> list[SampleRecord]:
        """Records of samples that were dropped, and nobody has read, or that are in flight."""
        in_flight = [self._without_training(row, "in_flight") for row in self.ledger.in_flight]
        return [one.record for one in (*self._unread, *self._since.untrained, *in_flight)]

    def _without_training(self, row: int, fate: Fate, reward: float | None = None) -> Untrained:
        admitted = self._admitted[row]
        tokens = self.recording.decoder.prompt_tokens(admitted.prompt_tokens)
        return Untrained(row, fate, admitted.group_id, admitted.at, tokens, self.version, reward)


def _rank_metrics(reports: Sequence[TrainReport]) -> dict[str, float]:
    """Inequality of the actor's ranks, by tokens: they meet in every micro-batch, where all wait for the one that has
    most. Nothing of one rank by itself."""
    fullest, mean, waited = 0.0, 0.0, 0.0
    for together in zip(*(report.passes for report in reports if report.passes), strict=True):
        tokens = [count for one in together for count in one.tokens]
        if len(tokens) == 1:
            return {}
        most, each = max(tokens), sum(tokens) / len(tokens)
        fullest, mean = fullest + most, mean + each
        waited += (1 - each / most) * sum(one.seconds for one in together) / len(together)
    return {"train/rank_imbalance": fullest / mean, "time/wait_for_slowest_rank_s": waited} if mean else {}


def _added_up(reports: Sequence[TrainReport]) -> dict[str, float]:
    """The sums of all ranks."""
    sums: dict[str, float] = {}
    for report in reports:
        sums = add_diagnostics(sums, report.sums)
    return sums
