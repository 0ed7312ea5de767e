"""Whether what a finished run has read is still what its settings name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.config import JobConfig
from harness.config.inputs import digests, inputs_of, refuse_changed
from harness.metrics.done import is_done
from harness.metrics.run_files import load_manifest


def refuse_changed_inputs(config: JobConfig, folders: Iterable[Path]) -> None:
    """Raises ConfigError, naming both digests, where one of these runs of `config` is finished and read something else
    than is there now: it would be taken for done."""
    now = None
    for folder in folders:
        if not is_done(folder):
            continue
        now = inputs_of(config) if now is None else now
        fix = "run it again with FORCE=1, or keep both with EXPERIMENT=another_name"
        refuse_changed(digests(load_manifest(folder)), now, f"{folder} was made", fix)
