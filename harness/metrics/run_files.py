"""The folder of one run: results/<experiment>/<cell>/seed=<n>/, whole or visibly unfinished."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TextIO

import msgspec
import pyarrow as pa

from harness.config import JobConfig
from harness.config.files import found_below, read_json, read_text, read_yaml, sha256_of, yaml_text
from harness.config.inputs import digests, inputs_of, refuse_changed
from harness.config.job import in_words_of_now
from harness.metrics.arrivals import ARRIVALS
from harness.metrics.atomic_files import GrowingFile, Lock, write_text
from harness.metrics.definitions import AXES, Found, check_names, found_faults
from harness.metrics.done import DONE, INCOMPLETE, MODEL, is_done, write_done
from harness.metrics.ledger import Ledger
from harness.metrics.parquet import read_as, write_table, write_tokens
from harness.metrics.parts import (
    PART_FILES,
    PARTS,
    RESPONSES,
    DriverParts,
    Parts,
    read_dropped_so_far,
    read_growing,
    read_held_out_so_far,
    read_problems_so_far,
    read_samples_so_far,
    read_timeline_so_far,
)
from harness.metrics.samples import HELD_OUT_SCHEMA, PROBLEMS_SCHEMA, RESPONSES_SCHEMA, TEXT_FIELDS, Texts, read_samples
from harness.metrics.schemas import (
    LARGEST,
    ConfigFile,
    EvaluationLine,
    IterationLine,
    LedgerFile,
    ManifestFile,
    Restart,
    TraceFile,
    reading,
)
from harness.metrics.timeline import Timeline, chrome_trace, timeline_of

LOCK = ".lock"  # stays in a run's folder, whoever has it
METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"  # a line for each version whose held-out accuracy was found
TRAINED = ".trained"
"""There once all that was trained is in the run's files: what is left is to write the others from them, and DONE."""
RESTARTS = "restarts.jsonl"  # a line for each time that roles died and were started again; there only where some did
GROWING = frozenset({METRICS, EVALUATIONS, ARRIVALS, *(f"{PARTS}/{name}" for name in PART_FILES)})
"""Files that grow iteration by iteration, by path in the folder: going on from a checkpoint cuts them back."""

Kept = Callable[[Path], Collection[str]]
"""Chooses names of files and folders that stay of an earlier attempt in a run's folder, which is locked."""


def _nothing_kept(folder: Path) -> Collection[str]:
    return ()


def run_directory(config: JobConfig, seed: int, results: Path, kept: Kept = _nothing_kept) -> RunDirectory:
    """The folder of this configuration and seed."""
    from harness.config.compose import cell_name  # with Hydra, which readers of results need not load

    return RunDirectory(results, config.experiment, cell_name(config), seed, kept)


