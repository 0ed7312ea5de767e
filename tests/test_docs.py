"""Pages: every link leads somewhere, and every page can be found."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.support.project import PAGES, ROOT

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
