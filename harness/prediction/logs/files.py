"""Logs of any training software as files have them: text of a console, JSON, CSV, TensorBoard's event files, folders of
MLflow, read into steps with named numbers, and settings. Names stay as they are."""

import csv
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import ConfigError
from harness.config.fields import whole_number
from harness.config.files import FAR, MIB, found_below, read_bytes, read_yaml
from harness.config.job import flatten

_MOST = 256 * MIB
_MOST_LINES = 5000  # of settings that are printed over several
_STEPS = (
    *("training/global_step", "train/global_step", "trainer/global_step", "rollout/step"),
    *("iteration", "step", "Step", "_step"),
)
"""Columns that count steps: the first of them that a row has."""
_PROFILED = "profiling/"  # begins names of TRL's profiler: each is the time of a single call, and a step has several
Numbers = dict[str, float]


@dataclass
class Step:
    """A step: where it begins, its numbers, and whether it was logged anew, as after a restart."""

    where: str
    numbers: Numbers = field(default_factory=dict)
    again: bool = False


@dataclass
class Log:
    """Everything that stands in files. settings: with dots where they are nested; devices: those that are named; notes:
    what was left out; calls: times of calls since the last step, by their names."""

    steps: dict[int, Step] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    calls: Numbers = field(default_factory=dict)
    last: int = 0

    def add(self, number: int, where: str, numbers: Mapping[str, float]) -> None:
        """Add numbers of a step. Where one that it has comes again, the step began anew."""
        calls = {name: value for name, value in numbers.items() if name.startswith(_PROFILED)}
        for name, value in calls.items():
            self.calls[name] = self.calls.get(name, 0.0) + value
        if calls:
            return
        if self.calls:  # of the steps that this row is the mean of
            numbers = {**numbers, **{name: value / max(1, number - self.last) for name, value in self.calls.items()}}
            self.calls, self.last = {}, number
        step = self.steps.setdefault(number, Step(where))
        if any(step.numbers.get(name, value) != value for name, value in numbers.items() if name not in _STEPS):
            step = self.steps[number] = Step(where, again=True)
        step.numbers |= numbers

    def row(self, where: str, row: Mapping[str, Any], number: int | None = None) -> None:
        """Add a row of a table: numbers of a step, or one number with its name, as MLflow exports them; or settings."""
        if isinstance(row.get("data"), dict):  # verl's file
            row = {**row["data"], "step": row.get("step")}
        name = next((row[one] for one in ("key", "metric", "Metric") if isinstance(row.get(one), str)), None)
        if name is not None and "value" in row:
            row = {name: row["value"], "step": row.get("step")}
        flat = flatten(row)
        numbers = {name: value for name, text in flat.items() if (value := as_number(text)) is not None}
        if "time/wait_for_policy" in numbers:  # prime-rl's orchestrator, whose steps are not the trainer's
            numbers.pop("time/step", None)
        counted = next((int(numbers[one]) for one in _STEPS if one in numbers), number)
        if counted is None:
            self.settings |= {name.replace("/", "."): str(text) for name, text in flat.items()}
        else:
            self.add(counted, where, numbers)


def read_files(paths: Iterable[Path]) -> Log:
    """The files of one run. Raises ConfigError, in one line with the file and its line, for what cannot be read."""
    log = Log()
    for path in paths:
        _read(path, log)
    return log


def as_number(text: Any) -> float | None:
    """A number, also one that was printed as `np.float64(1.5)`; None for anything else. True is none."""
    if isinstance(text, bool) or text is None:
        return None
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _read(path: Path, log: Log) -> None:
    if path.is_dir():
        return _folder(path, log)
    if not path.exists():
        raise ConfigError(
            f"log={path} is not there; name a log, such as the text of a console, JSONL or CSV, or a folder"
        )
    try:
        data = read_bytes(path, _MOST)
    except (OSError, ValueError) as error:
        raise ConfigError(f"log={path} cannot be read: {error}") from error
    if not data.strip():
        raise ConfigError(f"log={path} is empty; name the log of a run that trained a few steps")
    if "tfevents" in path.name:
        for number, name, value in read_events(path, data, log.notes):
            log.add(number, str(path), {name: value})
    elif path.suffix in (".yaml", ".yml"):
        _settings(path, log)
    elif path.suffix == ".wandb":
        raise ConfigError(f"log={path} is W&B's own database; export the run's history as CSV or JSONL")
    elif b"\0" in data[:4096]:
        raise ConfigError(f"log={path} is no text, nor an event file by its name (events.out.tfevents.*)")
    else:
        text = data.decode("utf-8", "replace").removeprefix("\ufeff")
        head = text.lstrip()[:1]
        if path.suffix == ".csv":
            _csv(path, text, log)
        elif path.suffix in (".json", ".jsonl") or (head == "{" and text.lstrip()[1:2] in ('"', "\n")):
            _json(path, text, log)
        else:
            _console(path, text, log)


