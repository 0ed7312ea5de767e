"""Records: what makes one, what is refused, what is noticed of one that was altered, and the book of all."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.cli import main as cli
from harness.comparison.runs import Run, read_run
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.metrics.run_files import load_config
from harness.studies import speedrun as speedruns
from harness.studies.speedrun import Record, Track
from tests.support.fabricated_cells import Made, make_run
from tests.support.played_runs import MANIFEST
from tests.support.project import ROOT

COMMIT = "a" * 40  # of all fabricated runs
LOAD = {"started_at": "2026-01-01T00:00:00+00:00", "load": {"others": 0.02}, "plugins": []}
MADE = Made(iterations=4)

FROZEN_FILES = {"tiny_reverse_v1": "044f6ec25b5b045f7e59232781a5d3de2a87f8d4e5b5e8a9c503d2bec9323b78"}
"""SHA-256 of the file of every track that records were made of: what is to be otherwise is another track."""


def evaluated(*found: tuple[int, float, float]) -> list[dict[str, Any]]:
    """Lines of eval.jsonl: version, the run's clock, exact match."""
    told = {"problems": 64, "k": 1, "greedy": 1.0, "pass_at_k": None}
    return [told | {"version": version, "at_s": at_s, "sampled": sampled} for version, at_s, sampled in found]


def runs_of(
    folder: Path, seeds: Sequence[int], made: Made = MADE, reached: float = 0.9, manifest: dict[str, Any] | None = None
) -> list[Run]:
    """Runs that get to `reached` after 10, 11, 12 ... seconds."""
    runs = []
    for number, seed in enumerate(seeds):
        path = make_run(folder, "raced", replace(made, evaluated=None), seed, manifest=LOAD | (manifest or {})).path
        lines = evaluated((0, 0.0, 0.5), (2, 10.0 + number, reached), (4, 20.0, 0.7))
        (path / "eval.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        runs.append(read_run(path))
    return runs


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Track:
    config = load_config(make_run(tmp_path_factory.mktemp("job"), "raced", MADE, 0, manifest=LOAD).path)
    track = Track("made_up_v1", "d" * 64, 0.9, 3, (), ("schedule", "cluster"), {})
    return replace(track, job=track.frozen_of(config))


@pytest.fixture(scope="module")
def runs(track: Track, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    config = load_config(make_run(folder / "job", "raced", MADE, 0, manifest=LOAD).path)
    return runs_of(folder, track.seeds_of(config, COMMIT))


@pytest.fixture
def folder(track: Track, runs: list[Run], tmp_path: Path) -> Path:
    record = speedruns.record_of(track, runs, ["schedule=fully_async"])
    folder = tmp_path / "records" / track.name / record.name
    speedruns.write_record(record, runs, folder)
    return folder


def test_a_record_is_the_time_to_the_first_version_at_the_target(track: Track, folder: Path) -> None:
    record = speedruns.check_record(folder, track)
    assert [(run.seconds, run.version, run.sampled) for run in record.runs] == [(s, 2, 0.9) for s in (10.0, 11.0, 12.0)]
    assert (record.schedule, record.devices, record.commit) == ("fully_async", 2, COMMIT)
    assert record.seconds.value == 11.0 and record.seconds.low == pytest.approx(11 - 4.303 / 3**0.5, abs=1e-3)
    assert {"config.yaml", "eval.jsonl", "samples.parquet"} <= record.runs[0].files.keys()
    told = json.loads((folder / "record.json").read_text())
    assert told["digest"] == speedruns.digest_of(record) and folder.name == f"fully_async-{told['digest'][:8]}"


def test_seeds_follow_from_track_settings_and_commit(track: Track, runs: list[Run]) -> None:
    config = runs[0].config
    seeds = track.seeds_of(config, COMMIT)
    assert len(set(seeds)) == 3 and seeds == track.seeds_of(config | {"seeds": [7], "experiment": "other"}, COMMIT)
    others = [
        track.seeds_of(config, "b" * 40),
        track.seeds_of(config | {"iterations": 5}, COMMIT),
        replace(track, digest="e" * 64).seeds_of(config, COMMIT),
    ]
    assert all(other != seeds for other in others)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """record.json with a digest of its own, as one who can compute digests would alter it."""
    told = json.loads((folder / "record.json").read_text())
    change(told)
    told["digest"] = speedruns.digest_of(msgspec.convert(told, Record))
    (folder / "record.json").write_text(json.dumps(told))


def faster(told: dict[str, Any]) -> None:
    told["runs"][0]["seconds"] = 1.0


def other_seed(told: dict[str, Any]) -> None:
    told["commit"] = "b" * 40


def alone(told: dict[str, Any]) -> None:
    told["runs"] = told["runs"][:1]


def often(told: dict[str, Any]) -> None:
    told["runs"].append(told["runs"][0])


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda f: (f / "record.json").write_text((f / "record.json").read_text().replace("10.0", "9.0")), "as it was"),
        (lambda f: next(f.glob("seed=*/eval.jsonl")).write_text(""), "is not what the record was made of"),
        (lambda f: next(f.glob("seed=*/config.yaml")).unlink(), "is not what the record was made of"),
        (lambda f: rewritten(f, faster), r"eval\.jsonl does not reach 0\.9 when"),
        (lambda f: rewritten(f, other_seed), r"has seeds \(\d+, \d+, \d+\); its settings, commit"),
        (lambda f: rewritten(f, alone), r"has seeds \(\d+,\); its settings, commit"),
        (lambda f: rewritten(f, often), r"has seeds \(\d+, \d+, \d+, \d+\); its settings, commit"),
        (
            lambda f: rewritten(f, lambda told: told.update(settings=["schedule=half_step"])),
            "says schedule=half_step, and",
        ),
        (
            lambda f: rewritten(f, lambda told: told.update(settings=["schedule.max_staleness=0"])),
            "says schedule.max_staleness=0, and",
        ),
        (
            lambda f: next(f.glob("seed=*/mllog.txt")).write_text(":::MLLOG {}\n"),
            "mllog.txt is not what the record makes",
        ),
        (lambda f: rewritten(f, lambda told: told.update(target=0.5)), "a track's file never changes"),
        (lambda f: rewritten(f, lambda told: told.update(devices=1)), "another schedule or number of devices"),
    ],
)
def test_what_was_altered_is_named(alter: Callable[[Path], object], message: str, track: Track, folder: Path) -> None:
    alter(folder)
    with pytest.raises(ConfigError, match=message):
        speedruns.check_record(folder, track)


