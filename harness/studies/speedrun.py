"""The record book: how many seconds each schedule takes to get a frozen job to a held-out reward (docs/speedrun.md). A
track is the job that is frozen; a record what the runs of one came to, with digests of all that it rests on, written,
signed and checked; the book a page of all records."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.comparison.conservation import check_conservation
from harness.comparison.fairness import first_difference
from harness.comparison.runs import Run
from harness.comparison.statistics import Interval, mean_interval
from harness.config import STRICT, ConfigError, first_line
from harness.config.compose import EXPERIMENTS, read_settings
from harness.config.files import sha256_of
from harness.config.job import flatten, in_words_of_now
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table, number, percent
from harness.metrics.run_files import EVALUATIONS, config_as_written, load_evaluations
from harness.metrics.schemas import reading

RECORD = "record.json"
SIGNATURE = f"{RECORD}.sig"
LOG = "mllog.txt"
KEPT = ("config.yaml", EVALUATIONS)
"""Files of a run that a record keeps a copy of: its result can be computed from them."""

_DIGESTED = (*KEPT, "manifest.json", "metrics.jsonl", "ledger.json", "samples.parquet", "trace.json")
_NAMESPACE = "cadence-record"
_ANOTHERS_TIME = ("resumed", "begun_with", "replays")  # in a manifest: some of its work was done by an earlier run
_LIMIT_S = 60.0  # of ssh-keygen


class RecordedRun(msgspec.Struct, frozen=True):
    """A run of a record. seconds: on the run's clock when the first version that reaches the target was there; version:
    that one; sampled: its exact match; files: SHA-256 by name; others: share of the processors that other processes had
    meanwhile."""

    seed: int
    seconds: float
    version: int
    sampled: float
    started_at: str
    others: float
    files: dict[str, str]


class Record(msgspec.Struct, frozen=True):
    """record.json. track_digest: SHA-256 of the track's file; plugins: SHA-256 of the user's own code, by the import
    path that names it; settings: what was asked for besides the track's."""

    track: str
    track_digest: str
    target: float
    schedule: str
    settings: tuple[str, ...]
    devices: int
    commit: str
    plugins: dict[str, str]
    python: str
    packages: dict[str, str | None]
    hardware: dict[str, Any]
    runs: tuple[RecordedRun, ...]

    @property
    def seconds(self) -> Interval:
        """Seconds to the target: the mean over runs with its t interval."""
        return mean_interval([run.seconds for run in self.runs]).within(0.0, math.inf)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.schedule.replace(':', '.')}-{digest_of(self)[:8]}"


def digest_of(record: Record) -> str:
    """SHA-256 of all that it says."""
    return hashlib.sha256(msgspec.json.encode(record, order="sorted")).hexdigest()


def record_of(track: Track, runs: Sequence[Run], settings: Sequence[str]) -> Record:
    """The record that these runs of one configuration are. Raises ConfigError where they are none: simulated, of other
    settings, seeds or code than a record has, with a ledger that does not close, or short of the target."""
    first = runs[0].manifest
    for run in runs:
        _refuse(track, run)
        for same in ("git", "plugins", "packages", "hardware"):
            if run.manifest[same] != first[same]:
                raise ConfigError(f"{run.path} has another {same} than {runs[0].path}: run all seeds on one machine")
    commit = first["git"]["commit"]
    seeds = track.seeds_of(runs[0].config, commit)
    if tuple(run.identity.seed for run in runs) != seeds:
        raise ConfigError(f"the seeds of this record are {seeds}; `cadence speedrun` draws them")
    kept = check_conservation(runs)
    if not kept.passed:
        raise ConfigError(f"no record: {kept.problems[0]}")
    return Record(
        track=track.name,
        track_digest=track.digest,
        target=track.target,
        schedule=runs[0].identity.schedule,
        settings=tuple(settings),
        devices=runs[0].config["cluster"]["devices"],
        commit=commit,
        plugins={one["path"]: one["sha256"] for one in first["plugins"]},
        python=first["python"],
        packages=first["packages"],
        hardware=first["hardware"],
        runs=tuple(_recorded(track, run) for run in runs),
    )


def _refuse(track: Track, run: Run) -> None:
    if run.identity.backend != "real":
        raise ConfigError(f"{run.path} is {run.identity.backend}: a record is measured, never simulated")
    track.refuse_changed(run.config)
    refuse_unnamed_code(run.manifest["git"])
    for what in _ANOTHERS_TIME:
        if what in run.manifest:
            raise ConfigError(f"{run.path} is {what.replace('_', ' ')} by an earlier run, whose time is not in its own")


