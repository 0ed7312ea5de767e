"""Who may import whom (docs/architecture.md), held against every file; and that registries and YAML files agree."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from engines import ENGINES
from harness.config.compose import GROUPS
from harness.tasks import TASKS
from schedules import SCHEDULES
from tests.support.project import ROOT

PACKAGES = ("harness", "schedules", "engines")
FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
LAYERS = re.findall(r"^\| `([\w/.]+?)/?` \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
"""Folders from top to bottom, as documented."""
MODULES = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in FILES}


def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


def imports(file: str) -> set[str]:
    """Full names of what a file imports, anywhere in it. `from a import b` gives both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: line {node.lineno}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def layer_of(module: str) -> str:
    """The row of the table that a module belongs to: its own, or the nearest folder above it that has one."""
    file = MODULES[module]
    return next(part for part in [file, *map(str, PurePosixPath(file).parents)] if part in LAYERS)


def of_package(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(name == p or name.startswith(f"{p}.") for p in packages)}


def texts(file: str) -> Iterator[str]:
    """String literals that are no docstrings: a string that stands alone as a statement documents something."""
    module = tree(file)
    alone = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def in_package(*starts: str) -> list[str]:
    return [file for file in FILES if file.startswith(starts)]


def test_the_files_were_found() -> None:
    assert {"harness/cli/main.py", "schedules/protocol.py", "engines/torch/fsdp.py"} <= set(FILES)
    assert "harness.config" in imports("engines/torch/model.py") and "schedules.base.Schedule" in imports(
        "schedules/fully_async.py"
    )


@pytest.mark.parametrize("file", in_package("schedules/"))
def test_a_schedule_imports_the_standard_library_and_schedules_only(file: str) -> None:
    tops = {name.partition(".")[0] for name in imports(file)}
    assert tops <= {"schedules", "__future__", *sys.stdlib_module_names}


@pytest.mark.parametrize("file", in_package("engines/"))
def test_an_engine_knows_protocols_config_and_pure_functions_only(file: str) -> None:
    found = imports(file)
    assert not of_package(found, "schedules", "ray", "hydra", "omegaconf", "mlflow")
    allowed = of_package(
        found,
        "harness.protocols",
        "harness.config",
        "harness.rl",
        "harness.cost_model",
        "harness.transfer_queue.Ragged",
    )
    assert of_package(found, "harness") - {"harness.transfer_queue"} == allowed


@pytest.mark.parametrize(
    "file", [file for file in FILES if PurePosixPath(file).name not in ("__init__.py", "__main__.py")]
)
def test_imports_point_downwards_in_the_table_of_folders(file: str) -> None:
    own = LAYERS.index(layer_of(file.removesuffix(".py").replace("/", ".")))
    upwards = [name for name in imports(file) if name in MODULES and LAYERS.index(layer_of(name)) < own]
    assert not upwards


def test_the_table_of_folders_names_every_folder_that_has_code() -> None:
    beside = {"harness/transfer_queue", "harness/studies", "harness"}
    folders = {PurePosixPath(file).parent.as_posix() for file in FILES} - beside
    assert {folder for folder in folders if not folder.startswith("harness/transfer_queue")} <= set(LAYERS)


MAY_NAME_ONE = ("cli", "driver", "studies", "comparison/running", "cost_model/profile", "config/checks")


@pytest.mark.parametrize(
    "file",
    [
        file
        for file in in_package("harness/")
        if not file.startswith(tuple(f"harness/{name}/" for name in MAY_NAME_ONE))
    ],
)
def test_what_schedules_share_names_no_schedule(file: str) -> None:
    assert not [text for text in texts(file) for schedule in SCHEDULES if schedule in text]


@pytest.mark.parametrize("file", in_package("harness/comparison/statistics/"))
def test_statistics_are_functions_of_arrays(file: str) -> None:
    found = imports(file)
    assert of_package(found, *PACKAGES) == of_package(found, "harness.comparison.statistics")
    assert {name.partition(".")[0] for name in found} <= {
        "harness",
        "numpy",
        "scipy",
        "__future__",
        *sys.stdlib_module_names,
    }


@pytest.mark.parametrize("file", list(FILES))
def test_only_files_that_say_so_import_ray(file: str) -> None:
    may = Path(file).name.startswith("ray_")
    assert may or not of_package(imports(file), "ray")


@pytest.mark.parametrize("file", in_package("harness/rl/", "harness/weight_sync/"))
def test_rl_and_weight_sync_run_where_only_torch_is(file: str) -> None:
    assert not of_package(imports(file), "ray", "hydra", "omegaconf", "mlflow", "pyarrow", "pandas")


def choices(group: str) -> set[str]:
    return {path.stem for path in (ROOT / "experiments" / group).glob("*.yaml")}


def test_every_schedule_engine_and_task_has_a_file_of_settings_and_the_other_way_round() -> None:
    assert choices("schedule") == set(SCHEDULES)
    assert choices("engine") == set(ENGINES)
    assert choices("task") == set(TASKS)


CHOICES = [file for group in GROUPS for file in sorted((ROOT / "experiments" / group).glob("*.yaml"))]


@pytest.mark.parametrize("file", CHOICES, ids=lambda path: path.stem)
def test_a_file_of_settings_begins_with_what_it_is_and_is_named_as_it_says(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "make list shows the first line"
    assert f"name: {file.stem}" in lines


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_one_file_of_its_name(name: str) -> None:
    assert SCHEDULES[name].__module__ == f"schedules.{name}"
    assert SCHEDULES[name].__doc__ and len(FILES[f"schedules/{name}.py"].read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", ENGINES.values())
def test_an_engine_is_named_by_module_and_class_that_exist(path: str) -> None:
    module, _, name = path.partition(":")
    file = f"{module.replace('.', '/')}.py"
    assert name in [node.name for node in tree(file).body if isinstance(node, ast.ClassDef)]
