"""`make mlflow-sync`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError
from harness.config.fields import checked_name
from harness.metrics.formatting import redacted


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Bring MLflow up to date with the finished runs, of all experiments or of `experiment=name`, and say what was
    lacking. Raises ConfigError where it cannot."""
    from harness.metrics.mlflow_mirror import MlflowException, SyncedRun, first_line, sync, tracking_uri

    own, _ = own_arguments(arguments, "experiment")
    named = [checked_name("experiment", name) for name in own["experiment"][-1:]]
    uri, folder = redacted(tracking_uri(results)), results.joinpath(*named)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there; run `make bench` first")
    runs: list[SyncedRun] = []
    try:
        for filled in sync(results, folder):
            runs.append(filled)
            if filled.changed:
                what = f"{'made' if filled.created else 'filled'}: {filled.metrics:,} metrics, {filled.files} files"
                console.print(f"{filled.path} {what}", highlight=False, soft_wrap=True, markup=False)
    except MlflowException as failure:
        raise ConfigError(f"{uri}: {first_line(failure)}; start the server, or set MLFLOW_TRACKING_URI") from failure
    changed = sum(filled.changed for filled in runs)
    console.print(f"{len(runs)} finished runs, {changed} brought up to date in {uri}", highlight=False, soft_wrap=True)
    return 0
