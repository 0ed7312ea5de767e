"""The service with a trainer and two engines that know nothing of Cadence: examples/service, as its page says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_LIMIT_S = 600
EXAMPLE = ROOT / "examples" / "service"


@contextmanager
def started(*command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone afterwards, and what it had in the temporary folder."""
    environment = os.environ | variables | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_foreign_trainer_and_foreign_engines_learn_over_http_within_the_bound(max_staleness: int) -> None:
    with started("-m", "harness", "serve", "port=0", CADENCE_TOKEN="a token") as service:
        assert service.stdout is not None
        told = service.stdout.readline()
        url = next(word for word in told.split() if word.startswith("http://127.0.0.1:"))
        variables = {"CADENCE_URL": url, "CADENCE_TOKEN": "a token"}
        trainer = started(f"{EXAMPLE}/trainer.py", "40", f"{max_staleness}", "a", "b", **variables)
        with trainer as trains, started(f"{EXAMPLE}/engine.py", "a", **variables) as a:
            with started(f"{EXAMPLE}/engine.py", "b", **variables) as b:
                said, _ = trains.communicate(timeout=_LIMIT_S)
                ended = [engine.communicate(timeout=_LIMIT_S)[0] for engine in (a, b)]
    assert (trains.returncode, a.returncode, b.returncode) == (0, 0, 0), [said, *ended]
    *batches, ledger = said.splitlines()
    rewards = [float(line.rpartition(" ")[2]) for line in batches]
    assert len(rewards) == 40 and sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.8
    found = json.loads(ledger.replace("'", '"'))
    assert found["loaded"] == found["trained"] == 40 * 128 and found["generated_untrained"] == 0
    lags = {int(lag): rows for lag, rows in found["lags"].items()}
    assert sum(lags.values()) == 40 * 128 and max(lags) <= max_staleness == found["worst_lag"]
