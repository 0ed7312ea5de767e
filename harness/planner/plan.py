"""A plan: which jobs it is for, every schedule explored on the same devices, and the command that runs the best."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.checks.layout import device_roles
from harness.config import ConfigError, CostConfig, JobConfig, RooflineConfig
from harness.config.compose import EXPERIMENTS, as_arguments, compose_job, make_schedule, read_settings
from harness.config.registries import SCHEDULES
from harness.driver.event_model import difference
from harness.planner.candidates import STALENESS, Candidate
from harness.planner.explore import Costs, Effort, Exploration, TrialResult, explore, part_of
from harness.planner.search import front
from harness.rpc.children import parallel_as_completed

SEED = 0

WORTH = 0.01  # a share of throughput that is not worth any lag
AS_ALONE = "cost.colocated_train_factor"
"""The setting of what sharing devices costs training, which one system published: in plans it is 1."""

DEFAULTS: dict[str, str] = read_settings(EXPERIMENTS / "published.yaml")
"""Settings of a plan where nothing else is said."""

EFFORT = Effort(samples=450_000, trials=2, parts=12)

CHECKED = 512
"""Samples of a batch, at least, of the part of the best in which the event model is held to the schedule's own file,
which takes seconds for thousands of samples."""

ITERATIONS = 20  # iterations of the run that is proposed: enough to be in a steady state for most of it
_PROCESSES = 2

_TIMEOUT_S = 3600.0  # longest wait for all of them
_STALENESS = "max_staleness"

_GIVEN = frozenset(
    {"engine.tensor_parallel", "training.tensor_parallel", "training.pipeline_parallel", "training.expert_parallel"}
)
"""Costs that are given are those of one layout: no other is searched."""

_Task = tuple[JobConfig, frozenset[str], int, Effort, Costs]

Progress = Callable[[int, int, str], None]
"""Is told how many schedules, each staleness by itself, are explored, of how many, and the name of the last."""


@dataclass(frozen=True)
class Choice:
    """A candidate that was tried, and what came out."""

    name: str
    config: JobConfig
    candidate: Candidate
    outcome: TrialResult

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self.config.schedule.name


@dataclass(frozen=True)
class Plan:
    """A plan. explorations: one for each schedule, and for each staleness of a schedule that takes one."""

    explorations: Sequence[Exploration]

    @cached_property
    def best_of_each(self) -> list[Choice]:
        """The fastest of every schedule that fits, fastest first."""
        best: dict[str, Choice] = {}
        for choice in self.choices:
            best.setdefault(choice.schedule, choice)
        return list(best.values())

    @cached_property
    def choices(self) -> list[Choice]:
        """All choices that were tried, fastest first; of equals, the one that lags less."""
        every = [
            Choice(exploration.name, exploration.config, candidate, outcome)
            for exploration in self.explorations
            if exploration.found is not None
            for candidate, outcome in exploration.found.tried
        ]
        return sorted(every, key=lambda choice: (choice.outcome.seconds, choice.outcome.lag_mean))

    @cached_property
    def fastest_of_each(self) -> list[Choice]:
        """The fastest choice of every schedule and staleness, fastest first."""
        fastest: dict[str, Choice] = {}
        for choice in self.choices:
            fastest.setdefault(choice.name, choice)
        return list(fastest.values())

    @cached_property
    def front(self) -> list[Choice]:
        """Throughput against mean lag, the fastest of each schedule and staleness: what nothing else beats in both. The
        fastest of all is the last of them."""
        return front(self.fastest_of_each, rate, lambda choice: choice.outcome.lag_mean)

    @cached_property
    def best(self) -> Choice:
        """The one that lags least of those that are as good as the fastest."""
        enough = rate(self.choices[0]) * (1 - WORTH)
        good = [choice for choice in self.choices if rate(choice) >= enough]
        return min(good, key=lambda choice: choice.outcome.lag_mean)

    def title(self, choice: Choice) -> str:
        """Name a choice, and say that it is proposed where the best of its schedule is another one."""
        apart = choice is self.best and all(choice is not one for one in self.best_of_each)
        return f"{choice.name}, proposed" if apart else choice.name

    @cached_property
    def runner_up(self) -> Choice | None:
        """The fastest of another schedule, or the next of the same where only one was planned."""
        others = [choice for choice in self.best_of_each if choice.schedule != self.best.schedule]
        others = others or [choice for choice in self.choices if choice is not self.best]
        return others[0] if others else None


def rate(choice: Choice) -> float:
    """Samples per second."""
    return choice.outcome.samples_per_s


def own_difference(choice: Choice) -> float:
    """How far the event model is from the schedule's own file over the first two iterations of a part of a choice."""
    job = part_of(choice.candidate.apply(choice.config, device_roles(choice.config)), choice.candidate, CHECKED)[1]
    return difference(replace(job, iterations=2), SEED)


