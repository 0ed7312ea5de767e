"""Tables in Markdown, and text that means nothing there but itself."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left, the others right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *[[escaped(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Text that begins no column, no link and no markup."""
    for character in "\\|<*[":
        text = text.replace(character, f"\\{character}")
    return text
