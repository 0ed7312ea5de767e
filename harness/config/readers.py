"""Readers of settings: said beside its field, as `kl: WithKL[str] = "k3"`, and asked of a job.

A setting that a job does not read decides nothing there: it is refused where somebody gave it, names no cell, and keeps
no two runs from being compared. In doubt a setting is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, iscoroutinefunction, signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from harness.config.fields import ConfigError
from harness.config.plugins import defaults, is_path
from harness.config.registries import REGISTRIES, find

if TYPE_CHECKING:
    from harness.config.job import JobConfig, TaskConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """A reader of a setting. words: the jobs that have it, after "read only where"; holds: whether a job is one of them
    (by the job, and by the settings that the field stands among); fix: a setting that makes it one. names_cell: what is
    read changes what is computed."""

    words: str
    holds: Callable[[JobConfig, Any], bool]
    fix: str = ""
    names_cell: bool = True


def _simulated(job: JobConfig) -> bool:
    """Whether it may be a simulation: who asks for `auto` has yet to hear."""
    return job.backend != "real"


def _real(job: JobConfig) -> bool:
    return job.backend in ("auto", "real")


def _loaded(setting: str, name: str) -> Any:
    """The code that a setting names; None where it is not there, as where results are read without it."""
    try:
        return find(setting, name)
    except ConfigError:
        return None


def scoring_processes(task: TaskConfig) -> int:
    """Processes that score samples of a real run. None for a reward that is quick, or waits for others; two for one
    that may take its time, where the settings leave it open."""
    if task.reward_processes is not None:
        return task.reward_processes
    if task.reward is None:
        return 2 if getattr(_loaded("task", task.name), "slow", False) else 0
    reward = _loaded("task.reward", task.reward)
    return 0 if getattr(reward, "quick", False) or iscoroutinefunction(reward) else 2


def _shares_devices(job: JobConfig) -> bool:
    """Whether rollout gives its devices to training, and takes them back."""
    schedule = _loaded("schedule", job.schedule.name)
    return schedule is None or bool(schedule.colocated) or job.schedule.split.get("rollout") in job.schedule.split


def _samples_run_on(job: JobConfig) -> bool:
    """Whether samples may be under way in an engine, or their prefixes in its cache, when new weights come."""
    schedule = _loaded("schedule", job.schedule.name)
    return not getattr(schedule, "loads_between_batches", False) or (_real(job) and job.engine.name != "torch")


STD_ADVANTAGES = ("group", "best_of_k", "gae")
"""Advantages that `normalise_std` changes: of rewards, those that divide by a standard deviation if asked to."""

Read = Annotated[T, Where("", lambda job, own: True)]
"""Read by every job."""
OfRuns = Annotated[T, Where("", lambda job, own: True, names_cell=False)]
"""Says which runs are made and what is kept of them, not what they compute."""
Real = Annotated[T, Where("the job runs for real", lambda job, own: _real(job), "backend=real")]
Simulated = Annotated[T, Where("the job is simulated", lambda job, own: _simulated(job), "backend=virtual")]
Roofline = Annotated[
    T,
    Where(
        "the job is simulated by a roofline",
        lambda job, own: _simulated(job) and job.cost.kind == "roofline",
        "backend=virtual cost=roofline",
    ),
]
RealOrRoofline = Annotated[
    T,
    Where(
        "memory is counted, which given costs say nothing of", lambda job, own: _real(job) or job.cost.kind != "given"
    ),
]
Processes = Annotated[
    T, Where("roles have processes of their own", lambda job, own: job.backend != "virtual", "backend=real")
]
Travelling = Annotated[
    T,
    Where(
        "weights travel from process to process", lambda job, own: job.backend != "virtual" and not _shares_devices(job)
    ),
]
BetweenDevices = Annotated[
    T, Where("rollout and training have devices of their own", lambda job, own: not _shares_devices(job))
]
WithDelta = Annotated[
    T,
    Where(
        "only what changed is sent",
        lambda job, own: job.cluster.delta_weights and not _shares_devices(job),
        "cluster.delta_weights=true",
    ),
]
OnGPU = Annotated[
    T, Where("devices are GPUs", lambda job, own: _real(job) and job.cluster.kind != "cpu", "cluster.kind=gpu")
]

OwnWeights = Annotated[T, Where("model.checkpoint is null", lambda job, own: job.model.checkpoint is None)]
NarrowWeights = Annotated[T, Where("model.dtype is bfloat16", lambda job, own: job.model.dtype != "float32")]
OnTheFly = Annotated[
    T, Where("samples may run on while their engine takes new weights", lambda job, own: _samples_run_on(job))
]

WithKL = Annotated[
    T, Where("algorithm.kl_coef is above 0", lambda job, own: job.algorithm.kl_coef > 0, "algorithm.kl_coef=0.05")
]
WithLossKL = Annotated[
    T, Where("a KL is part of the loss", lambda job, own: job.algorithm.has_loss_kl, "algorithm.kl_coef=0.05")
]
WithLoRA = Annotated[
    T, Where("training.lora_rank is above 0", lambda job, own: job.training.lora_rank > 0, "training.lora_rank=8")
]
WithExperts = Annotated[T, Where("the model has experts", lambda job, own: job.model.experts > 0, "model=tiny-moe")]
WithTexts = Annotated[T, Where("texts.samples is above 0", lambda job, own: job.texts.samples > 0)]
WithoutKL = Annotated[
    T,
    Where(
        "algorithm.kl_coef is 0: a KL term needs the reference by itself", lambda job, own: not job.algorithm.kl_coef
    ),
]
WithKLTarget = Annotated[
    T,
    Where(
        "algorithm.kl_target is set", lambda job, own: job.algorithm.kl_target is not None, "algorithm.kl_target=0.1"
    ),
]
_CRITIC = Where("there is a critic", lambda job, own: job.algorithm.has_critic, "algorithm.advantage=gae")
WithCritic = Annotated[T, _CRITIC]
Decoupled = Annotated[
    T,
    Where(
        "the loss has a proximal policy",
        lambda job, own: job.algorithm.has_proximal or is_path(job.algorithm.correction),
        "algorithm.correction=decoupled",
    ),
]
Losses = Annotated[
    T,
    Where(
        "losses are computed, or batches have several steps, before which a proximal policy may be scored",
        lambda job, own: _real(job) or job.algorithm.steps_per_version > 1,
        "backend=real",
    ),
]
DividedByStd = Annotated[
    T,
    Where(
        f"algorithm.advantage is one of {', '.join(STD_ADVANTAGES)}",
        lambda job, own: job.algorithm.advantage in STD_ADVANTAGES,
    ),
]
Decaying = Annotated[
    T, Where("the learning rate decays", lambda job, own: job.algorithm.decay != "constant", "algorithm.decay=cosine")
]
Refilled = Annotated[T, Where("groups may be refused", lambda job, own: job.refills, "algorithm.filter=zero_variance")]

Rewarded = Annotated[T, Where("task.reward is set", lambda job, own: job.task.reward is not None, "task.reward=exact")]
ScoredApart = Annotated[
    T,
    Where(
        "samples are scored by processes of their own",
        lambda job, own: scoring_processes(job.task) > 0,
        "task.reward_processes=2",
    ),
]
ScoredInTime = Annotated[
    T,
    Where(
        "scoring may take its time",  # in another process, or waited for
        lambda job, own: scoring_processes(job.task) > 0 or is_path(job.task.reward or job.task.name),
        "task.reward_processes=2",
    ),
]
Generated = Annotated[
    T,
    Where("task.generate is set", lambda job, own: job.task.generate is not None, "task.generate=my_lab.agents:search"),
]
Buffered = Annotated[
    T, Where("task.buffer is set", lambda job, own: job.task.buffer is not None, "task.buffer=my_lab.buffers:Hard")
]
Evaluated = Annotated[T, Where("eval.every is not 0", lambda job, own: job.eval.every != 0, "eval.every=20")]
Saved = Annotated[
    T, Where("checkpoint.every is above 0", lambda job, own: job.checkpoint.every > 0, "checkpoint.every=20")
]
CutByLayout = Annotated[
    T,
    Where(
        "passes are computed, or are cut by training.tokens_per_micro_batch",
        lambda job, own: _real(job) or job.cost.kind != "given" or job.training.tokens_per_micro_batch is not None,
    ),
]
_REFERENCE = Where("there is a reference", lambda job, own: job.algorithm.has_reference, "algorithm.reference=true")
BesideReference = Annotated[T, _REFERENCE]
HostMemory = Annotated[
    T,
    Where(
        "devices are GPUs, or described",
        lambda job, own: (_real(job) and job.cluster.kind != "cpu") or (_simulated(job) and job.cost.kind != "given"),
    ),
]

Shared = Annotated[T, Where("rollout shares its devices with training", lambda job, own: _shares_devices(job))]
Taken = Annotated[
    T,
    Where(
        "engines give devices to training, and take them back",
        lambda job, own: _shares_devices(job) or "lent" in job.schedule.split,
    ),
]
WithTurns = Annotated[
    T,
    Where("cost.turns is set", lambda job, own: job.cost.turns is not None, "cost.turns={kind:constant,mean:3,cap:3}"),
]
WithFilter = Annotated[
    T,
    Where("algorithm.filter refuses groups", lambda job, own: job.algorithm.filters, "algorithm.filter=zero_variance"),
]
Drawn = Annotated[T, Where("its kind is not trace", lambda job, own: own.kind != "trace")]
Spread = Annotated[T, Where("its kind is lognormal", lambda job, own: own.kind == "lognormal")]
Traced = Annotated[T, Where("its kind is trace", lambda job, own: own.kind == "trace")]

_ROLES = {
    "actor_fwd": Where(
        "actor_fwd runs", lambda job, own: job.algorithm.recompute_log_probs, "algorithm.recompute_log_probs=true"
    ),
    "reference": _REFERENCE,
    "critic": _CRITIC,
}
"""Roles that not every job has: readers of their shares of the devices."""


@dataclass(frozen=True)
class Setting:
    """A setting of a job by its path. value: plain, as in YAML; default: of its field, MISSING where it has none;
    unread: the first reader that the job lacks."""

    value: Any
    default: Any
    unread: Where | None
    names_cell: bool


def settings_of(job: JobConfig) -> dict[str, Setting]:
    """All settings of a job by their path, such as `algorithm.kl`; options of what a setting names, too. A set of
    settings without fields of its own, such as `algorithm.options`, is one."""
    return dict(_fields_of(job, job, "", (), MISSING))


def live_settings(job: JobConfig) -> dict[str, Any]:
    """Values of the settings that the job reads, by their path."""
    return {path: one.value for path, one in settings_of(job).items() if one.unread is None}


def naming_settings(job: JobConfig) -> dict[str, Any]:
    """Values of settings that tell what the job computes: those that it reads and that are not the default."""
    return {
        path: one.value
        for path, one in settings_of(job).items()
        if one.unread is None and one.names_cell and (one.default is MISSING or one.value != one.default)
    }


def readers(annotation: Any) -> tuple[Where, ...]:
    """Readers of a setting by its annotated type."""
    return tuple(one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Where))


def _fields_of(
    job: JobConfig, own: Any, above: str, inherited: tuple[Where, ...], of_default: Any
) -> Iterator[tuple[str, Setting]]:
    """of_default: the default of the field whose value `own` is."""
    hints = _hints(type(own))  # type: ignore[arg-type]
    for made in fields(own):
        path, value = f"{above}{made.name}", getattr(own, made.name)
        wheres = (*inherited, *readers(hints[made.name]))
        default = made.default if made.default_factory is MISSING else made.default_factory()
        default = getattr(of_default, made.name) if is_dataclass(of_default) else default
        if is_dataclass(value):
            yield from _fields_of(job, value, f"{path}.", wheres, default)
        elif path == "schedule.split":
            for role, share in value.items():
                of_role = (*wheres, *filter(None, [_ROLES.get(role)]))
                yield f"{path}.{role}", _setting(job, None, share, MISSING, of_role)
        elif path == "algorithm.options":
            yield from _options_of_functions(job, value, wheres)
        elif path in _OPTIONS:
            yield from _options_of(job, path, value, wheres)
        else:
            yield path, _setting(job, own, value, default, wheres)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _setting(job: JobConfig, own: Any, value: Any, default: Any, wheres: Sequence[Where]) -> Setting:
    unread = next((where for where in wheres if _lacks(job, own, where)), None)
    plain_default = MISSING if default is MISSING or default == "???" else plain_value(default)
    return Setting(plain_value(value), plain_default, unread, all(where.names_cell for where in wheres))


def _lacks(job: JobConfig, own: Any, where: Where) -> bool:
    """Whether a job lacks this reader. An option of another type than its field's is refused elsewhere."""
    try:
        return not where.holds(job, own)
    except (TypeError, AttributeError):
        return False


