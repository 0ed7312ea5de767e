"""`make paper`, `make table`, `make sample`: published experiments, simulated tables, a model to try text with."""

import os
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.cli.steps import StepsBar, working
from harness.config import ConfigError
from harness.metrics.formatting import say


def paper(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Run the experiment that is named, or all; print what was written. Raises ConfigError where none is named."""
    from harness.cli.forked_runs import ForkedRuns
    from harness.report.page.document import print_written
    from harness.studies.papers.experiment import Context, names
    from harness.studies.papers.run import run_papers

    own, _ = own_arguments(arguments, "paper")
    if "paper" not in own:
        raise ConfigError(f"which? paper=all, or one of {', '.join(names())}")
    with working("reading", console) as show, ForkedRuns() as runs:
        context = Context(results, console, runs.start, processes=os.cpu_count() or 1, progress=show)
        paths = run_papers(own["paper"], context)
    print_written(paths, console)
    return 0


STUDIES = {
    "schedules": "harness.studies.schedule_table",
    "staleness": "harness.studies.staleness",
    "memory": "harness.studies.gpu_memory",
    "transfers": "harness.studies.transfer_on_paper",
}
"""Modules that write a page, `write_page(progress)`, where one is told what is done next."""


def table(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Make the table that `of` names, the schedules' by default, and write its page."""
    own, _ = own_arguments(arguments, "of")
    of = own.get("of", "schedules")
    if of == "scaling":
        from harness.studies.scaling import write_study

        with StepsBar("planning", console) as steps:
            path = write_study(steps.done)
    elif of in STUDIES:
        with working("working", console) as show:
            path = import_module(STUDIES[of]).write_page(lambda said: show(f"working: {said}"))
    else:
        raise ConfigError(f"of={of} is no table; choose one of {', '.join(STUDIES)}, scaling")
    say(console, path)
    return 0


def sample(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Makes both, and says what can be done with them."""
    from harness.studies.sample import make_sample

    named = [argument.removeprefix("folder=") for argument in arguments if argument.startswith("folder=")]
    if len(arguments) != 1 or len(named) != 1 or not named[0]:
        raise ConfigError("cadence sample takes one setting, the folder to write to: folder=my")
    folder = Path(named[0])
    if taken := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
        raise ConfigError(f"folder={folder} cannot be made: {taken[0]} is a file; name another")
    with working(f"making {folder}", console) as show:
        census = make_sample(folder, lambda step: show(f"making {folder}: the model sees demonstrations, {step}"))
    for line in (f"{folder}/model, {folder}/train.jsonl, {folder}/test.jsonl", census):
        say(console, line)
    model, train, test = (shlex.quote(f"{folder}/{name}") for name in ("model", "train.jsonl", "test.jsonl"))
    say(console, f"cadence bench model={model} task=data task.data={train} task.held_out_data={test}")
    return 0
