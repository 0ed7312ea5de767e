"""Where the repository is."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "harness/transfer_queue/README.md"]
