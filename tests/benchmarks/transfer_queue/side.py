"""One contestant, one round: starts its queue, runs the cases, stops it, and prints figures as JSON.

    python -m tests.benchmarks.transfer_queue.side peer [--quick] [case ...]

The interpreter is the contestant's own; `__main__` starts this once for each round.
"""

import argparse
import json

from tests.benchmarks.transfer_queue.cases import CASES, FULL, QUICK, WORKERS, Bench, Figures
from tests.benchmarks.transfer_queue.contract import contestant
from tests.benchmarks.transfer_queue.workers import Workers
from tests.benchmarks.transfer_queue.workload import FLOWS


def run(name: str, cases: list[str], quick: bool) -> dict[str, Figures]:
    side = contestant(name)
    address = side.start(FLOWS)
    try:
        workers = Workers(name, address, WORKERS)
        clients = {flow: side.connect(address, flow) for flow in FLOWS}
        try:
            bench = Bench(side, workers, clients, QUICK if quick else FULL)
            bench.warm()
            return {case: bench.run(case) for case in cases}
        finally:
            for client in clients.values():
                client.close()
            workers.close()
    finally:
        side.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_intermixed_args()
    print(json.dumps(run(given.contestant, given.cases, given.quick)))


if __name__ == "__main__":
    main()
