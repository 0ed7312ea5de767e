"""The report of a comparison: report.html, the template with style, scripts, data and tables put in; and report.md."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import has_matrix, lags_of, matrix_of
from harness.comparison.curves import role_times
from harness.comparison.frames import write_frames
from harness.comparison.measure_text import headlines, rows_of, unit_of
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import number, percent, say, visible
from harness.report.drawing import FORMATS
from harness.report.page import tables
from harness.report.page import text as texts
from harness.report.page.data import curves_data, timelines_data
from harness.report.page.markdown import markdown, table_tex
from harness.report.page.pictures import draw_comparison
from harness.report.page.verdict_chart import chart_html
from harness.report.palette import style_of
from harness.report.samples import shortened
from harness.report.templates import read_beside, rendered

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
    script = "\n".join(["", *(read_beside(__package__, name) for name in _SCRIPTS), ""])
    values = {
        "comparison": comparison,
        "cells": comparison.cells,
        "policy": _policy(script),
        "style": read_beside(__package__, "page.css") + style_of(comparison.cells),
        "script": script,
        "headings": texts.Headings(comparison),
        "headlines": headlines(comparison),
        "rows": {measure.key: rows_of(comparison, measure) for measure in comparison.measures},
        "matrix": matrix_of(comparison) if has_matrix(comparison) else None,
        "curves": curves_data(comparison),
        "timelines": timelines_data(comparison),
        "samples": tables.chosen_samples(comparison),
        "texts": texts,
        "tables": tables,
        "chart_html": chart_html,
        "as_script": as_script,
        "unit_of": unit_of,
        "lags_of": lags_of,
        "role_times": role_times,
        "figure": number,
        "percent": percent,
        "isfinite": isfinite,
        "shortened": shortened,
    }
    return visible(rendered(__package__, "page.html", values, html=True))


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
