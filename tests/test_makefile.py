"""The front of the commands: what make passes on, in which environment, and that what is misspelt is refused."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.checks.plugins import LOGGERS_NEED
from harness.cli.commands import COMMANDS, as_options
from harness.cli.front import settings_of
from harness.config.registries import LOGGERS
from tests.support.project import PAGES, ROOT, python

TEXT = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
OWN = set(re.findall(r"^OWN := (.*)$", TEXT, re.MULTILINE)[0].split())
"""Goals that are no commands."""


def make(*words: str, folder: Path = ROOT, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    own = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "WHEELS")  # the tests may be run by make
    environment = {name: value for name, value in os.environ.items() if name not in own} | {"PATH": path}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with everything of ours, whose environment is the one that runs the tests."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("Makefile", "harness", "engines", "schedules", "cadence", "experiments", "pyproject.toml", ".ci"):
        (folder / name).symlink_to(ROOT / name)
    environment = folder / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (environment / "bin" / "python").chmod(0o755)
    for kind in ("", "-cuda"):
        (environment / f".installed{kind}").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bench", "SCHEDUL=half_step"), "bench does not take SCHEDUL=; it takes SCHEDULE= .*and settings"),
        (("bench", "SCHEDULES=all", "SEEDS=1"), "bench does not take SCHEDULES=; it takes SCHEDULE= .*JSON=1 and set"),
        (("compare", "SCHEDULE=half_step"), "compare does not take SCHEDULE=; it takes SCHEDULES= "),
        (("bench", "schedul=half_step"), "schedul is no setting; those of a job are .*schedule, "),
        (("bnech", "SEEDS=1"), "bnech is no command; use cadence"),
        (("test", "SEEDS=1"), "make test does not take SEEDS=; it takes ARGS="),
        (("test-engine", "SCHEDULE=a:b"), "make test-engine does not take SCHEDULE=; it takes ENGINE= ARGS="),
    ],
)
def test_a_word_that_is_misspelt_is_named_and_nothing_runs(words: tuple[str, ...], told: str, installed: Path) -> None:
    done = make(*words, folder=installed)
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(told, done.stderr), done.stderr
    assert not (installed / "results").exists()


def test_what_is_misspelt_is_refused_before_anything_is_installed(installed: Path) -> None:
    shutil.rmtree(installed / ".venv")
    done = make("bench", "SCHEDUL=half_step", f"PYTHON={shlex.quote(sys.executable)}", folder=installed)
    assert done.returncode == 2 and "bench does not take SCHEDUL=" in done.stderr
    assert not (installed / ".venv").exists()


def test_variables_and_settings_reach_the_command_as_they_were_typed(installed: Path) -> None:
    words = ["DRY=1", "MODEL=it's my model", "schedule.max_staleness=2"]
    free = """'task.data=a "b".jsonl' iterations=3"""
    ran = shlex.split(make("-n", "bench", *words, f"ARGS={free}", folder=installed).stdout)
    assert ran[:5] == ["CADENCE_CALLED_BY_MAKE=1", ".venv/bin/python", "-m", "harness", "bench"]
    assert sorted(ran[5:-2]) == sorted(words) and ran[-2:] == ['task.data=a "b".jsonl', "iterations=3"]
    done = make("bench", "DRY=1", "SEEDS=2", "ARGS=iterations=3 backend=virtual cost=tiny_cpu", folder=installed)
    assert done.stdout.count("would be run") == 2 and "\niterations: 3\n" in done.stdout, done.stderr


def test_variables_are_options_and_a_switch_with_0_is_off() -> None:
    given = ["SEEDS=3", "DEVICES=", "FORCE=0", "DRY=1", "schedule.k=2"]
    assert settings_of("bench", given) == ["seeds=3", "dry=true", "schedule.k=2"]
    assert settings_of("gate-gpu", ["FORCE=yes"]) == ["force=true"]
    assert settings_of("calibrate", ["RUN=a b", "NAME=mine"]) == ["run=a", "run=b", "name=mine"]
    assert settings_of("diff", ["BEFORE=a", "AFTER=b c"]) == ["before=a", "after=b c"]


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (("bench",), ".venv/"),
        (("bench", "ENGINE=vllm"), ".venv-vllm/"),
        (("compare", "ENGINE=sglang"), ".venv-sglang/"),
        (("plan", "ENGINE=vllm"), ".venv/"),
        (("test-engine", "ENGINE=vllm"), ".venv-vllm/"),
    ],
)
def test_a_run_has_the_environment_of_its_engine(words: tuple[str, ...], needs: str) -> None:
    done = make("-n", "-B", *words).stdout
    assert set(re.findall(r"touch (\.venv[\w-]*/)", done)) == {needs} | ({".venv/"} if "sglang" in needs else set())
    runs_in = ".venv/" if "sglang" in needs else needs
    assert f"{runs_in}bin/python -m {'pytest' if words[0] == 'test-engine' else 'harness'} " in done


def test_help_names_every_goal_and_needs_no_environment(installed: Path) -> None:
    shutil.rmtree(installed / ".venv")
    told = make(f"PYTHON={shlex.quote(sys.executable)} -S", folder=installed).stdout  # nothing but Python's own modules
    goals = {*COMMANDS, *OWN} - {"help", "lint", "tests"}
    assert {goal for goal in goals if not re.search(rf"(?<![\w-]){goal}(?![\w-])", told)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_goals_and_variables_that_a_page_types_are_taken(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    typed = re.findall(r"(?:^    (?:[A-Z_]+=\S+ )*|`)make ([a-z][\w-]*)((?: [A-Z]+=[^\s`]*)*)", text, re.MULTILINE)
    for goal, variables in typed:
        if goal in COMMANDS:
            as_options(goal, [word for word in variables.split() if not word.startswith(("ARGS=", "WHEELS="))])
        else:
            assert goal in OWN, goal


def test_a_python_that_is_not_supported_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python3.13"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.13.1\nexit 1\n')
    python.chmod(0o755)
    done = make("bench", f"PYTHON={python}", folder=tmp_path)
    assert done.returncode == 2 and "is Python 3.13.1, and Cadence needs Python 3.11 or 3.12" in done.stdout
    assert not (tmp_path / ".venv").exists()


FILES = {path.name: path for path in (ROOT / ".ci").glob("constraints*.txt")}
DRIVER = Path("/proc/driver/nvidia/version")


def pinned(name: str) -> dict[str, str]:
    """Version by package, of the file and of those that it names."""
    found: dict[str, str] = {}
    for line in FILES[name].read_text().splitlines():
        if line.startswith("-c "):
            found |= pinned(line.removeprefix("-c "))
        elif not line.startswith("#"):
            exact = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert exact is not None, f"{name}: {line} is no exact version"
            package = canonicalize_name(exact[1])
            assert package not in found, f"{name}: {package} stands there twice"
            found[package] = exact[2]
    return found


def required(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [one for extra in extras for one in project["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(one).name) for one in listed}


def installs(*settings: str, path: str = os.environ["PATH"]) -> str:
    done = make("-n", "-B", "setup", "setup-vllm", "setup-sglang", *settings, path=path)
    return done.stdout + done.stderr


def with_nvidia_smi(folder: Path, *, exit_code: int) -> str:
    """A PATH on which it is, and ends with `exit_code`."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nexit {exit_code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("name", FILES)
