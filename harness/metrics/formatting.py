"""How numbers, durations and tables in Markdown and LaTeX are written for people: in pages, messages and exports."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_SIGNIFICANT = 3
_MOST_DECIMALS = 4
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of characters that a screen does not show, or obeys."""


def decimals(values: Iterable[float]) -> int:
    """Digits behind the point that give the largest of the values three digits in all; none if it has more before.

    A value and its interval, or a column, are written with the same ones.
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0.0:
        return 0
    return min(_MOST_DECIMALS, max(0, _SIGNIFICANT - 1 - math.floor(math.log10(largest))))


def number(value: float, digits: int | None = None) -> str:
    """1,234 or 0.123; `digits` behind the point, three significant ones if None. NaN (there is none) is a dash, an
    infinity (not reached) `never`."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    text = f"{value:,.{decimals([value]) if digits is None else digits}f}"
    return f"−{text[1:]}" if text.startswith("-") else text


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
    """A value in a cell of a table: in code all stands as it is, so that it can be copied, but what would begin a
    column."""
    is_code = len(value) > 2 and value[0] == value[-1] == "`" and value.count("`") == 2
    return value.replace("|", "\\|") if is_code else escaped(value)


def latex_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular of the package booktabs; the first column is left, the others right."""
    import pandas as pd  # a second, for who only formats a number

    table = pd.DataFrame(rows, columns=list(heads)).style.hide(axis="index")
    table = table.format(escape="latex").format_index(escape="latex", axis="columns")
    return str(table.to_latex(hrules=True, column_format="l" + "r" * (len(heads) - 1))).replace("−", "$-$")


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
