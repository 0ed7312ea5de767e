"""Who may import whom (docs/architecture.md), held against every file; and that registries and YAML files agree."""

import ast
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import PurePosixPath

from engines import EMBEDDED
from harness.config.compose import GROUPS
from harness.config.registries import ENGINES, SCHEDULES, TASKS, TRANSPORTS, find
from tests.support.project import ROOT

PACKAGES = ("cadence", "harness", "schedules", "engines")
FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
FLOORS = {
    folder: int(number)
    for number, folders in re.findall(
        r"^\| (\d+) \| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
    )
    for folder in re.findall(r"(?:^|· )`([\w/.]+?)/?` ", folders)
}
"""Of each folder the number of its row: 1 is the lowest."""
INSIDE = {
    path.parent.relative_to(ROOT).as_posix(): [
        f"{path.parent.relative_to(ROOT).as_posix()}/{name}".removesuffix("/.")
        for name in re.findall(r"^\| `([\w/.]+?)/?` \|", path.read_text(encoding="utf-8"), re.MULTILINE)
        if (path.parent / name).exists()
    ]
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("README.md"))
}
"""Of each folder that has a README, what is inside of it from top to bottom; `.` is all the rest."""
MODULES = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in FILES}


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


@cache
def imports(file: str) -> frozenset[str]:
    """Full names of what a file imports, anywhere in it. `from a import b` gives both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: line {node.lineno}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def loaded_by(file: str) -> set[str]:
    """Modules of ours that the import of a file imports."""
    found: set[str] = set()
    statements: list[ast.stmt] = list(tree(file).body)
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full if full <= set(MODULES) else {*full, str(node.module)}
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING"):
            statements += node.body + node.orelse
    return found & set(MODULES)


def nearest(file: str, places: Container[str]) -> str:
    """The file itself, or the nearest folder above it, whichever is one of these places."""
    return next(part for part in [file, *map(str, PurePosixPath(file).parents)] if part in places)


def of_package(names: Iterable[str], *packages: str) -> set[str]:
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


def offenders(files: Iterable[str], rule: Callable[[str], set[str]]) -> dict[str, set[str]]:
    """Files against a rule, with what it found in each."""
    return {file: found for file in files if (found := rule(file))}


def foreign(folder: str, *allowed: str) -> dict[str, set[str]]:
    """What files of a folder import beside the standard library and these packages."""
    known = (*allowed, "__future__", *sys.stdlib_module_names)
    above = {name.rpartition(".")[0] for name in allowed}
    return offenders(in_package(folder), lambda file: set(imports(file)) - of_package(imports(file), *known) - above)


def test_the_files_were_found() -> None:
    assert {"harness/cli/main.py", "schedules/protocol.py", "engines/torch/fsdp.py"} <= set(FILES)
    assert "harness.config" in imports("engines/torch/model.py") and "schedules.base.Schedule" in imports(
        "schedules/fully_async.py"
    )


def test_schedules_engines_statistics_and_losses_import_what_they_may() -> None:
    assert foreign("schedules/", "schedules") == {}
    assert foreign("harness/comparison/statistics.py", "numpy", "scipy") == {}
    others = [file for file in FILES if not PurePosixPath(file).name.startswith("ray_")]
    assert offenders(others, lambda file: of_package(imports(file), "ray")) == {}
    beyond = ("ray", "hydra", "omegaconf", "mlflow", "pyarrow", "pandas")
    files = in_package("harness/rl/", "harness/weight_sync/")
    assert offenders(files, lambda file: of_package(imports(file), *beyond)) == {}


def test_an_engine_knows_protocols_config_and_pure_functions_only() -> None:
    known = (
        "harness.protocols",
        "harness.config",
        "harness.rl",
        "harness.cost_model",
        "harness.rpc.children",
        "harness.rpc.process_id",
        "harness.transfer_queue.Ragged",
    )

    def unknown(file: str) -> set[str]:
        found = imports(file)
        beyond = of_package(found, "harness") - of_package(found, *known) - {"harness.transfer_queue"}
        return beyond | of_package(found, "schedules", "ray", "hydra", "omegaconf", "mlflow")

    assert offenders(in_package("engines/"), unknown) == {}


CODE = [file for file in FILES if PurePosixPath(file).name not in ("__init__.py", "__main__.py")]


def imported_files(file: str) -> set[str]:
    return {MODULES[name] for name in imports(file) if name in MODULES}


def test_a_folder_imports_lower_floors_only() -> None:
    def not_below(file: str) -> set[str]:
        own = nearest(file, FLOORS)
        others = {of for of in imported_files(file) if of in CODE and nearest(of, FLOORS) != own}
        return {of for of in others if FLOORS[nearest(of, FLOORS)] >= FLOORS[own]}

    assert offenders(CODE, not_below) == {}


def test_imports_inside_of_a_folder_point_downwards_in_the_table_of_its_readme() -> None:
    for folder, rows in INSIDE.items():
        within = [file for file in CODE if file.startswith(f"{folder}/")]
        assert {nearest(file, rows) for file in within} == set(rows), f"{folder}: a row for each"

        def upwards(file: str, folder: str = folder, rows: list[str] = rows) -> set[str]:
            found = {of for of in imported_files(file) if of.startswith(f"{folder}/") and of != f"{folder}/__init__.py"}
            return {of for of in found if rows.index(nearest(of, rows)) < rows.index(nearest(file, rows))}

        assert offenders(within, upwards) == {}


def test_no_folders_import_each_other_in_a_circle() -> None:
    """A row of a README's table counts as a folder. The error names the circle."""
    places = {PurePosixPath(file).parent.as_posix() for file in FILES} | {
        row for rows in INSIDE.values() for row in rows
    }
    places |= set(FLOORS)
    above: dict[str, set[str]] = {}
    for file in CODE:
        own = nearest(file, places)
        below = {nearest(of, places) for of in imported_files(file) if of in CODE}
        above.setdefault(own, set()).update(below - {own})
    TopologicalSorter(above).prepare()


