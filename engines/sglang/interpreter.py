"""Where SGLang comes from: an environment of its own, or servers that somebody else runs. Loads no torch.

CADENCE_SGLANG_URL names such servers, with commas in between: engine number n uses the n-th. CADENCE_SGLANG_TOKEN is
what they want to be shown. CADENCE_SGLANG_PYTHON is an interpreter that has SGLang, where it is not the one that
`make setup-sglang` made.
"""

from __future__ import annotations

import os
from pathlib import Path

URL, TOKEN, PYTHON = "CADENCE_SGLANG_URL", "CADENCE_SGLANG_TOKEN", "CADENCE_SGLANG_PYTHON"
_ROOT = Path(__file__).resolve().parents[2]


def servers() -> list[str]:
    """URLs of servers that somebody else runs."""
    return [url.strip().rstrip("/") for url in os.environ.get(URL, "").split(",") if url.strip()]


def interpreter() -> Path:
    """Raises FileNotFoundError, with the fix, where there is none."""
    path = Path(os.environ.get(PYTHON) or _ROOT / ".venv-sglang" / "bin" / "python")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: run `make setup-sglang`, or name an interpreter by {PYTHON}")
    return path
