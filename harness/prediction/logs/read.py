"""The log of a run as evidence for predictions: which software wrote it, which steps count, and what they took."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from harness.config import ConfigError
from harness.config.compose import EXPERIMENTS, choices, read_settings
from harness.config.fields import whole_number
from harness.config.placement import DEVICE_ROLES, devices_of
from harness.metrics.formatting import plural
from harness.prediction.evidence import SETTINGS, SHARED, Evidence, StepRow, Workload
from harness.prediction.logs.files import Log, Step, as_number, read_files

_SLOW = 1.5  # times the median of all later steps: a first step that compiles, loads or fills a pipeline
_SLACK = 1.02  # of a step: rounding of what adds up to it

PHASES = (
    "rollout_s",
    "wait_s",
    "old_log_prob_s",
    "ref_log_prob_s",
    "log_probs_s",
    "update_s",
    "reward_s",
    "sync_s",
    "serial_s",
    "sharing_only_s",
)
"""Fields of StepRow that follow each other in a step."""

ASKED = {
    "model": ("model", "model=qwen7b"),
    "device": ("device", "device=h100"),
    "devices": ("cluster.devices", "cluster.devices=16"),
    "rollout": ("schedule.split.rollout", "schedule.split.rollout=8"),
    "batch_groups": ("algorithm.batch_groups", "algorithm.batch_groups=512"),
    "group_size": ("algorithm.group_size", "algorithm.group_size=16"),
    "cap": ("cost.lengths.cap", "cost.lengths.cap=8192"),
    "tensor_parallel": ("engine.tensor_parallel", "engine.tensor_parallel=2"),
}
"""Settings that a log may leave unsaid, and an example of each."""


CADENCE, MLPERF, SLIME, TRL = "Cadence", "MLPerf GRPO", "slime", "TRL"
_Names = dict[str, list[str]]


@dataclass(frozen=True)
class Framework:
    """The names of one framework, as its part of experiments/logs.yaml has them, which says what each is."""

    name: str
    version: str
    marks: list[str]
    seconds: _Names
    logged: _Names
    settings: _Names
    overlaps: dict[str, str] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    scores_apart: bool = False


@cache
def frameworks() -> list[Framework]:
    """All whose logs are read."""
    named = read_settings(EXPERIMENTS / "logs.yaml")
    return TypeAdapter(list[Framework]).validate_python([{"name": name, **of} for name, of in named.items()])


@dataclass(frozen=True)
class ReadLog:
    """A log. arguments: the job's settings besides, as given; notes: on what was read and left out, a line each."""

    framework: Framework
    evidence: Evidence
    arguments: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def row(self) -> StepRow:
        """The configuration that was run."""
        return self.evidence.rows[0]

    @property
    def settings(self) -> list[str]:
        """The job on the same devices, as settings that a plan takes, then those that were given besides. The split of
        engines is not among them: it is what a plan finds."""
        said = {name: getattr(self.evidence.workload, field) for name, field in SETTINGS.items()}
        said |= {"engine.tensor_parallel": None, "cluster.devices": self.row.devices}
        values = {name: round(v) if isinstance(v, float) else v for name, v in said.items() if v is not None}
        return [f"{name}={str(value).lower()}" for name, value in values.items()] + list(self.arguments)


def read_log(paths: Sequence[Path], arguments: Sequence[str] = ()) -> ReadLog:
    """Read the files of one run; arguments: settings of a job, which win over what the log says. Raises ConfigError,
    one line with file, line, value and what to do, where the run cannot be told from them."""
    log = read_files(paths)
    source = " ".join(map(str, paths))
    framework = _framework(source, log)
    notes = [f"{framework.name}'s names, as of {framework.version}", *log.notes]
    steps = _counted(source, framework, log, notes)
    given = {name: value for name, _, value in (one.partition("=") for one in arguments)}
    said = _Said(source, framework, log, given)
    row, workload = _row(source, framework, steps, said, notes)
    over = {field: _value(given[name]) for name, field in SETTINGS.items() if given.get(name)}
    own = {*SETTINGS, *(setting for setting, _ in ASKED.values())}
    others = tuple(one for one in arguments if one.partition("=")[0] not in own)
    evidence = Evidence(source, replace(workload, **over), (row,), (), system=framework.name)
    return ReadLog(framework, evidence, others, tuple(notes))


