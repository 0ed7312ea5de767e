"""The reading of an answer, one for all rewards that have names: which characters mean the same, which part of a text
is the answer, and what a response earns that the limit cut off. docs/data.md has the rules and their edge cases."""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from harness.tasks.task import Sample, Score, unpaid

_COMPATIBLE = re.compile("[\uff00-\uffef\ufe50-\ufe6f\U0001d400-\U0001d7ff]+")
"""Full and half width, small forms, mathematical letters: there NFKC changes no meaning, as it would of x²."""
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
_SEPARATED = re.compile(r"(?<![\d.,])\d{1,3}(?:[\u00a0\u2004-\u200a\u202f]\d{3})+(?!\d)")
_VULGAR = re.compile(r"(?:(?<![\d.,/])(\d+) ?)?([\u00bc-\u00be\u2150-\u215e\u2189])")
_DASH = re.compile(r"(?:(?<=[\s(\[{=<>:,;$|/*+^~\u2264\u2265\u2248])|\A)[\u2010-\u2015](?=\\?[$€£¥]?\.?\d|\\[A-Za-z])")
"""Dashes before a number that nothing is in front of to be joined to it."""
_MEANT = {
    "\u2212": "-", "\u2796": "-", "\u2044": "/", "\u2215": "/", "\u066a": "%", "\u066b": ".", "\u066c": ",",
    "\u2028": "\n", "\u2029": "\n", "\u0085": "\n",
}  # fmt: skip


class _Meanings(dict[int, str]):
    """The meaning of each character, for str.translate: digits of all scripts as 0 to 9, signs as ASCII has them."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        digit = unicodedata.decimal(character, None)
        self[code] = meaning = str(digit) if digit is not None else _MEANT.get(character, character)
        return meaning


_MEANINGS = _Meanings()
_SPACES = str.maketrans({code: " " for code in (0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)})


def normalised(text: str) -> str:
    """The text with one character for each meaning: composed letters (NFC), digits and signs of all widths and scripts
    as ASCII, 1½ as 3/2, one kind of space, none within a number, no invisible marks. Its own normal form."""
    if text.isascii():
        return text
    text = _COMPATIBLE.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
    text = unicodedata.normalize("NFC", _INVISIBLE.sub("", text).translate(_MEANINGS))
    text = _SEPARATED.sub(lambda found: re.sub(r"\D", "", found[0]), text).translate(_SPACES)
    return _DASH.sub("-", _VULGAR.sub(_fraction, text))


def _fraction(found: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", found[2]).split("\u2044")
    return f"{int(found[1] or 0) * int(below or 1) + int(above)}/{below}" if below else found[0]


_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(\w))|\\.|[{}]", re.DOTALL)
_SAID = re.compile(
    r"\banswers?\b[*_]*\s*(?:\b(?:is|are|was|equals)\b(?:[*_]*\s*:)?|[:=])[*_]*|\u7b54\u6848[*_]*(?:\u662f|\u4e3a|:)+",
    re.IGNORECASE,
)
_MARKER = re.compile(rf"(?<!#)####(?!#)|{_SAID.pattern}", re.IGNORECASE)
_ANSWER_LINE = re.compile(r"[-+(\[{$€£¥\\.\d].*|\S+[ \t]*(?=\n)|.+(?=\s*\Z)")
"""A line after `####` that begins as a number or a formula does, is one word, or the last: others are headings'."""
_MOST_MARKERS = 16
"""Markers that are looked at, the last ones: hostile texts cost little."""
_SENTENCE = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]|(?:(?![.!?][*_]*(?:\s|\Z))[^\u3002\n])+", re.DOTALL)
_WORDS = re.compile(r"\\(?:text(?:bf|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")


def final_answer(text: str) -> str:
    r"""The part of a normalised text that is its answer: of what follows the last `</think>` the last `<answer>`, in it
    the last `\boxed{}` whose braces close, else what follows the last `####` (its line) or `answer is`, `answer:` (its
    sentence), else all of it. What is empty does not count; emphasis and `\text{}` around it go."""
    _, _, after = text.rpartition("</think>")
    text = after if after.strip() else text
    text = _tagged(text)
    answer = last_box(text)
    if answer is None:
        marked = (_following(text, found) for found in reversed(list(_MARKER.finditer(text))[-_MOST_MARKERS:]))
        answer = next((said for said in marked if said), text.strip())
    inside = _WORDS.fullmatch(answer)
    return inside[1].strip() if inside else answer


def _following(text: str, marker: re.Match[str]) -> str:
    following = text[marker.end() :].lstrip() if marker[0] != "####" else text[marker.end() :].lstrip(" \t")
    said = (_ANSWER_LINE if marker[0] == "####" else _SENTENCE).match(following)
    return said[0].strip().strip("*_`").strip() if said else ""


def _tagged(text: str) -> str:
    """The inside of the last `<answer>` that closes and is not empty; all of the text where there is none."""
    searched, end = text.lower(), len(text)
    while (end := searched.rfind("</answer>", 0, end)) >= 0:
        start = searched.rfind("<answer>", 0, end)
        if start >= 0 and text[start + len("<answer>") : end].strip():
            return text[start + len("<answer>") : end]
    return text


def last_box(text: str) -> str | None:
    r"""The inside of the last `\boxed{}`, `\fbox{}` or `\boxed 5` that closes and is not empty."""
    opened: list[int | None] = []  # of braces that are open, where a box of theirs begins
    last, inside = -1, None
    for found in _BRACES.finditer(text) if "boxed" in text or "fbox" in text else ():
        if found[0] == "{" or found[1]:
            opened.append(found.end() if found[1] else None)
        elif found[0] == "}" and opened:
            begins = opened.pop()
            if begins is not None and begins > last and (said := text[begins : found.start()].strip()):
                last, inside = begins, said
        elif found[2]:
            last, inside = found.end(), found[2]
    return inside


_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,!; ]|~)(?=\d{3}(?!\d))")
_SPACED = re.compile(r"\D{0,3}\d{1,3}(?: \d{3})+(?!\d)")
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_RAISED = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n"
)


def as_typed(answer: str) -> str:
    r"""A final answer without what sets thousands apart in LaTeX (1{,}800, 1\,800, 1~800, 1 800 at its beginning), and
    with x^{2} for x²."""
    if spaced := _SPACED.match(answer):
        answer = re.sub(r"(?<=\d) ", "", spaced[0]) + answer[spaced.end() :]
    answer = _SUPERSCRIPTS.sub(lambda found: f"^{{{found[0].translate(_RAISED)}}}", answer)
    return _THOUSANDS.sub("", answer)


def reads_text(reward: Callable[..., Score]) -> Callable[..., Score]:
    """A reward of normalised texts that pays nothing for a response that the limit cut off."""

    @wraps(reward)
    def read(sample: Sample, **options: object) -> Score:
        if not (sample.response.isascii() and sample.answer.isascii()):
            sample = replace(sample, response=normalised(sample.response), answer=normalised(sample.answer))
        return reward(sample, **options)

    return pays_what_ended(read)


def pays_what_ended(reward: Callable[..., Score]) -> Callable[..., Score]:
    """A reward that pays nothing for a response that the limit cut off; as `paying_truncated` it does."""

    @wraps(reward)
    def paid(sample: Sample, **options: object) -> Score:
        score = reward(sample, **options)
        return score if sample.stopped else unpaid(score)

    paid.paying_truncated = reward  # type: ignore[attr-defined]
    return paid
