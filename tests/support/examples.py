"""How many examples a property is tried on, by the profile of Hypothesis in use (tests/conftest.py)."""

from hypothesis import settings


def examples(of_150: int, least: int = 5) -> int:
    """Give `max_examples` for a test that needs a number of its own: `of_150` where others have 150, in proportion
    elsewhere."""
    return max(min(of_150, least), of_150 * settings().max_examples // 150)
