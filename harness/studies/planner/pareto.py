"""What no other plan beats in both respects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def front(items: Sequence[T], gain: Callable[[T], float], price: Callable[[T], float], worth: float = 0.0) -> list[T]:
    """Items than which none gains at least as much for no higher a price (one of the two strictly), cheapest first.

    worth: by this share at least the gain must grow for a higher price. Of equals the first is kept.
    """
    kept: list[T] = []
    for item in sorted(items, key=lambda its: (price(its), -gain(its))):
        if not kept or gain(item) > (1 + worth) * gain(kept[-1]):
            kept.append(item)
    return kept
