"""Costs from finished runs of a synchronous schedule: reads their folders, and fits each cost as a fixed part and a
part per unit. `make calibrate` is a line over it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from harness.calibration.fitting import FittedCosts, Phase, fit_undisturbed, relative_error
from harness.calibration.recorded import WorkTimes, measured, together
from harness.config import ConfigError, CostConfig, JobConfig, LengthsConfig, ModelConfig, first_line
from harness.config.compose import compose_job
from harness.config.fields import checked_name
from harness.cost_model import shape
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.metrics.done import check_files, is_done
from harness.metrics.run_files import load_config, load_manifest, load_samples, load_timeline
from harness.metrics.schemas import reading

WARMUP = 4  # iterations that are left out, a quarter of a short run: the first ones allocate memory and fill caches
_MOST_LENGTHS = 800  # of a trace; more become as many quantiles

_WHEN_GIVEN = (
    "decode_weights_s",
    "decode_experts_s",
    "decode_s_per_cached_token",
    "prefill_s_per_pair",
    "log_prob_s_per_pair",
    "train_s_per_pair",
    "log_prob_call_s",
    "train_call_s",
)
"""Costs that are nothing where nothing is fitted to them."""


@dataclass(frozen=True)
class TimedRun:
    """A finished run: what it did, with which model."""

    measured: WorkTimes
    model: ModelConfig
    cell: str


def read_run(folder: Path) -> TimedRun:
    """Raises ConfigError for a folder that is no finished real run of a synchronous schedule."""
    if not is_done(folder):
        raise ConfigError(f"run={folder} is no finished run; give a folder such as results/bench/<cell>/seed=0")
    check_files(folder)
    manifest = load_manifest(folder)
    if manifest["backend"] != "real":
        raise ConfigError(f"run={folder} is {manifest['backend']}: its times were simulated; give a run that was real")
    config = load_config(folder)
    try:
        model = TypeAdapter(ModelConfig).validate_python(config.get("model"))
    except ValidationError as error:
        raise ConfigError(f"run={folder}: {first_line(error, 'model.')}") from error
    with reading(folder / "config.yaml"):
        algorithm = config["algorithm"]
        slots, micro_batch = config["engine"]["slots"], algorithm["micro_batch_groups"] * algorithm["group_size"]
        mini_batches, epochs = (int(algorithm.get(name, 1)) for name in ("mini_batches", "epochs"))
    if rank := config.get("training", {}).get("lora_rank"):
        raise ConfigError(
            f"run={folder} has training.lora_rank={rank}, and costs are of whole weights that travel; give a run with 0"
        )
    timeline = load_timeline(folder)
    try:
        found = measured(
            timeline,
            load_samples(folder).to_pandas(),
            slots=slots,
            micro_batch=micro_batch,
            warmup=min(WARMUP, len(timeline.iteration_ends) // 4),
            mini_batches=mini_batches,
            epochs=epochs,
        )
    except ValueError as error:
        raise ConfigError(f"run={folder}: {error}") from error
    return TimedRun(found, model, manifest["cell"])


def calibrate_runs(folders: Sequence[Path], base: JobConfig, name: str | None = None) -> FittedCosts:
    """Costs called `name` (by default as the first run's cell), fitted to all of these runs at once. base: the job
    whose costs stand for what no run shows. Raises ConfigError as `read_run`, and for runs of different models."""
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if replace(run.model, checkpoint=None) != replace(runs[0].model, checkpoint=None):
            raise ConfigError(
                f"run={folder} has model={run.model.name}, {folders[0]} {runs[0].model.name}; give runs of one"
            )
    costs = replace(base_costs(base, runs[0].model), name=checked_name("name", name or runs[0].cell))
    return replace(calibrate(together([run.measured for run in runs]), costs), base=base.cost.name)


def base_costs(job: JobConfig, model: ModelConfig) -> CostConfig:
    """The costs of one device that holds all of `model`, as `job` has them or its roofline gives them."""
    cost = job.cost if isinstance(job.cost, CostConfig) else roofline(model, job.device, job.cost, JobLayout())
    return replace(cost, weight_bytes=shape.weight_bytes(model))


def base_job(settings: Sequence[str]) -> JobConfig:
    """The job whose costs stand for what was not measured: `cost=tiny_cpu` unless the settings name others."""
    given = any(setting.startswith("cost=") for setting in settings)
    return compose_job(settings if given else ["cost=tiny_cpu", *settings])


def calibrate(measured: WorkTimes, base: CostConfig) -> FittedCosts:
    """`base` with what `measured` tells: all but the speed of the network and of the host's memory. A prompt's prefill
    is taken to cost what its log-probs would, but never more than half of generating. What a call costs besides its
    tokens is one setting for scoring and training: the fixed part that fits both best. Reading the weights is part of
    `decode_step_s`: batches of one size do not tell it from the rest of a step."""
    passes, of_passes = _calls(measured)
    prefill = _prefill(measured, passes)
    decode, of_decoding = _decoding(measured, prefill)
    sync_s, of_sync = _transfers(measured, base)
    shared = _sharing(measured, base)
    costs: dict[str, Any] = {**dict.fromkeys(_WHEN_GIVEN, 0.0), **passes, **prefill, **decode, **shared}
    cost = replace(
        base,
        **costs,
        train_step_s=float(np.median(measured.step_s)),
        sync_s=sync_s,
        prompt_tokens=max(1, round(measured.prompt_tokens)),
        lengths=trace(measured.lengths),
    )
    phases = [*of_decoding, *of_passes, _median("optimizer", ("train_step_s",), measured.step_s, "steps"), of_sync]
    unseen = ["network_bytes_per_s", "host_bytes_per_s", "kv_tokens", "reward_s_per_sample"]
    if shared:
        phases.append(_median("taking the device", ("reload_s",), measured.wake_s, "turns, beyond the bytes"))
        phases.append(_median("giving it back", ("offload_s",), measured.sleep_s, "turns, beyond the bytes"))
    else:
        unseen += ["offload_s", "reload_s"]
    return FittedCosts(cost, tuple(phases), tuple(unseen), base.name)


def trace(lengths: np.ndarray) -> LengthsConfig:
    """Lengths, int64 [n], to draw from; the longest is the cap."""
    values = np.sort(lengths)
    if len(values) > _MOST_LENGTHS:
        quantiles = (np.arange(_MOST_LENGTHS) + 0.5) / _MOST_LENGTHS
        values = np.quantile(values, quantiles, method="inverted_cdf").astype(np.int64)
    return LengthsConfig(kind="trace", cap=int(lengths.max()), values=tuple(values.tolist()))


def _calls(measured: WorkTimes) -> tuple[dict[str, float], list[Phase]]:
    """Scoring and training, fitted at once. Where calls of nearly one size do not tell what is fixed, a forward pass
    is taken to cost a third of forward and backward, as it does in operations."""
    seconds = np.concatenate([measured.log_prob_s, measured.train_s])
    scored = slice(len(measured.log_prob_s))
    trained = slice(len(measured.log_prob_s), None)
    kinds = ("token", "pair") if measured.attention else ("token",)
    units = np.zeros((len(seconds), 1 + 2 * len(kinds)))
    units[:, 0] = 1.0
    for number, kind in enumerate(kinds):
        units[scored, 1 + 2 * number] = getattr(measured, f"log_prob_{kind}s")
        units[trained, 2 + 2 * number] = getattr(measured, f"train_{kind}s")
    found, rule = fit_undisturbed(seconds, units), ""
    costs = found.costs
    if found.doubtful.any():
        found = fit_undisturbed(seconds, np.column_stack([units[:, :1], units[:, 1::2] / 3 + units[:, 2::2]]))
        costs, rule = np.append(found.costs[:1], np.repeat(found.costs[1:], 2)), "; a forward as a third of training"
        costs[1::2] /= 3
    fitted = units @ costs
    names = ["call_s", *(f"{work}_s_per_{kind}" for kind in kinds for work in ("log_prob", "train"))]
    phases = []
    for phase, work, part in (("scoring", "log_prob", scored), ("training", "train", trained)):
        own = tuple(name for name in names if name.startswith(("call", work)))
        fit = Phase.of(phase, own, found, f"calls, scoring and training{rule}")
        error = relative_error(fitted[part], seconds[part]) if len(seconds[part]) else None
        phases.append(replace(fit, error=error))
    return dict(zip(names, costs.tolist(), strict=True)), phases


def _prefill(measured: WorkTimes, passes: dict[str, float]) -> dict[str, float]:
    prefill = {"prefill_s_per_token": passes["log_prob_s_per_token"]}
    if measured.attention:
        prefill["prefill_s_per_pair"] = passes["log_prob_s_per_pair"]
    share = float((_prefill_s(measured, prefill) / measured.generate_s).max())
    return {name: value * min(1.0, 0.5 / max(share, 1e-9)) for name, value in prefill.items()}


def _prefill_s(measured: WorkTimes, prefill: dict[str, float]) -> np.ndarray:
    per_pair = prefill.get("prefill_s_per_pair", 0.0)
    return measured.prompts * prefill["prefill_s_per_token"] + measured.prompt_pairs * per_pair


def _decoding(measured: WorkTimes, prefill: dict[str, float]) -> tuple[dict[str, float], list[Phase]]:
    names = ["decode_step_s", "decode_step_s_per_sample"]
    amounts = [measured.steps, measured.sampled]
    if measured.attention:
        names.append("decode_s_per_cached_token")
        amounts.append(measured.cached)
    before = _prefill_s(measured, prefill)
    found = fit_undisturbed(measured.generate_s - before, np.stack(amounts, axis=1))
    fitted = np.stack(amounts, axis=1) @ found.costs + before
    phase = Phase.of("generation", (*names, *prefill), found, "batches; prefill as scoring")
    costs = dict(zip(names, found.costs.tolist(), strict=True))
    costs["decode_step_s"] = max(costs["decode_step_s"], 1e-9)
    return costs, [replace(phase, error=relative_error(fitted, measured.generate_s))]


def _sharing(measured: WorkTimes, base: CostConfig) -> dict[str, float]:
    if not measured.wake_s.size:
        return {}
    speed = base.host_bytes_per_s
    return {"reload_s": _beyond(measured.wake_s, speed, base), "offload_s": _beyond(measured.sleep_s, speed, base)}


def _transfers(measured: WorkTimes, base: CostConfig) -> tuple[float, Phase]:
    through_host = _beyond(measured.host_copy_s, base.host_bytes_per_s, base)
    through_network = _beyond(measured.broadcast_s, base.network_bytes_per_s, base)
    seconds = measured.host_copy_s if measured.host_copy_s.size else measured.broadcast_s
    phase = _median("weights", ("sync_s",), seconds, "transfers, beyond what their bytes take")
    return (through_host if measured.host_copy_s.size else through_network), phase


def _median(name: str, costs: tuple[str, ...], seconds: np.ndarray, what: str) -> Phase:
    error = relative_error(np.full(len(seconds), np.median(seconds)), np.maximum(seconds, 1e-9))
    return Phase(name, costs, f"the median of {len(seconds)} {what}", error)


def _beyond(seconds: np.ndarray, bytes_per_s: float, base: CostConfig) -> float:
    """The fixed part of what moves the weights at this speed."""
    if not seconds.size:
        return 0.0
    return max(0.0, float(np.median(seconds)) - base.weight_bytes / bytes_per_s)
