"""How busy simulated devices are."""

from __future__ import annotations

from collections.abc import Mapping

from harness.studies.papers.modes import Steps


def busy_of_all(its: Steps, devices: Mapping[str, int]) -> float:
    """Share of the time in which a device works, for whatever role: a mean over devices.

    An engine works as long as it has any sample, were it the last of a batch. devices: of each pool, by role, where
    pools are one device of the simulation each; none where all roles share all devices.
    """
    timeline = its.recorder.timeline
    if not devices:
        return 1.0 - timeline.idle("actor", its.window)
    busy = {role: 1.0 - timeline.idle(role, its.window) for role in devices}
    return sum(devices[role] * busy[role] for role in devices) / sum(devices.values())


def busy_of_busiest(its: Steps) -> float:
    """The same of the busiest pool: how near the step is to what no schedule could undercut on these pools."""
    return its.recorder.timeline.fraction_of_bound(its.window)
