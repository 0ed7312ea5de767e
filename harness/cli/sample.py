"""`make sample FOLDER=my`: a small model with a tokenizer, and problems for it, to try text with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.steps import working
from harness.config import ConfigError
from harness.metrics.formatting import say


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
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
