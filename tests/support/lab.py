"""A folder of a user's own code: what docs/plugins.md and docs/tutorial.md write down."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tests.support.project import ROOT


def make_lab(folder: Path) -> Path:
    """Copies examples/my_lab, and writes every block of the pages that begins with the name of a file."""
    shutil.copytree(ROOT / "examples/my_lab", folder / "my_lab", ignore=shutil.ignore_patterns("__pycache__"))
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("plugins.md", "tutorial.md"))
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL)
    assert blocks
    for name, code in blocks:
        path = folder / name
        assert not path.exists() or path.read_text(encoding="utf-8") == code, f"{name} differs from examples/{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(code, encoding="utf-8")
    return folder


def forget_lab() -> None:
    """Its modules, of whichever folder they were imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
