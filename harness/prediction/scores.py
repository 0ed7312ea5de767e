"""How good predictions are: published steps, and simulated ones, by proper scores beside two simple answers.

A published row is predicted by priors that have not seen its system. Scores are committed
(`experiments/predictions/`), so that a row that moves is noticed, and predictions quote them."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from harness.config.compose import EXPERIMENTS
from harness.metrics.tables import read_csv, write_csv
from harness.prediction.evidence import SHARED, Evidence, StepRow, Workload
from harness.prediction.forecast import SURE, Forecast
from harness.prediction.posterior import OLD, SECOND, TRAINED, Given, System
from harness.prediction.prediction import Predicted, RowDraws, posteriors, predict
from harness.prediction.priors import Draws, Priors, read_priors
from harness.prediction.table import read_evidence
from harness.rpc.children import parallel_map

SCORES = EXPERIMENTS / "predictions" / "scores.csv"  # scores of published rows, as they were last
TRUTHS = EXPERIMENTS / "predictions" / "truths.csv"  # means over simulated truths (`made_truths`)
DRAWS = 64  # draws of a row that is scored
TOLERANCE = 0.05
"""Share of what is committed by which a row may move: draws are chosen by weights, rounded otherwise elsewhere."""

GIVEN: tuple[Given, ...] = ("train", "sync")

_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Score:
    """A row that was predicted beside what came of it, in seconds of a step. low, high: of 80 % of the draws.
    own_phases_s, no_change_s: what `own_phases_s` and the synchronous row's step say instead. read: what was given."""

    source: str
    row: str
    given: Given
    published_s: float
    median_s: float
    low_s: float
    high_s: float
    crps: float
    own_phases_s: float
    no_change_s: float
    read: str

    @property
    def covered(self) -> bool:
        """Whether the published step lies in the interval."""
        return self.low_s <= self.published_s <= self.high_s

    @property
    def off(self) -> float:
        """Logarithm of the median over the published step."""
        return math.log(self.median_s / self.published_s)

    @property
    def own_phases_crps(self) -> float:
        """Score of `own_phases_s`: the distance of logarithms, which is the CRPS of an answer without an interval."""
        return abs(math.log(self.own_phases_s / self.published_s))

    @property
    def no_change_crps(self) -> float:
        """Score of `no_change_s`."""
        return abs(math.log(self.no_change_s / self.published_s))


@dataclass(frozen=True)
class Summary:
    """Means over rows. off: logarithm of median over step; skill: 1 - CRPS / CRPS of the simple answer, at best 1."""

    rows: int
    covered: float
    off: float
    crps: float
    own_phases_skill: float
    no_change_skill: float


Line = TypeVar("Line", Score, Summary)  # a line of a table


def crps(draws: Draws, value: float) -> float:
    """Continuous ranked probability score of a forecast by draws, E|X - y| - E|X - X'| / 2, at least 0, less is better
    (Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", 2007, equation 21)."""
    ordered, count = np.sort(draws), len(draws)
    spread = float(np.sum((2 * np.arange(1, count + 1) - count - 1) * ordered)) / count**2
    return float(np.abs(ordered - value).mean()) - spread


def own_phases_s(row: StepRow, reference: StepRow, given: Given) -> float:
    """The answer without any model, own phases added up: the step of the synchronous row without its generation, in
    which training phases that are read of the row stand in the place of the synchronous row's:

        step - gen                                                             (given sync)
        step - gen - (old_log_prob + ref_log_prob + update) + the same of the row    (given train)

    A phase that the row does not give is none; where it gives none at all, its phases are the synchronous row's."""
    assert reference.step_s is not None
    left = reference.step_s - (reference.rollout_s or reference.generate_s or 0.0)
    own, others = (sum(getattr(one, name) or 0.0 for name in TRAINED) for one in (row, reference))
    return left - others + own if given == "train" and own else left


