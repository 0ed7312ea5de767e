"""Files that others may have written, as plain values: none may be larger than its kind ever is, and nothing that one
asks for is looked up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MIB = 1 << 20
_SETTINGS_BYTES = MIB // 4
_MOST_PARTS = 20_000  # values, and beginnings and ends of what holds them
_DEEPEST = 32
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast, where the package was built with it


def read_text(path: Path, most: int) -> str:
    """A file of UTF-8. Raises FileNotFoundError where there is none, OSError, and ValueError for one that is no file,
    such as a pipe, which would be waited for; for other text; and for more than `most` bytes."""
    return read_bytes(path, most).decode("utf-8")


def refuse_special(path: Path) -> None:
    """Raises ValueError for what is there and no file, such as a pipe, which would be waited for."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")


def read_bytes(path: Path, most: int) -> bytes:
    """A file, whatever is in it. Raises as `read_text`."""
    refuse_special(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes, which none of its kind has")
    return data


def read_json(path: Path, most: int) -> Any:
    """Raises as `read_text`, ValueError for what is no JSON, and RecursionError for what is nested too deeply."""
    return json.loads(read_text(path, most))


def read_yaml(path: Path) -> Any:
    """Settings of a file, as they stand: nothing that it asks for is looked up, of the environment either. Raises as
    `checked_yaml`, and OmegaConf's errors."""
    from omegaconf import OmegaConf  # not on every machine that reads results

    return OmegaConf.to_container(OmegaConf.create(checked_yaml(path)), resolve=False)


def checked_yaml(path: Path) -> str:
    """The text of a file of settings. Raises as `read_text`, yaml's errors; ValueError for aliases, by which a few
    lines become as many values as fit no memory, for tags, and for what is larger or nested deeper than any settings
    are."""
    text = read_text(path, _SETTINGS_BYTES)
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_PARSER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
        if number > _MOST_PARTS:
            raise ValueError(f"it has more than {_MOST_PARTS:,} values")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it refers to parts of itself (`*name`); write them out")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"it has a tag ({event.tag}); write plain values")
    return text
