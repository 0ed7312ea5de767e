"""Frames that travel in messages: what a reader did not ask for stays here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.transfer_queue.columns import ColumnSpec
from harness.transfer_queue.frames import Handout, Part, pack
from harness.transfer_queue.storage.inline import inline
from harness.transfer_queue.storage.shm_gather import gathered

_WASTE = 64 << 10
"""Bytes that may travel for nothing: fewer cost less than a copy."""


def trimmed(handout: Handout, specs: Mapping[str, ColumnSpec]) -> Handout:
    """The same rows, gathered into one frame where they are a small part of large ones."""
    sizes = [len(frame.place) for frame in handout.frames if isinstance(frame.place, bytes)]
    if len(sizes) < len(handout.frames) or sum(sizes) <= _WASTE:
        return handout
    asked = sum(
        handout.frames[f].sizes[name] * (stop - start) // max(1, handout.frames[f].rows)
        for part in handout.parts
        for f, start, stop in part.runs
        for name in part.columns
    )
    if sum(sizes) <= asked + _WASTE:
        return handout
    columns = gathered(handout.frames, handout.parts, specs)
    rows = handout.rows.size
    frame = inline({name: pack(column) for name, column in columns.items()}, rows)
    return replace(handout, frames=(frame,), parts=(Part(tuple(columns), ((0, 0, rows),)),))