def test_every_version_is_exact_and_says_nothing_of_where_it_comes_from(name: str) -> None:
    assert pinned(name)
    assert "://" not in FILES[name].read_text()


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_pin_is_known_by_its_digest_but_for_torchs(name: str, tmp_path: Path) -> None:
    python(".ci/pins.py", FILES[name], tmp_path).check_returncode()
    assert set((tmp_path / "torch.txt").read_text().split()) <= {
        f"{package}=={version}"
        for package, version in pinned(name).items()
        if package in ("torch", "torchvision", "torchaudio")
    }
    lines = [line.split() for kind in ("build", "pins") for line in (tmp_path / f"{kind}.txt").read_text().splitlines()]
    assert lines and all(
        digests and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in digests)
        for _, *digests in lines
    )


def test_digests_are_of_pins_alone_and_say_nothing_of_where_files_come_from() -> None:
    text = (ROOT / ".ci" / "hashes.txt").read_text()
    known = {line for line in text.splitlines() if not line.startswith((" ", "#"))}
    assert known <= {line for path in FILES.values() for line in path.read_text().splitlines()}
    assert "://" not in text


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-cuda.txt"])
def test_whatever_pyproject_asks_for_is_pinned(name: str) -> None:
    assert required("redis", "gym", "dev") <= pinned(name).keys()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_extra_has_the_version_that_make_installs(engine: str) -> None:
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][engine]
    assert extra == f"{engine}=={pinned(f'constraints-{engine}-cuda.txt')[engine]}"


@pytest.mark.parametrize("name", ["constraints-vllm.txt", "constraints-vllm-cuda.txt"])
def test_vllms_environment_has_what_the_harness_imports(name: str) -> None:
    assert required() <= pinned(name).keys()


