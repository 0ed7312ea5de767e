"""Costs from the timings of a device profile, by relative least squares, so that short calls count as much as long
ones; and the shares of the device's peaks that they imply. `make profile` is a line over it. What composes settings is
imported where it is needed: a machine that only records profiles has no Hydra."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from harness.calibration.fitting import FittedCosts, Phase, fit, relative_error
from harness.calibration.profile.rows import DeviceProfile, TimingRow, TransferRow
from harness.config import BytesCost, CostConfig, DeviceConfig, JobConfig, ModelConfig, TransferCost
from harness.config.fields import checked_name
from harness.config.transports import transport_of
from harness.cost_model import shape
from harness.cost_model.roofline import OPTIMIZER_BYTES

_BETTER = 0.8  # of the squares: as much has to be left for a step's floor to be believed
_NETWORK = "network_bytes_per_s"
_UNSEEN = ("call_s", _NETWORK, "kv_tokens", "reward_s_per_sample", "prompt_tokens", "lengths")


def this_device(job: JobConfig) -> torch.device:
    """The device that is profiled: this machine's first GPU, or where it has none, or the job wants no GPU, a core."""
    if torch.cuda.is_available() and job.cluster.kind != "cpu":
        return torch.device("cuda", 0)
    torch.set_num_threads(job.cluster.threads_per_device)
    return torch.device("cpu")


def base_of(profile: DeviceProfile, settings: Sequence[str]) -> JobConfig:
    """The job whose costs stand for what a profile does not show, unless the settings name others: of this device's
    roofline where its figures are known, else those of the tiny model on a core."""
    from harness.config.compose import choices, compose_job

    if any(setting.startswith("cost=") for setting in settings):
        return compose_job(settings)
    device = known_device(profile.device, choices("device"))
    usual = ["cost=tiny_cpu"] if device is None else ["cost=roofline", f"device={device}"]
    return compose_job([*usual, *settings])


def fitted_costs(profile: DeviceProfile, base: JobConfig, name: str) -> FittedCosts:
    """Costs of the profile's model called `name`."""
    from harness.calibration.runs import base_costs

    costs = fit_profile(profile, base_costs(base, profile.model), checked_name("name", name))
    return replace(costs, base=base.cost.name)


def fit_profile(profile: DeviceProfile, base: CostConfig, name: str) -> FittedCosts:
    """Costs called `name`, of one device that holds the whole model. `base` has what a profile does not show: the
    network, the way to a worker and back (`call_s`), and the workload. What a prefill takes besides its tokens is
    fitted and left out: costs have no place for it."""
    decode, of_decode = _decode(profile.of("decode"))
    prefill, of_prefill = _pass(profile.of("prefill"), "prefill", None)
    log_prob, of_log_prob = _pass(profile.of("log_prob"), "log_prob", "log_prob_call_s")
    train, of_train = _pass(profile.of("train"), "train", "train_call_s")
    (step,) = profile.of("optimizer")
    copies, of_copies = _copies(profile)
    transfers, of_transfers = _transfers(profile.transfers)
    costs: dict[str, Any] = {**decode, **prefill, **log_prob, **train, **copies, "train_step_s": step.seconds}
    costs["transfers"] = transfers
    broadcast = [each for each in transfers if transport_of(each.transport).over == "device"]
    if broadcast:
        costs[_NETWORK] = broadcast[0].load.bytes_per_s
    cost = replace(base, name=name, weight_bytes=shape.weight_bytes(profile.model), **costs)
    of_step = Phase("optimizer", ("train_step_s",), "one timing", None)
    phases = (of_decode, of_prefill, of_log_prob, of_train, of_step, *of_copies, *of_transfers)
    unseen = tuple(name for name in _UNSEEN if not (broadcast and name == _NETWORK))
    return FittedCosts(cost, tuple(_at_depths(phase, profile) for phase in phases), unseen, base.name)


