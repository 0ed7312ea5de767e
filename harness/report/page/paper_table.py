"""table.tex: the headlines of a comparison as a table that a paper takes as it is."""

from __future__ import annotations

from collections.abc import Iterable

from harness.comparison.comparison import Comparison
from harness.comparison.measure_text import against, headlines, scale_of, titled
from harness.metrics.formatting import latex, latex_table, percent, plural
from harness.report.page.text import Headings

TEXT_PT = 397
"""The width of text that it is made for, in points: of NeurIPS and ICLR."""
_WORDS = {"never": "never: half of the seeds or more did not get there.", "–": "--: there is none."}


def table_tex(comparison: Comparison) -> str:
    """Every cell's means with their intervals, and below what it is against the baseline; bold where that is
    significant. Numbers stand alone in their cells: the notes say the rest."""
    measures, cells, headings = headlines(comparison), comparison.cells, Headings(comparison)
    rows: list[list[str]] = []
    for index, cell in enumerate(cells):
        values = [(scale_of(measure), measure.cells[index]) for measure in measures]
        rows.append([latex(cell.label), *(latex(scale.value(found.value)) for scale, found in values)])
        rows.append(_small(scale.bounds(found.interval) for scale, found in values))
    notes = [note for word, note in _WORDS.items() if any(latex(word) in row for row in rows)]
    if len(cells) > 1:
        base = cells[comparison.baseline].label
        ratios = ", ".join(measure.title for measure in measures if measure.compared == "ratio")
        notes.append(latex(f"Against {base}, paired by seed, are ratios ({ratios}) and differences (all else)."))
        across = rf"\multicolumn{{{len(measures) + 1}}}{{@{{}}l}}"
        rows.append([rf"\midrule {across}{{\emph{{against {latex(base)}}}}} \\"])
    for index, cell in enumerate(cells):
        if index == comparison.baseline:
            continue
        held = [against(measure, index) for measure in measures]
        figures = [(latex(one.figure), one.sign) if one else ("", "") for one in held]
        marks = {"*": r"\textbf{{{}}}", "=": "{} ="}
        rows.append([latex(cell.label), *(marks.get(sign, "{}").format(figure) for figure, sign in figures)])
        rows.append(_small(one.bounds if one else "" for one in held))
    if any(r"\textbf" in value for row in rows for value in row):
        notes.append("Bold: significant after Holm's correction.")
    if any(value.endswith(" =") for row in rows for value in row):
        notes.append(latex(f"=: equal within {measures[0].margin_text}, by two one-sided tests."))
    if loads := [cell.others_load for cell in cells if cell.others_load is not None]:
        notes.append(latex(f"Other processes kept at most {percent(max(loads))} of the cores busy."))
    if comparison.withheld:
        notes.append(latex(comparison.verdict))
    seeds = plural(len(cells[0].seeds), "seed")
    about = f"{headings.on}, {headings.how_word}: means over {seeds}, 95 % intervals in brackets."
    needs = f"% needs \\usepackage{{booktabs}}; made for text {TEXT_PT} pt wide, as NeurIPS and ICLR have it\n"
    return needs + latex_table(map(latex, ("cell", *map(titled, measures))), rows, latex(about), notes)


def _small(bounds: Iterable[str]) -> list[str]:
    return ["", *(rf"\scriptsize {latex(text)}" if text else "" for text in bounds)]