def check_folder_name(what: str, name: str) -> None:
    """Raises ValueError for a name that would leave its place."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{what} {name!r} cannot name a folder: it is empty, holds '/' or begins with '.'")


class RunDirectory:
    """Writes and reads the files of one run; `start` before writing, `finish` or `close` at the end. Whole files are
    renamed into place, metrics.jsonl grows line by line, DONE comes last: a folder without DONE is an unfinished run,
    which the next `start` clears away."""

    def __init__(self, root: Path, experiment: str, cell: str, seed: int, kept: Kept = _nothing_kept) -> None:
        """root: the results folder. Raises ValueError if a name would leave its place in the layout."""
        for what, name in (("experiment", experiment), ("cell", cell)):
            check_folder_name(what, name)
        self.path = Path(root) / experiment / cell / f"seed={seed}"
        self._kept = kept
        self._lock: Lock | None = None
        self._metrics: GrowingFile | None = None
        self._system: TextIO | None = None
        self._parts: DriverParts | None = None

    @property
    def done(self) -> bool:
        """Whether the run finished and every file is there. Raises DamagedFile where one is not as it was written."""
        return is_done(self.path)

    def start(self) -> None:
        """Make the folder, lock it, and remove what an earlier attempt left in it and is not kept. Raises
        BlockingIOError if another process is running this cell and seed now."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = "this cell and seed is being run by another process; wait for it, or give this run another experiment"
        self._lock = Lock(self.path / LOCK, busy=busy)
        (self.path / DONE).unlink(missing_ok=True)  # first: the rest is no result without it
        stay = {LOCK, *self._kept(self.path)}
        for left in [left for left in self.path.iterdir() if left.name not in stay]:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        self._metrics = GrowingFile(self.path / METRICS)
        self._system = (self.path / "system.jsonl").open("a", encoding="utf-8")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """config.yaml: the resolved configuration as nested mappings of plain values."""
        write_text(self.path / "config.yaml", yaml_text(config))

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """manifest.json, from `build_manifest`."""
        self._write_json("manifest.json", manifest)

    def append_metrics(self, metrics: Mapping[str, int | float]) -> None:
        """Add one iteration's object to metrics.jsonl and flush it. Values that are not finite are written as null.
        Raises ValueError for an unknown name or a missing axis."""
        missing = [axis for axis in AXES if axis not in metrics]
        if missing:
            raise ValueError(f"an iteration's metrics need {', '.join(missing)}; make them with iteration_metrics")
        check_names(name for name in metrics if name not in AXES)
        if self._metrics is None:
            raise RuntimeError(f"{self.path}: metrics before start()")
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._metrics.append(f"{json.dumps(finite)}\n".encode())

    def append_evaluation(self, found: Mapping[str, Any]) -> None:
        """Add what was found of one version to eval.jsonl."""
        with (self.path / EVALUATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(found)) + "\n")

    def write_buffer(self, state: Mapping[str, Any]) -> None:
        """buffer.json: what the data buffer knows, as of the newest version."""
        self._write_json("buffer.json", dict(state))

    def append_system(self, sample: Mapping[str, float]) -> None:
        """Add what `SystemSampler` found to system.jsonl and flush it."""
        assert self._system is not None, "start comes first"
        self._system.write(json.dumps(dict(sample)) + "\n")
        self._system.flush()

    def mirror_is_incomplete(self, why: str) -> None:
        """mlflow-incomplete.txt: MLflow does not have all of this run. `make mlflow-sync` takes it away."""
        write_text(self.path / INCOMPLETE, f"{why}\n")

    def growing_files(self) -> tuple[dict[str, int], dict[str, str]]:
        """Bytes, and SHA-256, of the files that grow iteration by iteration, by their paths in the folder."""
        assert self._metrics is not None, "start comes first"
        parts = Parts({METRICS: self._metrics} | ({} if self._parts is None else dict(self._parts.files)))
        sizes, digests, evaluations = parts.sizes, parts.digests, self.path / EVALUATIONS
        if evaluations.exists():
            sizes[EVALUATIONS], digests[EVALUATIONS] = evaluations.stat().st_size, sha256_of(evaluations)
        return sizes, digests

    def open_parts(self, timeline: Timeline, extra_names: Sequence[str]) -> DriverParts:
        """Open the tables of the driver, with the spans of this timeline, which grow while the run lasts. extra_names:
        of the values that scores may have."""
        self._parts = DriverParts(self.path / PARTS, timeline, extra_names)
        return self._parts

    def note_trained(self) -> None:
        """Note that all that was trained is in the files: the same command, begun again, writes the rest alone."""
        write_text(self.path / TRAINED, "")

    def merge_parts(self, texts: Texts | None) -> None:
        """samples.parquet, trace.json, and the tables of `KEPT` where there are any, of all that is in the parts, which
        end with it. texts: that are kept."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None
        parts = self.path / PARTS
        if not (self.path / "trace.json").exists():  # the last of these
            samples = read_samples_so_far(parts)
            kept = {name: so_far(parts) for name, (_, so_far) in KEPT.items()}
            if texts is not None:
                said = pa.concat_tables([kept["responses"], kept["dropped_responses"]])
                samples = texts.of_samples(samples, said, kept["problems"])
                del said
                kept["eval_responses"] = texts.of_held_out(kept["eval_responses"])
            write_table(self.path / "samples.parquet", samples)
            for name, table in kept.items():
                if len(table):
                    write_tokens(self.path / f"{name}.parquet", table)
            self.write_trace(read_timeline_so_far(parts))
        if parts.is_dir():
            shutil.rmtree(parts)

    def write_summary(self, summary: Mapping[str, float]) -> None:
        """summary.json: the run in figures, of `harness.comparison.measures`."""
        self._write_json("summary.json", dict(summary))

    def write_trace(self, timeline: Timeline) -> None:
        """trace.json, for Perfetto; with what restarts.jsonl says."""
        restarts = msgspec.convert(load_restarts(self.path), list[Restart])
        self._write_json("trace.json", chrome_trace(timeline, restarts))

    def append_restart(self, restart: Mapping[str, Any]) -> None:
        """Add to restarts.jsonl that roles died, and what was done."""
        with (self.path / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(restart)) + "\n")

    def write_ledger(
        self, ledger: Ledger, engines: Sequence[Mapping[str, Any]] = (), tokens: Mapping[str, int] | None = None
    ) -> None:
        """ledger.json; `engines`: those that were lost, left or joined, if any; tokens: that were generated and thrown
        away, where that is known; and what restarts.jsonl says. Raises LedgerError if the ledger does not close."""
        ledger.check()
        happened: dict[str, Any] = {"engines": list(engines)} if engines else {}
        if tokens:
            happened["tokens"] = dict(tokens)
        if restarts := load_restarts(self.path):
            happened["restarts"] = restarts
        self._write_json("ledger.json", ledger.to_json() | happened)

    def finish(self) -> None:
        """Write DONE and release the folder. Everything else must be there."""
        self._close_files()
        write_done(self.path)
        (self.path / TRAINED).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the folder; without `finish` before, the run stays unfinished. Raises OSError where a file's last
        bytes cannot be written, once all are closed."""
        with ExitStack() as closing:
            if self._lock is not None:
                closing.callback(self._lock.release)
            self._lock = None
            self._close_files()

    def _close_files(self) -> None:
        open_ones = [one for one in (self._parts, self._system, self._metrics) if one is not None]
        with ExitStack() as closing:
            for one in open_ones:
                closing.callback(one.close)
            self._parts = self._metrics = self._system = None

    def __enter__(self) -> RunDirectory:
        with ExitStack() as refused:
            refused.callback(self.close)
            self.start()
            refused.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write_json(self, name: str, value: object) -> None:
        write_text(self.path / name, json.dumps(value) + "\n")


