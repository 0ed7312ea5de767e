"""Rewards that compare texts: the same, the same number, matched by a pattern, in a form, of a length."""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from harness.tasks.rewards.reading import as_typed, final_answer, normalised, pays_what_ended, reads_text
from harness.tasks.task import Sample, Score

NUMBER = re.compile(
    r"(?:(?<!\d)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d+(?:\.\d+)?)?"
)
"""1,234.5e-3 or 3/4."""


def quick(reward: Callable[..., Score]) -> Callable[..., Score]:
    """Marks a reward that takes microseconds whatever the response: it needs no process of its own."""
    reward.quick = True  # type: ignore[attr-defined]
    return reward


def says_answer(reward: Callable[..., Score]) -> Callable[..., Score]:
    """Marks a reward of responses that have the answer in them as it stands: they are as long as it at least."""
    reward.says_answer = True  # type: ignore[attr-defined]
    return reward


@says_answer
@quick
@reads_text
def exact(sample: Sample, *, ignore_case: bool = False, final: bool = False) -> Score:
    """1 where the response is the answer, white space around either aside; with `final`, where its final answer is."""
    said, right = final_answer(sample.response) if final else sample.response.strip(), sample.answer.strip()
    if ignore_case:
        said, right = said.casefold(), right.casefold()
    return Score(float(said == right), said == right)


@quick
@reads_text
def numeric(sample: Sample, *, relative_tolerance: float = 1e-6) -> Score:
    """1 where the last number of the final answer is the last of the row's: 1,000 is 1e3, and 0.75 is 3/4."""
    said, right = last_number(sample.response), _right(sample.answer)
    same = said is not None and abs(said - right) <= Fraction(relative_tolerance) * abs(right)
    return Score(float(same), same)


def _right(answer: str) -> Fraction:
    if (right := last_number(answer)) is None:
        raise ValueError(f"the answer {answer!r:.80} holds no number; use another reward, or answer_pattern")
    return right


numeric.check_answer = _right  # type: ignore[attr-defined]

_FRACTION = re.compile(
    r"(?:(?<![\d.,^_])(\d+)\s*)?\\[dt]?frac\s*(?:\{\s*([-+]?[\d.]+)\s*\}|(\d))\s*(?:\{\s*([\d.]+)\s*\}|(\d))"
)
_POWER_OF_TEN = re.compile(
    r"(?:(\d)\s*(?:\\times|\\cdot|[\u00d7\u00b7*xX])\s*|(?<![\w.]))10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?"
)
_POWER = re.compile(r"(?<![\w.])(\d{1,9})\s*\^\s*\{?\s*(\d{1,2})(?!\d)\s*\}?")


def last_number(text: str) -> Fraction | None:
    """The last number of a text's final answer, exactly; None where there is none."""
    text = _FRACTION.sub(_on_a_line, as_typed(final_answer(normalised(text))))
    text = _POWER_OF_TEN.sub(lambda found: f"{found[1] or 1}e{found[2]}", text)
    text = _POWER.sub(lambda found: str(int(found[1]) ** int(found[2])), text)
    numbers = NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _on_a_line(found: re.Match[str]) -> str:
    r"""\frac{3}{4} as 3/4, 1\frac12 as 3/2."""
    whole, above, below = found[1], found[2] or found[3], found[4] or found[5]
    return (
        f"{int(whole) * int(below) + int(above)}/{below}"
        if whole and (above + below).isdecimal()
        else f"{above}/{below}"
    )


_MOST_DIGITS = 1000


def _value(text: str) -> Fraction | None:
    if len(text) > _MOST_DIGITS:
        return None
    above, _, below = "".join(text.split()).replace(",", "").partition("/")
    if not below:
        return Fraction(above)
    return Fraction(above) / Fraction(below) if Fraction(below) else None


@pays_what_ended
def regex(sample: Sample, *, pattern: str, final: bool = False) -> Score:
    """1 where the pattern matches somewhere in the response, or with `final` in its final answer, as it stands or
    normalised; `{answer}` in it stands for the answer, as it is."""
    same = any(
        re.search(pattern.replace("{answer}", re.escape(answer)), final_answer(said) if final else said, re.DOTALL)
        for said, answer in _readings(sample)
    )
    return Score(float(same), same)


def _readings(sample: Sample) -> Iterator[tuple[str, str]]:
    """Response and answer as they stand, for patterns that name what normalising changes, and normalised."""
    yield sample.response, sample.answer
    if not (sample.response.isascii() and sample.answer.isascii()):
        yield normalised(sample.response), normalised(sample.answer)


def _compiles(answer: str, *, pattern: str) -> None:
    try:
        re.compile(pattern.replace("{answer}", re.escape(answer)))
    except re.error as error:
        raise ValueError(f"pattern={pattern} is no regular expression: {error}") from error


regex.check_answer = _compiles  # type: ignore[attr-defined]


@says_answer
@pays_what_ended
def form(
    sample: Sample,
    *,
    pattern: str = r"\s*<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>\s*",
    share: float = 0.1,
    ignore_case: bool = False,
) -> Score:
    """`share` for a response that has this form as a whole, the rest where its group `answer` is the answer too."""
    matches = [re.fullmatch(pattern, said, re.DOTALL) for said, _ in _readings(sample)]
    found = next((match for match in matches if match is not None), None)
    if found is None:
        return Score(0.0, False)
    said, right = (normalised(one or "").strip() for one in (found.groupdict().get("answer"), sample.answer))
    same = said.casefold() == right.casefold() if ignore_case else said == right
    return Score(share + (1 - share) * same, same)


form.check_answer = _compiles  # type: ignore[attr-defined]


@says_answer
@quick
def length(sample: Sample, *, limit: int, buffer: int, penalty: float = 1.0) -> Score:
    """`exact`, less a penalty for long responses: 0 up to limit - buffer tokens, from there on in proportion, all of it
    at `limit` and beyond (the soft overlong punishment of DAPO, arXiv 2503.14476, equation 13)."""
    return _less_penalty(exact(sample), sample.tokens, limit, buffer, penalty)


def _less_penalty(right: Score, tokens: int, limit: int, buffer: int, penalty: float = 1.0) -> Score:
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer={buffer} tokens are no part of limit={limit}")
    over = min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))
    return Score(right.reward - penalty * over, right.exact_match)


def _length_paying_truncated(sample: Sample, **options: Any) -> Score:
    return _less_penalty(exact.paying_truncated(sample), sample.tokens, **options)  # type: ignore[attr-defined]


def _possible(answer: str, *, limit: int, buffer: int) -> None:
    _less_penalty(Score(0.0, False), 0, limit, buffer)


length.paying_truncated = _length_paying_truncated  # type: ignore[attr-defined]
length.check_answer = _possible  # type: ignore[attr-defined]