def _folder(path: Path, log: Log) -> None:
    events = found_below(path, "events.out.tfevents.*")
    if (path / "metrics.jsonl").is_file():  # Cadence's, and prime-rl's
        _read(path / "metrics.jsonl", log)
        if (path / "config.yaml").is_file():
            _settings(path / "config.yaml", log)
    elif events:
        for one in events:
            _read(one, log)
    elif (path / "metrics").is_dir():  # MLflow's, of one run: metrics/<name> with lines `milliseconds value step`
        for one in sorted(file for file in (path / "metrics").rglob("*") if file.is_file()):
            name = str(one.relative_to(path / "metrics"))
            for at, line in enumerate(read_bytes(one, _MOST).decode("utf-8", "replace").splitlines(), 1):
                words = line.split()
                if len(words) < 3 or as_number(words[1]) is None:
                    raise ConfigError(f"{one}:{at}: {line[:60]!r} is no line of MLflow, `milliseconds value step`")
                log.add(int(words[2]), f"{one}:{at}", {name: float(words[1])})
        for one in sorted(file for file in (path / "params").rglob("*") if file.is_file()):
            name = str(one.relative_to(path / "params")).replace("/", ".")
            log.settings[name] = read_bytes(one, MIB).decode("utf-8", "replace")
    else:
        raise ConfigError(
            f"log={path} has no metrics.jsonl, no events.out.tfevents.*, {FAR}, and no metrics/ of MLflow; name the "
            "log itself"
        )


def _settings(path: Path, log: Log) -> None:
    try:
        tree = read_yaml(path)
    except Exception as error:
        raise ConfigError(f"log={path} cannot be read as settings: {str(error).splitlines()[0]}") from error
    found = {
        name.replace(".value", ""): str(value)
        for name, value in (flatten(tree) if isinstance(tree, dict) else {}).items()
    }  # W&B nests under `value`
    log.settings |= found


def _json(path: Path, text: str, log: Log) -> None:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict) and isinstance(tree.get("log_history"), list):  # trainer_state.json of transformers
        tree = tree["log_history"]
    if isinstance(tree, dict) and isinstance(tree.get("metrics"), list):  # MLflow's REST interface
        tree = tree["metrics"]
    if isinstance(tree, list):
        for number, row in enumerate(tree):
            if isinstance(row, dict):
                log.row(f"{path}: entry {number + 1}", row, number)
        return
    if isinstance(tree, dict) and any(isinstance(values, dict) for values in tree.values()):
        series = {
            name: values
            for name, values in tree.items()
            if isinstance(values, dict) and all(whole_number(step) is not None for step in values)
        }
        for name, values in series.items():  # {name: {step: value}}
            for number, value in values.items():
                if (found := as_number(value)) is not None:
                    log.add(int(number), f"{path}: {name}", {name: found})
        log.settings |= {name: str(value) for name, value in flatten(tree).items() if name.split(".")[0] not in series}
        return
    lines = text.splitlines()
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            if at == len(lines) and at > 1:
                log.notes.append(f"line {at} is cut off, and left out")
                continue
            raise ConfigError(
                f"{path}:{at}: {line[:60]!r} is no JSON; one object a line, such as a step's metrics"
            ) from error
        log.row(f"{path}:{at}", row, at if at > 1 or len(row) > 1 else None)


def _csv(path: Path, text: str, log: Log) -> None:
    rows = csv.reader(text.splitlines())
    try:
        # W&B's page has `run - metric`, MLflow `metrics.metric` and `params.setting`
        names = [name.rsplit(" - ", 1)[-1].removeprefix("metrics.").strip() for name in next(rows)]
        kept = [i for i, name in enumerate(names) if name and not name.endswith(("__MIN", "__MAX"))]
        if twice := sorted({names[i] for i in kept if [names[k] for k in kept].count(names[i]) > 1}):
            raise ConfigError(f"{path}:1: {twice[0]} is there for several runs; export one run")
        for number, cells in enumerate(rows):
            if len(cells) != len(names):
                if next(rows, None) is not None:
                    raise ConfigError(
                        f"{path}:{number + 2}: {len(cells)} cells under {len(names)} names; export the table again"
                    )
                log.notes.append(f"line {number + 2} is cut off, and left out")
                break
            log.row(f"{path}:{number + 2}", {names[i]: cells[i] for i in kept if cells[i] != ""}, number)
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: no CSV: {error}") from error