def no_progress(done: int, of: int, name: str) -> None:
    """Says nothing."""


def variants(config: JobConfig, fixed: frozenset[str]) -> list[JobConfig]:
    """The job with each staleness that is searched, if its schedule takes one and the user did not choose it: whole
    ones alone, where it is an integer."""
    options = config.schedule.options
    if _STALENESS not in options or f"schedule.{_STALENESS}" in fixed:
        return [config]
    whole = isinstance(getattr(make_schedule(config), _STALENESS), int)
    searched = [int(value) for value in STALENESS if value.is_integer()] if whole else STALENESS
    return [
        replace(config, schedule=replace(config.schedule, options={**options, _STALENESS: value})) for value in searched
    ]


def make_plan(
    jobs: Sequence[JobConfig],
    fixed: frozenset[str],
    effort: Effort,
    *,
    processes: int = _PROCESSES,
    progress: Progress = no_progress,
) -> Plan:
    """Explore every job, in processes that end with this call. Raises ConfigError where no job fits its devices."""
    plan = Plan(explore_all(jobs, fixed, effort, processes=processes, progress=progress))
    if not plan.choices:
        job = jobs[0]
        for exploration in plan.explorations:
            if exploration.refusal:
                raise ConfigError(f"{exploration.name}: {why_none(exploration)}")
        raise ConfigError(
            f"model={job.model.name} fits no split of {job.cluster.devices} devices of device={job.device.name}; "
            "give it more of them by cluster.devices=, or a device with more memory, as in device=h200"
        )
    return plan


def why_none(exploration: Exploration) -> str:
    """The reason why an exploration found nothing."""
    if exploration.refused:
        return f"a real run would refuse {exploration.refused} candidates, the last one thus: {exploration.refusal}"
    return f"none of {exploration.candidates} candidates fits memory"


def explore_all(
    jobs: Sequence[JobConfig],
    fixed: frozenset[str],
    effort: Effort,
    *,
    processes: int = _PROCESSES,
    progress: Progress = no_progress,
) -> list[Exploration]:
    """Explore every job, with every staleness that is searched, in their order."""
    fixed = fixed | (_GIVEN if isinstance(jobs[0].cost, CostConfig) else frozenset())
    known: defaultdict[str, Costs] = defaultdict(dict)  # of each job, whatever its schedule
    tasks = [
        (job, fixed, SEED, effort, known[repr(replace(job, schedule=jobs[0].schedule))])
        for base in jobs
        for job in variants(base, fixed)
    ]
    found: dict[int, Exploration] = {}
    # the longest simulations are begun first
    order = sorted(range(len(tasks)), key=lambda n: -float(tasks[n][0].schedule.options.get(_STALENESS, 0)))
    what = "processes that explore schedules, one each"
    turns = parallel_as_completed(
        _explore, [tasks[n] for n in order], processes=processes, timeout_s=_TIMEOUT_S, what=what
    )
    for turn, exploration in turns:
        found[order[turn]] = exploration
        progress(len(found), len(tasks), exploration.name)
    return [found[number] for number in range(len(tasks))]


