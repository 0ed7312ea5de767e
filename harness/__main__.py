"""`python -m harness <command> [settings]`; the Makefile is thin over this."""

from __future__ import annotations

import sys

from harness.cli.main import main
from harness.runtime.interrupts import spare_imports

if __name__ == "__main__":
    spare_imports()
    sys.exit(main(sys.argv[1:]))
