"""Fitted costs as a file of settings, `cost=results/costs/mine.yaml`, whose comments say what they rest on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from harness.cost_model.calibration.fitting import Fitted, Phase
from harness.metrics.atomic_files import write_text

_WIDE = 118


def write_costs(folder: Path, fitted: Fitted, about: Sequence[str]) -> Path:
    """Write the file, named as the costs are, and return its path. about: what was measured, a comment each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{fitted.cost.name}.yaml"
    lines = [*about, *explained(fitted)]
    comments = [f"# {part}" for line in lines for part in wrap(line, _WIDE, subsequent_indent="  ")]
    write_text(path, "\n".join([*comments, *_settings(asdict(fitted.cost))]) + "\n")
    return path


def explained(fitted: Fitted) -> list[str]:
    """What was fitted, to what, and how well, a line for each phase; then what was not."""
    unseen = f"Not seen, and as in cost={fitted.base}: {', '.join(fitted.unseen)}."
    return [*(_phase(fitted, phase) for phase in fitted.phases), unseen]


def _phase(fitted: Fitted, phase: Phase) -> str:
    said = [phase.timings]
    if phase.error is not None:
        said.append(f"median error {phase.error:.1%}")
    if phase.note:
        said.append(phase.note)
    return f"{phase.name}: {', '.join(fitted.values(phase.costs))}; {'; '.join(said)}."


def _settings(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _settings(value, indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(float(f'{value:.6g}') if isinstance(value, float) else value)}"
