"""What `engines.simulated.decoding` jumps over, token by token: slow, and simple enough to believe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engines.simulated.decoding import SimulatedSample
from harness.config import CostConfig

SAME = 1e-9  # seconds: nearer than this is the same moment, rounded


@dataclass
class Sample:
    """One sample; `versions` has an entry for each token that it has sampled."""

    sample_id: int
    prompt: int
    length: int
    versions: list[int] = field(default_factory=list)
    started_at: float | None = None
    finished_at: float | None = None
    cached: bool = False
    preempted: bool = False

    @property
    def context(self) -> int:
        return self.prompt + len(self.versions)

    @property
    def runs(self) -> list[tuple[int, int]]:
        return [(version, self.versions.count(version)) for version in sorted(set(self.versions))]

    def simulated(self) -> SimulatedSample:
        """The same for the simulator."""
        left = self.length - len(self.versions)
        return SimulatedSample(self.sample_id, self.context, left, self.runs, self.started_at)


class TokenByToken:
    """The same calls as `Decoding`. Between two steps it waits for time to pass before it begins the next."""

    def __init__(self, cost: CostConfig, *, slots: int) -> None:
        self.cost, self.slots = cost, slots
        self.rows: list[Sample] = []
        self.waiting: list[Sample] = []
        self.finished: list[Sample] = []
        self.preemptions = self.recomputed_tokens = self.version = 0
        self.admitting, self.stopped, self.stopping = True, False, False
        self.at = 0.0  # the boundary between two steps that was last
        self.end: float | None = None  # of the step that is under way

    @property
    def drained(self) -> bool:
        return not self.rows and not any(sample.preempted for sample in self.waiting)

    def advance(self, now: float) -> None:
        while not self.stopped:
            if self.end is None and self.at < now - SAME:
                self.begin_step()
            if self.end is None or self.end > now + SAME:
                break
            self.end_step(self.end)

    def run_until(self, happened: Callable[[], bool], now: float) -> float:
        """When, from now on, it has happened."""
        while not happened():
            if self.end is None:
                self.begin_step()
            assert self.end is not None, "nothing runs"
            self.end_step(self.end)
        return max(self.at, now)

    def submit(self, samples: list[Sample], now: float) -> None:
        self.advance(now)
        self.idle_until(now)
        self.waiting += samples
        self.prepare()

    def stop(self, now: float) -> None:
        self.advance(now)
        self.idle_until(now)
        self.admitting, self.stopping, self.stopped = False, True, self.end is None

    def drain(self, now: float) -> None:
        self.resume(now, admitting=False)

    def resume(self, now: float, *, admitting: bool = True) -> None:
        self.advance(now)
        if self.stopped:
            self.at = now
        self.idle_until(now)
        self.admitting, self.stopping, self.stopped = admitting, False, False
        self.prepare()

    def drop_cache(self, now: float) -> None:
        """Before the next step that begins."""
        self.advance(now)
        self.idle_until(now)
        for sample in self.rows:
            sample.cached = False

    def load(self, version: int) -> None:
        self.version = version

    def abort(self) -> list[Sample]:
        aborted = [*self.rows, *self.waiting]
        self.rows, self.waiting = [], []
        for sample in aborted:
            sample.cached = sample.preempted = False
            sample.started_at = sample.started_at if sample.versions else None
        return aborted

    def idle_until(self, now: float) -> None:
        if not self.rows and self.end is None:
            self.at = max(self.at, now)

    def prepare(self) -> None:
        """Between two steps: make the next one fit, then fill it up."""
        if self.stopped or self.end is not None:
            return
        room = float("inf") if self.cost.kv_tokens is None else self.cost.kv_tokens
        while sum(sample.context + 1 for sample in self.rows) > room:
            sample = self.rows.pop()
            sample.cached, sample.preempted = False, True
            self.waiting.insert(0, sample)
            self.preemptions += 1
        while self.waiting and len(self.rows) < self.slots and (self.admitting or self.waiting[0].preempted):
            if sum(sample.context + 1 for sample in [*self.rows, self.waiting[0]]) > room:
                break
            sample = self.waiting.pop(0)
            sample.started_at = self.at if sample.started_at is None else sample.started_at
            self.recomputed_tokens += sample.context if sample.preempted else 0
            sample.preempted = False
            self.rows.append(sample)

    def begin_step(self) -> None:
        if not self.rows:
            return
        cost, end = self.cost, self.at
        for sample in self.rows:
            if not sample.cached:
                end += sample.context * cost.prefill_s_per_token + sample.context**2 * cost.prefill_s_per_pair
            sample.cached = True
        experts_s = cost.decode_experts_s * (1 - (1 - cost.expert_share) ** len(self.rows))
        products_s = len(self.rows) * cost.decode_step_s_per_sample
        end += cost.decode_step_s + max(cost.decode_weights_s + experts_s, products_s)
        self.end = end + sum(sample.context for sample in self.rows) * cost.decode_s_per_cached_token

    def end_step(self, end: float) -> None:
        self.at, self.end = end, None
        for sample in self.rows:
            sample.versions.append(self.version)
        for sample in [sample for sample in self.rows if len(sample.versions) == sample.length]:
            self.rows.remove(sample)
            sample.finished_at = end
            self.finished.append(sample)
        self.stopped = self.stopping
        self.prepare()
