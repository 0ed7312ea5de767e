"""The verdict of a comparison, in a sentence or two that claim no more than its intervals; and runs that collapsed:
seldom, and so far below the others that a mean of few seeds does not know of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from harness.comparison.measures import EXACT_MATCH, SPEED, CellMeasure, Measure, outcome_of, ratio_of
from harness.comparison.runs import Cell
from harness.comparison.statistics import (
    CONFIDENCE,
    FEWEST,
    Difference,
    Interval,
    Values,
    corrected,
    holm,
    outliers,
    share_interval,
)
from harness.metrics.formatting import listed, number, plural
from harness.metrics.manifest import BUSY, HOW_TIMED

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_OF_LEARNING = "algorithm."
_SAME_SAMPLES = ("algorithm.", "training.")
_OTHER_SAMPLES = tuple(
    f"algorithm.{name}"
    for name in (
        *("filter", "over_sampling", "rejection", "mask_truncated", "max_token_staleness", "temperature", "top_p"),
        *("batch_groups", "group_size", "options"),
    )
)
"""Settings of the algorithm that choose samples, or how they are sampled; with options, which may be a filter's."""
_NAMED = 6  # cells in a sentence
_CALLED = {
    "eval/sampled": "held-out accuracy",
    "eval/greedy": "greedy held-out accuracy",
    EXACT_MATCH: "exact match of the samples trained last",
}


def question_of(measures: Sequence[Measure], axes: Iterable[str]) -> str:
    """The key of the measure that a verdict is about. Where cells differ in their algorithm, what they learn is the
    question, and how fast they are is none."""
    outcome = outcome_of(measures)
    return outcome if outcome is not None and any(axis.startswith(_OF_LEARNING) for axis in axes) else SPEED


def unjudged(measures: Sequence[Measure], axes: Iterable[str]) -> str:
    """The words for why nothing is said of what was learnt; empty where it is, or nothing was rewarded. Exact match of
    the samples that were trained is that of other policies, on samples that a setting may have chosen: it is held
    against another only along settings that do neither."""
    axis = next((axis for axis in axes if not axis.startswith(_SAME_SAMPLES) or axis.startswith(_OTHER_SAMPLES)), None)
    if outcome_of(measures) != EXACT_MATCH or axis is None:
        return ""
    return (
        f"no verdict on what was learnt: {axis} may choose the samples that are trained, or the policy that samples "
        "them, and not all final policies were evaluated alike on held-out problems (eval.every=auto)"
    )


def withheld(cells: Sequence[Cell], measures: Sequence[Measure], question: str) -> str:
    """The words for why no difference of that measure is judged; empty where each is."""
    found = (cell.difference for measure in measures if measure.key == question for cell in measure.cells)
    if all(difference is None or difference.judged for difference in found):
        return ""
    fewest, busiest = min(len(cell.runs) for cell in cells), max(cell.others_load or 0.0 for cell in cells)
    if fewest < FEWEST or busiest <= BUSY:
        return f"{plural(fewest, 'seed')}, and a difference takes {FEWEST} that are shared (seeds={FEWEST})"
    return (
        f"other processes kept up to {busiest:.0%} of the machine busy, and above {BUSY:.0%} no times are judged; run "
        "it again on a quiet one (force=true)"
    )


def best_of(cells: Sequence[Cell], measures: Sequence[Measure], baseline: int, question: str) -> tuple[int, ...]:
    """Cells that the verdict is for. Of speed: the fastest cell and those that do not differ significantly from it; of
    learning: those that are significantly higher than the baseline. None where no difference to the baseline is."""
    (measure,) = (measure for measure in measures if measure.key == question)
    others = _others(cells, baseline)
    if question != SPEED:
        found = {index: measure.cells[index].difference for index in others}
        return tuple(i for i, d in found.items() if d is not None and d.distinguishable and d.interval.value > 0)
    if not others:
        return ()
    best = _leader(others, measure)
    if _faster(_ratio(measure, best)):
        return (best, *_tied(measure, best, others))
    if not _ratio(measure, best).distinguishable:
        return ()
    return (baseline, *(index for index in others if not _ratio(measure, index).distinguishable))