@pytest.mark.parametrize(
    ("cpu", "cuda", "package"),
    [
        ("constraints.txt", "constraints-cuda.txt", "torch"),
        ("constraints-vllm.txt", "constraints-vllm-cuda.txt", "vllm"),
        ("constraints-sglang.txt", "constraints-sglang-cuda.txt", "sglang"),
    ],
)
def test_a_machine_with_gpus_has_the_same_versions_and_cuda(cpu: str, cuda: str, package: str) -> None:
    without, with_cuda = pinned(cpu), pinned(cuda)
    assert with_cuda[package] == without.get(f"{package}-cpu", without.get(package))
    for shared in ("torch", "transformers", "tokenizers", "safetensors"):
        assert with_cuda.get(shared) == without.get(shared)
    assert {"nvidia-nccl-cu13", "nvidia-cublas", "triton"} <= with_cuda.keys()


def test_wheels_says_which_file_is_installed_from() -> None:
    cpu, cuda = installs("WHEELS=cpu"), installs("WHEELS=cuda")
    for kind in ("", "-vllm", "-sglang"):
        assert f".ci/constraints{kind}.txt" in cpu and f".ci/constraints{kind}-cuda.txt" in cuda
    assert "-cuda" not in cpu
    assert "WHEELS=gpu is neither cpu nor cuda" in installs("WHEELS=gpu")


def after_torch(folder: Path, name: str, *, built_for: str | None) -> tuple[str, str]:
    """What is said, and the pins left to install, once an index gave that build."""
    version = folder / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    version.parent.mkdir(parents=True)
    version.write_text(f"__version__ = '2.13.0'\ncuda = {built_for!r}\n")
    (folder / "pins.txt").touch()
    done = python(".ci/pins.py", "--built", FILES[name], folder)
    return done.stdout + done.stderr, (folder / "pins.txt").read_text()


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-vllm.txt", "constraints-sglang.txt"])
def test_cudas_libraries_come_with_a_build_for_cuda_also_where_no_gpu_is(name: str, tmp_path: Path) -> None:
    said, pins = after_torch(tmp_path, name, built_for="13.0")
    assert "is a build for CUDA 13.0" in said
    added = {canonicalize_name(line.partition("==")[0]) for line in pins.splitlines()}
    assert {"nvidia-nccl-cu13", "nvidia-cublas", "nvidia-cudnn-cu13", "triton"} <= added | pinned(name).keys()
    assert not added & pinned(name).keys()


@pytest.mark.parametrize(("name", "built_for"), [("constraints.txt", None), ("constraints-cuda.txt", "13.0")])
def test_nothing_is_added_for_the_build_that_a_list_is_for(name: str, built_for: str | None, tmp_path: Path) -> None:
    assert after_torch(tmp_path, name, built_for=built_for) == ("", "")


def test_a_build_for_cpus_is_refused_where_gpus_are(tmp_path: Path) -> None:
    said, _ = after_torch(tmp_path, "constraints-cuda.txt", built_for=None)
    assert "is a build for CPUs: make clean" in said


def test_a_machine_with_nvidias_driver_gets_cuda(tmp_path: Path) -> None:
    assert ".ci/constraints-vllm-cuda.txt" in installs(path=with_nvidia_smi(tmp_path, exit_code=0))


@pytest.mark.skipif(DRIVER.exists(), reason="this machine has NVIDIA's driver")
def test_nvidia_smi_without_a_driver_is_no_gpu(tmp_path: Path) -> None:
    assert "-cuda" not in installs(path=with_nvidia_smi(tmp_path, exit_code=9))


def test_the_image_is_made_of_what_there_is() -> None:
    """Where no daemon of Docker runs: each line of the Dockerfile against what it names."""
    lines = dict(line.split(" ", 1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = re.fullmatch(r"python:(3\.\d+)-slim", lines["FROM"])
    assert python is not None and SpecifierSet(project["requires-python"]).contains(python[1])
    assert json.loads(lines["ENTRYPOINT"])[0] in project["scripts"]
    folder, (goal, argument) = Path(lines["WORKDIR"]), lines["RUN"].removeprefix("make ").split()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{goal}:", makefile, re.MULTILINE) and argument == f"WHEELS=${lines['ARG'].partition('=')[0]}"
    venv = re.search(r"^VENV := (.*)$", makefile, re.MULTILINE)
    path, results = lines["ENV"].split()
    assert venv is not None and path == f"PATH={folder / venv[1] / 'bin'}:$PATH"
    assert results == f"CADENCE_RESULTS={lines['VOLUME']}"


def test_a_logger_has_an_extra_of_its_name_with_the_package_that_it_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: Requirement(extras[name][0]).name for name in LOGGERS_NEED} == LOGGERS_NEED
    assert {*LOGGERS_NEED, "mlflow"} == {*LOGGERS}