def _decode(rows: Sequence[TimingRow]) -> tuple[dict[str, float], Phase]:
    """A step is flat up to so many samples and grows from there: the number that explains the timings best."""
    seconds, samples = _seconds(rows), np.array([row.samples for row in rows], np.float64)
    cached = samples * np.array([row.length for row in rows], np.float64)

    def amounts(knee: float) -> np.ndarray:
        return np.stack([np.ones(len(rows)), np.maximum(samples, knee), cached], axis=1)

    def squares(knee: float) -> float:
        fitted = amounts(knee) @ fit(seconds, amounts(knee), 1 / seconds).costs
        return float(((fitted / seconds - 1) ** 2).sum())

    # between two numbers of samples that were timed the squares are smooth, and have one minimum
    parts = [minimize_scalar(squares, bounds=part, method="bounded") for part in pairwise(np.unique(samples)[:-1])]
    knee = float(min(parts, key=lambda part: part.fun).x) if parts else 0.0
    if squares(knee) > _BETTER * squares(0.0):
        knee = 0.0
    found = fit(seconds, amounts(knee), 1 / seconds)
    step_s, per_sample, per_cached = found.costs.tolist()
    names = ("decode_step_s", "decode_step_s_per_sample", "decode_s_per_cached_token", "decode_weights_s")
    costs = dict(zip(names, (max(step_s, 1e-9), per_sample, per_cached, knee * per_sample), strict=True))
    return costs, Phase.of("decode", names, found, f"steps of 1 to {samples.max():.0f} samples")


def _pass(rows: Sequence[TimingRow], work: str, fixed: str | None) -> tuple[dict[str, float], Phase]:
    """A forward or training pass: a fixed part, a part per token, a part per pair of tokens of a sample."""
    seconds, samples = _seconds(rows), np.array([row.samples for row in rows], np.float64)
    lengths = np.array([row.length for row in rows], np.float64)
    found = fit(seconds, np.stack([np.ones(len(rows)), samples * lengths, samples * lengths**2], axis=1), 1 / seconds)
    call_s, per_token, per_pair = found.costs.tolist()
    costs = {f"{work}_s_per_token": per_token, f"{work}_s_per_pair": per_pair}
    longest = f"calls of {(samples * lengths).min():.0f} to {(samples * lengths).max():.0f} tokens"
    if fixed is None:
        longest += f", each {call_s:.3g} s besides, which is left out"
        found = replace(found, doubtful=found.doubtful[1:])
    else:
        costs = {fixed: call_s, **costs}
    return costs, Phase.of(work, tuple(costs), found, longest)


def _copies(profile: DeviceProfile) -> tuple[dict[str, float], list[Phase]]:
    """The host's memory, by the slower way; then what loading, giving the device back and taking it take beyond it."""
    found = [_bytes(profile.of(phase)) for phase in ("copy_to_host", "copy_to_device")]
    per_byte, of_copies = max(found, key=lambda each: each[0])
    costs = {"host_bytes_per_s": 1 / per_byte}
    phases = [of_copies]
    for phase, cost in (("load", "sync_s"), ("sleep", "offload_s"), ("wake", "reload_s")):
        (row,) = profile.of(phase)  # type: ignore[arg-type]
        costs[cost] = max(0.0, row.seconds - row.bytes * per_byte)
        phases.append(Phase(phase, (cost,), f"one timing, less {row.bytes / 1e6:.4g} MB at that speed", None))
    return costs, phases


def _bytes(rows: Sequence[TimingRow]) -> tuple[float, Phase]:
    """Seconds of a byte."""
    seconds, moved = _seconds(rows), np.array([row.bytes for row in rows], np.float64)
    found = fit(seconds, np.stack([np.ones(len(rows)), moved], axis=1), 1 / seconds)
    per_byte = float(found.costs[1]) or float(np.median(seconds / moved))
    what = f"copies of {moved.min() / 1e6:.3g} to {moved.max() / 1e6:.4g} MB, the slower way"
    return per_byte, Phase.of("copies", ("host_bytes_per_s",), replace(found, doubtful=found.doubtful[1:]), what)


def _transfers(rows: Sequence[TransferRow]) -> tuple[tuple[TransferCost, ...], list[Phase]]:
    """Costs of each transport and number of training ranks: a fixed part, and one by the byte, of what waits."""
    found, phases = [], []
    for transport, ranks in sorted({(row.transport, row.ranks) for row in rows}):
        same = [row for row in rows if (row.transport, row.ranks) == (transport, ranks)]
        moved = np.array([row.bytes for row in same], np.float64)
        parts, errors = {}, []
        for part in ("send", "stage", "load") if transport_of(transport).staged else ("send", "load"):
            parts[part], error = _bytes_cost(np.array([getattr(row, f"{part}_s") for row in same]), moved)
            errors.append(error)
        found.append(TransferCost(transport, ranks, **parts))
        lines = [f"{part} {cost.fixed_s:.3g} s and {cost.bytes_per_s / 1e9:.3g} GB/s" for part, cost in parts.items()]
        of = f"{transport} from {ranks} training rank{'s' if ranks > 1 else ''}"
        sizes = f"{', '.join(lines)}; transfers of {moved.min() / 1e6:.3g} to {moved.max() / 1e6:.4g} MB"
        phases.append(Phase(of, (), sizes, max(errors)))
    return tuple(found), phases