# A console.

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(
    r"^(\(\w[^()]*pid=[^)]*\)|\[[\d :.,T-]+[^\]]*\] \S+ - |\d+:)\s?"
)  # Ray's; slime's; torchrun's rank
_DEVICE = re.compile(r"\b(GB200|H100|H200|H800|H20|A100|Ascend ?910[BC])\b", re.IGNORECASE)
_VERL = re.compile(r"\bstep:(\d+) - (.*)")
_SLIME = re.compile(r"\b(?:perf|rollout) (\d+): (\{.*)")
_NEMO = re.compile(r"={5,} Step (\d+)/\d+ ={5,}")
_BULLET = re.compile(r"^\s*[•-] ([\w/ ().-]+?): ([\d.]+)(s?)(?: \([\d.]+%\)| steps| tokens)?\s*$")
_PRIME = re.compile(r"\bStep (\d+) \|\s+([\dhms. ]+?) \|.*?(?:Throughput ([\d.]+) tokens/s|Max Off-Policy (\d+))")
_MLLOG = re.compile(r":::MLLOG (\{.*\})")
_FLAG = re.compile(r"(?<!\S)--([a-z][\w.-]*)(?:[ =]([^\s\\-][^\s\\]*))?")
_OVERRIDE = re.compile(r"(?<![\w.])\+{0,2}([a-z_]\w*(?:\.\w+)+)=([^\s\\'\",]+)")
_ARGUMENT = re.compile(r"^\s+(\w+) \.{3,} (.+)$")
_OPENS = re.compile(r"^(\{|\w+\()")
NEMO_NAMES = {
    "Total step time": "timing/train/total_step_time",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Mean Total Tokens per Sample": "train/mean_total_tokens_per_sample",
    "Avg Trajectory Age": "train/avg_trajectory_age",
    "E2E (Samples/sec)": "performance/samples_per_sec",
    "E2E (Tokens/sec)": "performance/tokens_per_sec",
    "E2E (Tokens/sec/gpu)": "performance/tokens_per_sec_per_gpu",
}
"""Names by what NeMo-RL's console calls them; its times are named as elsewhere."""


def _console(path: Path, text: str, log: Log) -> None:
    block: list[str] = []
    banner: tuple[int, str] | None = None
    depth, printed, lines = 0, 0, text.splitlines()
    for at, raw in enumerate(lines, 1):
        line = _PREFIX.sub("", _COLOUR.sub("", raw))
        where = f"{path}:{at}"
        log.devices |= {found.lower().replace(" ", "") for found in _DEVICE.findall(line)}
        if found := _MLLOG.search(line):
            _mllog(where, found[1], log)
        elif found := _VERL.search(line):
            pairs = (pair.rpartition(":") for pair in found[2].split(" - "))
            numbers = {name: value for name, _, text in pairs if (value := _printed_number(text)) is not None}
            if at == len(lines) and not text.endswith("\n"):  # the last number may have lost digits
                numbers.popitem()
                log.notes.append(f"line {at} is cut off, and its last number left out")
            log.add(int(found[1]), where, numbers)
        elif found := _SLIME.search(line):
            log.add(int(found[1]), where, _numbers(found[2]))
        elif found := _NEMO.search(line):
            banner = int(found[1]), where
        elif banner is not None and (found := _BULLET.match(line)):
            name = NEMO_NAMES.get(found[1], f"timing/train/{found[1]}" if found[3] else found[1])
            log.add(banner[0], banner[1], {name: float(found[2])})
        elif found := _PRIME.search(line):
            numbers = {"off_policy/max": float(found[4])} if found[4] else {"time/step": _seconds(found[2])}
            log.add(int(found[1]), where, numbers)
        elif "{'" in line and "}" in line and "step_time" in line:  # transformers', behind a progress bar
            printed += 1
            log.add(printed, where, _numbers(line[line.index("{'") :]))
        elif block or _OPENS.match(line):
            block.append(line)
            depth += _depth(line)
            if depth <= 0 or len(block) > _MOST_LINES:
                log.settings |= dict(nested("\n".join(block)))
                block, depth = [], 0
        else:
            log.settings |= {name.replace("-", "_"): value or "True" for name, value in _FLAG.findall(line)}
            log.settings |= dict(_OVERRIDE.findall(line))
            log.settings |= dict(_ARGUMENT.findall(line))


