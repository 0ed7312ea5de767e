"""The files of the site: pages, and every file that they link to, each in its place of the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def linked(page: Path) -> list[Path]:
    """Files and folders of the repository that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets if not target.startswith(("http", "mailto:"))]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
    pages |= set((ROOT / "docs").glob("*.md"))
    held: set[Path] = set()
    while pages:
        page = pages.pop()
        held.add(page)
        found = {path for path in linked(page) if path.is_file()} - held
        pages |= {path for path in found if path.suffix == ".md"}
        held |= {path for path in found if path.suffix != ".md"}
    of_theme = [file for file in files if not Path(str(file.abs_src_path)).is_relative_to(config.docs_dir)]
    ours = (File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in sorted(held))
    return Files([*of_theme, *ours])
