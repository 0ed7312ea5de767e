"""Settings, command lines, results folders and tables spoilt at random: each is read, or refused in one line; none
hangs, and none fills the memory."""

import io
import json
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from harness.calibration.profile.rows import DeviceProfile, TimingRow, read_profile, write_profile
from harness.calibration.runs import read_run
from harness.checks.job import plan_job
from harness.cli.commands import COMMANDS
from harness.cli.look import show
from harness.cli.main import main
from harness.comparison.experiment import Campaign, ListedCell, comparison_in, write_campaign
from harness.config import ConfigError
from harness.config.compose import EXPERIMENTS, compose_job, make_schedule, plain
from harness.config.job import flatten
from harness.config.machine import this_machine
from harness.cost_model.lengths import read_trace
from harness.prediction.table import read_evidence
from harness.report.page.document import document
from harness.report.page.markdown import markdown
from harness.tasks.data_source import DataSource
from tests.support.fabricated_cells import Made, keep_samples, make_run
from tests.support.mutations import HOSTILE, spoilt, within

pytestmark = pytest.mark.slow
LIMIT_S = 20  # of one input, on a machine that does much else
MEMORY = 1 << 30  # bytes that all of them may add


@pytest.fixture(autouse=True)
def memory_is_bounded() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY


def refused_in_a_line(work: Callable[[], object], what: str, refusals: type[ValueError] = ConfigError) -> bool:
    """Whether it was; anything else is a failure."""
    with within(LIMIT_S, what):
        try:
            work()
        except refusals as error:
            assert str(error).isprintable() and str(error), what
            return True
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {what}") from error
    return False


@pytest.mark.parametrize("seed", range(2))
def test_settings_at_random_are_taken_or_refused_in_a_line(seed: int) -> None:
    chance, machine = random.Random(seed), this_machine()
    names = [
        *flatten(plain(compose_job([]))),
        "eval.every",
        "checkpoint.every",
        "schedule",
        "model",
        "cost",
        "device",
        "hydra",
    ]
    refused = 0
    for _ in range(500):
        settings = []
        for _ in range(chance.randint(0, 3)):
            value = chance.choice([*HOSTILE, str(chance.randint(1, 64)), f"{chance.random():.3f}", str(10**18)])
            setting = f"{chance.choice(['', '', '+', '++', '~'])}{chance.choice(names)}={value}"
            if chance.random() < 0.3:  # any bytes may stand on a command line
                setting = spoilt(setting.encode(), chance).decode("utf-8", "surrogateescape")
            settings.append(setting)

        def composed(settings: list[str] = settings) -> None:
            config = compose_job(settings)
            plan_job(config, make_schedule(config), machine)

        refused += refused_in_a_line(composed, repr(settings))
    assert 0 < refused < 500


PLAIN = ("report", "show", "diff", "metrics", "list", "doctor", "calibrate")
DRY = ("bench", "compare", "sweep", "matrix", "speedrun")
WORK = {
    "plan": ("harness.cli.plan.make_plan",),
    "predict": ("harness.cli.predict.predict", "harness.cli.predict.answer",
                "harness.cli.predict.score_tables"),
    "paper": ("harness.studies.papers.run.run_papers",),
    "profile": ("harness.calibration.profile.record.record",),
    "table": ("harness.studies.scaling.write_study", "harness.cli.studies.import_module"),
    "sample": ("harness.studies.sample.make_sample",),
    "serve": ("harness.cli.serve._serve",),
    "chaos": ("harness.acceptance.chaos.simulated.run_campaign", "harness.acceptance.chaos.real.feel"),
    "gate-gpu": ("harness.acceptance.gpu_gate.gate.run",),
    "ui": ("os.execv",),
    "mlflow-sync": (),
}  # fmt: skip
"""Commands that work for long or write where they are told, and what of each begins the work."""
WORDS = (*("fully_async", "colocate_sync", "qwen7b", "tiny", "vllm", "h100", "virtual", "real", "all", "last", "train"),
         *("1", "2", "8", "0.5", "1,2", "[1,2]", "made_up", "ppo", "train.jsonl:17", "h100,a100"))  # fmt: skip


def command_line(chance: random.Random, names: list[str]) -> list[str]:
    """A command with options, settings and other words, which runs nothing where none of WORK is done."""
    name = chance.choice((*PLAIN, *DRY, *WORK))
    given = [name]
    for _ in range(chance.randint(0, 3)):
        word = chance.choice((*HOSTILE, *WORDS, *WORDS, str(chance.randint(-3, 200)), str(10**18)))
        if chance.random() < 0.5 and COMMANDS[name].options:
            option = chance.choice(COMMANDS[name].options)
            forms = ([f"--{option.flag}", word], [f"--{option.flag}={word}"], [f"{option.variable}={word}"])
            given += [f"--{option.flag}"] if option.value is None else chance.choice(forms)
        elif chance.random() < 0.8:
            given.append(f"{chance.choice(['', '', '+', '++', '~'])}{chance.choice(names)}={word}")
        else:
            given.append(word)
        if chance.random() < 0.1:
            given[-1] = spoilt(given[-1].encode("utf-8"), chance).decode("utf-8", "surrogateescape")
    given += ["--dry-run"] * (name in DRY) + ["--name=fuzzed"] * (name == "calibrate")
    return [word.replace("\x00", "") for word in given]  # which no command line can hold


