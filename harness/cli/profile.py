"""`make profile`: costs from times of the engines on this machine's device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.cli.calibrate import print_costs
from harness.config.fields import checked_name


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Time the embedded engines on this machine's device, or read times from a file, and fit costs to them."""
    from harness.calibration.fitting import explained, write_costs
    from harness.calibration.profile.fitting import about, base_of, fitted_costs, peak_shares, this_device
    from harness.calibration.profile.record import record
    from harness.calibration.profile.rows import read_profile, write_profile
    from harness.config.compose import compose_job

    own, settings = own_arguments(arguments, "name", "profile")
    job = compose_job(settings)
    name = checked_name("name", own["name"][-1] if own["name"] else f"{job.model.name}_profile")
    path = Path(own["profile"][-1]) if own["profile"] else results / "profiles" / f"{name}.json"
    if own["profile"]:
        found = read_profile(path)
    else:
        with console.status("timing") as status:
            found = record(
                job.model,
                job.training,
                device=this_device(job),
                bucket_bytes=job.cluster.bucket_bytes,
                progress=lambda row: status.update(f"timing {row}"),
            )
        write_profile(path, found)
        console.print(f"{path}", highlight=False, soft_wrap=True, markup=False)
    fitted = fitted_costs(found, base_of(found, settings), name)
    shares = peak_shares(found, fitted.cost)
    written = write_costs(results / "costs", fitted, [*about(found), *shares])
    print_costs(written, [*about(found), *explained(fitted), *shares], console)
    return 0
