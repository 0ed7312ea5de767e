"""Cadence and the peer in turn, on the same workload: prints ratios and the aims.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.transfer_queue --peer .venv-peer/bin/python [--quick] [--rounds 3]

peer: the interpreter of an environment with PyPI `TransferQueue` 0.1.11 (`make perf` makes it); without it, Cadence
alone. Each round starts every contestant anew, one after the other, so that nothing of the others runs meanwhile.
Figures also go to results/perf/transfer_queue.json.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.transfer_queue import control_cost
from tests.benchmarks.transfer_queue.cases import CASES, Figures
from tests.benchmarks.transfer_queue.machine import BUSY, wait_for_quiet
from tests.benchmarks.transfer_queue.report import PEER, SHM, print_table
from tests.support.project import ROOT

DEADLINE_S = 600.0
OTHERS = ("stream", "put 16", "get 16 1")  # cases of the other backends
QUICK = tuple(case for case in CASES if case not in ("stored 4096", "stored 100000", "put 8", "put 128"))


def run_side(python: str, name: str, cases: tuple[str, ...], quick: bool) -> dict[str, Figures]:
    """One round of one contestant, in a process of its own environment."""
    command = [python, "-m", "tests.benchmarks.transfer_queue.side", name, *cases, *(["--quick"] if quick else [])]
    # Ray's own niceness of 15 would hold its actors back behind the clients on a machine with few cores
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
    if name == PEER:
        settings |= {"TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_rounds(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    """Figures by round, contestant and case; cores that were busy before each of them began."""
    contestants = [(SHM, sys.executable), *((f"cadence:{name}", sys.executable) for name in given.backends)]
    if given.peer:
        contestants.insert(1, (PEER, given.peer))
    rounds, busy = [], []
    for number in range(given.rounds):
        figures: dict[str, Any] = {}
        for name, python in contestants if number % 2 == 0 else contestants[::-1]:
            busy.append(wait_for_quiet(given.patience))
            print(f"round {number + 1} of {given.rounds}: {name} ({busy[-1]:.2f} cores busy before)", file=sys.stderr)
            cases = OTHERS if name not in (SHM, PEER) else QUICK if given.quick else CASES
            figures[name] = run_side(python, name, tuple(given.cases or cases), given.quick)
        rounds.append({name: figures[name] for name, _ in contestants})
    return rounds, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="interpreter of the peer's environment")
    parser.add_argument("--quick", action="store_true", help="one short round: about a minute, figures are rough")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--backends", nargs="*", help="besides shm: ray (if not --quick), redis, inline")
    parser.add_argument("--cases", nargs="*", help="only these, such as 'stream' or 'put 16'")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for other work to stop, each time")
    parser.add_argument("--output", type=Path, default=Path("results/perf/transfer_queue.json"))
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    if given.backends is None:
        given.backends = [] if given.quick else ["ray"]
    control = control_cost.measure()
    rounds, busy = run_rounds(given)
    print_table(rounds, control)
    if max(busy) > BUSY:
        print(f"WARNING: other work kept up to {max(busy):.1f} of {os.cpu_count()} cores busy: all of this is rough")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    described = {"rounds": rounds, "busy_cores": busy, "control_us": control}
    given.output.write_text(json.dumps(described | {"quick": given.quick}, indent=1))
    print(f"figures: {given.output}")


if __name__ == "__main__":
    main()