def plain_value(value: Any) -> Any:
    """A setting's value as YAML has it."""
    return value if isinstance(value, str | int | float | None) else json.loads(json.dumps(value, default=asdict))


def _options_of_functions(
    job: JobConfig, given: Mapping[str, Any], wheres: tuple[Where, ...]
) -> Iterator[tuple[str, Setting]]:
    """Options that were given, each with the default of the function that has it."""
    if not given:
        return
    found = [_loaded(setting, name) for setting, name in job.named if setting.startswith("algorithm.")]
    parameters = [one for function in found if function is not None for one in signature(function).parameters.values()]
    known = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    for option, value in given.items():
        has = None in found or option in known
        where = Where("loss, advantage, shaping or filter has that option", lambda job, own, has=has: has)  # type: ignore[misc]
        default = known.get(option, Parameter.empty)
        default = MISSING if default is Parameter.empty else default
        yield f"algorithm.options.{option}", _setting(job, None, value, default, (*wheres, where))


def described_engine(name: str, registry: str = "engine") -> Any:
    """The engine's class or, of one that is built in, the module `options` beside it, which loads nothing: what has its
    `Options` and `check_environment`. None where there is none. registry: of `harness.config.registries`."""
    if is_path(name):
        return find(registry, name)
    package = REGISTRIES[registry].get(name, "").partition(":")[0].rpartition(".")[0]
    return import_module(f"{package}.options") if package and find_spec(f"{package}.options") else None


