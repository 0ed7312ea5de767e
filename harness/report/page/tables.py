"""The tables of the page, as HTML: the few figures that matter, then every measure with every seed."""

from __future__ import annotations

from html import escape

from harness.comparison.parts import Measure
from harness.comparison.result import Comparison
from harness.report.page.numbers import bounds, figure
from harness.report.page.palette import of_cell
from harness.report.page.svg import span_of, strip
from harness.report.page.told import Against, against, headlines, scale_of, seeds_told

_SIGNS = {"better": "▲ better", "worse": "▼ worse", "differs": "◆ differs", "same": "not told apart"}
_OPEN = 2  # measures that are unfolded at first, besides the headlines' table


def headline_table(comparison: Comparison, pools: list[str]) -> str:
    """A row per cell: mean, interval, and what it is against the baseline, of the measures that matter most."""
    measures = headlines(comparison)
    heads = "".join(
        f'<th scope="col">{escape(m.title)}<small>{escape(_unit(comparison, m))}</small></th>' for m in measures
    )
    rows = []
    for number, cell in enumerate(comparison.cells):
        cells = "".join(_headline(comparison, measure, number) for measure in measures)
        base = ' <span class="tag">baseline</span>' if number == comparison.baseline else ""
        devices = f"<small>{escape(pools[number])}</small>"
        rows.append(f'<tr><th scope="row">{_name(number, cell.label)}{base}{devices}</th>{cells}</tr>')
    return (
        f'<table class="headlines"><thead><tr><th scope="col">cell<small>devices</small></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def measure_tables(comparison: Comparison) -> str:
    """Every measure: dots of seeds, mean and interval, against the baseline, and the values themselves."""
    return "".join(_measure(comparison, measure, number < _OPEN) for number, measure in enumerate(comparison.measures))


def _measure(comparison: Comparison, measure: Measure, unfolded: bool) -> str:
    scale, axis = scale_of(measure), span_of(measure.cells)
    seeds = list(dict.fromkeys(seed for cell in measure.cells for seed in cell.per_seed))
    several = len(comparison.cells) > 1
    heads = ["cell", "seeds and interval", "mean", "95 % interval"]
    heads += ["interquartile mean"] if any(cell.iqm for cell in measure.cells) else []
    heads += ["against the baseline", "P(better)"] if several else []
    heads += [f"seed {', '.join(map(str, seeds))}"]
    rows = []
    for number, (cell, its) in enumerate(zip(comparison.cells, measure.cells, strict=True)):
        parts = [
            f'<th scope="row">{_name(number, cell.label)}</th>',
            f"<td>{strip(its, axis, of_cell(number))}</td>",
            f'<td class="number"><b>{scale.value(its.value)}</b></td>',
            f'<td class="number">{scale.bounds(its.interval)}</td>',
        ]
        if "interquartile mean" in heads:
            iqm = f"{scale.value(its.iqm.value)} <small>{scale.bounds(its.iqm)}</small>" if its.iqm else "–"
            parts.append(f'<td class="number">{iqm}</td>')
        if several:
            parts.append(f"<td>{_against(against(comparison, measure, number), number == comparison.baseline)}</td>")
            better = f"{figure(its.better.value, 2)} <small>{bounds(its.better, 2)}</small>" if its.better else "–"
            parts.append(f'<td class="number">{better}</td>')
        parts.append(f'<td class="number seeds">{seeds_told(its, scale)}</td>')
        rows.append(f"<tr>{''.join(parts)}</tr>")
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    table = f'<table class="measure"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return (
        f'<details{" open" if unfolded else ""} data-measure="{escape(measure.key)}"><summary>{escape(measure.title)} '
        f'<small>{escape(_unit(comparison, measure))}</small></summary><div class="wide">{table}</div></details>'
    )


def _headline(comparison: Comparison, measure: Measure, number: int) -> str:
    cell, scale = measure.cells[number], scale_of(measure)
    told = _against(against(comparison, measure, number), number == comparison.baseline, brief=True)
    return f"<td><b>{scale.value(cell.value)}</b><small>{scale.bounds(cell.interval)}</small>{told}</td>"


def _against(told: Against | None, is_baseline: bool, brief: bool = False) -> str:
    if told is None:
        return "" if brief else ("baseline" if is_baseline else "–")
    sign = _SIGNS[told.verdict]
    if brief:
        return f'<small class="against {told.verdict}">{escape(told.value)} <span>{sign}</span></small>'
    parts = f"<span>{escape(told.value)}</span> <small>{escape(told.bounds)}</small> <span>{sign}</span>"
    return f'<span class="against {told.verdict}">{parts}</span>'


def _unit(comparison: Comparison, measure: Measure) -> str:
    parts = [] if "per second" in measure.title else [scale_of(measure).unit]
    if measure.better:
        parts.append(f"{measure.better} is better")
    if comparison.simulated:
        parts.append("simulated")
    return ", ".join(part for part in parts if part)


def _name(number: int, label: str) -> str:
    """With its colour; a long one may break where a setting's name has its joints."""
    broken = escape(label).replace(".", ".<wbr>").replace("=", "=<wbr>")
    return f'<i class="dot" style="background:{of_cell(number)}"></i>{broken}'
