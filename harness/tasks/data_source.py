"""Rows of a data set, by the `datasets` library: a JSONL, Parquet or CSV file, or one of the Hugging Face hub."""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

HUB = "hf:"
"""How the name of a data set of the hub begins."""
KINDS = {".jsonl": "JSON, an object per line", ".parquet": "Parquet", ".csv": "CSV with a header"}
"""Files that are read, by how their names end."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class DataSource:
    """The origin of rows. name: a file's, or hf:<org>/<name>; subset, split, revision: of a data set of the hub."""

    name: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def stamp(self) -> tuple[int, int] | None:
        """Numbers that change when the file does; None for the hub. Raises ValueError where there is no file, or its
        kind is unknown."""
        if self.name.startswith(HUB):
            return None
        path = Path(self.name)
        if path.suffix not in KINDS:
            read = ", ".join(f"{suffix} ({kind})" for suffix, kind in KINDS.items())
            raise ValueError(f"{self.name} is no file of a known kind; give {read} or hf:<org>/<name>")
        if not path.is_file():
            raise ValueError(f"{self.name} is no file; name one with a row for each problem")
        stat = path.stat()
        if not stat.st_size:
            raise ValueError(f"{self.name} holds no problem: it is empty")
        return stat.st_mtime_ns, stat.st_size

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place, such as `sums.jsonl:3`. Raises ValueError, which names it, for one that cannot be
        read."""
        if self.name.startswith(HUB):
            yield from self._of_hub()
        else:
            self.stamp()
            yield from {".jsonl": _json_lines, ".parquet": _parquet, ".csv": _csv}[Path(self.name).suffix](self.name)

    def _of_hub(self) -> Iterator[tuple[str, Row]]:
        from datasets import load_dataset

        _quiet()
        try:
            found = load_dataset(self.name.removeprefix(HUB), self.subset, split=self.split, revision=self.revision)
        except Exception as error:  # of many kinds, by what is missing: network, data set, subset, split
            why = str(error).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"{self.name} (subset {self.subset}, split {self.split}) cannot be loaded: {why}; without a network "
                "name a file"
            ) from error
        for number, row in enumerate(found):
            yield f"{self.name} {self.split} row {number}", row


def _json_lines(name: str) -> Iterator[tuple[str, Row]]:
    """Lines are parsed here: the library's own reader changes values of a column of mixed types, and cannot name a
    line."""
    for number, line in enumerate(_load("text", name, encoding="utf-8-sig"), 1):
        place, text = f"{name}:{number}", line["text"]
        if not text.strip():
            continue
        try:
            row = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON ({error}); write one object per line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: {_short(text)} is no object; write one such as {{...}} per line")
        yield place, row


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _parquet(name: str) -> Iterator[tuple[str, Row]]:
    found = _load("parquet", name)
    for number, row in enumerate(found):
        yield f"{name} row {number}", as_written(row, dict(found.features))


def _csv(name: str) -> Iterator[tuple[str, Row]]:
    """Cells stay text: 007 and NA are what they say."""
    from datasets import Features, Value

    header = next(_csv_lines(name), (0, []))[1]
    if repeated := {column for column in header if header.count(column) > 1}:
        raise ValueError(f"{name}:1: the header has {min(repeated)!r} twice")
    for line, cells in _csv_lines(name):  # before the library, which fills up short rows and cannot name a line
        if len(cells) != len(header):
            raise ValueError(f"{name}:{line}: {len(cells)} cells under {len(header)} columns; quote cells with commas")
    features = Features({column: Value("string") for column in header})
    rows = _load("csv", name, features=features, keep_default_na=False, skip_blank_lines=True)
    places = (line for line, _ in _csv_lines(name))
    next(places, None)
    for line, row in zip(places, rows, strict=True):
        yield f"{name}:{line}", row


def _csv_lines(name: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, each with the line it begins in; the header first."""
    with Path(name).open(encoding="utf-8-sig", newline="") as file:
        reader, begins = csv.reader(file, strict=True), 1
        try:
            for cells in reader:
                if cells:
                    yield begins, cells
                begins = reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{name}:{begins}: not CSV ({error})") from error


def _load(builder: str, name: str, **options: Any) -> Any:
    """All rows of a file. Raises ValueError for what the library cannot read."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    _quiet()
    try:
        return load_dataset(builder, data_files=name, split="train", **options)
    except (DatasetGenerationError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, UnicodeDecodeError):
            line = 1 + Path(name).read_bytes().count(b"\n", 0, _undecodable(name))
            raise ValueError(f"{name}:{line}: not UTF-8 ({cause.reason}); save the file as UTF-8") from error
        raise ValueError(f"{name} cannot be read as {builder}: {str(cause).partition(chr(10))[0]}") from error


def _undecodable(name: str) -> int:
    """The place of the first byte that is no UTF-8: the library decodes in pieces, and counts from one's start."""
    try:
        Path(name).read_bytes().decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _quiet() -> None:
    import datasets
    import huggingface_hub

    huggingface_hub.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


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
