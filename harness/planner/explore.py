"""All ways to use the devices under one schedule: enumerate, drop what does not fit, bound, and try the likeliest: the
fast event model, for a few iterations, on a part of each, then on the whole of the best."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.checks.defaults import holds_fitted, plan_fitted
from harness.checks.layout import device_roles
from harness.config import ConfigError, CostConfig, JobConfig
from harness.config.compose import make_schedule
from harness.config.machine import Machine, described
from harness.config.placement import resolve_split
from harness.cost_model.job_cost import check_memory, simulated_cost
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.transfer import sender_links
from harness.driver.build import fair_share
from harness.driver.event_model import fast_steps
from harness.planner.candidates import Candidate, grid
from harness.planner.period import hindered, in_turn, period, runs_on
from harness.planner.search import Prospect, SearchResult, search
from harness.planner.work import LengthSamples, PoolLayout, least_work, likely_work
from schedules import Schedule
from schedules.capacity import Capacity
from schedules.k_step_off import KStepOff

USUAL_TENSOR = (1, 2, 4)

_LEAST_SAMPLES = 1024  # measured over as many iterations as have so many
_LEAST_ITERATIONS = 2

_PART = 1024
"""Samples of a batch, at least, of a part that a candidate is looked at by. Of 7B on 64 devices the fastest whole, or
one within 1 % of it, was among the two fastest parts of every schedule."""


@dataclass(frozen=True)
class Effort:
    """The limits of a search: simulated samples (of all trials together, and as many of all parts), and trials; parts:
    candidates whose parts decide which are tried first, 0 where what seems likely does. Where phases come in turn as
    many more are tried instead."""

    samples: int
    trials: int
    parts: int = 0


@dataclass(frozen=True)
class TrialResult:
    """The behaviour of a candidate in the long run. Lags in iterations, idle as shares of the time, exposed_s the
    seconds of an iteration in which a device waits for weights, longest_s of the response that took longest. bound:
    seconds that no run takes less than; fraction_of_bound: the busiest pool's work over the time."""

    seconds: float
    bound: float
    samples_per_s: float
    tokens_per_s_per_device: float
    lag_mean: float
    lag_worst: float
    rollout_idle: float
    training_idle: float
    exposed_s: float
    longest_s: float
    fraction_of_bound: float


@dataclass(frozen=True)
class Window:
    """Iterations of a trial: the first are left out, for the pipeline to fill; the last, because it empties."""

    warmup: int
    measured: int
    iterations: int


@dataclass(frozen=True)
class Exploration:
    """The result of searching one schedule with its options. unfit: candidates that memory cannot hold. parts: of which
    a part was simulated. refused: those that a real run would not begin, of all that it was asked for, and why the last
    of them. only_simulated: why it would begin none of all, so that these are of a simulation only; "" where some
    would."""

    config: JobConfig
    candidates: int
    unfit: int
    found: SearchResult[Candidate, TrialResult] | None
    parts: int = 0
    refused: int = 0
    refusal: str = ""
    only_simulated: str = ""

    @property
    def name(self) -> str:
        """The schedule's name, with its staleness where that is an option."""
        options = self.config.schedule.options
        return self.config.schedule.name + (f" ({options['max_staleness']:g})" if "max_staleness" in options else "")


Costs = dict[tuple[str, tuple[str, ...], Candidate], CostConfig | None]
"""Costs of candidates, by transport and roles: of one job, under whatever schedule."""


def explore(
    config: JobConfig, fixed: Collection[str], seed: int, effort: Effort, known: Costs | None = None
) -> Exploration:
    """The best of `config`'s schedule on its devices. fixed: settings that are not searched; known: costs that another
    schedule's exploration found, and to which this one adds. `found` is None where nothing fits. At least one candidate
    is tried, whatever the effort allows."""
    door, known = _Door(config, fixed), {} if known is None else known
    tried = _tried(config, _candidates(replace(config, backend="real"), fixed), seed, effort, door.opens, known)
    if config.backend == "real" or tried.found is not None:
        return replace(tried, refused=len(door.refused), refusal=door.refusal)
    # what nobody can run yet may still be asked for: first of all what devices would hold
    for opens in (door.holds, lambda candidate: True):
        tried = _tried(config, _candidates(config, fixed), seed, effort, opens, known)
        if tried.found is not None:
            break
    return replace(tried, only_simulated=door.refusal)


