"""Simulated chaos over many seeds, in as many processes as there are cores, within a time; and what came of it."""

from __future__ import annotations

import json
import os
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path

from harness.acceptance.chaos.simulated import Chaos, play_in_a_folder
from harness.metrics.atomic_files import write_text
from harness.rpc.children import parallel_as_completed

_GRACE_S = 120.0
"""Seconds that a seed may take beyond the limit: then what waits for it says so."""


@dataclass
class ChaosCampaign:
    """Simulated chaos over many seeds. skipped: seeds for which no time was left."""

    first: int
    seeds: int
    done: list[Chaos] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0

    @property
    def faults(self) -> int:
        """Faults that happened in all runs."""
        return sum(one.faults for one in self.done)

    @property
    def struck(self) -> Counter[str]:
        """Faults that happened, by kind."""
        return sum((one.struck for one in self.done), Counter())

    @property
    def failed(self) -> list[Chaos]:
        """Runs that broke a promise."""
        return [one for one in self.done if one.problems]


def run_campaign(campaign: ChaosCampaign, limit_s: float, progress: Callable[[str], None] = lambda said: None) -> None:
    """Plays its seeds; none is begun after `limit_s`. What is done is in it, also where this is interrupted."""
    started = time.monotonic()
    until = started + limit_s  # all processes of a machine read the same
    numbers = list(range(campaign.first, campaign.first + campaign.seeds))
    play = partial(_play_in_time, until=until)
    for _, chaos in parallel_as_completed(
        play, numbers, processes=os.cpu_count() or 1, timeout_s=limit_s + _GRACE_S, what="simulated chaos"
    ):
        if chaos is None:
            campaign.skipped += 1
            continue
        insort(campaign.done, chaos, key=lambda one: one.seed)
        campaign.seconds = time.monotonic() - started
        progress(f"{len(campaign.done)} seeds, {campaign.faults:,} faults, {len(campaign.failed)} failed")


def _play_in_time(seed: int, *, until: float) -> Chaos | None:
    if time.monotonic() > until:
        return None
    with redirect_stderr(StringIO()):  # lines on samples whose tools hang, of which there are many
        return play_in_a_folder(seed)


def repeat_command(seed: int) -> str:
    """The command that repeats one seed."""
    return f"make chaos FIRST={seed} SEEDS=1"


def write_campaign(campaign: ChaosCampaign, folder: Path) -> list[Path]:
    """simulated.json and simulated.md."""
    folder.mkdir(parents=True, exist_ok=True)
    struck = dict(campaign.struck.most_common())
    found = {
        "first": campaign.first,
        "seeds": len(campaign.done),
        "skipped": campaign.skipped,
        "seconds": round(campaign.seconds, 1),
        "faults": campaign.faults,
        "struck": struck,
        "failed": [{"seed": one.seed, "problems": one.problems, "told": one.told} for one in campaign.failed],
    }
    paths = [folder / "simulated.json", folder / "simulated.md"]
    write_text(paths[0], json.dumps(found, indent=1) + "\n")
    write_text(paths[1], page(campaign))
    return paths


def page(campaign: ChaosCampaign) -> str:
    """A page of Markdown: a table of schedules, and each failure with the command that repeats it."""
    schedules: dict[str, list[Chaos]] = {}
    for one in campaign.done:
        schedules.setdefault(one.schedule, []).append(one)
    lines = ["# Simulated faults", "", summary(campaign), "", "| schedule | runs | attempts | faults | failed |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, its in sorted(schedules.items()):
        counts = (len(its), sum(1 + one.attempts for one in its), sum(one.faults for one in its))
        failed = sum(bool(one.problems) for one in its)
        lines.append(f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + f" | {failed} |")
    lines += ["", "| fault | times |", "|---|---:|"]
    lines += [f"| {what} | {count:,} |" for what, count in campaign.struck.most_common()]
    for one in campaign.failed:
        lines += ["", f"Seed {one.seed}, {one.schedule}: `{repeat_command(one.seed)}`", ""]
        lines += [f"- {line}" for line in (*one.told, *one.problems)]
    return "\n".join(lines) + "\n"


def summary(campaign: ChaosCampaign) -> str:
    """One line on all runs."""
    left = f"; {campaign.skipped} seeds were not begun in time" if campaign.skipped else ""
    return (
        f"{campaign.faults:,} faults in {len(campaign.done):,} simulated runs, {campaign.seconds:.0f} s: "
        f"{len(campaign.failed)} broke a promise{left}"
    )