def _explore(task: _Task) -> Exploration:
    return explore(*task)


def plan_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Schedules, and the settings of the job: the user's, and the defaults of what they do not say."""
    given = [argument for argument in arguments if not argument.startswith("schedule=")]
    chosen = [argument.partition("=")[2] for argument in arguments if argument.startswith("schedule=")]
    schedules = list(SCHEDULES) if not chosen or chosen[-1] == "all" else [chosen[-1]]
    names = {argument.partition("=")[0] for argument in given}
    return schedules, [f"{name}={value}" for name, value in DEFAULTS.items() if name not in names] + given


def fixed_by(settings: Sequence[str]) -> frozenset[str]:
    """Settings that the user chose: they are not searched. A split cannot be among them."""
    names = frozenset(setting.lstrip("+~").partition("=")[0] for setting in settings)
    for name in sorted(names):
        if name.startswith("schedule.split"):
            raise ConfigError(
                f"{name} is what a plan chooses; run your own split with `cadence bench`, or leave it out"
            )
    return names


def plan_jobs(arguments: Sequence[str]) -> tuple[list[JobConfig], list[str]]:
    """The job under every schedule that is to be planned, and its settings."""
    schedules, settings = plan_settings(arguments)
    jobs = [compose_job([f"schedule={name}", *settings]) for name in schedules]
    names = {setting.partition("=")[0] for setting in settings}
    return [shared_as_alone(job, names) for job in jobs], settings


def shared_as_alone(job: JobConfig, given: Collection[str]) -> JobConfig:
    """The job with training on shared devices no slower than on its own, unless the user says how much it is."""
    if AS_ALONE in given or not isinstance(job.cost, RooflineConfig):
        return job
    return replace(job, cost=replace(job.cost, colocated_train_factor=1.0))


def origin(config: JobConfig) -> str:
    """The origin of costs, for headers and pictures: given, by a profile or a calibration, or computed from a data
    sheet (as AsyncFlow, arXiv 2507.01663, section 4.3, has profiles where there are some, else analytical costs)."""
    if isinstance(config.cost, CostConfig):
        return f"profile-backed (cost={config.cost.name}, one layout)"
    return f"analytical (cost={config.cost.name} on device={config.device.name})"


def devices_and_batch(config: JobConfig) -> tuple[str, str]:
    """Words for what a plan is for: how many devices of which type, and how large a batch."""
    algorithm, devices = config.algorithm, config.cluster.devices
    known = f"{devices} devices" if isinstance(config.cost, CostConfig) else f"{devices} x {config.device.name}"
    batch = f"{algorithm.batch_groups} prompts x {algorithm.group_size} responses = {algorithm.batch_samples:,} samples"
    return known, batch


def bench_command(choice: Choice, settings: Sequence[str], iterations: int = ITERATIONS) -> str:
    """`cadence bench ...` for a choice of a plan that was made with these settings, the user's own among them."""
    given = dict(setting.split("=", 1) for setting in settings)
    given |= {"schedule": choice.schedule, "cluster.devices": str(choice.config.cluster.devices)}
    given.setdefault("iterations", str(iterations))
    if choice.candidate.shared and isinstance(choice.config.cost, RooflineConfig):
        given.setdefault(AS_ALONE, as_argument(choice.config.cost.colocated_train_factor))
    options = {f"schedule.{name}": value for name, value in choice.config.schedule.options.items()}
    searched = {name: value for name, value in options.items() if name == "schedule.max_staleness"}
    given |= {name: as_argument(value) for name, value in (searched | layout(choice)).items()}
    return f"cadence bench {as_arguments(given)}"


def layout(choice: Choice) -> dict[str, object]:
    """The settings that its candidate stands for."""
    return dict(choice.candidate.settings(device_roles(choice.config)))


def as_argument(value: object) -> str:
    """A value as it stands on a command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