def _mllog(where: str, text: str, log: Log) -> None:
    """An event of MLPerf: numbers of a step are values of `tracked_stats`, all other values settings."""
    try:
        event = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: what is behind :::MLLOG is no JSON: {text[:60]!r}") from error
    value, metadata = event.get("value"), event.get("metadata") or {}
    if isinstance(value, dict) and isinstance(number := metadata.get("step"), int):
        log.add(
            number,
            where,
            {f"mllog/{name}": found for name, one in value.items() if (found := as_number(one)) is not None},
        )
    elif event.get("event_type") == "POINT_IN_TIME" and value is not None:
        log.settings[str(event.get("key"))] = str(value)


def _seconds(text: str) -> float:
    """prime-rl's `1h 2m`, `3m 4s`, `5.67s`, `89ms`."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|[hms])", text))


def _printed_number(text: str) -> float | None:
    inner = re.fullmatch(r"\s*(?:np|numpy)\.\w+\((.*)\)\s*", text)
    return as_number((inner[1] if inner else text).strip().strip("'\""))


def _numbers(text: str) -> Numbers:
    return {name: value for name, one in nested(text) if (value := as_number(one)) is not None}


_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[{(\[\])},:=]|[^\s{(\[\])},:='"]+""")


def _depth(text: str) -> int:
    tokens = [token for token in _TOKEN.findall(text) if len(token) == 1]
    return sum(token in "{([" for token in tokens) - sum(token in "})]" for token in tokens)


def nested(text: str) -> Iterator[tuple[str, str]]:
    """Leaves of what Python prints of dictionaries and objects, `{'a': {'b': 1}}` or `A(b=C(c=1))`, with dots in their
    names. Lists keep their last item."""
    places: list[str] = []
    key: str = ""
    value: str | None = None
    for token in _TOKEN.findall(text):
        if token in "{([" and len(token) == 1:
            places.append(key or (places[-1] if places else ""))
            key, value = "", None
        elif token in (":", "=") and value is not None:
            name, value = value, None
            key = ".".join(part for part in (places[-1] if places else "", name) if part)
        elif token in ("}", ")", "]", ","):
            if value is not None and (name := key or (places[-1] if places else "")):
                yield name, value
            key, value = "", None
            if token != "," and places:
                places.pop()
        else:
            value = token[1:-1] if token[0] in "'\"" else token


_LARGEST = 1 << 24  # bytes of a record; images and graphs are not read


def read_events(path: Path, data: bytes, notes: list[str]) -> Iterator[tuple[int, str, float]]:
    """Step, name and value of each scalar. A record that is cut off at the end is left out, and said in `notes`. Raises
    ConfigError for another kind of file, with the byte from which on it is none."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        if length > _LARGEST and at + length + 16 > len(data):
            raise ConfigError(f"{path}: no event file from byte {at:,} on: a record of {length:,} bytes; copy it again")
        if at + 16 + length > len(data):
            notes.append(f"the record at byte {at:,} is cut off, and left out")
            return
        try:
            yield from _scalars(data[at + 12 : at + 12 + length])
        except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path}: no event at byte {at:,}; copy it again") from error
        at += 16 + length


def _scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    fields = list(_fields(event))
    step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
    for summary in _messages(event, 5):
        for one in _messages(summary, 1):
            parts = dict(_fields(one))
            value = parts.get(2)
            for tensor in _messages(one, 8):
                inside = dict(_fields(tensor))
                value = inside.get(5, inside.get(4))  # float_val, or its bytes
            if isinstance(value, bytes) and len(value) == 4 and isinstance(name := parts.get(1), bytes):
                yield step, name.decode(), struct.unpack("<f", value)[0]


def _messages(message: bytes, field: int) -> list[bytes]:
    return [value for number, value in _fields(message) if number == field and isinstance(value, bytes)]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: varints as integers, all others as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _varint(message, at)
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"wire type {key & 7}")
        if at + size > len(message):
            raise ValueError("a field beyond its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at + shift // 7] & 127) << shift
        if data[at + shift // 7] < 128:
            return value, at + shift // 7 + 1
    raise ValueError("a varint of more than ten bytes")