def _candidates(config: JobConfig, fixed: Collection[str]) -> list[Candidate]:
    return grid(config, make_schedule(config), bool(scoring_roles(device_roles(config))), fixed)


def _tried(
    config: JobConfig,
    candidates: Sequence[Candidate],
    seed: int,
    effort: Effort,
    opens: Callable[[Candidate], bool],
    known: Costs,
) -> Exploration:
    """The exploration of these candidates. opens: whether one may be run."""
    schedule, roles = make_schedule(config), device_roles(config)
    batch_samples = config.algorithm.batch_samples
    trial_window = window(schedule, batch_samples)
    lengths = LengthSamples.of(config, seed, trial_window.iterations)
    prospects = usual_first(list(prospects_of(config, schedule, candidates, lengths, known)), opens)
    bounds = {prospect.candidate: prospect.bound for prospect in prospects}

    def run(candidate: Candidate) -> TrialResult:
        return trial(candidate.apply(config, roles), trial_window, seed, bound=bounds[candidate])

    def run_part(candidate: Candidate) -> TrialResult:
        job = part_of(candidate.apply(config, roles), candidate, _PART)[1]
        return trial(job, window(schedule, job.algorithm.batch_samples), seed, bound=bounds[candidate])

    of_parts: dict[Candidate, float] = {}
    # In turn nothing hinders what else goes on, and parts have fewer engines, of which one is the last.
    parts, trials = (0, effort.parts + effort.trials) if in_turn(schedule) else (effort.parts, effort.trials)
    if prospects and parts:
        likeliest = sorted(prospects, key=lambda prospect: prospect.likely)[:parts]
        times = min(parts_of(one.candidate.apply(config, roles), one.candidate, _PART) for one in likeliest)
        its = batch_samples // times * window(schedule, batch_samples // times).iterations
        looked_at = search(prospects, run_part, max(1, min(parts, effort.samples // its)), opens)
        of_parts = {candidate: outcome.seconds for candidate, outcome in looked_at.tried}
        prospects = [
            replace(one, first=one.candidate in of_parts, likely=of_parts.get(one.candidate, one.likely))
            for one in prospects
        ]
    budget = max(1, min(trials, effort.samples // (batch_samples * trial_window.iterations)))
    found = search(prospects, run, budget, opens) if prospects else None
    found = found if found is not None and found.tried else None
    return Exploration(config, len(candidates), len(candidates) - len(prospects), found, len(of_parts))


def usual_first(
    prospects: Sequence[Prospect[Candidate]], opens: Callable[[Candidate], bool]
) -> list[Prospect[Candidate]]:
    """The same, of which those that users would try are run first: training on half of the devices, on all where they
    are shared, or as near to that as there is and `opens`, layers shared by 1, 2, 4 and not cut, and nothing apart for
    scoring; and the likeliest with engines of each size that none of these has, since what is likely knows little of
    how long trainers wait for the last of them."""
    first = set()
    for tensor in USUAL_TENSOR:
        usual = [
            prospect
            for prospect in prospects
            if (one := prospect.candidate).tensor_parallel == tensor and one.pipeline_parallel == 1 and not one.scoring
        ]
        usual.sort(key=lambda p: (_from_half(p.candidate), p.likely))
        first |= {next((one.candidate for one in usual if opens(one.candidate)), None)}
    has = {one.engine_parallel for one in first if one is not None}
    for size in {prospect.candidate.engine_parallel for prospect in prospects} - has:
        its = (prospect for prospect in prospects if prospect.candidate.engine_parallel == size)
        likeliest = sorted(its, key=lambda prospect: prospect.likely)
        first |= {next((one.candidate for one in likeliest if opens(one.candidate)), None)}
    return [replace(prospect, first=prospect.candidate in first) for prospect in prospects]


def _from_half(candidate: Candidate) -> float:
    return -candidate.actor if candidate.shared else abs(candidate.actor - candidate.devices / 2)


class _Door:
    """The checks of `make bench BACKEND=real` on the devices that are planned for. fixed: the user's settings."""

    def __init__(self, config: JobConfig, fixed: Collection[str]) -> None:
        self._config = replace(config, backend="real")
        self._schedule, self._roles = make_schedule(config), device_roles(config)
        self._fixed = frozenset(fixed) | {"cluster.devices"}
        self._machine = described(config.device, config.cluster.devices)
        self._asked: dict[Candidate, bool] = {}
        self.refusal = ""

    @property
    def refused(self) -> list[Candidate]:
        """Candidates that a real run would not begin."""
        return [candidate for candidate, opened in self._asked.items() if not opened]

    def opens(self, candidate: Candidate) -> bool:
        """Whether a real run would begin this candidate."""
        if candidate not in self._asked:
            self._asked[candidate] = self._ask(candidate)
        return self._asked[candidate]

    def _ask(self, candidate: Candidate) -> bool:
        try:
            plan_fitted(*self._job(candidate))
        except ConfigError as error:
            self.refusal = str(error)
            return False
        return True

    def holds(self, candidate: Candidate) -> bool:
        """Whether the devices would hold a real run of this candidate."""
        try:
            return holds_fitted(*self._job(candidate))
        except ConfigError:
            return False

    def _job(self, candidate: Candidate) -> tuple[JobConfig, Schedule, frozenset[str], Machine]:
        given = self._fixed | candidate.settings(self._roles).keys()
        return candidate.apply(self._config, self._roles), self._schedule, given, self._machine


def prospects_of(
    config: JobConfig, schedule: Schedule, candidates: Sequence[Candidate], lengths: LengthSamples, known: Costs
) -> Iterator[Prospect[Candidate]]:
    """Candidates that fit memory, with the time that they need at least, and probably. known: gets their costs."""
    roles, streaming = device_roles(config), runs_on(schedule)
    for candidate in candidates:
        key = schedule.transport, roles, candidate
        if key not in known:
            known[key] = cost_of(config, schedule, candidate, roles)
        if (cost := known[key]) is not None:
            pools = pool_layout(config, schedule, candidate, len(scoring_roles(roles)))
            least = least_work(cost, pools, lengths)
            likely = likely_work(cost, pools, lengths, streaming=streaming)
            yield Prospect(candidate, period(schedule, least), period(schedule, likely, hindered))


def scoring_roles(roles: tuple[str, ...]) -> set[str]:
    """The roles that score, among these."""
    return {"actor_fwd", "reference"} & set(roles)


def pool_layout(config: JobConfig, schedule: Schedule, candidate: Candidate, stages: int) -> PoolLayout:
    """Workers of a candidate, as the run will make them."""
    algorithm = config.algorithm
    models = 1 + algorithm.has_critic  # that are trained, on the same devices
    scorers = (candidate.scoring or candidate.actor) // candidate.rank_devices
    rows = candidate.micro_groups * algorithm.group_size
    at_once = schedule.k if isinstance(schedule, KStepOff) else 1.0 + schedule.eta
    share = fair_share(algorithm, candidate.engines, batches=at_once)
    return PoolLayout(
        engines=candidate.engines,
        running=config.engine.slots if schedule.lends else min(config.engine.slots, share),
        ranks=candidate.ranks,
        rows=min(algorithm.batch_samples, rows * candidate.ranks),
        scorers=scorers,
        scored_rows=min(algorithm.batch_samples, rows * scorers),
        stages=stages,
        apart=candidate.scoring > 0,
        # the first group of a batch b that version b - ceil(eta) may not start
        fresh_from=Capacity(algorithm.batch_groups, schedule.eta).limit(-math.ceil(schedule.eta)),
        together=schedule.cycle,
        transport=schedule.transport,
        sender_links=sender_links(config, schedule.transport, candidate.actor, candidate.engine_parallel),
        epochs=algorithm.epochs * models,
        steps=algorithm.steps_per_version * models,
        freezes=algorithm.freezes_proximal,
        lent=candidate.actor // candidate.engine_parallel if schedule.lends else 0,
    )


def cost_of(config: JobConfig, schedule: Schedule, candidate: Candidate, roles: tuple[str, ...]) -> CostConfig | None:
    """Costs of a candidate's workers; None where they do not fit."""
    job = candidate.apply(config, roles)
    placement = resolve_split(job.schedule.split, job.cluster.devices, roles)
    try:
        check_memory(job, placement, schedule.transport)
        return simulated_cost(job, placement)
    except ConfigError:
        return None


def parts_of(job: JobConfig, candidate: Candidate, least: int) -> int:
    """How many equal parts a candidate's job has at most, of `least` samples or more each: of whole engines, as many as
    the schedule needs, and of whole micro-batches."""
    algorithm, ranks, schedule = job.algorithm, candidate.ranks, make_schedule(job)
    most = min(algorithm.batch_samples // least, candidate.engines // schedule.least_engines, 2 * ranks)
    both = math.gcd(candidate.engines, ranks) if candidate.shared or schedule.lends else candidate.engines
    micro_batches = algorithm.mini_batch_groups // candidate.micro_groups
    every = (n for n in range(1, max(1, most) + 1) if both % n == 0)
    return max(n for n in every if micro_batches % (n * max(1, ranks // n)) == 0)


def part_of(
    job: JobConfig, candidate: Candidate, least: int, cost: CostConfig | None = None
) -> tuple[Candidate, JobConfig]:
    """A candidate on a part of its engines, with as large a part of its batch, at the costs of the whole, or these.
    Ranks are as many as come out, and one at least; together they are as fast as that part of all."""
    roles, times = device_roles(job), parts_of(job, candidate, least)
    cost = cost or simulated_cost(job, resolve_split(job.schedule.split, job.cluster.devices, roles))
    ranks, scorers = candidate.ranks, candidate.scoring // candidate.rank_devices
    its, its_scorers = max(1, ranks // times), max(1, scorers // times) if scorers else 0
    train = its * times / ranks
    score = its_scorers * times / scorers if scorers else train
    part = replace(
        candidate,
        rollout=candidate.rollout // times,
        actor=its * candidate.rank_devices,
        scoring=its_scorers * candidate.rank_devices,
    )
    config = part.apply(job, roles)
    return part, replace(
        config,
        cluster=replace(job.cluster, devices=part.devices),
        algorithm=replace(config.algorithm, batch_groups=job.algorithm.batch_groups // times),
        cost=replace(
            cost,
            train_s_per_token=train * cost.train_s_per_token,
            train_s_per_pair=train * cost.train_s_per_pair,
            log_prob_s_per_token=score * cost.log_prob_s_per_token,
            log_prob_s_per_pair=score * cost.log_prob_s_per_pair,
        ),
    )


def window(schedule: Schedule, batch_samples: int) -> Window:
    """Iterations to simulate of a schedule that may be `eta` iterations ahead: fill, measure whole cycles, empty."""
    ahead, cycle = math.ceil(schedule.eta), schedule.cycle
    least = max(_LEAST_ITERATIONS, math.ceil(_LEAST_SAMPLES / batch_samples))
    warmup, measured = (cycle * math.ceil(n / cycle) for n in (1 + ahead, least))
    return Window(warmup, measured, warmup + measured + ahead)


def trial(config: JobConfig, window: Window, seed: int, *, bound: float) -> TrialResult:
    """Pass through `config` with the event model. Where what was made before the window lets it pass in less than
    `bound`, the bound is taken: in the long run nothing is made before."""
    config = replace(config, iterations=window.iterations, warmup_iterations=window.warmup)
    end = window.warmup + window.measured
    found, measured = fast_steps(config, seed, end), slice(window.warmup, end)
    iteration_s = float(found.seconds[measured].mean())
    seconds, n = max(bound, iteration_s), config.algorithm.batch_samples
    drawn = ResponseLengths.of_job(config, seed).batches(window.warmup, window.measured, n)
    tokens = float(drawn.mean() + config.cost.prompt_tokens) * n
    busy = {role: float(its[measured].mean()) / iteration_s for role, its in found.busy_s.items()}
    return TrialResult(
        seconds=seconds,
        bound=bound,
        samples_per_s=config.algorithm.trained_samples / seconds,
        tokens_per_s_per_device=tokens / seconds / config.cluster.devices,
        lag_mean=float(found.lag_mean[measured].mean()),
        lag_worst=float(found.lag_worst[measured].max()),
        rollout_idle=1 - busy["rollout"],
        training_idle=1 - busy["actor"],
        exposed_s=float(found.exposed_s[measured].mean()),
        longest_s=float(found.longest_s[measured].max()),
        fraction_of_bound=max(busy.values()),
    )
