"""Where the repository is, and its Python."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "harness/transfer_queue/README.md"]


def python(
    *arguments: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout_s: float = 840
) -> subprocess.CompletedProcess[str]:
    """What the tests' Python says to these arguments. env: all of its variables; None is those of this process."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
