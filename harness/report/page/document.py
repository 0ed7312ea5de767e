"""The page: the template with its style, its scripts, its data and its tables put in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from harness.comparison.matrix import has_matrix, matrix_of
from harness.comparison.result import Comparison
from harness.metrics.manifest import run_title
from harness.report.page.accounts import checks_html, commands_table, equal_settings, facts_list, made_with
from harness.report.page.cards import device_cards, profile_cards, staleness_cards
from harness.report.page.curves_data import curves_data
from harness.report.page.devices import pools
from harness.report.page.heat import heat_table
from harness.report.page.palette import KINDS, VERSIONS
from harness.report.page.spans import MOST_SPANS, timeline_data
from harness.report.page.tables import headline_table, measure_tables
from harness.report.page.words import CURVES, MATRIX, PROFILES, RESULTS, Words, measures_caption

_SCRIPTS = ("elements.js", "drawing.js", "timeline.js", "timeline_input.js", "curves.js", "page.js")


def document(comparison: Comparison) -> str:
    """The whole page as HTML; it refers to nothing outside itself."""
    words = Words(comparison)
    curves, timelines = curves_data(comparison), timelines_data(comparison)
    equal = equal_settings(comparison)
    mark = ' <span class="simulated-mark">simulated</span>' if comparison.simulated else ""
    return Template(_part("page.html")).substitute(
        title=escape(words.title),
        style=_part("page.css"),
        how=words.how,
        how_word=escape(words.how_word),
        heading=escape(words.heading),
        verdict=escape(comparison.verdict),
        facts=facts_list(words.facts, "facts"),
        simulated=mark,
        simulated_word=", simulated" if comparison.simulated else "",
        warnings=_warnings(comparison),
        results_caption=escape(RESULTS),
        headlines=headline_table(comparison, [pools(cell.runs[0]) for cell in comparison.cells]),
        matrix=_matrix(comparison),
        curves_title=words.curves_title,
        curves=_curves(curves),
        profiles=_profiles(comparison),
        staleness=staleness_cards(comparison),
        devices=device_cards(comparison),
        timeline_choices="".join(
            f'<option value="{number}">{escape(run["label"])}</option>' for number, run in enumerate(timelines["runs"])
        ),
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
        script="\n".join(_part(name) for name in _SCRIPTS),
    )


def timelines_data(comparison: Comparison) -> dict[str, Any]:
    """The first run of each cell, with the colours of all."""
    most = MOST_SPANS // len(comparison.cells)
    return {
        "kinds": list(KINDS),
        "colours": {"kinds": list(KINDS.values()), "versions": list(VERSIONS)},
        "runs": [
            timeline_data(cell.runs[0].timeline, run_title(cell.runs[0].identity), most)
            | {"label": f"{cell.label}, seed {cell.runs[0].identity.seed}"}
            for cell in comparison.cells
        ],
    }


def as_script(value: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    told = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return told.replace("<", "\\u003c")


def _curves(curves: Mapping[str, Any]) -> str:
    """The switches, the place that the script fills, and what the curves end at as a table for those who cannot see
    them: that is the table of measures."""
    if not curves["curves"]:
        return '<p class="caption">These runs have no curves.</p>'

    def switch(name: str, legend: str, choices: list[list[str]]) -> str:
        radios = "".join(
            f'<label><input type="radio" name="{name}" value="{escape(value)}"{" checked" if number == 0 else ""}> '
            f"{escape(told)}</label> "
            for number, (value, told) in enumerate(choices)
        )
        return f"<fieldset><legend>{legend}</legend>{radios}</fieldset>"

    switches = switch("key", "Show", curves["keys"]) + switch("axis", "Against", curves["axes"])
    return (
        f'<div class="controls">{switches}</div><div class="legend"></div><div class="curves live"></div>'
        f'<p class="caption readout"></p><p class="caption">{escape(CURVES)}</p>'
    )


def _matrix(comparison: Comparison) -> str:
    """Where schedules and corrections were crossed; empty otherwise."""
    if not has_matrix(comparison):
        return ""
    matrix = matrix_of(comparison)
    told = f'<p class="caption">{escape(f"{matrix.what.capitalize()}. {MATRIX}")}</p>'
    return f'<h3 id="matrix">Schedules and corrections</h3>{told}<div class="wide">{heat_table(matrix)}</div>'


def _profiles(comparison: Comparison) -> str:
    """A card per cell; empty where nothing was rewarded."""
    if not comparison.profiles:
        return ""
    told = f'<p class="caption">{escape(PROFILES)}</p>'
    return f'<h3 id="profiles">Performance profiles</h3>{told}<div class="cards">{profile_cards(comparison)}</div>'


def _warnings(comparison: Comparison) -> str:
    if not comparison.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in comparison.warnings)
    return f'<section class="warnings" aria-label="Warnings"><h2>To mind</h2><ul>{items}</ul></section>'


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
