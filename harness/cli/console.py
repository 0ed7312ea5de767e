"""Consoles that commands print on: a terminal does what control characters say, and texts come from anybody's files."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from io import StringIO
from textwrap import wrap
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.segment import Segment

from harness.metrics.tables import PIPE, WHOLE_WORDS, Table

_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # what follows is shown in another order
_SURROGATES = range(0xD800, 0xE000)  # as a path that is no UTF-8 has them, and no output takes them
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), *_BIDIRECTIONAL, *_SURROGATES} - {ord("\t"), ord("\n")})
_NAMES = re.compile(r"\s*\S+ {2,}")
_KEY = re.compile(r"\s*(-|\S+:) ")
_COMMAND = re.compile(r"\s*(cadence|make) [\w-]+( --[\w-]+( [^\s-]\S*)?| \S+=('[^']*'|\S)*)+")

OUTPUT_CLOSED = 128 + signal.SIGPIPE
"""Status of a command whose output nobody reads any more: a shell's of one that the signal ended."""


class PlainTextConsole(Console):
    """Leaves out control characters of every text, and so every escape sequence but its own: colours, the cursor. On a
    terminal no line is longer than it is wide and no word is broken, unless a word alone is longer, or it is a command.
    spelling: how sentences, which are strings, are spelt; tables and texts of the user's are not, and stay. beside: is
    told how far a command is, where this one is no terminal, so that a pipe gets its results alone."""

    def __init__(self, *, spelling: Callable[[str], str] = str, beside: Console | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._spelling = spelling
        self.beside = self if beside is None or self.is_terminal else beside
        if not self.is_terminal:
            self.width = PIPE

    def print(self, *objects: Any, **options: Any) -> None:
        """Print sentences as whoever called spells settings."""
        spelt = [self._spelling(one) if isinstance(one, str) else one for one in objects]
        if self.is_terminal and all(isinstance(one, str | Table) for one in spelt):
            spelt = [folded(one, self.width) if isinstance(one, str) else one for one in spelt]
            options |= {"soft_wrap": True}  # they have the width, but for words that are longer
        super().print(*spelt, **options)

    def render(self, *renderable: Any, **options: Any) -> Iterable[Segment]:
        """Render without control characters of texts."""
        for segment in super().render(*renderable, **options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_CONTROLS))

    def on_broken_pipe(self) -> NoReturn:
        """End the command without a word: nobody reads on."""
        self.quiet = True
        _end(self.file)


class ValuesConsole(PlainTextConsole):
    """Keeps what is printed, for a program: `tables`, and sentences as `lines`, which go to standard error as well."""

    def __init__(self, errors: Console, **options: Any) -> None:
        super().__init__(file=StringIO(), beside=errors, **options)
        self._errors = errors
        self.tables: list[dict[str, object]] = []
        self.lines: list[str] = []

    def print(self, *objects: Any, **options: Any) -> None:
        """Keep it."""
        if objects and isinstance(objects[0], Table):
            self.tables += [{"title": table.title, "rows": table.values} for table in objects]
            return
        with self.capture() as said:
            super().print(*objects, **options)
        self.lines += said.get().splitlines()
        self._errors.print(*objects, **options)


def folded(text: str, width: int) -> str:
    """The text in lines of so many columns, broken between words; the rest of a line begins as it does, below what
    follows a name, or, as in YAML, behind where a key begins. Commands stay whole, to be copied."""
    return "\n".join("\n".join(_folded(line, width)) for line in text.split("\n"))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width or _COMMAND.fullmatch(line):
        return [line]
    named = _NAMES.match(line)
    indent = len(line) - len(line.lstrip()) + 2 * (_KEY.match(line) is not None)
    indent = indent if named is None or 2 * named.end() > width else named.end()
    return wrap(line, width, subsequent_indent=" " * indent, replace_whitespace=False, **WHOLE_WORDS)


def write(text: str) -> None:
    """Print a text as it is; ends the command where nobody reads on."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        _end(sys.stdout)


def _end(output: IO[str]) -> NoReturn:
    """Raise SystemExit; what is still to be written goes nowhere. Make would tell of any status but 0."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    raise SystemExit(0 if "MAKELEVEL" in os.environ else OUTPUT_CLOSED)
