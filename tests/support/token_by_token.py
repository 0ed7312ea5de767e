"""What `engines.simulated.decoding` jumps over, token by token: slow, and simple enough to believe."""

import math
from dataclasses import dataclass, field

from engines.simulated.decoding import SimulatedSample
from harness.config import CostConfig

GROUP = 3  # samples with a prompt in common
SAME = 1e-9  # seconds: nearer than this is the same moment, rounded


@dataclass
class Sample:
    """One sample; `versions` has an entry for each token that it has sampled."""

    sample_id: int
    prompt: int
    length: int
    versions: list[int] = field(default_factory=list)
    started_at: float | None = None
    first_token_at: float = math.nan
    finished_at: float | None = None
    begun: bool = False
    shared: int = 0
    kept: int = 0

    @property
    def context(self) -> int:
        return self.prompt + len(self.versions)

    @property
    def runs(self) -> list[tuple[int, int]]:
        return [(version, self.versions.count(version)) for version in sorted(set(self.versions))]

    @property
    def times(self) -> tuple[float | None, ...]:
        return self.started_at, self.first_token_at, self.finished_at

    def simulated(self) -> SimulatedSample:
        """The same for the simulator."""
        left = self.length - len(self.versions)
        return SimulatedSample(
            self.sample_id, self.context, left, self.runs, self.started_at, self.first_token_at,
            group=self.sample_id // GROUP, shared=self.shared,
        )  # fmt: skip


class TokenByToken:
    """The same calls as `Decoding`. Between two steps it waits for time to pass before it begins the next."""

    def __init__(self, cost: CostConfig, *, slots: int) -> None:
        self.cost, self.slots = cost, slots
        self.rows: list[Sample] = []
        self.waiting: list[Sample] = []
        self.finished: list[Sample] = []
        self.preemptions = self.recomputed_tokens = self.version = 0
        self.admitting, self.stopped, self.stopping, self.cold = True, False, False, False
        self.left: float | None = None  # tokens that the next step may have besides; None: not asked yet
        self.prefilled: list[tuple[int, int]] = []  # for the next step: from so many tokens of a context to so many
        self.at = 0.0  # the boundary between two steps that was last
        self.end: float | None = None  # of the step that is under way

    @property
    def drained(self) -> bool:
        return not self.rows and not any(sample.begun for sample in self.waiting)

    def advance(self, now: float) -> None:
        while not self.stopped:
            if self.end is None and self.at < now - SAME:
                self.begin_step()
            if self.end is None or self.end > now + SAME:
                break
            self.end_step(self.end)

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
        for sample in self.waiting:
            sample.kept = 0
        self.cold = True
        self.prepare()

    def load(self, version: int) -> None:
        self.version = version

    def abort(self) -> list[Sample]:
        aborted = [*self.rows, *self.waiting]
        self.rows, self.waiting, self.prefilled, self.left = [], [], [], None
        for sample in aborted:
            sample.begun, sample.kept = False, 0
            sample.started_at = sample.started_at if sample.versions else None
        return aborted

    def idle_until(self, now: float) -> None:
        if not self.rows and self.end is None:
            self.at = max(self.at, now)

    def prepare(self) -> None:
        """Between two steps: make the next one fit, then fill it up."""
        if self.stopped or self.end is not None:
            return
        while self.held(self.rows) > self.room:
            sample = self.rows.pop()
            sample.begun, sample.kept = True, 0
            self.waiting.insert(0, sample)
            self.preemptions += 1
            self.recomputed_tokens += sample.context
        if self.cold:
            for sample in self.rows:
                sample.begun, sample.kept = True, 0
            self.rows, self.waiting, self.cold, self.prefilled = [], self.rows + self.waiting, False, []
            self.left = None
        tokens = float("inf") if self.cost.step_tokens is None else self.cost.step_tokens
        if self.left is None:
            self.left = tokens - len(self.rows)
        while self.waiting and len(self.rows) < self.slots and self.left > 0:
            sample = self.waiting[0]
            if not (self.admitting or sample.begun) or self.held([*self.rows, sample]) > self.room:
                break
            sample.started_at = self.at if sample.started_at is None else sample.started_at
            beside = {row.sample_id // GROUP for row in self.rows}
            if self.cost.prefix_caching and sample.sample_id // GROUP in beside:
                sample.kept = max(sample.kept, min(sample.shared, sample.context - 1))
            until = min(sample.context, sample.kept + self.left) if self.rows else sample.context
            self.left -= until - sample.kept
            self.prefilled.append((sample.kept, int(until)))
            sample.kept, sample.begun = int(until), until < sample.context
            if not sample.begun:
                self.rows.append(self.waiting.pop(0))
            else:
                break

    @property
    def room(self) -> float:
        return float("inf") if self.cost.kv_tokens is None else self.cost.kv_tokens

    def held(self, samples: list[Sample]) -> int:
        """Tokens in the cache after a step of these samples."""
        shared = {sample.sample_id // GROUP: sample.shared for sample in samples} if self.cost.prefix_caching else {}
        own = sum(sample.context + 1 - (sample.shared if shared else 0) for sample in samples)
        return own + sum(shared.values())

    def begin_step(self) -> None:
        if not self.rows:
            return
        cost, samples = self.cost, len(self.rows)
        prefill_s = sum(
            (until - begun) * cost.prefill_s_per_token + (until**2 - begun**2) * cost.prefill_s_per_pair
            for begun, until in self.prefilled
        )
        tokens = sum(until - begun for begun, until in self.prefilled)
        products_s, cached = samples * cost.decode_step_s_per_sample, sum(sample.context for sample in self.rows)
        end = self.at + cost.decode_step_s + cached * cost.decode_s_per_cached_token
        if cost.step_tokens is not None:
            end += max(self.weights_s(samples + tokens), products_s + prefill_s)
        else:
            end += prefill_s + max(self.weights_s(samples), products_s)
        self.end, self.prefilled = end, []

    def weights_s(self, tokens: int) -> float:
        return self.cost.decode_weights_s + self.cost.decode_experts_s * (1 - (1 - self.cost.expert_share) ** tokens)

    def end_step(self, end: float) -> None:
        self.at, self.end, self.left = end, None, None
        for sample in self.rows:
            sample.versions.append(self.version)
            sample.first_token_at = end if len(sample.versions) == 1 else sample.first_token_at
        for sample in [sample for sample in self.rows if len(sample.versions) == sample.length]:
            self.rows.remove(sample)
            sample.finished_at = end
            self.finished.append(sample)
        self.stopped = self.stopping
        self.prepare()