def _bytes_cost(seconds: np.ndarray, moved: np.ndarray) -> tuple[BytesCost, float]:
    """The line through these times, and the median of |fitted / measured - 1|. Where time did not grow with the bytes,
    the largest transfer tells the speed, and nothing is fixed."""
    seconds = np.maximum(seconds, 1e-9)  # what was there at once
    found = fit(seconds, np.stack([np.ones(len(seconds)), moved], axis=1), 1 / seconds)
    fixed_s, per_byte = found.costs.tolist()
    if per_byte == 0.0:
        fixed_s, per_byte = 0.0, float(seconds[moved.argmax()] / moved.max())
    fitted = fixed_s + per_byte * moved
    error = relative_error(fitted, seconds)
    return BytesCost(float(f"{fixed_s:.6g}"), float(f"{1 / per_byte:.6g}")), error


def _at_depths(phase: Phase, profile: DeviceProfile) -> Phase:
    """Say where fewer layers than all were timed."""
    depths = profile.depths(phase.name)  # type: ignore[arg-type]
    if depths in ([], [profile.model.layers]):
        return phase
    return replace(phase, timings=f"{phase.timings}; timed with {depths[0]} and {depths[1]} layers")


def _seconds(rows: Sequence[TimingRow]) -> np.ndarray:
    return np.array([row.seconds for row in rows], np.float64)


def peak_shares(profile: DeviceProfile, cost: CostConfig) -> list[str]:
    """The shares of the device's peaks that these costs imply, a line each; or that nothing is known of it."""
    from harness.config.compose import choices, compose_job

    device = known_device(profile.device, choices("device"))
    if device is None:
        return [f"No figures of {profile.device} are known, so no shares of its peaks; experiments/device has others."]
    figures = compose_job([f"device={device}"]).device
    shares = implied_shares(cost, profile.model, figures)
    listed = ", ".join(f"{name} {share:.3g}" for name, share in shares.items())
    return [f"Shares of the peaks of device={device}, as the embedded engines reach them: {listed}."]


def about(profile: DeviceProfile) -> list[str]:
    """Sentences that say what was measured."""
    model: ModelConfig = profile.model
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    cores = f", {profile.threads} thread{'s' if profile.threads > 1 else ''}" if profile.kind == "cpu" else ""
    return [f"The embedded engines with {model.name} on {profile.device}{cores}; {versions}."]


def known_device(name: str, known: Collection[str]) -> str | None:
    """The one of `known` that is the device called `name`, h100 for "NVIDIA H100 80GB HBM3"; None if there is none."""
    words = name.lower().replace("-", " ").split()
    found = [each for each in known if each in words]
    return max(found, key=len) if found else None


def implied_shares(cost: CostConfig, model: ModelConfig, device: DeviceConfig) -> dict[str, float]:
    """Shares of the device's peaks by the names of `RooflineConfig`, where they can be told: a cost of nothing has
    none. memory_share comes from reading caches, weights and optimizer state, whichever was seen."""
    flops = shape.forward_flops_per_token(model)
    read = shape.kv_bytes_per_token(model)
    weights = shape.matmul_parameters(model) * shape.bytes_per_number(model)
    state = OPTIMIZER_BYTES * shape.parameters(model)
    found = {
        "forward_share": (flops / device.flops, cost.log_prob_s_per_token),
        "train_share": (shape.train_passes(False) * flops / device.flops, cost.train_s_per_token),
        "decode_share": (flops / device.flops, cost.decode_step_s_per_sample),
        "memory_share (caches)": (read / device.memory_bytes_per_s, cost.decode_s_per_cached_token),
        "memory_share (weights)": (weights / device.memory_bytes_per_s, cost.decode_weights_s),
        "memory_share (optimizer)": (state / device.memory_bytes_per_s, cost.train_step_s),
        "host_share": (1 / device.host_bytes_per_s, 1 / cost.host_bytes_per_s),
    }
    if any(transport_of(each.transport).over == "device" for each in cost.transfers):
        found["network_share"] = (1 / device.link_bytes_per_s, 1 / cost.network_bytes_per_s)
    return {name: least / seconds for name, (least, seconds) in found.items() if seconds > 0}