@pytest.mark.filterwarnings("default")  # of MLflow's own
def test_command_lines_at_random_are_answered_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_: object, **__: object) -> None:
        raise ConfigError("it would begin")

    monkeypatch.setattr("harness.cli.main.RESULTS", tmp_path)
    for place in (place for places in WORK.values() for place in places):
        monkeypatch.setattr(place, begin)
    monkeypatch.setenv("CADENCE_TOKEN", "t" * 64)
    chance, names = random.Random(3), [*flatten(plain(compose_job([]))), "eval.every", "schedule", "model", "seeds"]
    refused = 0
    for _ in range(300):
        given = command_line(chance, names)
        with within(LIMIT_S * 3, repr(given)):
            code = main(given)
        said = capsys.readouterr().err.strip()
        assert code in (0, 1, 2) and (said or code == 0 or given[0] == "doctor"), (given, said)
        assert "Traceback" not in said and all(one.isprintable() for one in said.split("\n")), (given, said)
        refused += code == 2
    assert 0 < refused < 300


def test_results_folders_at_random_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    chance = random.Random(1)
    made = Made("colocate_sync", lag=0, iterations=4)
    for label, wanted in {"sync": made, "fast": replace(made, schedule="fully_async", lag=1)}.items():
        made_run = make_run(tmp_path, label, wanted, 0)
        keep_samples(made_run.path)
        done = made_run.path / "DONE"
        told = json.loads(done.read_text())
        told["files"] = {name: of for name, of in told["files"].items() if name.endswith(".parquet")}
        done.write_text(json.dumps(told))  # nothing tells on a change of others
    folder = tmp_path / "made_up"
    gate = {"baseline": "sync", "baseline_path": "", "samples": 1, "iterations": 1, "model": "tiny", "note": ""}
    pairs = [{"name": "fast", "path": "", "differing": []}]
    (folder / "gate.json").write_text(json.dumps(gate | {"failure": "", "made_from": {}, "pairs": pairs}))
    cells = tuple(ListedCell(name, name, (), (), "") for name in ("sync", "fast"))
    write_campaign(folder, Campaign(("schedule",), {}, (0,), cells, {}, ()))

    def reported() -> None:
        comparison = comparison_in(folder)
        document(comparison)
        markdown(comparison, [])

    def shown(run: Path) -> None:
        for chosen in ("worst=3", "row=a.jsonl:1", "held_out=last"):
            show([f"run={run}", chosen], tmp_path, Console(file=io.StringIO()))

    run = folder / "fast" / "seed=0"
    files = [
        path for path in sorted((*run.iterdir(), *folder.glob("*.json"))) if path.is_file() and path.stat().st_size
    ]
    refused = 0
    for number in range(200):
        file = files[number % len(files)]
        whole = file.read_bytes()
        file.write_bytes(spoilt(whole, chance))

        what = f"{file.name} {number}: {file.read_bytes()[:2000]!r}"
        refused += refused_in_a_line(reported, what)
        refused_in_a_line(partial(read_run, run), what)  # as make calibrate does; always, for it is asynchronous
        refused_in_a_line(partial(shown, run), what)
        file.write_bytes(whole)
    assert 0 < refused < 200


def test_tables_at_random_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    chance = random.Random(2)
    rows = tuple(TimingRow("decode", layers, 8, 64, 0, 0.01 * layers, 0.1) for layers in (1, 2))
    profile = tmp_path / "profile.json"
    write_profile(profile, DeviceProfile(compose_job([]).model, "a cpu", "cpu", 1 << 30, 1, {"torch": "2"}, rows))
    problems, lengths = tmp_path / "problems.jsonl", tmp_path / "lengths.txt"
    problems.write_text('{"prompt": "ab", "answer": "a"}\n{"prompt": "b", "answer": "b"}\n')
    lengths.write_text("12\n7\n190\n")
    table = EXPERIMENTS / "papers" / "verl_one_step_off.csv"
    kinds: list[tuple[Path, Callable[[Path], object], type[ValueError]]] = [
        (table, read_evidence, ConfigError),
        (table.with_suffix(".yaml"), lambda path: read_evidence(path.with_suffix(".csv")), ConfigError),
        (EXPERIMENTS / "cost" / "tiny_cpu.yaml", lambda path: compose_job([f"cost={path}"]), ConfigError),
        (profile, read_profile, ConfigError),
        (problems, lambda path: list(DataSource(str(path)).rows()), ValueError),
        (lengths, read_trace, ValueError),  # of both the settings that name them tell
    ]
    refused = 0
    for number in range(500):
        source, read, refusals = kinds[number % len(kinds)]
        path = tmp_path / f"spoilt{number}{source.suffix}"
        path.write_bytes(spoilt(source.read_bytes(), chance))
        refused += refused_in_a_line(
            partial(read, path), f"{source.name} {number}: {path.read_bytes()[:500]!r}", refusals
        )
    assert 0 < refused < 500
