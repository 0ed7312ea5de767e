"""What keeps a comparison from a verdict: a check that failed, runs that are missing, a baseline with an outlier. Its
tables stand; nothing is claimed by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.comparison.conservation import Conservation
from harness.comparison.equivalence import Gate


def faults_of(
    gate: Gate | None, conservation: Conservation, missing: Sequence[str], baseline_outliers: Sequence[str]
) -> tuple[str, ...]:
    """A line each. missing: what was asked for and is not there; baseline_outliers: of the cell that all others are
    held against."""

    def lines() -> Iterator[str]:
        if gate is not None and not gate.passed:
            yield gate.summary()[0]
        if not conservation.passed:
            yield conservation.summary()
        yield from missing
        yield from (f"of the baseline, {line}" for line in baseline_outliers)

    return tuple(lines())


def no_verdict(faults: Sequence[str]) -> str:
    """What stands in its place."""
    return f"No verdict: {'; '.join(faults)}."
