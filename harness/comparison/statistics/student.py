"""Student's t distribution for whole degrees of freedom, in closed form."""

from __future__ import annotations

import math
from functools import cache

_HALVINGS = 200


def inside(t: float, freedom: int) -> float:
    """P(|T| <= t) for `freedom` degrees of freedom (at least 1).

    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    return 1.0 if math.isinf(t) else _inside_angle(math.atan2(abs(t), math.sqrt(freedom)), freedom)


def two_sided_p(t: float, freedom: int) -> float:
    """P(|T| > |t|); exact to about 1e-15."""
    return max(0.0, 1.0 - inside(t, freedom))


@cache
def critical(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = confidence, by halving the angle atan(t / sqrt(freedom))."""
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside_angle(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _inside_angle(angle: float, freedom: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):  # 2/3, 4/5, ... where freedom is odd, 1/2, 3/4, ... where it is even
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
