"""A profile of a model on this machine, and costs fitted to it. `make profile` is a line over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.config import CostConfig, JobConfig, ModelConfig
from harness.config.compose import choices, compose_job
from harness.cost_model.calibration.fitting import Fitted
from harness.cost_model.calibration.runs import base_costs, checked_name
from harness.cost_model.profile.fitting import fit_profile
from harness.cost_model.profile.rows import Profile
from harness.cost_model.profile.shares import implied_shares, known_device


def this_device(job: JobConfig) -> torch.device:
    """What of this machine is profiled: its first GPU, or where it has none, or the job wants no GPU, a core."""
    if torch.cuda.is_available() and job.cluster.kind != "cpu":
        return torch.device("cuda", 0)
    torch.set_num_threads(job.cluster.threads_per_device)
    return torch.device("cpu")


def base_of(profile: Profile, settings: Sequence[str]) -> JobConfig:
    """The job whose costs stand for what a profile does not show, unless the settings name others: of this device's
    roofline where its figures are known, else those of the tiny model on a core."""
    if any(setting.startswith("cost=") for setting in settings):
        return compose_job(settings)
    device = known_device(profile.device, choices("device"))
    usual = ["cost=tiny_cpu"] if device is None else ["cost=roofline", f"device={device}"]
    return compose_job([*usual, *settings])


def fitted_costs(profile: Profile, base: JobConfig, name: str) -> Fitted:
    """Costs of the profile's model called `name`."""
    return replace(fit_profile(profile, base_costs(base, profile.model), checked_name(name)), base=base.cost.name)


def told_shares(profile: Profile, cost: CostConfig) -> list[str]:
    """The shares of the device's peaks that these costs imply, a line each; or that nothing is known of it."""
    device = known_device(profile.device, choices("device"))
    if device is None:
        return [f"No figures of {profile.device} are known, so no shares of its peaks; experiments/device has others."]
    figures = compose_job([f"device={device}"]).device
    shares = implied_shares(cost, profile.model, figures)
    listed = ", ".join(f"{name} {share:.3g}" for name, share in shares.items())
    return [f"Shares of the peaks of device={device}, as the embedded engines reach them: {listed}."]


def about(profile: Profile) -> list[str]:
    """What was measured, in sentences."""
    model: ModelConfig = profile.model
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    cores = f", {profile.threads} thread{'s' if profile.threads > 1 else ''}" if profile.kind == "cpu" else ""
    return [f"The embedded engines with {model.name} on {profile.device}{cores}; {versions}."]
