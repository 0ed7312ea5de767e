"""Places for labels of points, where they hide neither points nor each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_GAPS = (4.0, 16.0, 34.0, 56.0, 84.0)  # from the mark to its label
_DIRECTIONS = 16
_FURTHER, _ASTRAY = 3.0, 60.0  # what a unit of length costs: from its mark, and nearer to another than to its own
_OVER_LINE = 4.0  # and of area, where nothing is hidden


@dataclass(frozen=True)
class Box:
    """A rectangle in the plane, from the upper left corner."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Length from left to right."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """Length from top to bottom."""
        return self.bottom - self.top

    @staticmethod
    def around(x: float, y: float, radius: float) -> Box:
        """The square around a point."""
        return Box(x - radius, y - radius, x + radius, y + radius)

    @staticmethod
    def of_line(x1: float, y1: float, x2: float, y2: float) -> Box:
        """The rectangle around a line along an axis."""
        return Box(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1)

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(wide, 0.0) * max(high, 0.0)

    def inside(self, other: Box) -> bool:
        """Whether it lies inside of the other."""
        within_x = other.left <= self.left and self.right <= other.right
        return within_x and other.top <= self.top and self.bottom <= other.bottom

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the rectangle that is nearest to this one."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


def places(marks: Sequence[Box], sizes: Sequence[tuple[float, float]], frame: Box, lines: Sequence[Box]) -> list[Box]:
    """A box for the label of each mark, (width, height) in `sizes`, as near to it as it can be within the frame; those
    of marks in a crowd are placed first."""
    crowded = [sum(1 / (1 + _distance(mark, other)) for other in marks) for mark in marks]
    placed: dict[int, Box] = {}
    for index in sorted(range(len(marks)), key=lambda index: -crowded[index]):

        def cost(box: Box, mark: Box = marks[index]) -> tuple[float, float]:
            hidden = sum(map(box.overlap, placed.values())) + sum(map(box.overlap, marks))
            away = _away(box, mark)
            astray = away - min((_away(box, other) for other in marks if other is not mark), default=math.inf)
            crossed = sum(map(box.overlap, lines))
            return hidden, _FURTHER * away + _ASTRAY * max(astray, 0.0) + _OVER_LINE * crossed

        around = _around(marks[index], *sizes[index])
        placed[index] = min([box for box in around if box.inside(frame)] or around, key=cost)
    return [placed[index] for index in range(len(marks))]


def _around(mark: Box, width: float, height: float) -> list[Box]:
    """Boxes of that size beside a mark, in many directions, nearer ones first."""
    x, y = _middle(mark)
    found = []
    for gap in _GAPS:
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            reach = (mark.right - mark.left) / 2 + gap
            middle_x = x + math.cos(angle) * (reach + width / 2)
            middle_y = y + math.sin(angle) * (reach + height / 2)
            found.append(Box(middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2))
    return found


def _middle(box: Box) -> tuple[float, float]:
    return (box.left + box.right) / 2, (box.top + box.bottom) / 2


def _away(box: Box, mark: Box) -> float:
    return math.dist(box.nearest(*_middle(mark)), _middle(mark))


def _distance(one: Box, other: Box) -> float:
    return math.dist(_middle(one), _middle(other))
