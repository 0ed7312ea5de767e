"""Promises of a schedule to a finished run (docs/schedules.md), on either clock: a line for each that was broken."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from harness.config import JobConfig, job_config
from harness.config.compose import make_schedule
from harness.config.job import DEALT_AGAIN
from harness.metrics.run_files import load_config, load_ledger, load_metrics, load_restarts, load_samples, load_timeline
from harness.metrics.samples import FATES, SampleRecord, record_of
from harness.metrics.timeline import Timeline
from harness.workers.dataflow import Numbering
from schedules.capacity import Capacity


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end: what was asked, and what was recorded. counts: samples by fate; restarted: roles that
    were started again; tokens: generated and thrown away, as ledger.json has them; clock_uncertainty_s: by which
    times of other hosts may be off."""

    config: JobConfig
    samples: list[SampleRecord]
    counts: Mapping[str, int]
    timeline: Timeline
    restarted: frozenset[str] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)
    clock_uncertainty_s: float = 0.0

    @property
    def batch(self) -> int:
        """Groups of a batch."""
        return self.config.algorithm.batch_groups

    @property
    def group(self) -> int:
        """Samples of a group."""
        return self.config.algorithm.group_size

    @property
    def trained(self) -> list[SampleRecord]:
        """Samples that were trained."""
        return [sample for sample in self.samples if sample.fate == "trained"]


def read_finished(folder: Path) -> FinishedRun:
    """A finished run from its files."""
    ledger = load_ledger(folder)
    return FinishedRun(
        job_config(load_config(folder)),
        [record_of(row) for row in load_samples(folder).to_pylist()],
        {fate: ledger[fate] for fate in ("admitted", *FATES)},
        load_timeline(folder),
        frozenset(role for restart in load_restarts(folder) for role in restart["roles"]),
        ledger.get("tokens", {}),
        max((metrics.get("time/clock_uncertainty_s", 0.0) for metrics in load_metrics(folder)), default=0.0),
    )


def broken_promises(run: FinishedRun, *, newer: bool = False) -> list[str]:
    """Promises of all schedules, and of this one, that the run broke. newer: as in `lag_problems`."""
    parts = (sample_problems(run), dispatch_problems(run), time_problems(run), lag_problems(run, newer=newer))
    return [problem for part in (*parts, drop_problems(run), token_problems(run)) for problem in part]


def sample_problems(run: FinishedRun) -> Iterator[str]:
    """Each trained once or dropped for a reason, groups whole, batches full, nothing in flight, a closed ledger."""
    ids = [sample.sample_id for sample in run.samples]
    if run.config.refills:
        yield from _unless(len(set(ids)) == len(ids), "a sample is there twice")
    else:
        yield from _unless(ids == list(range(len(ids))), "samples are missing, or there twice, or out of order")
    places = {place_of(sample) for sample in run.samples}
    yield from _unless(places == set(range(len(places))), "a place in the order of data was left out")
    yield from refusal_problems(run)
    per_iteration = Counter(sample.trained_iteration for sample in run.trained)
    for iteration in range(run.config.iterations):
        count, full = per_iteration.pop(iteration, 0), run.config.algorithm.trained_samples
        yield from _unless(count == full, f"iteration {iteration} trained {count} samples of {full}")
    yield from _unless(
        not per_iteration, f"iterations were trained that the run has not: {sorted(map(str, per_iteration))}"
    )
    yield from baseline_problems(run)
    fates: dict[int, set[tuple[str, int | None]]] = {}
    for sample in run.samples:
        if sample.fate != "dropped_baseline":
            fates.setdefault(sample.group_id, set()).add((sample.fate, sample.trained_iteration))
    torn = [group for group, fate in fates.items() if len(fate) > 1]
    yield from _unless(not torn, f"groups were torn: {torn[:8]}")
    sizes = set(Counter(sample.group_id for sample in run.samples).values())
    yield from _unless(sizes == {run.group}, f"groups have {sorted(sizes)} samples, not {run.group}")
    left = {fate: count for fate, count in run.counts.items() if fate != "admitted"}
    admitted = run.counts["admitted"]
    yield from _unless(
        admitted == len(run.samples) == sum(left.values()),
        f"the ledger admitted {admitted} samples, accounts for {sum(left.values())}, and {len(run.samples)} are there",
    )
    found = Counter(sample.fate for sample in run.samples)
    yield from _unless(
        found == {fate: count for fate, count in left.items() if count},
        f"samples are {dict(found)}, and the ledger has {left}",
    )
    yield from _unless(run.counts["in_flight"] == 0, f"{run.counts['in_flight']} samples are in flight at the end")