def score_of(source: str, forecast: Forecast, given: Given) -> Score:
    """Score of a forecast whose row and reference have their steps."""
    row, reference, (low, high) = forecast.row, forecast.reference, forecast.interval()
    assert row.step_s and reference.step_s
    return Score(
        source=source,
        row=str(row),
        given=given,
        published_s=row.step_s,
        median_s=forecast.median,
        low_s=low,
        high_s=high,
        crps=crps(np.log(forecast.step_s), math.log(row.step_s)),
        own_phases_s=own_phases_s(row, reference, given),
        no_change_s=reference.step_s,
        read="; ".join(forecast.given),
    )


def summary(scores: Sequence[Score]) -> Summary:
    """Means over these rows."""
    mean, own, none = (
        float(np.mean([getattr(one, name) for one in scores])) for name in ("crps", "own_phases_crps", "no_change_crps")
    )
    covered, off = (float(np.mean([getattr(one, name) for one in scores])) for name in ("covered", "off"))
    return Summary(len(scores), covered, off, mean, 1 - mean / own, 1 - mean / none)


def published_tables() -> list[Path]:
    """Tables of experiments/papers/ that say what a prediction needs: those with a file of settings beside them."""
    return sorted(path for path in (EXPERIMENTS / "papers").glob("*.csv") if path.with_suffix(".yaml").is_file())


def score_table(path: Path, given: Given, rows: Collection[str] = ()) -> list[Score]:
    """Scores of a table's rows that have a published step, or of these, by priors that do not know its system."""
    evidence = read_evidence(path)
    return [score_of(path.stem, one, given) for one in _forecasts(evidence, given, rows)]


def _forecasts(evidence: Evidence, given: Given, rows: Collection[str]) -> list[Forecast]:
    priors = read_priors().without([evidence.system])
    systems = Predicted(evidence, given, posteriors(evidence, DRAWS, given=given, priors=priors), [])
    asked = [row for row in evidence.asked if row.step_s and (not rows or str(row) in rows)]
    return [RowDraws(row, systems.system(row), evidence, given, priors, 0).forecast() for row in asked]


def score_tables(processes: int = 1, progress: Callable[[str], None] = lambda text: None) -> list[Score]:
    """Scores of every published row, by tables, then given `train` before `sync`."""
    cases = [(path, given) for path in published_tables() for given in GIVEN]
    progress(f"predicting {len(cases) // len(GIVEN)} published tables")
    what = "published tables"
    found = parallel_map(_score_table, cases, processes=processes, timeout_s=_TIMEOUT_S, what=what)
    return [score for scores in found for score in scores]


def _score_table(case: tuple[Path, Given]) -> list[Score]:
    return score_table(*case)


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """A line a row, as CSV, with what follows from it: whether it is covered, and its skill over both answers."""
    names = ("covered", "own_phases_skill", "no_change_skill")
    rows = [vars(one) | {name: getattr(summary([one]), name) for name in names} for one in scores]
    about = f"Made by `cadence predict --score`: seconds of a step; low and high: {SURE:.0%} of {DRAWS} draws."
    write_csv(path, pd.DataFrame(rows), [about])


def read_scores(path: Path) -> list[Score]:
    """Scores as they were written."""
    return _read(path, Score)


def write_summaries(path: Path, scores: Sequence[Score]) -> None:
    """A line for each row and what it was given, over all truths that had it, as CSV."""
    rows = []
    for row, given in sorted({(one.row, one.given) for one in scores}):
        of = summary([one for one in scores if (one.row, one.given) == (row, given)])
        rows.append({"row": row, "given": given, **vars(of)})
    about = "Made by `cadence predict --score`: simulated truths (harness/prediction/scores.py), means of them."
    write_csv(path, pd.DataFrame(rows), [about])


def read_summaries(path: Path) -> list[Summary]:
    """Summaries as they were written."""
    return _read(path, Summary)


def _read(path: Path, kind: type[Line]) -> list[Line]:
    adapter, names = TypeAdapter(kind), [one.name for one in dataclasses.fields(kind)]
    return [adapter.validate_python(line) for line in read_csv(path)[names].to_dict("records")]


