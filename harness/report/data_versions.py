"""Which policy version sampled the data that a piece of work is about: what a bar of a timeline is coloured by."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pyarrow as pa

from harness.metrics.timeline import BACKGROUND_SYNC_KINDS, SYNC_KINDS, Timeline
from harness.protocols import Span

OWN_KINDS = SYNC_KINDS | BACKGROUND_SYNC_KINDS | {"generate"}
"""Kinds of work whose span has the version itself: of the weights that travel, or that sample."""
_ROUNDED_S = 1e-6  # what times in files may be off

DataVersion = Callable[[Span], int | None]


def data_versions(timeline: Timeline, samples: pa.Table) -> DataVersion:
    """The version that sampled the first token of most of the samples that a span is about, the older of two.

    Where the actor computes a micro-batch, those are its samples; of all other work on samples, those of the batch:
    their first version is known once they are trained. None where none of them was. samples: samples.parquet.
    """
    batches: dict[int, list[int]] = defaultdict(list)
    micro_batches: dict[tuple[int, float], list[int]] = defaultdict(list)
    columns = (samples[name].to_pylist() for name in ("trained_iteration", "trained_at", "version_first"))
    for iteration, at, first in zip(*columns, strict=True):
        if iteration is not None:
            batches[iteration].append(first)
            micro_batches[iteration, at].append(first)
    updates: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "update_actor":
            updates[span.iteration].append(span)
    of_batch = {iteration: _most_common(versions) for iteration, versions in batches.items()}
    of_update: dict[Span, int] = {}
    for (iteration, at), versions in micro_batches.items():
        before = [span for span in updates[iteration] if span.end <= at + _ROUNDED_S]
        if before:
            of_update[max(before, key=lambda span: span.end)] = _most_common(versions)

    def version(span: Span) -> int | None:
        if span.kind in OWN_KINDS:
            return span.version
        return of_update.get(span, of_batch.get(span.iteration))

    return version


def _most_common(versions: Sequence[int]) -> int:
    counts = Counter(versions)
    return min(counts, key=lambda version: (-counts[version], version))
