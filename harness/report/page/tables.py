"""The tables of the page, as HTML: the main measures, every measure with every seed, corrections, checks and runs; its
charts that need no script: dots with intervals, histograms, profiles, shares of time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import CorrectionMatrix, Entry, lags_of
from harness.comparison.curves import RoleTime, role_times
from harness.comparison.measure_text import Against, against, beside_mean, bounds, headlines, scale_of, unit_of
from harness.comparison.measures import CellMeasure, Measure
from harness.comparison.runs import Cell
from harness.metrics.definitions import LATENCIES
from harness.metrics.formatting import number, percent, visible
from harness.metrics.samples import latencies_by_engine, percentiles
from harness.report.drawing import inline_svg
from harness.report.page.pictures import COLORS, draw_lags, draw_profile, profiles
from harness.report.page.text import SAMPLE_KINDS, SAMPLES, checks, commands, histogram_text, lag_text, profile_text
from harness.report.palette import names_of, of_cells
from harness.report.samples import RunSamples, ShownSample, shortened

_SIGNS = {"better": "▲ ", "worse": "▼ ", "differs": "◆ ", "equal": "= "}
_OPEN = 2  # measures that are unfolded at first, besides the headlines' table
_SAMPLES, _ALL_SAMPLES = 4, 160  # of each kind in a run, and in the page; so it grows by some 600 kilobytes at most
_TEXT = 1000  # characters
_ENGINES = 8  # of a cell that are listed
_DARK = 0.45  # of the colour scale: above it black is easier to read than white


def headline_table(comparison: Comparison) -> str:
    """A row per cell: mean, interval, and what it is against the baseline, of the measures that matter most."""
    measures = headlines(comparison)
    heads = (f"{escape(m.title)}<small>{escape(_unit(comparison, m))}</small>" for m in measures)
    rows, colours = [], names_of(comparison.cells)
    for index, cell in enumerate(comparison.cells):
        cells = "".join(_headline(comparison, measure, index) for measure in measures)
        base = ' <span class="tag">baseline</span>' if index == comparison.baseline else ""
        devices = f"<small>{escape(cell.runs[0].pools)}</small>"
        rows.append(f'<tr><th scope="row">{_name(colours[index], cell.label)}{base}{devices}</th>{cells}</tr>')
    return _table("headlines", ["cell<small>devices</small>", *heads], rows)


def _table(kind: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """heads, rows: as HTML."""
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def measure_tables(comparison: Comparison) -> str:
    """Every measure: dots of seeds, mean and interval, against the baseline, and the values themselves."""
    return "".join(_measure(comparison, measure, index < _OPEN) for index, measure in enumerate(comparison.measures))


def _measure(comparison: Comparison, measure: Measure, unfolded: bool) -> str:
    scale, axis, colours = scale_of(measure), span_of(measure.cells), names_of(comparison.cells)
    seeds = list(dict.fromkeys(seed for cell in measure.cells for seed in cell.per_seed))
    several = len(comparison.cells) > 1
    more = {"interquartile mean", "P(better)", f"seed {', '.join(map(str, seeds))}"}  # than paper has room for
    heads = ["cell", "seeds and interval", "mean", "95 % interval"]
    heads += ["interquartile mean"] if any(cell.iqm for cell in measure.cells) else []
    heads += ["against the baseline", "P(better)"] if several else []
    heads += [f"seed {', '.join(map(str, seeds))}"]
    rows = []
    for index, (cell, values) in enumerate(zip(comparison.cells, measure.cells, strict=True)):
        parts = [
            f'<th scope="row">{_name(colours[index], cell.label)}</th>',
            f"<td>{strip(values, axis, colours[index])}</td>",
            f'<td class="number"><b>{scale.value(values.value)}</b>{_beside(comparison, measure, index)}</td>',
            f'<td class="number">{scale.bounds(values.interval)}</td>',
        ]
        if "interquartile mean" in heads:
            iqm = f"{scale.value(values.iqm.value)} <small>{scale.bounds(values.iqm)}</small>" if values.iqm else "–"
            parts.append(f'<td class="number more">{iqm}</td>')
        if several:
            parts.append(f"<td>{_against(against(measure, index), index == comparison.baseline)}</td>")
            better = (
                f"{number(values.better.value, 2)} <small>{bounds(values.better, 2)}</small>" if values.better else "–"
            )
            parts.append(f'<td class="number more">{better}</td>')
        parts.append(f'<td class="number seeds more">{scale.seeds(values)}</td>')
        rows.append(f"<tr>{''.join(parts)}</tr>")
    head = "".join(
        f'<th scope="col" class="{"more" if text in more else "kept"}">{escape(text)}</th>' for text in heads
    )
    table = f'<table class="measure"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return (
        f'<details{" open" if unfolded else ""} data-measure="{escape(measure.key)}"><summary>{escape(measure.title)} '
        f'<small>{escape(_unit(comparison, measure))}</small></summary><div class="wide">{table}</div></details>'
    )


def _headline(comparison: Comparison, measure: Measure, index: int) -> str:
    cell, scale = measure.cells[index], scale_of(measure)
    text = _against(against(measure, index), index == comparison.baseline, brief=True)
    beside = _beside(comparison, measure, index)
    return f"<td><b>{scale.value(cell.value)}</b><small>{scale.bounds(cell.interval)}</small>{beside}{text}</td>"


def _beside(comparison: Comparison, measure: Measure, index: int) -> str:
    told = beside_mean(comparison, measure, index)
    return f"<small>{escape(told)}</small>" if told else ""


def _against(text: Against | None, is_baseline: bool, brief: bool = False) -> str:
    if text is None:
        return "" if brief else ("baseline" if is_baseline else "–")
    sign = f"{_SIGNS.get(text.verdict, '')}{text.word}"
    if brief:
        return f'<small class="against {text.verdict}">{escape(text.value)} <span>{sign}</span></small>'
    parts = f"<span>{escape(text.value)}</span> <small>{escape(text.bounds)}</small> <span>{sign}</span>"
    return f'<span class="against {text.verdict}">{parts}</span>'


def _unit(comparison: Comparison, measure: Measure) -> str:
    parts = [unit_of(measure)]
    if measure.better:
        parts.append(f"{measure.better} is better")
    if comparison.simulated:
        parts.append("simulated")
    return ", ".join(part for part in parts if part)


def _name(colour: str, label: str) -> str:
    """A cell's name, in one line with its colour; a long one may break where a setting's name has joints."""
    first, joint, rest = re.sub(r"(=|\.(?!\d))", r"\1<wbr>", escape(label)).partition("<wbr>")
    return f'<span class="joined"><i class="dot" style="background:{colour}"></i>{first}</span>{joint}{rest}'


def matrix_table(matrix: CorrectionMatrix) -> str:
    """Schedules by corrections, or the other way round: mean, its interval, and every seed."""
    values = [entry.measured.value for entry in matrix.entries.values() if math.isfinite(entry.measured.value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    schedules = {row: f"{escape(row)}<small>mean lag {escape(lags_of(matrix, row))}</small>" for row in matrix.rows}
    corrections = {column: escape(column) for column in matrix.columns}
    down, across = (corrections, schedules) if matrix.upright else (schedules, corrections)
    rows = []
    for name, head in down.items():
        places = [(other, name) if matrix.upright else (name, other) for other in across]
        cells = "".join(_matrix_cell(matrix.entries.get(place), low, high) for place in places)
        rows.append(f'<tr><th scope="row">{head}</th>{cells}</tr>')
    return _table("heat", ["correction" if matrix.upright else "schedule", *across.values()], rows)


def _matrix_cell(entry: Entry | None, low: float, high: float) -> str:
    if entry is None:
        return "<td>not run</td>"
    measured = entry.measured
    place = (measured.value - low) / (high - low) if high > low and math.isfinite(measured.value) else 1.0
    paint = f"background:{to_hex(colormaps[COLORS](place))};color:{'#000' if place > _DARK else '#fff'}"
    mean = f"{number(measured.value)} {entry.mark}".rstrip()
    text = f"<b>{mean}</b><small>{entry.interval_text}</small><small>{entry.seeds_text}</small>"
    return f'<td style="{paint}">{text}</td>'


def facts_list(facts: Mapping[str, str | Iterable[str]], name: str) -> str:
    """A definition list."""
    items = [
        f"<div><dt>{escape(key)}</dt><dd>{escape(value if isinstance(value, str) else ' / '.join(value))}</dd></div>"
        for key, value in facts.items()
    ]
    return f'<dl class="{name}">{"".join(items)}</dl>'


def checks_html(comparison: Comparison) -> str:
    """The checks, with their results and lines."""
    words = {True: ("passed", "good"), False: ("failed", "bad"), None: ("not run", "unknown")}
    parts = []
    for name, passed, lines in checks(comparison):
        word, grade = words[passed]
        text = "".join(f"<p>{escape(line)}</p>" for line in lines)
        parts.append(f'<div class="check {grade}"><h3>{escape(name)}: {word}</h3>{text}</div>')
    return "".join(parts)


def samples_html(comparison: Comparison) -> str:
    """Some samples of the first run of each cell, folded, by what they were chosen for; empty where runs kept none."""
    firsts = {index: cell.runs[0] for index, cell in enumerate(comparison.cells)}
    kept = {index: run for index, run in firsts.items() if (run.path / "problems.parquet").is_file()}
    if not kept:
        return ""
    each = max(1, min(_SAMPLES, _ALL_SAMPLES // (len(kept) * len(SAMPLE_KINDS))))
    parts, found = [], set()
    for index, run in kept.items():
        samples = RunSamples(run.path, run.samples)
        chosen = {
            "worst": samples.chosen(each, best=False),
            "best": samples.chosen(each, best=True),
            "dropped": samples.chosen(each, dropped=True),
            "held": samples.chosen(each, best=False, held_out=samples.versions[-1]) if samples.versions else [],
        }
        found |= {kind for kind, of_kind in chosen.items() if of_kind}
        parts += [_sample(one, index, kind) for kind, of_kind in chosen.items() for one in of_kind]
    runs = "".join(
        f'<option value="{index}">{escape(comparison.cells[index].label)}, seed {run.identity.seed}</option>'
        for index, run in kept.items()
    )
    kinds = "".join(
        f'<label><input type="radio" name="samples" value="{kind}"> {escape(title)}</label> '
        for kind, title in SAMPLE_KINDS.items()
        if kind in found
    ).replace('">', '" checked>', 1)
    return (
        f'<section id="samples"><h2>Samples</h2><p class="caption">{escape(SAMPLES)}</p>'
        f'<div class="controls"><label>Run <select>{runs}</select></label>'
        f"<fieldset><legend>Show</legend>{kinds}</fieldset></div>{''.join(parts)}</section>"
    )


def _sample(sample: ShownSample, run: int, kind: str) -> str:
    facts = {name: visible(fact) for name, fact in sample.facts.items()}
    brief = [f"reward {facts['reward']}", *(facts[name] for name in ("problem", "fate") if name in facts)]
    texts = "".join(
        f'<h4>{name}</h4><pre dir="ltr">{escape(visible(shortened(text, _TEXT)))}</pre>'
        for name, text in sample.texts.items()
    )
    return (
        f'<details data-run="{run}" data-kind="{kind}"><summary>{escape(visible(sample.title))} '
        f"<small>{escape(' · '.join(brief))}</small></summary>"
        f"{facts_list(facts, 'sample')}{texts}</details>"
    )


def commands_table(comparison: Comparison) -> str:
    """A row for each run: cell, seed, start, folder and command."""
    rows = (
        f'<tr><th scope="row">{escape(cell)}</th><td>{escape(str(seed))}</td><td>{escape(began)}</td>'
        f"<td><code>{escape(folder)}</code></td><td><code>{escape(command)}</code></td></tr>"
        for cell, seed, began, folder, command in commands(comparison)
    )
    return _table("runs", ("cell", "seed", "began", "folder", "command"), rows)


_STRIP, _STRIP_HEIGHT, _EDGE = 220, 26, 8
_PANEL = (260, 164)


def staleness_cards(comparison: Comparison) -> str:
    """All on one scale, so that they can be compared."""
    return _drawn_cards(
        comparison,
        lambda panel, index, colour: draw_lags(panel, comparison.staleness[index], colour),
        list(map(histogram_text, comparison.staleness)),
        list(map(lag_text, comparison.cells)),
    )


def profile_cards(comparison: Comparison) -> str:
    """Likewise: one axis of scores for all."""
    cells, drawn = zip(comparison.cells, comparison.profiles, strict=True), profiles(comparison)
    assert drawn is not None, "there are profiles"
    of_cell = [drawn[drawn["label"] == cell.label] for cell in comparison.cells]
    return _drawn_cards(
        comparison,
        lambda panel, index, colour: draw_profile(panel, of_cell[index], drawn, colour),
        [f"{cell.label}: {profile_text(profile)}" for cell, profile in cells],
        [""] * len(comparison.cells),
    )


def _drawn_cards(
    comparison: Comparison, draw: Callable[[Axes, int, str], None], labels: Sequence[str], feet: Sequence[str]
) -> str:
    """A card per cell with what `draw` draws into a panel. labels: the same in words; feet: what stands below."""
    colours = of_cells(cell.label for cell in comparison.cells).values()
    names = names_of(comparison.cells)
    cards = []
    for index, (cell, colour, name) in enumerate(zip(comparison.cells, colours, names, strict=True)):
        drawn = inline_svg(
            lambda figure, index=index, colour=colour: draw(figure.subplots(), index, colour),  # type: ignore[misc]
            _PANEL,
            "histogram",
            labels[index],
            {colour: name},
        )
        cards.append(_card(name, cell.label, drawn, feet[index]))
    return "".join(cards)


def device_cards(comparison: Comparison) -> str:
    """A card for each cell: how idle its devices were."""
    colours = names_of(comparison.cells)
    return "".join(
        _card(colour, cell.label, _idle(cell)) for cell, colour in zip(comparison.cells, colours, strict=True)
    )


def latency_table(comparison: Comparison) -> str:
    """Latencies of the requests of each cell: of all, and by engine."""
    heads = (escape(part.replace("_", " ")) for part in LATENCIES)
    colours = names_of(comparison.cells)
    rows = (_latencies(cell, colour) for cell, colour in zip(comparison.cells, colours, strict=True))
    return f'<div class="wide">{_table("measure", ["cell", *heads], rows)}</div>'


def _latencies(cell: Cell, colour: str) -> str:
    """Rows of a cell, and how many engines they leave out."""
    engines = latencies_by_engine(run.samples for run in cell.runs)
    every = {part: np.concatenate([of[part] for of in engines.values()]) for part in LATENCIES}
    slowest = sorted(engines, key=lambda engine: -np.nanmedian(engines[engine]["request"]))[:_ENGINES]
    left = f"<small>the {_ENGINES} slowest engines of {len(engines)}</small>" if len(engines) > _ENGINES else ""
    shown = {_name(colour, cell.label) + left: every}
    if len(engines) > 1:
        shown |= {f"<small>engine {one}</small>": engines[one] for one in sorted(slowest, key=int)}
    rows = []
    for name, of in shown.items():
        cells = "".join(f'<td class="number">{_percentiles(of[part])}</td>' for part in LATENCIES)
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return "".join(rows)


def _percentiles(seconds: np.ndarray) -> str:
    return " / ".join(number(value, 3) for value in percentiles(seconds).values()) or "–"


def _card(colour: str, label: str, body: str, foot: str = "") -> str:
    text = f"<p>{escape(foot)}</p>" if foot else ""
    name = f'<i class="dot" style="background:{colour}"></i>{escape(label)}'
    return f'<div class="card"><h3>{name}</h3>{body}{text}</div>'


def _idle(cell: Cell) -> str:
    rows = "".join(_idle_row(time) for time in role_times(cell.timelines))
    return f'<table class="idle-table"><tbody>{rows}</tbody></table>'


def _idle_row(time: RoleTime) -> str:
    bar = shares_bar({"own": time.own, "others": time.others, "idle": time.idle})
    by_seed = ", ".join(percent(idle, 1) for idle in time.idle_by_seed)
    name = time.role.replace("_", " ")
    title = f"own work {percent(time.own, 1)}, other roles {percent(time.others, 1)}; idle by seed: {by_seed}"
    return (
        f'<tr title="{escape(title)}"><th scope="row">{escape(name)}</th><td>{bar}</td>'
        f"<td>{percent(time.idle, 1 if 0.995 <= time.idle < 0.9995 else 0)} idle</td></tr>"
    )


def span_of(cells: Sequence[CellMeasure]) -> tuple[float, float]:
    """The range that an axis must cover to show every seed and every bounded interval of one measure."""
    shown = [value for cell in cells for value in cell.per_seed.values() if math.isfinite(value)]
    for cell in cells:
        if cell.interval is not None and cell.interval.bounded:
            shown += [cell.interval.low, cell.interval.high]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    spare = 0.5 * abs(low) or 0.5
    return (low, high) if high > low else (low - spare, high + spare)


def strip(cell: CellMeasure, axis: tuple[float, float], colour: str) -> str:
    """One cell's seeds as dots, its mean as a line with its interval, on an axis that all cells of a measure share."""
    low, high = axis

    def x(value: float) -> float:
        return _EDGE + (value - low) / (high - low) * (_STRIP - 2 * _EDGE)

    middle = _STRIP_HEIGHT / 2
    marks = [f'<line x1="{_EDGE}" x2="{_STRIP - _EDGE}" y1="{middle}" y2="{middle}" class="rail"/>']
    if cell.interval is not None and cell.interval.bounded:
        left, right = x(cell.interval.low), x(cell.interval.high)
        marks.append(
            f'<rect x="{left:.1f}" y="{middle - 5}" width="{max(right - left, 1):.1f}" height="10" rx="2" '
            f'fill="{colour}" opacity="0.28"/>'
        )
    for value in cell.per_seed.values():
        if math.isfinite(value):
            marks.append(f'<circle cx="{x(value):.1f}" cy="{middle}" r="3.2" fill="{colour}" class="seed"/>')
    if math.isfinite(cell.value):
        at = x(cell.value)
        marks.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 9}" y2="{middle + 9}" class="mean"/>')
    return (
        f'<svg class="strip" viewBox="0 0 {_STRIP} {_STRIP_HEIGHT}" width="{_STRIP}" height="{_STRIP_HEIGHT}" '
        f'aria-hidden="true">{"".join(marks)}</svg>'
    )


def shares_bar(parts: Mapping[str, float]) -> str:
    """One bar of shares that make one whole, by the class that colours each."""
    pieces = "".join(f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts.items())
    return f'<span class="shares" aria-hidden="true">{pieces}</span>'
