"""`make table`: what is simulated or planned, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import last_values, own_arguments
from harness.cli.steps import StepsBar, working
from harness.config import ConfigError

STUDIES = {
    "schedules": "harness.studies.schedule_table",
    "staleness": "harness.studies.staleness",
    "memory": "harness.studies.gpu_memory",
    "transfers": "harness.studies.transfer_on_paper",
}
"""Modules that write a page, `write_page(progress)`, where one is told what is done next."""


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Make the table that `of` names, the schedules' by default, and write its page."""
    own, _ = own_arguments(arguments, "of")
    of = last_values(own).get("of", "schedules")
    if of == "scaling":
        from harness.studies.scaling import write_study

        with StepsBar("planning", console) as steps:
            path = write_study(steps.done)
    elif of in STUDIES:
        with working("working", console) as show:
            path = import_module(STUDIES[of]).write_page(lambda said: show(f"working: {said}"))
    else:
        raise ConfigError(f"of={of} is no table; choose one of {', '.join(STUDIES)}, scaling")
    console.print(f"{path}", highlight=False, soft_wrap=True, markup=False)
    return 0
