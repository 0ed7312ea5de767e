"""`make table`, `make plan`, `make scaling` and `make predict`: what is simulated besides runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError


def table(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Simulate every schedule under twelve conditions, and write docs/schedule_table.md."""
    from harness.studies.schedule_table.study import write_page

    if arguments:
        raise ConfigError(f"{arguments[0]} changes nothing: `make table` has no settings")
    with console.status("simulating") as status:
        path = write_page(lambda said: status.update(f"simulating: {said}"))
    console.print(f"{path}", highlight=False)
    return 0


def plan(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Search splits and layouts of every schedule, or of one, for the fastest."""
    from harness.cli.plan import plan_command

    plan_command(arguments, results, console)
    return 0


def scaling(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Plan every schedule for 32 to 1,024 devices, and write docs/scaling.md."""
    from harness.studies.planner.scaling import write_study

    if arguments:
        raise ConfigError(f"{arguments[0]} changes nothing: `make scaling` has no settings")
    with console.status("planning") as status:
        path = write_study(results, lambda said: status.update(f"planning: done with {said}"))
    console.print(f"{path}", highlight=False)
    return 0


def predict(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Calibrate on the synchronous rows of a published table, predict the others, and say how far off that is."""
    from harness.studies.predictions.page import draw, print_fits, print_predictions, write_csv
    from harness.studies.predictions.phases import check_given
    from harness.studies.predictions.run import predict_table

    own, settings = own_arguments(arguments, "table", "given")
    if not own["table"]:
        raise ConfigError("which table? TABLE=experiments/papers/verl_fully_async.csv")
    path, given = Path(own["table"][-1]), check_given(own["given"][-1] if own["given"] else "train")
    with console.status("reading") as status:
        predicted = predict_table(path, given, settings, processes=2, progress=status.update)
    print_fits(predicted.fits, console)
    print_predictions(predicted.predictions, given, console)
    folder = results / "predict"
    folder.mkdir(parents=True, exist_ok=True)
    for write, end in ((write_csv, "csv"), (partial(draw, name=path.stem), "png")):
        write(folder / f"{path.stem}-{given}.{end}", predictions=predicted.predictions, given=given)
        console.print(f"{folder / f'{path.stem}-{given}.{end}'}", highlight=False, soft_wrap=True)
    return 0
