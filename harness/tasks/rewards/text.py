"""Rewards that compare texts: the same, the same number, matched by a pattern, in a form, of a length."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from harness.tasks.task import Sample, Score

NUMBER = re.compile(
    r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d+(?:\.\d+)?)?"
)
"""1,234.5e-3 or 3/4; may match nothing at a place."""


def quick(reward: Callable[..., Score]) -> Callable[..., Score]:
    """Marks a reward that takes microseconds whatever the response: it needs no process of its own."""
    reward.quick = True  # type: ignore[attr-defined]
    return reward


@quick
def exact(sample: Sample, *, ignore_case: bool = False) -> Score:
    """1 where the response is the answer, white space around either aside, and it stopped."""
    said, right = sample.response.strip(), sample.answer.strip()
    if ignore_case:
        said, right = said.casefold(), right.casefold()
    same = sample.stopped and said == right
    return Score(float(same), same)


@quick
def numeric(sample: Sample, *, relative_tolerance: float = 1e-6) -> Score:
    """1 where the last number of the response is the last of the answer: 1,000 is 1e3, and 0.75 is 3/4."""
    said, right = last_number(sample.response), last_number(sample.answer)
    if right is None:
        raise ValueError(f"the answer {sample.answer!r:.80} holds no number; use another reward, or answer_pattern")
    same = said is not None and abs(said - right) <= Fraction(relative_tolerance) * abs(right)
    return Score(float(same), same)


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly; None where there is none."""
    for found in reversed([match.group() for match in NUMBER.finditer(text)]):
        if any(character.isdigit() for character in found):
            return _value(found)
    return None


def _value(text: str) -> Fraction | None:
    above, _, below = "".join(text.split()).replace(",", "").partition("/")
    if not below:
        return Fraction(above)
    return Fraction(above) / Fraction(below) if Fraction(below) else None


def regex(sample: Sample, *, pattern: str) -> Score:
    """1 where the pattern matches somewhere in the response; `{answer}` in it stands for the answer, as it is."""
    same = re.search(pattern.replace("{answer}", re.escape(sample.answer)), sample.response, re.DOTALL) is not None
    return Score(float(same), same)


def form(
    sample: Sample,
    *,
    pattern: str = r"\s*<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>\s*",
    share: float = 0.1,
    ignore_case: bool = False,
) -> Score:
    """`share` for a response that has this form as a whole, the rest where its group `answer` is the answer too."""
    found = re.fullmatch(pattern, sample.response, re.DOTALL)
    if found is None:
        return Score(0.0, False)
    said, right = (found.groupdict().get("answer") or "").strip(), sample.answer.strip()
    same = said.casefold() == right.casefold() if ignore_case else said == right
    return Score(share + (1 - share) * same, same)


@quick
def length(sample: Sample, *, limit: int, buffer: int, penalty: float = 1.0) -> Score:
    """`exact`, less a penalty for long responses: 0 up to limit - buffer tokens, from there on in proportion, all of it
    at `limit` and beyond (the soft overlong punishment of DAPO, arXiv 2503.14476, equation 13)."""
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer={buffer} tokens are no part of limit={limit}")
    right = exact(sample)
    over = min(1.0, max(0.0, (sample.tokens - (limit - buffer)) / buffer))
    return Score(right.reward - penalty * over, right.exact_match)