def refuse_unnamed_code(git: Mapping[str, Any] | None) -> None:
    """Refuse code without a commit. git: as in a manifest. Raises ConfigError where no commit says what ran."""
    if git is None or git["dirty"]:
        raise ConfigError(
            "a record names the commit that makes it again, and this code is of none: commit what differs (your own "
            "schedule may lie in another folder: its file is named with its digest)"
        )


def _recorded(track: Track, run: Run) -> RecordedRun:
    reached = first_at(track.target, run.evaluations)
    if reached is None:
        best = max((found["sampled"] for found in run.evaluations), default=0.0)
        raise ConfigError(
            f"no record: seed {run.identity.seed} got to {best:.3f} within its budget, not {track.target}"
        )
    if reached["version"] == 0:
        raise ConfigError(f"no record: track={track.name} asks for {track.target}, which its policy has untaught")
    return RecordedRun(
        seed=run.identity.seed,
        seconds=reached["at_s"],
        version=reached["version"],
        sampled=reached["sampled"],
        started_at=run.manifest["started_at"],
        others=run.manifest["load"]["others"],
        files={name: sha256_of(run.path / name) for name in _DIGESTED},
    )


def first_at(target: float, evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first line of eval.jsonl whose held-out samples, all scored, match exactly as often as the target."""
    return next((one for one in evaluations if one["sampled"] >= target and not one.get("failed")), None)


def write_record(record: Record, runs: Sequence[Run], folder: Path) -> None:
    """record.json with its digest, and of each run `seed=<n>/` with its log lines and what its result follows from."""
    for recorded, run in zip(record.runs, runs, strict=True):
        (folder / run.path.name).mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            shutil.copyfile(run.path / name, folder / run.path.name / name)
        write_text(folder / run.path.name / LOG, log_lines(record, recorded, run.config, run.evaluations))
    told = {"digest": digest_of(record), **msgspec.to_builtins(record)}
    write_text(folder / RECORD, json.dumps(told, indent=1) + "\n")


def read_record(folder: Path) -> Record:
    """Raises DamagedFile for a file that is none, ConfigError where it does not say what its digest was made of."""
    path = folder / RECORD
    if not path.is_file():
        raise ConfigError(f"{folder} has no {RECORD}: name one, a folder results/{FOLDER}/<track>/<name>")
    with reading(path):
        told = json.loads(path.read_text(encoding="utf-8"))
        record = msgspec.convert(told, Record)
    if digest_of(record) != told.get("digest"):
        raise ConfigError(f"{path} is not as it was written: its digest is of something else")
    return record


def check_record(folder: Path, track: Track) -> Record:
    """The record in this folder, held against its files, track and itself. Raises ConfigError for what is off first."""
    record = read_record(folder)
    if (record.track, record.track_digest, record.target) != (track.name, track.digest, track.target):
        raise ConfigError(f"{folder} is of another {record.track} than this code has: a track's file never changes")
    seeds = tuple(run.seed for run in record.runs)
    for run in record.runs:
        files = folder / f"seed={run.seed}"
        for name in KEPT:
            if not (files / name).is_file() or sha256_of(files / name) != run.files[name]:
                raise ConfigError(f"{files / name} is not what the record was made of")
        config, reached = config_as_written(files), first_at(track.target, load_evaluations(files))
        track.refuse_changed(config)
        if record.devices != config["cluster"]["devices"] or record.schedule != config["schedule"]["name"]:
            raise ConfigError(
                f"{files / 'config.yaml'} has another schedule or number of devices than {folder / RECORD}"
            )
        if reached is None or (reached["at_s"], reached["version"]) != (run.seconds, run.version):
            raise ConfigError(f"{files / EVALUATIONS} does not reach {track.target} when {folder / RECORD} says")
        drawn = track.seeds_of(config, record.commit)
        if seeds != drawn:  # and so all runs have the same settings
            raise ConfigError(f"{folder} has seeds {seeds}; its settings, commit and track have {drawn}")
        if (setting := _not_so(record.settings, config)) is not None:
            raise ConfigError(f"{folder / RECORD} says {setting}, and {files / 'config.yaml'} does not")
        with reading(files / LOG):
            told = (files / LOG).read_text(encoding="utf-8")
        if told != log_lines(record, run, config, load_evaluations(files)):
            raise ConfigError(f"{files / LOG} is not what the record makes")
    return record


def _not_so(settings: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """The first of these settings, the last of each name counting, that this configuration does not have."""
    values = flatten(config)
    for name, value in dict(setting.partition("=")[::2] for setting in settings).items():
        group = config.get(name)
        there = group.get("name", value) if isinstance(group, Mapping) else values.get(name, value)
        if not _says(value, there):
            return f"{name}={value}"
    return None


def _says(value: str, there: Any) -> bool:
    """Whether a setting's text is of the value that is there. Nothing, and null, may have become anything."""
    if value in ("", "null") or isinstance(there, list):
        return True
    if isinstance(there, int | float) and not isinstance(there, bool):
        try:
            return float(value) == there
        except ValueError:
            return False
    return value.lower() == str(there).lower()


def refuse_key(key: Path) -> None:
    """Raises ConfigError for one that `sign` could not sign with."""
    try:
        _ssh_keygen("sign", "-f", str(key), "-n", _NAMESPACE)
    except ConfigError as error:
        raise ConfigError(f"key={key} cannot sign: {error}; name a private key, as `ssh-keygen` makes one") from error


def sign(folder: Path, key: Path) -> None:
    """Write record.json.sig with a private key of SSH's. Raises ConfigError where that cannot be done."""
    (folder / SIGNATURE).unlink(missing_ok=True)
    _ssh_keygen("sign", "-f", str(key), "-n", _NAMESPACE, str(folder / RECORD))


def signer(folder: Path) -> str | None:
    """The key that signed the record, in OpenSSH's words, or None. Raises ConfigError for another's signature."""
    if not (folder / SIGNATURE).exists():
        return None
    with (folder / RECORD).open("rb") as record:
        told = _ssh_keygen("check-novalidate", "-n", _NAMESPACE, "-s", str(folder / SIGNATURE), stdin=record)
    return told.strip().rpartition(" with ")[2]


def _ssh_keygen(action: str, *arguments: str, stdin: Any = subprocess.DEVNULL) -> str:
    if shutil.which("ssh-keygen") is None:
        raise ConfigError("ssh-keygen, which signs records and checks them, is not there: install OpenSSH's client")
    command = ["ssh-keygen", "-Y", action, *arguments]
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        raise ConfigError(f"ssh-keygen -Y {action}: {(done.stderr or done.stdout).strip().splitlines()[0]}")
    return done.stdout


def log_lines(
    record: Record, run: RecordedRun, config: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]
) -> str:
    """Every line of one run, up to the version that reaches the target. time_ms: the beginning of the run, and on from
    it the run's clock, which stands still during evaluations: so it is run_stop less run_start that is counted."""
    began = datetime.fromisoformat(run.started_at).timestamp()

    def line(key: str, value: object, at_s: float = 0.0, event: str = "POINT_IN_TIME", **metadata: object) -> str:
        told = {
            "namespace": "cadence",
            "time_ms": round(1000 * (began + at_s)),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        return f":::MLLOG {json.dumps(told)}"

    def lines() -> Iterator[str]:
        algorithm, batch = config["algorithm"], config["algorithm"]["batch_groups"] * config["algorithm"]["group_size"]
        yield line("submission_benchmark", record.track, track_digest=record.track_digest)
        yield line("submission_platform", record.hardware, devices=record.devices)
        yield line("submission_schedule", record.schedule, commit=record.commit, plugins=record.plugins)
        yield line("seed", run.seed)
        yield line("global_batch_size", batch, groups=algorithm["batch_groups"], group_size=algorithm["group_size"])
        yield line("target_accuracy", record.target)
        yield line("run_start", None, event="INTERVAL_START")
        for found in evaluations:
            if found["version"] <= run.version:
                samples = found["version"] * batch
                value, at_s = found["sampled"], found["at_s"]
                yield line("eval_accuracy", value, at_s, epoch_num=found["version"], samples=samples)
        yield line("run_stop", None, run.seconds, "INTERVAL_END", status="success")

    return "\n".join(lines()) + "\n"


TRACKS = EXPERIMENTS / "speedrun"
DEFAULT = "tiny_reverse_v1"

_OF_A_RUN = ("experiment", "seeds", "force", "save_weights", "restarts", "texts", "cost", "device")
"""Settings that decide nothing of what is measured."""

_SEED_LIMIT = 10**6


@dataclass(frozen=True, config=STRICT)
class Track:
    """A track, as its file has it. target: exact match of samples of the held-out problems, drawn as in training.
    digest: SHA-256 of its file. settings: that ask for the job; free: settings, or groups of them, that a run may
    choose; job: all others of its config.yaml."""

    name: str
    digest: str
    target: Annotated[float, Field(gt=0, le=1)]
    seeds: Annotated[int, Field(ge=3)]
    settings: list[str]
    free: list[str]
    job: dict[str, Any]

    def refuse_changed(self, config: Mapping[str, Any]) -> None:
        """Refuse a run whose settings differ from the track's. config: config.yaml, or `plain(config)`. Raises
        ConfigError, naming the setting, where a record may not have it so."""
        if config["cluster"]["oversubscribe"]:
            raise ConfigError("cluster.oversubscribe=true: devices that share cores have no seconds to count")
        job, mine = self.frozen_of(self.job), self.frozen_of(in_words_of_now(config))
        found = first_difference(dict.fromkeys(mine) | job, dict.fromkeys(job) | mine)
        if found is not None:
            name, frozen, here = found
            raise ConfigError(
                f"{name}={here}, and track={self.name} has {frozen}; a record may choose {', '.join(self.free)}"
            )

    def frozen_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Settings, by their paths, that a record may not choose."""
        free = (*self.free, *_OF_A_RUN)
        return {
            name: value
            for name, value in flatten(config).items()
            if not any(name == one or name.startswith(f"{one}.") for one in free)
        }

    def seeds_of(self, config: Mapping[str, Any], commit: str) -> tuple[int, ...]:
        """The seeds of these settings and this commit: nobody chooses them, who has the record can draw them again."""
        chosen = {name: value for name, value in flatten(config).items() if name.partition(".")[0] not in _OF_A_RUN}
        told = json.dumps([self.digest, commit, chosen], sort_keys=True)
        return tuple(random.Random(told).sample(range(_SEED_LIMIT), self.seeds))


def track_names() -> list[str]:
    """Names of all tracks."""
    return sorted(path.stem for path in TRACKS.glob("*.yaml"))


def read_track(name: str) -> Track:
    """Raises ConfigError for an unknown name, listing all, and for a file that cannot be read, naming the setting."""
    path = TRACKS / f"{name}.yaml"
    if name not in track_names():
        raise ConfigError(f"track={name} is unknown; choose one of {', '.join(track_names())}")
    try:
        track = TypeAdapter(Track).validate_python(read_settings(path) | {"name": name, "digest": sha256_of(path)})
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
    if not flatten(track.job).get("eval.k"):
        raise ConfigError(f"{path}: eval.k must be at least 1: the target is of samples")
    return replace(track, job=in_words_of_now(track.job))


FOLDER, PAGE = "records", "records.md"  # folder and page of records below the results

_HEADS = (
    *("schedule", "hardware", "devices", "seconds (95 %)", "device-seconds", "version", "others' load"),
    *("day", "commit", "record"),
)


def write_book(results: Path) -> Path:
    """records.md, of all records below `results`/records; returns its path."""
    path = results / PAGE
    write_text(path, page({folder: read_record(folder) for folder in record_folders(results)}, results))
    return path


def record_folders(results: Path) -> list[Path]:
    """Folders of all records in the results."""
    return sorted(path.parent for path in (results / FOLDER).glob(f"*/*/{RECORD}"))


def page(records: Mapping[Path, Record], results: Path) -> str:
    """The whole page; records by their folders, below `results`."""
    parts = [
        "# Records",
        "Written by `cadence speedrun` from the records beside it: measured, never simulated. How a record is made, "
        "checked and submitted: [docs/speedrun.md](../docs/speedrun.md).",
    ]
    for track in sorted({record.track for record in records.values()}):
        here = {folder: record for folder, record in records.items() if record.track == track}
        target = next(iter(here.values())).target
        ordered = sorted(here.items(), key=lambda one: (hardware_text(one[1].hardware), one[1].seconds.value))
        rows = [_row(folder, record, results) for folder, record in ordered]
        parts += [
            f"## {track}",
            f"Seconds on a run's clock until {target:g} of the samples of held-out problems match exactly, mean of "
            "fresh seeds. *Others' load*: the largest share of the processors that other processes had during a run.",
            markdown_table(_HEADS, rows),
        ]
    return "\n\n".join(parts) + "\n"


def hardware_text(hardware: Mapping[str, Any]) -> str:
    """`8 x NVIDIA H100`, or `2 cores, AMD EPYC`."""
    gpus = hardware["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{hardware['cores']} cores, {hardware['cpu']}"


def _row(folder: Path, record: Record, results: Path) -> list[str]:
    where, signed = folder.relative_to(results).as_posix(), (folder / SIGNATURE).exists()
    seconds = record.seconds
    devices = Interval(*(record.devices * value for value in (seconds.value, seconds.low, seconds.high)))
    return [
        record.schedule,
        hardware_text(record.hardware),
        f"{record.devices}",
        f"{number(seconds.value)} ({number(seconds.low)} to {number(seconds.high)})",
        number(devices.value),
        _range(run.version for run in record.runs),
        percent(max(run.others for run in record.runs)),
        min(run.started_at for run in record.runs)[:10],
        record.commit[:7],
        f"{where}, {digest_of(record)[:8]}{', signed' if signed else ''}",
    ]


def _range(versions: Iterable[int]) -> str:
    found = sorted(versions)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
