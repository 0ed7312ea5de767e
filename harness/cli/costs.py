"""`make calibrate`, `make profile`: costs from finished real runs, and from times of the engines on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from harness.cli.arguments import every_value, own_arguments
from harness.cli.steps import working
from harness.config import ConfigError
from harness.config.fields import checked_name
from harness.metrics.formatting import say

if TYPE_CHECKING:
    from harness.calibration.profile.rows import DeviceProfile


def calibrate(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Fit costs to finished real runs, or to what the GPU gate found, and write them as a file of settings."""
    from harness.calibration.fitting import explained, write_costs
    from harness.calibration.profile.rows import GATE, read_gate
    from harness.calibration.runs import base_job, calibrate_runs

    runs, rest = every_value("run", arguments)
    own, settings = own_arguments(rest, "name")
    if not runs:
        raise ConfigError("which run? run=results/bench/<cell>/seed=0, or several of them")
    if runs[0].endswith(GATE):
        return _fit_profile(read_gate(Path(runs[0])), settings, own.get("name"), results, console)
    fitted = calibrate_runs(list(map(Path, runs)), base_job(settings), own.get("name"))
    path = write_costs(results / "costs", fitted, [f"Fitted to {' and '.join(runs)}."])
    print_costs(path, explained(fitted), console)
    return 0


def print_costs(path: Path, explained: Sequence[str], console: Console) -> None:
    """Print what was fitted, and the command that uses it."""
    for line in explained:
        say(console, line)
    say(console, f"\n{path}\ncadence bench backend=virtual cost={path}")


def profile(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Time the embedded engines on this machine's device, or read times from a file, and fit costs to them."""
    from harness.calibration.profile.fitting import this_device
    from harness.calibration.profile.record import record
    from harness.calibration.profile.rows import read_profile, write_profile
    from harness.config.compose import compose_job

    own, settings = own_arguments(arguments, "name", "profile")
    job = compose_job(settings)
    name = checked_name("name", own.get("name", f"{job.model.name}_profile"))
    path = Path(own["profile"]) if "profile" in own else results / "profiles" / f"{name}.json"
    if "profile" in own:
        found = read_profile(path)
    else:
        with working("timing", console) as show:
            found = record(
                job.model,
                job.training,
                device=this_device(job),
                bucket_bytes=job.cluster.bucket_bytes,
                progress=lambda row: show(f"timing {row}"),
            )
        write_profile(path, found)
        say(console, path)
    return _fit_profile(found, settings, name, results, console)


def _fit_profile(
    found: DeviceProfile, settings: Sequence[str], name: str | None, results: Path, console: Console
) -> int:
    from harness.calibration.fitting import explained, write_costs
    from harness.calibration.profile.fitting import about, base_of, fitted_costs, peak_shares

    fitted = fitted_costs(found, base_of(found, settings), name or f"{found.model.name}_profile")
    shares = peak_shares(found, fitted.cost)
    written = write_costs(results / "costs", fitted, [*about(found), *shares])
    print_costs(written, [*about(found), *explained(fitted), *shares], console)
    return 0
