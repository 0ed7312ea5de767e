"""How every picture is drawn: one theme, widths of papers, files with what was drawn beside them, markup in pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.metrics.atomic_files import replacing
from harness.metrics.tables import read_csv, write_csv
from harness.report.palette import EDGE, GRID, INK, MUTED, ON_PAGE

if TYPE_CHECKING:
    import pandas as pd

COLUMN, PAGE = 3.25, 5.5
"""Widths of pictures for papers, in inches: of a column (ICML), and of a page's text (397 pt: NeurIPS, ICLR)."""
FORMATS = ("png", "svg", "pdf")  # formats of pictures, for pages, for the web and for papers
Draw = Callable[[Figure], "pd.DataFrame | None"]
"""Draws into a figure that has its width; returns what it drew, None where a file has that already."""
DrawTable = Callable[[Figure, "pd.DataFrame"], None]
"""Draws a table, and nothing else, into a figure that has its width."""

_LETTERS = {"paper": 0.85, "notebook": 0.9}  # of 8 and of 11 points
_DPI = {"paper": 300, "notebook": 150}
_OWN: Any = {
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), EDGE),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    **dict.fromkeys(("pdf.fonttype", "ps.fonttype"), 42),  # venues refuse Type 3
    "axes.grid": True,
    "grid.color": GRID,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may be anybody's
}
_PER_INCH = 72
_LETTER = 0.6  # of the size of letters, how wide they are
_HANDLE = 6  # letters in the width of a mark in a legend, and of the gaps around it


def theme(context: str) -> Any:
    """Settings of matplotlib for `paper`, or for screens: `notebook`."""
    import seaborn as sns  # takes a second

    return {**sns.axes_style("ticks"), **sns.plotting_context(context, _LETTERS[context]), **_OWN}


def save_figure(path: Path, title: str, draw: Draw) -> Path:
    """Draw for screens, below a title, into a PNG at `path`, and write what was drawn as CSV beside it; returns it."""
    if (data := _save([path], title, draw, "notebook")) is not None:
        write_csv(path.with_suffix(".csv"), data)
    return path


def save_in_every_format(
    folder: Path, name: str, title: str, draw: DrawTable, data: pd.DataFrame, remarks: Sequence[str] = ()
) -> list[Path]:
    """Draw a table for the width of a paper's page, as `name` in `folder` in all of `FORMATS`, PNG first, and for that
    of a column, as `name`-column.pdf, and write it as CSV, below the remarks; returns their paths."""
    paths = _save_in_every_format(folder, name, title, draw, data)
    return [*paths, write_csv(folder / f"{name}.csv", data, remarks)]


def draw_again(folder: Path, drawings: Mapping[DrawTable, frozenset[str]]) -> list[Path]:
    """Draw a folder's pictures for papers again, from the tables beside them, under the titles that they have; returns
    their paths. drawings: columns that the table of each has."""
    from PIL import Image

    made = []
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as picture:
            table, title = path.with_suffix(".csv"), picture.info.get("Title")
        if title and table.is_file():
            data = read_csv(table)
            draw = next((draw for draw, columns in drawings.items() if columns <= {*data}), None)
            made += _save_in_every_format(folder, path.stem, title, draw, data) if draw else []
    return made


def _save_in_every_format(folder: Path, name: str, title: str, draw: DrawTable, data: pd.DataFrame) -> list[Path]:
    def draw_it(figure: Figure) -> None:
        draw(figure, data)

    paths, column = [folder / f"{name}.{end}" for end in FORMATS], folder / f"{name}-column.pdf"
    _save(paths, title, draw_it, "paper")
    _save([column], title, draw_it, "paper", COLUMN)
    return [*paths, column]


def _save(paths: Sequence[Path], title: str, draw: Draw, context: str, width: float = PAGE) -> pd.DataFrame | None:
    with rc_context(theme(context)):
        figure = Figure((width, width), layout="constrained")
        FigureCanvasAgg(figure)
        data = draw(figure)
        figure.suptitle(fill(title, letters_across(figure)), fontsize=rcParams["axes.titlesize"], fontweight="bold")
        for path in paths:
            with replacing(path) as temporary:
                metadata = {"Title": title}
                figure.savefig(temporary, format=path.suffix[1:], dpi=_DPI[context], metadata=metadata)
    return data


def letters_across(figure: Figure, share: float = 1.0) -> int:
    """How many letters fit into a share of its width."""
    return max(8, int(share * figure.get_figwidth() * _PER_INCH / (_LETTER * rcParams["font.size"])))


def lines_high(count: float) -> float:
    """The height of so many lines of text, in inches."""
    return float(count * rcParams["font.size"] / _PER_INCH)


def panels(figure: Figure, count: int, height: float, least: int) -> list[Axes]:
    """Make `count` panels on one vertical scale, `height` lines high, of at least `least` letters in a row."""
    columns = min(count, max(1, letters_across(figure) // least))
    rows = -(-count // columns)
    figure.set_figheight(lines_high(3 + height * rows))
    made = list(np.ravel(figure.subplots(rows, columns, sharey=True, squeeze=False)))
    for panel in made[count:]:
        panel.set_visible(False)
    return made[:count]


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend below everything, in as many columns as fit; the figure grows by what it needs."""
    labels, most = [len(str(handle.get_label())) + _HANDLE for handle in handles], letters_across(figure)
    fit = (n for n in range(1, len(labels)) if sum(max(labels[at : at + n]) for at in range(0, len(labels), n)) <= most)
    rows = next(fit, len(labels))
    columns = -(-len(handles) // rows)
    figure.set_figheight(figure.get_figheight() + lines_high(1 + 1.4 * rows))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def inline_svg(
    draw: Callable[[Figure], object], size: tuple[float, float], name: str, label: str, colours: Mapping[str, str]
) -> str:
    """Draw as markup that stands in a page: text as text in the page's font, colours by the names that the page has for
    them, which are others in the dark. size: width and height in pixels, where `draw` sets no other; name: its class;
    label: for those who cannot see it; colours: names by colours as written in the drawing, besides the palette's own.
    Drawings of one page differ in name, label or colours, and so do the identifiers in them."""
    names = {colour.lower(): of for colour, of in {**ON_PAGE, **colours}.items()}
    with rc_context({**theme("notebook"), "svg.hashsalt": f"{name} {label} {colours}"}):
        figure = Figure((size[0] / _PER_INCH, size[1] / _PER_INCH), layout="constrained")
        draw(figure)
        width, height = figure.get_size_inches() * _PER_INCH
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    used = set(re.findall(r"#([\w-]+)", written.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if element.tag != "text":
            element.text = element.tail = None
        for key, value in [*element.items()]:
            del element.attrib[key]
            if key != "id" or value in used:
                element.set(key.rpartition("}")[2], _in_page(key, value, names))
    parts = [part for part in root if part.tag != "metadata" and part.find("style") is None]  # that is for whole pages
    markup = "".join(ElementTree.tostring(each, "unicode") for each in parts)
    return (
        f'<svg class="drawn {name}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{markup}</svg>"
    )


def _in_page(key: str, value: str, names: Mapping[str, str]) -> str:
    """An attribute's value: coordinates to a tenth; a style in the page's colours, and its font."""
    if key in ("d", "x", "y", "transform"):
        return re.sub(r"(\.\d)\d+", r"\1", " ".join(value.split()))
    if key != "style":
        return value
    value = re.sub(r"#[0-9a-f]{6}\b", lambda found: names.get(found[0], found[0]), value)
    return re.sub(r"font-family: [^;]*;", "", value)