def verdict_of(
    cells: Sequence[Cell], measures: Sequence[Measure], baseline: int, question: str, why_unjudged: str = ""
) -> str:
    """The verdict on the fastest cell: how fast against the baseline, and whether it learns as well; or of what is
    learnt, where that is the question. why_unjudged: why nothing is said of learning."""
    by_key = {measure.key: measure for measure in measures}
    speed, outcome = by_key[SPEED], outcome_of(measures)
    backend = cells[0].runs[0].identity.backend
    if len(cells) == 1:
        text = _alone(cells[0], speed.cells[0])
    elif question != SPEED:
        text = (
            f"{why_unjudged[0].upper()}{why_unjudged[1:]}."
            if why_unjudged
            else _best(cells, by_key[question], baseline)
        )
    else:
        learnt = None if outcome is None or why_unjudged else by_key[outcome]
        text = _fastest(cells, speed, baseline, learnt, why_unjudged)
    return text if backend == "real" else f"{HOW_TIMED[backend].capitalize()}: {text}"


def _best(cells: Sequence[Cell], learnt: Measure, baseline: int) -> str:
    """A sentence on which cells learnt something else than the baseline, as far as these seeds can tell."""
    values = [measured.value for measured in learnt.cells]
    best = max(range(len(cells)), key=lambda index: values[index])
    first = f"{cells[best].label} has the highest {_CALLED[learnt.key]}, {number(values[best])}"
    against = "" if best == baseline else f" against {number(values[baseline])} of {cells[baseline].label}"
    higher, lower, equal = list[str](), list[str](), list[str]()
    for cell, value, difference in zip(cells, values, (one.difference for one in learnt.cells), strict=True):
        if difference is not None and (difference.distinguishable or difference.equal):
            called = higher if value > values[baseline] else lower
            (called if difference.distinguishable else equal).append(cell.label)
    named = {"higher": higher, "lower": lower, f"equal within {learnt.margin_text}": equal}
    found = "; ".join(f"{word}: {_some(labels)}" for word, labels in named.items() if labels)
    count, base = len(higher) + len(lower), cells[baseline]
    which = f"{count} of the {len(cells) - 1} others" if count else "none of the others"
    tell = f"{plural(len(base.runs), 'seed')} tell{'s' * (len(base.runs) == 1)} {which} from {base.label}"
    return f"{first}{against}; {', '.join(filter(None, (tell, found)))}."


def _some(labels: Sequence[str]) -> str:
    more = len(labels) - _NAMED
    return " and ".join([" / ".join(labels[:_NAMED]), *([f"{more} more"] if more > 0 else [])])


def _fastest(cells: Sequence[Cell], speed: Measure, baseline: int, outcome: Measure | None, why_unjudged: str) -> str:
    others = _others(cells, baseline)
    best = _leader(others, speed)
    ratio = _ratio(speed, best)
    name, base, how = cells[best].label, cells[baseline].label, _ratio_text(cells, speed, best, baseline)
    if _faster(ratio):
        first = f"{name} trains {how} the samples per second of {base}{_ties(cells, speed, best, others)}"
    elif ratio.distinguishable:
        first = f"{base} trains most samples per second; {name}, which comes next, trains {how} as many"
    else:
        which = "" if len(others) == 1 else ", the fastest of the others,"
        equal = f"trains as many samples per second as {base} within {speed.margin_text}: {how}"
        first = (
            f"{name}{which} {equal}"
            if ratio.equal
            else f"{name}{which} is not told apart from {base} in samples per second: {how}"
        )
    if outcome is None:
        return f"{first}; {why_unjudged}." if why_unjudged else f"{first}."
    learnt = {index: outcome.cells[index].difference for index in others}
    verdict = f"{first}; {_learning(cells[best], learnt[best], outcome)}."
    good = [index for index in others if not _lower(learnt[index]) and _faster(_ratio(speed, index))]
    if not _lower(learnt[best]) or not good:
        return verdict
    next_best = _fastest_of(good, speed)
    which = f"Of those that learn no worse than {base}, as far as these seeds can tell,"
    how = _ratio_text(cells, speed, next_best, baseline)
    return f"{verdict} {which} {cells[next_best].label} is the fastest with {how}."


