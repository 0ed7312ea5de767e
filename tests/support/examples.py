"""How many examples a property is tried on, by the profile of Hypothesis in use (tests/conftest.py)."""

from __future__ import annotations

from hypothesis import settings

CI = 150


def examples(in_ci: int, least: int = 5) -> int:
    """For `max_examples` of a test that needs its own number: `in_ci` in CI, in proportion elsewhere."""
    return max(min(in_ci, least), in_ci * settings().max_examples // CI)
