"""What one run does about roles that died, whatever its attempts are."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.driver import run
from harness.driver.restarts import GivenUp
from harness.runtime.runtime import WorkerDied


def test_a_run_that_what_is_left_has_no_room_for_says_what_was_lost_and_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [WorkerDied("actor[0] died during train: its host is gone"), ConfigError("Ray could not place 3 devices")]
    monkeypatch.setattr(run, "_attempt", Mock(side_effect=ends))

    with pytest.raises(GivenUp, match=r"actor\[0\] died.*could not place 3 devices; checkpoints are kept"):
        run.run_seed(compose_job(["checkpoint.every=1"]), Mock(), 0, tmp_path, Console())