def how_often() -> str:
    """How often steps lay within the intervals of predictions, by the committed scores, in a sentence."""
    published, truths = read_scores(SCORES), read_summaries(TRUTHS)
    held = " and ".join(
        f"{sum(one.covered for one in its)} of {len(its)} (given {given})"
        for given in GIVEN
        if (its := of_given(published, given))
    )
    count = sum(one.rows for one in truths)
    share = sum(one.rows * one.covered for one in truths) / count
    return (
        f"intervals of {SURE:.0%} held {share:.0%} of {count} simulated steps; of published ones, of systems that the "
        f"priors had not seen, {held}"
    )


def of_given(scores: Sequence[Score], given: Given) -> list[Score]:
    """Scores of predictions that were given this."""
    return [one for one in scores if one.given == given]


COUNT = 400  # truths, half of them for each GIVEN: the coverage of all has a standard error of .02
TRUTH_DRAWS = 32  # draws of a prediction: intervals are unbiased in whatever number of them (`forecast.interval`)
WORKLOAD = Workload(model="qwen7b", device="h20", batch_groups=16, group_size=4, cap=2000)
"""A batch of 64 samples, which takes milliseconds."""

SYNC = StepRow("truth", SHARED, 2, 2)

ASKED = (
    StepRow("asked", "one_step_off", 1, 1),
    StepRow("asked", "fully_async", 1, 1, options={"max_staleness": "0.5"}),
)


def made_truths(count: int, seed: int = 0, priors: Priors | None = None) -> list[Evidence]:
    """Tables, `count` of them and `SECOND` at most, with rows of ASKED in turn: figures of a synchronous row and of
    the asked one in one draw of the priors."""
    assert count <= SECOND, f"{count} truths are more than {SECOND} draws"
    priors = priors or read_priors()
    bare = Evidence("simulated truths", WORKLOAD, (SYNC,), ASKED)
    (system,) = posteriors(bare, count, seed, given="sync", priors=priors).values()
    sync = _rows(SYNC, system, bare, priors, seed + 1)
    asked = [_rows(row, system, bare, priors, seed + 2 + place) for place, row in enumerate(ASKED)]
    return [
        replace(bare, rows=(sync[draw],), asked=(asked[draw % len(ASKED)][draw],))
        for draw in range(len(system.uncapped))
    ]


def _rows(row: StepRow, system: System, evidence: Evidence, priors: Priors, seed: int) -> list[StepRow]:
    """The row with its figures in each draw."""
    draws = RowDraws(row, system, evidence, "sync", priors, seed)
    forecast = draws.forecast()
    made = []
    for draw, step in enumerate(forecast.step_s):
        figures = {"step_s": step, "update_s": draws.update[draw], "old_log_prob_s": draws.scoring[OLD][draw]}
        if row.shared:
            share = system.quantities["around_sharing"][draw]
            generate = forecast.generation_s[draw]
            figures |= {"generate_s": generate, "rollout_s": generate + draws.around.before[draw] / (1 - share)}
        own: dict[str, Any] = {name: float(value) for name, value in figures.items()}
        made.append(replace(row, **own))
    return made


def score_truths(truths: Sequence[Evidence], processes: int = 1) -> list[Score]:
    """Scores of truths, each given one of GIVEN in turn, and predicted by draws of its own: by those that truths are
    made of, each would find itself among them."""
    cases = [(truth, GIVEN[number // len(ASKED) % len(GIVEN)], SECOND + number) for number, truth in enumerate(truths)]
    return parallel_map(_score_truth, cases, processes=processes, timeout_s=_TIMEOUT_S, what="simulated truths")


def _score_truth(case: tuple[Evidence, Given, int]) -> Score:
    evidence, given, seed = case
    (forecast,) = predict(evidence, TRUTH_DRAWS, seed, given=given).forecasts
    return score_of("truth", forecast, given)
