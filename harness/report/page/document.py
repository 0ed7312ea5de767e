"""The report of a comparison: report.html, the template with style, scripts, data and tables put in; and report.md."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import has_matrix, matrix_of
from harness.comparison.frames import write_frames
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import say, visible
from harness.report.drawing import FORMATS
from harness.report.page.data import curves_data, timelines_data
from harness.report.page.markdown import markdown, table_tex
from harness.report.page.pictures import draw_comparison
from harness.report.page.tables import (
    checks_html,
    commands_table,
    device_cards,
    facts_list,
    headline_table,
    latency_table,
    matrix_table,
    measure_tables,
    profile_cards,
    samples_html,
    staleness_cards,
)
from harness.report.page.text import (
    CURVES,
    MATRIX,
    PROFILES,
    RESULTS,
    Headings,
    equal_settings,
    made_with,
    measures_caption,
)
from harness.report.page.verdict_chart import chart_html
from harness.report.palette import style_of

_SCRIPTS = ("drawing.js", "timeline.js", "curves.js", "page.js")


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write report.html, which needs nothing else, report.md with PNG pictures beside it, for papers the pictures as
    SVG and PDF and table.tex, and for programs what `write_frames` does; returns their paths. An earlier report in this
    folder is replaced, file by file."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_comparison(comparison, folder)
    texts = {
        "report.html": document(comparison),
        "report.md": markdown(comparison, [picture.name for picture in pictures if picture.suffix == ".png"]),
        "table.tex": table_tex(comparison),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [*(folder / name for name in texts), *write_frames(comparison, folder), *pictures]


def print_written(paths: Sequence[Path], console: Console) -> None:
    """Pages and tables, a line each; pictures by name."""
    pictures = sorted({path.stem for path in paths if path.suffix == ".png"})
    for path in paths:
        if path.suffix[1:] not in FORMATS and path.stem not in pictures:
            say(console, path)
    told = f"pictures, as PNG, SVG and PDF, with their data: {', '.join(pictures)}"
    say(console, told)


def document(comparison: Comparison) -> str:
    """The whole page as HTML; it refers to nothing outside itself."""
    headings = Headings(comparison)
    curves, timelines = curves_data(comparison), timelines_data(comparison)
    equal = equal_settings(comparison)
    script = "\n".join(["", *(_part(name) for name in _SCRIPTS), ""])
    mark = ' <span class="simulated-mark">simulated</span>' if comparison.simulated else ""
    page = Template(_part("page.html")).substitute(
        policy=_policy(script),
        title=escape(headings.title),
        style=_part("page.css") + style_of(comparison.cells),
        how=headings.how,
        how_word=escape(headings.how_word),
        heading=escape(headings.heading),
        verdict=escape(comparison.verdict),
        verdict_class="verdict refused" if comparison.faults else "verdict",
        verdict_chart=chart_html(comparison),
        facts=facts_list(headings.facts, "facts"),
        simulated=mark,
        simulated_word=", simulated" if comparison.simulated else "",
        warnings=_warnings(comparison),
        results_caption=escape(RESULTS),
        headlines=headline_table(comparison),
        matrix=_matrix(comparison),
        curves_title=headings.curves_title,
        curves=_curves(curves),
        profiles=_profiles(comparison),
        staleness=staleness_cards(comparison),
        devices=device_cards(comparison),
        latencies=latency_table(comparison),
        timeline_choices="".join(
            f'<option value="{number}">{escape(run["label"])}</option>' for number, run in enumerate(timelines["runs"])
        ),
        samples=(samples := samples_html(comparison)),
        samples_link=' <a href="#samples">Samples</a>' if samples else "",
        measures_caption=escape(measures_caption(comparison)),
        measures=measure_tables(comparison),
        checks=checks_html(comparison),
        axes=escape(", ".join(comparison.axes)),
        equal=facts_list(equal, "settings"),
        equal_count=str(len(equal)),
        runs=commands_table(comparison),
        made_with=facts_list(made_with(comparison), "settings"),
        curves_data=as_script(curves),
        timeline_data=as_script(timelines),
        script=script,
    )
    return visible(page)


def _policy(script: str) -> str:
    """The policy by which a browser lets the page run this script and no other, load nothing, send nothing."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def as_script(value: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(_shown(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _shown(value: Any) -> Any:
    """The value with its texts as they are to be seen."""
    if isinstance(value, Mapping):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return visible(value) if isinstance(value, str) else value


def _curves(curves: Mapping[str, Any]) -> str:
    """The switches, the place that the script fills, and what the curves end at as a table for those who cannot see
    them: that is the table of measures."""
    if not curves["curves"]:
        return '<p class="caption">These runs have no curves.</p>'

    def switch(name: str, legend: str, choices: list[list[str]]) -> str:
        radios = "".join(
            f'<label><input type="radio" name="{name}" value="{escape(value)}"{" checked" if number == 0 else ""}> '
            f"{escape(text)}</label> "
            for number, (value, text) in enumerate(choices)
        )
        return f"<fieldset><legend>{legend}</legend>{radios}</fieldset>"

    switches = switch("key", "Show", curves["keys"]) + switch("axis", "Against", curves["axes"])
    return (
        f'<div class="controls">{switches}</div><div class="legend"></div><div class="curves live"></div>'
        f'<p class="caption readout"></p><p class="caption">{escape(CURVES)}</p>'
    )


def _matrix(comparison: Comparison) -> str:
    """The matrix where schedules and corrections were crossed; empty otherwise."""
    if not has_matrix(comparison):
        return ""
    matrix = matrix_of(comparison)
    text = f'<p class="caption">{escape(f"{matrix.what.capitalize()}. {MATRIX}")}</p>'
    return f'<h3 id="matrix">Schedules and corrections</h3>{text}<div class="wide">{matrix_table(matrix)}</div>'


def _profiles(comparison: Comparison) -> str:
    """A card per cell; empty where nothing was rewarded."""
    if not comparison.profiles:
        return ""
    text = f'<p class="caption">{escape(PROFILES)}</p>'
    return f'<h3 id="profiles">Performance profiles</h3>{text}<div class="cards">{profile_cards(comparison)}</div>'


def _warnings(comparison: Comparison) -> str:
    if not comparison.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in comparison.warnings)
    return f'<section class="warnings" aria-label="Warnings"><h2>Warnings</h2><ul>{items}</ul></section>'


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