@pytest.mark.parametrize(
    ("made", "reached", "manifest", "message"),
    [
        (replace(MADE, backend="virtual"), 0.9, {}, "is virtual: a record is measured, never simulated"),
        (
            replace(MADE, settings=("algorithm.learning_rate=0.1",)),
            0.9,
            {},
            r"algorithm\.learning_rate=0\.1, and track=",
        ),
        (replace(MADE, settings=("algorithm.filter=zero_variance",)), 0.9, {}, "algorithm.filter=zero_variance, and"),
        (replace(MADE, settings=("cluster.oversubscribe=true",)), 0.9, {}, "devices that share cores"),
        (MADE, 0.9, {"git": {"commit": COMMIT, "dirty": True}}, "this code is of none"),
        (MADE, 0.9, {"git": None}, "this code is of none"),
        (MADE, 0.9, {"resumed": "results/before"}, "is resumed by an earlier run"),
        (MADE, 0.89, {}, r"got to 0\.890 within its budget, not 0\.9"),
        (replace(MADE, schedule="one_step_off"), 0.9, {}, "the seeds of this record are"),
    ],
)
def test_what_is_no_record_is_refused(
    made: Made, reached: float, manifest: dict[str, Any], message: str, track: Track, runs: list[Run], tmp_path: Path
) -> None:
    seeds = [run.identity.seed for run in runs]  # those of MADE
    with pytest.raises(ConfigError, match=message):
        speedruns.record_of(track, runs_of(tmp_path, seeds, made, reached, manifest), [])


def test_a_target_held_at_first_or_two_machines_is_no_record(track: Track, runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"track=made_up_v1 asks for 0\.5, which its policy has untaught"):
        speedruns.record_of(replace(track, target=0.5), runs, [])
    other = runs_of(tmp_path, [runs[2].identity.seed], manifest={"hardware": MANIFEST["hardware"] | {"cpu": "another"}})
    with pytest.raises(ConfigError, match="has another hardware than .* run all seeds on one machine"):
        speedruns.record_of(track, [*runs[:2], *other], [])


