"""For all tests: one thread for torch in every process, as the roles of a job have, unless the environment says more.

Two threads on two busy cores wait for each other in loops: some tests took fifty times their work.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
