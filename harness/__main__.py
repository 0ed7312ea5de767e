"""`python -m harness <command> [options] [settings]`, or `cadence <command> ...`; the Makefile is thin over this."""

from __future__ import annotations

import sys
from typing import NoReturn

from harness.cli.main import main
from harness.runtime.interrupts import spare_imports


def script() -> NoReturn:
    """Run the command of `sys.argv` and exit with its status."""
    spare_imports()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    script()