def _value(text: str) -> Any:
    """A setting's value: true or false, a number, a whole one as such, or text."""
    number = as_number(text)
    if number is None:
        return {"true": True, "false": False}.get(text.lower(), text)
    return int(number) if number == int(number) else number


def _framework(source: str, log: Log) -> Framework:
    found: dict[str, tuple[Framework, str]] = {}
    for step in log.steps.values():
        for framework in frameworks():
            if framework.name not in found and (mark := next((m for m in framework.marks if m in step.numbers), None)):
                found[framework.name] = framework, f"{mark} of {framework.name} ({step.where})"
    if len(found) > 1:
        found.pop(MLPERF, None)  # NeMo-RL's console has MLPerf's lines, too
    if len(found) > 1:
        raise ConfigError(f"{source} has {' and '.join(mark for _, mark in found.values())}; give the log of one run")
    if not found:
        known = ", ".join(f"{one.name} ({one.marks[0]})" for one in frameworks())
        raise ConfigError(
            f"{source} has no step time of any software that is read: {known}; docs/predictions.md has all"
        )
    return next(iter(found.values()))[0]


def _seconds(framework: Framework, step: Step) -> dict[str, float]:
    """Seconds of a step by fields of StepRow. Raises ConfigError for what is no time."""
    found = {}
    for part, names in framework.seconds.items():
        values = {name: step.numbers[name] for name in names if name in step.numbers}
        for name, value in values.items():
            if not 0 <= value < math.inf or (part == "step_s" and value == 0):
                raise ConfigError(f"{step.where}: {name}={value:g} is no time; take that step out of the log")
        if values:
            found[part] = sum(values.values())
    return found


def _counted(source: str, framework: Framework, log: Log, notes: list[str]) -> list[Step]:
    """The steps that are averaged: whole ones, without warm-up, evaluation and checkpoints."""
    timed = [step for _, step in sorted(log.steps.items()) if "step_s" in _seconds(framework, step)]
    if not timed:
        names = " or ".join(framework.seconds["step_s"])
        raise ConfigError(f"{source}: {framework.name} wrote it, but no step has its time, {names}; log that, too")
    has = [_seconds(framework, step).keys() for step in timed]
    usual = {part for part in framework.seconds if 2 * sum(part in one for one in has) > len(timed)}
    whole = [step for step, one in zip(timed, has, strict=True) if usual <= one]
    if len(whole) < len(timed):
        notes.append(f"{plural(len(timed) - len(whole), 'step')} without phases that others have are left out")
    seconds = [_seconds(framework, step)["step_s"] for step in whole]
    first = min(1, len(whole) - 1)
    while first < len(whole) // 2 and seconds[first] > _SLOW * statistics.median(seconds[first:]):
        first += 1
    if first:
        notes.append(f"warm-up (compiling, loading, filling) is left out: {first} of {plural(len(whole), 'step')}")
    else:
        notes.append("there is one step alone, whose warm-up cannot be told")
    counted = whole[first:]
    if len(kept := [step for step in counted if not step.again]) and len(kept) < len(counted):
        notes.append(f"{plural(len(counted) - len(kept), 'step')} logged anew, as after a restart, are left out")
        counted = kept
    broken = [step for step in counted if any(step.numbers.get(name, 0.0) > 0 for name in framework.interrupted)]
    if broken and len(broken) < len(counted):
        notes.append(f"{plural(len(broken), 'step')} with an evaluation or a checkpoint are left out")
        counted = [step for step in counted if step not in broken]
    notes.append(f"averaged: {plural(len(counted), 'step')}")
    return counted


