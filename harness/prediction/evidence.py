"""The one form that tables and logs are read into: what was measured of a system, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

SHARED = "colocate_sync"  # the schedule in which all devices do everything in turn


@dataclass(frozen=True)
class Workload:
    """Knowledge of a job. None: not said: inferred or assumed, never nothing. Lengths: tokens; shares: of [0, 1]."""

    model: str | None = None  # a setting of `make bench`: a name of experiments/model, or hf:<org>/<name>
    device: str | None = None  # a name of experiments/device
    batch_groups: int | None = None  # prompts of a training step
    group_size: int | None = None  # responses to a prompt
    prompt_mean: float | None = None
    response_mean: float | None = None  # responses as sampled, the cap included
    response_max: float | None = None  # the longest response of a batch, in the mean over steps
    cap: int | None = None  # the longest response that is allowed
    clipped_share: float | None = None  # share of the responses that reach the cap
    tokens_per_s: float | None = None  # response tokens of all engines in a second of generation
    tensor_parallel: int | None = None  # devices of an engine
    slots: int | None = None  # samples that an engine generates at a time, at most
    streamed_groups: int | None = None
    """Groups that it generates at a time, at most, where they are streamed to the trainer (fully_async)."""
    optimizer_steps: int | None = None  # mini-batches of a training step
    recompute_log_probs: bool | None = None  # whether the trainer scores what engines sampled (`old_log_prob`)
    reference: bool | None = None  # whether a reference model scores it too

    def over(self, below: Workload) -> Workload:
        """Join both: what this workload does not say is as `below` says it."""
        said = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        return replace(below, **said)


SETTINGS = {
    "model": "model",
    "device": "device",
    "algorithm.batch_groups": "batch_groups",
    "algorithm.group_size": "group_size",
    "cost.prompt_tokens": "prompt_mean",
    "cost.lengths.mean": "response_mean",
    "cost.lengths.cap": "cap",
    "engine.tensor_parallel": "tensor_parallel",
    "engine.slots": "slots",
    "algorithm.mini_batches": "optimizer_steps",
    "algorithm.recompute_log_probs": "recompute_log_probs",
    "algorithm.reference": "reference",
}
"""Fields of a workload that settings of a job say, by their names."""


@dataclass(frozen=True)
class StepRow:
    """A configuration that was run, or is asked for. Seconds of one training step, means over `steps` of them; None:
    not said, never 0. Phases of a synchronous row follow each other, and the trainer's phases of an asynchronous one,
    `wait_s` among them: they add up to the step, with the rests."""

    label: str  # file and line
    schedule: str
    rollout_devices: int
    train_devices: int  # the same ones as `rollout_devices` where they are shared
    options: Mapping[str, str] = field(default_factory=dict, hash=False)  # options of the schedule
    engine: str = ""  # any text; rows of the same are of one software
    step_s: float | None = None
    rollout_s: float | None = None
    """The phase of generation, with all that surrounds it (sleep and wake, handing out prompts)."""
    generate_s: float | None = None  # generating sequences alone
    wait_s: float | None = None  # the trainer's wait for samples; of asynchronous rows
    old_log_prob_s: float | None = None
    ref_log_prob_s: float | None = None
    log_probs_s: float | None = None  # both scorings, where they were timed together
    update_s: float | None = None
    reward_s: float | None = None  # rewards after generation, which a schedule that streams hides
    sync_s: float | None = None  # the weights on their way to engines while the trainer waits
    serial_s: float | None = None  # rest: of the trainer, in whatever schedule (data moved, advantages, metrics)
    overlappable_s: float | None = None  # rest: what a schedule hides that trains while samples are made
    sharing_only_s: float | None = None
    """Rest: what there is only where devices are shared (offload, sleep, wake, resharding)."""
    spread: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Standard deviation of the logarithm over the steps that were averaged, by the names of the fields above."""
    steps: int | None = None  # steps averaged
    says: Workload = Workload()  # the workload as the row says it, over that of the evidence

    @property
    def shared(self) -> bool:
        """Whether rollout and training share their devices."""
        return self.schedule == SHARED

    @property
    def synchronous(self) -> bool:
        """Whether nothing overlaps: what is trained on begins after what was trained before, and phase after phase."""
        return self.shared or (self.schedule == "separated_sync" and self.options.get("streaming") == "false")

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.rollout_devices if self.shared else self.rollout_devices + self.train_devices

    def __str__(self) -> str:
        pools = f"{self.devices}" if self.shared else f"{self.rollout_devices}+{self.train_devices}"
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return " ".join(part for part in (self.schedule, options, self.engine, f"on {pools}") if part)


@dataclass(frozen=True)
class Evidence:
    """Rows that were run, and rows to be predicted. settings: of the job, as `make bench` takes them, which a workload
    has no field for; of_engine, of_schedule: more of them, for rows of this engine or schedule. asked: their own step,
    wait and generation are published figures to be compared with, never read."""

    source: str
    workload: Workload
    rows: tuple[StepRow, ...]
    asked: tuple[StepRow, ...]
    settings: tuple[str, ...] = ()
    of_engine: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    of_schedule: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    quantities: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Quantities of experiments/priors.yaml that are known here, by name."""
    system: str = ""
    """Name of the system in experiments/priors.yaml, which is scored without it, and whose defaults are assumed."""

    def of(self, row: StepRow) -> Workload:
        """The workload of a row."""
        return row.says.over(self.workload)
