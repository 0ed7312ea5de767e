"""Pages: every link leads somewhere, every page can be found, and what they name exists."""

import inspect
import re
from importlib.metadata import version
from itertools import starmap
from pathlib import Path

import pytest
import yaml

from harness.cli.completion import all_settings
from harness.config.compose import GROUPS, choices, compose_job
from harness.config.registries import REGISTRIES, find
from tests.support.project import PAGES, ROOT

CODE = re.compile(r"```.*?```|(?:^    .*\n)+|`[^`]+`", re.DOTALL | re.MULTILINE)
OF_READERS = {"k", "depth", "price", "process_ids", "py", "md", "jsonl"}
"""Ends of names: of options that a page has its reader write, and of files."""
FREE = ("algorithm.rejection.", "algorithm.options.parts.", "schedule.split.critic")
RECIPES = ROOT / "docs/clusters.md"


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made where Markdown is shown."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs/README.md").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


@pytest.fixture(scope="module")
def settings() -> set[str]:
    """Every setting, and what holds settings."""
    whole = {
        *all_settings(),
        *(f"{group}.{name}" for group in GROUPS for name in vars(getattr(compose_job([]), group))),
    }
    named = [(kind, name) for kind, names in REGISTRIES.items() if kind.startswith("algorithm.") for name in names]
    functions = [one for one in starmap(find, named) if inspect.isfunction(one)]
    options = {f"algorithm.options.{option}" for one in functions for option in inspect.signature(one).parameters}
    return whole | options | {".".join(one.split(".")[:end]) for one in whole for end in (1, 2)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_and_choice_that_a_page_names_exists(page: Path, settings: set[str]) -> None:
    code = " ".join(CODE.findall(page.read_text(encoding="utf-8")))
    groups = "|".join({setting.partition(".")[0] for setting in settings if "." in setting})
    named = re.findall(rf"(?<![\w./-])((?:{groups})(?:\.\w+)+)(?![\w(])", code)
    unknown = {name for name in named if name not in settings and not name.startswith(FREE)}
    assert {name for name in unknown if name.rpartition(".")[2] not in OF_READERS} == set()
    chosen = re.findall(rf"(?<![\w.])({'|'.join((*GROUPS, *map(str.upper, GROUPS)))})=([\w.-]+)(?=[\s`])", code)
    known = {(group, name) for group in GROUPS for name in choices(group)} | {("device", "cpu"), ("device", "gpu")}
    assert {(group.lower(), name) for group, name in chosen if not name.endswith((".yaml", "..."))} <= known


def test_pods_of_the_kuberay_recipe_run_one_image_and_share_the_results() -> None:
    text = (ROOT / "examples/kuberay/raycluster.yaml").read_text(encoding="utf-8")
    volume, cluster = yaml.safe_load_all(text)
    spec = cluster["spec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    (image,) = {container["image"] for pod in pods for container in pod["template"]["spec"]["containers"]}
    assert image and spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == version("ray") and f"ray[default]=={version('ray')}" in RECIPES.read_text(
        encoding="utf-8"
    )
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods:
        its = pod["template"]["spec"]
        (container,) = its["containers"]
        results = next(one["value"] for one in container["env"] if one["name"] == "CADENCE_RESULTS")
        (mounted,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == results)
        claims = {one["name"]: one.get("persistentVolumeClaim") for one in its["volumes"]}
        assert claims[mounted] == {"claimName": volume["metadata"]["name"]}