def _others(cells: Sequence[Cell], baseline: int) -> list[int]:
    return [index for index in range(len(cells)) if index != baseline]


def _leader(others: Sequence[int], speed: Measure) -> int:
    """The fastest of those significantly faster than the baseline, if any: a mean that scatters more hides none."""
    return _fastest_of([index for index in others if _faster(_ratio(speed, index))] or others, speed)


def _fastest_of(cells: Sequence[int], speed: Measure) -> int:
    return max(cells, key=lambda index: speed.cells[index].value)


def _ties(cells: Sequence[Cell], speed: Measure, best: int, others: Sequence[int]) -> str:
    """Words for ties with the fastest, of which the table says only what they are against the baseline."""
    tied = _tied(speed, best, others)
    words = {True: f"equal within {speed.margin_text} to", False: "not told apart from"}
    named = {
        word: [
            f"{cells[i].label} ({_ratio(speed, i).interval.value:.2f}x)"
            for i, equal in tied.items()
            if equal == whether
        ]
        for whether, word in words.items()
    }
    return "".join(f", {word} {_some(ties)}" for word, ties in named.items() if ties)


def _tied(speed: Measure, best: int, others: Sequence[int]) -> dict[int, bool]:
    """Cells among the others that do not differ significantly from the fastest, and whether they are equal to it."""
    rest, own = [index for index in others if index != best], speed.cells[best].per_seed
    against = corrected([ratio_of(own, speed.cells[index].per_seed, speed.margin) for index in rest])
    return {index: ratio.equal for index, ratio in zip(rest, against, strict=True) if not ratio.distinguishable}


def _ratio(speed: Measure, cell: int) -> Difference:
    ratio = speed.cells[cell].ratio
    assert ratio is not None, "rates are positive"
    return ratio


def _faster(ratio: Difference) -> bool:
    return ratio.distinguishable and ratio.interval.value > 1


def _lower(learnt: Difference | None) -> bool:
    return learnt is not None and learnt.distinguishable and learnt.interval.value < 0


def _ratio_text(cells: Sequence[Cell], speed: Measure, cell: int, baseline: int) -> str:
    ratio = _ratio(speed, cell)
    return f"{ratio.interval.value:.2f}x ({_certainty(cells[cell], cells[baseline], ratio)})"


def _learning(cell: Cell, learnt: Difference | None, outcome: Measure) -> str:
    assert learnt is not None, "accuracies are finite"
    value, called = learnt.interval.value, _CALLED[outcome.key]
    if learnt.distinguishable:
        bounds = f"{learnt.interval.low:+.3f} to {learnt.interval.high:+.3f}"
        return f"its {called} is {abs(value):.3f} {'higher' if value > 0 else 'lower'} ({bounds})"
    seeds = len(learnt.per_seed) or len(cell.runs)
    count = _NUMBERS[seeds] if seeds < len(_NUMBERS) else str(seeds)
    if not learnt.interval.bounded:
        return f"{called} differs by {value:+.3f}, of which {count} seed says nothing"
    bounds = f"{value:+.3f}, {learnt.interval.low:+.3f} to {learnt.interval.high:+.3f}"
    if learnt.equal:
        return f"{called} is equal within {outcome.margin_text} ({bounds})"
    return f"{called} is not told apart by {count} seeds ({bounds})"


def _alone(cell: Cell, speed: CellMeasure) -> str:
    interval = speed.interval
    bounds = f" ({interval.low:,.4g} to {interval.high:,.4g})" if interval and interval.bounded else ""
    return f"{cell.label} trains {speed.value:,.4g} samples per second{bounds}; there is nothing to compare it with."


def _certainty(cell: Cell, baseline: Cell, ratio: Difference) -> str:
    pairs = len(ratio.per_seed)
    paired = f"{pairs} paired seed{'s' * (pairs > 1)}"
    seeds = paired if pairs else f"{len(cell.runs)} and {len(baseline.runs)} seeds, unpaired"
    return f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}, {seeds}" if ratio.interval.bounded else seeds


def no_verdict(faults: Sequence[str]) -> str:
    """The sentence in place of a verdict."""
    return f"No verdict: {'; '.join(faults)}."


