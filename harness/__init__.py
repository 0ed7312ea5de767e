"""Cadence: the same RL post-training job under interchangeable schedules, measured. `harness.run` makes runs,
`harness.load` reads finished ones, as pandas tables (docs/results.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.api import Results, load, run

__all__ = ["Results", "load", "run"]


def __getattr__(name: str) -> Any:
    """The public functions, loaded when they are first used: importing a part of the harness brings nothing along."""
    if name not in __all__:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    from harness import api

    return getattr(api, name)