_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "schedule.options": lambda name: find("schedule", name),
    "engine.options": lambda name: getattr(described_engine(name), "Options", None),
    "task.options": lambda name: find("task", name),
}
"""Settings that hold options, and whose fields those are."""


def _options_of(
    job: JobConfig, path: str, given: Mapping[str, Any], wheres: tuple[Where, ...]
) -> Iterator[tuple[str, Setting]]:
    """Options, those that were not given with their defaults, by the path by which they are set: without `options`.
    They are one setting where the code that has them is not there."""
    group = path.partition(".")[0]
    name = getattr(job, group).name
    try:
        cls = _OPTIONS[path](name)
        own = {} if cls is None else defaults(cls, group, name)
    except ConfigError:
        yield group, _setting(job, None, given, MISSING, wheres)
        return
    values = {option: value for option, value in {**own, **given}.items() if option != "name"}
    said = options_readers(cls)
    for option, value in values.items():
        default = own.get(option, MISSING)
        of_option = (*wheres, *said.get(option, ()))
        yield f"{group}.{option}", _setting(job, SimpleNamespace(**values), value, default, of_option)


def options_readers(cls: Any) -> dict[str, tuple[Where, ...]]:
    """Readers of options by their name, of those that say so: by their type, or a schedule's by `option`."""
    if not is_dataclass(cls):
        return {}
    found = {name: readers(hint) for name, hint in _hints(cls).items()}  # type: ignore[arg-type]
    for made in fields(cls):
        if "read_where" in made.metadata:
            words, holds = made.metadata["read_where"]
            found[made.name] = (Where(words, lambda job, own, holds=holds: holds(own)),)  # type: ignore[misc]
    return {name: said for name, said in found.items() if said}