_COLLAPSES_NAMED = 3  # cells in a sentence
_OF_BEST = 0.5  # of the best run: what ends below it collapsed
_LEAST = 0.25  # below the best run, of accuracy
_FAR = 0.15  # from the median, of accuracy: a seed that is nearer is no outlier


@dataclass(frozen=True)
class Collapse:
    """The collapsed runs of a cell. seeds: of those; worst: accuracy of the worst run; share: of the seeds, with
    Wilson's interval; p: that as many more or fewer collapse where nothing differs from the baseline, by Fisher's exact
    test, after Holm's correction."""

    seeds: tuple[int, ...]
    of: int
    worst: float
    share: Interval
    p: float

    @property
    def text(self) -> str:
        """`1 of 5`."""
        return f"{len(self.seeds)} of {self.of}"


def collapsed(values: Values, best: float) -> np.ndarray:
    """bool [n]: whether runs ended below half the accuracy of the best run of a comparison, and .25 below it."""
    return np.asarray(values, np.float64) < min(_OF_BEST * best, best - _LEAST)


def odd_ones(values: Values) -> list[int]:
    """Indices of runs, of four or more, that ended ten robust standard deviations and .15 from the median."""
    return outliers(values, least=_FAR / max(float(np.median(values)), 1e-9))


def collapses_of(outcome: Measure, baseline: int) -> tuple[Collapse, ...]:
    """Collapsed runs of each cell. outcome: what was learnt, a share."""
    best = max(value for cell in outcome.cells for value in cell.per_seed.values())
    seeds, counts = [], []
    for cell in outcome.cells:
        found = collapsed(list(cell.per_seed.values()), best)
        seeds.append(tuple(seed for seed, it in zip(cell.per_seed, found, strict=True) if it))
        counts.append((int(found.sum()), int((~found).sum())))
    others = [index for index in range(len(counts)) if index != baseline]
    tests = [float(stats.fisher_exact([counts[index], counts[baseline]]).pvalue) for index in others]
    p = dict(zip(others, holm(tests), strict=True))
    return tuple(
        Collapse(those, sum(both), min(cell.per_seed.values()), share_interval(both[0], sum(both)), p.get(index, 1.0))
        for index, (cell, those, both) in enumerate(zip(outcome.cells, seeds, counts, strict=True))
    )


def collapse_sentence(labels: Sequence[str], collapses: Sequence[Collapse], baseline: int) -> str:
    """The verdict that holds where runs collapse: on the share of the seeds that did. Empty where none did."""
    if not any(collapse.seeds for collapse in collapses):
        return ""
    parts = []
    for index, (label, collapse) in enumerate(zip(labels, collapses, strict=True)):
        if index != baseline and (collapse.seeds or collapses[baseline].seeds):
            tells = "tells" if collapse.p < 1 - CONFIDENCE else "does not tell"
            parts.append(f"{collapse.text} of {label} (exact test: p {number(collapse.p)}, which {tells} them apart)")
    more = [f"and of {plural(len(parts) - _COLLAPSES_NAMED, 'more cell')}"] if len(parts) > _COLLAPSES_NAMED else []
    told = ", ".join([f"{collapses[baseline].text} of {labels[baseline]}", *parts[:_COLLAPSES_NAMED], *more])
    return f"Runs collapsed: {told}."


def collapse_warnings(labels: Sequence[str], outcome: Measure, collapses: Sequence[Collapse]) -> Iterator[str]:
    """Cells of which a mean says too little: some seeds collapsed, or one is far from the others."""
    for label, cell, collapse in zip(labels, outcome.cells, collapses, strict=True):
        values, seeds = list(cell.per_seed.values()), list(cell.per_seed)
        odd = [seeds[index] for index in odd_ones(values)]
        if 0 < len(collapse.seeds) < collapse.of:
            which = f"{listed('seed', collapse.seeds)}, down to {number(collapse.worst)}"
            what = f"{collapse.text} seeds collapsed ({which})"
        elif odd:
            what = f"{listed('seed', odd)} ended far from the others"
        else:
            continue
        yield (
            f"{label}: {what}: the interval of its mean holds the true one in half of such cases only; go by the "
            "paired difference and the share of collapsed seeds, and add seeds (docs/statistics.md)"
        )