def locked(path: Path, busy: str) -> Lock:
    """Keeps others from writing the folder of a run. Raises BlockingIOError, which says `busy`, where somebody does."""
    return Lock(path / LOCK, busy=busy)


def load_config(path: Path) -> dict[str, Any]:
    """`config_as_written`, in words of now."""
    return in_words_of_now(config_as_written(path))


def load_known_config(path: Path) -> dict[str, Any]:
    """`load_config`, with all that comparisons and pages read of it. Raises DamagedFile for one that lacks any."""
    config = load_config(path)
    with reading(path / "config.yaml"):
        msgspec.convert(config, ConfigFile)
    return config


def config_as_written(path: Path) -> dict[str, Any]:
    """config.yaml of the run in folder `path`, as nested mappings of plain values. This and all that follow raise
    DamagedFile for a file that is not what a run writes."""
    with reading(path / "config.yaml"):
        config = read_yaml(path / "config.yaml")
        if not isinstance(config, dict):
            raise ValueError("it holds no settings")
        return {str(name): value for name, value in config.items()}


def finished_runs(folder: Path) -> list[Path]:
    """The folders of all finished runs below `folder`: an experiment's, a cell's, or several experiments'. By path."""
    return [done.parent for done in found_below(folder, f"seed=*/{DONE}")]


