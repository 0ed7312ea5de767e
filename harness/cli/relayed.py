"""`python -m harness bench`, whose connections go by way of a relay that disturbs them:

python -m harness.cli.relayed '{"what": "torn", "whom": "queue", "size": 0.5, "go": "<file>"}' <settings>"""

import sys

import msgspec

import harness.runtime.local_runtime
from harness.acceptance.chaos.real import Told, relayed
from harness.cli import bench
from harness.cli.console import PlainTextConsole
from harness.cli.main import RESULTS, answered

if __name__ == "__main__":
    told = msgspec.json.decode(sys.argv[1], type=Told)
    harness.runtime.local_runtime.LocalRuntime = relayed(told)  # type: ignore[misc]
    sys.exit(answered(lambda: bench.run(sys.argv[2:], RESULTS, PlainTextConsole()), PlainTextConsole(stderr=True)))
