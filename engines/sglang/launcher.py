"""Runs an SGLang server in SGLang's own environment, and ends it with whoever started it.

A script for that environment's interpreter: `python -P launcher.py SERVER_FLAGS`; -P, because beside this file
lies one of the name of the package. It needs nothing else of this repository but cpu.py. The server lives as
long as somebody holds the other end of its standard input. SGLang spawns processes that import this file again: so what
is prepared here is prepared in all of them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path


def die_with_standard_input() -> None:
    """Kill the process group, which is that of all of the server's processes, when nobody is left who could write."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="standard-input", daemon=True).start()


def prepare_for_cpu() -> None:
    path = Path(__file__).with_name("cpu.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare()


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    prepare_for_cpu()

if __name__ == "__main__":
    die_with_standard_input()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    # Not on our own command line, which everybody can read.
    token = os.environ.pop("CADENCE_SGLANG_TOKEN")
    launch_server(prepare_server_args([*sys.argv[1:], f"--api-key={token}"]))
