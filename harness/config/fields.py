"""Types of settings, and what is said of a value that is off. Field comments elsewhere give units."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

STRICT = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)
MOST_DEVICES = 65_536
_MOST_SEEDS = 100_000
_MOST = 10**12  # of anything that is counted


def _share(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("is no share; give a number >= 1, a percentage, `rest`, or a role to share with")
    if isinstance(value, int) and value > MOST_DEVICES:
        raise ValueError(f"is more than any job has; use at most {MOST_DEVICES}")
    return value


def _seeds(value: Any) -> int | tuple[int, ...]:
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list | tuple) or not all(type(seed) is int for seed in listed):
        raise ValueError("gives no seeds; use how many (seeds=3) or which (seeds=[3,4])")
    if value == 0 or not listed or min(listed) < 0 or len(set(listed)) < len(listed):
        raise ValueError("gives no seeds; use a number >= 1, or different numbers >= 0 such as seeds=[3,4]")
    if (value if isinstance(value, int) else len(listed)) > _MOST_SEEDS:
        raise ValueError(f"is more than anybody waits for; use at most {_MOST_SEEDS}")
    return value if isinstance(value, int) else tuple(listed)


# Strict: neither `true` nor `1.0` is a number of anything.
Count = Annotated[int, Strict(), Field(ge=1, le=_MOST)]
CountFromZero = Annotated[int, Strict(), Field(ge=0, le=_MOST)]
Devices = Annotated[int, Strict(), Field(ge=1, le=MOST_DEVICES)]
Positive = Annotated[float, Strict(), Field(gt=0)]
NotNegative = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(gt=0, le=1)]
Part = Annotated[float, Strict(), Field(ge=0, le=1)]
Decay = Annotated[float, Strict(), Field(ge=0, lt=1)]
Below1 = Decay
AtLeast1 = Annotated[float, Strict(), Field(ge=1)]
Above1 = Annotated[float, Strict(), Field(gt=1)]
Switch = Annotated[bool, Strict()]
Weights = Annotated[dict[str, float], Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+-]*$", max_length=128)]
"""Names a folder, or a file but for its ending."""
NameOrPath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+-]*(:\w+)?$")]
"""A name of a registry, or `package.module:Name` of the user's own."""
Share = Annotated[int | str, BeforeValidator(_share)]
Seeds = Annotated[int | tuple[int, ...], BeforeValidator(_seeds)]
COST_KINDS = ("given", "roofline")
"""Kinds of settings of costs, distinguished by `kind`. No setting has such a name."""
_KEY = "[key]"
"""pydantic's mark where a name is off, not its value."""
_NUMBER = "constrained-float"
"""pydantic's name of the number in a setting that is a number or a word."""
_HALF = 1000  # characters of a message that quotes more than anybody reads


class ConfigError(ValueError):
    """A setting that cannot work. The message is one line: the value, what is wrong with it, and the fix. What it
    quotes may be anybody's: neither line ends nor what a terminal takes as commands come through."""

    def __init__(self, message: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in message)
        super().__init__(line if len(line) <= 2 * _HALF else f"{line[:_HALF]} ... {line[-_HALF:]}")


def whole_number(text: str) -> int | None:
    """The number that a text is: of up to 18 ASCII digits; None where it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def some(names: Sequence[object], most: int = 3) -> str:
    """The first few of these names."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def checked_name(setting: str, name: str) -> str:
    """Raises ConfigError for a name that would not stay in the folder that it is for."""
    try:
        return TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise ConfigError(first_line(error, setting)) from error


def first_line(error: ValidationError, prefix: str = "") -> str:
    """The first problem of a validation error as one line: setting, value, and what to use instead."""
    problems = error.errors(include_url=False)
    places = [
        ".".join(str(part) for part in one["loc"] if part not in (*COST_KINDS, _NUMBER, _KEY)) for one in problems
    ]
    problem, where = problems[0], places[0]
    unknown = [place for place, one in zip(places, problems, strict=True) if one["type"] == _UNKNOWN]
    if len(unknown) > 1:
        return f"{', '.join(unknown)} are no settings; take them out (`cadence list` shows the files that name all)"
    context = problem.get("ctx", {})
    if problem["type"].startswith("union_tag"):
        return f"{prefix}{where}.kind={context.get('tag', 'null')} is unknown; choose {' or '.join(COST_KINDS)}"
    if problem["type"] == "value_error" and not where:
        return str(context["error"])
    advice = _ADVICE.get(problem["type"])
    detail = f": {problem['msg'][0].lower()}{problem['msg'][1:]}" if advice is None else f" {advice.format(**context)}"
    typed = problem["input"] if isinstance(problem["input"], str) else json.dumps(problem["input"], default=str)
    return f"{prefix}{where}={typed}{detail}"


_UNKNOWN = "unexpected_keyword_argument"
_ADVICE = {
    _UNKNOWN: "is no setting; `cadence list` shows the files that name them all",
    "missing": "is incomplete: a value is missing",
    "missing_argument": "is incomplete: a value is missing",
    "literal_error": "is unknown; choose {expected}",
    "int_type": "is no whole number; use one such as 8",
    "int_parsing": "is no whole number; use one such as 8",
    "int_from_float": "is no whole number; use one such as 8",
    "float_type": "is no number; use one such as 0.5",
    "float_parsing": "is no number; use one such as 0.5",
    "finite_number": "is not finite; use a number such as 0.5",
    "bool_type": "is neither true nor false; use one of them",
    "bool_parsing": "is neither true nor false; use one of them",
    "string_type": "is no text; use a name",
    "string_pattern_mismatch": "cannot name a folder; use letters, digits, `_`, `-` and inner dots",
    "greater_than": "is too small; use a number above {gt}",
    "greater_than_equal": "is too small; use at least {ge}",
    "less_than": "is too large; use a number below {lt}",
    "less_than_equal": "is too large; use at most {le}",
    "tuple_type": "is no list of values; write one such as [0.5,2.0]",
    "string_too_long": "is too long for a name; use at most {max_length} characters",
    "too_long": "has too many values; use {max_length}",
    "value_error": "{error}",
    "model_attributes_type": "is no set of settings; change single ones, as in model.layers=2",
    "dict_type": "is no set of settings; change single ones, as in model.layers=2",
    "dataclass_type": "is no set of settings; change single ones, as in model.layers=2",
}
"""Advice about a value, by the type that pydantic gives its error."""
