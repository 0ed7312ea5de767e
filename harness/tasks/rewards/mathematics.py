"""Mathematical answers, held against each other by `math-verify`."""

import logging
import re
from functools import lru_cache
from typing import Any

from harness.tasks.rewards.reading import as_typed, final_answer, normalised, reads_text
from harness.tasks.task import Sample, Score

_PLAIN = re.compile(r"[-+]?\d+(\.\d+)?")
_UNIT = re.compile(r"\\?[$€£¥](?=\s*[-+]?\.?\d)|(?<=\d)\s*(?:\\?[%$€£¥°]|\^\s*\{?\\circ\}?)")
"""Signs of money before a number or behind it, of percent and of degrees: $18, 18% and 18° are 18."""
_WORDS = re.compile(r"(?<=\d)\s+[A-Za-z]{2,}[A-Za-z ]*\.?\Z")
_PROSE = re.compile(r"(?:[A-Za-z]{2,}\s+){2}")
"""The beginning of a sentence, whose last expression is the answer."""
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|\w))")


@reads_text
def math(sample: Sample, *, decimals: int = 6) -> Score:
    """1 where the final answer of the response equals that of the row: LaTeX, numbers, intervals, sets, equations; of a
    text that marks none, its last expression. decimals: of what is compared as a number.

    Raises ValueError for an answer that is none. There is no time limit here: the library's own needs the main thread
    of a process, and the pool of rewards has one.
    """
    from math_verify import verify

    right, said = _right(sample.answer), _parsed(sample.response)
    same = verify(right, said, float_rounding=decimals, timeout_seconds=None)
    return Score(float(same), same)


def _right(answer: str) -> list[Any]:
    right = _parsed(answer, marked=True)
    if not right or (answer.count("{") != answer.count("}") and all(isinstance(one, str) for one in right)):
        raise ValueError(f"the answer {answer!r:.80} is no mathematical expression")
    return right


def _check(answer: str) -> None:
    if not _PLAIN.fullmatch(answer.strip()):  # which needs no library
        _right(normalised(answer))


def _parsed(text: str, *, marked: bool = False) -> list[Any]:
    """The expressions of a text's final answer. marked: whether all of it may be one, LaTeX without its signs."""
    answer = final_answer(text)
    marked = marked or (answer != text.strip() and not _PROSE.match(answer))
    if formulas := list(_FORMULA.finditer(answer)):
        behind = answer[formulas[-1].end() :]
        if re.search(r"\d", behind):  # "the largest $n$ is 34"
            return _library(_latex(behind))
        answer = answer[formulas[-1].start() :]
    if marked:
        inside = _WORDS.sub("", answer.strip("*_"))
        if formulas and _FORMULA.fullmatch(inside):
            inside = inside.strip("$").removeprefix("\\(").removeprefix("\\[").removesuffix("\\)").removesuffix("\\]")
        found = _library(f"\\boxed{{{_latex(inside)}}}")
        if any(not isinstance(one, str) for one in found):
            return found
    return _library(_latex(answer)) or (found if marked else [])


def _latex(text: str) -> str:
    """The text as the library reads it, where it is written in other ways."""
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", as_typed(text))
    return text if _FORMULA.search(text.replace("\\$", "")) else _UNIT.sub("", text)


def _library(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, extraction_config=_kinds(), parsing_timeout=None)


@lru_cache(maxsize=1)
def _kinds() -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of the missing time limit
    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()


math.prepare = _kinds  # type: ignore[attr-defined]
math.check_answer = _check  # type: ignore[attr-defined]
