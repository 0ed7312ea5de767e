"""How faults are told: in a line that names them."""

import os
import signal
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from harness.cli.console import PlainTextConsole
from harness.cli.main import answered
from harness.driver.endings import storage_in
from harness.transfer_queue.control.spec import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.remote.process import QueueProcess


@pytest.mark.parametrize(
    "said", ["I/O error: No space left on device (os error 28)", "[Errno 28] Error writing bytes to file"]
)
def test_a_full_disk_is_read_from_what_libraries_say_of_it(said: str, tmp_path: Path) -> None:
    told = storage_in([SafetensorError(said)], tmp_path)
    assert told is not None and told.startswith(f"{tmp_path}: No space left on device: results cannot be written")


def test_a_wait_in_vain_and_sigterm_before_a_run_began_are_a_line_each(capfd: pytest.CaptureFixture[str]) -> None:
    def waits() -> int:
        raise ExceptionGroup("of a run", [TimeoutError("device[0] was not ready within 40.0 s"), TimeoutError()])

    def is_ended() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    console = PlainTextConsole(file=sys.stderr)
    assert answered(waits, console) == 1
    assert answered(is_ended, console) == 128 + signal.SIGTERM
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "device[0] was not ready within 40.0 s" and said[2].startswith("ended by SIGTERM; ")


def test_a_queue_that_dies_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nkill -TERM $$\n")
    os.chmod(tmp_path / "python", 0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    spec = QueueSpec({"reward": ColumnSpec("float32")}, {"train": TaskSpec(("reward",))})
    with pytest.raises(ConnectionError, match="the transfer queue was killed by signal 15 before it was ready"):
        QueueProcess.start(spec)
