"""`make predict`: what asynchrony would gain, from a table of step times or from a log, with its interval."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import every_value, is_asked_for, own_arguments
from harness.cli.steps import working
from harness.config import ConfigError
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import say
from harness.prediction.logs.answer import answer, as_markdown, forecasts_table, sentence, what_it_stands_on
from harness.prediction.logs.read import read_log
from harness.prediction.posterior import check_given
from harness.prediction.prediction import CHECKS, predict
from harness.prediction.scores import (
    COUNT,
    GIVEN,
    SCORES,
    TRUTHS,
    how_often,
    made_truths,
    of_given,
    read_scores,
    score_tables,
    score_truths,
    summary,
    write_scores,
    write_summaries,
)
from harness.prediction.table import read_evidence
from harness.studies.papers.report import show as print_result
from harness.studies.papers.report import write
from harness.studies.papers.simulated import prediction_result


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Predict the rows of a table that are asked for from its synchronous ones, each with its interval and verdict."""
    logs, rest = every_value("log", arguments)
    own, settings = own_arguments(rest, "table", "given", "score")
    if is_asked_for("score", own):
        return _scores(results, console)
    if logs:
        return _of_log([Path(log) for log in logs], settings, results, console)
    if "table" not in own:
        raise ConfigError("which table? For example table=experiments/papers/verl_fully_async.csv")
    path, given = Path(own["table"]), check_given(own.get("given", "train"))
    with working("reading", console) as show:
        evidence = read_evidence(path, settings)
        predicted = predict(evidence, given=given, processes=2, checks=CHECKS, progress=show)
    result = prediction_result(path.stem, predicted)
    print_result(result, console)
    say(console, f"Scored: {how_often()} (docs/predictions.md)")
    for written in write(result, results / "predict"):
        say(console, written)
    return 0


def _of_log(logs: Sequence[Path], settings: Sequence[str], results: Path, console: Console) -> int:
    """Say whether the run of a log would gain by another schedule, and write the page."""
    with working("reading", console) as show:
        found = answer(read_log(logs, settings), processes=2, progress=show)
    path = results / "predict" / f"{logs[0].name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, as_markdown(found))
    say(console, sentence(found), "bold")
    console.print(forecasts_table(found))
    for line in (*what_it_stands_on(found), f"\n  {found.command}\n", path):
        say(console, line)
    return 0


def _scores(results: Path, console: Console) -> int:
    """Score every published row and simulated truths, and write both tables, which are committed by copying them."""
    folder = results / "predict"
    folder.mkdir(parents=True, exist_ok=True)
    with working("reading", console) as show:
        tables = score_tables(2, show)
        show(f"predicting {COUNT} simulated truths")
        truths = score_truths(made_truths(COUNT), 2)
    write_scores(folder / SCORES.name, tables)
    write_summaries(folder / TRUTHS.name, truths)
    for name, scores in (("published, before", read_scores(SCORES)), ("published", tables), ("simulated", truths)):
        for given in GIVEN:
            of = summary(of_given(scores, given))
            say(
                console,
                f"{name}, given {given}: {of.covered:.0%} of {of.rows} in their intervals, CRPS {of.crps:.3f}, skill "
                f"{of.own_phases_skill:.2f} over own phases, {of.no_change_skill:.2f} over no change, medians "
                f"{of.off:+.3f} in logarithms",
            )
    say(console, f"to commit them: cp {folder}/{{scores,truths}}.csv {SCORES.parent}")
    return 0
