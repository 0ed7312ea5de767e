"""Values of data sets as text: every type that JSON and Parquet have is meant one way, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np


def text_of(value: Any, *, lists_of_one: bool = False) -> str:
    """The text that a value stands for: numbers without a fraction of zeros, true and false, ISO 8601, UTF-8, JSON for
    what has parts. Raises ValueError, which says what the value is, for null, NaN, infinity, durations, bytes that are
    no UTF-8, other types, and, but for `lists_of_one`, lists of one value, whose text would hardly be anybody's answer.
    """
    if isinstance(value, list) and len(value) == 1 and not lists_of_one:
        raise ValueError(f"is a list of one, {value!r:.60}; name its value as `column.0`, or write a text")
    if isinstance(value, Decimal) and value.is_finite():
        said: Any = f"{value:f}"
        return said.rstrip("0").rstrip(".") if "." in said else said
    said = _plain(value)
    if said is None:
        raise ValueError("is null")
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """The same as JSON has it."""
    match value:
        case None | str() | bool():
            return value
        case np.generic():
            return _plain(value.item())
        case int():
            return value
        case float() | Decimal() if not math.isfinite(value):
            raise ValueError(f"is {value}, which is no number")
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case float():
            return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
        case timedelta():
            raise ValueError(f"is a duration, {value}, of no one unit; write a number or a text")
        case date() | time():  # and datetime, which is a date
            return value.isoformat()
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"holds {len(value)} bytes that are no UTF-8; write a text") from error
        case list() | tuple():
            return [_plain(one) for one in value]
        case Mapping():
            return {str(key): _plain(one) for key, one in value.items()}
    raise ValueError(f"is of type {type(value).__name__}, which has no text; write one")


def as_written(value: Any, kind: Any) -> Any:
    """A value with the float32 and float16 in it as the shortest numbers that are them: .1 and not .10000000149. kind:
    the value's feature of the `datasets` library."""
    if isinstance(value, float) and getattr(kind, "dtype", None) in ("float32", "float16"):
        return float(str(np.dtype(kind.dtype).type(value)))
    if isinstance(value, list) and hasattr(kind, "feature"):
        return [as_written(one, kind.feature) for one in value]
    if isinstance(value, dict) and isinstance(kind, dict):
        return {name: as_written(one, kind[name]) for name, one in value.items()}
    return value
