"""The repository installs as a wheel, without `-e`: settings come along, and commands run from where it is."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.project import ROOT, python


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds; built from a copy, since a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if name.startswith(("cadence/", "harness/", "schedules/", "engines/", "experiments/")) or "/" not in name:
            if (ROOT / name).is_file():
                (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / "source" / name)
    build = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", ".")
    done = python(*build, "-w", folder, cwd=folder / "source")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(installed: Path, folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "CADENCE_RESULTS": str(folder / "results")}
    done = python(*arguments, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_settings_and_no_tests(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in (root / "experiments").rglob("*") if path.is_file()}

    assert files(installed) == files(ROOT)
    assert (installed / "harness/report/page/page.html").is_file() and not (installed / "tests").exists()


@pytest.mark.slow
def test_commands_run_from_an_installed_copy(installed: Path, tmp_path: Path) -> None:
    whose = run(
        installed, tmp_path, "-c", "import harness, schedules; print(harness.__path__[0], schedules.__path__[0])"
    )
    assert whose.split() == [str(installed / "harness"), str(installed / "schedules")]
    listed = run(installed, tmp_path, "-m", "harness", "list")
    assert "fully_async" in listed.split() and "--paper" in listed
    small = ("cost=tiny_cpu", "iterations=3", "cluster.devices=4", "algorithm.batch_groups=4")
    ran = run(
        installed, tmp_path, "-m", "harness", "bench", "backend=virtual", "algorithm.micro_batch_groups=1", *small
    )
    assert "96 trained" in ran and list(tmp_path.glob("results/bench/*/seed=0/DONE"))
