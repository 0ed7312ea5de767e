"""Files that a job reads and its settings only name: what is in them, in a digest that a run keeps.

A setting that names a file or a folder stays as it is when somebody writes into it; what is computed does not.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config.fields import ConfigError
from harness.config.files import sha256_of
from harness.config.job import JobConfig
from harness.config.model_folder import HUB, SMALL_FILES, local_folder

_WHOLE = 16 << 20
"""Weights of no more bytes than this are read whole; of others parts."""
_PARTS, _PART = 256, 16 << 10
"""How many parts, evenly spaced, and of how many bytes each."""
SHOWN = 12
"""Digits of a digest that tell two apart."""


@dataclass(frozen=True)
class Input:
    """A file or repository that a job reads. setting: that names the file, folder or repository. digest: of a
    repository of the hub, its commit."""

    setting: str
    path: str
    digest: str


def inputs_of(config: JobConfig) -> list[Input]:
    """Files that a run of this job reads: the model's folder, the tokenizer's, and every file that an option of the
    task or of its reward names. A simulated run reads no more than a trace of lengths. Raises ConfigError as
    `local_folder`."""
    if config.backend != "real":
        path = getattr(getattr(config.cost, "lengths", None), "path", None)
        return [] if path is None else _files("cost.lengths", {"path": path})
    model, found = config.model, []
    if model.checkpoint is not None:
        found.append(_model("model.checkpoint", model.checkpoint, weights=True))
    if model.tokenizer is not None:
        found.append(_model("model.tokenizer", model.tokenizer, weights=False))
    task = config.task
    found += _files("task", {**task.options, "buffer_state": task.buffer_state})
    for name in ("reward", "generate", "buffer"):
        found += _files(f"task.{name}_options", getattr(task, f"{name}_options"))
    return found


def digests(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The digest of what each setting named, by the setting, of a run; none of one that an earlier version made."""
    return {one["setting"]: one["digest"] for one in manifest.get("inputs", ())}


def refuse_changed(before: Mapping[str, str], now: Iterable[Input], since: str, fix: str) -> None:
    """Raises ConfigError, naming both digests, where a setting's was another one `before`."""
    for one in now:
        if (then := before.get(one.setting, one.digest)) != one.digest:
            told = f"{one.setting}={one.path} has changed since {since}"
            raise ConfigError(f"{told}: {then[:SHOWN]} then, {one.digest[:SHOWN]} now; {fix}")


def _files(above: str, options: Mapping[str, Any]) -> list[Input]:
    """Files that options name."""
    found = []
    for name, value in options.items():
        if isinstance(value, str) and os.path.isfile(value):  # unlike Path's it says no to what can be no name
            path, stat = Path(value), os.stat(value)
            digest = _digest(path, stat.st_mtime_ns, stat.st_size, whole=True)
            found.append(Input(f"{above}.{name}", str(path), digest))
    return found


def _model(setting: str, source: str, *, weights: bool) -> Input:
    if source.startswith(HUB):
        return Input(setting, source, local_folder(source, weights=False, setting=setting).name)
    folder = Path(source).expanduser()
    patterns = (*SMALL_FILES, *(("*.safetensors",) if weights else ()))
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        stat = path.stat()
        whole = path.suffix != ".safetensors" or stat.st_size <= _WHOLE
        digest.update(f"{path.name} {_digest(path, stat.st_mtime_ns, stat.st_size, whole=whole)}\n".encode())
    return Input(setting, source, digest.hexdigest())


@lru_cache(maxsize=256)
def _digest(path: Path, changed_ns: int, size: int, *, whole: bool) -> str:
    """SHA-256 of a file, or of its size and of parts of it: enough for weights, as training changes them everywhere,
    and 4 MiB of a shard instead of gigabytes. Times of change are no part of it, so that a copy is the same."""
    if whole:
        return sha256_of(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(str(size).encode())
        for part in range(_PARTS):
            file.seek(part * (size - _PART) // (_PARTS - 1))
            digest.update(file.read(_PART))
        return digest.hexdigest()
