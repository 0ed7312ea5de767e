"""A folder of a user's own code: examples/my_lab, whose schedule docs/tutorial.md writes down."""

import re
import shutil
from pathlib import Path

from tests.support.project import ROOT


def make_lab(folder: Path) -> Path:
    """Copies examples/my_lab, and holds what the tutorial shows to it."""
    shutil.copytree(ROOT / "examples/my_lab", folder / "my_lab", ignore=shutil.ignore_patterns("__pycache__"))
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    ((name, code),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", tutorial, re.DOTALL)
    assert (folder / name).read_text(encoding="utf-8") == code, f"{name} differs from examples/{name}"
    return folder
