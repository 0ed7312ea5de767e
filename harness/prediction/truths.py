"""Simulated truths: systems drawn from the priors, run by the same event model, and predicted from a row of theirs.

Nothing but the inference is judged so: intervals of 80 % that hold more or less than 80 % of such truths are its fault,
for model and priors are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.prediction.evidence import SHARED, Evidence, StepRow, Workload
from harness.prediction.posterior import OLD, SECOND, Given, System
from harness.prediction.prediction import RowDraws, posteriors, predict
from harness.prediction.priors import Priors, read_priors
from harness.prediction.scores import GIVEN, Score, score_of
from harness.rpc.children import parallel_map

COUNT = 400
"""Truths, half of them for each GIVEN: the coverage of all has a standard error of .02."""

DRAWS = 32
"""Draws of a prediction: intervals are unbiased in whatever number of them (`forecast.interval`)."""

WORKLOAD = Workload(model="qwen7b", device="h20", batch_groups=16, group_size=4, cap=2000)
"""A batch of 64 samples, which takes milliseconds."""

SYNC = StepRow("truth", SHARED, 2, 2)

ASKED = (
    StepRow("asked", "one_step_off", 1, 1),
    StepRow("asked", "fully_async", 1, 1, options={"max_staleness": "0.5"}),
)

_TIMEOUT_S = 3600.0


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
    (forecast,) = predict(evidence, DRAWS, seed, given=given).forecasts
    return score_of("truth", forecast, given)