def baseline_problems(run: FinishedRun) -> Iterator[str]:
    """Problems with baselines: of each trained group the first sample, where asked, and no other ever."""
    found = [sample.sample_id for sample in run.samples if sample.fate == "dropped_baseline"]
    greedy = run.config.algorithm.has_greedy_baseline
    wanted = sorted({sample.group_id * run.group for sample in run.trained} if greedy else [])
    yield from _unless(found == wanted, f"baselines are the samples {found[:8]}..., not {wanted[:8]}...")


def place_of(sample: SampleRecord) -> int:
    """The number of the group that was first dealt to where its group was."""
    return sample.group_id % DEALT_AGAIN


def refusal_problems(run: FinishedRun) -> Iterator[str]:
    """Problems with refusals: of the groups that a place was dealt, one after the other, all but the last were refused
    by a filter, took too long, or had a sample without a score; and samples end early only where they are to."""
    dealt: dict[int, list[tuple[int, str]]] = {}
    for sample in run.samples:
        dealt.setdefault(place_of(sample), []).append((sample.group_id // DEALT_AGAIN, sample.fate))
    for place, fates in dealt.items():
        last = max(deal for deal, _ in fates)
        yield from _unless({deal for deal, _ in fates} == set(range(last + 1)), f"place {place} lacks a deal")
        for deal, fate in fates:
            given_up = run.config.algorithm.spare_groups > 0 and last == 0
            if (fate in ("dropped_filtered", "dropped_straggler", "dropped_failed")) != (deal < last) and not given_up:
                yield f"deal {deal} of {last} of place {place} is {fate}"
    yield from spare_problems(run)
    if not run.config.algorithm.filters:
        refused = run.counts["dropped_filtered"]
        yield from _unless(refused == 0, f"{refused} samples were refused by a filter, and there is none")
    what, late = run.config.engine.on_straggler, run.counts["dropped_straggler"]
    yield from _unless(what == "drop" or late == 0, f"{late} samples took too long, and nothing is dropped for it")
    failed, of_them = run.counts["dropped_failed"], run.config.task.on_failed_score
    yield from _unless(of_them == "redeal" or failed == 0, f"{failed} samples are dropped as failed, and none is to be")
    cut = [sample.sample_id for sample in run.trained if sample.finish_reason == "cut"]
    yield from _unless(what == "cut" or not cut, f"samples were cut and trained: {cut[:8]}")


def spare_problems(run: FinishedRun) -> Iterator[str]:
    """Problems with spares: of each batch as many groups as it has spares are given up: refused ones, or where none was
    dealt again others, which come last."""
    algorithm, left = run.config.algorithm, run.counts["dropped_spare"]
    if not algorithm.spare_groups:
        yield from _unless(left == 0, f"{left} samples were not needed, and there are no spares")
        return
    kept = {place_of(sample) for sample in run.trained}
    spare = {place_of(sample) for sample in run.samples if sample.fate == "dropped_spare"}
    again = {place_of(sample) for sample in run.samples if sample.group_id >= DEALT_AGAIN}
    for batch in range(run.config.iterations):
        candidates = set(range(batch * algorithm.admitted_groups, (batch + 1) * algorithm.admitted_groups))
        its, unneeded, dealt = kept & candidates, spare & candidates, again & candidates
        yield from _unless(len(its) == run.batch, f"batch {batch} has {len(its)} groups of {run.batch}")
        yield from _unless(dealt <= its, f"places of batch {batch} were dealt again and given up: {dealt - its}")
        early = {place for place in unneeded if place < max(its, default=0)}
        yield from _unless(not early, f"batch {batch} had no need of {early}, and was filled by later ones")
        yield from _unless(not (dealt and unneeded), f"batch {batch} dealt again, and had spares: {unneeded}")


def dispatch_problems(run: FinishedRun) -> Iterator[str]:
    """No engine started a group before its weights allowed it; drops move the limits on by what was dropped."""
    capacity = Capacity(run.batch, make_schedule(run.config).eta)
    numbering = Numbering(run.batch, run.config.algorithm.spare_groups)
    dropped = run.counts["dropped_stale"] // run.group
    for sample in run.trained:
        version, place = sample.version_first, place_of(sample)
        if version is None or place >= numbering.of(capacity.limit(version) + dropped):
            yield f"sample {sample.sample_id} of group {place} was started by version {version}, which is too old"


def time_problems(run: FinishedRun) -> Iterator[str]:
    """A sample is admitted, started, finished and trained, in this order, as far as the clocks of two hosts tell."""
    for sample in run.trained:
        times = (sample.admitted_at, sample.started_at, sample.finished_at, sample.trained_at)
        known = [time for time in times if time is not None]
        in_order = all(later - sooner >= -2 * run.clock_uncertainty_s for sooner, later in combinations(known, 2))
        yield from _unless(len(known) == len(times) and in_order, f"sample {sample.sample_id} has the times {times}")


def lag_problems(run: FinishedRun, *, newer: bool = False) -> Iterator[str]:
    """Every token's lag is within what the schedule says: the ends of each sample's range, which hold all between them.
    newer: a sample may have newer versions than its schedule has for it; so may, always, those of an engine that was
    started again, which gets the weights that training has come to."""
    schedule, most = make_schedule(run.config), run.config.algorithm.max_token_staleness
    for sample in run.trained:
        iteration, first, last = sample.trained_iteration, sample.version_first, sample.version_last
        assert iteration is not None and first is not None and last is not None, "of a trained sample"
        least, worst = schedule.lag_bounds(iteration)
        if newer or f"rollout[{sample.engine}]" in run.restarted:
            least = 0
        if not least <= iteration - last <= iteration - first <= worst:
            yield (
                f"sample {sample.sample_id}, trained in iteration {iteration}, is of versions {first} to {last}: a lag "
                f"outside of {least} to {worst}"
            )
        too_old = most is not None and iteration - first > most
        if bool(sample.stale_tokens) != too_old:
            yield f"sample {sample.sample_id} has a lag of {iteration - first}, and {sample.stale_tokens} masked tokens"
        if schedule.order == "fifo" and iteration != place_of(sample) // run.config.algorithm.admitted_groups:
            yield f"group {place_of(sample)} was trained in iteration {iteration}, out of order"


def token_problems(run: FinishedRun) -> Iterator[str]:
    """Tokens that engines generated are those of responses, each once, and what was thrown away as samples began
    again; of a run whose engines are known to the end."""
    if run.tokens:
        generated, again = run.tokens["generated"], run.tokens["begun_again"]
        of_responses = sum(sample.response_tokens for sample in run.samples)
        yield from _unless(
            generated == of_responses + again,
            f"{generated} tokens were generated, {again} thrown away, and {of_responses} are in responses",
        )


def drop_problems(run: FinishedRun) -> Iterator[str]:
    """Whole groups, and only where a schedule may: in completion order."""
    dropped, schedule = run.counts["dropped_stale"], make_schedule(run.config)
    yield from _unless(dropped % run.group == 0, f"{dropped} samples were dropped, which are no whole groups")
    if schedule.order == "fifo" or getattr(schedule, "on_stale", None) == "wait":
        yield from _unless(dropped == 0, f"{dropped} samples were dropped as stale, which this schedule does not do")


def _unless(holds: bool, problem: str) -> Iterator[str]:
    if not holds:
        yield problem
