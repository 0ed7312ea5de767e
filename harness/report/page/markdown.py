"""report.md: what the page says, without what needs interaction."""

from collections.abc import Iterable, Sequence

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import as_markdown, has_matrix, matrix_of
from harness.comparison.curves import role_times
from harness.comparison.measure_text import MeasureRow, headlines, rows_of, titled
from harness.comparison.measures import Measure
from harness.metrics.formatting import code, escaped, latex, latex_table, markdown_table, percent, visible
from harness.report.page import text as texts
from harness.report.templates import rendered


def markdown(comparison: Comparison, pictures: Sequence[str]) -> str:
    """The whole file; `pictures` are names of files beside it."""
    first = [name for name in pictures if name.startswith("verdict.")]
    idle = [
        [cell.label, time.role, percent(time.own, 1), percent(time.others, 1), percent(time.idle, 1)]
        for cell in comparison.cells
        for time in role_times(cell.timelines)
    ]
    commands = [
        [cell, str(seed), began, code(at), code(line)] for cell, seed, began, at, line in texts.commands(comparison)
    ]
    values = {
        "comparison": comparison,
        "headings": texts.Headings(comparison),
        "texts": texts,
        "mark": " (simulated)" if comparison.simulated else "",
        "first": first,
        "others": [name for name in pictures if name not in first],
        "headlines": _headlines(comparison),
        "matrix": as_markdown(matrix_of(comparison)).rstrip() if has_matrix(comparison) else "",
        "idle": markdown_table(["cell", "role", "own work", "other roles on its devices", "idle"], idle),
        "measures": [(titled(measure), _measure(comparison, measure)) for measure in comparison.measures],
        "runs": markdown_table(["cell", "seed", "began", "folder", "command"], commands),
        "escaped": escaped,
        "code": code,
    }
    return visible(rendered(__package__, "report.md.jinja", values))


def _headlines(comparison: Comparison) -> str:
    def told(row: MeasureRow) -> str:
        against_it = f", {row.against.value} ({row.against.word})" if row.against else ""
        return f"{row.value} {row.bounds}{'; ' * bool(row.beside)}{row.beside}{against_it}"

    measures = headlines(comparison)
    columns = [map(told, rows_of(comparison, measure)) for measure in measures]
    named = ([cell.label, cell.runs[0].pools] for cell in comparison.cells)
    rows = [[*name, *row] for name, *row in zip(named, *columns, strict=True)]
    return markdown_table(["cell", "devices", *map(titled, measures)], rows)


def _measure(comparison: Comparison, measure: Measure) -> str:
    rows = []
    for row in rows_of(comparison, measure):
        text = row.against
        rows.append(
            [
                row.label,
                "; ".join(filter(None, (row.value, row.beside))),
                row.bounds,
                " ".join(row.iqm or "–"),
                f"{text.value} {text.bounds} ({text.word})" if text else "baseline" if row.is_baseline else "–",
                row.better[0] if row.better else "–",
                row.seeds,
            ]
        )
    heads = ["cell", "mean", "95 % interval", "interquartile mean", "against the baseline", "P(better)", "every seed"]
    return markdown_table(heads, rows)


TEXT_PT = 397  # the width of text that it is made for, in points: of NeurIPS and ICLR
_WORDS = {"never": "never: half of the seeds or more did not get there.", "–": "--: there is none."}


def table_tex(comparison: Comparison) -> str:
    """Every cell's means with their intervals, and below what it is against the baseline; bold where that is
    significant. Numbers stand alone in their cells: the notes say the rest."""
    measures, cells, headings = headlines(comparison), comparison.cells, texts.Headings(comparison)
    found = [rows_of(comparison, measure) for measure in measures]
    rows: list[list[str]] = []
    for cell, *values in zip(cells, *found, strict=True):
        rows.append([latex(cell.label), *(latex(value.value) for value in values)])
        rows.append(_small(value.bounds for value in values))
    notes = [note for word, note in _WORDS.items() if any(latex(word) in row for row in rows)]
    if len(cells) > 1:
        base = cells[comparison.baseline].label
        ratios = ", ".join(measure.title for measure in measures if measure.compared == "ratio")
        paired = "" if comparison.of_one_seed else ", paired by seed,"
        notes.append(latex(f"Against {base}{paired} are ratios ({ratios}) and differences (all else)."))
        across = rf"\multicolumn{{{len(measures) + 1}}}{{@{{}}l}}"
        rows.append([rf"\midrule {across}{{\emph{{against {latex(base)}}}}} \\"])
    marks = {"*": r"\textbf{{{}}}", "=": "{} ="}
    for index, (cell, *values) in enumerate(zip(cells, *found, strict=True)):
        if index != comparison.baseline:
            held = [value.against for value in values]
            figures = [marks.get(one.sign, "{}").format(latex(one.figure)) if one else "" for one in held]
            rows.append([latex(cell.label), *figures])
            rows.append(_small(one.bounds if one else "" for one in held))
    if any(r"\textbf" in value for row in rows for value in row):
        notes.append("Bold: significant after Holm's correction.")
    if any(value.endswith(" =") for row in rows for value in row):
        notes.append(latex(f"=: equal within {measures[0].margin_text}, by two one-sided tests."))
    if loads := [cell.others_load for cell in cells if cell.others_load is not None]:
        notes.append(latex(f"Other processes kept at most {percent(max(loads))} of the cores busy."))
    if comparison.withheld:
        notes.append(latex(comparison.verdict))
    means = f"means over {len(cells[0].seeds)} seeds, 95 % intervals in brackets"
    about = f"{headings.on}, {headings.how_word}: {'of one seed' if comparison.of_one_seed else means}."
    needs = f"% needs \\usepackage{{booktabs}}; made for text {TEXT_PT} pt wide, as NeurIPS and ICLR have it\n"
    return needs + latex_table(map(latex, ("cell", *map(titled, measures))), rows, latex(about), notes)


def _small(bounds: Iterable[str]) -> list[str]:
    return ["", *(rf"\scriptsize {latex(text)}" if text else "" for text in bounds)]
