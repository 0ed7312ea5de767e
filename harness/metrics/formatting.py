"""How numbers, durations and tables in Markdown and LaTeX are written for people: in pages, messages and exports."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import cycle
from textwrap import wrap
from typing import TYPE_CHECKING

from harness.config.registries import SCHEDULES

if TYPE_CHECKING:
    from rich.console import Console


_SIGNIFICANT = 3
_MOST_DECIMALS = 4
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories of characters that a screen does not show, or obeys
_LATEX = {ord(sign): rf"\{sign}" for sign in "&%$#_{}"} | str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"−": "$-$", "–": "--", "·": r"$\cdot$"}
)
_HEAD, _NAME, _NAMES_PT = 13, 24, 95  # letters in a line of a head and of a row's name, and what longer names get


def decimals(values: Iterable[float]) -> int:
    """Digits behind the point that give the largest of the values three digits in all; none if it has more before. A
    value and its interval, or a column, are written with the same ones."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0.0:
        return 0
    return min(_MOST_DECIMALS, max(0, _SIGNIFICANT - 1 - math.floor(math.log10(largest))))


def number(value: float, digits: int | None = None) -> str:
    """1,234 or 0.123; `digits` behind the point, three significant ones if None. NaN is a dash, an infinity `never`."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    text = f"{abs(value):,.{decimals([value]) if digits is None else digits}f}"
    return f"−{text}" if value < 0 and text.strip("0.") else text


def signed(value: float, digits: int | None = None) -> str:
    """A difference, with its sign unless it is nothing."""
    text = number(value, digits)
    return f"+{text}" if value > 0 and text.strip("0.,") else text


def percent(share: float, digits: int = 0) -> str:
    """A share as a percentage."""
    return f"{number(100 * share, digits)} %"


def plural(count: int, thing: str) -> str:
    """A count and its noun."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def listed(thing: str, numbers: Sequence[int]) -> str:
    """`seed 0`, or `seeds 0, 2`."""
    return f"{thing}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def duration(seconds: float | None) -> str:
    """`a moment`, `about 40 s`, `about 12 min`, `about 2.5 h`; None is `unknown`."""
    if seconds is None:
        return "unknown"
    if seconds < 3:
        return "a moment"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left, the others right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *[[_in_a_table(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _in_a_table(value: str) -> str:
    """A value in a cell of a table: in code all stands as it is, to be copied, but what would begin a column."""
    is_code = len(value) > 2 and value[0] == value[-1] == "`" and value.count("`") == 2
    return value.replace("|", "\\|") if is_code else escaped(value)


def latex(text: str) -> str:
    """Text as LaTeX shows it."""
    return text.translate(_LATEX)


def latex_table(heads: Iterable[str], rows: Iterable[Iterable[str]], caption: str, notes: Iterable[str] = ()) -> str:
    """A table of the package booktabs, of cells, caption and notes in LaTeX; the first column is left, the others
    right. A row of one cell goes across."""
    first, *others = heads
    stacks = (r" \\ ".join(wrap(head, _HEAD, break_long_words=False, break_on_hyphens=False)) for head in others)
    lines = [[first, *(rf"\shortstack[r]{{{stack}}}" for stack in stacks)], [r"\midrule"], *map(list, rows)]
    names = "l"
    if any(len(row) > 1 and len(row[0]) > _NAME for row in lines):
        names = f"p{{{_NAMES_PT}pt}}"
        lines = [[re.sub(r"(\\_|[=.])", r"\1\\allowbreak{}", row[0]), *row[1:]] if row[1:] else row for row in lines]
    below = " ".join(notes)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{@{{}}{names}{'r' * len(others)}@{{}}}}",
            r"\toprule",
            *(row[0] if len(row) == 1 else rf"{' & '.join(row)} \\" for row in lines),
            *(r"\bottomrule", r"\end{tabular}"),
            *([rf"\par\smallskip\scriptsize {below}"] if below else []),
            r"\end{table}" + "\n",
        ]
    )


_SECRET_PARAMETER = re.compile(
    r"([?&;#](?:[\w.-]*(?:pass|pwd|token|secret|key|sig|auth|credential)[\w.-]*)=)[^&;#\s]*", re.IGNORECASE
)


def redacted(text: str) -> str:
    """The text without what of addresses may be a secret: user:***@host, ***@host, ?token=***."""
    text = re.sub(r"(://[^/\s:@]*):[^/\s]*@", r"\1:***@", text)
    text = re.sub(r"(://)[^/\s:@]+@", r"\1***@", text)
    return _SECRET_PARAMETER.sub(r"\1***", text)


def visible(text: str) -> str:
    """Text in which a control character, one that turns the direction of writing round, or one that nobody sees, is
    written as an escape, such as `\\u202e`; lines stay lines."""
    return "\n".join(line if line.isprintable() else _visible(line) for line in text.split("\n"))


def _visible(line: str) -> str:
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one) in _HIDDEN else one for one in line
    )


def code(text: str) -> str:
    """Text as code in Markdown, whatever it holds."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def escaped(text: str) -> str:
    """Text on one line that begins no column, no link and no markup in Markdown."""
    text = " ".join(text.split("\n"))
    for character in "\\|<*[":
        text = text.replace(character, f"\\{character}")
    return text


def say(console: Console, text: object, style: str = "") -> None:
    """Print a text as it is, whatever it holds: nothing in it is markup, no line of it is broken."""
    console.print(f"{text}", style=style, highlight=False, markup=False, soft_wrap=True)


CELLS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#8C6BB1")
"""Colours of cells that are not a schedule each, in their order, again from the first where there are more. Okabe and
Ito (2008), without the yellow that vanishes on white; the last two are of equal distance to the others."""

MORE = (
    *("#882255", "#999933", "#332288", "#117733", "#AA4499"),
    *("#CC6677", "#44AA99", "#661100", "#6699CC", "#AA7744", "#777711", "#771155"),
)
"""Further colours, of Paul Tol's muted and other qualitative schemes."""

_IN_ORDER = (CELLS[0], *MORE[:4], *CELLS[1:6], MORE[4], CELLS[7], CELLS[6], *MORE[5:])
OWN = dict(zip(SCHEDULES, _IN_ORDER, strict=False))
"""A built-in schedule has one colour on every page and in every picture, and those that are compared most the ones that
differ most; those of the user's get what is left."""
_OTHERS = _IN_ORDER[len(OWN) :]


def of_schedules(names: Sequence[str]) -> dict[str, str]:
    """Colours of schedules by name."""
    others = cycle(_OTHERS)
    return {name: OWN[name] if name in OWN else next(others) for name in names}
