"""Whether what a finished run has read is still what its settings name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.config import ConfigError, JobConfig
from harness.config.inputs import inputs_of
from harness.metrics.done import is_done
from harness.metrics.run_files import load_manifest

SHOWN = 12
"""Digits of a digest that tell two apart."""


def digests(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The digest of what each setting named, by the setting, of a run; none of one that an earlier version made."""
    return {one["setting"]: one["digest"] for one in manifest.get("inputs", ())}


def refuse_changed_inputs(config: JobConfig, folders: Iterable[Path]) -> None:
    """Raises ConfigError, naming both digests, where one of these runs of `config` is finished and read something else
    than is there now: it would be taken for done."""
    now = None
    for folder in folders:
        if not is_done(folder):
            continue
        now = inputs_of(config) if now is None else now
        before = digests(load_manifest(folder))
        for one in now:
            if one.setting in before and before[one.setting] != one.digest:
                then, there = before[one.setting][:SHOWN], one.digest[:SHOWN]
                raise ConfigError(
                    f"{one.setting}={one.path} has changed since {folder} was made: {then} then, {there} now; run it "
                    "again with FORCE=1, or keep both with EXPERIMENT=another_name"
                )
