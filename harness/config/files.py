"""Files that others may have written, as plain values: none may be larger than its kind ever is, and nothing that one
asks for is looked up."""

import glob
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MIB = 1 << 20
_SETTINGS_BYTES = MIB // 4
_MOST_PARTS = 20_000  # values, and beginnings and ends of what holds them
_DEEPEST = 32
# In C, ten times as fast, where the package was built with it.
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WRITER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


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


_LEVELS = 3
FAR = "three folders down or less"
"""How far `found_below` looks, in messages of what it did not find."""


def found_below(folder: Path, name: str) -> list[Path]:
    """Paths of this name, which may have wildcards, in a folder and at most three levels of folders in it: runs of
    several results lie no deeper. Whoever names another one, such as /, waits for no whole disk."""
    levels = (glob.glob("*/" * level + name, root_dir=folder) for level in range(_LEVELS + 1))
    return sorted(folder / path for paths in levels for path in paths)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, most: int) -> Any:
    """Raises as `read_text`, ValueError for what is no JSON, and RecursionError for what is nested too deeply."""
    return json.loads(read_text(path, most))


def read_yaml(path: Path) -> Any:
    """Settings of a file, as they stand: nothing that it asks for is looked up, of the environment either. Raises as
    `read_text`, yaml's errors; ValueError for aliases, by which a few lines become as many values as fit no memory, for
    tags, and for what is larger or nested deeper than any settings are."""
    text = read_text(path, _SETTINGS_BYTES)
    try:
        _refuse_unsafe(text)
        return yaml.load(text, Loader=_Settings)
    except yaml.MarkedYAMLError as error:
        raise _off(error.problem_mark, error.problem) from error


def _refuse_unsafe(text: str) -> None:
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_PARSER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise _off(event.start_mark, f"it is nested deeper than {_DEEPEST} levels")
        if number > _MOST_PARTS:
            raise ValueError(f"it has more than {_MOST_PARTS:,} values")
        if isinstance(event, yaml.AliasEvent):
            raise _off(event.start_mark, "it refers to parts of itself (`*name`); write them out")
        if getattr(event, "tag", None) is not None:
            raise _off(event.start_mark, f"it has a tag ({event.tag}); write plain values")


def _off(mark: Any, what: str) -> ValueError:
    return ValueError(f"line {mark.line + 1}: {what}")


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Settings as `read_yaml` reads them, in their order."""
    return yaml.dump(dict(settings), Dumper=_Written, sort_keys=False, allow_unicode=True)


class _Settings(_PARSER):  # type: ignore[misc, valid-type]
    """Takes values for what Hydra takes them for: 1e-6 is a number, a date is text, a name stands once."""

    yaml_implicit_resolvers = {
        sign: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for sign, resolvers in _PARSER.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set[str]()
        for name in (name for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
            if name.value in names:
                raise _off(name.start_mark, f"it has {name.value} more than once")
            if self.construct_object(name) is None:
                raise _off(name.start_mark, "it has a value without a name")
            names.add(name.value)
        return super().construct_mapping(node, deep)


_Settings.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Written(_WRITER):  # type: ignore[misc, valid-type]
    """Text that would be read as a number is quoted, and nothing refers to other parts."""

    yaml_implicit_resolvers = _Settings.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True