class _Said:
    """Settings, those that were given first, then those of the log."""

    def __init__(self, source: str, framework: Framework, log: Log, given: Mapping[str, str]) -> None:
        self.source, self.framework, self.log, self.given = source, framework, log, given
        self.missing: list[str] = []

    def text(self, what: str) -> str | None:
        """A setting's value, None where nothing says it."""
        if what in ASKED and self.given.get(ASKED[what][0]):
            return self.given[ASKED[what][0]]
        for ending in self.framework.settings.get(what, ()):
            for name, value in self.log.settings.items():
                if fnmatchcase(f".{name}", f"*.{ending}") and value not in ("None", "null", ""):
                    return value
        return None

    def number(self, what: str) -> float | None:
        """A setting's number. Raises ConfigError for text, and for what is no amount."""
        text = self.text(what)
        if text is None:
            return None
        number = as_number(text)
        if number is None or not 0 <= number < math.inf:
            raise ConfigError(f"{self.source}: {what}={text} is no number; set {ASKED.get(what, ('', what))[1]}")
        return number

    def count(self, what: str) -> int | None:
        """A setting's whole number, at least 1."""
        number = self.number(what)
        return int(number) if number is not None and number >= 1 else None

    def asks(self, what: str) -> None:
        """Note that somebody has to say it."""
        self.missing.append(what)

    def refuse_missing(self) -> None:
        """Raises ConfigError, which names all that is missing and how it is said."""
        if self.missing:
            self.missing.sort(key=list(ASKED).index)
            ways = [ASKED[what][1] for what in self.missing]
            names = ", ".join(ASKED[what][0] for what in self.missing)
            raise ConfigError(f"{self.source} does not say {names}; add {' '.join(ways)}, as it was run")


def _row(
    source: str, framework: Framework, steps: Sequence[Step], said: _Said, notes: list[str]
) -> tuple[StepRow, Workload]:
    schedule = _schedule(framework, steps, said)
    fields = [_phases(framework, step, schedule) for step in steps]
    for step, one in zip(steps, fields, strict=True) if framework.name != CADENCE else ():
        total = sum(one[name] for name in PHASES if name in one)
        if total > _SLACK * one["step_s"]:
            longest = max((name for name in PHASES if name in one), key=lambda name: one[name])
            raise ConfigError(
                f"{step.where}: phases add up to {total:.4g} s ({longest}={one[longest]:.4g}), more than the step's "
                f"{one['step_s']:.4g} s; give a log whose step is timed from end to end, or take that step out"
            )
    common = set.intersection(*(set(one) for one in fields))
    every = {name: statistics.fmean(one[name] for one in fields) for name in sorted(common)}
    means = {name: value for name, value in every.items() if value > 0 or name == "wait_s"}
    spread = {name: _spread([one[name] for one in fields]) for name in common}
    logged = {what: _logged(framework, steps, what) for what in framework.logged}
    scores = {name: any(_seconds(framework, step).get(name) for step in steps) for name in PHASES}
    workload = _workload(framework, said, logged, means, scores, notes)
    rollout, train = _devices(framework, said, logged, means, schedule)
    said.refuse_missing()
    staleness = logged.get("max_staleness") or said.number("max_staleness")
    options = {"max_staleness": f"{staleness:g}"} if schedule == "fully_async" and staleness else {}
    if schedule == "separated_sync":
        options = {"streaming": "false"}
    row = StepRow(
        label=steps[0].where,
        schedule=schedule,
        rollout_devices=rollout,
        train_devices=train,
        options=options,
        spread={name: value for name, value in spread.items() if value is not None},
        steps=len(steps),
        **cast(Any, means),
    )
    return row, workload


def _schedule(framework: Framework, steps: Sequence[Step], said: _Said) -> str:
    """The schedule: of Cadence by its settings, of others by their numbers."""
    if framework.name == CADENCE:
        schedule = said.text("schedule")
        if schedule is None:
            raise ConfigError(f"{said.source} has no config.yaml beside it; name the folder of the run")
        return schedule
    for name, schedule in framework.overlaps.items():
        if any(name in step.numbers for step in steps):
            return schedule
    if framework.name == SLIME:
        one = [_seconds(framework, step) for step in steps]
        together = sum(each.get("rollout_s", 0.0) + 0.9 * each.get("update_s", 0.0) for each in one)
        if together > sum(each["step_s"] for each in one):  # train_async.py: training is beside generation
            return "one_step_off"
        shared = said.text("shared") == "True" or any("perf/sleep_time" in step.numbers for step in steps)
        return SHARED if shared or said.text("rollout_devices") is None else "separated_sync"
    return "separated_sync" if said.text("shared") == "False" else SHARED