def test_no_file_is_loaded_for_its_own_loading() -> None:
    """Imports in functions and for type checkers only are not followed. The error names the circle."""
    TopologicalSorter({module: loaded_by(file) for module, file in MODULES.items()}).prepare()


def test_every_folder_has_a_floor_and_there_are_few() -> None:
    assert {nearest(file, {*FLOORS, "."}) for file in CODE} == set(FLOORS)
    assert len(set(FLOORS.values())) <= 20


REGISTRY = "harness/config/registries.py"
"""Where names stand beside import paths: of schedules and engines, too."""

MAY_NAME_ONE = (
    "cli",
    "driver",
    "studies",
    "acceptance",
    "campaigns",
    "planner",
    "prediction",
    "calibration/profile",
    "checks",
)


def test_names_stand_in_tables_and_nowhere_else() -> None:
    may = tuple(f"harness/{name}/" for name in MAY_NAME_ONE)
    shared = [file for file in in_package("harness/") if not file.startswith(may) and file != REGISTRY]
    assert offenders(shared, lambda file: {text for text in texts(file) for name in SCHEDULES if name in text}) == {}
    # All else asks what it says of itself, so that one more is its file and a line.
    others = [file for file in FILES if not file.startswith("schedules/") and file != REGISTRY]
    assert offenders(others, lambda file: set(texts(file)) & set(TRANSPORTS)) == {}
    # But in imports of the embedded engine, whose model and training world it has; its name is a package's, too.
    named = [name for name in ENGINES if name != EMBEDDED]
    others, inside = [f"engines.{name}" for name in named], [f"engines.{name}" for name in ENGINES]
    chosen = {f"engine={EMBEDDED}", f"engine.name={EMBEDDED}"}

    def names(file: str) -> set[str]:
        return {text for text in texts(file) if text in chosen or any(name in text for name in named)}

    assert offenders([file for file in in_package("harness/") if file != REGISTRY], names) == {}
    assert offenders(in_package("harness/config/"), lambda file: of_package(imports(file), *inside)) == {}
    assert offenders(in_package("harness/"), lambda file: of_package(imports(file), *others)) == {}


PRESETS = {"periodic_publication": "fully_async", "pipeline_k": "fully_async", "colocate_async": "partial_rollout_sync"}
"""Files of settings that are a schedule's under a name that others give it."""


def choices(group: str) -> set[str]:
    return {path.stem for path in (ROOT / "experiments" / group).glob("*.yaml")}


def test_every_schedule_engine_and_task_has_a_file_of_settings_and_the_other_way_round() -> None:
    assert choices("schedule") - PRESETS.keys() == set(SCHEDULES)
    assert choices("engine") == set(ENGINES)
    assert choices("task") == set(TASKS)


def test_a_file_of_settings_begins_with_what_it_is_and_is_named_as_it_says() -> None:
    for group in GROUPS:
        for file in (ROOT / "experiments" / group).glob("*.yaml"):
            lines = file.read_text(encoding="utf-8").splitlines()
            assert lines[0].startswith("# "), f"{file}: `cadence list` shows the first line"
            named = f"  - {PRESETS[file.stem]}" if file.stem in PRESETS else f"name: {file.stem}"
            assert named in lines, file


def test_a_schedule_is_one_file_of_its_name() -> None:
    for name in SCHEDULES:
        schedule = find("schedule", name)
        assert schedule.__module__ == f"schedules.{name}"
        assert schedule.__doc__ and len(FILES[f"schedules/{name}.py"].read_text().splitlines()) <= 120, name


def test_an_engine_is_named_by_module_and_class_that_exist() -> None:
    for path in ENGINES.values():
        module, _, name = path.partition(":")
        file = f"{module.replace('.', '/')}.py"
        assert name in [node.name for node in tree(file).body if isinstance(node, ast.ClassDef)], path