def test_the_log_of_a_run_is_in_mlperfs_form_and_its_interval_is_the_result(folder: Path) -> None:
    record = speedruns.read_record(folder)
    for run in record.runs:
        lines = (folder / f"seed={run.seed}" / "mllog.txt").read_text().splitlines()
        told = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
        assert all(set(one) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for one in told)
        at = {one["key"]: one for one in told}
        assert at["run_stop"]["time_ms"] - at["run_start"]["time_ms"] == 1000 * run.seconds
        assert at["run_stop"]["metadata"] == {"status": "success"} and at["seed"]["value"] == run.seed
        assert [one["value"] for one in told if one["key"] == "eval_accuracy"] == [0.5, 0.9], "none after the target"


def test_a_signature_is_of_this_record_and_says_whose_it_is(track: Track, folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    assert speedruns.signer(folder) is None
    speedruns.sign(folder, key)
    assert (by := speedruns.signer(folder)) is not None and by.startswith("ED25519 key SHA256:")
    rewritten(folder, faster)
    with pytest.raises(ConfigError, match="ssh-keygen -Y check-novalidate: "):
        speedruns.signer(folder)
    with pytest.raises(ConfigError, match="ssh-keygen -Y sign: "):
        speedruns.sign(folder, tmp_path / "no such key")


def test_the_book_has_every_record_by_hardware_the_soonest_first(track: Track, folder: Path) -> None:
    results = folder.parents[2]
    slow = msgspec.structs.replace(
        speedruns.read_record(folder), schedule="slow", runs=speedruns.read_record(folder).runs[1:]
    )
    fast = speedruns.read_record(folder)
    text = speedruns.page({results / "records/t/slow": slow, folder: fast}, results)
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| fully_async", "| slow"]
    assert (
        f"| 11.0 (8.52 to 13.5) | 22.0 | 2 | 2 % | 2026-01-01 | aaaaaaa | records/{track.name}/{fast.name}, " in rows[0]
    )
    assert speedruns.write_book(results).read_text().count(fast.name) == 1


def test_committed_records_hold_and_their_tracks_never_change() -> None:
    results = ROOT / "results"
    records = {
        folder: speedruns.check_record(folder, speedruns.read_track(folder.parent.name))
        for folder in speedruns.record_folders(results)
    }
    assert (results / speedruns.PAGE).read_text(encoding="utf-8") == speedruns.page(records, results)
    assert all(folder.name == record.name for folder, record in records.items())
    assert speedruns.track_names() == [*FROZEN_FILES]
    for name, digest in FROZEN_FILES.items():
        assert hashlib.sha256((speedruns.TRACKS / f"{name}.yaml").read_bytes()).hexdigest() == digest
        track = speedruns.read_track(name)
        for schedule in ("fully_async", "colocate_sync"):
            job = plain(compose_job([f"schedule={schedule}", *track.settings]))
            assert track.frozen_of(job) == track.frozen_of(track.job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backend=virtual"], "backend=virtual, and --track tiny_reverse_v1 has real; a record may choose schedule, "),
        (
            ["algorithm.group_size=16"],
            "algorithm.group_size=16, and --track tiny_reverse_v1 has 8; a record may choose ",
        ),
        (["track=none"], "track=none is unknown; choose one of tiny_reverse_v1"),
        (["cluster.oversubscribe=true"], "cluster.oversubscribe=true: devices that share cores have no seconds to"),
        (["seeds=5"], "seeds=5 is not to be chosen: `cadence speedrun` does, by the track"),
        (["key=none"], "key=none cannot sign: ssh-keygen -Y sign: "),
        (["dry=1"], "dry=1 is neither true nor false"),
        (["verify=here", "schedule=fully_async"], "verify= checks a record that is there, and takes nothing besides"),
        (["verify=here"], "here has no record.json: name one, a folder results/records/"),
    ],
)
def test_what_a_record_may_not_choose_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["speedrun", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