def load_manifest(path: Path) -> dict[str, Any]:
    """manifest.json of the run in folder `path`."""
    return _object(path / "manifest.json", ManifestFile)


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The iterations of the run in folder `path`, null read as NaN. A last line that was cut off when its writer died
    is left out; any other broken line raises DamagedFile."""
    lines = _lines(path / METRICS)
    with reading(path / METRICS):
        msgspec.convert(lines, list[dict[str, float | None]])
        read = msgspec.convert(lines, list[IterationLine])
        for before, line in pairwise(read):
            if line.iteration != before.iteration + 1:
                raise ValueError(f"iteration {line.iteration} follows {before.iteration}")
            if line.seconds < before.seconds or line.samples < before.samples:
                raise ValueError(f"seconds or samples are fewer after iteration {line.iteration} than before")
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]


def metrics_so_far(path: Path) -> Iterator[dict[str, Any]]:
    """The same of a run that goes on, of the iterations that are written now: none where there is no file. One at a
    time is read, and null is None."""
    file = path / METRICS
    if not file.exists():
        return iter(())
    with file.open("rb") as now:
        count = sum(1 for _ in now)

    def lines() -> Iterator[dict[str, Any]]:
        with file.open("rb") as then:
            yield from map(json.loads, islice(then, count))

    return lines()


def load_evaluations(path: Path) -> list[dict[str, Any]]:
    """eval.jsonl of the run in folder `path`, by version; empty for a run that evaluated none."""
    return _lines(path / EVALUATIONS, EvaluationLine) if (path / EVALUATIONS).exists() else []


def last_evaluated(path: Path) -> int:
    """Version of the last line of eval.jsonl; -1 without one."""
    return max((int(line["version"]) for line in load_evaluations(path)), default=-1)


def load_restarts(path: Path) -> list[dict[str, Any]]:
    """restarts.jsonl of the run in folder `path`: roles that died, and what was done. Empty where none did."""
    return _lines(path / RESTARTS, Restart) if (path / RESTARTS).exists() else []


def load_system(path: Path) -> list[dict[str, float]]:
    """How busy the machine was during the run in folder `path`: `time` (seconds since 1970) and `system/...`. Empty for
    a run that was made before this was sampled."""
    return _lines(path / "system.jsonl", dict[str, float]) if (path / "system.jsonl").exists() else []


def _lines(file: Path, each: Any = dict[str, Any]) -> list[dict[str, Any]]:
    """each: the type of a line, for what is relied on of it."""
    with reading(file):
        lines = read_text(file, LARGEST[file.name]).split("\n")
    objects = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or cut off
        with reading(file.with_name(f"{file.name}, line {number}")):
            objects.append(_mapping(json.loads(line)))
            msgspec.convert(objects[-1], each)
    return objects


def _object(file: Path, relied_on: Any) -> dict[str, Any]:
    """relied_on: the type of what is relied on of it."""
    with reading(file):
        found = _mapping(read_json(file, LARGEST[file.name]))
        msgspec.convert(found, relied_on)
        return found


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def mirrored_files(path: Path) -> list[Path]:
    """Files of the run in folder `path` that MLflow gets: neither what only the folder needs nor models."""
    left_out = {INCOMPLETE, DONE}
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.is_symlink())
    return [file for file in files if file.name not in left_out and not file.name.startswith(".")]


def weight_files(path: Path, model: str = MODEL) -> list[Path]:
    """The final weights of the run in folder `path`, or of its `CRITIC`: one file, or shards; none where not kept."""
    return sorted((path / model).glob("*.safetensors"))


def load_samples(path: Path) -> pa.Table:
    """samples.parquet of the run in folder `path`; of one that has not ended, what it has settled so far."""
    if not (path / "samples.parquet").exists() and (path / PARTS).is_dir():
        return read_samples_so_far(path / PARTS)
    with reading(path / "samples.parquet"):
        return read_samples(path / "samples.parquet")


def load_kept(path: Path, name: str, rows: pa.compute.Expression | None = None) -> pa.Table:
    """One of `KEPT` of the run in folder `path`; of one that has not ended, so far. rows: which. Empty for a run that
    has none, or was made before there was such a file."""
    file, (schema, so_far) = path / f"{name}.parquet", KEPT[name]
    if not file.exists():
        table = so_far(path / PARTS) if (path / PARTS).is_dir() else schema.empty_table()
        return table if rows is None else table.filter(rows)
    with reading(file):
        return read_as(file, schema, rows)


KEPT: dict[str, tuple[pa.Schema, Callable[[Path], pa.Table]]] = {
    "problems": (PROBLEMS_SCHEMA, read_problems_so_far),
    "responses": (RESPONSES_SCHEMA, lambda parts: read_growing(parts / RESPONSES)),
    "dropped_responses": (RESPONSES_SCHEMA, read_dropped_so_far),
    "eval_responses": (pa.schema([*HELD_OUT_SCHEMA, *TEXT_FIELDS]), read_held_out_so_far),
}
"""Tables of problems and responses, in files of their names: columns, and how they are read while a run goes on."""


def load_timeline(path: Path) -> Timeline:
    """The Timeline that trace.json of the run in folder `path` holds; of one that has not ended, so far."""
    if not (path / "trace.json").exists() and (path / PARTS).is_dir():
        return read_timeline_so_far(path / PARTS)
    file = path / "trace.json"
    with reading(file):
        return timeline_of(msgspec.json.decode(read_text(file, LARGEST[file.name]), type=TraceFile))


def load_summary(path: Path) -> dict[str, float]:
    """summary.json of the run in folder `path`; empty for one that has not ended, or was made before there was one."""
    return _object(path / "summary.json", dict[str, float]) if (path / "summary.json").exists() else {}


def load_ledger(path: Path) -> dict[str, Any]:
    """ledger.json of the run in folder `path`."""
    return _object(path / "ledger.json", LedgerFile)


def refuse_changed_inputs(config: JobConfig, folders: Iterable[Path]) -> None:
    """Raises ConfigError, naming both digests, where one of these runs of `config` is finished and read something else
    than is there now: it would be taken for done."""
    now = None
    for folder in folders:
        if not is_done(folder):
            continue
        now = inputs_of(config) if now is None else now
        fix = "run it again with force=true, or keep both with experiment=another_name"
        refuse_changed(digests(load_manifest(folder)), now, f"{folder} was made", fix)


def load_faults(path: Path) -> list[Found]:
    """Faults of a run, finished or not, above their bounds; of samples that could not be scored with an example."""
    ledger = load_ledger(path) if (path / "ledger.json").exists() else {}
    found = found_faults(load_metrics(path), ledger, load_evaluations(path), load_config(path))
    if found and found[0].name == "reward/failed" and (path / "samples.parquet").exists():
        causes = read_samples(path / "samples.parquet").column("failure").drop_null()
        found[0] = replace(found[0], text=f"{found[0].text}, such as: {causes[0].as_py()}") if len(causes) else found[0]
    return found
