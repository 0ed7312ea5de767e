"""A record: what the runs of a track came to, with digests of all that it rests on; written, signed, and checked."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from harness.comparison.conservation import check_conservation
from harness.comparison.runs import Run
from harness.comparison.statistics.estimates import Interval, mean_interval
from harness.config import ConfigError
from harness.config.job import flatten
from harness.metrics.atomic_files import write_text
from harness.metrics.run_files import EVALUATIONS, config_as_written, load_evaluations
from harness.metrics.schemas import reading
from harness.studies.speedrun.track import Track

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
        files={name: _digest(run.path / name) for name in _DIGESTED},
    )


def first_at(target: float, evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The line of eval.jsonl at which exact match of held-out samples, all of which were scored, was first the target
    or more."""
    return next((one for one in evaluations if one["sampled"] >= target and not one.get("failed")), None)


def write_record(record: Record, runs: Sequence[Run], folder: Path) -> None:
    """record.json with its digest, and of each run `seed=<n>/` with the files that its result can be computed from, and
    with its log lines."""
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
        raise ConfigError(f"{folder} has no {RECORD}: it is no folder of a record")
    with reading(path):
        told = json.loads(path.read_text(encoding="utf-8"))
        record = msgspec.convert(told, Record)
    if digest_of(record) != told.get("digest"):
        raise ConfigError(f"{path} is not as it was written: its digest is of something else")
    return record


def check_record(folder: Path, track: Track) -> Record:
    """The record in this folder, held against its files, its track and itself. Raises ConfigError for the first thing
    that is off."""
    record = read_record(folder)
    if (record.track, record.track_digest, record.target) != (track.name, track.digest, track.target):
        raise ConfigError(f"{folder} is of another {record.track} than this code has: a track's file never changes")
    seeds = tuple(run.seed for run in record.runs)
    for run in record.runs:
        files = folder / f"seed={run.seed}"
        for name in KEPT:
            if not (files / name).is_file() or _digest(files / name) != run.files[name]:
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
        if _text(files / LOG) != log_lines(record, run, config, load_evaluations(files)):
            raise ConfigError(f"{files / LOG} is not what the record makes")
    return record


def _not_so(settings: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """The first of these settings, of which the last counts where one is there twice, that this configuration does not
    have."""
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


def _text(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8")


def refuse_key(key: Path) -> None:
    """Raises ConfigError for one that `sign` could not sign with."""
    _ssh_keygen("sign", "-f", str(key), "-n", _NAMESPACE)


def sign(folder: Path, key: Path) -> None:
    """Write record.json.sig with a private key of SSH's. Raises ConfigError where that cannot be done."""
    (folder / SIGNATURE).unlink(missing_ok=True)
    _ssh_keygen("sign", "-f", str(key), "-n", _NAMESPACE, str(folder / RECORD))


def signer(folder: Path) -> str | None:
    """The key that signed the record, in OpenSSH's words; None where none did. Raises ConfigError for a signature that
    is not of this record."""
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
