"""Consoles that commands print on: a terminal does what control characters say, and texts come from anybody's files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # what follows is shown in another order
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), *_BIDIRECTIONAL} - {ord("\t"), ord("\n")})


class PlainTextConsole(Console):
    """Leaves out control characters of every text, and so every escape sequence but its own: colours, the cursor."""

    def render(self, *renderable: Any, **options: Any) -> Iterable[Segment]:
        """Render without control characters of texts."""
        for segment in super().render(*renderable, **options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_CONTROLS))
