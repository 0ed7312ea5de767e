"""`python -m harness <command> [options] [settings]`, or `cadence <command> ...`; the Makefile is thin over this."""

import os
import sys
from typing import NoReturn

from harness.cli.commands import COMMANDS
from harness.cli.main import main
from harness.runtime.interrupts import keep_interrupts


def script() -> NoReturn:
    """Run the command of `sys.argv` and exit with its status."""
    keep_interrupts()
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS and COMMANDS[sys.argv[1]].one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    script()
