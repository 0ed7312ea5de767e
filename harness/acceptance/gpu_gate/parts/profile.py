"""Times of the embedded engines on this device, and costs fitted to them: what a simulation of it needs."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import QWEN_HALF_B, TINY
from harness.acceptance.gpu_gate.results import Check
from harness.calibration.profile.record import Grid, record
from harness.calibration.profile.rows import PHASES, DeviceProfile, write_profile
from harness.calibration.profile.timing import Stopwatch
from harness.config import TrainingConfig

_GRIDS = {
    "cpu": Grid(
        decode=((1, 16), (8, 16), (8, 64)),
        prefill=((1, 16), (8, 32), (4, 96)),
        log_prob=((1, 16), (8, 32), (4, 96)),
        train=((1, 16), (8, 32), (4, 96)),
        copies=(1 << 16, 1 << 20),
    ),
    "cuda": Grid(
        decode=((1, 128), (16, 128), (128, 128), (512, 128), (16, 2048), (64, 2048)),
        prefill=((1, 128), (8, 512), (32, 1024), (4, 2048)),
        log_prob=((1, 128), (8, 512), (32, 1024), (4, 2048)),
        train=((1, 128), (8, 512), (16, 1024), (4, 2048)),
        copies=(1 << 22, 1 << 25, 1 << 28, 1 << 30),
    ),
}


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks that the profile could be recorded and costs fitted to it."""
    torch.set_num_threads(1)
    model = QWEN_HALF_B if setting.gpu else TINY
    layers = (model.layers,)
    found = record(
        model,
        TrainingConfig(),
        device=setting.device,
        watch=Stopwatch(setting.device, repeats=5, at_most_s=2.0),
        grid=_GRIDS[setting.kind],
        depths=(layers, layers),
        progress=lambda row: print(row, flush=True),
    )
    path = setting.folder / f"{model.name}.profile.json"
    write_profile(path, found)
    complete = {row.phase for row in found.rows} == set(PHASES)
    yield Check(f"{model.name}, {len(found.rows)} timings", f"{path}", complete)
    yield _costs(replace(found, rows=tuple(found.rows)), setting)


def _costs(found: DeviceProfile, setting: GateSetting) -> Check:
    """Fitting needs more packages than timing does."""
    what = "costs fitted to them"
    try:
        from harness.calibration.fitting import write_costs
        from harness.calibration.profile.fitting import about, base_of, fitted_costs, peak_shares

        fitted = fitted_costs(found, base_of(found, ["cost=tiny_cpu"]), f"{found.model.name}_gate")
        shares = peak_shares(found, fitted.cost)
    except ModuleNotFoundError as missing:
        return Check(
            what, f"{missing}; cadence calibrate run={setting.folder}/results.json fits them anywhere", left_out=True
        )
    path = write_costs(setting.folder / "costs", fitted, [*about(found), *shares])
    sound = fitted.cost.train_s_per_token + fitted.cost.train_call_s > 0 and fitted.cost.decode_step_s > 0
    return Check(what, f"{path}; {shares[0]}", sound)
