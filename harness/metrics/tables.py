"""Tables, of which no figure is ever cut: on a terminal as wide as it is, for a pipe a line a row, and as values; and
CSV files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from harness.metrics.atomic_files import write_text

if TYPE_CHECKING:
    import pandas as pd

PIPE = 10_000  # columns of a console that is no terminal: no line is broken there
WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
"""Options of textwrap, which then breaks no word."""

_NONE = ("", "-", "–")
_GAP = "  "
_WHOLE = 16  # characters up to which a line of a cell is not broken between its words


@dataclass(frozen=True)
class Table:
    """columns: heads; of several lines, `iterations\\nsamples`, like the cells. The first says what a row is of."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def values(self) -> list[dict[str, str | float | None]]:
        """A mapping for each row, by heads: a number where a cell is one, None where it says that there is nothing."""
        heads, rows = self._single
        return [{head: _value(cell) for head, cell in zip(heads, row, strict=True)} for row in rows]

    @property
    def _single(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows of one line each: a column for each line of a head, where its cells have as many."""
        heads: list[str] = []
        columns: list[list[str]] = []
        named = Counter(part for head in self.columns for part in head.split("\n"))
        for head, *cells in zip(self.columns, *self.rows, strict=True):
            parts, lines = head.split("\n"), [cell.split("\n") for cell in cells]
            lines = [line * len(parts) if len(line) == 1 and line[0] in _NONE else line for line in lines]
            if any(len(line) != len(parts) for line in lines):
                parts, lines = [" ".join(parts)], [[" ".join(line)] for line in lines]
            heads += [part if named[part] < 2 else f"{parts[0]}, {part}" for part in parts]
            columns += [[" ".join(cell.split()) for cell in column] for column in zip(*lines, strict=True)]
        return heads, [list(row) for row in zip(*columns, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        if self.title:
            yield Text("\n".join(wrap(self.title, width, **WHOLE_WORDS)), style="italic")
        if width >= PIPE:
            heads, rows = self._single
            yield Text("\n".join(_grid(heads, [[cell or "-" for cell in row] for row in rows], width)))
        else:
            whole = _grid(self.columns, self.rows, width, rule="─")
            yield Text("\n".join(whole or self._in_parts(width) or self._below_each_other(width)))
        yield Text()

    def _in_parts(self, width: int) -> list[str]:
        """Lines of tables below each other, each of the first column and as many others as fit; none where these are of
        words, or one does not fit."""
        first, *others = zip(self.columns, *self.rows, strict=True)
        if any(cell[:1].isalpha() for _, *cells in others for cell in cells):
            return []
        lines: list[str] = []
        while others:
            fit, part = len(others), list[str]()
            while fit and not part:
                heads, *rows = zip(first, *others[:fit], strict=True)
                part, fit = _grid(heads, rows, width, rule="─"), fit - 1
            if not part:
                return []
            lines, others = [*lines, *[""] * bool(lines), *part], others[fit + 1 :]
        return lines

    def _below_each_other(self, width: int) -> Iterator[str]:
        """Lines for each row: what it is of, and whatever there is to say of it."""
        heads, rows = self._single
        longest = max(map(cell_len, heads))
        below = _GAP + (" " * (longest + 1) if 2 * longest < width else _GAP)
        for row in rows:
            yield from wrap(row[0], width, **WHOLE_WORDS)
            for head, cell in zip(heads[1:], row[1:], strict=True):
                if cell in _NONE:
                    continue
                named = f"{head:<{longest}}"
                yield from wrap(f"{named} {cell}", width, initial_indent=_GAP, subsequent_indent=below, **WHOLE_WORDS)


def read_csv(path: Path) -> pd.DataFrame:
    """The table of a CSV file, without the remarks above it."""
    import pandas as pd

    remarks = sum(1 for _ in takewhile(lambda line: line.startswith("# "), path.read_text().splitlines()))
    return pd.read_csv(path, skiprows=remarks, keep_default_na=False, na_values=[""])


def write_csv(path: Path, data: pd.DataFrame, remarks: Sequence[str] = (), digits: int = 5) -> Path:
    """Write a table, its floats with so many digits, below the remarks; returns the path."""
    write_text(path, "".join(f"# {one}\n" for one in remarks) + data.to_csv(index=False, float_format=f"%.{digits}g"))
    return path


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, rule: str = "") -> list[str]:
    """Lines of a table; none where they would be longer. rule: below heads."""
    columns = [*zip(heads, *rows, strict=True)]
    widths = [max(map(cell_len, _lines(column))) for column in columns]
    least = [max([0, *map(_unbroken, _lines(cells)), *map(cell_len, head.split())]) for head, *cells in columns]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        slack = [have - need for have, need in zip(widths, least, strict=True)]
        if not max(slack) > 0:
            return []
        widths[slack.index(max(slack))] -= 1
    figures = [not any(cell[:1].isalpha() for cell in cells) for _, *cells in columns[1:]]
    drawn = [_drawn(row, widths, [False, *figures]) for row in (heads, *rows)]
    below = [rule * (sum(widths) + len(_GAP) * (len(widths) - 1))] if rule else []
    lines = [*drawn[0], *below]
    for number, row_lines in enumerate(drawn[1:]):
        lines += [""] * (number > 0 and any(len(one) > 1 for one in drawn[1:])) + row_lines
    return lines


def _drawn(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Lines of a row."""
    cells = [
        list(chain.from_iterable(wrap(line, width, **WHOLE_WORDS) or [""] for line in cell.split("\n")))
        for cell, width in zip(row, widths, strict=True)
    ]
    padded = []
    for cell, width, to_the_right in zip(cells, widths, right, strict=True):
        lines = [*cell, *[""] * (max(map(len, cells)) - len(cell))]
        blank = [" " * (width - cell_len(line)) for line in lines]
        padded.append(
            [space + line if to_the_right else line + space for line, space in zip(lines, blank, strict=True)]
        )
    return [_GAP.join(line).rstrip() for line in zip(*padded, strict=True)]


def _lines(cells: Sequence[str]) -> Iterator[str]:
    return chain.from_iterable(cell.split("\n") for cell in cells)


def _unbroken(line: str) -> int:
    """Columns that a line of a cell takes at least."""
    return cell_len(line) if cell_len(line) <= _WHOLE else max(map(cell_len, line.split()), default=0)


def _value(cell: str) -> str | float | None:
    if cell in _NONE:
        return None
    with suppress(ValueError):
        value = float(cell.replace(",", "").replace("−", "-"))
        return int(value) if value.is_integer() and "." not in cell else value
    return cell
