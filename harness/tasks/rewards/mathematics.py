"""Mathematical answers, held against each other by `math-verify`."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from harness.tasks.task import Sample, Score


def math(sample: Sample, *, decimals: int = 6) -> Score:
    r"""1 where the last expression of the response (one in `\boxed{}` before any other) equals the answer: LaTeX,
    numbers, intervals, sets, equations. decimals: of what is compared as a number.

    Raises ValueError for an answer that is none. There is no time limit here: the library's own needs the main thread
    of a process, and the pool of rewards has one.
    """
    from math_verify import verify

    right, said = _parsed(_as_latex(sample.answer)), _parsed(sample.response)
    if not right:
        raise ValueError(f"the answer {sample.answer!r:.80} is no mathematical expression")
    same = verify(right, said, float_rounding=decimals, timeout_seconds=None)
    return Score(float(same), same)


def _as_latex(answer: str) -> str:
    r"""The expression as LaTeX: data sets hold bare ones: \frac{1}{2}, x^2 + 1, 72."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, extraction_config=_kinds(), parsing_timeout=None)


@lru_cache(maxsize=1)
def _kinds() -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of the missing time limit
    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()


math.prepare = _kinds  # type: ignore[attr-defined]