NO_SUBJECT = frozenset(
    "about across after against among and around as at because before behind below beneath beside between beyond but by"
    " during except for from he her his i if in inside into it its like my nor of off on onto or our out over per she"
    " since so than that their them these they this those through to toward under unless until upon us we what"
    " whatever when where whereas wherever which while who whoever whom whose with within without yet you your".split()
)
"""Prepositions, pronouns, conjunctions: a docstring begins with its subject or a verb."""
Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | Named


def public_names(node: ast.Module | ast.ClassDef) -> dict[str, Named]:
    """What a module or a class defines for others, without setters and overloads of what it has defined."""
    return {
        inner.name: inner
        for inner in node.body
        if isinstance(inner, Named)
        and not inner.name.startswith("_")
        and not any(ast.unparse(line).endswith((".setter", "overload")) for line in inner.decorator_list)
    }


@cache
def classes() -> dict[str, tuple[ast.ClassDef, ...]]:
    found = [node for file in FILES for node in tree(file).body if isinstance(node, ast.ClassDef)]
    return {node.name: tuple(other for other in found if other.name == node.name) for node in found}


@cache
def first_of_unions() -> dict[str, str]:
    """Of classes that a union `A | B` names behind its first, that one."""
    assigned = [node.value for file in FILES for node in tree(file).body if isinstance(node, ast.Assign)]
    unions = [ast.unparse(value).split(" | ") for value in assigned if isinstance(value, ast.BinOp)]
    return {other: first for first, *others in unions for other in others}


def bases(node: ast.ClassDef) -> set[ast.ClassDef]:
    """Classes it extends, at any depth, protocols of which it has all methods, and the first of a union with it."""
    names = {re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in node.bases}
    names |= {first_of_unions()[node.name]} if node.name in first_of_unions() else set()
    found = {base for name in names for base in classes().get(name, ()) if base is not node}
    found |= {further for base in found for further in bases(base)}
    has = {name for base in (node, *found) for name in public_names(base)}
    protocols = [one for every in classes().values() for one in every if "Protocol" in map(ast.unparse, one.bases)]
    return found | {one for one in protocols if one is not node and (methods := called(one)) and has >= methods}


def called(node: ast.ClassDef) -> set[str]:
    """Names of its public methods that are no properties: what implements a protocol may have attributes for those."""
    return {
        name for name, inner in public_names(node).items() if "property" not in map(ast.unparse, inner.decorator_list)
    }


def undocumented(file: str) -> set[str]:
    def inside(node: Documented, name: str) -> Iterator[str]:
        if not ast.get_docstring(node):
            yield name
        above = (
            {method for base in bases(node) for method in public_names(base)} if isinstance(node, ast.ClassDef) else ()
        )
        for inner_name, inner in public_names(node).items() if isinstance(node, ast.Module | ast.ClassDef) else ():
            if inner_name not in above:
                yield from inside(inner, f"{name}.{inner_name}".removeprefix("."))

    return set(inside(tree(file), "")) if tree(file).body else set()


def without_subject(file: str) -> set[str]:
    """Docstrings that begin so, those below assignments too."""
    alone = [node.value for node in ast.walk(tree(file)) if isinstance(node, ast.Expr)]
    texts = [node for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    starts = [(text.lineno, re.match(r"\W*([\w-]+)", str(text.value))) for text in texts]
    return {f"line {line}: {start[1]}" for line, start in starts if start and start[1].lower() in NO_SUBJECT}


def test_what_is_public_has_a_docstring_that_begins_with_subject_or_verb() -> None:
    """Methods that a base or a protocol documents need none of their own."""
    assert offenders(FILES, undocumented) == {}
    assert offenders(FILES, without_subject) == {}


MOST_ATTRIBUTES, MOST_PARAMETERS = 12, 10


def attributes_of(own: ast.ClassDef) -> set[str]:
    """Names that its methods assign to, of `self`."""
    return {
        node.attr
        for node in ast.walk(own)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def constructor_parameters(own: ast.ClassDef) -> int:
    found = [node.args for node in own.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return sum(len(args.args) + len(args.kwonlyargs) - 1 for args in found)


def test_a_class_with_many_attributes_or_parameters_says_why() -> None:
    """Fields of a record are none of them: they are what it is."""

    def large(file: str) -> set[str]:
        return {
            own.name
            for own in ast.walk(tree(file))
            if isinstance(own, ast.ClassDef)
            and (len(attributes_of(own)) > MOST_ATTRIBUTES or constructor_parameters(own) > MOST_PARAMETERS)
            and not re.search("attributes|parameters", ast.get_docstring(own) or "")
        }

    assert offenders(FILES, large) == {}


def test_tests_share_by_support_not_by_each_other() -> None:
    """Only the suite that holds broken engines against the contract runs the contract's own tests."""
    others = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "contract"]
    shared = re.compile(r"^from tests[\w.]*\.(?:test_\w+|conftest) import", re.MULTILINE)
    assert [str(path) for path in others if shared.search(path.read_text(encoding="utf-8"))] == []