def _phases(framework: Framework, step: Step, schedule: str) -> dict[str, float]:
    """Seconds of a step by fields of StepRow: of an asynchronous one a wait instead of a phase of generation."""
    found = _seconds(framework, step)
    if framework.name == CADENCE and schedule != SHARED:  # which streams: scoring goes on beside
        found = {name: value for name, value in found.items() if name in ("step_s", "update_s", "sync_s", "rollout_s")}
    waits = [step.numbers[name] for name in framework.waits if name in step.numbers]
    if schedule not in (SHARED, "separated_sync"):
        generates = found.pop("rollout_s", None)
        if generates is not None and framework.waits != framework.seconds.get("rollout_s"):
            found["generate_s"] = generates
        if waits:  # slime's has the weights in it
            found["wait_s"] = max(0.0, sum(waits) - (found.get("sync_s", 0.0) if framework.name == SLIME else 0.0))
    if "generate_s" in found and found["generate_s"] > found.get("rollout_s", math.inf):
        del found["generate_s"]
    if framework.name == TRL and "rollout_s" in found:  # scoring is inside of what is left
        found["update_s"] = max(0.0, found["step_s"] - sum(found[name] for name in PHASES if name in found))
    return found


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2 or min(values) <= 0:
        return None
    return statistics.stdev(map(math.log, values))


def _logged(framework: Framework, steps: Sequence[Step], what: str) -> float | None:
    """The mean of a number over the steps that have it. Raises ConfigError for what is none."""
    for name in framework.logged.get(what, ()):
        having = [step for step in steps if name in step.numbers]
        for step in having:
            if not 0 <= step.numbers[name] < math.inf:
                raise ConfigError(
                    f"{step.where}: {name}={step.numbers[name]:g} is no amount; take that step out of the log"
                )
        if having:
            return statistics.fmean(step.numbers[name] for step in having)
    return None


def _workload(
    framework: Framework,
    said: _Said,
    logged: Mapping[str, float | None],
    means: Mapping[str, float],
    scores: Mapping[str, bool],
    notes: list[str],
) -> Workload:
    model, device = _model(said.text("model")), said.text("device")
    if framework.name == CADENCE and said.log.settings.get("backend") != "virtual":
        device = said.given.get("device")  # a real run's is only its roofline's
    if device is None and len(said.log.devices) == 1:
        device = next(iter(said.log.devices))
    if device not in choices("device"):
        said.asks("device")
    if model is None:
        said.asks("model")
    response, prompt = logged.get("response_mean"), logged.get("prompt_mean")
    if prompt is None and response and (whole := logged.get("tokens_a_sample")):
        prompt = max(1.0, whole - response)
    group = said.count("group_size")
    if group is None and (groups := logged.get("groups")) and (samples := logged.get("samples")):
        group = round(samples / groups)
    batch = said.count("batch_groups")
    samples = _samples(said, logged, means, (prompt or 0.0) + (response or 0.0) if prompt and response else None)
    if batch is None and samples and group:
        batch = max(1, round(samples / group))
        notes.append(f"a batch of {batch} prompts x {group}, by what a step holds")
    if group is None:
        said.asks("group_size")
    if batch is None:
        said.asks("batch_groups")
    per_step = said.number("mini_batch") or ((said.number("global_batch") or 0) / group if group else None)
    return Workload(
        model=model,
        device=device,
        batch_groups=batch,
        group_size=group,
        prompt_mean=prompt,
        response_mean=response,
        response_max=logged.get("response_max"),
        cap=None if framework.name == CADENCE and said.log.settings.get("backend") != "virtual" else said.count("cap"),
        clipped_share=logged.get("clipped_share"),
        tensor_parallel=said.count("tensor_parallel"),
        slots=said.count("slots"),
        optimizer_steps=said.count("optimizer_steps")
        or (max(1, round(batch / per_step)) if batch and per_step else None),
        recompute_log_probs=scores["old_log_prob_s"] if framework.scores_apart else None,
        reference=scores["ref_log_prob_s"] if framework.scores_apart else None,
    )


