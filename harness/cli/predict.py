"""`make predict`: a published table's asynchronous rows from its synchronous ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Calibrate on the synchronous rows of a published table, predict the others, and say how far off that is."""
    from harness.prediction.page import draw, print_fits, print_predictions, write_csv
    from harness.prediction.phases import check_given
    from harness.prediction.prediction import predict_table

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
        console.print(f"{folder / f'{path.stem}-{given}.{end}'}", highlight=False, soft_wrap=True, markup=False)
    return 0
