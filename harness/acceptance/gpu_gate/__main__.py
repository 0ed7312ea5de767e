"""Runs the gate on a machine without the rest of Cadence: python -m harness.acceptance.gpu_gate [device=cpu]
[parts=a,b] [force=true] [limit_s=590] [results=<folder>]. `make gate-gpu` is the same."""

import sys
from pathlib import Path

from harness.acceptance.gpu_gate.gate import run
from harness.config import ConfigError

NAMES = ("device", "parts", "force", "limit_s", "results")


def main() -> int:
    """Run the gate with the settings of the command line; returns its exit status."""
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    try:
        if unknown := [name for name in given if name not in NAMES]:
            raise ConfigError(f"{unknown[0]} is no setting of the gate; those are {', '.join(NAMES)}")
        return run(given, Path(given.get("results") or "results"), lambda line: print(line, flush=True))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
