"""`python -m harness <verb> [settings]`; the Makefile is thin over this."""

from __future__ import annotations

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
