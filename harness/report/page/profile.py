"""Performance profiles as charts that need no script: of every cell, the share of its seeds above each score."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from harness.comparison.parts import Profile

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _HEAD, _FOOT = 260, 164, 42, 16, 8, 36
_GRAIN = 0.05  # of the axis of scores


def profile_chart(profile: Profile, baseline: Profile, scores: tuple[float, float], colour: str, label: str) -> str:
    """The cell's steps in its colour with their band, and the baseline's thin and grey behind; `scores` is the part of
    the axis that is shown."""
    shown = (profile.taus >= scores[0] - 1e-9) & (profile.taus <= scores[1] + 1e-9)

    def points(its: Profile, values: np.ndarray) -> list[str]:
        return [f"{_x(tau, scores):.1f},{_y(value):.1f}" for tau, value in _corners(its.taus[shown], values[shown])]

    band = [*points(profile, profile.low), *reversed(points(profile, profile.high))]
    return (
        f'<svg class="histogram" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{_frame(scores)}"
        f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.13"/>'
        f'<polyline points="{" ".join(points(baseline, baseline.shares))}" class="other-line"/>'
        f'<polyline points="{" ".join(points(profile, profile.shares))}" class="mean-line" stroke="{colour}"/></svg>'
    )


def profile_scores(profiles: Sequence[Profile]) -> tuple[float, float]:
    """The part of the scores in which the seeds of any cell end, with some room."""
    low = min(float(its.taus[np.argmax(its.shares < 1.0)]) for its in profiles)
    high = max(float(its.taus[np.argmax(its.shares <= 0.0)]) for its in profiles)
    grains = np.floor(low / _GRAIN - 0.2), np.ceil(high / _GRAIN + 0.2)
    least, most = (float(np.clip(grain * _GRAIN, 0.0, 1.0)) for grain in grains)
    return least, most


def profile_told(profile: Profile) -> str:
    """The profile in words: the scores that all, half and none of the seeds end above."""
    told = []
    for share, name in ((1.0, "all"), (0.5, "half"), (1e-9, "some")):
        above = profile.taus[profile.shares >= share]
        told.append(f"{name} of the seeds end above {above[-1]:.3g}" if above.size else f"not {name} above 0")
    return ", ".join(told)


def _corners(taus: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    """Where a line of steps turns, and its ends."""
    turns = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    ends = [*turns[1:], len(taus) - 1]
    return [(float(taus[at]), float(values[turn])) for turn, end in zip(turns, ends, strict=True) for at in (turn, end)]


def _frame(scores: tuple[float, float]) -> str:
    bottom = _HEIGHT - _FOOT
    marks = []
    for share, name in ((0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")):
        kind = "axis" if share == 0 else "grid"
        y = f"{_y(share):.1f}"
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="{kind}"/>')
        marks.append(f'<text x="{_LEFT - 4}" y="{_y(share) + 3:.1f}" class="tick end">{name}</text>')
    for score in np.linspace(*scores, 3):
        marks.append(f'<text x="{_x(float(score), scores):.1f}" y="{bottom + 14}" class="tick">{score:.3g}</text>')
    marks.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 5}" class="tick">exact match at the end</text>'
    )
    return "".join(marks)


def _x(score: float, scores: tuple[float, float]) -> float:
    low, high = scores
    return _LEFT + (score - low) / (high - low) * (_WIDTH - _RIGHT - _LEFT)


def _y(share: float) -> float:
    return _HEIGHT - _FOOT - share * (_HEIGHT - _FOOT - _HEAD)
