"""Runs of a campaign, played: what becomes of one is told it, and imports nothing that takes time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MANIFEST: dict[str, Any] = {
    "experiment": "played", "cell": "played", "schedule": "fully_async", "model": "tiny", "engine": "torch",
    "backend": "real", "smoke": True, "started_at": "2026-01-01T00:00:00+00:00", "command": ["played"], "git": None,
    "python": "3", "packages": {},
    "hardware": {"cpu": "", "cores": 1, "memory_bytes": 0, "gpus": [], "platform": ""},
}  # fmt: skip


def play(run: str, what: str, log: str, campaign: int, server: int = -1) -> None:
    """run: its folder; log: where all runs write that they began, and what they started; campaign: the process that a
    signal goes to, if `what` names one."""
    folder = Path(run)
    with open(log, "a") as file:
        file.write(f"{folder.parent.name.partition('-')[0]} {folder.name[-1]}\n")
    if what == "fail":
        print("a first line", "the last words", sep="\n")
        sys.exit(3)
    if what in ("SIGINT", "SIGTERM", "SIGKILL", "deaf"):
        pids = [os.getpid()]
        if what == "deaf":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if what != "SIGKILL":
            pids.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid)
        with open(log, "a") as file:
            file.write("".join(f"pid {pid}\n" for pid in pids))
        os.kill(campaign, getattr(signal, what, signal.SIGTERM))
    if what not in ("done", "nothing"):
        time.sleep(600)
    if what == "done":
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(MANIFEST | {"seed": int(folder.name[-1])}))
        (folder / "DONE").write_text("2026-01-01T00:00:40+00:00\n")


def hang() -> None:
    """As a server's imports might."""
    time.sleep(600)


if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