def _samples(
    said: _Said, logged: Mapping[str, float | None], means: Mapping[str, float], tokens: float | None
) -> float | None:
    """Samples of a step, from whatever tells them."""
    step_s = means["step_s"]
    if samples := logged.get("samples"):
        return samples
    if rate := logged.get("samples_per_s"):
        return rate * step_s
    if tokens and (all_tokens := logged.get("tokens")):
        return all_tokens / tokens
    if (per_device := said.number("per_device")) and (devices := said.count("devices")):
        return per_device * devices * (said.number("accumulated") or 1.0)
    return said.number("global_batch")


def _devices(
    framework: Framework, said: _Said, logged: Mapping[str, float | None], means: Mapping[str, float], schedule: str
) -> tuple[int, int]:
    """Devices that generate and that train; (0, 0) where somebody has to say it."""
    nodes, per_node = said.count("nodes"), said.count("per_node") or (1 if framework.name == CADENCE else None)
    whole = nodes * per_node if nodes and per_node else None
    rollout = said.count("rollout_devices")
    if framework.name == CADENCE and whole and schedule != SHARED:
        split = {name.rsplit(".", 1)[-1]: value for name, value in said.log.settings.items() if ".split." in f".{name}"}
        shares = {role: value if (number := whole_number(value)) is None else number for role, value in split.items()}
        rollout = devices_of("rollout", shares, whole, DEVICE_ROLES)
    elif rollout is None and (each := said.count("rollout_per_node")):
        rollout = (said.count("rollout_nodes") or 1) * each
    train = said.count("train_devices")
    if whole and framework.name in ("verl", "slime"):  # whose nodes are the trainer's, where pools are apart
        train = whole
        whole = train if schedule == SHARED else train + rollout if rollout else None
    given, of_rollout = said.given.get(ASKED["devices"][0]), said.given.get(ASKED["rollout"][0])
    if given:
        whole = said.count("devices")
        train = None
    if of_rollout:
        rollout, train = said.count("rollout"), None
    if whole is None and schedule == SHARED:
        together = logged.get("tokens_per_s_together") or (logged.get("tokens") or 0.0) / means["step_s"]
        one = logged.get("tokens_per_s_of_one")
        whole = round(together / one) if together and one else None
    if whole is None and rollout and train:
        whole = rollout + train
    if whole is None:
        said.asks("devices")
    if schedule == SHARED:
        return (whole, whole) if whole else (0, 0)
    if rollout is None:
        said.asks("rollout")
    if whole is None or rollout is None:
        return 0, 0
    if rollout >= whole:
        raise ConfigError(
            f"{said.source}: {rollout} of {whole} devices generate, and none train; set cluster.devices= to all of them"
        )
    return rollout, whole - rollout


_VARIANT = re.compile(r"[-_](instruct|base|chat|math|coder|it|hf|thinking|\d{4})(?![a-z\d])")


def _model(path: str | None) -> str | None:
    """The model of experiments/model whose shape one of this name or path has."""
    if path is None or path in choices("model"):
        return path
    name = _VARIANT.sub("", path.rstrip("/").rsplit("/", 1)[-1].lower().replace("deepseek-r1-distill-qwen", "qwen2.5"))
    for known in choices("model"):
        checkpoint = read_settings(EXPERIMENTS / "model" / f"{known}.yaml").get("checkpoint") or ""
        if name == _VARIANT.sub("", checkpoint.rsplit("/", 1)[-1].lower()):
            return known
    return None if not path.startswith("hf:") else path
